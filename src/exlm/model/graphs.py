"""Decode passes recorded once and replayed: the device goes from kernel to kernel without asking the host.

A recording serves every batch of its bucket: so many rows, so many new tokens and pages of each. A smaller
batch is filled up with copies of its last row, which compute and store once more what that row does. What a
step is given lies in one tensor that the recording reads; what it answers lies where the recording put it,
until the next step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache import PAGE
from ..nn import Batch

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)

MOST = 16  # new tokens of a row: guesses, no prompts

Pass = Callable[[Batch], Tensor]


class Bucket(NamedTuple):
    """The sizes of a recording."""

    rows: int
    tokens: int
    pages: int

    @classmethod
    def of(cls, rows: int, tokens: int, pages: int) -> Bucket | None:
        """The bucket of a batch; None if it is too large to be worth a recording."""
        room = next((size for size in ROWS if size >= rows), None)
        return None if room is None or tokens > MOST else cls(room, tokens, 1 << (pages - 1).bit_length())


@dataclass
class Recording:
    """One bucket's: what it reads, what it writes, and the graph itself once there is one."""

    size: Bucket
    given: (
        Tensor  # (rows, 1 + tokens + pages) on the device: the tokens before, the new ids, the page numbers
    )
    staged: Tensor  # the same on the host, pinned
    sent: torch.cuda.Event  # since when `staged` may be written again
    logits: Tensor | None = None
    graph: torch.cuda.CUDAGraph | None = None

    def batch(self) -> Batch:
        """The batch that lies in `given`."""
        past, ids, table = self.split(self.given)
        positions = past[:, None] + torch.arange(self.size.tokens, device=past.device)
        return Batch(ids, positions, past, table, self.size.pages * PAGE, even=False)

    def split(self, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three parts of what is given: (rows,), (rows, tokens) and (rows, pages)."""
        rows, tokens, pages = self.size
        past, ids, table = words.split_with_sizes([rows, rows * tokens, rows * pages])
        return past, ids.view(rows, tokens), table.view(rows, pages)


class Graphs:
    """The recordings of one decoder over one cache, made as they are needed."""

    def __init__(self, forward: Pass, device: torch.device) -> None:
        """`forward` launches the same kernels for every batch of a bucket, and waits for none of them."""
        self._forward = forward
        self._device = device
        self._made: dict[Bucket, Recording] = {}
        self._pool: Any = None
        self._refused = False

    def decode(
        self, fed: Sequence[Sequence[int]], past: Sequence[int], pages: Sequence[Sequence[int]]
    ) -> Tensor | None:
        """Logits (rows, tokens, vocabulary) of equally many ids in each row, to be used before the next call.

        None if the batch is too large to be recorded.
        """
        rows, tokens = len(fed), len(fed[0])
        needed = (max(past) + tokens - 1) // PAGE + 1
        size = Bucket.of(rows, tokens, needed)
        if size is None:
            return None
        new = size not in self._made
        recording = self._prepared(size) if new else self._made[size]
        recording.sent.synchronize()
        befores, ids, table = (part.numpy() for part in recording.split(recording.staged))
        befores[:rows], ids[:rows] = past, fed
        for row, own in enumerate(pages):
            held = min(len(own), needed)
            table[row, :held] = own[:held]
        for part in (befores, ids, table):
            part[rows:] = part[rows - 1]
        recording.given.copy_(recording.staged, non_blocking=True)
        recording.sent.record()
        if new:  # kernels are compiled and tables made in a first pass, which no recording would survive
            return self._forward(recording.batch())[:rows]
        if recording.graph is None:
            self._record(recording)
        if recording.graph is None or recording.logits is None:
            return self._forward(recording.batch())[:rows]
        recording.graph.replay()
        return recording.logits[:rows]

    def _prepared(self, size: Bucket) -> Recording:
        count = size.rows * (1 + size.tokens + size.pages)
        made = Recording(
            size,
            given=torch.zeros(count, dtype=torch.int64, device=self._device),
            staged=torch.zeros(count, dtype=torch.int64).pin_memory(),
            sent=torch.cuda.Event(),  # type: ignore[no-untyped-call]
        )
        self._made[size] = made
        return made

    def _record(self, recording: Recording) -> None:
        if self._refused:
            return
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="relaxed"):
                recording.logits = self._forward(recording.batch())
        except RuntimeError as error:
            self._refused = True
            warnings.warn(
                f"Decoding goes on launch by launch, which is slower: no pass could be recorded ({error}). "
                "EXLLAMA_NO_GRAPHS=1 asks for that without this warning.",
                stacklevel=2,
            )
            return
        recording.graph = graph
