"""Sampler: logits in, tokens out, for a whole batch at once.

Rows are sorted into a few groups by what their settings ask for; each group goes through the steps it uses,
as tensors over all its rows, on whatever device the logits are. What a row gets depends on its own logits,
settings and state alone. Logits are never copied to the host and never changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ..kernels.sampling_layout import INFINITE_LOGITS, NAN_LOGITS, NO_TOKEN_ALLOWED, TOO_MANY_CANDIDATES
from ..sampler_chain import STATEFUL_STEPS, STEPS_BY_STAGE
from . import gpu_kernels
from .candidates import (
    STEPS_NEEDING_SORT,
    BatchParams,
    Candidates,
    DrawnTokens,
    all_candidates_in_chunks,
    batch_params,
    block_maxima,
    candidates_above_floor,
    draw_from_candidates,
    draw_from_full_vocab,
    floor_needs_total,
    greedy_output,
    log_prob_floor,
    top_k_candidates,
)
from .gpu_batch import GpuSampler
from .gpu_kernels import HostTokens, copy_to_host
from .logits_processors import NO_EDITS, LogitsEdits, apply_edits, check_bias, compute_edits, mix_logits
from .request import SamplerOutput, SamplingRequest
from .settings import CompiledSettings, Settings
from .steps import CANDIDATES_STEPS, DRAW_STEPS, LOGITS_STEPS, STATE_UPDATES, StepRows, Task, TaskGroup
from .vocabulary import SamplerTokenizer, SamplerVocabulary

_NO_DEVICE_SWITCH = nullcontext()


class Sampler:
    """Chooses tokens for the rows of a batch. What it caches of them saves time and changes nothing."""

    Settings = Settings

    def __init__(
        self,
        tokenizer: SamplerTokenizer | None = None,
        vocab_size: int | None = None,
        *,
        kernels: bool = True,
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
        if requests and has_kernels and self.kernels and logits.dim() == 2:
            with _device_context(device):
                return self._launch_kernels(
                    logits.detach() if logits.requires_grad else logits, requests, device
                )
        with torch.no_grad():
            if requests and all(map(_is_greedy_only, requests)):
                top, drawn = greedy_output(self._checked_logits(logits, len(requests)), 0)
                drawn.tokens = mark_failures(top, drawn.tokens)
            else:
                drawn = self._sample_with_torch(self._apply_cfg(logits, requests), requests)
        return PendingOutput(self, requests, drawn, copy_to_host(drawn.tokens) if logits.is_cuda else None)

    def sample_batch(self, logits: Tensor, requests: Sequence[SamplingRequest]) -> SamplerOutput:
        """`launch`, and wait for the tokens."""
        return self.launch(logits, requests).wait()

    def resample(
        self, x: Tensor, requests: Sequence[SamplingRequest], rows: list[int], num_top: int
    ) -> DrawnTokens:
        """Choose again for some rows of a batch, from its logits (rows, vocab) after CFG, with torch."""
        with torch.no_grad():
            return self._sample_with_torch(x[rows], [requests[row] for row in rows], num_top)

    def _launch_kernels(
        self, logits: Tensor, requests: Sequence[SamplingRequest], device: torch.device
    ) -> PendingOutput:
        """Launch kernels for the rows that have one, torch for the others."""
        batch = self._gpu_sampler.prepare(requests, self.vocabulary.width(logits.shape[1]), device)
        x = (
            self._apply_cfg(logits, requests)
            if batch.uses_cfg
            else self._checked_logits(logits, len(requests))
        )
        fallback_groups = self._group_tasks(x, requests, batch.fallback_rows) if batch.fallback_rows else []
        parts, host_tokens = self._gpu_sampler.launch(x, batch)
        parts += [
            ([task.batch_index for task in group], self._sample_group(x, group, batch.num_top))
            for group in fallback_groups
        ]
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
        groups = self._group_tasks(x, requests, range(len(requests)))
        return _merge_parts(
            [
                ([task.batch_index for task in group], self._sample_group(x, group, num_top))
                for group in groups
            ],
            x.device,
        )

    def _group_tasks(
        self, x: Tensor, requests: Sequence[SamplingRequest], indices: Iterable[int]
    ) -> list[list[SamplingTask]]:
        """The tasks of some rows, in groups that are worked on together."""
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
        size = self.vocabulary.size
        x = logits if size is None or size >= shape[1] else logits[:, :size]
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
        mixed[cfg_rows] = mix_logits(x[positive_rows], x[positive_rows + 1], scale)
        return mixed

    def _sample_group(self, x: Tensor, group: list[SamplingTask], num_top: int) -> DrawnTokens:
        edits_logits = group[0].edits_logits
        if len(group) < len(x):
            x = x.index_select(
                0, torch.tensor([task.batch_index for task in group]).to(x.device, non_blocking=True)
            )
        elif edits_logits:
            x = x.clone(memory_format=torch.contiguous_format)
        if edits_logits:
            apply_edits(x, [task.edits for task in group])
            if any([task.compiled.logits_steps for task in group]):
                apply_logits_steps(x, group, self.vocabulary)
        return sample_group(x, group, self.vocabulary, num_top)


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
        return SamplerOutput(tokens, drawn.probs, drawn.top_tokens, drawn.top_probs, resampled)

    def _resample(self, rows: list[int]) -> list[int]:
        assert self.saved_logits is not None
        drawn, num_top = self._drawn, 0 if self._drawn.top_tokens is None else self._drawn.top_tokens.shape[1]
        again = self._sampler.resample(self.saved_logits, self._requests, rows, num_top)
        drawn.tokens[rows], drawn.probs[rows] = again.tokens, again.probs
        if drawn.top_tokens is not None and again.top_tokens is not None:
            drawn.top_tokens[rows] = again.top_tokens
        if drawn.top_probs is not None and again.top_probs is not None:
            drawn.top_probs[rows] = again.top_probs
        self._host_tokens = self.saved_logits = None
        tokens: list[int] = drawn.tokens.tolist()
        return tokens


def _merge_parts(parts: Sequence[tuple[list[int], DrawnTokens]], device: torch.device) -> DrawnTokens:
    """The tokens of several groups, each with its rows' batch indices, in the order of the batch."""
    drawn = parts[0][1] if len(parts) == 1 else join_groups(parts, device)
    if drawn.top_probs is not None:
        drawn.top_probs = drawn.top_probs.float()
    if drawn.probs.dtype != torch.float32:
        drawn.probs = drawn.probs.float()
    return drawn


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


