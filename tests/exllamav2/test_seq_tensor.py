"""SeqTensor against concatenation of plain tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exllamav2 import SeqTensor
from exlm import InputError

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 9)),
        st.tuples(st.just("truncate"), st.floats(0, 1)),
        st.tuples(st.just("set"), st.integers(0, 5)),
        st.tuples(st.just("clear"), st.none()),
        st.tuples(st.just("clone"), st.floats(0, 1)),
    ),
    max_size=25,
)


@given(steps=STEPS, dim=st.sampled_from([0, 1, -1, -2]), capacity=st.integers(-1, 4))
def test_operations_match_a_plain_tensor(steps: list[tuple[str, float]], dim: int, capacity: int) -> None:
    shape = [3, 3]
    shape[dim] = 0
    made, plain = SeqTensor(shape, torch.long, dim, init_cap=capacity), torch.zeros(shape, dtype=torch.long)
    counter = 0
    for verb, number in steps:
        if verb in ("append", "set"):
            shape[dim] = int(number)
            new = torch.arange(counter, counter + 3 * int(number)).reshape(shape)
            counter += 100
            plain = new.clone() if verb == "set" else torch.cat([plain, new], dim)
            getattr(made, verb)(new)
            new.fill_(-1)  # SeqTensor keeps a copy
        elif verb == "truncate":
            keep = round(number * plain.shape[dim])
            plain = plain.narrow(dim, 0, keep)
            made.truncate(keep)
        elif verb == "clone":
            drop = round(number * plain.shape[dim])
            old, plain = made, plain.narrow(dim, 0, plain.shape[dim] - drop)
            made = made.clone(drop)
            old.clear()
        else:
            plain = plain.narrow(dim, 0, 0)
            made.clear()
        assert len(made) == plain.shape[dim]
        assert bool(made) == (len(made) > 0)
        assert torch.equal(made.torch(), plain)
        assert len(made) <= made.capacity


def test_views_and_copies() -> None:
    made = SeqTensor.from_tensor(torch.arange(10).reshape(1, 10), -1)
    assert made.torch_slice(2, -3).tolist() == [[2, 3, 4, 5, 6]]
    copied = made.slice(0, 2)
    made.torch()[0, 0] = 99
    made.torch_slice(1, 2).fill_(98)
    assert made.torch()[0, :3].tolist() == [99, 98, 2]
    assert copied.tolist() == [[0, 1]]
    assert made.torch_slice(7, 3).shape == (1, 0)


def test_one_appended_to_another_and_to_itself() -> None:
    made = SeqTensor((1, 0), torch.long, -1)
    made.append(None)
    made.append(SeqTensor.from_tensor(torch.tensor([[1, 2]]), 1))
    made.append(made)
    made.set(made)
    assert made.torch().tolist() == [[1, 2, 1, 2]]
    made.set()
    assert not made


def test_wrong_shapes_and_lengths_are_refused() -> None:
    made = SeqTensor.from_tensor(torch.zeros(2, 3), 1)
    with pytest.raises(InputError, match=r"shape \(2, 1\), free only along dimension 1; found .* \(3, 1\)"):
        made.append(torch.zeros(3, 1))
    with pytest.raises(InputError, match=r"found torch\.int64"):
        made.append(torch.zeros(2, 1, dtype=torch.long))
    with pytest.raises(InputError, match=r"found torch\.float32 of shape"):
        made.append(torch.zeros(2))
    with pytest.raises(InputError, match="Cannot truncate 3 entries to 4"):
        made.truncate(4)
    with pytest.raises(InputError, match="Cannot drop 4 of 3"):
        made.clone(4)
    with pytest.raises(InputError, match="seq_dim 2 is not a dimension"):
        SeqTensor((1, 0), torch.long, 2)
