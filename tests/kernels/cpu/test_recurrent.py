"""Recurrent mixers in C: plain torch's results on odd shapes, and the same bits however a text is cut into passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exlm import spec
from exlm.errors import Unsupported
from exlm.kernels.cpu import CpuBackend
from exlm.kernels.interface import DeltaNetParams, Mamba2Params, RecurrentState, StateSlots
from exlm.kernels.reference import ReferenceBackend
from exlm.nn import Batch

REFERENCE = ReferenceBackend(torch.device("cpu"), torch.float32)


@dataclass(frozen=True, eq=False)
class Case:
    """A mixer without its projections."""

    bind: Callable[[Any], Callable[..., Tensor]]  # by a backend
    widths: tuple[int, ...]  # of its inputs
    state: spec.StateShape


def delta_net(mixer: spec.DeltaNet) -> Case:
    channels = 2 * mixer.key_width + mixer.value_width
    params = DeltaNetParams(
        conv=torch.randn(channels, mixer.conv_kernel) * 0.5,
        a_log=torch.rand(mixer.value_heads) * 2 - 1,
        dt_bias=torch.randn(mixer.decay_width),
        norm=torch.rand(mixer.value_dim) + 0.5,
    )
    widths = channels, mixer.value_width, mixer.decay_width, mixer.value_heads
    return Case(lambda backend: backend.delta_net(mixer, params), widths, mixer.state)


def mamba2(mixer: spec.Mamba2) -> Case:
    params = Mamba2Params(
        conv=torch.randn(mixer.conv_channels, mixer.conv_kernel) * 0.5,
        conv_bias=torch.randn(mixer.conv_channels) if mixer.conv_bias else None,
        a_log=torch.rand(mixer.heads) * 2 - 1,
        dt_bias=torch.randn(mixer.heads),
        d=torch.randn(mixer.heads),
        norm=None if mixer.norm is None else torch.rand(mixer.width) + 0.5,
    )
    width = mixer.width + mixer.conv_channels + mixer.heads
    return Case(lambda backend: backend.mamba2(mixer, params), (width,), mixer.state)


def short_conv(mixer: spec.ShortConv) -> Case:
    weight, bias = torch.randn(mixer.width, mixer.conv_kernel), torch.randn(mixer.width) if mixer.bias else None
    return Case(lambda backend: backend.short_conv(mixer, weight, bias), (3 * mixer.width,), mixer.state)


KERNELS = st.integers(2, 4)
CASES = st.one_of(
    st.builds(
        lambda key_heads, share, **rest: delta_net(
            spec.DeltaNet(key_heads=key_heads, value_heads=key_heads * share, norm_eps=1e-6, **rest)
        ),
        key_heads=st.integers(1, 3),
        share=st.integers(1, 3),
        key_dim=st.sampled_from([32, 48, 112, 128, 256]),
        value_dim=st.sampled_from([16, 32, 80, 128, 144]),
        conv_kernel=KERNELS,
        decay=st.sampled_from(["head", "channel"]),
        gate_act=st.sampled_from(["silu", "sigmoid"]),
        beta_scale=st.sampled_from([1.0, 2.0]),
    ),
    st.builds(
        lambda groups, share, **rest: mamba2(spec.Mamba2(heads=groups * share, groups=groups, **rest)),
        groups=st.integers(1, 3),
        share=st.integers(1, 3),
        head_dim=st.sampled_from([16, 48, 64]),
        state_dim=st.sampled_from([16, 48, 128]),
        conv_kernel=KERNELS,
        norm=st.sampled_from([None, spec.Norm(eps=1e-5)]),
        norm_before_gate=st.booleans(),
        conv_bias=st.booleans(),
        dt_limits=st.sampled_from([(0.0, float("inf")), (0.1, 0.9)]),
        part_scales=st.sampled_from([(1.0,) * 5, (0.5, 2.0, 0.25, 3.0, 0.7)]),
    ),
    st.builds(
        lambda **rest: short_conv(spec.ShortConv(**rest)),
        width=st.sampled_from([16, 48, 528, 1040]),
        conv_kernel=KERNELS,
        bias=st.booleans(),
    ),
)


def random_inputs(case: Case, rows: int, tokens: int) -> list[Tensor]:
    return [torch.randn(rows, tokens, width) for width in case.widths]


def states(case: Case, slots: int, fill: float = float("nan")) -> RecurrentState:
    conv = torch.full((slots, *case.state.conv), fill)
    return RecurrentState(conv, None if case.state.matrix is None else torch.full((slots, *case.state.matrix), fill))


def batch(rows: int, tokens: int, slots: StateSlots | None) -> Batch:
    ids, none = torch.zeros(rows, tokens, dtype=torch.long), torch.zeros(rows, dtype=torch.long)
    return Batch(
        ids=ids,
        positions=ids,
        past_lens=none,
        page_table=ids[:, :1],
        max_kv_len=tokens,
        uniform=True,
        state_slots=slots,
    )


def run_in_chunks(
    kernel: Callable[..., Tensor], case: Case, inputs: list[Tensor], chunks: Sequence[int]
) -> tuple[Tensor, list[Tensor]]:
    """The outputs, and the states after the last token. Each chunk reads the slots that the one before it wrote."""
    rows = len(inputs[0])
    state, outs, begin = states(case, 2 * rows), [], 0
    numbers = torch.randperm(2 * rows).view(2, rows)
    for i, tokens in enumerate(chunks):
        targets = torch.full((rows, tokens), -1)
        targets[:, -1] = numbers[i % 2]
        source = numbers[1 - i % 2] if i else torch.full((rows,), -1)
        part = [x[:, begin : begin + tokens] for x in inputs]
        outs.append(kernel(*part, state, batch(rows, tokens, StateSlots(source, targets))))
        begin += tokens
    last = numbers[(len(chunks) - 1) % 2]
    return torch.cat(outs, 1), [one[last] for one in state if one is not None]


def even_chunks(tokens: int, size: int) -> list[int]:
    return [min(size, tokens - begin) for begin in range(0, tokens, size)]


def equal(one: tuple[Tensor, list[Tensor]], other: tuple[Tensor, list[Tensor]]) -> bool:
    pairs = zip((one[0], *one[1]), (other[0], *other[1]), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@settings(max_examples=50)
@given(data=st.data(), case=CASES, rows=st.integers(1, 5), tokens=st.integers(1, 70), threads=st.integers(1, 3))
def test_plain_torch_says_the_same(
    backend: CpuBackend, data: st.DataObject, case: Case, rows: int, tokens: int, threads: int
) -> None:
    """From slots or from zeros, with states stored after some of the tokens, among slots that must not be touched."""
    torch.set_num_threads(threads)
    inputs = random_inputs(case, rows, tokens)
    order = torch.randperm(rows * (tokens + 2))
    source, (targets, unused) = order[:rows], order[rows:].split((rows * tokens, rows))
    source = torch.where(torch.rand(rows) < 0.3, -1, source)
    share = data.draw(st.sampled_from([0.0, 0.1, 1.0]))
    targets = torch.where(torch.rand(rows, tokens) < share, targets.view(rows, tokens), -1)
    before = states(case, len(order))
    for one in before:
        if one is not None:
            one[source[source >= 0]] = torch.randn(int((source >= 0).sum()), *one.shape[1:])
    found = []
    for chosen in (REFERENCE, backend):
        state = RecurrentState(*(None if one is None else one.clone() for one in before))
        found.append((case.bind(chosen)(*inputs, state, batch(rows, tokens, StateSlots(source, targets))), state))
    (want, want_state), (got, got_state) = found
    assert got.isfinite().all()
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)
    for a, b in zip(got_state, want_state, strict=True):
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
            assert a[unused].isnan().all()


@settings(max_examples=25)
@given(case=CASES, rows=st.integers(1, 5), tokens=st.integers(1, 150))
def test_chunks_rows_and_threads_change_no_bit(backend: CpuBackend, case: Case, rows: int, tokens: int) -> None:
    kernel, inputs = case.bind(backend), random_inputs(case, rows, tokens)
    torch.set_num_threads(1)
    whole = run_in_chunks(kernel, case, inputs, [tokens])
    for threads, size in ((1, 1), (1, 7), (2, 64), (2, tokens), (3, 1), (3, 33)):
        torch.set_num_threads(threads)
        assert equal(run_in_chunks(kernel, case, inputs, even_chunks(tokens, size)), whole), (threads, size)
    for row in range(rows):
        alone = run_in_chunks(kernel, case, [x[row : row + 1] for x in inputs], [tokens])
        assert equal(alone, (whole[0][row : row + 1], [state[row : row + 1] for state in whole[1]])), row


@settings(max_examples=25)
@given(case=CASES, rows=st.integers(1, 3), tokens=st.integers(1, 70))
def test_a_state_in_the_middle_is_that_of_a_pass_that_ends_there(
    backend: CpuBackend, case: Case, rows: int, tokens: int
) -> None:
    kernel, inputs = case.bind(backend), random_inputs(case, rows, tokens)
    state, targets = states(case, rows * tokens), torch.randperm(rows * tokens).view(rows, tokens)
    kernel(*inputs, state, batch(rows, tokens, StateSlots(torch.full((rows,), -1), targets)))
    for end in {1, 1 + tokens // 2, min(32, tokens), min(33, tokens), tokens}:
        _, want = run_in_chunks(kernel, case, [x[:, :end] for x in inputs], [end])
        found = [one[targets[:, end - 1]] for one in state if one is not None]
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True)), end


@settings(max_examples=15)
@given(case=CASES, rows=st.integers(1, 3), tokens=st.integers(1, 70))
def test_passes_without_states(backend: CpuBackend, case: Case, rows: int, tokens: int) -> None:
    """No cache, or a batch that names no slots: rows start from zeros, and nothing is stored."""
    kernel, inputs = case.bind(backend), random_inputs(case, rows, tokens)
    want, _ = run_in_chunks(kernel, case, inputs, [tokens])
    state = states(case, rows)
    assert torch.equal(kernel(*inputs, None, batch(rows, tokens, None)), want)
    assert torch.equal(kernel(*inputs, state, batch(rows, tokens, None)), want)
    assert all(one is None or one.isnan().all() for one in state)


def test_half_precision_states_are_left_to_the_reference(backend: CpuBackend) -> None:
    case = short_conv(spec.ShortConv(32, 3))
    inputs, slots = random_inputs(case, 1, 4), StateSlots(torch.tensor([-1]), torch.tensor([[-1, -1, -1, 0]]))
    found = []
    for chosen in (REFERENCE, backend):
        state = RecurrentState(torch.zeros(1, *case.state.conv, dtype=torch.float16), None)
        found.append((case.bind(chosen)(*inputs, state, batch(1, 4, slots)), state.conv))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_gates_at_the_edges(backend: CpuBackend) -> None:
    """Gates far from zero saturate as torch's do: nothing overflows on the way."""
    case = delta_net(spec.DeltaNet(1, 1, 32, 16, 4, 1e-6))
    edges = torch.tensor([0.0, -0.0, 30.0, -30.0, 89.0, -89.0, 1e30, -1e30])
    inputs = random_inputs(case, 1, len(edges))
    for gate in (1, 2, 3):
        filled = [x.clone() for x in inputs]
        filled[gate][:] = edges[:, None]
        got, want = (case.bind(chosen)(*filled, None, batch(1, len(edges), None)) for chosen in (backend, REFERENCE))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "mixer",
    [
        spec.DeltaNet(1, 1, 24, 32, 4, 1e-6),
        spec.DeltaNet(1, 1, 32, 24, 4, 1e-6),
        spec.DeltaNet(1, 1, 272, 32, 4, 1e-6),
        spec.DeltaNet(1, 1, 32, 32, 9, 1e-6),
    ],
)
def test_what_it_leaves_to_others(backend: CpuBackend, mixer: spec.DeltaNet) -> None:
    with pytest.raises(Unsupported):
        delta_net(mixer).bind(backend)
    with pytest.raises(Unsupported):
        mamba2(spec.Mamba2(2, 24, 1, 16, 4, None)).bind(backend)
    with pytest.raises(Unsupported):
        short_conv(spec.ShortConv(40, 3)).bind(backend)
