"""Padded id tensors: padding, stripping, and masks that contradict the offsets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exlm import InputError
from exlm.legacy.arguments import id_lists, strip_padding
from exlm.tokenizer.tokenizer import pad_left

PAD = 99


@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=9), min_size=1, max_size=4), st.booleans())
def test_strip_padding_inverts_pad_left(rows: list[list[int]], additive: bool) -> None:
    table = pad_left(rows, PAD)
    seen = table != PAD
    mask = torch.zeros(table.shape).masked_fill_(~seen, -torch.inf) if additive else seen
    offsets = torch.tensor([len(row) - table.shape[1] for row in rows])
    for found in (
        strip_padding(table, mask),
        strip_padding(table, None, offsets),
        strip_padding(table, mask, offsets),
    ):
        assert [row.tolist() for row in found] == [[row] for row in rows]
    assert torch.cat(strip_padding(table)).tolist() == table.tolist()


@pytest.mark.parametrize("given", [[1, 2], (1, 2), torch.tensor([1, 2]), torch.tensor([[1, 2]]), [[1, 2]]])
def test_id_lists_accepts_tensors_and_lists(given: object) -> None:
    assert id_lists(given) == [[1, 2]]  # type: ignore[arg-type]


def test_id_lists_refuses_other_values() -> None:
    assert id_lists([]) == [[]]
    for wrong in (None, "text", ["a"], [1.5], 7, [[1], [2, 3]], [None]):
        with pytest.raises(InputError, match="Expected"):
            id_lists(wrong)  # type: ignore[arg-type]


def test_a_mask_may_be_shorter_than_the_row() -> None:
    ids = torch.tensor([[PAD, 1, 2]])
    assert strip_padding(ids, torch.tensor([[-torch.inf, 0.0]]))[0].tolist() == [[1, 2]]


def test_a_mask_made_by_the_padding_id_may_hide_it_in_prompts_too() -> None:
    """The padding id may be a BOS, or an EOS between turns: `padding_mask` hides all of them."""
    bos = PAD
    ids = torch.tensor([[bos, 1, PAD, 2], [PAD, PAD, bos, 3]])
    mask = torch.zeros(ids.shape).masked_fill_(ids == PAD, -torch.inf)
    first, second = strip_padding(ids, mask, torch.tensor([[0], [-2]]))
    assert (first.tolist(), second.tolist()) == ([[bos, 1, PAD, 2]], [[bos, 3]])


@pytest.mark.parametrize(
    ("ids", "mask", "offsets", "said"),
    [
        (torch.zeros(3), None, None, "integer tensor of .rows, tokens."),
        (torch.tensor([1, 2]), None, None, "integer tensor of .rows, tokens."),
        ([1, 2], None, None, "found list"),
        (torch.tensor([[1, 2]]), torch.zeros(2, 2), None, "input_mask must be .1, at most 2."),
        (torch.tensor([[1, 2]]), torch.tensor([[True, False]]), None, "only padding on the left"),
        (torch.tensor([[1, 2]]), torch.tensor([[False, False]]), None, "only padding on the left"),
        (torch.tensor([[1, 2]]), None, torch.tensor([1]), "minus the padding"),
        (torch.tensor([[1, 2]]), None, torch.tensor([-2]), "minus the padding"),
        (torch.tensor([[1, 2]]), None, torch.tensor([0, 0]), "minus the padding"),
        (torch.tensor([[1, 2]]), torch.tensor([[True, True]]), torch.tensor([-1]), "position_offsets are minus"),
        (torch.tensor([[1, 2]]), torch.tensor([[False, False]]), torch.tensor([-1]), "position_offsets are minus"),
    ],
)
def test_inconsistent_masks_are_refused(ids: object, mask: object, offsets: object, said: str) -> None:
    with pytest.raises(InputError, match=said):
        strip_padding(ids, mask, offsets)  # type: ignore[arg-type]
