"""Attention over pages as they are: which kernel a call gets, and with which blocks.

One new token in each row goes the way of `single` where each query head has its own keys; else up to `NEW`
go that of `decode`, and more that of `prefill`. A cache that the kernels cannot read in place (heads that
share a transform) is read as the reference reads it. Block sizes are those that `benchmarks.attention` liked
best on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ... import spec
from .. import interface as b
from ..reference.attention import ReferenceAttention as Reference
from . import decode, prefill, single
from .rope import Rotation, headwise, steps
from .softmax import factors


class Machine(NamedTuple):
    """What decides grids and block sizes."""

    processors: int
    shared: int  # bytes of shared memory a program may have

    @classmethod
    def of(cls, device: torch.device) -> Machine:
        """A device's own numbers; for a CPU, which only interprets kernels, small ones."""
        if device.type != "cuda":
            return cls(2, 1 << 16)
        found = torch.cuda.get_device_properties(device)
        return cls(found.multi_processor_count, found.shared_memory_per_block_optin)  # type: ignore[attr-defined]


class Chunks(NamedTuple):
    """How a row's past is cut."""

    SLOTS: int  # the most chunks of a row, its new tokens counted as one
    CHUNK: int  # chunks are multiples of this many tokens


SINGLE, SPLIT = Chunks(64, 32), Chunks(32, 64)
"""A program of `single` is one warp, of `decode` four: so the former takes half as much."""


class Blocks(NamedTuple):
    """The shape of a program."""

    M: int  # queries
    N: int  # keys at a time
    num_warps: int
    num_stages: int


def decode_blocks(queries: int, head: int, size: int, coded: bool, deep: bool) -> Blocks:
    """For `queries` of a row that share a kv head, heads of (padded) width `head`, `size` bytes a number.

    `deep` loads far ahead, which fewer programs at a time have room for. It changes when, not what: the
    answer is the same to the bit.
    """
    m = min(32 if coded else 64, max(16, triton.next_power_of_2(queries)))
    return Blocks(m, 64 if head * size <= 256 else 32, 4, 5 if deep else 2)


def prefill_blocks(head: int, size: int, shared: int) -> Blocks:
    """For heads of (padded) width `head` in numbers of `size` bytes."""
    if size == 4:
        return Blocks(32, 32 if head <= 128 else 16, 4, 1)
    if head > 128:
        return Blocks(128, 64, 8, 2) if shared > 200_000 else Blocks(64, 32, 4, 1 if shared < 110_000 else 2)
    return Blocks(64, 64, 4, 3 if shared > 140_000 or head <= 64 else 2)


@dataclass(frozen=True, eq=False)
class Attend:
    """Turn, store, attend."""

    attn: spec.Attention
    rotate: b.RopeFn
    machine: Machine

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, kv: b.LayerKVCache, metadata: b.AttnMetadata
    ) -> Tensor:
        """Heads in, (rows, tokens, heads · head_dim) out."""
        with torch.cuda.device_of(q):
            return self._attend(q, k, v, kv, metadata)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, kv: b.LayerKVCache, metadata: b.AttnMetadata
    ) -> Tensor:
        a, pages = self.attn, kv.paged
        if pages is not None and not self._reads(pages):
            return Reference(self.rotate, a.scale, a.window, a.softcap)(q, k, v, kv, metadata)
        turn = self.rotate if isinstance(self.rotate, Rotation) else None
        if pages is None or turn is None:
            q, k = self.rotate(q, k, metadata.positions)
            turn = None
        step = Step(self, headwise(q), headwise(k), headwise(v), metadata, turn)
        if pages is None:
            return step.flash(step.q, step.k, step.v, None, 0)
        if q.shape[1] > decode.NEW.value:
            return step.prefill(pages)
        if pages.dtypes[0] != "float":
            step = Step(self, *step.place(pages, inside=True), metadata, None)
            step.dtype = q.dtype
        return step.decode(pages)

    def _reads(self, pages: b.KVPages) -> bool:
        run = 32 * ways(self.attn)
        return not pages.dtypes[0].startswith("rotated") or self.attn.head_dim % run == 0


def ways(attn: spec.Attention) -> int:
    """Transforms side by side in the codes of a token, whose heads count as one vector."""
    return 2 if attn.kv_heads * attn.head_dim % 64 == 0 else 1


