"""`Sampler`: takes the logits of a batch, gives a token for every row.

On a GPU, kernels sample the rows that they support (`gpu_batch`). Torch samples all others, on the device of
the logits: it groups rows by the steps that their settings ask for, and each step works on all rows of a
group. What a row gets depends on its own logits, settings and state alone. The sampler never copies logits to
the host and never changes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate

import torch
from torch import Tensor

from ..errors import InputError
from ..kernels.sampling_layout import INFINITE_LOGITS, NAN_LOGITS, NO_TOKEN_ALLOWED, TOO_MANY_CANDIDATES
from ..sampler_chain import STEPS_BY_STAGE
from . import gpu_kernels
from .candidates import (
    Candidates,
    DrawnRows,
    DrawnTokens,
    all_candidates_in_chunks,
    block_maxima,
    candidates_above_floor,
    draw_from_candidates,
    draw_from_full_vocab,
    draw_greedy,
    top_k_candidates,
)
from .gpu_batch import GpuSampler
from .gpu_buffers import HostTokens, copy_to_host
from .logits_processors import apply_edits, check_bias, compute_edits, mix_logits
from .request import SamplerOutput, SamplingRequest
from .settings import Settings
from .steps import (
    CANDIDATES_STEPS,
    DRAW_STEPS,
    LOGITS_STEPS,
    STATE_UPDATES,
    BatchRow,
    GroupKey,
    RowGroup,
    make_row,
)
from .vocabulary import SamplerTokenizer, SamplerVocabulary

_NO_DEVICE_SWITCH = nullcontext()


class Sampler:
    """Chooses tokens for the rows of a batch. What it caches of them saves time and changes nothing."""

    Settings = Settings

    def __init__(
        self, tokenizer: SamplerTokenizer | None = None, vocab_size: int | None = None, *, kernels: bool = True
    ) -> None:
        """A sampler for a model's vocabulary: the ids the tokenizer knows, or the first `vocab_size`.

        Columns beyond are padding and never chosen. The tokenizer also gives the tokens that DRY and XTC
        leave alone, unless settings do. Without `kernels` everything is plain torch, on any device.
        """
        self.kernels = kernels
        self.vocabulary = SamplerVocabulary(tokenizer, vocab_size)
        self._gpu_sampler = GpuSampler(self.vocabulary)
        self._has_kernels: dict[torch.device, bool] = {}

    def launch(self, logits: Tensor, requests: Sequence[SamplingRequest]) -> PendingOutput:
        """Start choosing a token for every request from logits (rows, vocab), two rows if it uses CFG.

        Does not wait for the device: its tokens can feed the next pass before the host has read them, and
        the logits may be overwritten by work that is queued later. Settings are read as they are now. A row
        that cannot be sampled does not affect the others (see `SamplerOutput.error`); invalid settings raise
        InputError before anything is done. Requests must not change before `wait`.
        """
        device = logits.device
        has_kernels = self._has_kernels.get(device)
        if has_kernels is None:
            has_kernels = self._has_kernels[device] = gpu_kernels.has_kernels_for(device)
        if logits.requires_grad:
            logits = logits.detach()
        if requests and has_kernels and self.kernels and logits.dim() == 2:
            with _device_context(device):
                return self._launch_kernels(logits, requests, device)
        if requests and all([request.takes_argmax for request in requests]):
            top, drawn = draw_greedy(self._checked_logits(logits, len(requests)), 0)
            drawn.tokens = _mark_failures(top, drawn.tokens)
        else:
            with torch.no_grad():
                drawn = self._sample_with_torch(self._apply_cfg(logits, requests), requests)
        return PendingOutput(self, requests, drawn, copy_to_host(drawn.tokens) if logits.is_cuda else None)

    def sample_batch(self, logits: Tensor, requests: Sequence[SamplingRequest]) -> SamplerOutput:
        """`launch`, and wait for the tokens."""
        return self.launch(logits, requests).wait()

    def resample_with_torch(
        self, x: Tensor, requests: Sequence[SamplingRequest], rows: list[int], num_top: int
    ) -> DrawnTokens:
        """Draw again for rows with too many candidates for their kernel, from logits (rows, vocab) after CFG."""
        with torch.no_grad():
            return self._sample_with_torch(x[rows], [requests[row] for row in rows], num_top)

    def _launch_kernels(
        self, logits: Tensor, requests: Sequence[SamplingRequest], device: torch.device
    ) -> PendingOutput:
        """Launch kernels for the rows that have one, torch for the others."""
        batch = self._gpu_sampler.prepare(requests, self.vocabulary.width(logits.shape[1]), device)
        x = self._apply_cfg(logits, requests) if batch.uses_cfg else self._checked_logits(logits, len(requests))
        fallback_groups = self._group_rows(x, requests, batch.fallback_rows) if batch.fallback_rows else []
        parts, host_tokens = self._gpu_sampler.launch(x, batch)
        for group in fallback_groups:
            parts += self._sample_group(x, group, batch.num_top)
        drawn = _merge_parts(parts, device)
        if host_tokens is None and device.type == "cuda":
            host_tokens = copy_to_host(drawn.tokens)
        saved_logits = None
        if batch.may_overflow:
            is_view = x.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()
            saved_logits = x.clone() if is_view else x
        return PendingOutput(self, requests, drawn, host_tokens, saved_logits)

    def _sample_with_torch(
        self, x: Tensor, requests: Sequence[SamplingRequest], num_top: int | None = None
    ) -> DrawnTokens:
        """Choose a token for each row of logits with torch alone; `num_top` None is what the rows ask for."""
        if not requests:
            return DrawnTokens(x.new_empty(0, dtype=torch.int64), x.new_empty(0))
        if num_top is None:
            num_top = min(x.shape[1], max([request.num_top_tokens for request in requests]))
        groups = self._group_rows(x, requests, range(len(requests)))
        return _merge_parts([part for group in groups for part in self._sample_group(x, group, num_top)], x.device)

    def _group_rows(self, x: Tensor, requests: Sequence[SamplingRequest], indices: Iterable[int]) -> list[RowGroup]:
        """Some rows of the batch, in groups that go through the steps together."""
        width, checked_bias = x.shape[1], None
        chosen = [(index, requests[index], requests[index].settings.compiled()) for index in indices]
        for _, request, _ in chosen:
            bias = request.settings.token_bias
            if bias is not None and bias is not checked_bias:
                check_bias(bias, width)
                checked_bias = bias
        groups: dict[GroupKey, list[BatchRow]] = {}
        for index, request, compiled in chosen:
            edits = compute_edits(request, compiled, self.vocabulary, width)
            row = make_row(index, request, compiled, edits, width, x.device)
            groups.setdefault(row.group_key, []).append(row)
        return [RowGroup(rows, self.vocabulary, width, x.device) for rows in groups.values()]

    def _checked_logits(self, logits: Tensor, num_rows: int) -> Tensor:
        """Checked logits in float32, without the padding."""
        shape = logits.shape
        if len(shape) != 2 or shape[0] != num_rows or not logits.is_floating_point():
            raise InputError(
                f"logits must be floating point of shape ({num_rows}, vocab) for these rows, "
                f"found {logits.dtype} {tuple(shape)}."
            )
        size = self.vocabulary.size
        x = logits if size is None or size >= shape[1] else logits[:, :size]
        if x.dtype != torch.float32:
            x = x.float()
        return x if x.stride(1) == 1 else x.contiguous()

    def _apply_cfg(self, logits: Tensor, requests: Sequence[SamplingRequest]) -> Tensor:
        """One row of logits for each request, two mixed to one where it uses CFG; a view where none does."""
        sizes = [2 if request.uses_cfg else 1 for request in requests]
        x = self._checked_logits(logits, sum(sizes))
        if len(x) == len(requests):
            return x
        first_rows = torch.tensor([0, *accumulate(sizes[:-1])])
        cfg_rows = torch.tensor([index for index, request in enumerate(requests) if request.uses_cfg])
        scale = torch.tensor([[_cfg_scale(request)] for request in requests if request.uses_cfg], dtype=x.dtype)
        first_rows, cfg_rows, scale, positive_rows = (
            part.to(x.device, non_blocking=True) for part in (first_rows, cfg_rows, scale, first_rows[cfg_rows])
        )
        mixed = x.index_select(0, first_rows)
        mixed[cfg_rows] = mix_logits(x[positive_rows], x[positive_rows + 1], scale)
        return mixed

    def _sample_group(self, x: Tensor, group: RowGroup, num_top: int) -> list[DrawnRows]:
        """Draw a token for the rows of one group from the batch's logits; in parts with the batch indices."""
        if len(group.rows) < len(x):
            x = x.index_select(0, torch.tensor(group.batch_indices).to(x.device, non_blocking=True))
        elif group.edits_logits:
            x = x.clone(memory_format=torch.contiguous_format)
        if group.edits_logits:
            apply_edits(x, [row.edits for row in group.rows])
            apply_logits_steps(x, group)
        return _draw_group(x, group, num_top)


