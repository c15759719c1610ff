"""Seats: what the kernels must know of a row that stays the same from token to token, worked out once.

A seat holds as long as nobody assigned to the row or its settings, edited a bias or blocked tokens in place,
or rewound the text; `holds` finds out. It belongs to a text's state, and so do the penalised tokens on the
device that go with it. How far the text has got is not in here.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..kernels.sampling_layout import HEADER_OFFSETS, HEADER_WORDS
from .device_token_counts import NO_TOKEN, DeviceTokenCounts
from .device_token_history import DeviceTokenHistory
from .logits_processors import check_bias
from .params import CompiledSettings
from .request import SamplingRequest
from .vocabulary import SamplerVocabulary

IMMUTABLE_TYPES = (tuple, frozenset)
UNTRACKED_VERSION = -1  # the version of a bias that does not tell when it changes


@dataclass(eq=False)
class RowParams:
    """One row's constants: its plan, its head's words as bytes, and what those point to.

    `blocked` are ids within the vocabulary; `watched` are all, if they may change in place.
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
        """Whether logits change before they become probabilities."""
        compiled = self.compiled
        return bool(compiled.penalty_rule or compiled.dry_rule or self.blocked_ids or self.bias is not None)

    def is_valid(self, request: SamplingRequest) -> bool:
        """Whether all this is still so for a row."""
        request_stamp, settings_stamp, state_stamp = self.version_stamps
        return (
            request_stamp is request.version_stamp
            and settings_stamp is request.settings.version_stamp
            and state_stamp is request.state.version_stamp
            and (self.mutable_blocked is None or self.mutable_blocked == tuple(request.blocked))
            and (self.bias is None or is_unchanged(self.bias, self.bias_version))
        )


class RowParamsBuilder:
    """Finds seats for rows of one vocabulary on one device."""

    def __init__(self, vocabulary: SamplerVocabulary, width: int, device: torch.device) -> None:
        self.vocabulary, self.width, self.device = vocabulary, width, device
        self._biases: MutableMapping[Tensor, tuple[Tensor, int]] = WeakTensorKeyDictionary()

    def build(self, request: SamplingRequest, previous: RowParams | None) -> RowParams:
        """A new seat; the list of the one before is taken over if it is of the same text."""
        settings, state = request.settings, request.state
        compiled = settings.compiled()
        seed, branch = state.philox_words()
        header = [0] * HEADER_WORDS
        header[HEADER_OFFSETS["seed"]], header[HEADER_OFFSETS["seed"] + 2] = seed, branch
        header[HEADER_OFFSETS["token_counts"] + 2] = header[HEADER_OFFSETS["token_counts"] + 3] = NO_TOKEN
        if compiled.mirostat:
            (header[HEADER_OFFSETS["initial_mu"]],) = struct.unpack(
                "q", struct.pack("d", state.initial_mu(compiled.params.tau))
            )
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
        """The tokens that XTC spares."""
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
    """A number that changes whenever a tensor does; ALTERED if it may have."""
    return UNTRACKED_VERSION if bias.is_inference() else bias._version


def is_unchanged(bias: Tensor, version: int) -> bool:
    """Whether a bias is certainly what it was at a version."""
    return tensor_version(bias) == version != UNTRACKED_VERSION


def is_device_mask(allowed: Tensor | Collection[int] | None) -> bool:
    """Whether a mask is where it cannot be packed with what else a row brings along."""
    return isinstance(allowed, Tensor) and allowed.device.type != "cpu"
