"""The final probabilities of a row, as a dictionary: what a test compares with the oracle's."""

from __future__ import annotations

import torch
from torch import Tensor

from exlm.sampling import SamplerState, SamplingRequest, Settings
from exlm.sampling.candidates import block_maxima
from exlm.sampling.logits_processors import NO_EDITS
from exlm.sampling.sampler import apply_logits_steps, final_candidates
from exlm.sampling.steps import RowGroup, make_row
from exlm.sampling.vocabulary import SamplerVocabulary
from tests.sampling.random_inputs import neutral

Probabilities = dict[int, float]


def group_of(settings: list[Settings], width: int) -> RowGroup:
    """Rows without a text."""
    device = torch.device("cpu")
    requests = [SamplingRequest(each, SamplerState(each, 0)) for each in settings]
    rows = [
        make_row(index, request, request.settings.compiled(), NO_EDITS, width, device)
        for index, request in enumerate(requests)
    ]
    return RowGroup(rows, SamplerVocabulary(), width, device)


def final_probabilities(x: Tensor, settings: list[Settings]) -> list[Probabilities]:
    """After every step, for rows of logits that must be of one kind."""
    group = group_of(settings, x.shape[1])
    if group.search == "greedy":
        return [{int(token): 1.0} for token in x.argmax(-1)]
    x = x.clone()
    apply_logits_steps(x, group)
    found: dict[int, Probabilities] = {}
    for members, _, c in final_candidates(x, group, block_maxima(x)):
        ids = torch.arange(x.shape[1]).expand(len(members), -1) if c.ids is None else c.ids
        for member, row_ids, row_p in zip(members, ids.tolist(), c.p.tolist(), strict=True):
            found[member] = {token: p for token, p in zip(row_ids, row_p, strict=True) if p > 0}
    return [found[row] for row in range(len(settings))]


def from_probabilities(p: list[float], **changes: float) -> Probabilities:
    """What becomes of some probabilities under settings that are neutral but for the changes."""
    return final_probabilities(torch.tensor([p]).log(), [neutral(**changes)])[0]
