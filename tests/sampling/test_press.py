"""How kernels are launched again, and words sent again, without looking twice or waiting."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import torch

from exlm.sampling.launch import Kernel, Launch
from exlm.sampling.post import BUNDLE, SMALLEST, Post


class Recorder:
    """A kernel that tells when it is compiled and when what it was compiled to is launched."""

    def __init__(self, interpreted: bool = False) -> None:
        self.interpreted = interpreted
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def compile_and_launch(*args: Any, **options: Any) -> Any:
            self.compiled.append((grid, args, options))
            return None if self.interpreted else Compiled(self)

        return compile_and_launch


class Compiled:
    """What a `Recorder` was compiled to."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args: self.recorder.launched.append((grid, args))


def test_a_kernel_is_looked_up_once_for_what_it_is_compiled_for() -> None:
    recorder = Recorder()
    kernel, x, other = Kernel(recorder, 2, num_warps=4), torch.zeros(8, 64), torch.zeros(2)
    moves, addresses = (other,), (other.data_ptr(),)
    first = Launch(kernel, (8, 1, 1), (3,), (64, 1))
    first(x, 64, moves, addresses)
    Launch(kernel, (5, 1, 1), (4,), (64, 1))(x, 64, moves, addresses)
    assert recorder.compiled == [((8, 1, 1), (x, other, 64, 3, 64, 1), {"num_warps": 4})]
    assert recorder.launched == [((5, 1, 1), (x, other, 64, 4, 64, 1))]
    first(x, 128, moves, addresses)
    first(x.view(-1)[1:], 64, moves, addresses)
    Launch(kernel, (8, 1, 1), (3,), (64, 0))(x, 64, moves, addresses)
    assert len(recorder.compiled) == 4
    first(x, 64, moves, addresses)
    assert len(recorder.compiled) == 4


def test_an_interpreted_kernel_is_interpreted_again() -> None:
    recorder = Recorder(interpreted=True)
    launch, x = Launch(Kernel(recorder, 1), (2, 1, 1), (), (64,)), torch.zeros(2, 64)
    for _ in range(3):
        launch(x, 64, (), ())
    assert len(recorder.compiled) == 3


def test_words_arrive_whatever_their_number() -> None:
    post = Post(torch.device("cpu"))
    for count in (3, 10, SMALLEST, SMALLEST + 1, 5000, 3):
        words, more = np.arange(count, dtype=np.int64), array("q", range(-7, 0))
        sent = post.send(words, more)
        assert sent[: count + 7].tolist() == [*range(count), *range(-7, 0)]
        assert len(sent) < max(2 * (count + 7), SMALLEST + 1)


def test_a_buffer_is_written_again_only_after_it_was_read() -> None:
    class Late:
        """An event that has not happened."""

        happened = False

        def query(self) -> bool:
            return self.happened

        def record(self) -> None:
            """It will."""

    post, nothing = Post(torch.device("cpu")), array("q")
    post.send(np.zeros(1, np.int64), nothing)
    first = post._routes[SMALLEST]._bundle
    first.arrived = late = Late()
    for _ in range(BUNDLE - 1):
        post.send(np.zeros(1, np.int64), nothing)
    for _, values, _ in first.buffers:
        values[0] = 77
    for _ in range(2 * BUNDLE):
        post.send(np.ones(1, np.int64), nothing)
    assert all(values[0] == 77 for _, values, _ in first.buffers)
    late.happened = True
    for _ in range(2 * BUNDLE):
        post.send(np.full(1, 5, np.int64), nothing)
    assert all(values[0] == 5 for _, values, _ in first.buffers)
