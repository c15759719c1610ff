"""Norms, activation functions and RoPE against the reference, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from exlm import spec
from exlm.errors import InputError, Unsupported
from exlm.formats import DenseWeight
from exlm.kernels.dispatch import backends_for
from exlm.kernels.reference import ReferenceBackend

pytest.importorskip("triton")
from exlm.kernels.triton import TritonBackend

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter overflows before a 0

HALF, FULL, BRAIN = torch.float16, torch.float32, torch.bfloat16
LIMITS = {HALF: 1e-3, FULL: 2e-6, BRAIN: 8e-3}
DEVICES = [
    pytest.param("cpu", HALF),
    pytest.param("cpu", FULL),
    *(pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in LIMITS),
]


def close(got: Tensor, want: Tensor) -> bool:
    """Whether dtypes are equal and the relative error is a rounding or two."""
    return got.dtype is want.dtype and float((got - want).float().norm() / want.float().norm()) < LIMITS[got.dtype]


def backends(device_type: str, dtype: torch.dtype) -> tuple[torch.device, ReferenceBackend, TritonBackend]:
    """The device and the two backends."""
    device = torch.device(device_type)
    return device, ReferenceBackend(device, dtype), TritonBackend(device, dtype)


@pytest.mark.parametrize(("device_type", "dtype"), DEVICES)
@pytest.mark.parametrize("norm", [spec.Norm("rms", 1e-5, offset=1.0), spec.Norm("layer", 1e-5, bias=True)])
@pytest.mark.parametrize("width", [48, 576, 4096])
def test_norms(device_type: str, dtype: torch.dtype, norm: spec.Norm, width: int) -> None:
    device, plain, fast = backends(device_type, dtype)
    weight, bias = torch.randn(2, width, device=device)
    args = (norm, weight, bias if norm.bias else None)
    x, y = torch.randn(2, 3, 5, width, device=device).to(dtype) + 0.3
    assert close(fast.norm(*args)(x), plain.norm(*args)(x))
    last = x[:, -1:]
    for a, b in ((x, y), (x, None), (x.float(), y), (last, y[:, -1:])):
        for got, want in zip(fast.add_norm(*args)(a, b), plain.add_norm(*args)(a, b), strict=True):
            assert got.shape == want.shape
            assert close(got, want)


@pytest.mark.parametrize(("device_type", "dtype"), DEVICES)
@pytest.mark.parametrize("per_head", [False, True])
def test_head_norms(device_type: str, dtype: torch.dtype, per_head: bool) -> None:
    device, plain, fast = backends(device_type, dtype)
    weight = torch.randn(*([6] if per_head else []), 80, device=device)
    wide = torch.randn(2, 7, 10 * 80, device=device).to(dtype)
    x = wide[..., 160:640].unflatten(-1, (6, 80))
    assert close(fast.norm(spec.Norm(), weight, None)(x), plain.norm(spec.Norm(), weight, None)(x))


@pytest.mark.parametrize(("device_type", "dtype"), DEVICES)
@pytest.mark.parametrize("act", get_args(spec.Activation))
def test_activations(device_type: str, dtype: torch.dtype, act: spec.Activation) -> None:
    device, plain, fast = backends(device_type, dtype)
    gate_up = 3 * torch.randn(2, 3, 2 * 1500, device=device).to(dtype)
    gate, up = gate_up.chunk(2, -1)
    want = plain.gated(act)(gate.float(), up.float())
    assert close(fast.gated(act)(gate, up), want.to(dtype))
    assert close(fast.activation(act)(gate), plain.activation(act)(gate.float()).to(dtype))


@pytest.mark.parametrize(("device_type", "dtype"), DEVICES)
@pytest.mark.parametrize("style", ["neox", "gptj"])
@pytest.mark.parametrize(("head", "dim", "sections"), [(64, 64, ()), (80, 40, ()), (64, 48, (8, 6, 10))])
def test_rope(device_type: str, dtype: torch.dtype, style: str, head: int, dim: int, sections: tuple[int, ...]) -> None:
    device, plain, fast = backends(device_type, dtype)
    rope = spec.Rope(1e4, dim, style=style, mrope_sections=sections)  # type: ignore[arg-type]
    q = torch.randn(2, 21, 4, head, device=device).to(dtype)
    k = torch.randn(2, 21, 5 * head, device=device).to(dtype)[..., head : 3 * head].unflatten(-1, (2, head))
    shapes = [(2, 21), (3, 2, 21)] if sections else [(2, 21)]
    for shape in shapes:
        positions = torch.randint(0, 500, shape, device=device)
        actual, expected = fast.rope(rope, 500)(q, k, positions), plain.rope(rope, 500)(q, k, positions)
        for got, want in zip(actual, expected, strict=True):
            assert got.shape == want.shape
            assert close(got, want)


def test_declined_parts() -> None:
    fast = TritonBackend(torch.device("cpu"), FULL)
    with pytest.raises(Unsupported, match="no kernel for matrices"):
        fast.linear(DenseWeight(torch.zeros(2, 2)))
    with pytest.raises(Unsupported, match="no kernel for embeddings"):
        fast.embedding(DenseWeight(torch.zeros(2, 2)))
    with pytest.raises(Unsupported, match="heads of 320 numbers"):
        fast.attention(spec.Attention(2, 1, 320, None, 1.0), lambda q, k, at: (q, k))
    with pytest.raises(Unsupported, match="65536 numbers"):
        fast.norm(spec.Norm(), torch.zeros(65536), None)


class TestDispatch:
    """`backends_for` and `explain` when Triton cannot be used or is disabled."""

    @pytest.fixture(autouse=True)
    def _gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old One")

    def test_an_old_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("EXLM_TRITON", "1")
        chain = backends_for(torch.device("cuda"), HALF)
        assert [backend.name for backend in chain.backends][-1] == "reference"
        assert "absent: triton: needs compute capability 8.0, Old One has 7.5" in chain.explain()

    def test_disabled_by_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("EXLM_TRITON", "0")
        monkeypatch.setenv("EXLM_CUDA", "0")
        text = backends_for(torch.device("cuda"), HALF).explain()
        assert "absent: triton: switched off by EXLM_TRITON=0" in text
        assert "absent: cuda: switched off by EXLM_CUDA=0" in text

    def test_an_invalid_value(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("EXLM_TRITON", "maybe")
        with pytest.raises(InputError, match="EXLM_TRITON is 'maybe'"):
            backends_for(torch.device("cuda"), HALF)

    def test_a_cpu_does_not_report_triton_as_absent(self) -> None:
        assert "triton" not in backends_for(torch.device("cpu"), HALF).explain()
