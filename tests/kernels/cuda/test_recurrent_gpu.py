"""Recurrent mixers on a GPU, in the shapes of models: right, the same bits in any chunks and company, and in graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exlm.kernels import interface as b
from exlm.kernels.cuda.backend import CudaBackend
from tests.kernels.cuda.oracle import LIMIT, off
from tests.kernels.cuda.random_recurrent import Case, Kernel, metadata, run
from tests.kernels.cuda.test_recurrent import LARGE, copied, same_bits, slots_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROWS, TOKENS = 2, 300


def bound(name: str, folder: Path) -> tuple[Case, Kernel]:
    device = torch.device("cuda", 0)
    case = Case(LARGE[name], device)
    return case, case.bind(CudaBackend(device, torch.float16, folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("name", LARGE)
def test_outputs_and_states_are_right_and_do_not_depend_on_chunks(folder: Path, name: str) -> None:
    case, kernel = bound(name, folder)
    source, targets = (x.to(case.device) for x in slots_of(TOKENS))
    inputs, state = case.inputs(ROWS, TOKENS), case.states(8)
    want_state = b.RecurrentState(state.conv.float(), None if state.matrix is None else state.matrix.clone())
    want = run(case.reference(), inputs, want_state, source, targets, [TOKENS])
    whole_state = copied(state)
    whole = run(kernel, inputs, whole_state, source, targets, [TOKENS])
    assert off(whole, want.double()) < LIMIT
    for got, right in zip(whole_state, want_state, strict=True):
        if got is not None and right is not None:
            assert off(got[[0, 1, 3]], right[[0, 1, 3]].double()) < LIMIT
    for chunks in ([1] * TOKENS, [5, 16, 17, 1, 100, 161]):
        chunked_state = copied(state)
        assert run(kernel, inputs, chunked_state, source, targets, chunks).equal(whole)
        assert same_bits(chunked_state, whole_state)


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("tokens", [1, 16, 100])
def test_a_row_is_the_same_alone_and_in_a_batch(folder: Path, name: str, tokens: int) -> None:
    case, kernel = bound(name, folder)
    rows = 33
    inputs, state = case.inputs(rows, tokens), case.states(2 * rows)
    source = torch.arange(rows, device=case.device)
    targets = torch.full((rows, tokens), -1, device=case.device)
    targets[:, -1] = source + rows
    whole_state = copied(state)
    whole = kernel(inputs, whole_state, metadata(b.StateSlots(source, targets), rows, tokens, case.device))
    for row in (0, 1, 17, 32):
        one = slice(row, row + 1)
        slots = b.StateSlots(source[one], targets[one])
        alone = kernel(tuple(x[one] for x in inputs), state, metadata(slots, 1, tokens, case.device))
        assert alone.equal(whole[one])
        for got, right in zip(state, whole_state, strict=True):
            assert got is None or right is None or got[rows + row].equal(right[rows + row])


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("tokens", [1, 4, 20])
def test_replayed_from_a_graph_with_other_slots(folder: Path, name: str, tokens: int) -> None:
    case, kernel = bound(name, folder)
    rows, state, inputs = 3, case.states(9), case.inputs(3, tokens)
    source = torch.tensor([0, -1, 1], device=case.device)
    targets = torch.full((rows, tokens), -1, device=case.device)
    targets[:, -1] = torch.arange(3, 6, device=case.device)
    batch = metadata(b.StateSlots(source, targets), rows, tokens, case.device)
    kernel(inputs, copied(state), batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel(inputs, state, batch)
    for step in range(3):
        want_state = copied(state)
        want = kernel(inputs, want_state, batch)
        graph.replay()
        assert out.equal(want)
        assert all(x is y if x is None or y is None else x.equal(y) for x, y in zip(state, want_state, strict=True))
        source.copy_(torch.arange(3, 6) if step % 2 == 0 else torch.arange(6, 9))
        targets[:, -1] = torch.arange(6, 9) if step % 2 == 0 else torch.arange(3, 6)
