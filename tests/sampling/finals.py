"""The final probabilities of a row, as a dictionary: what a test compares with the oracle's."""

from __future__ import annotations

import torch
from torch import Tensor

from exlm.sampling import Row, SamplerState, Settings
from exlm.sampling.edits import NO_EDITS
from exlm.sampling.order import run_maxima
from exlm.sampling.pipeline import Task, finalists, make_task
from exlm.sampling.vocabulary import Vocabulary
from tests.sampling.drawn import neutral

Probabilities = dict[int, float]


def task(place: int, settings: Settings, width: int) -> Task:
    """A row without a text."""
    row = Row(settings, SamplerState(settings, 0))
    return make_task(place, row, settings.plan(), NO_EDITS, width, torch.device("cpu"))


def final_probabilities(x: Tensor, settings: list[Settings]) -> list[Probabilities]:
    """After every step, for rows of logits that must be of one kind."""
    tasks = [task(place, each, x.shape[1]) for place, each in enumerate(settings)]
    if tasks[0].kind == "greedy":
        return [{int(token): 1.0} for token in x.argmax(-1)]
    found: dict[int, Probabilities] = {}
    for members, c in finalists(x, tasks, Vocabulary(), run_maxima(x)):
        ids = torch.arange(x.shape[1]).expand(len(members), -1) if c.ids is None else c.ids
        for member, row_ids, row_p in zip(members, ids.tolist(), c.p.tolist(), strict=True):
            found[member] = {token: p for token, p in zip(row_ids, row_p, strict=True) if p > 0}
    return [found[place] for place in range(len(tasks))]


def of_probabilities(p: list[float], **changes: float) -> Probabilities:
    """What becomes of some probabilities under settings that are neutral but for the changes."""
    return final_probabilities(torch.tensor([p]).log(), [neutral(**changes)])[0]
