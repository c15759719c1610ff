"""The persistent batch of the GPU sampler, as vLLM's InputBatch is for its model runner.

`RequestCache` keeps what stays the same of each request, and the lists on the device (token counts, texts) that
live as long as the `SamplerState` of their text. `GpuBatch` has the rows of the last step in groups by kernel
variant. A `KernelGroup` has the words that are uploaded for its rows, and changes a few of them for each step:
if the same requests come again, each text a token longer, a step costs some comparisons and one upload. One
`GpuSampler` serves one sampler, from one thread.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Collection, MutableMapping, Sequence
from dataclasses import dataclass
from operator import is_, itemgetter
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..kernels.launch import raw_stream
from ..kernels.sampling_layout import HEADER_OFFSETS, HEADER_WORDS
from ..sampler_chain import STATEFUL_STEPS
from .candidates import DrawnRows, DrawnTokens
from .gpu_buffers import WORD_BYTES, HostTokens, OutputBuffer, StagingRing
from .gpu_kernels import (
    KernelOutput,
    SamplingKernels,
    SamplingKernelVariant,
    SamplingLaunchKey,
    param_table,
    variant_of,
)
from .logits_processors import check_bias
from .request import SamplerState, SamplingRequest, StateRecord, StepState
from .settings import VERSION_STAMPS, CompiledSettings
from .vocabulary import SamplerVocabulary

POSITION_OFFSET, MU_OFFSET = HEADER_OFFSETS["seed"] + 1, HEADER_OFFSETS["mu"]
BLOCKED_OFFSET, DECAY_OFFSET, ALLOWED_OFFSET = (HEADER_OFFSETS[name] for name in ("blocked", "decaying", "allowed"))
ENTERED_OFFSET, LEFT_OFFSET = HEADER_OFFSETS["token_counts"] + 2, HEADER_OFFSETS["token_counts"] + 3
NEW_COUNT_OFFSET = HEADER_OFFSETS["new_counts"] + 1
LAST_ITEM = itemgetter(-1)

MIN_COUNTS_CAPACITY = 256
NO_TOKEN = -1


class UploadBuffer:
    """The int64 words of one upload: a header for each row, the blocked tokens of all rows, and lists of this step.

    `words` are the headers and the blocked tokens, `headers` (rows, HEADER_WORDS) is a view of their start, and
    `step_lists` are uploaded after them.
    """

    def __init__(self, headers: Sequence[bytes], blocked: Sequence[Sequence[int]]) -> None:
        count, all_blocked = len(headers) * HEADER_WORDS, [token for tokens in blocked for token in tokens]
        self.words = np.empty(count + len(all_blocked), np.int64)
        self.words[:count] = np.frombuffer(b"".join(headers), np.int64)
        self.words[count:] = all_blocked
        self.headers: NDArray[np.int64] = self.words[:count].reshape(len(headers), HEADER_WORDS)
        num_blocked = np.array([len(tokens) for tokens in blocked], np.int64)
        self.headers[:, BLOCKED_OFFSET] = count + num_blocked.cumsum() - num_blocked
        self.headers[:, BLOCKED_OFFSET + 1] = num_blocked
        self.step_lists = array("q")

    def append(self, values: bytes) -> int:
        """Append a list for this step; the index of its first word."""
        start = len(self.words) + len(self.step_lists)
        self.step_lists.frombytes(values)
        return start

    def index_of(self, rows: list[int]) -> slice | list[int]:
        """Some rows as an index; a slice, which is faster, if it is all of them."""
        return slice(None) if len(rows) == len(self.headers) else rows


TokenCountsWords = tuple[int, int, int, int, int, int]
"""The header's words "token_counts" and "new_counts"."""


