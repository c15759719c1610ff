"""The persistent batch of the GPU sampler: each row's header and parameters, and how they change per step.

If the same requests come again, each text a token longer, a step costs a few comparisons and one upload. Only
rows that were added, moved or changed are built anew. Lists on the device (token counts, texts) live as long
as the `SamplerState` of their text. One `GpuSampler` serves one sampler, from one thread.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Collection, MutableMapping, Sequence
from dataclasses import dataclass
from operator import is_, itemgetter
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..kernels.launch import raw_stream
from ..kernels.sampling_layout import HEADER_OFFSETS, HEADER_WORDS
from ..sampler_chain import STATEFUL_STEPS
from .candidates import DrawnTokens
from .gpu_kernels import (
    HostTokens,
    KernelOutput,
    OutputBuffer,
    SamplingKernels,
    SamplingKernelVariant,
    SamplingLaunchKey,
    StagingRing,
    param_table,
    variant_of,
)
from .logits_processors import check_bias
from .penalties import PenaltyRule
from .request import SamplerState, SamplingRequest, StateRecord, StepState
from .settings import VERSION_STAMPS, CompiledSettings
from .vocabulary import SamplerVocabulary

MIN_COUNTS_CAPACITY = 256
NO_TOKEN = -1

TokenCountsWords = tuple[int, int, int, int, int, int]
"""The header's words "token_counts" and "new_counts"."""


