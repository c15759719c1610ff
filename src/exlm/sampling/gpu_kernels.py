"""Launches of the sampling kernels: one edits logits, one draws.

The torch functions in `steps` and `candidates` define the results. Torch samples the rows that no kernel
variant supports, and all rows where Triton is missing. `gpu_batch` decides which rows a launch has and writes
their header words.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.launch import KernelLaunch, TritonKernel
from ..kernels.sampling_layout import MAX_TILES, MAX_VOCAB, VOCAB_BLOCK
from .candidates import top_tokens_of
from .gpu_buffers import OutputAllocator, OutputBuffer, allocate_mus
from .settings import CompiledSettings

SORT_SIZES = (128, 512, 1024, 2048)  # how many candidates a program can sort: at least twice what it needs
GATHER_SIZE = 1024  # how many it gathers where top-k does not say how many there are

STEPS_IN_TOP_K_VARIANT = frozenset({"top_p", "top_a", "min_p", "skew"})  # need no variant with all steps
THRESHOLD_STEPS = frozenset({"top_p", "top_a", "min_p", "mirostat"})
STEPS_BEFORE_MIROSTAT = frozenset({"tfs", "typical"})


class SamplingKernelVariant(NamedTuple):
    """The kernel variant for a row: how many candidates it sorts, whether these come from the whole vocabulary
    instead of a top-k, and whether it has all steps."""

    sort_size: int
    full_vocab: bool
    all_steps: bool


@lru_cache(maxsize=1024)
def variant_of(compiled: CompiledSettings, width: int, num_top: int) -> SamplingKernelVariant | None:
    """The variant for a row; None if torch must sample the row."""
    if not compiled.kernels_support:
        return None
    num_sorted, full_vocab, all_steps = num_top, False, False
    if 0 < compiled.top_k < width:
        num_sorted, all_steps = max(num_top, compiled.top_k), not compiled.probs_steps <= STEPS_IN_TOP_K_VARIANT
    elif not compiled.greedy:
        full_vocab, all_steps = True, not compiled.probs_steps <= THRESHOLD_STEPS
        thresholds = THRESHOLD_STEPS
        if compiled.probs_steps & STEPS_BEFORE_MIROSTAT:
            thresholds -= {"mirostat"}  # it comes after them, so it does not limit what they read
        if all_steps and not compiled.probs_steps & thresholds:
            return None  # those steps work on few candidates, and no threshold limits them
        num_sorted = max(num_top, GATHER_SIZE // 2 if all_steps else 0)
    sort_size = next((size for size in SORT_SIZES if size >= 2 * num_sorted), 0)
    if not sort_size or width > MAX_VOCAB:
        return None
    return SamplingKernelVariant(sort_size, full_vocab, all_steps)


@lru_cache(maxsize=64)
def param_table(compiled_rows: tuple[CompiledSettings, ...], device: torch.device) -> Tensor:
    """The parameters of some rows (rows, PARAM_WIDTH) in float64; cached for the next step."""
    rows = torch.tensor([compiled.kernel_row for compiled in compiled_rows], dtype=torch.float64)
    return (rows.pin_memory() if device.type == "cuda" else rows).to(device, non_blocking=True)


EDIT_PROGRAMS = 256  # programs of the edit kernel: about two for each multiprocessor of a large GPU
EDIT_TILE = 4096  # columns that a program of the edit kernel loads at a time
DRAW_TILE = 16384  # columns that a program of the draw kernel loads at a time: hides the memory latency
CANDIDATE_TILE = 4096  # candidates that a program of the draw kernel loads at a time
NUM_WARPS = 16
TOP_K_NUM_WARPS = 8  # for rows with top-k: they sort little, and more warps would wait at barriers
MAX_CACHED_PLANS = 32  # launch plans, and output allocators


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return find_spec("triton") is not None


def has_kernels_for(device: torch.device) -> bool:
    """Whether there are kernels for a device."""
    return device.type == "cuda" and _has_triton()


class SamplingLaunchKey(NamedTuple):
    """What a launch plan depends on; the last three say whether the kernels edit logits, update mirostat's
    targets and search texts for DRY."""

    num_rows: int
    variant: SamplingKernelVariant
    num_top: int
    edits_logits: bool
    updates_mu: bool
    uses_dry: bool


class SamplingLaunchPlan(NamedTuple):
    """Prepared launches; the edit kernel copies the logits to `logits_copy` if it edits them."""

    edit_launch: KernelLaunch
    draw_launch: KernelLaunch
    logits_copy: Tensor | None
    mu_buffers: Iterator[Tensor]


class KernelOutput(NamedTuple):
    """What the kernels give besides tokens: mirostat's targets, top tokens and their probabilities."""

    mus: Tensor
    top_tokens: Tensor | None = None
    top_probs: Tensor | None = None


