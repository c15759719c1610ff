"""Bricks filled on a GPU, straight from the stored rows: one launch for all that have as many digits."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...formats.packed import Exl2Scales, KQuantScales, PlainScales, Scales, Segment
from .filling import too_large
from .lanes import TILE_N
from .layout import RepackJob
from .module_cache import ModuleCache

SOURCE = Path(__file__).with_name("csrc") / "repack.cu"
_THREADS = 128
_NONE, _HALVES, _FLOATS, _SQUARED, _SIGNED, _UNSIGNED = range(6)
_CODES = {torch.int8: _SIGNED, torch.uint8: _UNSIGNED}


class _Table(ctypes.Structure):
    _fields_ = (
        ("values", ctypes.c_void_p),
        ("above", ctypes.c_void_p),
        ("parents", ctypes.c_void_p),
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


class _Job(ctypes.Structure):
    _fields_ = (
        ("segments", ctypes.c_void_p),
        ("steps", ctypes.c_void_p),
        ("bricks", ctypes.c_void_p),
        ("large", ctypes.c_void_p),
        ("stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("bytes", "bits", "groups", "digits", "outputs")),
        *((name, ctypes.c_int) for name in ("zeros", "minima", "half")),
        ("factor", ctypes.c_float),
    )


class GpuRepacker:
    """Fills bricks where they are; to be given to `arrange`."""

    def __init__(self, modules: ModuleCache) -> None:
        self._modules = modules

    def __call__(self, pieces: Sequence[tuple[Tensor, RepackJob]]) -> None:
        """Make the bricks of pieces; it waits for the device, to know whether a scale was too large."""
        kept: list[Tensor] = []
        segments = [_described(one, kept) for _, piece in pieces for one in piece.segments]
        steps = [_steps(piece) for _, piece in pieces]
        described = np.frombuffer(bytes((_Segment * len(segments))(*segments)), np.int32)
        table = np.concatenate([described, *(one.ravel() for one in steps), np.zeros(len(pieces), np.int32)])
        device = pieces[0][0].device
        sent = torch.from_numpy(table).to(device, non_blocking=True)
        made = self._modules.module(SOURCE)
        segment, step = sent.data_ptr(), sent.data_ptr() + described.nbytes
        large = sent.data_ptr() + table.nbytes - 4 * len(pieces)
        for place, ((bricks, piece), mine) in enumerate(zip(pieces, steps, strict=True)):
            job = _job(bricks, piece)
            job.segments, job.steps, job.large = segment, step, large + 4 * place
            tiles, blocks, digits, _ = bricks.shape
            made.launch("repack", (tiles, blocks * digits, 1), _THREADS, 0, (job,), pdl=False)
            segment += ctypes.sizeof(_Segment) * len(piece.segments)
            step += mine.nbytes
        for (_, piece), found in zip(pieces, sent[-len(pieces) :].tolist(), strict=True):
            if found:
                raise too_large(piece)


def _job(bricks: Tensor, piece: RepackJob) -> _Job:
    """What the kernel is told, but for the addresses of tables."""
    layout = piece.layout
    return _Job(
        bricks=bricks.data_ptr(),
        stride=bricks.stride(0),
        bytes=bricks.shape[3],
        bits=layout.bits,
        groups=piece.groups,
        digits=piece.digits,
        outputs=piece.outputs,
        zeros=layout.zeros == "table",
        minima=layout.minima,
        half=layout.zeros == "half",
        factor=piece.factor,
    )


def _described(segment: Segment, kept: list[Tensor]) -> _Segment:
    """A segment's addresses; what has to live as long as they are used is kept."""

    def address(tensor: Tensor) -> int:
        kept.append(tensor.contiguous())
        return kept[-1].data_ptr()

    def table(scales: Scales | None) -> _Table:
        match scales:
            case None:
                return _Table(kind=_NONE)
            case Exl2Scales(codes, maxima):
                return _Table(address(codes), address(maxima), None, _SQUARED)
            case KQuantScales(codes, supers, parents) if codes.dtype in _CODES and supers.dtype is torch.float16:
                return _Table(address(codes), address(supers), address(parents.int()), _CODES[codes.dtype])
            case PlainScales(values) if values.dtype is torch.float16:
                return _Table(address(values), None, None, _HALVES)
        return _Table(address(scales.expand().float()), None, None, _FLOATS)

    zeros = address(segment.zero) if isinstance(segment.zero, Tensor) else None
    return _Segment(
        address(segment.codes),
        table(segment.scales),
        table(segment.minimum),
        zeros,
        0 if isinstance(segment.zero, Tensor) else segment.zero,
        segment.bits,
    )


def _steps(piece: RepackJob) -> NDArray[np.int32]:
    """For every sixteen inputs their segment, first row, rows and group, (blocks · 8, 4)."""
    groups = [
        (place, start, size, group)
        for place, segment in enumerate(piece.segments)
        for group, (start, size) in enumerate(
            zip(accumulate((0, *segment.group_sizes)), segment.group_sizes, strict=False)
        )
    ]
    each = np.array(groups, np.int32)
    counts = -(-each[:, 2] // TILE_N)
    past = np.arange(counts.sum(), dtype=np.int32) - np.repeat(counts.cumsum() - counts, counts)
    steps = np.zeros((piece.blocks * 8, 4), np.int32)
    used = steps[: len(past)]
    used[:] = np.repeat(each, counts, 0)
    used[:, 1] += past * TILE_N
    used[:, 2] = np.minimum(used[:, 2] - past * TILE_N, TILE_N)
    return steps