class DeviceTokenCounts:
    """The last `sustain` tokens of a text (None: all of them) on the device, as pairs (token, count).

    `synced_length` is the length of the text that the pairs count after the kernels used the words so far.
    """

    def __init__(self, sustain: int | None, width: int, device: torch.device) -> None:
        """An empty list; ids that are not below `width` are left out."""
        self.sustain, self._width, self._device = sustain, width, device
        self.synced_length = -2  # not even of an empty text
        self._pairs: Tensor | None = None
        self._size_minus_length = self._capacity = self._address = 0

    @property
    def capacity_left(self) -> int:
        """How many more tokens fit."""
        return self._capacity - self._size_minus_length - self.synced_length

    def extend_words(self, history: Sequence[int]) -> TokenCountsWords:
        """The words for a text that grew by one token since `sync`."""
        length, sustain = len(history), self.sustain
        left = history[length - 1 - sustain] if sustain is not None and length > sustain else NO_TOKEN
        return self._address, self._size_minus_length + length, history[-1], left, 0, 0

    def sync(self, history: Sequence[int], extra: array[int], extra_start: int) -> TokenCountsWords:
        """The words for a text as it is now; a new list of pairs is appended to `extra`.

        `extra_start` is the index of the first word of `extra` in the upload.
        """
        length = len(history)
        if length == self.synced_length:
            return self._address, self._size_minus_length + length, NO_TOKEN, NO_TOKEN, 0, 0
        if length == self.synced_length + 1 and self.capacity_left > 0:
            return self.extend_words(history)
        start = 0 if self.sustain is None else max(0, length - self.sustain)
        ids, counts = np.unique(np.array(history[start:], np.int64), return_counts=True)
        in_vocab = (ids >= 0) & (ids < self._width)
        pairs = np.stack((ids[in_vocab], counts[in_vocab]), 1)
        self._capacity = MIN_COUNTS_CAPACITY << (2 * len(pairs) // MIN_COUNTS_CAPACITY).bit_length()
        self._pairs = torch.full((self._capacity, 2), NO_TOKEN, dtype=torch.int32, device=self._device)
        self._address, self._size_minus_length = self._pairs.data_ptr(), len(pairs) - length
        self.synced_length = length
        list_start = extra_start + len(extra)
        extra.frombytes(pairs.tobytes())
        return self._address, len(pairs), NO_TOKEN, NO_TOKEN, list_start, len(pairs)


MIN_HISTORY_CAPACITY = 1024
OUT_OF_VOCAB = -1  # stands for every id that the vocabulary does not have

TokenHistoryWords = tuple[int, int, int]
"""The header's words "history"."""


class DeviceTokenHistory:
    """A text on the device, as int32 ids.

    `synced_length` is the length of the text on the device after the kernels used the words so far.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        """An empty text; ids that are not below `width` become OUT_OF_VOCAB."""
        self._width, self._device = width, device
        self.synced_length = 0
        self._ids: Tensor | None = None
        self._capacity = self._address = 0

    @property
    def capacity_left(self) -> int:
        """How many more tokens fit."""
        return self._capacity - self.synced_length

    def sync(self, history: Sequence[int], extra: array[int], extra_start: int) -> TokenHistoryWords:
        """The words for a text as it is now; copies all tokens that the device lacks but the last one."""
        length = len(history)
        if length > self._capacity or self._ids is None:
            self._capacity = max(MIN_HISTORY_CAPACITY, 1 << (2 * length - 1).bit_length())
            self._ids = torch.empty(self._capacity, dtype=torch.int32, device=self._device)
            self._address, self.synced_length = self._ids.data_ptr(), 0
        if length > self.synced_length + 1:
            ids = np.array(history[self.synced_length :], np.int64)
            ids[(ids < 0) | (ids >= self._width)] = OUT_OF_VOCAB
            host_ids = torch.from_numpy(ids.astype(np.int32))
            if self._device.type == "cuda":
                host_ids = host_ids.pin_memory()
            self._ids[self.synced_length : length].copy_(host_ids, non_blocking=True)
        self.synced_length = length
        return self._address, length, history[-1] if length else OUT_OF_VOCAB


IMMUTABLE_TYPES = (tuple, frozenset)
UNTRACKED_VERSION = -1  # of a bias whose changes torch does not count


@dataclass(eq=False)
class RowParams:
    """What stays the same from token to token of one row: compiled settings, header, tensors it points to.

    `blocked_ids` are those within the vocabulary; `mutable_blocked` are all, if they may change in place.
    """

    version_stamps: tuple[object, object, object]
    compiled: CompiledSettings
    header: bytes
    blocked_ids: tuple[int, ...]
    mutable_blocked: tuple[int, ...] | None
    bias: Tensor | None
    bias_version: int
    referenced_tensors: tuple[Tensor | None, ...]
    token_counts: DeviceTokenCounts | None
    token_history: DeviceTokenHistory | None

    @property
    def edits_logits(self) -> bool:
        """Whether the row's logits change before they become probabilities."""
        compiled = self.compiled
        return bool(compiled.penalty_rule or compiled.dry_rule or self.blocked_ids or self.bias is not None)

    def is_valid(self, request: SamplingRequest) -> bool:
        """Whether the parameters are still those of a request."""
        request_stamp, settings_stamp, state_stamp = self.version_stamps
        return (
            request_stamp is request.version_stamp
            and settings_stamp is request.settings.version_stamp
            and state_stamp is request.state.version_stamp
            and (self.mutable_blocked is None or self.mutable_blocked == tuple(request.blocked))
            and (self.bias is None or is_unchanged(self.bias, self.bias_version))
        )


class RowParamsBuilder:
    """Makes `RowParams` for rows of one vocabulary on one device."""

    def __init__(self, vocabulary: SamplerVocabulary, width: int, device: torch.device) -> None:
        self.vocabulary, self.width, self.device = vocabulary, width, device
        self._biases: MutableMapping[Tensor, tuple[Tensor, int]] = WeakTensorKeyDictionary()

    def build(self, request: SamplingRequest, previous: RowParams | None) -> RowParams:
        """The parameters of a request; those of the same text before lend their lists on the device."""
        settings, state = request.settings, request.state
        compiled = settings.compiled()
        seed, rewind_count = state.philox_words()
        header = [0] * HEADER_WORDS
        header[HEADER_OFFSETS["seed"]], header[HEADER_OFFSETS["seed"] + 2] = seed, rewind_count
        header[HEADER_OFFSETS["token_counts"] + 2] = header[HEADER_OFFSETS["token_counts"] + 3] = NO_TOKEN
        if "mirostat" in compiled.stateful_steps:
            mu = state.step_state("mirostat").initial or STATEFUL_STEPS["mirostat"](compiled.params)
            (header[HEADER_OFFSETS["initial_mu"]],) = struct.unpack("q", struct.pack("d", mu))
        bias = settings.token_bias
        device_bias, version = (None, 0) if bias is None else self._device_bias(bias)
        xtc_exempt_mask = breaker_mask = None
        if "xtc" in compiled.steps:
            xtc_exempt_mask = self._mask(self.vocabulary.xtc_exempt_ids_of(compiled))
        if compiled.dry_rule is not None:
            breaker_mask = self._mask(self.vocabulary.dry_breaker_ids_of(compiled.dry_rule))
        tensors = {"bias": device_bias, "xtc_exempt": xtc_exempt_mask, "dry_breakers": breaker_mask}
        for name, tensor in tensors.items():
            header[HEADER_OFFSETS[name]] = 0 if tensor is None else tensor.data_ptr()
        reusable = previous if previous and previous.version_stamps[2] is state.version_stamp else None
        version_stamps = (request.version_stamp, settings.version_stamp, state.version_stamp)
        blocked = tuple(request.blocked)
        return RowParams(
            version_stamps=version_stamps,
            compiled=compiled,
            header=struct.pack(f"{HEADER_WORDS}q", *header),
            blocked_ids=tuple(token for token in blocked if 0 <= token < self.width),
            mutable_blocked=None if isinstance(request.blocked, IMMUTABLE_TYPES) else blocked,
            bias=bias,
            bias_version=version,
            referenced_tensors=tuple(tensors.values()),
            token_counts=self._token_counts(compiled, reusable),
            token_history=self._token_history(compiled, reusable),
        )

    def _token_counts(self, compiled: CompiledSettings, previous: RowParams | None) -> DeviceTokenCounts | None:
        rule = compiled.penalty_rule
        if rule is None or rule.decays:
            return None
        old = None if previous is None else previous.token_counts
        if old is not None and old.sustain == rule.sustain:
            return old
        return DeviceTokenCounts(rule.sustain, self.width, self.device)

    def _token_history(self, compiled: CompiledSettings, previous: RowParams | None) -> DeviceTokenHistory | None:
        if compiled.dry_rule is None:
            return None
        old = None if previous is None else previous.token_history
        return old or DeviceTokenHistory(self.width, self.device)

    def _mask(self, ids: frozenset[int]) -> Tensor | None:
        return self.vocabulary.mask(ids, self.width, self.device) if ids else None

    def _device_bias(self, bias: Tensor) -> tuple[Tensor, int]:
        """A bias on the device, sent again only if it was changed, and its version."""
        check_bias(bias, self.width)
        version = tensor_version(bias)
        cached = self._biases.get(bias)
        if cached is None or version == UNTRACKED_VERSION or cached[1] != version:
            device_bias = bias.detach().to(self.device, torch.float32, copy=True).contiguous()
            cached = self._biases[bias] = (device_bias, version)
        return cached


def tensor_version(bias: Tensor) -> int:
    """A number that changes whenever a tensor does; UNTRACKED_VERSION if torch keeps none."""
    return UNTRACKED_VERSION if bias.is_inference() else bias._version


def is_unchanged(bias: Tensor, version: int) -> bool:
    """Whether a bias has certainly not changed since a version."""
    return tensor_version(bias) == version != UNTRACKED_VERSION


def is_device_mask(allowed: Tensor | Collection[int] | None) -> bool:
    """Whether a mask is on a device, where the host cannot pack it into the upload."""
    return isinstance(allowed, Tensor) and allowed.device.type != "cpu"


POSITION_OFFSET, BLOCKED_OFFSET = HEADER_OFFSETS["seed"] + 1, HEADER_OFFSETS["blocked"]
MU_OFFSET, DECAY_OFFSET = HEADER_OFFSETS["mu"], HEADER_OFFSETS["decaying"]
ALLOWED_OFFSET = HEADER_OFFSETS["allowed"]
COUNTS_OFFSET, NEW_COUNTS_OFFSET = HEADER_OFFSETS["token_counts"], HEADER_OFFSETS["new_counts"]
ENTERED_OFFSET, LEFT_OFFSET = COUNTS_OFFSET + 2, COUNTS_OFFSET + 3
HISTORY_OFFSET, LAST_TOKEN_OFFSET = HEADER_OFFSETS["history"], HEADER_OFFSETS["history"] + 2
WORD_BYTES = 8
LAST_ITEM = itemgetter(-1)


class RowHeaders(NamedTuple):
    """The headers of some rows (rows, HEADER_WORDS), and how many words precede `extra` in the upload."""

    words: NDArray[np.int64]
    num_words: int


class HistoryWriter:
    """Writes the headers' words of lists on the device that follow the texts, such as the texts themselves.

    If every text grew by one token, only the column of last tokens is written; the rest of the words is
    prepared right after the launch before, while the device works.
    """

    first_offset, size_offset, last_token_offset, end_offset = (
        HISTORY_OFFSET,
        HISTORY_OFFSET + 1,
        LAST_TOKEN_OFFSET,
        LAST_TOKEN_OFFSET + 1,
    )

    def __init__(
        self,
        headers: RowHeaders,
        rows: list[int],
        lists: Sequence[DeviceTokenHistory | DeviceTokenCounts],
        histories: list[list[int]],
    ) -> None:
        self._words, self._size = headers
        self._lists, self._histories = lists, histories
        self._rows = row_index(rows, headers)
        self._capacity_left = 0
        # The last tokens are packed into bytes first, because numpy is slow with lists.
        self._pack_tokens = struct.Struct(f"{len(rows)}q").pack_into
        self._token_bytes = bytearray(WORD_BYTES * len(rows))
        self._tokens = np.frombuffer(self._token_bytes, np.int64)

    def write(self, grew_by_one: bool, extra: array[int]) -> None:
        """Write the words; `grew_by_one` if every text is one token longer than before, so none is empty."""
        if grew_by_one and self._capacity_left > 0:
            self._pack_tokens(self._token_bytes, 0, *map(LAST_ITEM, self._histories))
            self._words[self._rows, self.last_token_offset] = self._tokens
            return
        self._words[self._rows, self.first_offset : self.end_offset] = [
            each.sync(history, extra, self._size) for each, history in zip(self._lists, self._histories, strict=True)
        ]
        self._capacity_left = 0

    def after_launch(self) -> None:
        """Prepare the next write; what was written was uploaded."""
        for each, history in zip(self._lists, self._histories, strict=True):
            each.synced_length = len(history)
        if self._capacity_left > 0:
            self._capacity_left -= 1
        else:
            self._capacity_left = min([each.capacity_left for each in self._lists])
        self._words[self._rows, self.size_offset] += 1


class PenaltyWriter(HistoryWriter):
    """Writes which token entered the penalised tokens of each text, and which one left them."""

    first_offset, size_offset, last_token_offset, end_offset = (
        COUNTS_OFFSET,
        COUNTS_OFFSET + 1,
        ENTERED_OFFSET,
        NEW_COUNTS_OFFSET + 2,
    )

    def __init__(
        self, headers: RowHeaders, rows: list[int], counts: Sequence[DeviceTokenCounts], histories: list[list[int]]
    ) -> None:
        super().__init__(headers, rows, counts, histories)
        members = list(zip(rows, histories, counts, strict=True))
        self._windows = [(row, history, each.sustain) for row, history, each in members if each.sustain]
        self._empty_windows = [row for row, _, each in members if each.sustain == 0]

    def write(self, grew_by_one: bool, extra: array[int]) -> None:
        """Write the words; with an empty window a token leaves as it enters."""
        super().write(grew_by_one, extra)
        if self._capacity_left > 0 and self._empty_windows:
            self._words[self._empty_windows, LEFT_OFFSET] = self._words[self._empty_windows, ENTERED_OFFSET]

    def after_launch(self) -> None:
        """Prepare the next write: which token leaves each window."""
        if self._capacity_left <= 0:
            self._words[self._rows, NEW_COUNTS_OFFSET + 1] = 0
        super().after_launch()
        for row, history, sustain in self._windows:
            self._words[row, LEFT_OFFSET] = history[-sustain] if len(history) >= sustain else NO_TOKEN


class DecayWriter:
    """Writes the penalised tokens of rows whose penalties decay, which change with every token."""

    def __init__(self, headers: RowHeaders, members: Sequence[tuple[int, SamplerState, PenaltyRule]]) -> None:
        self._headers, self._members = headers, members

    def write(self, extra: array[int]) -> None:
        """Write the tokens, their counts and their strengths."""
        for row, state, rule in self._members:
            penalized = state.penalized_tokens(rule)
            count = len(penalized.ids)
            start = self._headers.num_words + len(extra)
            self._headers.words[row, DECAY_OFFSET : DECAY_OFFSET + 2] = start, count
            extra.extend(penalized.ids)
            for values in (penalized.counts, penalized.strengths or (1.0,) * count):
                extra.frombytes(array("d", values).tobytes())  # the bits of float64 numbers


class MaskWriter:
    """Writes the allowed tokens of rows that have a mask, for each token again."""

    def __init__(self, headers: RowHeaders, requests: Sequence[SamplingRequest], width: int) -> None:
        self._headers, self._requests, self._width = headers, requests, width
        self._written = False

    def write(self, has_masks: bool, extra: array[int]) -> bool:
        """Write where the bits of each row's mask are; whether any row has one."""
        words, size = self._headers
        if self._written:
            words[:, ALLOWED_OFFSET] = 0
            self._written = False
        for row, request in enumerate(self._requests) if has_masks else ():
            if request.allowed is not None:
                words[row, ALLOWED_OFFSET] = size + len(extra)
                extra.extend(pack_allowed(request.allowed, self._width))
                self._written = True
        return self._written


class MuWriter:
    """Writes the addresses of mirostat's targets."""

    def __init__(self, headers: RowHeaders, members: Sequence[tuple[int, StepState]], device: torch.device) -> None:
        self._words, self._members, self._device = headers.words, members, device
        row_numbers = [row for row, _ in members]
        self._rows, self._offsets = row_index(row_numbers, headers), np.array(row_numbers) * WORD_BYTES
        self._records = [state.records for _, state in members]
        self._keep_alive: list[Tensor] = []
        self._last_records: list[StateRecord] = []

    def write(self, grew_by_one: bool, positions: Sequence[int]) -> None:
        """Write the address of the target for each position; `grew_by_one` if each is the next position."""
        if grew_by_one and all(map(is_, [records[-1] for records in self._records], self._last_records)):
            return
        self._keep_alive.clear()
        previous_mus, base = None, 0
        addresses = [0] * len(self._members)
        for i, (row, state) in enumerate(self._members):
            record = state.record_before(positions[row])
            if record is not None:
                _, mus, index = record
                if mus is not previous_mus:
                    previous_mus, base = mus, self._address_of(mus)
                addresses[i] = base + WORD_BYTES * index
        self._words[self._rows, MU_OFFSET] = addresses

    def _address_of(self, mus: Tensor) -> int:
        if mus.device != self._device:
            mus = mus.to(self._device, non_blocking=True)
        self._keep_alive.append(mus)  # it must live until it was read
        return mus.data_ptr()

    def after_launch(self, positions: Sequence[int], mus: Tensor) -> None:
        """Record the new targets, and write their addresses for the next tokens."""
        self._last_records = [state.record(positions[row], mus, row) for row, state in self._members]
        self._words[self._rows, MU_OFFSET] = mus.data_ptr() + self._offsets


def row_index(row_numbers: list[int], headers: RowHeaders) -> slice | list[int]:
    """Some rows as an index; a slice, which is faster, if it is all of them."""
    return slice(None) if len(row_numbers) == len(headers.words) else row_numbers


def pack_allowed(allowed: Tensor | Collection[int], width: int) -> array[int]:
    """Allowed tokens as a mask of bits in words of 64, long enough for the vocabulary."""
    packed = np.zeros(-(-width // 64) * 8, np.uint8)
    if isinstance(allowed, Tensor) and allowed.dtype == torch.int32:
        known = allowed.contiguous().numpy().view(np.uint8)
    else:
        mask = np.zeros(width, bool)
        if isinstance(allowed, Tensor) and allowed.dtype == torch.bool:
            mask[: len(allowed)] = allowed.numpy()[:width]
        else:
            ids: Collection[int] = allowed.tolist() if isinstance(allowed, Tensor) else allowed
            mask[[token for token in ids if 0 <= token < width]] = True
        known = np.packbits(mask, bitorder="little")
    packed[: len(known)] = known[: len(packed)]
    return array("q", packed.tobytes())


class KernelGroup:
    """The rows of a batch that one kernel variant serves."""

    def __init__(
        self,
        variant: SamplingKernelVariant,
        num_top: int,
        batch_indices: list[int],
        requests: Sequence[SamplingRequest],
        row_params: Sequence[RowParams],
        builder: RowParamsBuilder,
    ) -> None:
        """`batch_indices` are those of the rows' logits; `num_top` top tokens are requested."""
        self.batch_indices = batch_indices
        self._row_params = row_params  # keeps alive what the headers point to
        count = len(requests)
        blocked = [token for params in row_params for token in params.blocked_ids]
        self._packed = np.empty(count * HEADER_WORDS + len(blocked), np.int64)
        self._headers = headers = self._packed[: count * HEADER_WORDS].reshape(count, HEADER_WORDS)
        headers.reshape(-1)[:] = np.frombuffer(b"".join([params.header for params in row_params]), np.int64)
        headers[:, HEADER_OFFSETS["batch_index"]] = batch_indices
        self._packed[count * HEADER_WORDS :] = blocked
        headers[:, BLOCKED_OFFSET + 1] = counts = np.array([len(params.blocked_ids) for params in row_params])
        headers[:, BLOCKED_OFFSET] = count * HEADER_WORDS + counts.cumsum() - counts
        self._param_table = param_table(tuple([params.compiled for params in row_params]), builder.device)
        edits_logits = any([params.edits_logits for params in row_params])
        updates_mu = any(["mirostat" in params.compiled.stateful_steps for params in row_params])
        uses_dry = any([params.token_history is not None for params in row_params])
        self._launch_key = SamplingLaunchKey(count, variant, num_top, edits_logits, updates_mu, uses_dry)
        self._states = [request.state for request in requests]
        self._histories = [
            state.history if request.history is None else request.history
            for request, state in zip(requests, self._states, strict=True)
        ]
        self._next_positions: list[int] = []
        self._create_writers(requests, row_params, builder)

    def _create_writers(
        self, requests: Sequence[SamplingRequest], row_params: Sequence[RowParams], builder: RowParamsBuilder
    ) -> None:
        """Create the writers that the rows need."""
        headers, texts = (RowHeaders(self._headers, len(self._packed)), [state.history for state in self._states])
        counts = {i: params.token_counts for i, params in enumerate(row_params) if params.token_counts}
        histories = {i: params.token_history for i, params in enumerate(row_params) if params.token_history}
        decaying = [
            (i, self._states[i], params.compiled.penalty_rule)
            for i, params in enumerate(row_params)
            if params.compiled.penalty_rule is not None and params.token_counts is None
        ]
        mu_states = [
            (i, self._states[i].step_state("mirostat"))
            for i, params in enumerate(row_params)
            if "mirostat" in params.compiled.stateful_steps
        ]
        self._mask_writer = MaskWriter(headers, requests, builder.width)
        self._decay_writer = DecayWriter(headers, decaying) if decaying else None
        self._mu_writer = MuWriter(headers, mu_states, builder.device) if mu_states else None
        self._list_writers: list[HistoryWriter] = []
        if counts:
            rows = [*counts]
            self._list_writers.append(PenaltyWriter(headers, rows, [*counts.values()], [texts[i] for i in rows]))
        if histories:
            rows = [*histories]
            self._list_writers.append(HistoryWriter(headers, rows, [*histories.values()], [texts[i] for i in rows]))

    def launch(
        self, x: Tensor, kernels: SamplingKernels, staging_ring: StagingRing, has_masks: bool, output: OutputBuffer
    ) -> KernelOutput:
        """Launch the kernels for the rows, on the whole batch's logits; `has_masks` if any row has a mask."""
        positions = list(map(len, self._histories))
        grew_by_one = positions == self._next_positions
        if not grew_by_one:
            self._headers[:, POSITION_OFFSET] = positions
        extra = array("q")
        for writer in self._list_writers:
            writer.write(grew_by_one, extra)
        if self._decay_writer is not None:
            self._decay_writer.write(extra)
        key = self._launch_key
        if self._mask_writer.write(has_masks, extra) and not key.edits_logits:
            key = key._replace(edits_logits=True)
        if self._mu_writer is not None:
            self._mu_writer.write(grew_by_one, positions)
        kernel_output = kernels.draw(x, self._param_table, staging_ring.upload(self._packed, extra), key, output)
        self._after_launch(positions, kernel_output.mus)
        return kernel_output

    def select_rows(self, values: Tensor) -> Tensor:
        """The values of the group's rows, from those of the batch."""
        return values[torch.tensor(self.batch_indices).to(values.device, non_blocking=True)]

    def _after_launch(self, positions: list[int], mus: Tensor) -> None:
        """Prepare for the next tokens, while the device works."""
        self._headers[:, POSITION_OFFSET] += 1
        self._next_positions = [position + 1 for position in positions]
        for writer in self._list_writers:
            writer.after_launch()
        if self._mu_writer is not None:
            self._mu_writer.after_launch(positions, mus)
        for state, position in zip(self._states, positions, strict=True):
            if position > state.last_drawn_position:
                state.last_drawn_position = position


class GpuBatch:
    """The rows of a batch in groups by kernel variant, and the indices of those that torch must sample.

    `all_argmax` says that every request takes the largest logit; then there are no groups. `has_masks` says
    that a row has a mask now.
    """

    def __init__(
        self, requests: Sequence[SamplingRequest], row_params: Sequence[RowParams], builder: RowParamsBuilder
    ) -> None:
        self.num_rows = len(requests)
        self.uses_cfg = any([request.uses_cfg for request in requests])
        self.num_top = min(builder.width, max([request.num_top_tokens for request in requests]))
        self.all_argmax = all([request.takes_argmax for request in requests])
        self._mask_stamp, self.has_masks = VERSION_STAMPS.latest_mask_change, _any_masked(requests)
        self.groups: list[KernelGroup] = []
        self.fallback_rows: list[int] = []
        self.may_overflow = False
        self._latest_stamp = VERSION_STAMPS.latest
        self._requests = list(requests)
        self._states = [request.state for request in requests]
        self._settings = list(dict.fromkeys([request.settings for request in requests]))
        self._version_stamps = self._current_stamps()
        self._own_histories = list(filter(_has_own_history, requests))
        self._blocked = [
            (request, params.mutable_blocked)
            for request, params in zip(requests, row_params, strict=True)
            if params.mutable_blocked is not None
        ]
        self._biases = {
            id(params.bias): (params.bias, params.bias_version) for params in row_params if params.bias is not None
        }
        if not self.all_argmax:
            self._group_by_variant(requests, row_params, builder)

    def _group_by_variant(
        self, requests: Sequence[SamplingRequest], row_params: Sequence[RowParams], builder: RowParamsBuilder
    ) -> None:
        variants: dict[SamplingKernelVariant, list[int]] = {}
        for index, (request, params) in enumerate(zip(requests, row_params, strict=True)):
            variant = variant_of(params.compiled, builder.width, self.num_top)
            if variant is None or is_device_mask(request.allowed):
                self.fallback_rows.append(index)
            else:
                variants.setdefault(variant, []).append(index)
        self.groups = [
            KernelGroup(
                variant,
                self.num_top,
                indices,
                [requests[i] for i in indices],
                [row_params[i] for i in indices],
                builder,
            )
            for variant, indices in variants.items()
        ]
        self.may_overflow = any(variant.full_vocab and variant.all_steps for variant in variants)

    def is_current(self, requests: Sequence[SamplingRequest]) -> bool:
        """Whether requests are those of the batch, in its order, and nothing changed but that texts grew."""
        if list(requests) != self._requests:
            return False
        for request in self._own_histories:
            request.sync_history()
        last = VERSION_STAMPS.latest
        if last is not self._latest_stamp and self._current_stamps() != self._version_stamps:
            return False
        self._latest_stamp = last
        masks = VERSION_STAMPS.latest_mask_change
        if masks is not self._mask_stamp:
            self._mask_stamp, self.has_masks = masks, _any_masked(requests)
        if self.has_masks and (self.all_argmax or any([is_device_mask(request.allowed) for request in requests])):
            return False
        for request, blocked in self._blocked:
            if tuple(request.blocked) != blocked:
                return False
        return all([is_unchanged(bias, version) for bias, version in self._biases.values()])

    def _current_stamps(self) -> list[object]:
        """The version stamps of everything the batch was made of."""
        stamps = [request.version_stamp for request in self._requests]
        stamps += [state.version_stamp for state in self._states]
        return stamps + [settings.version_stamp for settings in self._settings]


class GpuSampler:
    """Samples batches with the kernels."""

    def __init__(self, vocabulary: SamplerVocabulary) -> None:
        self._vocabulary = vocabulary
        self._placement: tuple[int, torch.device, int] | None = None
        self.reset()

    def reset(self) -> None:
        """Drop the batch and everything on the device."""
        self._batch: GpuBatch | None = None
        self._cached_rows: WeakKeyDictionary[SamplerState, RowParams] = WeakKeyDictionary()

    def prepare(self, requests: Sequence[SamplingRequest], width: int, device: torch.device) -> GpuBatch:
        """The batch of some requests; the previous one if it is current."""
        placement = (width, device, raw_stream(device))
        if placement != self._placement:
            self.reset()
            self._params_builder = RowParamsBuilder(self._vocabulary, width, device)
            self._kernels = SamplingKernels(width, device, placement[2])
            self._staging_ring = StagingRing(device, placement[2])
            self._placement = placement
        batch = self._batch
        if batch is None or not batch.is_current(requests):
            self._batch = None
            batch = GpuBatch(requests, self._row_params(requests), self._params_builder)
            self._batch = batch
        return batch

    def launch(self, x: Tensor, batch: GpuBatch) -> tuple[list[tuple[list[int], DrawnTokens]], HostTokens | None]:
        """The tokens of a batch's groups, each with its batch indices, from logits (rows, width).

        They come as one part, and as host tokens too, unless torch samples other rows or several groups have
        top tokens.
        """
        kernels, staging_ring, has_masks = self._kernels, self._staging_ring, batch.has_masks
        output = kernels.next_output(batch.num_rows)
        try:
            if batch.all_argmax:
                kernels.greedy(x, output)
                outputs = []
            else:
                outputs = [group.launch(x, kernels, staging_ring, has_masks, output) for group in batch.groups]
            kernels.record_done()
        except BaseException:
            self.reset()  # the device may lack the last upload
            raise
        tokens, probs = output.tokens, output.probs
        if batch.fallback_rows or (batch.num_top and len(outputs) > 1):
            parts = []
            for group, (_, *tops) in zip(batch.groups, outputs, strict=True):
                drawn = DrawnTokens(group.select_rows(tokens), group.select_rows(probs), *tops)
                parts.append((group.batch_indices, drawn))
            return parts, None
        drawn = DrawnTokens(tokens, probs, *(outputs[0][1:] if batch.num_top else ()))
        return [([], drawn)], output.host_tokens

    def _row_params(self, requests: Sequence[SamplingRequest]) -> list[RowParams]:
        """The parameters of each request: those it had if they are still valid."""
        row_params: list[RowParams] = []
        used_states: set[SamplerState] = set()
        for request in requests:
            if _has_own_history(request):
                request.sync_history()
        for request in requests:
            state = request.state
            # The lists on the device of a state follow one row: another row of it gets its own.
            params = None if state in used_states else self._cached_rows.get(state)
            if params is None or not params.is_valid(request):
                params = self._params_builder.build(request, params)
                if state not in used_states:
                    self._cached_rows[state] = params
            used_states.add(state)
            row_params.append(params)
        return row_params


def _any_masked(requests: Sequence[SamplingRequest]) -> bool:
    return [request.allowed for request in requests].count(None) < len(requests)


def _has_own_history(request: SamplingRequest) -> bool:
    """Whether a request brings its own text, and its settings read it."""
    return request.history is not None and request.settings.compiled().reads_history
