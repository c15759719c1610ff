"""Decode passes recorded once and replayed: the device goes from kernel to kernel without asking the host.

A recording serves every batch of its bucket: so many rows, so many new tokens and pages of each. A smaller
batch is filled up with copies of its last row, which compute and store once more what that row does. What a
step is given lies in one tensor that the recording reads; what it answers lies where the recording put it,
until the next step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache import PAGE
from ..nn import Batch

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)

FEWEST = 4
"""Pages of a recording: room for more costs a short text nothing, and another recording some time."""

MOST = 16  # new tokens of a row: guesses, no prompts

LARGEST = ROWS[-1] * MOST
"""Tokens of any recording."""

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
        if room is None or tokens > MOST:
            return None
        return cls(room, tokens, max(FEWEST, 1 << (pages - 1).bit_length()))


class Recording:
    """One bucket's: what it reads, what it writes, and the graph itself once there is one."""

    def __init__(self, size: Bucket, device: torch.device) -> None:
        self.size = size
        self.warm = False
        """Whether a pass of this size was ever run."""
        self.logits: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        count = size.rows * (1 + size.tokens + size.pages)
        self._given = torch.zeros(count, dtype=torch.int64, device=device)  # before, new ids, page numbers
        self._staged = torch.zeros(count, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._sent = _event(device)  # since when `_staged` may be written again
        self._before, self._ids, self._table = (part.numpy() for part in self._split(self._staged))
        self._fresh = self._split(self._given)[1]
        self._pages: list[Sequence[int]] = []

    def batch(self) -> Batch:
        """The batch that was sent to the device."""
        past, ids, table = self._split(self._given)
        positions = past[:, None]
        if self.size.tokens > 1:
            positions = positions + torch.arange(self.size.tokens, device=past.device)
        return Batch(ids, positions, past, table, self.size.pages * PAGE, even=False)

    def send(
        self, fed: Sequence[Sequence[int]] | Tensor, past: Sequence[int], pages: Sequence[Sequence[int]]
    ) -> None:
        """Give the device its next batch; `fed` is a tensor (rows,) if it is there already."""
        rows = len(past)
        if self._sent is not None:
            self._sent.synchronize()
        self._before[:rows] = past
        self._before[rows:] = past[-1]
        held = [own[: self.size.pages] for own in pages]
        if held != self._pages:
            for row, own in enumerate(held):
                self._table[row, : len(own)] = own
            self._table[rows:] = self._table[rows - 1]
            self._pages = held
        if not isinstance(fed, Tensor):
            self._ids[:rows] = fed
            self._ids[rows:] = fed[-1]
        self._given.copy_(self._staged, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
        if isinstance(fed, Tensor):
            torch.clamp_min(fed, 0, out=self._fresh[:rows, 0])  # failures are negative
            if rows < self.size.rows:
                self._fresh[rows:] = self._fresh[rows - 1]

    def _split(self, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three parts of what is given: (rows,), (rows, tokens) and (rows, pages)."""
        rows, tokens, pages = self.size
        past, ids, table = words.split_with_sizes([rows, rows * tokens, rows * pages])
        return past, ids.view(rows, tokens), table.view(rows, pages)


class Graphs:
    """The recordings of one decoder over one cache, made as they are needed."""

    def __init__(self, forward: Pass, device: torch.device, most: int = LARGEST) -> None:
        """`forward` launches the same kernels for every batch of a bucket, and waits for none of them.

        So it is with up to `most` tokens.
        """
        self._forward = forward
        self._device = device
        self._most = most
        self._made: dict[Bucket, Recording] = {}
        self._pool: Any = None
        self._refused = device.type != "cuda"

    def decode(
        self,
        fed: Sequence[Sequence[int]] | Tensor,
        past: Sequence[int],
        pages: Sequence[Sequence[int]],
    ) -> Tensor | None:
        """Logits (rows, tokens, vocabulary) of equally many ids in each row, to be used before the next call.

        `fed` may be a tensor (rows,) of one id each that the device is still computing; what it says of a
        negative one means nothing. None if the batch is too large to be recorded.
        """
        rows, tokens = len(past), 1 if isinstance(fed, Tensor) else len(fed[0])
        size = Bucket.of(rows, tokens, (max(past) + tokens - 1) // PAGE + 1)
        if size is None or size.rows * size.tokens > self._most:
            return None
        recording = self._made.get(size)
        if recording is None:
            recording = self._made[size] = Recording(size, self._device)
        recording.send(fed, past, pages)
        if recording.graph is None and recording.warm and not self._refused:
            self._record(recording)
        recording.warm = True  # kernels are compiled and tables made, which no recording would survive
        if recording.graph is None or recording.logits is None:
            return self._forward(recording.batch())[:rows]
        recording.graph.replay()
        return recording.logits[:rows]

    def _record(self, recording: Recording) -> None:
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


def _event(device: torch.device) -> Any:
    """Something to wait for; None where nothing is ever under way."""
    cuda: Any = torch.cuda  # its events have no types
    return cuda.Event() if device.type == "cuda" else None
