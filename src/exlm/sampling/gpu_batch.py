"""The persistent batch of the GPU sampler: what the kernels must be told of each row, and what changed since.

A batch that comes again, each text a token longer, costs a few comparisons and one upload. Only rows that
were added, moved or changed are read again. What is kept of a text lives as long as its `SamplerState`. One
`GpuSampler` serves one sampler, from one thread.
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

from ..kernels.sampling_layout import HEADER_OFFSETS, HEADER_WORDS
from ..kernels.triton_launch import raw_stream
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
    """The last `sustain` tokens of a text (None: all of them) on the device, as pairs of a token and its
    count.

    `synced_length` is the length of the text that the pairs stand for once the words given so far were used.
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

    `synced_length` is the length of the text that the device has once the words given so far were used.
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

    def sync(self, history: Sequence[int]) -> TokenHistoryWords:
        """The words for a text as it is now; copies what the device lacks, but for the last token."""
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
    """What does not change from token to token of one row: compiled settings, the header, what it points to.

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
        """Whether nothing of this has changed for a request."""
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
        """The parameters of a request; the device lists of the previous ones are reused for the same text."""
        settings, state = request.settings, request.state
        compiled = settings.compiled()
        seed, branch = state.philox_words()
        header = [0] * HEADER_WORDS
        header[HEADER_OFFSETS["seed"]], header[HEADER_OFFSETS["seed"] + 2] = seed, branch
        header[HEADER_OFFSETS["token_counts"] + 2] = header[HEADER_OFFSETS["token_counts"] + 3] = NO_TOKEN
        if "mirostat" in compiled.stateful_steps:
            mu = state.step_state("mirostat").initial or STATEFUL_STEPS["mirostat"](compiled.params)
            (header[HEADER_OFFSETS["initial_mu"]],) = struct.unpack("q", struct.pack("d", mu))
        bias = settings.token_bias
        device_bias, version = (None, 0) if bias is None else self._device_bias(bias)
        xtc_exempt_mask = self._xtc_exempt_mask(compiled)
        header[HEADER_OFFSETS["bias"]] = 0 if device_bias is None else device_bias.data_ptr()
        header[HEADER_OFFSETS["xtc_exempt"]] = 0 if xtc_exempt_mask is None else xtc_exempt_mask.data_ptr()
        breaker_mask = self._breaker_mask(compiled)
        header[HEADER_OFFSETS["dry_breakers"]] = 0 if breaker_mask is None else breaker_mask.data_ptr()
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
            referenced_tensors=(device_bias, xtc_exempt_mask, breaker_mask),
            token_counts=self._token_counts(compiled, reusable),
            token_history=self._token_history(compiled, reusable),
        )

    def _token_counts(
        self, compiled: CompiledSettings, previous: RowParams | None
    ) -> DeviceTokenCounts | None:
        rule = compiled.penalty_rule
        if rule is None or rule.decays:
            return None
        old = None if previous is None else previous.token_counts
        if old is not None and old.sustain == rule.sustain:
            return old
        return DeviceTokenCounts(rule.sustain, self.width, self.device)

    def _token_history(
        self, compiled: CompiledSettings, previous: RowParams | None
    ) -> DeviceTokenHistory | None:
        if compiled.dry_rule is None:
            return None
        old = None if previous is None else previous.token_history
        return old or DeviceTokenHistory(self.width, self.device)

    def _xtc_exempt_mask(self, compiled: CompiledSettings) -> Tensor | None:
        """The tokens that XTC never excludes."""
        if "xtc" not in compiled.steps:
            return None
        return self._mask(
            self.vocabulary.xtc_exempt_ids if compiled.xtc_exempt_ids is None else compiled.xtc_exempt_ids
        )

    def _breaker_mask(self, compiled: CompiledSettings) -> Tensor | None:
        """The tokens that end a repetition."""
        if compiled.dry_rule is None:
            return None
        return self._mask(
            self.vocabulary.dry_breaker_ids
            if compiled.dry_rule.breaker_ids is None
            else compiled.dry_rule.breaker_ids
        )

    def _mask(self, ids: frozenset[int]) -> Tensor | None:
        return self.vocabulary.mask(ids, self.width, self.device) if ids else None

    def _device_bias(self, bias: Tensor) -> tuple[Tensor, int]:
        """A bias on the device, sent again only if it was changed, and its version."""
        check_bias(bias, self.width)
        version = tensor_version(bias)
        known = self._biases.get(bias)
        if known is None or version == UNTRACKED_VERSION or known[1] != version:
            device_bias = bias.detach().to(self.device, torch.float32, copy=True).contiguous()
            known = self._biases[bias] = (device_bias, version)
        return known


def tensor_version(bias: Tensor) -> int:
    """A number that changes whenever a tensor does; UNTRACKED_VERSION if torch keeps none."""
    return UNTRACKED_VERSION if bias.is_inference() else bias._version


def is_unchanged(bias: Tensor, version: int) -> bool:
    """Whether a bias has certainly not changed since a version."""
    return tensor_version(bias) == version != UNTRACKED_VERSION


def is_device_mask(allowed: Tensor | Collection[int] | None) -> bool:
    """Whether a mask is on a device, where the host cannot pack it into the upload."""
    return isinstance(allowed, Tensor) and allowed.device.type != "cpu"


MU_OFFSET, DECAY_OFFSET, ALLOWED_OFFSET = (
    HEADER_OFFSETS["mu"],
    HEADER_OFFSETS["decaying"],
    HEADER_OFFSETS["allowed"],
)
COUNTS_OFFSET, NEW_COUNTS_OFFSET = HEADER_OFFSETS["token_counts"], HEADER_OFFSETS["new_counts"]
COUNTS_SIZE_OFFSET, ENTERED_OFFSET, LEFT_OFFSET = COUNTS_OFFSET + 1, COUNTS_OFFSET + 2, COUNTS_OFFSET + 3
HISTORY_OFFSET, LAST_TOKEN_OFFSET = HEADER_OFFSETS["history"], HEADER_OFFSETS["history"] + 2
WORD_BYTES = 8  # bytes
LAST_ITEM = itemgetter(-1)


class RowHeaders(NamedTuple):
    """The headers of some rows (rows, HEADER_WORDS), and how many words precede `extra` in the upload."""

    words: NDArray[np.int64]
    num_words: int


class CountedRow(NamedTuple):
    """A row whose penalised tokens are counted on the device."""

    row: int
    counts: DeviceTokenCounts
    history: list[int]


class HistoryRow(NamedTuple):
    """A row whose text is on the device."""

    row: int
    device_history: DeviceTokenHistory
    history: list[int]


class LastTokenWriter:
    """Writes the last token of each text into one column; packed first, because numpy is slow with lists."""

    def __init__(
        self, headers: RowHeaders, row_numbers: list[int], column: int, histories: list[list[int]]
    ) -> None:
        self._words, self._histories = headers.words, histories
        self._target_cells = row_index(row_numbers, headers), column
        self._pack, self._bytes = (
            struct.Struct(f"{len(histories)}q").pack_into,
            bytearray(WORD_BYTES * len(histories)),
        )
        self._tokens = np.frombuffer(self._bytes, np.int64)

    def write(self) -> None:
        """Write them; no text is empty."""
        self._pack(self._bytes, 0, *map(LAST_ITEM, self._histories))
        self._words[self._target_cells] = self._tokens


class PenaltyWriter:
    """Writes which token entered the counts of each text, and which one left them.

    What does not depend on the next token is written right after a launch, while the device works.
    """

    def __init__(self, headers: RowHeaders, members: Sequence[CountedRow]) -> None:
        self._words, self._size, self._members = headers.words, headers.num_words, members
        row_numbers = [member.row for member in members]
        self._rows = row_index(row_numbers, headers)
        self._histories = [member.history for member in members]
        self._counts = [member.counts for member in members]
        self._last_token_writer = LastTokenWriter(headers, row_numbers, ENTERED_OFFSET, self._histories)
        self._windows = [(row, history, counts.sustain) for row, counts, history in members if counts.sustain]
        self._empty_windows = [row for row, counts, _ in members if counts.sustain == 0]
        self._capacity_left = 0

    def write(self, grew_by_one: bool, extra: array[int]) -> None:
        """Write the words; `grew_by_one` if every text is one token longer than before."""
        if grew_by_one and self._capacity_left > 0:
            self._last_token_writer.write()
            if self._empty_windows:
                self._words[self._empty_windows, LEFT_OFFSET] = self._words[
                    self._empty_windows, ENTERED_OFFSET
                ]
            return
        self._words[self._rows, COUNTS_OFFSET : NEW_COUNTS_OFFSET + 2] = [
            counts.sync(history, extra, self._size) for _, counts, history in self._members
        ]
        self._capacity_left = 0

    def after_send(self) -> None:
        """Prepare the next write; what was written was uploaded."""
        for counts, history in zip(self._counts, self._histories, strict=True):
            counts.synced_length = len(history)
        if self._capacity_left > 0:
            self._capacity_left -= 1
        else:
            self._capacity_left = min([counts.capacity_left for counts in self._counts])
            self._words[self._rows, NEW_COUNTS_OFFSET + 1] = 0
        self._words[self._rows, COUNTS_SIZE_OFFSET] += 1
        for row, history, sustain in self._windows:
            self._words[row, LEFT_OFFSET] = history[-sustain] if len(history) >= sustain else NO_TOKEN


class DecayWriter:
    """Writes the penalised tokens of rows whose penalties decay, which change with every token."""

    def __init__(self, headers: RowHeaders, members: Sequence[tuple[int, SamplerState, PenaltyRule]]) -> None:
        self._headers, self._members = headers, members

    def write(self, extra: array[int]) -> None:
        """Write the tokens, their counts and their strengths."""
        for row, state, rule in self._members:
            terms = state.penalized_tokens(rule)
            self._headers.words[row, DECAY_OFFSET : DECAY_OFFSET + 2] = (
                self._headers.num_words + len(extra),
                len(terms.ids),
            )
            extra.extend(terms.ids)
            append_float64(extra, terms.counts)
            append_float64(extra, terms.strengths or (1.0,) * len(terms.ids))


class HistoryWriter:
    """Writes the texts that DRY searches: their new last tokens."""

    def __init__(self, headers: RowHeaders, members: Sequence[HistoryRow]) -> None:
        self._words, self._members = headers.words, members
        row_numbers = [member.row for member in members]
        self._rows = row_index(row_numbers, headers)
        self._histories = [member.history for member in members]
        self._last_token_writer = LastTokenWriter(headers, row_numbers, LAST_TOKEN_OFFSET, self._histories)
        self._device_histories = [member.device_history for member in members]
        self._capacity_left = 0

    def write(self, grew_by_one: bool) -> None:
        """Write the words; `grew_by_one` if every text is one token longer than before."""
        if grew_by_one and self._capacity_left > 0:
            self._last_token_writer.write()
            return
        self._words[self._rows, HISTORY_OFFSET : LAST_TOKEN_OFFSET + 1] = [
            device_history.sync(history) for _, device_history, history in self._members
        ]
        self._capacity_left = 0

    def after_send(self) -> None:
        """Prepare the next write; what was written was uploaded."""
        for device_history, history in zip(self._device_histories, self._histories, strict=True):
            device_history.synced_length = len(history)
        self._capacity_left = (
            self._capacity_left - 1
            if self._capacity_left > 0
            else min([each.capacity_left for each in self._device_histories])
        )
        self._words[self._rows, HISTORY_OFFSET + 1] += 1


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

    def __init__(
        self, headers: RowHeaders, members: Sequence[tuple[int, StepState]], device: torch.device
    ) -> None:
        self._words, self._members, self._device = headers.words, members, device
        row_numbers = [row for row, _ in members]
        self._rows, self._offsets = row_index(row_numbers, headers), np.array(row_numbers) * WORD_BYTES
        self._mu_histories = [state.records for _, state in members]
        self._keep_alive: list[Tensor] = []
        self._last_records: list[StateRecord] = []

    def write(self, grew_by_one: bool, positions: Sequence[int]) -> None:
        """Write the address of the target for each position; `grew_by_one` if each is the next position."""
        if grew_by_one and all(
            map(is_, [previous_mus[-1] for previous_mus in self._mu_histories], self._last_records)
        ):
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

    def after_send(self, positions: Sequence[int], mus: Tensor) -> None:
        """Record the new targets, and write their addresses for the next tokens."""
        self._last_records = [state.record(positions[row], mus, row) for row, state in self._members]
        self._words[self._rows, MU_OFFSET] = mus.data_ptr() + self._offsets


def row_index(row_numbers: list[int], headers: RowHeaders) -> slice | list[int]:
    """Some rows as an index; a slice, which is faster, if it is all of them."""
    return slice(None) if len(row_numbers) == len(headers.words) else row_numbers


def append_float64(extra: array[int], values: Collection[float]) -> None:
    """Append the bits of some numbers as float64."""
    extra.frombytes(array("d", values).tobytes())


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


POSITION_OFFSET, BLOCKED_OFFSET = HEADER_OFFSETS["seed"] + 1, HEADER_OFFSETS["blocked"]


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
        edits_logits, updates_mu = (
            any([params.edits_logits for params in row_params]),
            any(["mirostat" in params.compiled.stateful_steps for params in row_params]),
        )
        uses_dry = any([params.token_history is not None for params in row_params])
        self._launch_key = SamplingLaunchKey(count, variant, num_top, edits_logits, updates_mu, uses_dry)
        self._states = [row.state for row in requests]
        self._histories = [row.state.history if row.history is None else row.history for row in requests]
        self._next_positions: list[int] = []
        self._create_writers(requests, row_params, builder)

    def _create_writers(
        self, requests: Sequence[SamplingRequest], row_params: Sequence[RowParams], builder: RowParamsBuilder
    ) -> None:
        """Create the writers of what the rows use."""
        headers, members = RowHeaders(self._headers, len(self._packed)), list(enumerate(row_params))
        counted = [
            CountedRow(i, params.token_counts, requests[i].state.history)
            for i, params in members
            if params.token_counts is not None
        ]
        decaying = [
            (i, requests[i].state, params.compiled.penalty_rule)
            for i, params in members
            if params.compiled.penalty_rule is not None and params.token_counts is None
        ]
        with_history = [
            HistoryRow(i, params.token_history, requests[i].state.history)
            for i, params in members
            if params.token_history is not None
        ]
        with_mirostat = [
            (i, requests[i].state.step_state("mirostat"))
            for i, params in members
            if "mirostat" in params.compiled.stateful_steps
        ]
        self._mask_writer = MaskWriter(headers, requests, builder.width)
        self._penalty_writer = PenaltyWriter(headers, counted) if counted else None
        self._decay_writer = DecayWriter(headers, decaying) if decaying else None
        self._history_writer = HistoryWriter(headers, with_history) if with_history else None
        self._mu_writer = MuWriter(headers, with_mirostat, builder.device) if with_mirostat else None

    def launch(
        self,
        x: Tensor,
        kernels: SamplingKernels,
        staging_ring: StagingRing,
        has_masks: bool,
        output: OutputBuffer,
    ) -> KernelOutput:
        """Launch the kernels for the rows, on the whole batch's logits; `has_masks` if any row has a mask."""
        positions = list(map(len, self._histories))
        grew_by_one = positions == self._next_positions
        if not grew_by_one:
            self._headers[:, POSITION_OFFSET] = positions
        extra = array("q")
        if self._penalty_writer is not None:
            self._penalty_writer.write(grew_by_one, extra)
        if self._decay_writer is not None:
            self._decay_writer.write(extra)
        if self._history_writer is not None:
            self._history_writer.write(grew_by_one)
        key = self._launch_key
        if self._mask_writer.write(has_masks, extra) and not key.edits_logits:
            key = key._replace(edits_logits=True)
        if self._mu_writer is not None:
            self._mu_writer.write(grew_by_one, positions)
        kernel_output = kernels.draw(
            x, self._param_table, staging_ring.upload(self._packed, extra), key, output
        )
        self._after_launch(positions, kernel_output.mus)
        return kernel_output

    def select_own(self, values: Tensor) -> Tensor:
        """The rows' values, of the whole batch's."""
        return values[torch.tensor(self.batch_indices).to(values.device, non_blocking=True)]

    def _after_launch(self, positions: list[int], mus: Tensor) -> None:
        """Prepare for the next tokens, while the device works."""
        self._headers[:, POSITION_OFFSET] += 1
        self._next_positions = [position + 1 for position in positions]
        if self._penalty_writer is not None:
            self._penalty_writer.after_send()
        if self._history_writer is not None:
            self._history_writer.after_send()
        if self._mu_writer is not None:
            self._mu_writer.after_send(positions, mus)
        for state, position in zip(self._states, positions, strict=True):
            if position > state.last_drawn_position:
                state.last_drawn_position = position


