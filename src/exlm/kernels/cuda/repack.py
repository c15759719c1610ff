"""Repack a `PackedWeight` of any format into weight tiles (weight_tile.py), on the GPU: repack.cu.

What the numbers mean is unchanged, to the last bit. The tests repack in torch as well, and compare.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import Unsupported
from ...formats import PackedWeight
from ...formats.packed import Exl2Scales, KQuantScales, PlainScales, Scales, Segment
from .module_cache import ModuleCache, sizeof_defines
from .weight_tile import (
    BIT_PLANES,
    TILE_K,
    TILE_N,
    DigitSpan,
    MmaWeight,
    TileLayout,
    TileRegion,
    ZeroPoints,
    num_digits,
    pad_to_k_block,
)

SOURCE = Path(__file__).with_name("csrc") / "repack.cu"
MAX_F16 = 65504.0
_THREADS = 128
_NO_TABLE, _F16, _F32, _EXL2_SCALES, _K_QUANT_SIGNED, _K_QUANT_UNSIGNED = range(6)  # repack.cu: TableKind
_K_QUANT = {torch.int8: _K_QUANT_SIGNED, torch.uint8: _K_QUANT_UNSIGNED}


@dataclass(frozen=True, eq=False)
class RepackJob:
    """Tiles to be filled with the codes of segments, one after the other, which all have as many digits."""

    tiles: Tensor  # (n_tiles, k_blocks, num_digits, bytes) uint8
    segments: tuple[Segment, ...]
    layout: TileLayout
    fine: bool
    factor: float  # of scales and minimums
    outputs: int

    @property
    def k_blocks(self) -> int:
        """Blocks of 128 packed inputs."""
        return self.tiles.shape[1]

    @property
    def num_digits(self) -> int:
        """Digits of each code."""
        return self.tiles.shape[2]

    @property
    def num_groups(self) -> int:
        """Groups of inputs in a tile."""
        return self.layout.num_groups(self.fine)

    def overflow(self) -> Unsupported:
        """The error for a scale that float16 cannot represent."""
        return Unsupported(f"scales above {MAX_F16 / (1 << self.layout.bits * (self.num_digits - 1)):.0f}")


FillTiles = Callable[[Sequence[RepackJob]], None]
"""Fills the tiles of jobs; raises `RepackJob.overflow`. `GpuRepacker` is one."""


def repack(weight: PackedWeight, fill: FillTiles) -> MmaWeight:
    """Repack a weight on its device; `Unsupported` if the kernels do not know its widths, groups or codebooks."""
    zero_points = _zero_points(weight.segments)
    bits = _tile_bits(weight.segments, zero_points)
    in_order = torch.arange(weight.in_features, dtype=torch.int32)
    perm = in_order if weight.perm is None else weight.perm.cpu()
    sizes = [segment.in_features for segment in weight.segments]
    inputs = dict(zip(map(id, weight.segments), perm.split_with_sizes(sizes), strict=True))
    main = [segment for segment in weight.segments if segment.bits == bits]
    fine: dict[int, list[Segment]] = {}  # by the number of their digits
    for segment in sorted(weight.segments, key=lambda segment: -segment.bits):
        if segment.bits != bits:
            fine.setdefault(num_digits(segment.bits, bits, zero_points == "half"), []).append(segment)
    group_ksteps = _group_ksteps([main])
    fine_ksteps = _group_ksteps([*fine.values()]) if fine else group_ksteps
    has_mins = any(segment.minimum is not None for segment in weight.segments)
    layout = TileLayout(bits, group_ksteps, fine_ksteps, zero_points, has_mins)
    factor = _factor(weight)
    fine_region, fine_jobs = _plan_region(fine, weight, layout, True, factor)
    main_region, main_jobs = _plan_region({1: main}, weight, layout, False, factor)
    fill([*fine_jobs, *main_jobs])
    packed_perm = torch.cat(
        [pad_to_k_block(torch.cat([inputs[id(segment)] for segment in part])) for part in [*fine.values(), main]]
    )
    return MmaWeight(
        layout,
        fine_region,
        main_region,
        weight.in_features,
        weight.out_features,
        None if packed_perm.equal(in_order) else packed_perm,
        1.0 / factor,
        None if weight.bias is None else weight.bias.half(),
    )


def _zero_points(segments: Sequence[Segment]) -> ZeroPoints:
    constants = [segment.zero if isinstance(segment.zero, int) else None for segment in segments]
    if all(zero == 1 << (segment.bits - 1) for zero, segment in zip(constants, segments, strict=True)):
        return "half"
    return "none" if all(zero == 0 for zero in constants) else "table"


def _tile_bits(segments: Sequence[Segment], zero_points: ZeroPoints) -> int:
    """The width of all tiles: the one that takes the least space."""
    if unknown := [segment.bits for segment in segments if segment.bits not in BIT_PLANES]:
        raise Unsupported(f"codes of {unknown[0]} bits are not known to the CUDA kernels")
    if any(segment.codebook is not None for segment in segments):
        raise Unsupported("codebooks are not known to the CUDA kernels")

    def space(bits: int) -> int:
        return sum(s.in_features * bits * num_digits(s.bits, bits, zero_points == "half") for s in segments)

    return min(sorted({segment.bits for segment in segments}), key=space)


def _group_ksteps(parts: Sequence[Sequence[Segment]]) -> int:
    """k16 steps with one scale in every group; the last group of a part may end early."""
    common = TILE_K
    for part in parts:
        *sizes, _ = (size for segment in part for size in segment.group_sizes)
        common = math.gcd(*sizes, common)
    if common % 16:
        raise Unsupported(f"groups of {common} inputs are not known to the CUDA kernels, which want 16 at least")
    return common // 16


def _factor(weight: PackedWeight) -> float:
    """A power of two for scales that float16 would round away; 1 where the format defines float16."""
    if weight.dtype is torch.float16:
        return 1.0
    largest = 0.0
    for segment in weight.segments:
        reach = segment.scales.expand().float().abs().max() * 2**segment.bits
        if segment.minimum is not None:
            reach = torch.maximum(reach, segment.minimum.expand().float().abs().max())
        largest = max(largest, float(reach))
    return 1.0 if largest == 0.0 else 2.0 ** (12 - math.frexp(largest)[1])


def _plan_region(
    parts: dict[int, list[Segment]], weight: PackedWeight, layout: TileLayout, fine: bool, factor: float
) -> tuple[TileRegion, list[RepackJob]]:
    """Memory for the tiles of segments, given by the number of their digits; and the jobs that fill it."""
    spans = tuple(
        DigitSpan(digits, -(-sum(segment.in_features for segment in part) // TILE_K)) for digits, part in parts.items()
    )
    k_tiles, tile_bytes = [span.num_digits * span.k_blocks for span in spans], layout.tile_bytes(fine)
    n_tiles, device = -(-weight.out_features // TILE_N), weight.segments[0].codes.device
    tiles = torch.empty(n_tiles, sum(k_tiles), tile_bytes, dtype=torch.uint8, device=device)
    jobs = [
        RepackJob(
            own.view(n_tiles, span.k_blocks, span.num_digits, tile_bytes),
            tuple(part),
            layout,
            fine,
            factor,
            weight.out_features,
        )
        for own, span, part in zip(tiles.split_with_sizes(k_tiles, 1), spans, parts.values(), strict=True)
    ]
    return TileRegion(tiles, spans), jobs


# -- repack.cu -------------------------------------------------------------------------------------


class _Table(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("values", "outer", "superblock_of_group")),
        ("kind", ctypes.c_int),
    )


class _Segment(ctypes.Structure):
    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("scales", _Table),
        ("minimum", _Table),
        ("zeros", ctypes.c_void_p),
        ("zero", ctypes.c_int),
        ("bits", ctypes.c_int),
    )


class _KStep(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("segment", "row", "rows", "group"))


class _RepackParams(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("segments", "ksteps", "tiles", "overflow")),
        ("column_bytes", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("tile_bytes", "bits", "groups", "num_digits", "outputs")),
        *((name, ctypes.c_int) for name in ("zeros", "mins", "symmetric")),
        ("factor", ctypes.c_float),
    )


DEFINES = sizeof_defines(RepackParams=_RepackParams, Segment=_Segment, KStep=_KStep, Table=_Table)


class GpuRepacker:
    """Fills tiles on the GPU: a launch of repack.cu for each job."""

    def __init__(self, modules: ModuleCache) -> None:
        self._modules = modules

    def __call__(self, jobs: Sequence[RepackJob]) -> None:
        """Fill the tiles, and wait for the device: only it knows whether a scale overflowed."""
        kept: list[Tensor] = []  # whose addresses the kernels read
        segments = [_segment_params(segment, kept) for job in jobs for segment in job.segments]
        ksteps = [_ksteps(job) for job in jobs]
        segment_words = np.frombuffer(bytes((_Segment * len(segments))(*segments)), np.int32)
        words = np.concatenate([segment_words, *(one.ravel() for one in ksteps), np.zeros(len(jobs), np.int32)])
        sent = torch.from_numpy(words).to(jobs[0].tiles.device, non_blocking=True)
        module = self._modules.module(SOURCE, **DEFINES)
        segment_at, kstep_at = sent.data_ptr(), sent.data_ptr() + segment_words.nbytes
        overflow_at = sent.data_ptr() + words.nbytes - 4 * len(jobs)
        for i, job in enumerate(jobs):
            params = _RepackParams(
                segments=segment_at,
                ksteps=kstep_at,
                tiles=job.tiles.data_ptr(),
                overflow=overflow_at + 4 * i,
                column_bytes=job.tiles.stride(0),
                tile_bytes=job.tiles.shape[3],
                bits=job.layout.bits,
                groups=job.num_groups,
                num_digits=job.num_digits,
                outputs=job.outputs,
                zeros=job.layout.zero_points == "table",
                mins=job.layout.has_mins,
                symmetric=job.layout.zero_points == "half",
                factor=job.factor,
            )
            grid = (job.tiles.shape[0], job.k_blocks * job.num_digits, 1)
            module.launch("repack", grid, _THREADS, 0, (params,), pdl=False)
            segment_at += ctypes.sizeof(_Segment) * len(job.segments)
            kstep_at += ksteps[i].nbytes
        for job, overflow in zip(jobs, sent[-len(jobs) :].tolist(), strict=True):
            if overflow:
                raise job.overflow()


def _segment_params(segment: Segment, kept: list[Tensor]) -> _Segment:
    """A segment's addresses; tensors that must live until the kernels have run are added to `kept`."""

    def address(tensor: Tensor) -> int:
        kept.append(tensor.contiguous())
        return kept[-1].data_ptr()

    def table(scales: Scales | None) -> _Table:
        match scales:
            case None:
                return _Table(kind=_NO_TABLE)
            case Exl2Scales(codes, maxima):
                return _Table(address(codes), address(maxima), None, _EXL2_SCALES)
            case KQuantScales(codes, outer, superblocks) if codes.dtype in _K_QUANT and outer.dtype is torch.float16:
                return _Table(address(codes), address(outer), address(superblocks.int()), _K_QUANT[codes.dtype])
            case PlainScales(values) if values.dtype is torch.float16:
                return _Table(address(values), None, None, _F16)
        return _Table(address(scales.expand().float()), None, None, _F32)

    zeros, zero = (address(segment.zero), 0) if isinstance(segment.zero, Tensor) else (None, segment.zero)
    return _Segment(address(segment.codes), table(segment.scales), table(segment.minimum), zeros, zero, segment.bits)


def _ksteps(job: RepackJob) -> NDArray[np.int32]:
    """repack.cu's `KStep`s, (8 · k_blocks, 4): the segment, first row, rows and group of every 16 packed inputs."""
    groups = [
        (number, start, size, group)
        for number, segment in enumerate(job.segments)
        for group, (start, size) in enumerate(
            zip(accumulate((0, *segment.group_sizes)), segment.group_sizes, strict=False)
        )
    ]
    each = np.array(groups, np.int32)
    counts = -(-each[:, 2] // 16)
    step_in_group = np.arange(counts.sum(), dtype=np.int32) - np.repeat(counts.cumsum() - counts, counts)
    ksteps = np.zeros((job.k_blocks * 8, len(_KStep._fields_)), np.int32)
    used = ksteps[: len(step_in_group)]
    used[:] = np.repeat(each, counts, 0)
    used[:, 1] += step_in_group * 16
    used[:, 2] = np.minimum(used[:, 2] - step_in_group * 16, 16)
    return ksteps
