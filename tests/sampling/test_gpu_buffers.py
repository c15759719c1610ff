"""Buffers for uploads and outputs of the kernels: aligned, and not reused before their copies are done."""

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
    ring = StagingRing(torch.device("cpu"))
    for count in (3, 10, MIN_BUFFER_WORDS, MIN_BUFFER_WORDS + 1, 5000, 3):
        words, extra = np.arange(count, dtype=np.int64), array("q", range(-7, 0))
        sent = ring.upload(words, extra)
        assert sent[: count + 7].tolist() == [*range(count), *range(-7, 0)]
        assert len(sent) < max(2 * (count + 7), MIN_BUFFER_WORDS + 1)


def test_a_pinned_buffer_is_reused_only_after_its_copy() -> None:
    class PendingEvent:
        """An event that can be set to have happened."""

        happened = False

        def query(self) -> bool:
            return self.happened

        def record(self) -> None:
            """Do nothing."""

    ring, nothing = StagingRing(torch.device("cpu")), array("q")
    ring.upload(np.zeros(1, np.int64), nothing)
    first = ring._rings_by_size[MIN_BUFFER_WORDS]._chunk
    first.copied_event = event = PendingEvent()
    for _ in range(BUFFERS_PER_CHUNK - 1):
        ring.upload(np.zeros(1, np.int64), nothing)
    for _, values, _ in first.buffers:
        values[0] = 77
    for _ in range(2 * BUFFERS_PER_CHUNK):
        ring.upload(np.ones(1, np.int64), nothing)
    assert all(values[0] == 77 for _, values, _ in first.buffers)
    event.happened = True
    for _ in range(2 * BUFFERS_PER_CHUNK):
        ring.upload(np.full(1, 5, np.int64), nothing)
    assert all(values[0] == 5 for _, values, _ in first.buffers)


@pytest.mark.parametrize("count", [1, 3, ALIGN_ELEMENTS, ALIGN_ELEMENTS + 1])
def test_output_buffers_are_aligned_and_not_shared(count: int) -> None:
    with torch.inference_mode():
        allocator = OutputAllocator(count, torch.device("cpu"), None)
        found = [allocator.next() for _ in range(2 * BUFFERS_PER_BLOCK + 1)]
        mus = allocate_mus(count, torch.device("cpu"))
        tensors = [tensor for output in found for tensor in output[:3]] + [next(mus) for _ in found]
    for i, tensor in enumerate(tensors):
        assert tensor.shape == (count,)
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 16 == 0
        tensor.fill_(i)
    assert [set(tensor.tolist()) for tensor in tensors] == [{i} for i in range(len(tensors))]
    for i, output in enumerate(found):
        assert output.addresses == tuple(tensor.data_ptr() for tensor in output[:3])
        assert set(output.host_tokens.tolist()) == {3 * i + 2}


def test_host_tokens_wait_for_the_event() -> None:
    numbers = np.zeros(2, np.int64)

    class Event:
        def synchronize(self) -> None:
            numbers[:] = 7

    assert HostTokens(numbers, Event()).tolist() == [7, 7]