class GpuBatch:
    """The rows of a batch in groups by kernel variant, and the indices of those that torch must sample.

    `all_greedy_only` says that each row's largest logit is its answer; then there are no groups. `has_masks`
    says that a row has a mask now.
    """

    def __init__(
        self, requests: Sequence[SamplingRequest], row_params: Sequence[RowParams], builder: RowParamsBuilder
    ) -> None:
        self.num_rows = len(requests)
        self.uses_cfg = any([request.uses_cfg for request in requests])
        self.num_top = min(builder.width, max([request.num_top_tokens for request in requests]))
        self.all_greedy_only = not (self.uses_cfg or self.num_top) and all(
            map(_is_greedy_only, requests, row_params)
        )
        self._mask_stamp, self.has_masks = VERSION_STAMPS.latest_mask_change, _any_masked(requests)
        self.groups: list[KernelGroup] = []
        self.fallback_rows: list[int] = []
        self.may_overflow = False
        self._latest_stamp = VERSION_STAMPS.latest
        self._rows = list(requests)
        self._states = [request.state for request in requests]
        self._settings = list(dict.fromkeys([request.settings for request in requests]))
        self._version_stamps = self._current_stamps()
        self._rows_with_own_history = [
            request
            for request, params in zip(requests, row_params, strict=True)
            if _has_own_history(request, params.compiled)
        ]
        self._blocked = [
            (request, params.mutable_blocked)
            for request, params in zip(requests, row_params, strict=True)
            if params.mutable_blocked is not None
        ]
        self._biases = {
            id(params.bias): (params.bias, params.bias_version)
            for params in row_params
            if params.bias is not None
        }
        if not self.all_greedy_only:
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
        if list(requests) != self._rows:
            return False
        for request in self._rows_with_own_history:
            _sync_history(request)
        last = VERSION_STAMPS.latest
        if last is not self._latest_stamp and self._current_stamps() != self._version_stamps:
            return False
        self._latest_stamp = last
        masks = VERSION_STAMPS.latest_mask_change
        if masks is not self._mask_stamp:
            self._mask_stamp, self.has_masks = masks, _any_masked(requests)
        if self.has_masks and (
            self.all_greedy_only or any([is_device_mask(request.allowed) for request in requests])
        ):
            return False
        for request, blocked in self._blocked:
            if tuple(request.blocked) != blocked:
                return False
        return all([is_unchanged(bias, version) for bias, version in self._biases.values()])

    def _current_stamps(self) -> list[object]:
        """The version stamps of everything the batch was made of."""
        stamps = [request.version_stamp for request in self._rows]
        stamps += [state.version_stamp for state in self._states]
        return stamps + [settings.version_stamp for settings in self._settings]


