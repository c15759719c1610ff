"""CUDA graphs of decode steps: captured once per bucket, then replayed without launches by the host.

A graph serves every batch of its bucket (rows, new tokens, pages). A smaller batch is padded with copies
of its last row, which compute and store the same values twice. A step's inputs are in one tensor that the
graph reads; its outputs stay in the graph's memory until the next replay.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.interface import StateSlots
from ..kvcache import PAGE_SIZE
from ..nn import Batch

ROW_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)

MIN_PAGES = 4
"""Pages in the smallest page table of a graph: unused pages cost nothing, one more graph costs its capture."""

MAX_TOKENS_PER_ROW = 16  # new tokens of a row: drafts, not prompts

MAX_GRAPH_TOKENS = ROW_BUCKETS[-1] * MAX_TOKENS_PER_ROW
"""Most tokens of a captured batch."""

ForwardFn = Callable[[Batch], Tensor]


class Bucket(NamedTuple):
    """The sizes of the batches that one graph serves."""

    rows: int
    tokens: int
    pages: int

    @classmethod
    def of(cls, rows: int, tokens: int, pages: int) -> Bucket | None:
        """The bucket of a batch; None if the batch is too large to capture."""
        padded_rows = next((size for size in ROW_BUCKETS if size >= rows), None)
        if padded_rows is None or tokens > MAX_TOKENS_PER_ROW:
            return None
        return cls(padded_rows, tokens, max(MIN_PAGES, 1 << (pages - 1).bit_length()))


class DecodeGraph:
    """One bucket's input and output tensors and, once captured, its CUDA graph."""

    def __init__(self, bucket: Bucket, device: torch.device, is_recurrent: bool = False) -> None:
        """`is_recurrent`: batches have state slots."""
        self.bucket, self.is_recurrent = bucket, is_recurrent
        self.warmed_up = False  # whether a batch of this bucket has run before
        self.logits: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self._sizes = [bucket.rows, bucket.rows * bucket.tokens, bucket.rows * bucket.pages]
        self._sizes.append(bucket.rows * (1 + bucket.tokens) if is_recurrent else 0)
        count = sum(self._sizes)
        # Past lengths, ids, page tables and state slots, on the device and on the host.
        self._device_inputs = torch.zeros(count, dtype=torch.int64, device=device)
        self._pinned_inputs = torch.zeros(count, dtype=torch.int64, pin_memory=device.type == "cuda")
        cuda: Any = torch.cuda  # its events are untyped
        # After this event `_pinned_inputs` may be written again; on a CPU copies are synchronous.
        self._copy_done = cuda.Event() if device.type == "cuda" else None
        self._past, self._ids, self._page_table, self._state_slots = (
            part.numpy() for part in self._split_inputs(self._pinned_inputs)
        )
        self._device_ids = self._split_inputs(self._device_inputs)[1]
        self._last_pages: list[Sequence[int]] = []

    def batch(self) -> Batch:
        """The batch in the graph's input tensor."""
        past, ids, table, slots = self._split_inputs(self._device_inputs)
        positions = past[:, None]
        if self.bucket.tokens > 1:
            positions = positions + torch.arange(self.bucket.tokens, device=past.device)
        return Batch(
            ids=ids,
            positions=positions,
            past_lens=past,
            page_table=table,
            max_kv_len=self.bucket.pages * PAGE_SIZE,
            uniform=False,
            state_slots=split_state_slots(slots) if self.is_recurrent else None,
        )

    def copy_inputs(
        self,
        new_ids: Sequence[Sequence[int]] | Tensor,
        past: Sequence[int],
        pages: Sequence[Sequence[int]],
        state_slots: NDArray[np.int64] | None = None,
    ) -> None:
        """Copy the next batch to the device; a tensor of ids (rows,) is on the device already."""
        rows = len(past)
        if self._copy_done is not None:
            self._copy_done.synchronize()
        self._past[:rows] = past
        self._past[rows:] = past[-1]
        used_pages = [row_pages[: self.bucket.pages] for row_pages in pages]
        if used_pages != self._last_pages:
            for row, row_pages in enumerate(used_pages):
                self._page_table[row, : len(row_pages)] = row_pages
            self._page_table[rows:] = self._page_table[rows - 1]
            self._last_pages = used_pages
        if state_slots is not None:
            self._state_slots[:rows], self._state_slots[rows:] = state_slots, state_slots[-1]
        if not isinstance(new_ids, Tensor):
            self._ids[:rows] = new_ids
            self._ids[rows:] = new_ids[-1]
        self._device_inputs.copy_(self._pinned_inputs, non_blocking=True)
        if self._copy_done is not None:
            self._copy_done.record()
        if isinstance(new_ids, Tensor):
            torch.clamp_min(new_ids, 0, out=self._device_ids[:rows, 0])  # negative ids are sampling failures
            if rows < self.bucket.rows:
                self._device_ids[rows:] = self._device_ids[rows - 1]

    def _split_inputs(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The parts: past lengths (rows,), ids (rows, tokens), page tables (rows, pages), slots (rows, 1 + tokens)."""
        rows, tokens, pages = self.bucket
        past, ids, table, slots = inputs.split_with_sizes(self._sizes)
        return past, ids.view(rows, tokens), table.view(rows, pages), slots.view(-1, 1 + tokens)


def split_state_slots(slots: Tensor) -> StateSlots:
    """(rows, 1 + tokens) → each row's source, and its targets."""
    return StateSlots(slots[:, 0], slots[:, 1:])


class CudaGraphRunner:
    """The CUDA graphs of one decoder over one cache, captured when first needed."""

    def __init__(
        self,
        forward: ForwardFn,
        device: torch.device,
        max_tokens: int = MAX_GRAPH_TOKENS,
        is_recurrent: bool = False,
    ) -> None:
        """`forward` must not synchronise, and launch the same kernels for every batch of a bucket.

        It is captured for batches of up to `max_tokens` tokens. `is_recurrent`: batches have state slots.
        """
        self._forward = forward
        self._is_recurrent = is_recurrent
        self._device = device
        self._max_tokens = max_tokens
        self._graphs: dict[Bucket, DecodeGraph] = {}
        self._pool: Any = None
        self._disabled = device.type != "cuda"

    def decode(
        self,
        new_ids: Sequence[Sequence[int]] | Tensor,
        past: Sequence[int],
        pages: Sequence[Sequence[int]],
        state_slots: NDArray[np.int64] | None = None,
    ) -> Tensor | None:
        """Logits (rows, tokens, vocabulary) of equally many ids in each row; the next call overwrites them.

        `new_ids` may be a tensor (rows,) of one id each that the device is still computing; logits of a
        negative id are meaningless. `state_slots` (rows, 1 + tokens) has each row's source and targets. None
        if the batch is too large to capture.
        """
        rows, tokens = len(past), 1 if isinstance(new_ids, Tensor) else len(new_ids[0])
        bucket = Bucket.of(rows, tokens, (max(past) + tokens - 1) // PAGE_SIZE + 1)
        if bucket is None or bucket.rows * bucket.tokens > self._max_tokens:
            return None
        entry = self._graphs.get(bucket)
        if entry is None:
            entry = self._graphs[bucket] = DecodeGraph(bucket, self._device, self._is_recurrent)
        entry.copy_inputs(new_ids, past, pages, state_slots)
        if entry.graph is None and entry.warmed_up and not self._disabled:
            self._capture(entry)
        entry.warmed_up = True  # the first run compiles kernels and makes tables, which cannot be captured
        if entry.graph is None or entry.logits is None:
            return self._forward(entry.batch())[:rows]
        entry.graph.replay()
        return entry.logits[:rows]

    def _capture(self, entry: DecodeGraph) -> None:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="relaxed"):
                entry.logits = self._forward(entry.batch())
        except RuntimeError as error:
            self._disabled = True
            warnings.warn(
                f"A decode step could not be captured as a CUDA graph ({error}): decoding "
                "runs without graphs, which is slower. EXLLAMA_NO_GRAPHS=1 does that without this warning.",
                stacklevel=2,
            )
            return
        entry.graph = graph