class PendingOutput:
    """The tokens of a batch that is launched, perhaps not computed yet."""

    __slots__ = ("_drawn", "_host_tokens", "_requests", "_sampler", "saved_logits", "tokens")

    def __init__(
        self,
        sampler: Sampler,
        requests: Sequence[SamplingRequest],
        drawn: DrawnTokens,
        host_tokens: HostTokens | None = None,
        saved_logits: Tensor | None = None,
    ) -> None:
        """Without `host_tokens` the host reads `drawn`; with `saved_logits` rows may be drawn again."""
        self._sampler, self._requests, self._drawn = sampler, requests, drawn
        self._host_tokens, self.saved_logits = host_tokens, saved_logits
        self.tokens = drawn.tokens
        """The tokens (rows,) as int64 on the logits' device; negative ones are failures."""

    def wait(self) -> SamplerOutput:
        """The tokens on the host; waits for the sampler's work and not for what was queued after it.

        A row that had too many candidates for the kernel is drawn again from the saved logits.
        """
        drawn = self._drawn
        tokens: list[int] = (drawn.tokens if self._host_tokens is None else self._host_tokens).tolist()
        resampled = self.saved_logits is not None and TOO_MANY_CANDIDATES in tokens
        if resampled:
            tokens = self._resample([row for row, token in enumerate(tokens) if token == TOO_MANY_CANDIDATES])
        on_host = drawn.tokens if self._host_tokens is None and drawn.tokens.is_cpu else None
        return SamplerOutput(tokens, drawn.probs, drawn.top_tokens, drawn.top_probs, resampled, on_host)

    def _resample(self, rows: list[int]) -> list[int]:
        assert self.saved_logits is not None
        drawn, num_top = self._drawn, 0 if self._drawn.top_tokens is None else self._drawn.top_tokens.shape[1]
        again = self._sampler.resample_with_torch(self.saved_logits, self._requests, rows, num_top)
        drawn.tokens[rows], drawn.probs[rows] = again.tokens, again.probs
        if drawn.top_tokens is not None and again.top_tokens is not None:
            drawn.top_tokens[rows] = again.top_tokens
        if drawn.top_probs is not None and again.top_probs is not None:
            drawn.top_probs[rows] = again.top_probs
        self._host_tokens = self.saved_logits = None
        tokens: list[int] = drawn.tokens.tolist()
        return tokens


