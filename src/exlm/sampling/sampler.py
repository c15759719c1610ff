"""Sampler: logits in, tokens out, for a whole batch at once.

Rows are sorted into a few groups by what their settings ask for; each group goes through the steps it uses,
as tensors over all its rows, on whatever device the logits are. What a row gets depends on its own logits,
settings and state alone. Logits are never copied to the host and never changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..errors import InputError
from . import cfg as guidance
from . import gpu_kernels as fused
from .draw import GroupOutput, greedy_output
from .gpu_batch import GpuSampler
from .group_sampling import SamplingTask, join_groups, make_task, mark_failures, sample_group
from .logits_processors import apply_edits, check_bias, compute_edits
from .request import SamplerOutput, SamplingRequest
from .settings import Settings
from .vocabulary import SamplerTokenizer, SamplerVocabulary

_NO_DEVICE_SWITCH = nullcontext()


class Sampler:
    """Chooses tokens for the rows of a batch. What it remembers of them saves time and changes nothing."""

    Settings = Settings

    def __init__(
        self,
        tokenizer: SamplerTokenizer | None = None,
        vocab_size: int | None = None,
        *,
        kernels: bool = True,
    ) -> None:
        """A sampler for a model's vocabulary: the ids the tokenizer knows, or the first `vocab_size`.

        Columns beyond are padding and never chosen. The tokenizer also names the tokens that DRY and XTC
        spare unless settings do. Without `kernels` everything is plain torch, on any device.
        """
        self.kernels = kernels
        self.vocabulary = SamplerVocabulary(tokenizer, vocab_size)
        self._gpu_sampler = GpuSampler(self.vocabulary)

    def sample_batch(self, logits: Tensor, rows: Sequence[SamplingRequest]) -> SamplerOutput:
        """Pick a token for every row of logits (rows, vocab); of two neighbouring ones if the row is guided.

        Settings are read as they are now. A row that cannot be served does not keep the others from their
        tokens (see `Picks.error`); settings that cannot be meant raise InputError before anything is done.
        """
        device = logits.device
        if rows and self.kernels and fused.has_kernels_for(device) and logits.dim() == 2:
            with _device_context(device):
                return self._sample_with_kernels(
                    logits.detach() if logits.requires_grad else logits, rows, device
                )
        with torch.no_grad():
            if rows and all(map(_is_greedy_only, rows)):
                top, picked = greedy_output(self._checked_logits(logits, len(rows)), 0)
                return SamplerOutput(mark_failures(top, picked.tokens), picked.probs)
            return self._sample_with_torch(self._apply_cfg(logits, rows), rows)

    def _sample_with_kernels(
        self, logits: Tensor, requests: Sequence[SamplingRequest], device: torch.device
    ) -> SamplerOutput:
        """Have kernels pick, for all rows that have a lane."""
        batch = self._gpu_sampler.prepare(requests, self.vocabulary.width(logits.shape[1]), device)
        x = (
            self._apply_cfg(logits, requests)
            if batch.uses_cfg
            else self._checked_logits(logits, len(requests))
        )
        fallback_groups = self._group_tasks(x, requests, batch.fallback_rows) if batch.fallback_rows else []
        parts = self._gpu_sampler.launch(x, batch)
        parts += [
            ([task.batch_index for task in group], self._sample_group(x, group, batch.num_top))
            for group in fallback_groups
        ]
        output = _merge_outputs(parts, device)
        if batch.groups:
            output.resample = lambda places: self._sample_with_torch(
                x[places], [requests[index] for index in places]
            )
        return output

    def _sample_with_torch(self, x: Tensor, requests: Sequence[SamplingRequest]) -> SamplerOutput:
        """Pick from a row of logits for each row, the plain way."""
        if not requests:
            return SamplerOutput(x.new_empty(0, dtype=torch.int64), x.new_empty(0))
        num_top = min(x.shape[1], max([request.num_top_tokens for request in requests]))
        groups = self._group_tasks(x, requests, range(len(requests)))
        return _merge_outputs(
            [
                ([task.batch_index for task in group], self._sample_group(x, group, num_top))
                for group in groups
            ],
            x.device,
        )

    def _group_tasks(
        self, x: Tensor, requests: Sequence[SamplingRequest], indices: Iterable[int]
    ) -> list[list[SamplingTask]]:
        """What is to be done for some rows, sorted into groups."""
        width, known = x.shape[1], None
        chosen = [(index, requests[index], requests[index].settings.compiled()) for index in indices]
        for _, request, _ in chosen:
            bias = request.settings.token_bias
            if bias is not None and bias is not known:
                check_bias(bias, width)
                known = bias
        groups: dict[object, list[SamplingTask]] = {}
        for index, request, compiled in chosen:
            task = make_task(
                index,
                request,
                compiled,
                compute_edits(request, compiled, self.vocabulary, width),
                width,
                x.device,
            )
            groups.setdefault(task.group_key, []).append(task)
        return list(groups.values())

    def _checked_logits(self, logits: Tensor, num_rows: int) -> Tensor:
        """Checked logits in float32, without the padding."""
        shape = logits.shape
        if len(shape) != 2 or shape[0] != num_rows or not logits.is_floating_point():
            raise InputError(
                f"logits must be floating point of shape ({num_rows}, vocab) for these rows, "
                f"found {logits.dtype} {tuple(shape)}."
            )
        width = self.vocabulary.width(shape[1])
        x = logits if width == shape[1] else logits[:, :width]
        if x.dtype != torch.float32:
            x = x.float()
        return x if x.stride(1) == 1 else x.contiguous()

    def _apply_cfg(self, logits: Tensor, requests: Sequence[SamplingRequest]) -> Tensor:
        """One row of logits for each row; a view where nothing is guided."""
        num_logits_rows = sum(2 if request.uses_cfg else 1 for request in requests)
        x = self._checked_logits(logits, num_logits_rows)
        if num_logits_rows == len(requests):
            return x
        sizes = torch.tensor([2 if request.uses_cfg else 1 for request in requests])
        first_rows = sizes.cumsum(0) - sizes
        cfg_rows = torch.tensor([index for index, request in enumerate(requests) if request.uses_cfg])
        scale = torch.tensor(
            [[_cfg_scale(request)] for request in requests if request.uses_cfg], dtype=x.dtype
        )
        first_rows, cfg_rows, scale, positive_rows = (
            part.to(x.device, non_blocking=True)
            for part in (first_rows, cfg_rows, scale, first_rows[cfg_rows])
        )
        mixed = x.index_select(0, first_rows)
        mixed[cfg_rows] = guidance.mix_logits(x[positive_rows], x[positive_rows + 1], scale)
        return mixed

    def _sample_group(self, x: Tensor, group: list[SamplingTask], num_top: int) -> GroupOutput:
        edited = bool(group[0].edits)
        if len(group) < len(x):
            x = x.index_select(
                0, torch.tensor([task.batch_index for task in group]).to(x.device, non_blocking=True)
            )
        elif edited:
            x = x.clone(memory_format=torch.contiguous_format)
        if edited:
            apply_edits(x, [task.edits for task in group])
        return sample_group(x, group, self.vocabulary, num_top)


def _merge_outputs(parts: Sequence[tuple[list[int], GroupOutput]], device: torch.device) -> SamplerOutput:
    """What the groups of a batch got, each with its rows' places, in the order of the batch."""
    output = parts[0][1] if len(parts) == 1 else join_groups(parts, device)
    tops = None if output.top_probs is None else output.top_probs.float()
    p = output.probs if output.probs.dtype == torch.float32 else output.probs.float()
    return SamplerOutput(output.tokens, p, output.top_tokens, tops, host_tokens=output.host_tokens)


def _device_context(device: torch.device) -> AbstractContextManager[object]:
    """Kernels are launched on the current device."""
    is_current = device.type != "cuda" or device.index == torch.cuda.current_device()
    return _NO_DEVICE_SWITCH if is_current else torch.cuda.device(device)


def _is_greedy_only(request: SamplingRequest) -> bool:
    """Whether a row is answered by its largest logit alone."""
    settings = request.settings
    return (
        settings.compiled().greedy_only
        and settings.token_bias is None
        and request.allowed is None
        and not (request.blocked or request.num_top_tokens or request.uses_cfg)
    )


def _cfg_scale(request: SamplingRequest) -> float:
    if request.settings.cfg_scale is None:
        raise InputError("A guided row needs settings with a cfg_scale.")
    return float(request.settings.cfg_scale)
