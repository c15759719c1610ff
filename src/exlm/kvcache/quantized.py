"""Quantised caches: the quantisers of keys and values, and the classes that combine them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from ..kernels.interface import AttnMetadata, KVCacheDtype, KVPages
from . import hadamard
from .base import PAGE_SIZE, CacheBase, CacheLayer, LayerShape, empty_pages, new_token_positions, slot_mapping
from .hadamard import GROUP_SIZE

MAX_DEQUANTIZED_NUMBERS = 1 << 22
"""Most numbers that are dequantised at a time; one page of each row is, even if it has more."""


class KVQuantizer(Protocol):
    """How heads are stored."""

    @property
    def kv_dtype(self) -> KVCacheDtype:
        """The format's name in `kernels`."""
        ...

    def empty_pages(self, pages: int, page_size: int, shape: LayerShape, device: torch.device) -> tuple[Tensor, ...]:
        """Empty pages, (pages, page, kv_heads, …) each, for what `quantize` returns."""
        ...

    def quantize(self, heads: Tensor) -> tuple[Tensor, ...]:
        """(tokens, kv_heads, head_dim) floats → tensors of (tokens, kv_heads, …)."""
        ...

    def dequantize(self, stored: tuple[Tensor, ...]) -> Tensor:
        """Tensors of (…, kv_heads, …) → (…, kv_heads, head_dim) float16."""
        ...