class SamplingKernels:
    """The kernels on one device, on one stream, and the memory they work in."""

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
        self._output_allocators: dict[int, OutputAllocator] = {}
        cuda: Any = torch.cuda  # its events have no types
        self._done_event: Any = cuda.Event() if device.type == "cuda" else None
        self._torch_stream: Any = cuda.current_stream(device) if device.type == "cuda" else None

    def next_output(self, count: int) -> OutputBuffer:
        """Memory for the tokens of a batch of this many rows."""
        allocator = self._output_allocators.get(count)
        if allocator is None:
            if len(self._output_allocators) >= MAX_CACHED_PLANS:
                self._output_allocators.clear()
            allocator = self._output_allocators[count] = OutputAllocator(count, self.device, self._done_event)
        self._last_allocator = allocator
        return allocator.next()

    def record_done(self) -> None:
        """Record that all kernels of a batch are launched: after this event its output can be read."""
        if self._done_event is not None:
            self._done_event.record(self._torch_stream)
        self._last_allocator.refill()

    def greedy(self, x: Tensor, output: OutputBuffer) -> None:
        """Write the token of the largest logit of every row (rows, width) to the output."""
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
        """Draw a token for each row of `table`, from the batch's logits (rows, width) into the output.

        The logits are not changed.
        """
        plan = self._launch_plans.get(key) or self._build_launch_plan(key)
        stride, input_addresses = x.stride(0), (table.data_ptr(), words.data_ptr())
        plan.edit_launch(x, stride, (table, words), input_addresses)
        if plan.logits_copy is not None:
            x, stride = plan.logits_copy, self.width
        mus = next(plan.mu_buffers) if key.updates_mu else table
        candidate_probs, candidate_ids = (
            self._candidate_buffers(key.num_rows, key.variant.sort_size) if key.num_top else (table, words)
        )
        per_call_tensors = (*output[:3], mus, candidate_probs, candidate_ids, table, words)
        addresses = (mus.data_ptr(), candidate_probs.data_ptr(), candidate_ids.data_ptr(), *input_addresses)
        plan.draw_launch(x, stride, per_call_tensors, output.addresses + addresses)
        return KernelOutput(mus, *(top_tokens_of(candidate_probs, candidate_ids, key.num_top) if key.num_top else ()))

    def _build_launch_plan(self, key: SamplingLaunchKey) -> SamplingLaunchPlan:
        """Choose the grid, and allocate the memory that the programs share."""
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
        edited = block_maxima if logits_copy is None else logits_copy
        edit_launch = KernelLaunch(
            self._edit_kernel,
            (count, -(-tiles // tiles_per_program), 1),
            (edited, block_maxima, counts, blocks_per_row, tiles_per_program),
            (width, EDIT_TILE, int(edits_logits), int(uses_dry)),
            self._stream,
        )
        steps = (int(variant.full_vocab), int(variant.all_steps), int(num_top > 0))
        draw_launch = KernelLaunch(
            self._full_vocab_kernel if variant.full_vocab else self._top_k_kernel,
            (count, 1, 1),
            (block_maxima, scratch, blocks_per_row, scratch_words, int(edits_logits), num_top),
            (width, num_blocks, sort_size, tile, CANDIDATE_TILE, *steps),
            self._stream,
        )
        if len(self._launch_plans) >= MAX_CACHED_PLANS:
            self._launch_plans.clear()
        plan = self._launch_plans[key] = SamplingLaunchPlan(
            edit_launch, draw_launch, logits_copy, allocate_mus(count, self.device)
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
            self._launch_plans.clear()  # they refer to the smaller memory
            self._workspaces.pop(name, None)
            workspace = self._workspaces[name] = (size, torch.zeros(size, dtype=dtype, device=self.device))
        return workspace[1]
