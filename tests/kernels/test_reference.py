"""The reference backend against definitions written out with loops."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from exlm import spec
from exlm.errors import Unsupported
from exlm.formats import DenseWeight
from exlm.kernels.dispatch import BackendList, backends_for
from exlm.kernels.interface import no_rope
from exlm.kernels.reference import ReferenceBackend
from exlm.kvcache import NoCache

CPU = torch.device("cpu")
PLAIN = ReferenceBackend(CPU, torch.float32)


@dataclass
class Metadata:
    """The metadata that attention needs."""

    past_lens: Tensor
    max_kv_len: int
    uniform: bool
    mask: Tensor | None = None
    pages: Tensor = field(default_factory=lambda: torch.zeros(1, 1))
    positions: Tensor = field(default_factory=lambda: torch.zeros(1, 1))


class FilledCache(NoCache):
    """A cache with given keys and values."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = k, v

    def update(self, k: Tensor, v: Tensor, metadata: object) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.k, self.v


def attention_by_loops(q: Tensor, k: Tensor, v: Tensor, metadata: Metadata, attn: spec.Attention) -> Tensor:
    """Attention, one query of one head at a time."""
    rows, tokens, heads, _ = q.shape
    out = torch.zeros_like(q)
    share = heads // k.shape[2]
    for r in range(rows):
        for t in range(tokens):
            at = int(metadata.past_lens[r]) + t
            first = 0 if attn.window is None else max(0, at - attn.window + 1)
            hidden = set() if metadata.mask is None else set((~metadata.mask[r]).nonzero().flatten().tolist())
            seen = [j for j in range(first, at + 1) if j not in hidden or j == at]
            for h in range(heads):
                scores = [float(q[r, t, h] @ k[r, j, h // share]) * attn.scale for j in seen]
                if attn.softcap is not None:
                    scores = [attn.softcap * math.tanh(s / attn.softcap) for s in scores]
                weights = torch.tensor(scores).softmax(0)
                out[r, t, h] = sum(w * v[r, j, h // share] for w, j in zip(weights, seen, strict=True))
    return out.flatten(2)


@given(
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from([(1, 1), (4, 2), (6, 1)]),
    st.lists(st.integers(0, 6), min_size=3, max_size=3),
    st.sampled_from([None, 1, 3, 100]),
    st.sampled_from([None, 2.0]),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_attention_equals_loops(
    rows: int,
    tokens: int,
    heads: tuple[int, int],
    pasts: list[int],
    window: int | None,
    cap: float | None,
    hide: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    past = torch.tensor(pasts[:rows])
    longest = int(past.max()) + tokens
    even = len(set(pasts[:rows])) == 1 and not hide
    mask = torch.rand(rows, longest) > 0.5 if hide else None
    metadata = Metadata(past, longest, even, mask)
    attn = spec.Attention(heads[0], heads[1], 8, None, 0.3, window=window, softcap=cap)
    q = torch.randn(rows, tokens, heads[0], 8)
    k, v = torch.randn(rows, longest, heads[1], 8), torch.randn(rows, longest, heads[1], 8)
    got = PLAIN.attention(attn, no_rope)(q, k[:, :tokens], v[:, :tokens], FilledCache(k, v), metadata)
    assert torch.allclose(got, attention_by_loops(q, k, v, metadata, attn), atol=1e-5)


@given(st.integers(1, 9), st.integers(2, 6), st.booleans(), st.integers(0, 10**6))
def test_moe_equals_loops(tokens: int, experts: int, renormalize: bool, seed: int) -> None:
    torch.manual_seed(seed)
    moe = spec.Moe(width=5, experts=experts, active=2, renormalize=renormalize)
    gate, up = torch.randn(experts, 5, 4), torch.randn(experts, 5, 4)
    down = torch.randn(experts, 4, 5)
    linear = [[PLAIN.linear(DenseWeight(w)) for w in stack] for stack in (gate, up, down)]
    x, logits = torch.randn(1, tokens, 4), torch.randn(1, tokens, experts).round()  # ties
    want = torch.zeros_like(x)
    for t in range(tokens):
        shares = logits[0, t].softmax(0)
        best = sorted(range(experts), key=lambda e: -float(shares[e]))[:2]
        total = sum(float(shares[e]) for e in best) if renormalize else 1.0
        for e in best:
            answer = down[e] @ (F.silu(gate[e] @ x[0, t]) * (up[e] @ x[0, t]))
            want[0, t] += answer * float(shares[e]) / total
    assert torch.allclose(PLAIN.moe(moe, *linear)(x, logits), want, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_norms(dtype: torch.dtype) -> None:
    backend = ReferenceBackend(CPU, dtype)
    x, w, b = torch.randn(3, 7, 16).to(dtype), torch.randn(16), torch.randn(16)
    rms = backend.norm(spec.Norm("rms", 1e-5, offset=1.0), w, None)(x)
    want = x.float() / (x.float().square().mean(-1, keepdim=True) + 1e-5).sqrt() * (w + 1)
    assert rms.dtype is dtype
    assert torch.equal(rms, want.to(dtype)) or torch.allclose(rms.float(), want, rtol=1e-2, atol=1e-6)
    layer = backend.norm(spec.Norm("layer", 1e-5, bias=True), w, b)(x)
    assert torch.allclose(layer.float(), F.layer_norm(x.float(), (16,), w, b, 1e-5), rtol=2e-2, atol=2e-2)


def test_a_norm_with_a_scale_for_each_head() -> None:
    x, w = torch.randn(2, 3, 4, 8), torch.randn(4, 8)
    norm = PLAIN.norm(spec.Norm("rms", 1e-6), w, None)
    alone = [PLAIN.norm(spec.Norm("rms", 1e-6), w[h], None)(x[:, :, h]) for h in range(4)]
    assert torch.allclose(norm(x), torch.stack(alone, 2))


def test_linear_takes_any_weight() -> None:
    class UnknownFormat:
        """A weight in a format that the backend does not know: it only dequantises."""

        in_features, out_features, nbytes = 4, 3, 0
        matrix = torch.randn(4, 3)
        bias = torch.randn(3)

        def describe(self) -> str:
            return "coded"

        def dequantize(self) -> Tensor:
            return self.matrix

    weight, x = UnknownFormat(), torch.randn(2, 5, 4)
    assert torch.allclose(PLAIN.linear(weight)(x), x @ weight.matrix + weight.bias)  # type: ignore[arg-type]


def test_activations() -> None:
    x = torch.linspace(-3, 3, 13)
    assert torch.allclose(PLAIN.activation("quick_gelu")(x), x * torch.sigmoid(1.702 * x))
    assert torch.equal(PLAIN.activation("relu2")(x), x.clamp(min=0) ** 2)
    assert not torch.equal(PLAIN.activation("gelu")(x), PLAIN.activation("gelu_tanh")(x))


def test_refusals_are_kept_and_explained() -> None:
    class DecliningBackend(ReferenceBackend):
        name = "picky"

        def linear(self, weight: object) -> None:  # type: ignore[override]
            raise Unsupported("group size 48 is not a multiple of 32")

    chain = BackendList([DecliningBackend(CPU, torch.float32), PLAIN])
    weight = DenseWeight(torch.randn(3, 4))
    kernel = chain.bind("layers.0.attn.q", weight.describe(), lambda backend: backend.linear(weight))
    assert kernel(torch.randn(1, 1, 4)).shape == (1, 1, 3)
    assert chain.explain() == (
        "layers.0.attn.q: reference, dense float32  (declined: picky: group size 48 is not a multiple of 32)"
    )
    with pytest.raises(Unsupported, match=r"head \(dense\) cannot run on cpu: picky: group size 48"):
        BackendList([DecliningBackend(CPU, torch.float32)]).bind(
            "head", "dense", lambda backend: backend.linear(weight)
        )
    assert backends_for(CPU, torch.float32).backends[-1].name == "reference"