def _merge_parts(parts: Sequence[DrawnRows], device: torch.device) -> DrawnTokens:
    """The tokens of several groups, each with its rows' indices, in the order of the batch; in float32."""
    drawn = parts[0][1]
    if len(parts) > 1:
        batch_order = torch.tensor([row for rows, _ in parts for row in rows]).argsort()
        batch_order = batch_order.to(device, non_blocking=True)
        drawn = DrawnTokens(
            torch.cat([part.tokens for _, part in parts])[batch_order],
            torch.cat([part.probs for _, part in parts])[batch_order],
        )
        tops = [(part.top_tokens, part.top_probs) for _, part in parts]
        if all(tokens is not None for tokens, _ in tops):
            drawn.top_tokens = torch.cat([tokens for tokens, _ in tops if tokens is not None])[batch_order]
            drawn.top_probs = torch.cat([p for _, p in tops if p is not None])[batch_order]
    if drawn.top_probs is not None:
        drawn.top_probs = drawn.top_probs.float()
    if drawn.probs.dtype != torch.float32:
        drawn.probs = drawn.probs.float()
    return drawn


def _device_context(device: torch.device) -> AbstractContextManager[object]:
    """Kernels are launched on the current device."""
    is_current = device.type != "cuda" or device.index == torch.cuda.current_device()
    return _NO_DEVICE_SWITCH if is_current else torch.cuda.device(device)