class Step:
    """One call: its tensors, and what every kernel must be told about them."""

    def __init__(
        self, attend: Attend, q: Tensor, k: Tensor, v: Tensor, metadata: b.AttnMetadata, turn: Rotation | None
    ) -> None:
        self.attn, self.machine = attend.attn, attend.machine
        self.dtype = q.dtype  # of the answer
        self.q, self.k, self.v, self.where = q, k, v, metadata
        self.rows, self.tokens = q.shape[:2]
        self.width = max(32, triton.next_power_of_2(self.attn.head_dim))
        self.share = self.attn.heads // self.attn.kv_heads
        reach = self.attn.window
        self.window = 0 if reach is None else reach
        self.factor, self.cap = factors(self.attn.scale, self.attn.softcap)
        self.mask = q if metadata.mask is None else metadata.mask.view(torch.uint8)
        self.mask_step = 0 if metadata.mask is None else metadata.mask.stride(0)
        place = metadata.positions
        self.tables = (q, q, q, place) if turn is None else (turn.cos, turn.sin, turn.planes, place)
        self.strides = tuple(x.stride(i) for x in (q, k, v) for i in (0, 1))
        self.rope = {
            "DIM": 0 if turn is None else turn.dim,
            "PAIRS": turn is not None and turn.pairs,
            "PLANES": place.dim() == 3,
        }
        self.seeing = {
            "WINDOW": reach is not None,
            "CAPPED": self.attn.softcap is not None,
            "MASKED": metadata.mask is not None,
        }

    def decode(self, pages: b.KVPages) -> Tensor:
        """A few tokens: chunks, then their sum."""
        a, rows, tokens = self.attn, self.rows, self.tokens
        single = tokens == 1 and self.share == 1
        chunks = SINGLE if single else SPLIT
        slots = rows * tokens * a.heads * chunks.SLOTS
        left = torch.empty(slots * (a.head_dim + 2), dtype=torch.float32, device=self.q.device)
        parts = left[:slots], left[slots : 2 * slots], left[2 * slots :]  # peaks, sums, answers
        if single:
            self._single(pages, parts)
        else:
            self._split(pages, parts)
        out = torch.empty(rows, tokens, a.heads * a.head_dim, dtype=self.dtype, device=self.q.device)
        decode.join_kernel[(rows * tokens * a.heads,)](
            *parts, self.where.past_lens, out, tokens, self.window,
            HEADS=a.heads, HEAD=a.head_dim, D=self.width, ROTATED=pages.dtypes[0].startswith("rotated"),
            WAYS=ways(a), WINDOW=self.seeing["WINDOW"], **chunks._asdict(),
        )  # fmt: skip
        return out

    def _single(self, pages: b.KVPages, left: tuple[Tensor, Tensor, Tensor]) -> None:
        a, programs, table = self.attn, self.rows * self.attn.kv_heads, self.where.pages
        parts = self._parts(programs, pages, SINGLE)
        row, _, plane = steps(self.where.positions)
        single.single_kernel[(programs, parts)](
            self.q,
            self.k,
            self.v,
            *stored(pages),
            table,
            self.where.past_lens,
            self.mask,
            *self.tables,
            *left,
            parts,
            table.stride(0),
            self.mask_step,
            *self.strides[::2],
            row,
            plane,
            self.factor,
            self.cap,
            self.window,
            KV=a.kv_heads,
            HEAD=a.head_dim,
            D=self.width,
            **self.rope,
            **coding(pages),
            **self.seeing,
            PAGE=pages.page_size,
            **SINGLE._asdict(),
            N=1024 // self.width,
            num_warps=1,
            num_stages=1,
        )

    def _split(self, pages: b.KVPages, left: tuple[Tensor, Tensor, Tensor]) -> None:
        a, tokens, table, machine = self.attn, self.tokens, self.where.pages, self.machine
        queries, coded, size = self.share * tokens, pages.dtypes[0] != "float", self.q.dtype.itemsize
        deep = not coded and self.rows * a.kv_heads < machine.processors and machine.shared > 140_000
        blocks = decode_blocks(queries, self.width, size, coded, deep)
        programs = self.rows * a.kv_heads * -(-queries // blocks.M)
        parts = self._parts(programs, pages, SPLIT)
        decode.split_kernel[(programs, parts)](
            self.q,
            self.k,
            self.v,
            *stored(pages),
            table,
            self.where.past_lens,
            self.mask,
            *self.tables,
            *left,
            tokens,
            parts,
            table.stride(0),
            self.mask_step,
            *self.strides,
            *steps(self.where.positions),
            self.factor,
            self.cap,
            self.window,
            KV=a.kv_heads,
            SHARE=self.share,
            HEAD=a.head_dim,
            D=self.width,
            **self.rope,
            **coding(pages),
            **self.seeing,
            PAGE=pages.page_size,
            **SPLIT._asdict(),
            **blocks._asdict(),
        )

    def _parts(self, programs: int, pages: b.KVPages, chunks: Chunks) -> int:
        """Programs that share the chunks of a row: enough to fill the device, as far as a row may be long."""
        most = min(chunks.SLOTS, self.where.pages.shape[1] * pages.page_size // chunks.CHUNK + 1)
        return max(1, min(most, self.machine.processors * 32 // programs))

    def place(self, pages: b.KVPages, inside: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Turn queries and keys, store keys and values; return them, `inside` in the space of the codes."""
        a, rows, tokens = self.attn, self.rows, self.tokens
        dtype = torch.float16 if inside and self.q.dtype != torch.float32 else self.q.dtype
        made = (self.q, self.k, self.v) if inside else (self.q, self.k)
        q, k, *v = (torch.empty(x.shape, dtype=dtype, device=x.device) for x in made)
        run = min(16, triton.next_power_of_2(tokens))
        prefill.place_kernel[(-(-tokens // run), a.heads + 2 * a.kv_heads, rows)](
            self.q,
            self.k,
            self.v,
            q,
            k,
            v[0] if v else q,
            *stored(pages),
            self.where.pages,
            self.where.past_lens,
            *self.tables,
            tokens,
            self.where.pages.stride(0),
            *self.strides,
            *steps(self.where.positions),
            HEADS=a.heads,
            KV=a.kv_heads,
            HEAD=a.head_dim,
            D=self.width,
            **self.rope,
            **coding(pages),
            WAYS=ways(a),
            PAGE=pages.page_size,
            TOKENS=run,
            INSIDE=inside,
            num_warps=1 if run == 1 else 4,
        )
        return q, k, v[0] if v else self.v

    def prefill(self, pages: b.KVPages) -> Tensor:
        """Many tokens: turn and store, decode the past where it is in codes, attend."""
        a, rows, tokens, length = self.attn, self.rows, self.tokens, self.where.max_kv_len
        q, k, _ = self.place(pages, inside=False)
        coded, fresh = pages.dtypes[0] != "float", self.where.uniform and length == tokens
        if fresh and (coded or pages.keys[0].dtype == k.dtype):
            return self.flash(q, k, self.v, None, 0)
        if not coded:
            keys, values = pages.keys[0].flatten(0, 1), pages.values[0].flatten(0, 1)
            return self.flash(q, keys, values, self.where.pages, pages.page_size)
        keys, values = (k.new_empty(rows, length, a.kv_heads, a.head_dim) for _ in "kv")
        prefill.recall_kernel[(-(-length // 64), 2 * a.kv_heads, rows)](
            *stored(pages), self.where.pages, keys, values, self.where.pages.stride(0), length,
            KV=a.kv_heads, HEAD=a.head_dim, D=self.width, **coding(pages), WAYS=ways(a), PAGE=pages.page_size,
            N=64,
        )  # fmt: skip
        slots = self.where.past_lens[:, None] + torch.arange(tokens, device=k.device)
        row = torch.arange(rows, device=k.device)[:, None]
        keys[row, slots], values[row, slots] = k, self.v
        return self.flash(q, keys, values, None, 0)

    def flash(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, page: int) -> Tensor:
        """All queries over keys in pages, (places, kv_heads, head_dim), or in rows of their own."""
        a = self.attn
        out = torch.empty(self.rows, self.tokens, a.heads * a.head_dim, dtype=q.dtype, device=q.device)
        blocks = prefill_blocks(self.width, q.dtype.itemsize, self.machine.shared)
        spaces = (k.stride(0), k.stride(1), v.stride(0), v.stride(1))
        if page:
            spaces = (0, k.stride(0), 0, v.stride(0))
        prefill.flash_kernel[(-(-self.tokens // blocks.M), a.heads, self.rows)](
            q, k, v, q if table is None else table, self.where.past_lens, self.mask, out, self.tokens,
            0 if table is None else table.stride(0), self.mask_step, q.stride(0), q.stride(1), *spaces,
            self.factor, self.cap, self.window,
            HEADS=a.heads, SHARE=self.share, HEAD=a.head_dim, D=self.width, **self.seeing,
            PAGE=page, **blocks._asdict(),
        )  # fmt: skip
        return out


def stored(pages: b.KVPages) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, their scales, values, their scales; what has no scales stands in for them."""
    return pages.keys[0], pages.keys[-1], pages.values[0], pages.values[-1]


def coding(pages: b.KVPages) -> dict[str, str]:
    """What the kernels must know of the codes."""
    return {"KEYS": pages.dtypes[0], "VALUES": pages.dtypes[1]}
