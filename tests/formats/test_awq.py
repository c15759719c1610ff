"""AWQ: against a slow decoder and a matrix computed by hand; corrupt tensors are refused."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from exlm.errors import BadTensor, CheckpointError, MissingTensor, Unsupported
from exlm.formats import awq, gptq
from exlm.formats.gptq import QuantizationConfig
from tests.formats import oracles
from tests.formats.corrupt_tensors import Corruption, drop_tensor, replace_number, replace_tensor
from tests.formats.oracles import Tensors, random_scales, random_words

WHERE = "layers.0.q in model.safetensors"


def awq_config(group_size: int | None = None, bits: int | None = 4) -> QuantizationConfig:
    """AWQ's."""
    return QuantizationConfig(bits, group_size, checkpoint_format="gemm")


def random_awq_tensors(inputs: int, outputs: int, groups: int) -> Tensors:
    """Random tensors."""
    return {
        "qweight": random_words(inputs, outputs // 8),
        "qzeros": random_words(groups, outputs // 8),
        "scales": random_scales(groups, outputs),
    }


@given(
    size=st.integers(1, 40),
    inputs=st.integers(1, 70),
    words=st.integers(1, 3),
    size_in_config=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_read_equals_the_slow_decoder(size: int, inputs: int, words: int, size_in_config: bool, seed: int) -> None:
    torch.manual_seed(seed)
    if not size_in_config:  # inferred group sizes are powers of two
        size = 1 << (size % 6)
        inputs = -(-inputs // size) * size
    tensors = random_awq_tensors(inputs, 8 * words, -(-inputs // size))
    weight = awq.read(tensors, inputs, 8 * words, WHERE, awq_config(size if size_in_config else None))
    assert weight.format_name == "awq"
    assert torch.equal(weight.dequantize(), oracles.awq(tensors, size))


def test_column_order() -> None:
    tensors = {
        # Nibbles from the lowest: 0 2 4 6 1 3 5 7, which is what columns 0 to 7 hold after unpacking.
        "qweight": torch.tensor([[0x75316420], [0x75316420]], dtype=torch.int32),
        "qzeros": torch.zeros(1, 1, dtype=torch.int32),
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    weight = awq.read(tensors, 2, 8, WHERE, awq_config(2))
    assert weight.dequantize().tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]] * 2
    tensors["qzeros"] = tensors["qweight"][:1]
    zero = awq.read(tensors, 2, 8, WHERE, awq_config(2)).segments[0].zero
    assert isinstance(zero, Tensor)
    assert zero.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_one_group_for_all_inputs() -> None:
    assert awq.read(random_awq_tensors(96, 8, 1), 96, 8, WHERE, awq_config(-1)).segments[0].group_sizes == (96,)


def test_a_shared_zero_point_is_one_number() -> None:
    tensors = random_awq_tensors(64, 16, 2)
    tensors["qzeros"].fill_(0x88888888 - 2**32)
    assert awq.read(tensors, 64, 16, WHERE, awq_config(32)).segments[0].zero == 8


def test_it_can_be_written_as_gptq() -> None:
    weight = awq.read(random_awq_tensors(64, 16, 2), 64, 16, WHERE, awq_config(32))
    again = gptq.read(gptq.write(weight, v2=True), 64, 16, WHERE, QuantizationConfig(4, checkpoint_format="gptq_v2"))
    assert torch.equal(again.dequantize(), weight.dequantize())
    with pytest.raises(Unsupported, match="zero points from 0 to 15 with 4 bits as gptq"):
        gptq.write(weight)


CORRUPTIONS: dict[str, Corruption] = {
    **{f"no {name}": drop_tensor(name) for name in ("qweight", "qzeros", "scales")},
    "codes turned round": replace_tensor("qweight", lambda t: t.T),
    "codes of 64 bits": replace_tensor("qweight", lambda t: t.long()),
    "codes as floats": replace_tensor("qweight", lambda t: t.float()),
    "codes in one line": replace_tensor("qweight", lambda t: t.flatten()),
    "a row too many": replace_tensor("qweight", lambda t: torch.cat([t, t[:1]])),
    "a row too few": replace_tensor("qweight", lambda t: t[1:]),
    "the layout of GPTQ": replace_tensor("qweight", lambda t: t.view(20, 32)),
    "no rows": replace_tensor("qweight", lambda t: t[:0]),
    "a word too many": replace_tensor("qweight", lambda t: torch.cat([t, t[:, :1]], 1)),
    "zeros turned round": replace_tensor("qzeros", lambda t: t.T),
    "zeros as floats": replace_tensor("qzeros", lambda t: t.float()),
    "zeros of a group too few": replace_tensor("qzeros", lambda t: t[1:]),
    "no zeros": replace_tensor("qzeros", lambda t: t[:, :0]),
    "scales turned round": replace_tensor("scales", lambda t: t.T),
    "scales as whole numbers": replace_tensor("scales", lambda t: t.int()),
    "scales for a group too few": replace_tensor("scales", lambda t: t[1:]),
    "scales for a column too few": replace_tensor("scales", lambda t: t[:, 1:]),
    "scales for no group": replace_tensor("scales", lambda t: t[:0]),
    "a scale that is no number": replace_number("scales", lambda r: r.randrange(160), lambda r: float("nan")),
    "an infinite scale": replace_number("scales", lambda r: r.randrange(160), lambda r: float("-inf")),
}


@pytest.mark.parametrize("corrupt", CORRUPTIONS.values(), ids=CORRUPTIONS)
@pytest.mark.parametrize("seed", range(5))
def test_corrupt_tensors_are_refused(corrupt: Corruption, seed: int) -> None:
    torch.manual_seed(seed)
    tensors = random_awq_tensors(160, 32, 5)
    config = awq_config(32, None if seed % 2 else 4)
    assert awq.read(tensors, 160, 32, WHERE, config).in_features == 160
    corrupt(tensors, Random(seed))
    with pytest.raises((BadTensor, MissingTensor), match=WHERE):
        awq.read(tensors, 160, 32, WHERE, config)


@pytest.mark.parametrize(
    "shape",
    [
        (128, 32),
        (161, 32),
        (160, 40),
        (160, 33),
        (160, 0),
        (0, 32),
        (-160, 32),
        (10**15, 32),
        (160, 8 * 10**15),
    ],
)
def test_a_wrong_shape_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(BadTensor, match="expected"):
        awq.read(random_awq_tensors(160, 32, 5), *shape, WHERE, awq_config())


@pytest.mark.parametrize("size", [-1, 16, 64, 10**15])
def test_a_wrong_group_size_is_refused(size: int) -> None:
    with pytest.raises(BadTensor, match="scales: expected"):
        awq.read(random_awq_tensors(160, 32, 5), 160, 32, WHERE, awq_config(size))


@pytest.mark.parametrize("config", [QuantizationConfig(4), QuantizationConfig(8, checkpoint_format="gemm")])
def test_a_config_of_another_layout_is_refused(config: QuantizationConfig) -> None:
    with pytest.raises(CheckpointError, match="expected AWQ's gemm layout of 4 bits"):
        awq.read(random_awq_tensors(160, 32, 5), 160, 32, WHERE, config)


@given(st.data())
def test_random_corruption_is_read_or_refused(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**32)))
    tensors = random_awq_tensors(64, 32, 4)
    for _ in range(data.draw(st.integers(1, 2))):
        name = data.draw(st.sampled_from(sorted(tensors)))
        dtype = data.draw(st.sampled_from([tensors[name].dtype, torch.int16, torch.int32, torch.float16]))
        own = tuple(tensors[name].shape)
        shape = data.draw(st.sampled_from([own, own, (), (0,), (64,), (64, 4), (2, 4), (2, 32), (4, 4, 1)]))
        tensors[name] = torch.randint(-2, 30000, shape).to(dtype)
    try:
        weight = awq.read(tensors, 64, 32, WHERE, awq_config(data.draw(st.sampled_from([None, 16, 32]))))
    except CheckpointError:
        return
    assert torch.equal(weight.dequantize(), oracles.awq(tensors, 64 // len(tensors["scales"])))
