"""The final probabilities of a row, as a dictionary: what a test compares with the oracle's."""

from __future__ import annotations

import torch
from torch import Tensor

from exlm.sampling import SamplerState, SamplingRequest, Settings
from exlm.sampling.candidates import block_maxima
from exlm.sampling.logits_processors import NO_EDITS
from exlm.sampling.sampler import SamplingTask, apply_logits_steps, final_candidates, make_task, row_group
from exlm.sampling.vocabulary import SamplerVocabulary
from tests.sampling.random_inputs import neutral

Probabilities = dict[int, float]


def task_of(batch_index: int, settings: Settings, width: int) -> SamplingTask:
    """A row without a text."""
    request = SamplingRequest(settings, SamplerState(settings, 0))
    return make_task(batch_index, request, settings.compiled(), NO_EDITS, width, torch.device("cpu"))


def final_probabilities(x: Tensor, settings: list[Settings]) -> list[Probabilities]:
    """After every step, for rows of logits that must be of one kind."""
    tasks = [task_of(row, each, x.shape[1]) for row, each in enumerate(settings)]
    if tasks[0].search_kind == "greedy":
        return [{int(token): 1.0} for token in x.argmax(-1)]
    x = x.clone()
    apply_logits_steps(x, tasks, SamplerVocabulary())
    found: dict[int, Probabilities] = {}
    group = row_group(tasks, SamplerVocabulary(), x.shape[1], x.device)
    for members, c, _ in final_candidates(x, tasks, group, block_maxima(x)):
        ids = torch.arange(x.shape[1]).expand(len(members), -1) if c.ids is None else c.ids
        for member, row_ids, row_p in zip(members, ids.tolist(), c.p.tolist(), strict=True):
            found[member] = {token: p for token, p in zip(row_ids, row_p, strict=True) if p > 0}
    return [found[row] for row in range(len(tasks))]


def from_probabilities(p: list[float], **changes: float) -> Probabilities:
    """What becomes of some probabilities under settings that are neutral but for the changes."""
    return final_probabilities(torch.tensor([p]).log(), [neutral(**changes)])[0]
