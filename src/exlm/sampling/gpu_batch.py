"""Desk: where rows wait for their tokens. It remembers the last batch, so that a step says only what is new.

A batch that comes again, each text a token longer, costs a few comparisons. Rows that came, went, moved or
were changed are seated anew, and only those are read. What it remembers of a text goes when the text's state
does. One desk serves one sampler, from one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .draw import GroupOutput
from .gpu_kernels import SamplingKernels
from .kernel_group import KernelGroup
from .kernel_params import SamplingKernelVariant, variant_of
from .params import CompiledSettings
from .request import SamplingRequest
from .row_params import RowParams, RowParamsBuilder, is_device_mask, is_unchanged
from .staging_ring import StagingRing
from .state import SamplerState
from .triton_launch import raw_stream
from .version_stamps import VERSION_STAMPS
from .vocabulary import SamplerVocabulary


class GpuBatch:
    """Rows as they were seated: the parties they make, and the places of those that no kernel serves.

    `largest` if every row is answered by its largest logit alone; then there are no parties. `masked` if any
    row has a mask now.
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

    def is_current(self, requests: Sequence[SamplingRequest]) -> bool:
        """Whether rows are those that were seated, in this order, and nothing changed but that texts grew."""
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
    """Serves batches by kernels."""

    def __init__(self, vocabulary: SamplerVocabulary) -> None:
        self._vocabulary = vocabulary
        self._placement: tuple[int, torch.device, int] | None = None
        self.reset()

    def reset(self) -> None:
        """Remember nothing, neither of rows nor of what is on a device."""
        self._batch: GpuBatch | None = None
        self._cached_rows: WeakKeyDictionary[SamplerState, RowParams] = WeakKeyDictionary()

    def prepare(self, requests: Sequence[SamplingRequest], width: int, device: torch.device) -> GpuBatch:
        """The batch that some rows make; the one before if it still stands."""
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

    def launch(self, x: Tensor, batch: GpuBatch) -> list[tuple[list[int], GroupOutput]]:
        """The tokens of a batch's parties, each with their places, from its logits (rows, width).

        They come as one part, told to the host, too, unless rows are left for others or several parties have
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
            self.reset()  # what was packed for the device may never have reached it
            raise
        tokens, probs = output.tokens, output.probs
        if batch.fallback_rows or (batch.num_top and len(outputs) > 1):
            return [
                (
                    group.batch_indices,
                    GroupOutput(
                        group.select_own(tokens),
                        group.select_own(probs),
                        group_output.top_tokens,
                        group_output.top_probs,
                    ),
                )
                for group, group_output in zip(batch.groups, outputs, strict=True)
            ]
        tops = outputs[0][1:] if batch.num_top else (None, None)
        return [([], GroupOutput(tokens, probs, *tops, output.host_tokens))]

    def _row_params(self, requests: Sequence[SamplingRequest]) -> list[RowParams]:
        """A seat for each row: the one it had if that holds."""
        row_params: list[RowParams] = []
        used_states: set[SamplerState] = set()
        for request in requests:
            if _has_own_history(request, request.settings.compiled()):
                _sync_history(request)
        for request in requests:
            state = request.state
            params = (
                self._cached_rows.get(state) if state not in used_states else None
            )  # a list moves once in a step
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
    """Whether a row is answered by its largest logit alone."""
    return params.compiled.greedy_only and not params.edits_logits and request.allowed is None


def _has_own_history(request: SamplingRequest, compiled: CompiledSettings) -> bool:
    """Whether a row's text is somebody else's, and matters."""
    return request.history is not None and (
        compiled.penalty_rule is not None or compiled.dry_rule is not None
    )


def _sync_history(request: SamplingRequest) -> None:
    if request.history is not None:
        request.state.sync_history(request.history)
