"""Sampler: logits in, tokens out, for a whole batch at once.

Rows are sorted into a few groups by what their settings ask for; each group goes through the steps it uses,
as tensors over all its rows, on whatever device the logits are. What a row gets depends on its own logits,
settings and state alone. Logits are never copied to the host and never changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import InputError
from . import direct, guidance
from .edits import apply, plan_edits
from .pick import Picked
from .pipeline import Task, choose, joined, make_task
from .rows import Picks, Row
from .settings import Settings
from .vocabulary import TokenizerLike, Vocabulary


class Sampler:
    """Chooses tokens for the rows of a batch. It remembers nothing of them."""

    Settings = Settings
    sample = staticmethod(direct.sample)

    def __init__(self, tokenizer: TokenizerLike | None = None, vocab_size: int | None = None) -> None:
        """A sampler for a model's vocabulary: the ids the tokenizer knows, or the first `vocab_size`.

        Columns beyond are padding and never chosen. The tokenizer also names the tokens that DRY and XTC
        spare unless settings do.
        """
        self.vocabulary = Vocabulary(tokenizer, vocab_size)

    @torch.no_grad()
    def sample_batch(self, logits: Tensor, rows: Sequence[Row]) -> Picks:
        """Pick a token for every row of logits (rows, vocab); of two neighbouring ones if the row is guided.

        Settings are read as they are now. A row that cannot be served does not keep the others from their
        tokens (see `Picks.error`); settings that cannot be meant raise InputError before anything is done.
        """
        x = self._mixed(logits, rows)
        if not rows:
            return Picks(x.new_empty(0, dtype=torch.int64), x.new_empty(0))
        width, device = x.shape[1], x.device
        tasks = []
        for place, row in enumerate(rows):
            plan = row.settings.plan()
            edits = plan_edits(row, plan, self.vocabulary, width)
            tasks.append(make_task(place, row, plan, edits, width, device))
        wanted = min(width, max((row.want_top for row in rows), default=0))
        groups: dict[object, list[Task]] = {}
        for task in tasks:
            groups.setdefault(task.company, []).append(task)
        parts = [
            ([task.place for task in group], self._choose(x, group, wanted)) for group in groups.values()
        ]
        picked = parts[0][1] if len(parts) == 1 else joined(parts, device)
        tops = None if picked.top_p is None else picked.top_p.float()
        return Picks(picked.tokens, picked.p.float(), picked.top_tokens, tops)

    def _mixed(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """One row of logits for each row, without the padding; a view where nothing is guided."""
        needed = sum(2 if row.guided else 1 for row in rows)
        if logits.dim() != 2 or len(logits) != needed or not logits.is_floating_point():
            raise InputError(
                f"logits must be floating point of shape ({needed}, vocab) for these rows, "
                f"found {logits.dtype} {tuple(logits.shape)}."
            )
        x = logits[:, : self.vocabulary.width(logits.shape[1])].float()
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


def _scale(row: Row) -> float:
    if row.settings.cfg_scale is None:
        raise InputError("A guided row needs settings with a cfg_scale.")
    return float(row.settings.cfg_scale)
