"""The buffer pool: live buffers never share memory, and the pool does not keep everything."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from exlm.formats import host_buffers
from exlm.formats.host_buffers import (
    MAX_IDLE_BUFFERS,
    MIN_POOLED_BYTES,
    PREFAULT_CHUNK,
    HugePageArena,
    pooled_empty,
    prefaulted_zeros,
    release_pool,
)
from exlm.memory import anonymous_map, private_map

SIZES = st.sampled_from(
    [
        8,
        MIN_POOLED_BYTES - 8,
        MIN_POOLED_BYTES,
        MIN_POOLED_BYTES + 8,
        2 * MIN_POOLED_BYTES,
        5 * MIN_POOLED_BYTES,
    ]
)


def filled_buffer(size: int, value: int) -> Tensor:
    return pooled_empty((size // 8, 2), torch.int32).fill_(value)


@given(st.lists(st.one_of(SIZES, st.integers(-20, -1)), max_size=40))
def test_live_buffers_do_not_share_memory(steps: list[int]) -> None:
    """A positive step requests so many bytes, a negative one drops a buffer."""
    held: dict[int, Tensor] = {}
    for number, step in enumerate(steps):
        if step > 0:
            held[number] = filled_buffer(step, number)
        elif held:
            held.pop(list(held)[step % len(held)])
        assert all(bool((tensor == value).all()) for value, tensor in held.items())


def test_a_view_keeps_its_buffer_alive() -> None:
    view = filled_buffer(MIN_POOLED_BYTES, 7)[3:5]
    others = [filled_buffer(MIN_POOLED_BYTES, n) for n in range(4)]
    assert view.tolist() == [[7, 7], [7, 7]]
    assert [int(one[0, 0]) for one in others] == [0, 1, 2, 3]


def test_a_dropped_buffer_is_reused_until_the_pool_is_released() -> None:
    release_pool()
    place = filled_buffer(MIN_POOLED_BYTES, 1).data_ptr()
    assert filled_buffer(MIN_POOLED_BYTES, 2).data_ptr() == place
    release_pool()
    assert int(pooled_empty((MIN_POOLED_BYTES // 4,), torch.int32).sum()) == 0, "new memory is zeros"


def test_the_pool_keeps_few_buffers() -> None:
    release_pool()
    tensors = [filled_buffer(MIN_POOLED_BYTES, 1) for _ in range(MAX_IDLE_BUFFERS + 5)]
    del tensors
    again = [pooled_empty((MIN_POOLED_BYTES // 4,), torch.int32) for _ in range(MAX_IDLE_BUFFERS + 5)]
    assert sum(bool(one.any()) for one in again) == MAX_IDLE_BUFFERS


def test_from_many_threads() -> None:
    wrong: list[int] = []

    def work(value: int) -> None:
        for _ in range(200):
            tensor = filled_buffer(MIN_POOLED_BYTES, value)
            if not bool((tensor == value).all()):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("shape", [(0,), (0, 5), (1,), (3, MIN_POOLED_BYTES)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    assert pooled_empty(shape, torch.float16).shape == shape


@pytest.mark.parametrize("size", [0, 1, MIN_POOLED_BYTES - 1, MIN_POOLED_BYTES, 3 * PREFAULT_CHUNK + 5])
def test_prefaulted_zeros_are_zero_and_not_shared(size: int) -> None:
    dirty = filled_buffer(5 * MIN_POOLED_BYTES, -1)
    del dirty
    first, second = prefaulted_zeros(size), prefaulted_zeros(size)
    assert first.shape == (size,)
    assert not bool(first.any())
    first.fill_(7)
    assert not bool(second.any())


def test_an_arena_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole lines, all zero, none of them shared, and memory of its own for what is beyond it."""
    monkeypatch.setattr("exlm.formats.host_buffers.MAX_HUGE_BYTES", 2**20)
    arena = HugePageArena()
    parts = [arena.allocate(size) for size in (1, 64, 100_000, 65, 2**20, 7)]
    assert [len(part) for part in parts] == [1, 64, 100_000, 65, 2**20, 7]
    for n, part in enumerate(parts, 1):
        assert not bool(part.any())
        part.fill_(n)
    assert all(bool((part == n).all()) for n, part in enumerate(parts, 1))
    assert all(part.data_ptr() % 64 == 0 for part in parts[:4])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("pieces", [1, 511])
def test_whether_a_file_is_mapped_in_huge_pages_is_what_the_system_says(pieces: int, tmp_path: Path) -> None:
    size = 4 * host_buffers.HUGE_PAGE
    with (tmp_path / "file").open("wb", buffering=0) as file:
        for start in range(0, size, size // pieces):
            file.write(bytes([7]) * min(size // pieces, size - start))
    with (tmp_path / "file").open("rb") as file:
        mapping = private_map(file.fileno(), size)
    found = host_buffers.mapped_in_huge_pages(mapping, size)
    address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    said = Path("/proc/self/smaps").read_text().partition(f"{address:x}-")[2].partition("FilePmdMapped:")[2].split()
    assert found == (address % host_buffers.HUGE_PAGE == 0 and int(said[0]) * 1024 >= size - 2 * host_buffers.HUGE_PAGE)
    assert bytes(mapping[: size : size // 64]) == bytes([7]) * 64
    assert not host_buffers.mapped_in_huge_pages(mapping, host_buffers.HUGE_PAGE - 1)
    assert not host_buffers.mapped_in_huge_pages(anonymous_map(size), size)  # no file