SMALL_VOCAB = 512  # up to here a vocabulary is one block

SearchKind = Literal["greedy", "unfiltered", "top_k", "floor_below_max", "floor_of_total", "full_vocab"]
GroupKey = tuple[SearchKind, bool, bool, bool]


class SamplingTask(NamedTuple):
    """A row of the batch with what its settings amount to.

    Tasks with the same `group_key`, which begins with `search_kind` and `edits_logits`, are worked on
    together.
    """

    batch_index: int
    request: SamplingRequest
    compiled: CompiledSettings
    edits: LogitsEdits
    log_prob_floor: float
    search_kind: SearchKind
    edits_logits: bool
    group_key: GroupKey


def task_group(
    tasks: Sequence[SamplingTask], vocabulary: SamplerVocabulary, width: int, device: torch.device
) -> TaskGroup:
    """Tasks of one group; `width` counts the tokens."""
    params = batch_params([task.compiled for task in tasks], device)
    return TaskGroup(tasks, params, vocabulary, width, device)


def make_task(
    batch_index: int,
    request: SamplingRequest,
    compiled: CompiledSettings,
    edits: LogitsEdits,
    width: int,
    device: torch.device,
) -> SamplingTask:
    """Decide how a row's candidates are found; `width` counts the tokens."""
    mu = None
    can_sync = device.type == "cpu"
    if can_sync and "mirostat" in compiled.steps:
        initial = STATEFUL_STEPS["mirostat"](compiled.params)
        mu = float(request.state.step_state("mirostat").at(request.position, initial, device))
    search = _search_for if mu is None else _search_for.__wrapped__  # no two targets are alike
    edits_logits = edits is not NO_EDITS or bool(compiled.logits_steps)
    floor, group_key = search(compiled, width, can_sync, mu, edits_logits)
    return SamplingTask(batch_index, request, compiled, edits, floor, group_key[0], edits_logits, group_key)


