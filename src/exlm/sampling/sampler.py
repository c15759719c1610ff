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
from . import direct, fused, guidance
from .desk import Desk
from .edits import apply, check_bias, plan_edits
from .pick import Picked, pick_greedy
from .pipeline import Task, choose, failures, joined, make_task
from .rows import Picks, Row
from .settings import Settings
from .vocabulary import TokenizerLike, Vocabulary

_THERE = nullcontext()


class Sampler:
    """Chooses tokens for the rows of a batch. What it remembers of them saves time and changes nothing."""

    Settings = Settings
    sample = staticmethod(direct.sample)

    def __init__(
        self,
        tokenizer: TokenizerLike | None = None,
        vocab_size: int | None = None,
        *,
        kernels: bool = True,
    ) -> None:
        """A sampler for a model's vocabulary: the ids the tokenizer knows, or the first `vocab_size`.

        Columns beyond are padding and never chosen. The tokenizer also names the tokens that DRY and XTC
        spare unless settings do. Without `kernels` everything is plain torch, on any device.
        """
        self.kernels = kernels
        self.vocabulary = Vocabulary(tokenizer, vocab_size)
        self._desk = Desk(self.vocabulary)

    def sample_batch(self, logits: Tensor, rows: Sequence[Row]) -> Picks:
        """Pick a token for every row of logits (rows, vocab); of two neighbouring ones if the row is guided.

        Settings are read as they are now. A row that cannot be served does not keep the others from their
        tokens (see `Picks.error`); settings that cannot be meant raise InputError before anything is done.
        """
        device = logits.device
        if rows and self.kernels and fused.serves(device) and logits.dim() == 2:
            with _on(device):
                return self._by_kernels(logits.detach() if logits.requires_grad else logits, rows, device)
        with torch.no_grad():
            if rows and all(map(_wants_the_largest, rows)):
                top, picked = pick_greedy(self._tokens(logits, len(rows)), 0)
                return Picks(failures(top, picked.tokens), picked.p)
            return self._sample(self._mixed(logits, rows), rows)

    def _by_kernels(self, logits: Tensor, rows: Sequence[Row], device: torch.device) -> Picks:
        """Have kernels pick, for all rows that have a lane."""
        batch = self._desk.seat(rows, self.vocabulary.width(logits.shape[1]), device)
        x = self._mixed(logits, rows) if batch.guided else self._tokens(logits, len(rows))
        others = self._tasks(x, rows, batch.others) if batch.others else []
        parts = self._desk.pick(x, batch)
        parts += [([task.place for task in group], self._choose(x, group, batch.wanted)) for group in others]
        picks = _picks(parts, device)
        if batch.parties:
            picks.again = lambda places: self._sample(x[places], [rows[place] for place in places])
        return picks

    def _sample(self, x: Tensor, rows: Sequence[Row]) -> Picks:
        """Pick from a row of logits for each row, the plain way."""
        if not rows:
            return Picks(x.new_empty(0, dtype=torch.int64), x.new_empty(0))
        wanted = min(x.shape[1], max([row.want_top for row in rows]))
        groups = self._tasks(x, rows, range(len(rows)))
        return _picks(
            [([task.place for task in group], self._choose(x, group, wanted)) for group in groups], x.device
        )

    def _tasks(self, x: Tensor, rows: Sequence[Row], places: Iterable[int]) -> list[list[Task]]:
        """What is to be done for some rows, sorted into groups."""
        width, known = x.shape[1], None
        chosen = [(place, rows[place], rows[place].settings.plan()) for place in places]
        for _, row, _ in chosen:
            bias = row.settings.token_bias
            if bias is not None and bias is not known:
                check_bias(bias, width)
                known = bias
        groups: dict[object, list[Task]] = {}
        for place, row, plan in chosen:
            task = make_task(place, row, plan, plan_edits(row, plan, self.vocabulary, width), width, x.device)
            groups.setdefault(task.company, []).append(task)
        return list(groups.values())

    def _tokens(self, logits: Tensor, needed: int) -> Tensor:
        """Checked logits in float32, without the padding."""
        shape = logits.shape
        if len(shape) != 2 or shape[0] != needed or not logits.is_floating_point():
            raise InputError(
                f"logits must be floating point of shape ({needed}, vocab) for these rows, "
                f"found {logits.dtype} {tuple(shape)}."
            )
        width = self.vocabulary.width(shape[1])
        x = logits if width == shape[1] else logits[:, :width]
        if x.dtype != torch.float32:
            x = x.float()
        return x if x.stride(1) == 1 else x.contiguous()

    def _mixed(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """One row of logits for each row; a view where nothing is guided."""
        needed = sum(2 if row.guided else 1 for row in rows)
        x = self._tokens(logits, needed)
        if needed == len(rows):
            return x
        sizes = torch.tensor([2 if row.guided else 1 for row in rows])
        firsts = sizes.cumsum(0) - sizes
        pairs = torch.tensor([place for place, row in enumerate(rows) if row.guided])
        scale = torch.tensor([[_scale(row)] for row in rows if row.guided], dtype=x.dtype)
        firsts, pairs, scale, wanted = (
            part.to(x.device, non_blocking=True) for part in (firsts, pairs, scale, firsts[pairs])
        )
        mixed = x.index_select(0, firsts)
        mixed[pairs] = guidance.mix(x[wanted], x[wanted + 1], scale)
        return mixed

    def _choose(self, x: Tensor, group: list[Task], wanted: int) -> Picked:
        edited = bool(group[0].edits)
        if len(group) < len(x):
            x = x.index_select(
                0, torch.tensor([task.place for task in group]).to(x.device, non_blocking=True)
            )
        elif edited:
            x = x.clone(memory_format=torch.contiguous_format)
        if edited:
            apply(x, [task.edits for task in group])
        return choose(x, group, self.vocabulary, wanted)


def _picks(parts: Sequence[tuple[list[int], Picked]], device: torch.device) -> Picks:
    """What the groups of a batch got, each with its rows' places, in the order of the batch."""
    picked = parts[0][1] if len(parts) == 1 else joined(parts, device)
    tops = None if picked.top_p is None else picked.top_p.float()
    p = picked.p if picked.p.dtype == torch.float32 else picked.p.float()
    return Picks(picked.tokens, p, picked.top_tokens, tops, told=picked.told)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Kernels are launched on the current device."""
    there = device.type != "cuda" or device.index == torch.cuda.current_device()
    return _THERE if there else torch.cuda.device(device)


def _wants_the_largest(row: Row) -> bool:
    """Whether a row is answered by its largest logit alone."""
    settings = row.settings
    return (
        settings.plan().bare
        and settings.token_bias is None
        and row.allowed is None
        and not (row.blocked or row.want_top or row.guided)
    )


def _scale(row: Row) -> float:
    if row.settings.cfg_scale is None:
        raise InputError("A guided row needs settings with a cfg_scale.")
    return float(row.settings.cfg_scale)
