"""Fused: a batch picked by two kernels on a GPU. How they are launched, and the memory they work in.

`pipeline.py` says what is right and takes the rows that have no lane here, and all rows where Triton is
missing. What is launched for which rows, and with which words, is decided in `desk.py` and `party.py`.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.sampling_layout import MAX_TILES, VOCAB_BLOCK
from .draw import top_tokens_of
from .kernel_params import SamplingKernelVariant
from .output_buffers import MuBufferPool, OutputBuffer, OutputBufferPool
from .triton_launch import KernelLaunch, TritonKernel

EDIT_PROGRAMS = 256  # that edit at a time, about: two for each multiprocessor of a large GPU
EDIT_TILE = 4096  # columns that one of them loads at a time
DRAW_TILE = (
    16384  # columns loaded by a program that picks: what it takes to keep a multiprocessor's memory busy
)
CANDIDATE_TILE = 4096  # candidates looked at a time
NUM_WARPS = 16
TOP_K_NUM_WARPS = 8  # for rows with top-k: what they sort is little, and warps wait for each other
MAX_CACHED_PLANS = 32  # kinds of work that are kept ready, and sizes of answers


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return find_spec("triton") is not None


def has_kernels_for(device: torch.device) -> bool:
    """Whether there are kernels for a device."""
    return device.type == "cuda" and _has_triton()


class SamplingLaunchKey(NamedTuple):
    """What is to be done: for how many rows, their lane and top tokens; whether logits or targets change, and
    whether texts are searched."""

    num_rows: int
    variant: SamplingKernelVariant
    num_top: int
    edits_logits: bool
    updates_mu: bool
    uses_dry: bool


class SamplingLaunchPlan(NamedTuple):
    """One kind of work made ready: its launches, and the copy of the logits that the first one makes."""

    edit_launch: KernelLaunch
    draw_launch: KernelLaunch
    logits_copy: Tensor | None
    mu_buffers: MuBufferPool


class KernelOutput(NamedTuple):
    """What is known of some rows besides their tokens: mirostat's targets, top tokens, and those' p."""

    mus: Tensor
    top_tokens: Tensor | None = None
    top_probs: Tensor | None = None


class SamplingKernels:
    """The kernels on one device and the memory they need, which is kept. For one stream."""

    def __init__(self, width: int, device: torch.device, stream: int = 0) -> None:
        """For logits of this many columns, on the current stream, whose handle is given."""
        from ..kernels.triton.sampling_draw import draw_kernel, greedy_kernel
        from ..kernels.triton.sampling_logits import edit_logits_kernel

        self.width, self.device, self._stream = width, device, stream
        exact = {"enable_fp_fusion": False}  # sums as the host rounds them
        self._edit_kernel = TritonKernel(edit_logits_kernel, 3, num_warps=NUM_WARPS, **exact)
        self._full_vocab_kernel = TritonKernel(draw_kernel, 9, num_warps=NUM_WARPS, **exact)
        self._top_k_kernel = TritonKernel(draw_kernel, 9, num_warps=TOP_K_NUM_WARPS, **exact)
        self._greedy_kernel = TritonKernel(greedy_kernel, 4, num_warps=NUM_WARPS)
        self._workspaces: dict[str, tuple[int, Tensor]] = {}
        self._launch_plans: dict[SamplingLaunchKey, SamplingLaunchPlan] = {}
        self._greedy_launches: dict[int, KernelLaunch] = {}
        self._output_pools: dict[int, OutputBufferPool] = {}
        cuda: Any = torch.cuda  # its events have no types
        self._done_event: Any = cuda.Event() if device.type == "cuda" else None
        self._torch_stream: Any = cuda.current_stream(device) if device.type == "cuda" else None

    def next_output(self, count: int) -> OutputBuffer:
        """Memory for the tokens of a batch of this many rows."""
        pool = self._output_pools.get(count)
        if pool is None:
            if len(self._output_pools) >= MAX_CACHED_PLANS:
                self._output_pools.clear()
            pool = self._output_pools[count] = OutputBufferPool(count, self.device, self._done_event)
        self._last_pool = pool
        return pool.next()

    def record_done(self) -> None:
        """All that a batch needs is launched: after that its sheet can be read."""
        if self._done_event is not None:
            self._done_event.record(self._torch_stream)
        self._last_pool.refill()

    def greedy(self, x: Tensor, output: OutputBuffer) -> None:
        """Write down the largest logit of every row (rows, width)."""
        count = x.shape[0]
        launch = self._greedy_launches.get(count)
        if launch is None:
            constants = (self.width, DRAW_TILE)
            launch = self._greedy_launches[count] = KernelLaunch(
                self._greedy_kernel, (count, 1, 1), (), constants, self._stream
            )
        launch(x, x.stride(0), output[:3], output.addresses)

    def draw(
        self, x: Tensor, table: Tensor, words: Tensor, key: SamplingLaunchKey, output: OutputBuffer
    ) -> KernelOutput:
        """Write down a token for each row of a table, in its place in the batch, from logits (rows, width).

        Those are not changed.
        """
        plan = self._launch_plans.get(key) or self._build_launch_plan(key)
        stride, input_addresses = x.stride(0), (table.data_ptr(), words.data_ptr())
        plan.edit_launch(x, stride, (table, words), input_addresses)
        if plan.logits_copy is not None:
            x, stride = plan.logits_copy, self.width
        mus = plan.mu_buffers.next() if key.updates_mu else table
        candidate_probs, candidate_ids = (
            self._candidate_buffers(key.num_rows, key.variant.sort_size) if key.num_top else (table, words)
        )
        per_call_tensors = (*output[:3], mus, candidate_probs, candidate_ids, table, words)
        addresses = (mus.data_ptr(), candidate_probs.data_ptr(), candidate_ids.data_ptr(), *input_addresses)
        plan.draw_launch(x, stride, per_call_tensors, output.addresses + addresses)
        return KernelOutput(
            mus, *(top_tokens_of(candidate_probs, candidate_ids, key.num_top) if key.num_top else ())
        )

    def _build_launch_plan(self, key: SamplingLaunchKey) -> SamplingLaunchPlan:
        """How work is cut up, and the memory that its programs share."""
        count, variant, num_top, edits_logits, _, uses_dry = key
        width, sort_size = self.width, variant.sort_size
        tiles = -(-width // EDIT_TILE)
        tiles_per_program = -(-tiles // max(1, EDIT_PROGRAMS // count))
        blocks_per_row = tiles * EDIT_TILE // VOCAB_BLOCK
        scratch_words = sort_size + MAX_TILES + (sort_size + MAX_TILES + width * variant.full_vocab + 1) // 2
        num_blocks = max(VOCAB_BLOCK, 1 << (-(-width // VOCAB_BLOCK) - 1).bit_length())
        tile = DRAW_TILE // 2 if variant.full_vocab else DRAW_TILE  # those passes need more registers
        block_maxima = self._workspace("maxima", torch.int32, count * blocks_per_row)
        logits_copy = self._workspace("copy", torch.float32, count * width) if edits_logits else None
        counts = self._workspace("counts", torch.int32, count * width) if uses_dry else block_maxima
        scratch = self._workspace("scratch", torch.int64, count * scratch_words)
        edit_launch = KernelLaunch(
            self._edit_kernel,
            (count, -(-tiles // tiles_per_program), 1),
            (
                block_maxima if logits_copy is None else logits_copy,
                block_maxima,
                counts,
                blocks_per_row,
                tiles_per_program,
            ),
            (width, EDIT_TILE, int(edits_logits), int(uses_dry)),
            self._stream,
        )
        draw_launch = KernelLaunch(
            self._full_vocab_kernel if variant.full_vocab else self._top_k_kernel,
            (count, 1, 1),
            (block_maxima, scratch, blocks_per_row, scratch_words, int(edits_logits), num_top),
            (
                width,
                num_blocks,
                sort_size,
                tile,
                CANDIDATE_TILE,
                int(variant.full_vocab),
                int(variant.all_steps),
                int(num_top > 0),
            ),
            self._stream,
        )
        if len(self._launch_plans) >= MAX_CACHED_PLANS:
            self._launch_plans.clear()
        plan = self._launch_plans[key] = SamplingLaunchPlan(
            edit_launch, draw_launch, logits_copy, MuBufferPool(count, self.device)
        )
        return plan

    def _candidate_buffers(self, count: int, sort_size: int) -> tuple[Tensor, Tensor]:
        """Memory for candidates and their probabilities."""
        p = torch.zeros(count, sort_size, dtype=torch.float64, device=self.device)
        return p, torch.zeros(count, sort_size, dtype=torch.int64, device=self.device)

    def _workspace(self, name: str, dtype: torch.dtype, size: int) -> Tensor:
        """Memory for this many numbers, or more; all 0 at first."""
        workspace = self._workspaces.get(name)
        if workspace is None or workspace[0] < size:
            self._launch_plans.clear()  # they hold what is too small
            self._workspaces.pop(name, None)
            workspace = self._workspaces[name] = (size, torch.zeros(size, dtype=dtype, device=self.device))
        return workspace[1]
