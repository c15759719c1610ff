"""Staging: whatever the sizes and threads, what arrives is what was sent, through buffers that are few."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from exlm import Config, Model
from exlm.checkpoint import Source
from exlm.formats import DenseWeight, PackedWeight, Weight
from exlm.model.devices import DeviceInfo
from exlm.model.instance import open_checkpoint
from exlm.model.staging import CudaPort, Ring, StagedSource, staged
from exlm.spec.weight_roles import matrices
from tests import tiny

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
DTYPES = (torch.float32, torch.float16, torch.int32, torch.uint8, torch.int64)


@dataclass
class Stream:
    """A device that copies as late as it may, in order: a buffer that is filled too soon spoils a copy."""

    made: int = 0
    pending: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    sent: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def buffer(self, size: int) -> Tensor:
        with self.lock:
            self.made += 1
        return torch.full((size,), 0xEE, dtype=torch.uint8)

    def room(self, tensor: Tensor, device: torch.device) -> Tensor:
        return torch.full_like(tensor, 77)

    def send(self, source: Tensor, target: Tensor) -> Late:
        with self.lock:
            self.pending.append((source, target))
            self.sent += 1
            return Late(self, self.sent)


@dataclass
class Late:
    """A mark behind one of a stream's copies."""

    stream: Stream
    number: int

    def synchronize(self) -> None:
        with self.stream.lock:
            done = self.stream.sent - len(self.stream.pending)
            for _ in range(self.number - done):
                source, target = self.stream.pending.pop(0)
                target.copy_(source)


tensors = st.builds(
    lambda count, dtype, seed: torch.randint(
        0, 200, (count,), generator=torch.Generator().manual_seed(seed)
    ).to(dtype),
    st.integers(0, 200),
    st.sampled_from(DTYPES),
    st.integers(0, 1000),
)


@given(st.lists(tensors, min_size=1, max_size=12), st.integers(1, 4), st.sampled_from([8, 24, 64, 4096]))
def test_what_is_sent_arrives(sent: list[Tensor], count: int, size: int) -> None:
    stream = Stream()
    ring = Ring(stream, count, size)
    with ThreadPoolExecutor(3) as threads:
        arrived = list(threads.map(lambda tensor: ring.move(tensor, CPU), sent))
    for got, want in zip(arrived, sent, strict=True):
        assert got.dtype is want.dtype
        assert torch.equal(got, want)
    assert stream.made <= count
    assert stream.sent == sum(-(-tensor.nbytes // size) for tensor in sent)


def test_tensors_of_any_shape() -> None:
    ring = Ring(Stream(), 2, 16)
    for tensor in (torch.tensor(3.5), torch.randn(2, 3, 5), torch.randn(4, 6).T, torch.empty(0, 3)):
        assert torch.equal(ring.move(tensor, CPU), tensor)


def test_a_device_that_fails_leaves_nobody_waiting() -> None:
    class Full(Stream):
        def send(self, source: Tensor, target: Tensor) -> Late:
            raise RuntimeError("out of memory")

    ring = Ring(Full(), 1, 16)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="out of memory"):
            ring.move(torch.ones(100), CPU)


def held(weight: Weight) -> tuple[Tensor, ...]:
    if isinstance(weight, PackedWeight):
        return weight.tensors
    assert isinstance(weight, DenseWeight)
    return (weight.data,) if weight.bias is None else (weight.data, weight.bias)


def every(folder: Path, sources: list[Source], device: torch.device) -> Iterator[list[tuple[Tensor, ...]]]:
    """Each matrix of a model as each of these sources has it, as stored."""
    frozen = Config(folder).freeze()
    found = [("embed", frozen.spec.hidden, frozen.spec.vocab, False), *matrices(frozen.spec)]
    for role, wide, high, bias in found:
        yield [
            held(source.weight(role, wide, high, bias=bias, dtype=None, device=where))
            for source, where in zip(sources, (CPU, device), strict=True)
        ]


FORMS = ["tiny-lm", "tiny-lm-exl2-4.0bpw", "tiny-lm-gptq-g128-act"]


@pytest.mark.parametrize("name", FORMS)
def test_every_format_is_read_as_it_is(fixtures_dir: Path, name: str) -> None:
    plain = open_checkpoint(Config(fixtures_dir / name).freeze())
    stream = Stream()
    for want, got in every(fixtures_dir / name, [plain, StagedSource(plain, Ring(stream, 2, 999))], GPU):
        assert len(got) == len(want)
        assert all(torch.equal(*both) for both in zip(got, want, strict=True))
    assert stream.sent > 1000
    assert stream.made == 2


def test_numbers_that_are_converted_go_another_way(tmp_path: Path) -> None:
    class Asked:
        """The device that was asked for."""

        files = None

        def describe(self, role: str, fallback: str | None = None) -> tuple[str, int]:
            return role, 0

        def weight(self, *_: Any, device: torch.device, **__: Any) -> Weight:
            asked.append(str(device))
            return DenseWeight(torch.ones(2, 2))

    asked: list[str] = []
    source = StagedSource(Asked(), Ring(Stream()))  # type: ignore[arg-type]
    for words, dtype, device in (
        ("dense float16", torch.float16, GPU),
        ("dense float16", None, GPU),
        ("exl2 4.0 bit", torch.float16, GPU),
        ("dense bfloat16", torch.float16, GPU),
        ("dense float16", torch.float16, CPU),
    ):
        source.weight(words, 2, 2, bias=False, dtype=dtype, device=device)
    assert asked == ["cpu", "cpu", "cpu", "cuda:0", "cpu"]


def test_only_files_that_go_to_a_gpu_are_staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_checkpoint(Config(tiny.make(tmp_path)).freeze())
    slots = [DeviceInfo("cpu", CPU, 0), DeviceInfo("cuda:0", GPU, 0)]
    assert staged(source, slots) is source
    monkeypatch.setenv("EXLM_STAGING", "1")
    assert staged(source, slots[:1]) is source
    assert isinstance(staged(source, slots), StagedSource)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMS)
def test_a_gpu_gets_the_same_tensors(fixtures_dir: Path, name: str) -> None:
    plain = open_checkpoint(Config(fixtures_dir / name).freeze())
    for want, got in every(fixtures_dir / name, [plain, StagedSource(plain, Ring(CudaPort(), 2, 9999))], GPU):
        assert all(one.is_cuda and torch.equal(one.cpu(), two) for one, two in zip(got, want, strict=True))


@pytest.mark.gpu
def test_threads_share_a_ring_to_a_gpu() -> None:
    ring = Ring(CudaPort(), 3, 1 << 20)
    sent = [torch.randint(0, 256, (n * 700_001,), dtype=torch.uint8) for n in range(1, 13)]
    with ThreadPoolExecutor(4) as threads:
        arrived = list(threads.map(lambda tensor: ring.move(tensor, GPU), sent * 3))
    assert all(torch.equal(one.cpu(), two) for one, two in zip(arrived, sent * 3, strict=True))


@pytest.mark.gpu
def test_a_model_answers_the_same(fixtures_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []
    for wish in "01":
        monkeypatch.setenv("EXLM_STAGING", wish)
        model = Model(Config(fixtures_dir / "tiny-lm-exl2-4.0bpw"))
        model.load()
        answers.append(model.forward(torch.arange(20)[None]))
    assert torch.equal(*answers)