@lru_cache(maxsize=1024)
def _search_for(
    compiled: CompiledSettings, width: int, can_sync: bool, mu: float | None, edited: bool
) -> tuple[float, GroupKey]:
    """A row's floor and group key; `can_sync` if the host may wait for what lies above a floor."""
    floor = log_prob_floor(compiled, width, mu) if can_sync else -math.inf
    kind: SearchKind = "full_vocab"
    if compiled.greedy:
        kind = "greedy"
    elif 0 < compiled.top_k < width:
        kind = "top_k"
    elif not compiled.steps:
        kind = "unfiltered"
    elif floor > -math.inf:
        kind = "floor_of_total" if floor_needs_total(compiled) else "floor_below_max"
    # Sorting the vocabulary is so slow that no row should have to wait for another's.
    needs_sort = (
        kind == "full_vocab" and bool(compiled.steps & STEPS_NEEDING_SORT),
        kind == "full_vocab" and "typical" in compiled.steps,
    )
    return floor, (kind, edited, *needs_sort)


def sample_group(
    x: Tensor, tasks: Sequence[SamplingTask], vocabulary: SamplerVocabulary, num_top: int
) -> DrawnTokens:
    """Draw a token for every row of edited logits (rows, vocab), all of one group, and update the rows'
    states.

    Rows without a usable logit get a negative token.
    """
    group = task_group(tasks, vocabulary, x.shape[1], x.device)
    if tasks[0].search_kind == "greedy":
        top, output = greedy_output(x, num_top)
        update_states(group, None, output)
        output.tokens = mark_failures(top, output.tokens)
        return output
    maxima = block_maxima(x)
    top = maxima.amax(-1, keepdim=True)
    if tasks[0].search_kind == "unfiltered" and x.shape[1] > SMALL_VOCAB:
        output = draw_from_full_vocab(x, top, group.params, uniforms_for(tasks, x.device), num_top)
    else:
        parts = []
        for members, c in _find_candidates(x, tasks, group.params, maxima):
            selected = group if len(members) == len(tasks) else _select(group, members)
            _apply_steps(c, selected)
            descending = tasks[0].search_kind == "top_k"  # found in this order on every device
            parts.append((members, _draw(c, selected, num_top, descending)))
        output = parts[0][1] if len(parts) == 1 else join_groups(parts, x.device)
    output.tokens = mark_failures(top.squeeze(1), output.tokens)
    return output


def final_candidates(
    x: Tensor, tasks: Sequence[SamplingTask], vocabulary: SamplerVocabulary, maxima: Tensor
) -> Iterator[tuple[list[int], Candidates]]:
    """The candidates of rows after every step, some rows at a time, each time with the rows' task indices."""
    group = task_group(tasks, vocabulary, x.shape[1], x.device)
    for members, c in _find_candidates(x, tasks, group.params, maxima):
        _apply_steps(c, _select(group, members))
        yield members, c


def _select(group: TaskGroup, members: list[int]) -> TaskGroup:
    """Some of a group's rows."""
    tasks = [group.tasks[member] for member in members]
    params = batch_params([task.compiled for task in tasks], group.device)
    return group._replace(tasks=tasks, params=params)


def _find_candidates(
    x: Tensor, tasks: Sequence[SamplingTask], params: BatchParams, maxima: Tensor
) -> Iterable[tuple[list[int], Candidates]]:
    kind = tasks[0].search_kind
    compiled_rows = [task.compiled for task in tasks]
    if kind == "top_k":
        return [(list(range(len(tasks))), top_k_candidates(x, compiled_rows, params, maxima))]
    if kind in ("floor_below_max", "floor_of_total"):
        floors = [task.log_prob_floor for task in tasks]
        return candidates_above_floor(x, compiled_rows, params, floors, maxima)
    return all_candidates_in_chunks(x, range(len(tasks)), compiled_rows)