class GpuSampler:
    """Samples batches with the kernels."""

    def __init__(self, vocabulary: SamplerVocabulary) -> None:
        self._vocabulary = vocabulary
        self._placement: tuple[int, torch.device, int] | None = None
        self.reset()

    def reset(self) -> None:
        """Forget the batch and everything on the device."""
        self._batch: GpuBatch | None = None
        self._cached_rows: WeakKeyDictionary[SamplerState, RowParams] = WeakKeyDictionary()

    def prepare(self, requests: Sequence[SamplingRequest], width: int, device: torch.device) -> GpuBatch:
        """The batch of some requests; the previous one if it is current."""
        placement = (width, device, raw_stream(device))
        if placement != self._placement:
            self.reset()
            self._params_builder = RowParamsBuilder(self._vocabulary, width, device)
            self._kernels, self._staging_ring = (
                SamplingKernels(width, device, placement[2]),
                StagingRing(device, placement[2]),
            )
            self._placement = placement
        batch = self._batch
        if batch is None or not batch.is_current(requests):
            self._batch = None
            batch = GpuBatch(requests, self._row_params(requests), self._params_builder)
            self._batch = batch
        return batch

    def launch(
        self, x: Tensor, batch: GpuBatch
    ) -> tuple[list[tuple[list[int], DrawnTokens]], HostTokens | None]:
        """The tokens of a batch's groups, each with its batch indices, from logits (rows, width).

        They come as one part, and as host tokens too, unless torch samples other rows or several groups have
        top tokens.
        """
        kernels, staging_ring, has_masks = self._kernels, self._staging_ring, batch.has_masks
        output = kernels.next_output(batch.num_rows)
        try:
            if batch.all_greedy_only:
                kernels.greedy(x, output)
                outputs = []
            else:
                outputs = [
                    group.launch(x, kernels, staging_ring, has_masks, output) for group in batch.groups
                ]
            kernels.record_done()
        except BaseException:
            self.reset()  # the device may not have received what was packed for it
            raise
        tokens, probs = output.tokens, output.probs
        if batch.fallback_rows or (batch.num_top and len(outputs) > 1):
            parts = [
                (
                    group.batch_indices,
                    DrawnTokens(
                        group.select_own(tokens),
                        group.select_own(probs),
                        group_output.top_tokens,
                        group_output.top_probs,
                    ),
                )
                for group, group_output in zip(batch.groups, outputs, strict=True)
            ]
            return parts, None
        tops = outputs[0][1:] if batch.num_top else (None, None)
        return [([], DrawnTokens(tokens, probs, *tops))], output.host_tokens

    def _row_params(self, requests: Sequence[SamplingRequest]) -> list[RowParams]:
        """The parameters of each request: those it had if they are still valid."""
        row_params: list[RowParams] = []
        used_states: set[SamplerState] = set()
        for request in requests:
            if _has_own_history(request, request.settings.compiled()):
                _sync_history(request)
        for request in requests:
            state = request.state
            params = (
                self._cached_rows.get(state) if state not in used_states else None
            )  # a state's device lists advance once in a step
            if params is None or not params.is_valid(request):
                params = self._params_builder.build(request, params)
                if state not in used_states:
                    self._cached_rows[state] = params
            used_states.add(state)
            row_params.append(params)
        return row_params


def _any_masked(requests: Sequence[SamplingRequest]) -> bool:
    return [request.allowed for request in requests].count(None) < len(requests)


def _is_greedy_only(request: SamplingRequest, params: RowParams) -> bool:
    """Whether a row's largest logit is its answer."""
    return params.compiled.greedy_only and not params.edits_logits and request.allowed is None


def _has_own_history(request: SamplingRequest, compiled: CompiledSettings) -> bool:
    """Whether a request brings its own text, and its settings read it."""
    return request.history is not None and (
        compiled.penalty_rule is not None or compiled.dry_rule is not None
    )


def _sync_history(request: SamplingRequest) -> None:
    if request.history is not None:
        request.state.sync_history(request.history)
