"""Recurrent mixers on a processor: right, and the same bits in any chunks and any company; sources that compile."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from exlm import spec
from exlm.errors import KernelError, Unsupported
from exlm.kernels import interface as b
from exlm.kernels.cuda import recurrent
from exlm.kernels.cuda.attention import SplitCounters
from exlm.kernels.cuda.backend import CudaBackend
from exlm.kernels.cuda.module_cache import compile_source, read_source
from tests.kernels.cuda.emulator import EmulatedModuleCache
from tests.kernels.cuda.oracle import LIMIT, off
from tests.kernels.cuda.random_recurrent import SMALL, Case, Kernel, metadata, run
from tests.kernels.cuda.test_compile import TARGETS, options

CPU = torch.device("cpu")
ROWS, TOKENS = 2, recurrent.MAX_STEP_TOKENS + 2


class Emulated(CudaBackend):
    """The backend with its kernels on a processor."""

    def __init__(self, modules: EmulatedModuleCache) -> None:
        self.device, self.dtype = CPU, torch.float16
        self._modules = modules  # type: ignore[assignment]
        self._counters = SplitCounters(modules, 4)
        self._made: dict[str, tuple[Case, Kernel]] = {}

    def named(self, name: str) -> tuple[Case, Kernel]:
        """A case and its kernel, bound once."""
        if name not in self._made:
            case = Case(SMALL[name])
            self._made[name] = case, case.bind(self)
        return self._made[name]

    def arrived(self) -> int:
        """What counters hold between launches."""
        return int(self._counters.arrivals.abs().sum())


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return Emulated(EmulatedModuleCache(tmp_path_factory.mktemp("emulated")))


def slots_of(tokens: int) -> tuple[Tensor, Tensor]:
    """Row 0 has no state yet, row 1 is in slot 2; both store the last, and row 1 also the one after token 1."""
    targets = torch.full((ROWS, tokens), -1)
    targets[:, -1] = torch.tensor([0, 1])
    targets[1, 1] = 3
    return torch.tensor([-1, 2]), targets


def copied(state: b.RecurrentState) -> b.RecurrentState:
    return b.RecurrentState(state.conv.clone(), None if state.matrix is None else state.matrix.clone())


def same_bits(first: b.RecurrentState, second: b.RecurrentState) -> bool:
    """In the slots that a case names."""
    tensors = zip(first, second, strict=True)
    return all(x is y if x is None or y is None else x[:4].equal(y[:4]) for x, y in tensors)


@pytest.mark.parametrize("name", SMALL)
def test_outputs_and_states_are_right_and_do_not_depend_on_chunks(backend: Emulated, name: str) -> None:
    case, kernel = backend.named(name)
    inputs, state, (source, targets) = case.inputs(ROWS, TOKENS), case.states(8), slots_of(TOKENS)
    want_state = b.RecurrentState(state.conv.float(), None if state.matrix is None else state.matrix.clone())
    want = run(case.reference(), inputs, want_state, source, targets, [TOKENS])
    whole_state = copied(state)
    whole = run(kernel, inputs, whole_state, source, targets, [TOKENS])
    assert whole.dtype is torch.float16
    assert off(whole, want.double()) < LIMIT
    for got, right in zip(whole_state, want_state, strict=True):
        if got is not None and right is not None:
            assert off(got[[0, 1, 3]], right[[0, 1, 3]].double()) < LIMIT
            assert got[2].float().equal(right[2])  # the source
    for chunks in ([1, 5, 12], [1] * TOKENS if name == "head decay" else [5, 1, 1, 11]):
        chunked_state = copied(state)
        assert run(kernel, inputs, chunked_state, source, targets, chunks).equal(whole)
        assert same_bits(chunked_state, whole_state)
    assert backend.arrived() == 0


@pytest.mark.parametrize(
    "mixer",
    [
        spec.DeltaNet(1, 2, 128, 128, 4, 1e-6),
        spec.DeltaNet(1, 1, 96, 192, 4, 1e-5, decay="channel"),
        spec.Mamba2(2, 80, 1, 128, 4, spec.Norm(eps=1e-5)),
    ],
    ids=["128 x 128", "96 x 192", "80 x 128"],
)
def test_heads_as_large_as_in_models(backend: Emulated, mixer: spec.DeltaNet | spec.Mamba2) -> None:
    case = Case(mixer)
    kernel, inputs, state = case.bind(backend), case.inputs(ROWS, TOKENS), case.states(8)
    source, targets = slots_of(TOKENS)
    whole_state, chunked_state, want_state = copied(state), copied(state), copied(state)
    whole = run(kernel, inputs, whole_state, source, targets, [TOKENS])
    assert run(kernel, inputs, chunked_state, source, targets, [1, 3, 14]).equal(whole)
    assert same_bits(chunked_state, whole_state)
    want = run(case.reference(), inputs, want_state, source, targets, [TOKENS])
    assert off(whole, want.double()) < LIMIT


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("tokens", [3, TOKENS])
def test_a_row_is_the_same_alone_and_in_a_batch(backend: Emulated, name: str, tokens: int) -> None:
    case, kernel = backend.named(name)
    inputs, state, (source, targets) = case.inputs(ROWS, tokens), case.states(4), slots_of(tokens)
    whole_state = copied(state)
    whole = kernel(inputs, whole_state, metadata(b.StateSlots(source, targets), ROWS, tokens, CPU))
    for row in range(ROWS):
        one = slice(row, row + 1)
        slots = b.StateSlots(source[one], targets[one])
        alone = kernel(tuple(x[one] for x in inputs), state, metadata(slots, 1, tokens, CPU))
        assert alone.equal(whole[one])
    assert same_bits(state, whole_state)


@pytest.mark.parametrize("name", ["head decay", "norm of groups", "short"])
def test_rows_that_pad_a_batch_repeat_the_last_one(backend: Emulated, name: str) -> None:
    case, kernel = backend.named(name)
    inputs, state, (source, targets) = case.inputs(ROWS, 2), case.states(4), slots_of(2)
    want_state, last = copied(state), [0, 1, 1]
    want = kernel(inputs, want_state, metadata(b.StateSlots(source, targets), ROWS, 2, CPU))
    slots = b.StateSlots(source[last], targets[last])
    got = kernel(tuple(x[last] for x in inputs), state, metadata(slots, 3, 2, CPU))
    assert got.equal(want[last])
    assert same_bits(state, want_state)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("tokens", [2, TOKENS])
def test_without_states_rows_start_from_zeros(backend: Emulated, name: str, tokens: int) -> None:
    case, kernel = backend.named(name)
    inputs, none = case.inputs(1, tokens), metadata(None, 1, tokens, CPU)
    assert off(kernel(inputs, None, none), case.reference()(inputs, None, none).double()) < LIMIT
    kept = case.states(2)
    before = copied(kept)
    assert kernel(inputs, kept, none).equal(kernel(inputs, None, none))
    assert same_bits(kept, before)


def test_what_does_not_fit_is_declined(backend: Emulated) -> None:
    delta, mamba = spec.DeltaNet(1, 1, 32, 16, 4, 1e-6), spec.Mamba2(3, 16, 1, 32, 4, spec.Norm())
    for mixer, reason in (
        (replace(delta, key_dim=24), "16 x 24, only of multiples of 16 x 16"),
        (replace(delta, value_dim=512), "512 x 32, of at most 256 x 256"),
        (replace(delta, conv_kernel=1), "1 taps"),
        (replace(mamba, norm_groups=2), "2 groups over 3 heads"),
        (replace(mamba, head_dim=12), "12 x 32"),
    ):
        with pytest.raises(Unsupported, match=reason):
            Case(mixer).bind(backend)


def test_a_cache_of_another_precision_is_refused(backend: Emulated) -> None:
    case, kernel = backend.named("short")
    slots = b.StateSlots(torch.tensor([0]), torch.tensor([[1]]))
    with pytest.raises(KernelError, match="keeps them in float32"):
        kernel(case.inputs(1, 1), case.states(2, torch.float32), metadata(slots, 1, 1, CPU))


LARGE = {
    "qwen3.5-27b": spec.DeltaNet(16, 48, 128, 128, 4, 1e-6),
    "kimi-linear": spec.DeltaNet(32, 32, 128, 128, 4, 1e-5, decay="channel", gate_act="sigmoid"),
    "olmo-hybrid": spec.DeltaNet(30, 30, 96, 192, 4, 1e-6, beta_scale=2.0),
    "nemotron": spec.Mamba2(128, 80, 8, 128, 4, spec.Norm(eps=1e-5), norm_groups=8),
    "falcon": spec.Mamba2(24, 64, 1, 256, 4, None),
    "granite": spec.Mamba2(48, 64, 1, 128, 4, spec.Norm(eps=1e-5)),
    "lfm2": spec.ShortConv(2048, 3),
}
SOURCES = {
    spec.DeltaNet: (recurrent.DELTA_NET_SOURCE, (b"delta_net_step", b"delta_net_inputs", b"delta_net_scan")),
    spec.Mamba2: (recurrent.MAMBA2_SOURCE, (b"mamba2_step", b"mamba2_inputs", b"mamba2_scan", b"mamba2_outputs")),
    spec.ShortConv: (recurrent.SHORT_CONV_SOURCE, (b"short_conv",)),
}


@pytest.mark.parametrize(
    ("name", "target"),
    [
        (name, target)
        for name in LARGE
        for target in (TARGETS if name in ("kimi-linear", "nemotron", "lfm2") else ("sm_90a",))
    ],
)
def test_it_compiles(name: str, target: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and nvidia-cuda-nvrtc")
    case = Case(LARGE[name])
    made = case.made_by(Emulated(EmulatedModuleCache(recurrent.CSRC)))
    source, names = SOURCES[type(case.mixer)]
    short_conv = isinstance(case.mixer, spec.ShortConv)
    for defines in [made.defines] if short_conv else [made.defines(lines) for lines in (2, 4)]:
        image = compile_source(read_source(source), source.name, options(target, defines))
        assert all(kernel in image for kernel in names)