def _apply_steps(c: Candidates, group: TaskGroup) -> None:
    used = frozenset[str]().union(*[task.compiled.steps for task in group.tasks])
    for step in STEPS_BY_STAGE["candidates"]:
        if step in used:
            CANDIDATES_STEPS[step](c, StepRows(step, group))


def apply_logits_steps(x: Tensor, tasks: Sequence[SamplingTask], vocabulary: SamplerVocabulary) -> None:
    """Apply the steps on logits that need no text, in place, to edited logits (rows, vocab)."""
    used = frozenset[str]().union(*[task.compiled.logits_steps for task in tasks])
    for step in STEPS_BY_STAGE["logits"]:
        if step in used:
            LOGITS_STEPS[step](x, StepRows(step, task_group(tasks, vocabulary, x.shape[1], x.device)))


def _draw(c: Candidates, group: TaskGroup, num_top: int, descending: Tensor | bool) -> DrawnTokens:
    uniforms = uniforms_for(group.tasks, group.device)
    used = frozenset[str]().union(*[task.compiled.steps for task in group.tasks])
    for step in STEPS_BY_STAGE["draw"]:
        if step in used:
            rows = StepRows(step, group)
            uniforms = DRAW_STEPS[step](c, uniforms, rows)
            descending = True if rows.active is None else descending | rows.active
    drawn = draw_from_candidates(c, uniforms, num_top, descending)
    if any([task.compiled.stateful_steps for task in group.tasks]):
        update_states(group, c, drawn)
    return drawn


def uniforms_for(tasks: Sequence[Task], device: torch.device) -> Tensor:
    """The uniform numbers (rows, 1) of some rows."""
    uniforms = [[task.request.state.uniform(task.request.position)] for task in tasks]
    return torch.tensor(uniforms, dtype=torch.float64).to(device, non_blocking=True)


def update_states(group: TaskGroup, c: Candidates | None, drawn: DrawnTokens) -> None:
    """Let drawn tokens move the states of stateful steps; greedy rows have no candidates."""
    for step in frozenset[str]().union(*[task.compiled.stateful_steps for task in group.tasks]):
        rows = StepRows(step, group)
        probs = drawn.probs.double().unsqueeze(1)
        rows.record_state(STATE_UPDATES[step](c, drawn.tokens.unsqueeze(1), probs, rows))


def mark_failures(top: Tensor, tokens: Tensor) -> Tensor:
    """Tokens, negative where the largest logit of a row (rows,) says that there is nothing to choose."""
    if top.device.type == "cpu" and math.isfinite(sum(top.tolist())):
        return tokens
    tokens = torch.where(top == -torch.inf, NO_TOKEN_ALLOWED, tokens)
    tokens = torch.where(top == torch.inf, INFINITE_LOGITS, tokens)
    return torch.where(top.isnan(), NAN_LOGITS, tokens)


def join_groups(parts: Sequence[tuple[Sequence[int], DrawnTokens]], device: torch.device) -> DrawnTokens:
    """The tokens of several groups in the order of the batch; each group comes with its rows' indices."""
    batch_order = torch.tensor([member for members, _ in parts for member in members]).argsort()
    batch_order = batch_order.to(device, non_blocking=True)
    output = DrawnTokens(
        torch.cat([part.tokens for _, part in parts])[batch_order],
        torch.cat([part.probs for _, part in parts])[batch_order],
    )
    tops = [(part.top_tokens, part.top_probs) for _, part in parts]
    if all(tokens is not None for tokens, _ in tops):
        output.top_tokens = torch.cat([tokens for tokens, _ in tops if tokens is not None])[batch_order]
        output.top_probs = torch.cat([p for _, p in tops if p is not None])[batch_order]
    return output
