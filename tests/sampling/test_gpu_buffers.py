"""The memory that uploads and outputs of the kernels use: aligned, and never reused before it is free."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch

from exlm.sampling.gpu_buffers import (
    ALIGN_ELEMENTS,
    BUFFERS_PER_BLOCK,
    BUFFERS_PER_CHUNK,
    MIN_BUFFER_WORDS,
    HostTokens,
    OutputAllocator,
    StagingRing,
    allocate_mus,
)


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


@pytest.mark.parametrize("count", [1, 3, ALIGN_ELEMENTS, ALIGN_ELEMENTS + 1])
def test_output_buffers_are_aligned_and_not_shared(count: int) -> None:
    with torch.inference_mode():
        allocator = OutputAllocator(count, torch.device("cpu"), None)
        found = [allocator.next() for _ in range(2 * BUFFERS_PER_BLOCK + 1)]
        mus = allocate_mus(count, torch.device("cpu"))
        tensors = [tensor for sheet in found for tensor in sheet[:3]] + [next(mus) for _ in found]
    for i, tensor in enumerate(tensors):
        assert tensor.shape == (count,)
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 16 == 0
        tensor.fill_(i)
    assert [set(tensor.tolist()) for tensor in tensors] == [{i} for i in range(len(tensors))]
    for i, sheet in enumerate(found):
        assert sheet.addresses == tuple(tensor.data_ptr() for tensor in sheet[:3])
        assert set(sheet.host_tokens.tolist()) == {3 * i + 2}


def test_host_tokens_wait_for_the_event() -> None:
    numbers = np.zeros(2, np.int64)

    class Event:
        def synchronize(self) -> None:
            numbers[:] = 7

    assert HostTokens(numbers, Event()).tolist() == [7, 7]
