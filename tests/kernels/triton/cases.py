"""Attention steps to hold kernels against the reference: a cache with a past, new tokens, a page table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from exlm import spec
from exlm.kvcache.dense import DenseLayer
from exlm.kvcache.layer import CacheLayer, LayerShape
from exlm.kvcache.quantized import HadamardQuantizer, QuantizedLayer, TruncatedFP8
from exlm.nn import Batch

CODERS = {
    "q8": (HadamardQuantizer(8), HadamardQuantizer(8)),
    "q6": (HadamardQuantizer(8), HadamardQuantizer(4)),
    "q4": (HadamardQuantizer(4), HadamardQuantizer(4)),
    "fp8": (TruncatedFP8(), TruncatedFP8()),
}
PAGE = 256


@dataclass(frozen=True)
class Case:
    """One step over one layer's cache."""

    cache: str  # "float", or a key of CODERS
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    pasts: tuple[int, ...]
    tokens: int
    window: int | None = None
    softcap: float | None = None
    hide: bool = False

    @property
    def attn(self) -> spec.Attention:
        """The layer."""
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
    """What an attention kernel is called with."""

    heads: tuple[Tensor, Tensor, Tensor]
    layer: CacheLayer
    metadata: Batch


def blank(case: Case, pages: int, device: torch.device) -> CacheLayer:
    """An empty cache layer."""
    if case.cache == "float":
        return DenseLayer(pages, PAGE, case.kv_heads, case.head_dim, case.dtype, device)
    shape = LayerShape(case.kv_heads, case.head_dim)
    return QuantizedLayer(pages, PAGE, shape, *CODERS[case.cache], device)


def step(case: Case, device: torch.device, spare: int = 1) -> Step:
    """Random new tokens behind random pasts, in shuffled pages, with `spare` pages in each row's table."""
    rows, tokens, longest = len(case.pasts), case.tokens, max(case.pasts) + case.tokens
    width = -(-longest // PAGE) + spare
    layer = blank(case, rows * width, device)
    pages = torch.randperm(rows * width).view(rows, width).to(device)
    past = torch.tensor(case.pasts, device=device)
    none = torch.zeros(rows, 1, dtype=torch.int64, device=device)
    if max(case.pasts):
        old = [_heads(case, case.kv_heads, max(case.pasts)).to(device) for _ in "kv"]
        layer.update(*old, Batch(none, none, none[:, 0], pages, max(case.pasts), True))
    mask = (torch.rand(rows, longest) > 0.4).to(device) if case.hide else None
    positions = past[:, None] + torch.arange(tokens, device=device)
    even = len(set(case.pasts)) == 1 and not case.hide
    metadata = Batch(none, positions, past, pages, longest, even, mask)
    both = (case.heads, case.kv_heads, case.kv_heads)
    q, k, v = (_heads(case, heads, tokens).to(device) for heads in both)
    return Step((q, k, v), layer, metadata)


def one_row(metadata: Batch, row: int, longest: int) -> Batch:
    """Where one of the rows stands, by itself."""
    one = slice(row, row + 1)
    positions, past, pages = (part[one] for part in (metadata.positions, metadata.past_lens, metadata.pages))
    return replace(metadata, max_kv_len=longest, positions=positions, past_lens=past, pages=pages)


def _heads(case: Case, heads: int, tokens: int) -> Tensor:
    return torch.randn(len(case.pasts), tokens, heads, case.head_dim).to(case.dtype)
