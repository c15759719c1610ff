"""Pages of codes: a token is encoded once, when it is written, and decoded whenever a call looks back at it.

A call decodes what its own rows need, a slab at a time; there is no decoded copy of the cache. What a cache
is to its user, and which coder it uses, is not said here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from ..kernels.backend import Coding, Where
from . import hadamard
from .layer import Layer, LayerShape, blank, homes, slots

SLAB = 1 << 22
"""Numbers decoded at a time, if that is at least a page of each row."""


class Coder(Protocol):
    """How the heads of a token are stored."""

    @property
    def coding(self) -> Coding:
        """Its name among kernels."""
        ...

    def blank(self, pages: int, page: int, shape: LayerShape, device: torch.device) -> tuple[Tensor, ...]:
        """Empty pages, (pages, page, kv_heads, …) each: what `encode` returns goes into them."""
        ...

    def encode(self, heads: Tensor) -> tuple[Tensor, ...]:
        """(tokens, kv_heads, head_dim) floats as (tokens, kv_heads, …) each."""
        ...

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        """(…, kv_heads, head_dim) float16 of (…, kv_heads, …) each."""
        ...


@dataclass(frozen=True)
class Rotated:
    """Rotated codes of 4 or 8 bits and a float16 scale for each 32, a token's heads taken as one vector."""

    bits: Literal[4, 8]

    @property
    def coding(self) -> Coding:
        """Its name among kernels."""
        return "rotated8" if self.bits == 8 else "rotated4"

    def blank(self, pages: int, page: int, shape: LayerShape, device: torch.device) -> tuple[Tensor, ...]:
        """Pages of codes, (…, head_dim · bits / 8), and of scales, (…, head_dim / 32)."""
        size = (pages, page, shape.kv_heads)
        codes = blank((*size, shape.head_dim * self.bits // 8), torch.uint8, device)
        scales = blank((*size, shape.head_dim // hadamard.GROUP), torch.float16, device)
        return codes, scales

    def encode(self, heads: Tensor) -> tuple[Tensor, ...]:
        """Codes and scales of each token alone."""
        codes, scales = hadamard.encode(heads.flatten(1), self.bits)
        return codes.view(*heads.shape[:2], -1), scales.view(*heads.shape[:2], -1)

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        """Heads again."""
        codes, scales = stored
        heads = hadamard.decode(codes.flatten(-2), scales.flatten(-2), self.bits)
        return heads.view(*codes.shape[:-1], -1)


@dataclass(frozen=True)
class Truncated:
    """The upper byte of each float16: sign, exponent and two bits, the rest cut off."""

    coding: ClassVar[Coding] = "truncated"

    def blank(self, pages: int, page: int, shape: LayerShape, device: torch.device) -> tuple[Tensor, ...]:
        """Pages of bytes, (…, head_dim)."""
        size = (pages, page, shape.kv_heads, shape.head_dim)
        return (blank(size, torch.uint8, device),)

    def encode(self, heads: Tensor) -> tuple[Tensor, ...]:
        """The upper bytes."""
        return (((hadamard.halves(heads).view(torch.int16) >> 8) & 255).to(torch.uint8),)

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        """The bytes with zeros behind."""
        return (stored[0].to(torch.int16) << 8).view(torch.float16)


class CodedLayer(Layer):
    """One layer's pages in codes: past tokens are seen decoded, the new ones of a call as they came."""

    def __init__(
        self, pages: int, page: int, shape: LayerShape, key: Coder, value: Coder, device: torch.device
    ) -> None:
        super().__init__(page, key.blank(pages, page, shape, device), value.blank(pages, page, shape, device))
        self.key = key
        self.value = value
        self.coding = key.coding, value.coding

    def update(self, k: Tensor, v: Tensor, where: Where) -> tuple[Tensor, Tensor]:
        """Encode and write the new heads; return the past decoded, with the new heads in their places."""
        home = homes(where, k.shape[1], self.page)
        for stored, coder, new in ((self.keys, self.key, k), (self.values, self.value, v)):
            for tensor, part in zip(stored, coder.encode(new.flatten(0, 1)), strict=True):
                tensor.flatten(0, 1)[home] = part
        return self._seen(self.keys, self.key, k, where), self._seen(self.values, self.value, v, where)

    def _seen(self, stored: tuple[Tensor, ...], coder: Coder, new: Tensor, where: Where) -> Tensor:
        rows, tokens, *head = new.shape
        past = where.longest - tokens  # of the longest row
        if past == 0:
            return new
        seen = new.new_empty(rows, where.longest, *head)
        seen[:, past:] = 0
        step = max(1, SLAB // (rows * self.page * head[0] * head[1]))  # pages of each row
        for first in range(0, -(-past // self.page), step):
            start, stop = first * self.page, min(past, (first + step) * self.page)
            table = where.pages[:, first : first + step].long()
            found = tuple(tensor[table].flatten(1, 2)[:, : stop - start] for tensor in stored)
            seen[:, start:stop] = coder.decode(found)
        seen[torch.arange(rows, device=new.device)[:, None], slots(where, tokens)] = new
        return seen