def _cfg_scale(request: SamplingRequest) -> float:
    if request.settings.cfg_scale is None:
        raise InputError("A request that uses CFG needs settings with a cfg_scale.")
    return float(request.settings.cfg_scale)


SMALL_VOCAB = 512  # up to here a vocabulary is one block


def apply_logits_steps(x: Tensor, group: RowGroup) -> None:
    """Apply the steps on logits that need no text, in place, to edited logits (rows, vocab)."""
    for step in STEPS_BY_STAGE["logits"]:
        if step in group.active:
            LOGITS_STEPS[step](x, group, group.active[step])


def final_candidates(x: Tensor, group: RowGroup, maxima: Tensor) -> Iterator[tuple[list[int], RowGroup, Candidates]]:
    """The candidates of a group's rows after every step, some rows at a time.

    Each time with these rows' indices in the group, and the group of them alone.
    """
    found: Iterable[tuple[list[int], Candidates]]
    if group.search == "top_k":
        found = [(list(range(len(x))), top_k_candidates(x, group.compiled, group.batch_params, maxima))]
    elif group.search in ("floor_of_max", "floor_of_total"):
        floors = [row.log_prob_floor for row in group.rows]
        found = candidates_above_floor(x, group.compiled, group.batch_params, floors, maxima)
    else:
        found = all_candidates_in_chunks(x, range(len(x)), group.compiled)
    for members, c in found:
        selected = group if len(members) == len(x) else group.select(members)
        for step in STEPS_BY_STAGE["candidates"]:
            if step in selected.active:
                CANDIDATES_STEPS[step](c, selected, selected.active[step])
        yield members, selected, c


def _draw_group(x: Tensor, group: RowGroup, num_top: int) -> list[DrawnRows]:
    """Draw a token for every row of edited logits (rows, vocab), and update the rows' states.

    The tokens come in parts, each with its rows' batch indices; rows without a usable logit get a negative one.
    """
    if group.search == "greedy":
        top, drawn = draw_greedy(x, num_top)
        update_states(group, None, drawn)
        drawn.tokens = _mark_failures(top, drawn.tokens)
        return [(group.batch_indices, drawn)]
    maxima = block_maxima(x)
    top = maxima.amax(-1, keepdim=True)
    if group.search == "unfiltered" and x.shape[1] > SMALL_VOCAB:
        drawn = draw_from_full_vocab(x, top, group.batch_params, group.uniforms(), num_top)
        drawn.tokens = _mark_failures(top.squeeze(1), drawn.tokens)
        return [(group.batch_indices, drawn)]
    parts = []
    for members, selected, c in final_candidates(x, group, maxima):
        uniforms = selected.uniforms()
        descending: Tensor | bool = group.search == "top_k"  # found in this order on every device
        for step in STEPS_BY_STAGE["draw"]:
            if step in selected.active:
                active = selected.active[step]
                uniforms = DRAW_STEPS[step](c, uniforms, selected)
                descending = True if active is None else descending | active
        drawn = draw_from_candidates(c, uniforms, num_top, descending)
        update_states(selected, c, drawn)
        part_top = top if selected is group else top[members]
        drawn.tokens = _mark_failures(part_top.squeeze(1), drawn.tokens)
        parts.append((selected.batch_indices, drawn))
    return parts


def update_states(group: RowGroup, c: Candidates | None, drawn: DrawnTokens) -> None:
    """Update the states of stateful steps after the drawn tokens; greedy rows have no candidates."""
    for step in group.stateful_steps:
        probs = drawn.probs.double().unsqueeze(1)
        group.record_state(step, STATE_UPDATES[step](c, drawn.tokens.unsqueeze(1), probs, group))


def _mark_failures(top: Tensor, tokens: Tensor) -> Tensor:
    """The tokens, with a failure code (negative) where the largest logit of a row (rows,) is not finite."""
    if top.is_cpu and math.isfinite(sum(top.tolist())):
        return tokens
    tokens = torch.where(top == -torch.inf, NO_TOKEN_ALLOWED, tokens)
    tokens = torch.where(top == torch.inf, INFINITE_LOGITS, tokens)
    return torch.where(top.isnan(), NAN_LOGITS, tokens)
