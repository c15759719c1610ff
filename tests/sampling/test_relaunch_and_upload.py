"""How kernels are launched again, and words sent again, without looking twice or waiting."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import torch

from exlm.sampling.staging_ring import BUFFERS_PER_CHUNK, MIN_BUFFER_WORDS, StagingRing
from exlm.sampling.triton_launch import KernelLaunch, TritonKernel


class RecordingKernel:
    """A kernel that tells when it is compiled and when what it was compiled to is launched."""

    def __init__(self, interpreted: bool = False) -> None:
        self.interpreted = interpreted
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def compile_and_launch(*args: Any, **options: Any) -> Any:
            self.compiled.append((grid, args, options))
            return None if self.interpreted else CompiledRecordingKernel(self)

        return compile_and_launch


class CompiledRecordingKernel:
    """What a `Recorder` was compiled to."""

    def __init__(self, recorder: RecordingKernel) -> None:
        self.recorder = recorder

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args: self.recorder.launched.append((grid, args))


def test_a_kernel_is_compiled_once_for_each_specialization() -> None:
    recorder = RecordingKernel()
    kernel, x, other = TritonKernel(recorder, 2, num_warps=4), torch.zeros(8, 64), torch.zeros(2)
    moves, addresses = (other,), (other.data_ptr(),)
    first = KernelLaunch(kernel, (8, 1, 1), (3,), (64, 1))
    first(x, 64, moves, addresses)
    KernelLaunch(kernel, (5, 1, 1), (4,), (64, 1))(x, 64, moves, addresses)
    assert recorder.compiled == [((8, 1, 1), (x, other, 64, 3, 64, 1), {"num_warps": 4})]
    assert recorder.launched == [((5, 1, 1), (x, other, 64, 4, 64, 1))]
    first(x, 128, moves, addresses)
    first(x.view(-1)[1:], 64, moves, addresses)
    KernelLaunch(kernel, (8, 1, 1), (3,), (64, 0))(x, 64, moves, addresses)
    assert len(recorder.compiled) == 4
    first(x, 64, moves, addresses)
    assert len(recorder.compiled) == 4


def test_an_interpreted_kernel_is_interpreted_again() -> None:
    recorder = RecordingKernel(interpreted=True)
    launch, x = KernelLaunch(TritonKernel(recorder, 1), (2, 1, 1), (), (64,)), torch.zeros(2, 64)
    for _ in range(3):
        launch(x, 64, (), ())
    assert len(recorder.compiled) == 3


def test_uploads_of_any_size_arrive() -> None:
    post = StagingRing(torch.device("cpu"))
    for count in (3, 10, MIN_BUFFER_WORDS, MIN_BUFFER_WORDS + 1, 5000, 3):
        words, more = np.arange(count, dtype=np.int64), array("q", range(-7, 0))
        sent = post.upload(words, more)
        assert sent[: count + 7].tolist() == [*range(count), *range(-7, 0)]
        assert len(sent) < max(2 * (count + 7), MIN_BUFFER_WORDS + 1)


def test_a_pinned_buffer_is_reused_only_after_its_copy() -> None:
    class Late:
        """An event that has not happened."""

        happened = False

        def query(self) -> bool:
            return self.happened

        def record(self) -> None:
            """It will."""

    post, nothing = StagingRing(torch.device("cpu")), array("q")
    post.upload(np.zeros(1, np.int64), nothing)
    first = post._rings_by_size[MIN_BUFFER_WORDS]._chunk
    first.copied_event = late = Late()
    for _ in range(BUFFERS_PER_CHUNK - 1):
        post.upload(np.zeros(1, np.int64), nothing)
    for _, values, _ in first.buffers:
        values[0] = 77
    for _ in range(2 * BUFFERS_PER_CHUNK):
        post.upload(np.ones(1, np.int64), nothing)
    assert all(values[0] == 77 for _, values, _ in first.buffers)
    late.happened = True
    for _ in range(2 * BUFFERS_PER_CHUNK):
        post.upload(np.full(1, 5, np.int64), nothing)
    assert all(values[0] == 5 for _, values, _ in first.buffers)
