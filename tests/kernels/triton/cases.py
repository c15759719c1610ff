"""Inputs of one attention call to compare kernels with the reference: a filled cache, new tokens, pages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from exlm import spec
from exlm.kvcache import CacheLayer, LayerShape
from exlm.kvcache.dense import DenseLayer
from exlm.kvcache.quantized import FP8Quantizer, HadamardQuantizer, QuantizedLayer
from exlm.nn import Batch

QUANTIZERS = {
    "q8": (HadamardQuantizer(8), HadamardQuantizer(8)),
    "q6": (HadamardQuantizer(8), HadamardQuantizer(4)),
    "q4": (HadamardQuantizer(4), HadamardQuantizer(4)),
    "fp8": (FP8Quantizer(), FP8Quantizer()),
}
PAGE = 256


@dataclass(frozen=True)
class Case:
    """One call over one layer's cache."""

    cache: str  # "float", or a key of QUANTIZERS
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    pasts: tuple[int, ...]
    tokens: int
    window: int | None = None
    softcap: float | None = None
    masked: bool = False

    @property
    def attn(self) -> spec.Attention:
        """The layer's description."""
        return spec.Attention(
            self.heads,
            self.kv_heads,
            self.head_dim,
            None,
            self.head_dim**-0.5,
            window=self.window,
            softcap=self.softcap,
        )


class Step(NamedTuple):
    """Arguments of an attention kernel."""

    heads: tuple[Tensor, Tensor, Tensor]
    layer: CacheLayer
    metadata: Batch


def empty_layer(case: Case, pages: int, device: torch.device) -> CacheLayer:
    """An empty cache layer."""
    if case.cache == "float":
        return DenseLayer(pages, PAGE, case.kv_heads, case.head_dim, case.dtype, device)
    shape = LayerShape(case.kv_heads, case.head_dim)
    return QuantizedLayer(pages, PAGE, shape, *QUANTIZERS[case.cache], device)


def step(case: Case, device: torch.device, spare: int = 1) -> Step:
    """Random new tokens after random pasts, in shuffled pages; `spare` more pages in each row's table."""
    rows, tokens, longest = len(case.pasts), case.tokens, max(case.pasts) + case.tokens
    width = -(-longest // PAGE) + spare
    layer = empty_layer(case, rows * width, device)
    pages = torch.randperm(rows * width).view(rows, width).to(device)
    past = torch.tensor(case.pasts, device=device)
    zeros = torch.zeros(rows, 1, dtype=torch.int64, device=device)
    if max(case.pasts):
        stored = [_heads(case, case.kv_heads, max(case.pasts)).to(device) for _ in "kv"]
        layer.update(
            *stored,
            Batch(
                ids=zeros,
                positions=zeros,
                past_lens=zeros[:, 0],
                page_table=pages,
                max_kv_len=max(case.pasts),
                uniform=True,
            ),
        )
    mask = (torch.rand(rows, longest) > 0.4).to(device) if case.masked else None
    positions = past[:, None] + torch.arange(tokens, device=device)
    uniform = len(set(case.pasts)) == 1 and not case.masked
    metadata = Batch(
        ids=zeros, positions=positions, past_lens=past, page_table=pages, max_kv_len=longest, uniform=uniform, mask=mask
    )
    head_counts = (case.heads, case.kv_heads, case.kv_heads)
    q, k, v = (_heads(case, heads, tokens).to(device) for heads in head_counts)
    return Step((q, k, v), layer, metadata)


def one_row(metadata: Batch, row: int, longest: int) -> Batch:
    """The metadata of one row alone."""
    one = slice(row, row + 1)
    positions, past, pages = (part[one] for part in (metadata.positions, metadata.past_lens, metadata.page_table))
    return replace(metadata, max_kv_len=longest, positions=positions, past_lens=past, page_table=pages)


def _heads(case: Case, heads: int, tokens: int) -> Tensor:
    return torch.randn(len(case.pasts), tokens, heads, case.head_dim).to(case.dtype)