@dataclass(frozen=True)
class HadamardQuantizer:
    """Hadamard-rotated codes of 4 or 8 bits, a float16 scale for each 32; a token's heads are one vector."""

    bits: Literal[4, 8]

    @property
    def kv_dtype(self) -> KVCacheDtype:
        """The format's name in `kernels`."""
        return "hadamard8" if self.bits == 8 else "hadamard4"

    def empty_pages(self, pages: int, page_size: int, shape: LayerShape, device: torch.device) -> tuple[Tensor, ...]:
        """Pages of codes, (…, head_dim · bits / 8), and of scales, (…, head_dim / 32)."""
        size = (pages, page_size, shape.kv_heads)
        codes = empty_pages((*size, shape.head_dim * self.bits // 8), torch.uint8, device)
        scales = empty_pages((*size, shape.head_dim // GROUP_SIZE), torch.float16, device)
        return codes, scales

    def quantize(self, heads: Tensor) -> tuple[Tensor, ...]:
        """Codes and scales; each token is quantised by itself."""
        codes, scales = hadamard.quantize(heads.flatten(1), self.bits)
        return codes.view(*heads.shape[:2], -1), scales.view(*heads.shape[:2], -1)

    def dequantize(self, stored: tuple[Tensor, ...]) -> Tensor:
        """Heads as float16."""
        codes, scales = stored
        heads = hadamard.dequantize(codes.flatten(-2), scales.flatten(-2), self.bits)
        return heads.view(*codes.shape[:-1], -1)


@dataclass(frozen=True)
class FP8Quantizer:
    """FP8 E5M2: the upper byte of each float16, truncated rather than rounded."""

    kv_dtype: ClassVar[KVCacheDtype] = "fp8_e5m2"

    def empty_pages(self, pages: int, page_size: int, shape: LayerShape, device: torch.device) -> tuple[Tensor, ...]:
        """Pages of bytes, (…, head_dim)."""
        size = (pages, page_size, shape.kv_heads, shape.head_dim)
        return (empty_pages(size, torch.uint8, device),)

    def quantize(self, heads: Tensor) -> tuple[Tensor, ...]:
        """The upper bytes."""
        return (((hadamard.to_float16_saturating(heads).view(torch.int16) >> 8) & 255).to(torch.uint8),)

    def dequantize(self, stored: tuple[Tensor, ...]) -> Tensor:
        """The bytes as the upper halves of float16."""
        return (stored[0].to(torch.int16) << 8).view(torch.float16)


class QuantizedLayer(CacheLayer):
    """A layer's pages, quantised; attention sees past tokens dequantised and new tokens as passed."""

    def __init__(
        self,
        pages: int,
        page_size: int,
        shape: LayerShape,
        key_quantizer: KVQuantizer,
        value_quantizer: KVQuantizer,
        device: torch.device,
    ) -> None:
        keys, values = (
            quantizer.empty_pages(pages, page_size, shape, device) for quantizer in (key_quantizer, value_quantizer)
        )
        super().__init__(KVPages(page_size, keys, values, (key_quantizer.kv_dtype, value_quantizer.kv_dtype)))
        self.key_quantizer, self.value_quantizer = key_quantizer, value_quantizer

    def update(self, k: Tensor, v: Tensor, metadata: AttnMetadata) -> tuple[Tensor, Tensor]:
        """Quantise and write the new heads; return the dequantised past with the new heads as passed."""
        slots = slot_mapping(metadata, k.shape[1], self.page_size)
        keys = self.keys, self.key_quantizer, k
        values = self.values, self.value_quantizer, v
        for stored, quantizer, new in (keys, values):
            for tensor, part in zip(stored, quantizer.quantize(new.flatten(0, 1)), strict=True):
                tensor.flatten(0, 1)[slots] = part
        return self._dequantized_with_new(*keys, metadata), self._dequantized_with_new(*values, metadata)

    def _dequantized_with_new(
        self, stored: tuple[Tensor, ...], quantizer: KVQuantizer, new: Tensor, metadata: AttnMetadata
    ) -> Tensor:
        """(rows, max_kv_len, kv_heads, head_dim): the dequantised past, then the new heads as passed."""
        rows, tokens, *head = new.shape
        max_past = metadata.max_kv_len - tokens  # of the longest row
        if max_past == 0:
            return new
        heads = new.new_empty(rows, metadata.max_kv_len, *head)
        heads[:, max_past:] = 0
        # Pages of each row that are dequantised at a time.
        chunk_pages = max(1, MAX_DEQUANTIZED_NUMBERS // (rows * self.page_size * head[0] * head[1]))
        for first in range(0, -(-max_past // self.page_size), chunk_pages):
            start, stop = first * self.page_size, min(max_past, (first + chunk_pages) * self.page_size)
            table = metadata.page_table[:, first : first + chunk_pages].long()
            pages = tuple(tensor[table].flatten(1, 2)[:, : stop - start] for tensor in stored)
            heads[:, start:stop] = quantizer.dequantize(pages)
        heads[torch.arange(rows, device=new.device)[:, None], new_token_positions(metadata, tokens)] = new
        return heads


class QuantizedCache(CacheBase):
    """A quantised cache. Tokens are quantised once, when they are written."""

    key_quantizer: ClassVar[KVQuantizer]
    value_quantizer: ClassVar[KVQuantizer]

    @property
    def dtype(self) -> torch.dtype:
        """The type of the stored codes."""
        return torch.uint8

    def _make_layer(self, shape: LayerShape, device: torch.device) -> QuantizedLayer:
        return QuantizedLayer(self.num_pages, PAGE_SIZE, shape, self.key_quantizer, self.value_quantizer, device)


class HadamardCache(QuantizedCache):
    """A cache of Hadamard-rotated codes, with a float16 scale for each 32."""

    has_scales = True
    group_size = GROUP_SIZE


class CacheQ8(HadamardCache):
    """Keys and values in 8 bits: 8.5 with the scales."""

    key_quantizer = HadamardQuantizer(8)
    value_quantizer = HadamardQuantizer(8)


class CacheQ6(HadamardCache):
    """Keys in 8 bits and values in 4: 6.5 on average with the scales."""

    key_quantizer = HadamardQuantizer(8)
    value_quantizer = HadamardQuantizer(4)


class CacheQ4(HadamardCache):
    """Keys and values in 4 bits: 4.5 with the scales."""

    key_quantizer = HadamardQuantizer(4)
    value_quantizer = HadamardQuantizer(4)


class CacheFP8(QuantizedCache):
    """Keys and values as FP8 E5M2, truncated, without scales. Q8 is far more exact at 8.5 bits."""

    key_quantizer = FP8Quantizer()
    value_quantizer = FP8Quantizer()
