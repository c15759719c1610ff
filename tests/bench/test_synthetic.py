"""Random weights: the requested bits, valid layouts, finite values, deterministic."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import stored_tensors
from exlm import InputError
from exlm.bench.shapes import SHAPES
from exlm.bench.synthetic import RandomTensors, SyntheticCheckpoint, SyntheticExl2, SyntheticFormat, synthetic_format
from exlm.formats import DenseWeight, PackedWeight, exl2, gptq

CPU = torch.device("cpu")


@pytest.mark.parametrize("bits", [2.2, 3.0, 4.1, 4.65, 5.5, 6.5, 7.5])
@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3-8b", "tinyllama-1.1b"])
def test_exl2_has_the_requested_bits(name: str, bits: float) -> None:
    made = SyntheticExl2(bits)
    stored = numbers = 0
    for _, inputs, outputs in stored_tensors.matrices(SHAPES[name]):
        segments = made.segments(inputs, outputs, head=False)
        assert sum(sum(sizes) for _, sizes in segments) == inputs
        widths = [width for width, _ in segments]
        assert widths == sorted(set(widths), reverse=True)
        stored += 8 * made.nbytes(inputs, outputs, head=False)
        numbers += inputs * outputs
    assert stored / numbers == pytest.approx(bits, abs=0.02)


def test_a_7b_at_4_1_bits_reads_as_many_bytes_as_exllamav2() -> None:
    shape, made = SHAPES["llama-2-7b"], SyntheticExl2()
    layers = sum(made.nbytes(inputs, outputs, head=False) for _, inputs, outputs in stored_tensors.matrices(shape))
    total = shape.layers * layers + made.nbytes(shape.hidden, shape.vocab, head=True)
    assert total / 1e9 == pytest.approx(3.46, rel=0.02)


def test_nbytes_of_exl2_is_its_size_in_files() -> None:
    made = SyntheticExl2(4.3)
    weight = made.weight(512, 96, RandomTensors(1, CPU), False, 512**-0.5)
    assert isinstance(weight, PackedWeight)
    tensors = exl2.write(weight)
    assert sum(tensor.nbytes for tensor in tensors.values()) == made.nbytes(512, 96, head=False)
    again = exl2.read(tensors, 512, 96, "here")
    assert torch.equal(again.dequantize(), weight.dequantize())


def test_nbytes_of_gptq_is_its_size_in_files() -> None:
    made = synthetic_format("gptq", 4)
    weight = made.weight(256, 64, RandomTensors(1, CPU), False, 0.1)
    assert isinstance(weight, PackedWeight)
    stored = sum(tensor.nbytes for tensor in gptq.write(weight).values())
    assert stored == made.nbytes(256, 64, head=False)


def test_dense_weights_have_bfloat16_precision() -> None:
    weight = synthetic_format("gptq", 4).weight(256, 64, RandomTensors(1, CPU), True, 0.1)
    assert isinstance(weight, DenseWeight)
    assert weight.data.dtype is torch.float16
    assert torch.equal(weight.data.bfloat16().half(), weight.data)


@pytest.mark.parametrize(
    "made",
    [synthetic_format(n, b) for n, b in (("exl2", 4.1), ("gptq", 8), ("gptq", 3), ("dense", 16))]
    + [synthetic_format("gguf", bits) for bits in (4.5, 5.5, 6.5625, 8.5)],
    ids=repr,
)
@pytest.mark.parametrize("inputs", [512, 288])
def test_weights_have_the_requested_deviation(made: SyntheticFormat, inputs: int) -> None:
    for head in (False, True):
        weight = made.weight(inputs, 64, RandomTensors(2, CPU), head, 0.05)
        values = weight.dequantize().float()
        assert values.shape == (inputs, 64)
        assert float(values.std()) == pytest.approx(0.05, rel=0.25)
        assert abs(float(values.mean())) < 0.02


def test_the_checkpoint_is_deterministic_and_can_be_repetitive() -> None:
    from exlm.families import ConfigReader, build_spec

    model = build_spec(ConfigReader(SHAPES["tiny"].config(), "config.json"))
    for repetitive in (False, True):
        pair = [SyntheticCheckpoint(model, synthetic_format("exl2"), repetitive=repetitive) for _ in range(2)]
        a, b = (one.weight("layers.0.mlp.up", 256, 512, bias=False, dtype=None, device=CPU) for one in pair)
        assert torch.equal(a.dequantize(), b.dequantize())
        table = pair[0].weight("embed", 256, 512, bias=False, dtype=None, device=CPU)
        assert isinstance(table, DenseWeight)
        assert torch.equal(table.data[0], table.data[16]) is repetitive


def test_recurrences_are_like_those_of_a_model_before_training() -> None:
    random = RandomTensors(3, CPU)
    decay = random.vector((4096,), "a_log").float().exp()
    assert 1 <= float(decay.min()) < 1.1
    assert 15 < float(decay.max()) <= 16.02  # rounded to float16
    steps = torch.nn.functional.softplus(random.vector((4096,), "dt_bias").float())
    assert 0.00099 < float(steps.min()) < 0.0011
    assert 0.09 < float(steps.max()) < 0.1002
    assert float(random.vector((512, 1, 4), "conv").float().std()) == pytest.approx(0.5, rel=0.1)
    assert float(random.vector((64, 400), "matrix").float().std()) == pytest.approx(0.05, rel=0.1)
    for values, mean in (("one", 1.0), ("zero", 0.0)):
        found = random.vector((4096,), values).float()
        assert (float(found.mean()), float(found.std())) == (pytest.approx(mean, abs=0.01), pytest.approx(0.1, rel=0.1))


def test_a_checkpoint_of_a_hybrid_has_its_norms_and_recurrences() -> None:
    from exlm.families import ConfigReader, build_spec

    shape = replace(SHAPES["qwen3.5-27b"], layers=4, hidden=128, vocab=320)
    checkpoint = SyntheticCheckpoint(build_spec(ConfigReader(shape.config(), "config.json")), synthetic_format("exl2"))

    def mean(role: str, *sizes: int) -> float:
        return float(checkpoint.tensor(role, sizes, dtype=torch.float32, device=CPU).mean())

    assert checkpoint.has("layers.0.delta.conv")
    assert not checkpoint.has("layers.0.attn.q")
    for role in ("final_norm", "layers.0.attn_norm", "layers.3.attn.q_norm"):  # stored less one
        assert abs(mean(role, 4096)) < 0.05
    assert abs(mean("layers.0.delta.norm", 4096) - 1) < 0.05
    assert 1 < mean("layers.0.delta.a_log", 48) < 3
    assert -7 < mean("layers.0.delta.dt_bias", 48) < -2
    assert checkpoint.describe("layers.0.delta.b") == ("dense float16", 2 * 128 * 48)


@pytest.mark.parametrize(("name", "bits"), [("gptq", 5), ("gguf", 4.0), ("dense", 8), ("awq", 4), ("exl2", 1.5)])
def test_unsupported_bits_are_refused(name: str, bits: float) -> None:
    with pytest.raises(InputError, match=r"bits|one of"):
        synthetic_format(name, bits).weight(256, 64, RandomTensors(0, CPU), False, 1.0)