class DeviceTokenCounts:
    """The last `sustain` tokens of a text (None: all of them) on the device, as pairs (token, count).

    `synced_length` is the length of the text whose tokens the pairs count once the kernels have read the latest
    words.
    """

    def __init__(self, sustain: int | None, width: int, device: torch.device) -> None:
        """An empty list; ids that are not below `width` are left out."""
        self.sustain, self._width, self._device = sustain, width, device
        self.synced_length = -2  # not even of an empty text
        self._pairs: Tensor | None = None
        # The kernels need a pair more for each token at most; so the size follows from the length of the text.
        self._size_minus_length = self._capacity = self._address = 0

    @property
    def capacity_left(self) -> int:
        """How many more tokens fit."""
        return self._capacity - self._size_minus_length - self.synced_length

    def sync(self, text: Sequence[int], upload: UploadBuffer) -> TokenCountsWords:
        """The words for a text as it is now; a new list of pairs is appended to the upload."""
        length, sustain = len(text), self.sustain
        if length == self.synced_length:
            return self._address, self._size_minus_length + length, NO_TOKEN, NO_TOKEN, 0, 0
        if length == self.synced_length + 1 and self.capacity_left > 0:
            left = text[length - 1 - sustain] if sustain is not None and length > sustain else NO_TOKEN
            return self._address, self._size_minus_length + length, text[-1], left, 0, 0
        start = 0 if sustain is None else max(0, length - sustain)
        ids, counts = np.unique(np.array(text[start:], np.int64), return_counts=True)
        in_vocab = (ids >= 0) & (ids < self._width)
        pairs = np.stack((ids[in_vocab], counts[in_vocab]), 1)
        self._capacity = MIN_COUNTS_CAPACITY << (2 * len(pairs) // MIN_COUNTS_CAPACITY).bit_length()
        self._pairs = torch.full((self._capacity, 2), NO_TOKEN, dtype=torch.int32, device=self._device)
        self._address, self._size_minus_length = self._pairs.data_ptr(), len(pairs) - length
        self.synced_length = length
        return self._address, len(pairs), NO_TOKEN, NO_TOKEN, upload.append(pairs.tobytes()), len(pairs)


MIN_HISTORY_CAPACITY = 1024
OUT_OF_VOCAB = -1  # stands for every id that the vocabulary does not have

TokenHistoryWords = tuple[int, int, int]
"""The header's words "history"."""


class DeviceTokenHistory:
    """A text on the device, as int32 ids.

    `synced_length` is the length of the text on the device once the kernels have read the latest words.
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

    def sync(self, text: Sequence[int], upload: UploadBuffer) -> TokenHistoryWords:
        """The words for a text as it is now; copies all tokens that the device lacks but the last one."""
        length = len(text)
        if length > self._capacity or self._ids is None:
            self._capacity = max(MIN_HISTORY_CAPACITY, 1 << (2 * length - 1).bit_length())
            self._ids = torch.empty(self._capacity, dtype=torch.int32, device=self._device)
            self._address, self.synced_length = self._ids.data_ptr(), 0
        if length > self.synced_length + 1:
            ids = np.array(text[self.synced_length :], np.int64)
            ids[(ids < 0) | (ids >= self._width)] = OUT_OF_VOCAB
            host_ids = torch.from_numpy(ids.astype(np.int32))
            if self._device.type == "cuda":
                host_ids = host_ids.pin_memory()
            self._ids[self.synced_length : length].copy_(host_ids, non_blocking=True)
        self.synced_length = length
        return self._address, length, text[-1] if length else OUT_OF_VOCAB


IMMUTABLE_TYPES = (tuple, frozenset)
UNTRACKED_VERSION = -1  # of a bias whose changes torch does not count


def stamps_of(request: SamplingRequest) -> tuple[object, object, object]:
    """The version stamps of a request, its settings and its state."""
    return request.version_stamp, request.settings.version_stamp, request.state.version_stamp


@dataclass(eq=False)
class CachedRequest:
    """What stays the same from token to token of a request: compiled settings, header, tensors it points to.

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
        return self.compiled.reads_history or bool(self.blocked_ids) or self.bias is not None

    def is_unchanged(self, request: SamplingRequest) -> bool:
        """Whether nothing of the request, which has the same version stamps, changed in place."""
        return (self.mutable_blocked is None or self.mutable_blocked == tuple(request.blocked)) and (
            self.bias is None or tensor_version(self.bias) == self.bias_version != UNTRACKED_VERSION
        )


class RequestCache:
    """The `CachedRequest` of each text, for one vocabulary on one device."""

    def __init__(self, vocabulary: SamplerVocabulary, width: int, device: torch.device) -> None:
        self.vocabulary, self.width, self.device = vocabulary, width, device
        self._biases: MutableMapping[Tensor, tuple[Tensor, int]] = WeakTensorKeyDictionary()
        self._requests: WeakKeyDictionary[SamplerState, CachedRequest] = WeakKeyDictionary()

    def clear(self) -> None:
        """Drop every request, with its lists on the device."""
        self._requests.clear()

    def get(self, requests: Sequence[SamplingRequest]) -> list[CachedRequest]:
        """What is cached of each request; built anew if it changed."""
        found: list[CachedRequest] = []
        used_states: set[SamplerState] = set()
        for request in requests:
            if _has_own_history(request):
                request.sync_history()
        for request in requests:
            state = request.state
            # The device lists of a state follow one row; a second row with the same state gets others.
            cached = None if state in used_states else self._requests.get(state)
            if cached is None or cached.version_stamps != stamps_of(request) or not cached.is_unchanged(request):
                cached = self._build(request, cached)
                if state not in used_states:
                    self._requests[state] = cached
            used_states.add(state)
            found.append(cached)
        return found

    def _build(self, request: SamplingRequest, previous: CachedRequest | None) -> CachedRequest:
        """What is cached of a request; it takes over the device lists of `previous` if the text is the same."""
        settings, state = request.settings, request.state
        compiled = settings.compiled()
        seed, rewind_count = state.philox_words()
        header = [0] * HEADER_WORDS
        header[HEADER_OFFSETS["seed"]], header[HEADER_OFFSETS["seed"] + 2] = seed, rewind_count
        header[ENTERED_OFFSET] = header[LEFT_OFFSET] = NO_TOKEN
        if "mirostat" in compiled.stateful_steps:
            mu = state.step_state("mirostat").initial or STATEFUL_STEPS["mirostat"](compiled.params)
            (header[HEADER_OFFSETS["initial_mu"]],) = struct.unpack("q", struct.pack("d", mu))
        bias, device_bias, bias_version = settings.token_bias, None, 0
        if bias is not None:
            device_bias, bias_version = self._device_bias(bias)
        exempt_ids = self.vocabulary.xtc_exempt_ids_of(compiled) if "xtc" in compiled.probs_steps else None
        rule = compiled.dry_rule
        breaker_ids = None if rule is None else self.vocabulary.dry_breaker_ids_of(rule)
        tensors = {
            "bias": device_bias,
            "xtc_exempt": self.vocabulary.mask(exempt_ids, self.width, self.device) if exempt_ids else None,
            "dry_breakers": self.vocabulary.mask(breaker_ids, self.width, self.device) if breaker_ids else None,
        }
        for name, tensor in tensors.items():
            header[HEADER_OFFSETS[name]] = 0 if tensor is None else tensor.data_ptr()
        stamps, blocked = stamps_of(request), tuple(request.blocked)
        has_same_text = previous is not None and previous.version_stamps[2] is stamps[2]
        token_counts, token_history = self._device_lists(compiled, previous if has_same_text else None)
        return CachedRequest(
            version_stamps=stamps,
            compiled=compiled,
            header=struct.pack(f"{HEADER_WORDS}q", *header),
            blocked_ids=tuple(token for token in blocked if 0 <= token < self.width),
            mutable_blocked=None if isinstance(request.blocked, IMMUTABLE_TYPES) else blocked,
            bias=bias,
            bias_version=bias_version,
            referenced_tensors=tuple(tensors.values()),
            token_counts=token_counts,
            token_history=token_history,
        )

    def _device_lists(
        self, compiled: CompiledSettings, previous: CachedRequest | None
    ) -> tuple[DeviceTokenCounts | None, DeviceTokenHistory | None]:
        """The lists on the device that a row needs: those of `previous`, whose text is the same, or new ones."""
        rule, counts, history = compiled.penalty_rule, None, None
        if rule is not None and not rule.decays:
            counts = previous.token_counts if previous else None
            if counts is None or counts.sustain != rule.sustain:
                counts = DeviceTokenCounts(rule.sustain, self.width, self.device)
        if compiled.dry_rule is not None:
            history = previous.token_history if previous else None
            history = history or DeviceTokenHistory(self.width, self.device)
        return counts, history

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


def is_device_mask(allowed: Tensor | Collection[int] | None) -> bool:
    """Whether a mask is on a device, where the host cannot pack it into the upload."""
    return isinstance(allowed, Tensor) and allowed.device.type != "cpu"


class TokenHistoryWriter:
    """Writes the header words of texts on the device: address, length, last token.

    If every text grew by one token, only the last tokens are written; the other words are prepared right after
    the launch before, while the device works.
    """

    first_word, num_words = HEADER_OFFSETS["history"], 3

    def __init__(
        self,
        upload: UploadBuffer,
        rows: list[int],
        lists: Sequence[DeviceTokenHistory | DeviceTokenCounts],
        texts: list[list[int]],
    ) -> None:
        self._upload, self._headers, self._rows = upload, upload.headers, upload.index_of(rows)
        self._lists, self._texts = lists, texts
        self._capacity_left = 0
        # The last tokens are packed into bytes first, because numpy is slow with lists.
        self._pack_tokens = struct.Struct(f"{len(rows)}q").pack_into
        self._token_bytes = bytearray(WORD_BYTES * len(rows))
        self._tokens = np.frombuffer(self._token_bytes, np.int64)

    def write(self, grew_by_one: bool) -> None:
        """Write the words; `grew_by_one` if every text is one token longer than before, so none is empty."""
        if grew_by_one and self._capacity_left > 0:
            self._pack_tokens(self._token_bytes, 0, *map(LAST_ITEM, self._texts))
            self._headers[self._rows, self.first_word + 2] = self._tokens
            return
        self._headers[self._rows, self.first_word : self.first_word + self.num_words] = [
            each.sync(text, self._upload) for each, text in zip(self._lists, self._texts, strict=True)
        ]
        self._capacity_left = 0

    def after_launch(self) -> None:
        """Prepare the next write; what was written was uploaded."""
        for each, text in zip(self._lists, self._texts, strict=True):
            each.synced_length = len(text)
        if self._capacity_left > 0:
            self._capacity_left -= 1
        else:
            self._capacity_left = min([each.capacity_left for each in self._lists])
        self._headers[self._rows, self.first_word + 1] += 1


class TokenCountsWriter(TokenHistoryWriter):
    """Writes the header words of token counts: also which token left each window as the last one entered it."""

    first_word, num_words = HEADER_OFFSETS["token_counts"], 6

    def __init__(
        self, upload: UploadBuffer, rows: list[int], counts: Sequence[DeviceTokenCounts], texts: list[list[int]]
    ) -> None:
        super().__init__(upload, rows, counts, texts)
        members = list(zip(rows, texts, counts, strict=True))
        self._windows = [(row, text, each.sustain) for row, text, each in members if each.sustain]
        self._empty_windows = [row for row, _, each in members if each.sustain == 0]

    def write(self, grew_by_one: bool) -> None:
        """Write the words; with an empty window a token leaves as it enters."""
        super().write(grew_by_one)
        if self._capacity_left > 0 and self._empty_windows:
            self._headers[self._empty_windows, LEFT_OFFSET] = self._headers[self._empty_windows, ENTERED_OFFSET]

    def after_launch(self) -> None:
        """Prepare the next write: which token leaves each window."""
        if self._capacity_left <= 0:
            self._headers[self._rows, NEW_COUNT_OFFSET] = 0
        super().after_launch()
        for row, text, sustain in self._windows:
            self._headers[row, LEFT_OFFSET] = text[-sustain] if len(text) >= sustain else NO_TOKEN


class MuWriter:
    """Writes the addresses of mirostat's targets."""

    def __init__(self, upload: UploadBuffer, members: Sequence[tuple[int, StepState]], device: torch.device) -> None:
        self._headers, self._members, self._device = upload.headers, members, device
        rows = [row for row, _ in members]
        self._rows, self._offsets = upload.index_of(rows), np.array(rows) * WORD_BYTES
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
        self._headers[self._rows, MU_OFFSET] = addresses

    def _address_of(self, mus: Tensor) -> int:
        if mus.device != self._device:
            mus = mus.to(self._device, non_blocking=True)
        self._keep_alive.append(mus)  # until the kernels have read it
        return mus.data_ptr()

    def after_launch(self, positions: Sequence[int], mus: Tensor) -> None:
        """Record the new targets, and write their addresses for the next tokens."""
        self._last_records = [state.record(positions[row], mus, row) for row, state in self._members]
        self._headers[self._rows, MU_OFFSET] = mus.data_ptr() + self._offsets


def pack_allowed(allowed: Tensor | Collection[int], width: int) -> bytes:
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
    return packed.tobytes()


class KernelGroup:
    """The rows of a batch that one kernel variant serves, and the words that are uploaded for them."""

    def __init__(
        self,
        variant: SamplingKernelVariant,
        num_top: int,
        batch_indices: list[int],
        requests: Sequence[SamplingRequest],
        cached: Sequence[CachedRequest],
        cache: RequestCache,
    ) -> None:
        """`batch_indices` are those of the rows' logits; `num_top` top tokens are requested."""
        self.batch_indices = batch_indices
        self._requests, self._width = requests, cache.width
        self._cached = cached  # keeps alive what the headers point to
        self._upload = upload = UploadBuffer([each.header for each in cached], [each.blocked_ids for each in cached])
        upload.headers[:, HEADER_OFFSETS["batch_index"]] = batch_indices
        self._param_table = param_table(tuple([each.compiled for each in cached]), cache.device)
        self._states = [request.state for request in requests]
        self._histories = [
            state.history if request.history is None else request.history
            for request, state in zip(requests, self._states, strict=True)
        ]
        self._next_positions: list[int] = []
        self._has_written_masks = False
        self._decaying = [
            (row, self._states[row], each.compiled.penalty_rule)
            for row, each in enumerate(cached)
            if each.compiled.penalty_rule is not None and each.token_counts is None
        ]
        mu_states = [
            (row, self._states[row].step_state("mirostat"))
            for row, each in enumerate(cached)
            if "mirostat" in each.compiled.stateful_steps
        ]
        self._mu_writer = MuWriter(upload, mu_states, cache.device) if mu_states else None
        texts = [state.history for state in self._states]
        counts = {row: each.token_counts for row, each in enumerate(cached) if each.token_counts}
        histories = {row: each.token_history for row, each in enumerate(cached) if each.token_history}
        self._list_writers: list[TokenHistoryWriter] = []
        if counts:
            rows = [*counts]
            self._list_writers.append(TokenCountsWriter(upload, rows, [*counts.values()], [texts[i] for i in rows]))
        if histories:
            rows = [*histories]
            self._list_writers.append(TokenHistoryWriter(upload, rows, [*histories.values()], [texts[i] for i in rows]))
        edits_logits = any([each.edits_logits for each in cached])
        self._launch_key = SamplingLaunchKey(
            len(cached), variant, num_top, edits_logits, updates_mu=bool(mu_states), uses_dry=bool(histories)
        )

    def launch(
        self, x: Tensor, kernels: SamplingKernels, staging_ring: StagingRing, has_masks: bool, output: OutputBuffer
    ) -> KernelOutput:
        """Launch the kernels for the rows, on the whole batch's logits; `has_masks` if any row has a mask."""
        upload, key = self._upload, self._launch_key
        upload.step_lists = array("q")
        positions = list(map(len, self._histories))
        grew_by_one = positions == self._next_positions
        if not grew_by_one:
            upload.headers[:, POSITION_OFFSET] = positions
        for writer in self._list_writers:
            writer.write(grew_by_one)
        if self._mu_writer is not None:
            self._mu_writer.write(grew_by_one, positions)
        self._write_decaying()
        if has_masks or self._has_written_masks:
            self._write_masks()
            if self._has_written_masks and not key.edits_logits:
                key = key._replace(edits_logits=True)
        words = staging_ring.upload(upload.words, upload.step_lists)
        kernel_output = kernels.draw(x, self._param_table, words, key, output)
        self._after_launch(positions, kernel_output.mus)
        return kernel_output

    def select_rows(self, values: Tensor) -> Tensor:
        """The values of the group's rows, from those of the batch."""
        return values[torch.tensor(self.batch_indices).to(values.device, non_blocking=True)]

    def _write_decaying(self) -> None:
        """Write the penalised tokens of rows whose penalties decay: they change with every token."""
        for row, state, rule in self._decaying:
            penalized = state.penalized_tokens(rule)
            count = len(penalized.ids)
            counts, strengths = array("d", penalized.counts), array("d", penalized.strengths or (1.0,) * count)
            start = self._upload.append(penalized.ids.tobytes() + counts.tobytes() + strengths.tobytes())
            self._upload.headers[row, DECAY_OFFSET : DECAY_OFFSET + 2] = start, count

    def _write_masks(self) -> None:
        """Write the allowed tokens of rows that have a mask, which may be another one for each token."""
        self._upload.headers[:, ALLOWED_OFFSET] = 0
        self._has_written_masks = False
        for row, request in enumerate(self._requests):
            if request.allowed is not None:
                start = self._upload.append(pack_allowed(request.allowed, self._width))
                self._upload.headers[row, ALLOWED_OFFSET] = start
                self._has_written_masks = True

    def _after_launch(self, positions: list[int], mus: Tensor) -> None:
        """Prepare for the next tokens, while the device works."""
        self._upload.headers[:, POSITION_OFFSET] += 1
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
    that a row has a mask now, `may_overflow` that a row may have more candidates than its kernel can gather.
    """

    def __init__(self, requests: Sequence[SamplingRequest], cache: RequestCache) -> None:
        self.num_rows = len(requests)
        self.uses_cfg = any([request.uses_cfg for request in requests])
        self.num_top = min(cache.width, max([request.num_top_tokens for request in requests]))
        self.all_argmax = all([request.takes_argmax for request in requests])
        self.has_masks = _any_masked(requests)
        self._mask_stamp = VERSION_STAMPS.latest_mask_change
        self._requests, cached = list(requests), cache.get(requests)
        self._rows = list(zip(requests, cached, strict=True))
        # What may change in place; rows that share a bias and blocked tokens are checked once.
        self._mutable_rows = {
            (id(each.bias), id(request.blocked)): (request, each)
            for request, each in self._rows
            if each.bias is not None or each.mutable_blocked is not None
        }
        self._own_histories = list(filter(_has_own_history, requests))
        self._latest_stamp = VERSION_STAMPS.latest
        self.fallback_rows: list[int] = []
        variants: dict[SamplingKernelVariant, list[int]] = {}
        for index, (request, each) in enumerate(() if self.all_argmax else self._rows):
            variant = variant_of(each.compiled, cache.width, self.num_top)
            if variant is None or is_device_mask(request.allowed):
                self.fallback_rows.append(index)
            else:
                variants.setdefault(variant, []).append(index)
        self.may_overflow = any(variant.full_vocab and variant.all_steps for variant in variants)
        self.groups = [
            KernelGroup(
                variant, self.num_top, indices, [requests[i] for i in indices], [cached[i] for i in indices], cache
            )
            for variant, indices in variants.items()
        ]

    def is_current(self, requests: Sequence[SamplingRequest]) -> bool:
        """Whether requests are those of the batch, in its order, and nothing changed but that texts grew."""
        if list(requests) != self._requests:
            return False
        for request in self._own_histories:
            request.sync_history()
        latest = VERSION_STAMPS.latest
        if latest is not self._latest_stamp:
            if any([each.version_stamps != stamps_of(request) for request, each in self._rows]):
                return False
            self._latest_stamp = latest
        masks = VERSION_STAMPS.latest_mask_change
        if masks is not self._mask_stamp:
            self._mask_stamp, self.has_masks = masks, _any_masked(requests)
        if self.has_masks and (self.all_argmax or any([is_device_mask(request.allowed) for request in requests])):
            return False
        return all([each.is_unchanged(request) for request, each in self._mutable_rows.values()])


class GpuSampler:
    """Samples batches with the kernels."""

    def __init__(self, vocabulary: SamplerVocabulary) -> None:
        self._vocabulary = vocabulary
        self._placement: tuple[int, torch.device, int] | None = None
        self._batch: GpuBatch | None = None

    def prepare(self, requests: Sequence[SamplingRequest], width: int, device: torch.device) -> GpuBatch:
        """The batch of some requests; the previous one if it is current."""
        placement = (width, device, raw_stream(device))
        if placement != self._placement:
            self._batch = None
            self._cache = RequestCache(self._vocabulary, width, device)
            self._kernels = SamplingKernels(width, device, placement[2])
            self._staging_ring = StagingRing(device, placement[2])
            self._placement = placement
        batch, self._batch = self._batch, None  # a batch whose update fails is dropped
        if batch is None or not batch.is_current(requests):
            batch = GpuBatch(requests, self._cache)
        self._batch = batch
        return batch

    def launch(self, x: Tensor, batch: GpuBatch) -> tuple[list[DrawnRows], HostTokens | None]:
        """The tokens of a batch's groups, each with its batch indices, from logits (rows, width).

        They come as one part, and as host tokens too, unless torch samples other rows or several groups have
        top tokens.
        """
        kernels, staging_ring, has_masks = self._kernels, self._staging_ring, batch.has_masks
        output = kernels.next_output(batch.num_rows)
        try:
            if batch.all_argmax:
                kernels.greedy(x, output)
            outputs = [group.launch(x, kernels, staging_ring, has_masks, output) for group in batch.groups]
            kernels.record_done()
        except BaseException:
            self._batch = None  # the device may lack the last upload
            self._cache.clear()
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


def _any_masked(requests: Sequence[SamplingRequest]) -> bool:
    return [request.allowed for request in requests].count(None) < len(requests)


def _has_own_history(request: SamplingRequest) -> bool:
    """Whether a request brings its own text, and its settings read it."""
    return request.history is not None and request.settings.compiled().reads_history
