"""GPTQ: against files of two independent tools and a slow decoder; corrupt tensors are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from exlm.errors import BadTensor, CheckpointError, MissingTensor, Unsupported
from exlm.formats import Exl2Scales, PackedWeight, PlainScales, gptq
from exlm.formats.gptq import QuantizationConfig
from exlm.formats.packed import pack_rows
from tests.formats import oracles
from tests.formats.corrupt_tensors import Corruption, drop_tensor, replace_number, replace_tensor
from tests.formats.oracles import Tensors

EXLM_FIXTURES = ("tiny-lm-gptq-g128-act", "tiny-lm-gptq-g128-sym")
GPTQMODEL_FIXTURES = tuple(
    f"gptqmodel-{name}" for name in ("w2-g32", "w3-g32", "w4-g128", "w4-g128-act", "w4-g32-v2", "w8-g32")
)
WHERE = "layers.0.q in model.safetensors"
SIZE_MULTIPLE = {2: 16, 3: 32, 4: 8, 8: 4}  # rows and columns come in multiples of these

bits = st.sampled_from(sorted(SIZE_MULTIPLE))
seeds = st.integers(0, 2**32)


def read(tensors: Tensors, config: QuantizationConfig) -> PackedWeight:
    """Read with the shape that the tensors have; config.bits must be given."""
    assert config.bits
    rows, outputs = tensors["qweight"].shape
    return gptq.read(tensors, rows * 32 // config.bits, outputs, WHERE, config)


@pytest.mark.parametrize("name", EXLM_FIXTURES + GPTQMODEL_FIXTURES)
def test_reference_matrices(fixtures_dir: Path, name: str) -> None:
    by_exlm = name in EXLM_FIXTURES
    path = fixtures_dir / "reference" / f"{name.removeprefix('tiny-lm-')}.safetensors"
    wanted = oracles.references(path, "dq." if by_exlm else "deq.")
    config = QuantizationConfig.from_json(oracles.quantization_config(fixtures_dir / name), name)
    stored = dict(oracles.matrices(fixtures_dir / name, "qweight"))
    assert wanted
    if not by_exlm:
        assert wanted.keys() == stored.keys()
    for key, matrix in wanted.items():
        matrix = matrix if by_exlm else matrix.T
        inputs, outputs = matrix.shape
        found = gptq.read(stored[key], inputs, outputs, key, config).dequantize()
        assert found.dtype is torch.float16
        assert torch.equal(found.to(matrix.dtype), matrix)


@pytest.mark.parametrize("name", EXLM_FIXTURES + GPTQMODEL_FIXTURES)
def test_every_matrix_of_real_files(fixtures_dir: Path, name: str) -> None:
    config = QuantizationConfig.from_json(oracles.quantization_config(fixtures_dir / name), name)
    count = 0
    for _, tensors in oracles.matrices(fixtures_dir / name, "qweight"):
        weight = read(tensors, config)
        group_of_input = tensors["g_idx"].tolist()
        columns = [0, 13, weight.out_features - 1]
        wanted = oracles.gptq(
            tensors,
            config.bits or 0,
            shift=0 if name.endswith("v2") else 1,
            group_of=group_of_input.__getitem__,
            columns=columns,
        )
        assert torch.equal(weight.dequantize()[:, columns], wanted)
        assert isinstance(weight.segments[0].zero, int) == config.sym
        assert oracles.same_tensors(gptq.write(weight, v2=name.endswith("v2")), tensors)
        count += 1
    assert count == (28 if name in EXLM_FIXTURES else 14)


@pytest.mark.parametrize("name", GPTQMODEL_FIXTURES)
def test_both_json_files_give_the_same_config(fixtures_dir: Path, name: str) -> None:
    raw = json.loads((fixtures_dir / name / "quantize_config.json").read_text())
    config = QuantizationConfig.from_json(raw, name)
    assert config == QuantizationConfig.from_json(oracles.quantization_config(fixtures_dir / name), name)
    assert config.bits == int(name[len("gptqmodel-w")])
    assert config.checkpoint_format == ("gptq_v2" if name.endswith("v2") else "gptq")
    assert config.desc_act == name.endswith("act")


@st.composite
def stored(draw: st.DrawFn, *, act_order: bool) -> tuple[Tensors, int, list[int]]:
    """Random tensors with their bits and the group of each row; every group has a row."""
    torch.manual_seed(draw(seeds))
    width = draw(bits)
    inputs = SIZE_MULTIPLE[width] * draw(st.integers(1, 6))
    outputs = SIZE_MULTIPLE[width] * draw(st.integers(1, 3))
    if act_order:
        groups = draw(st.integers(1, min(inputs, 5)))
        group_of_input = [*range(groups), *torch.randint(0, groups, (inputs - groups,)).tolist()]
        group_of_input = [group_of_input[i] for i in torch.randperm(inputs).tolist()]
    else:
        size = draw(st.integers(1, inputs))
        group_of_input = [k // size for k in range(inputs)]
        groups = group_of_input[-1] + 1
    return oracles.gptq_tensors(inputs, outputs, width, group_of_input, groups), width, group_of_input


@given(stored_matrix=stored(act_order=True) | stored(act_order=False), v2=st.booleans())
def test_read_is_the_slow_decoder_and_write_its_inverse(
    stored_matrix: tuple[Tensors, int, list[int]], v2: bool
) -> None:
    tensors, width, group_of_input = stored_matrix
    if width == 8 and not v2:  # an 8-bit zero point of 256 is refused: see below
        tensors["qzeros"] &= 0x7F7F7F7F
    config = QuantizationConfig(width, checkpoint_format="gptq_v2" if v2 else "gptq")
    weight = read(tensors, config)
    outputs = range(weight.out_features)
    wanted = oracles.gptq(tensors, width, shift=not v2, group_of=group_of_input.__getitem__, columns=outputs)
    assert torch.equal(weight.dequantize(), wanted)
    assert (weight.perm is None) == (group_of_input == sorted(group_of_input))
    assert oracles.same_tensors(gptq.write(weight, v2=v2), tensors)
    other = gptq.read(tensors, len(group_of_input), len(outputs), WHERE, replace(config, bits=None))
    assert torch.equal(other.dequantize(), wanted)


@given(stored_matrix=stored(act_order=False), zeros=st.booleans())
def test_without_g_idx_neighbouring_inputs_form_groups(
    stored_matrix: tuple[Tensors, int, list[int]], zeros: bool
) -> None:
    tensors, width, group_of_input = stored_matrix
    config = QuantizationConfig(width, group_of_input.count(0), checkpoint_format="gptq_v2")
    wanted = read(tensors, config).dequantize()
    if zeros:
        tensors["g_idx"].zero_()
    else:
        del tensors["g_idx"]
    assert torch.equal(read(tensors, config).dequantize(), wanted)


@pytest.mark.parametrize(
    ("inputs", "groups", "size"),
    [(96, 2, 64), (640, 5, 128), (96, 1, 128), (48, 3, 16), (240, 5, 48), (88, 4, 22)],
)
def test_the_group_size_is_inferred_where_no_config_says_it(inputs: int, groups: int, size: int) -> None:
    tensors = oracles.gptq_tensors(inputs, 8, 4, [k // size for k in range(inputs)], groups)
    wanted = read(tensors, QuantizationConfig(4)).dequantize()
    del tensors["g_idx"]
    assert torch.equal(read(tensors, QuantizationConfig(4)).dequantize(), wanted)


def test_one_group_for_all_inputs() -> None:
    tensors = oracles.gptq_tensors(64, 8, 4, [0] * 64, 1)
    assert read(tensors, QuantizationConfig(4, -1)).segments[0].group_sizes == (64,)
    del tensors["g_idx"]
    assert read(tensors, QuantizationConfig(4, -1)).segments[0].group_sizes == (64,)


def test_an_empty_group_is_dropped() -> None:
    group_of_input = [k // 16 * 2 for k in range(64)]
    tensors = oracles.gptq_tensors(64, 8, 4, group_of_input, 8)
    weight = read(tensors, QuantizationConfig(4))
    wanted = oracles.gptq(tensors, 4, shift=1, group_of=group_of_input.__getitem__, columns=range(8))
    assert weight.segments[0].group_sizes == (16,) * 4
    assert torch.equal(weight.dequantize(), wanted)
    assert torch.equal(read(gptq.write(weight), QuantizationConfig(4)).dequantize(), wanted)


@pytest.mark.parametrize(("v2", "zero"), [(False, 16), (True, 15)])
def test_the_largest_zero_does_not_wrap(v2: bool, zero: int) -> None:
    tensors = oracles.gptq_tensors(64, 8, 4, [0] * 64, 1)
    tensors["qzeros"].fill_(-1)
    config = QuantizationConfig(4, checkpoint_format="gptq_v2" if v2 else "gptq")
    assert read(tensors, config).segments[0].zero == zero
    tensors["qzeros"][0, 0] = 0x0FFFFFFF
    mixed = read(tensors, config).segments[0].zero
    assert isinstance(mixed, Tensor)
    assert mixed.dtype is torch.uint8
    assert mixed.tolist() == [[zero] * 7 + [zero - 15]]


@pytest.mark.parametrize(("width", "ones"), [(2, 0x55555555), (4, 0x11111111), (8, 0x01010101), (3, None)])
def test_zeros_that_gptqmodel_decremented_per_word(width: int, ones: int | None) -> None:
    torch.manual_seed(width)
    tensors = oracles.gptq_tensors(64, 32, width, [k // 16 for k in range(64)], 4)
    zeros = torch.randint(0, 1 << width, (4, 32))
    zeros[:, ::5] = 0
    tensors["qzeros"] = pack_rows(zeros, width)
    wanted = read(tensors, QuantizationConfig(width, sym=False, checkpoint_format="gptq_v2")).dequantize()
    less = pack_rows((zeros - 1) % (1 << width), width) if ones is None else tensors["qzeros"] - ones
    raw = {"bits": width, "sym": False, "format": "gptq", "meta": {"quantizer": ["gptqmodel:2.2.0"]}}
    config = QuantizationConfig.from_json(raw, "config.json")
    assert torch.equal(read({**tensors, "qzeros": less}, config).dequantize(), wanted)


def test_an_eight_bit_zero_point_of_256_must_be_shared() -> None:
    tensors = oracles.gptq_tensors(64, 8, 8, [0] * 64, 1)
    tensors["qzeros"].copy_(torch.tensor([[-1, 0x01FFFFFF]]))
    with pytest.raises(BadTensor, match="qzeros: expected zero points up to 255"):
        read(tensors, QuantizationConfig(8))
    tensors["qzeros"].fill_(-1)
    assert read(tensors, QuantizationConfig(8)).segments[0].zero == 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_become_float16(dtype: torch.dtype) -> None:
    tensors = oracles.gptq_tensors(64, 8, 4, [0] * 64, 1)
    tensors["scales"] = torch.rand(1, 8).to(dtype)
    wanted = oracles.gptq(tensors, 4, shift=1, group_of=lambda k: 0, columns=range(8))
    assert torch.equal(read(tensors, QuantizationConfig(4)).dequantize(), wanted)
    tensors["scales"][0, 3] = 1e6
    with pytest.raises(BadTensor, match="scales: expected finite float16 values, found 1 of 8"):
        read(tensors, QuantizationConfig(4))


def test_a_bias_is_written() -> None:
    tensors = oracles.gptq_tensors(64, 8, 4, [0] * 64, 1)
    bias = torch.zeros(8)
    weight = replace(read(tensors, QuantizationConfig(4)), bias=bias)
    assert gptq.write(weight)["bias"] is bias


def test_codes_are_not_copied_without_act_order() -> None:
    tensors = oracles.gptq_tensors(64, 8, 4, [k // 32 for k in range(64)], 2)
    assert read(tensors, QuantizationConfig(4)).segments[0].codes.data_ptr() == tensors["qweight"].data_ptr()


CORRUPTIONS: dict[str, Corruption] = {
    **{f"no {name}": drop_tensor(name) for name in ("qweight", "qzeros", "scales")},
    "codes turned round": replace_tensor("qweight", lambda t: t.T),
    "codes of 64 bits": replace_tensor("qweight", lambda t: t.long()),
    "codes as floats": replace_tensor("qweight", lambda t: t.float()),
    "codes as bytes": replace_tensor("qweight", lambda t: t.view(torch.uint8)),
    "codes in one line": replace_tensor("qweight", lambda t: t.flatten()),
    "a row too many": replace_tensor("qweight", lambda t: torch.cat([t, t[:1]])),
    "a row too few": replace_tensor("qweight", lambda t: t[1:]),
    "codes of another width": replace_tensor("qweight", lambda t: torch.cat([t, t])),
    "no rows": replace_tensor("qweight", lambda t: t[:0]),
    "a column too many": replace_tensor("qweight", lambda t: torch.cat([t, t[:, :1]], 1)),
    "zeros turned round": replace_tensor("qzeros", lambda t: t.T),
    "zeros as floats": replace_tensor("qzeros", lambda t: t.float()),
    "zeros of a group too few": replace_tensor("qzeros", lambda t: t[1:]),
    "zeros of another width": replace_tensor("qzeros", lambda t: torch.cat([t, t], 1)),
    "no zeros": replace_tensor("qzeros", lambda t: t[:, :0]),
    "scales turned round": replace_tensor("scales", lambda t: t.T),
    "scales as whole numbers": replace_tensor("scales", lambda t: t.int()),
    "scales of 64 bits": replace_tensor("scales", lambda t: t.double()),
    "scales for a group too few": replace_tensor("scales", lambda t: t[1:]),
    "scales for a column too few": replace_tensor("scales", lambda t: t[:, 1:]),
    "scales for no group": replace_tensor("scales", lambda t: t[:0]),
    "a scale that is no number": replace_number("scales", lambda r: r.randrange(160), lambda r: float("nan")),
    "an infinite scale": replace_number("scales", lambda r: r.randrange(160), lambda r: float("inf")),
    "groups as floats": replace_tensor("g_idx", lambda t: t.float()),
    "groups as bytes": replace_tensor("g_idx", lambda t: t.to(torch.uint8)),
    "a group for a row too many": replace_tensor("g_idx", lambda t: torch.cat([t, t[:1]])),
    "a group for a row too few": replace_tensor("g_idx", lambda t: t[1:]),
    "groups in a column": replace_tensor("g_idx", lambda t: t[:, None]),
    "a group that is not there": replace_number(
        "g_idx", lambda r: r.randrange(160), lambda r: r.choice([5, 6, 2**31 - 1])
    ),
    "a negative group": replace_number("g_idx", lambda r: r.randrange(160), lambda r: r.choice([-1, -5, -(2**31)])),
}


@pytest.mark.parametrize("corrupt", CORRUPTIONS.values(), ids=CORRUPTIONS)
@pytest.mark.parametrize("seed", range(5))
def test_corrupt_tensors_are_refused(corrupt: Corruption, seed: int) -> None:
    torch.manual_seed(seed)
    group_of_input = torch.randperm(160) // 32 if seed % 2 else torch.arange(160) // 32
    tensors = oracles.gptq_tensors(160, 32, 4, group_of_input.tolist(), 5)
    config = QuantizationConfig(None if seed % 3 == 2 else 4, 32, checkpoint_format="gptq_v2")
    assert gptq.read(tensors, 160, 32, WHERE, config).in_features == 160
    corrupt(tensors, Random(seed))
    with pytest.raises((BadTensor, MissingTensor), match=WHERE):
        gptq.read(tensors, 160, 32, WHERE, config)


@pytest.mark.parametrize(
    "shape", [(128, 32), (161, 32), (160, 40), (160, 0), (0, 32), (-160, 32), (10**15, 32), (160, 10**15)]
)
@pytest.mark.parametrize("width", [None, 4])
def test_a_wrong_shape_is_refused(shape: tuple[int, int], width: int | None) -> None:
    tensors = oracles.gptq_tensors(160, 32, 4, [k // 32 for k in range(160)], 5)
    with pytest.raises(BadTensor, match="expected"):
        gptq.read(tensors, *shape, WHERE, QuantizationConfig(width))


@pytest.mark.parametrize("size", [-1, 16, 64, 160, 10**15])
@pytest.mark.parametrize("zeros", [True, False])
def test_a_wrong_group_size_is_refused(size: int, zeros: bool) -> None:
    tensors = oracles.gptq_tensors(160, 32, 4, [0] * 160, 5)
    if not zeros:
        del tensors["g_idx"]
    with pytest.raises(BadTensor, match=r"scales: expected \d+ groups of \d+ for 160 inputs, found 5"):
        read(tensors, QuantizationConfig(4, size))


@given(st.data())
def test_random_corruption_is_read_or_refused(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(seeds))
    tensors = oracles.gptq_tensors(64, 32, 4, (torch.randperm(64) // 16).tolist(), 4)
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(tensors)))
        dtype = data.draw(st.sampled_from([tensors[name].dtype, torch.int16, torch.int32, torch.float16]))
        own = tuple(tensors[name].shape)
        shape = data.draw(st.sampled_from([own, own, (), (0,), (64,), (8, 32), (4, 4), (4, 32), (16, 32), (4, 4, 1)]))
        tensors[name] = torch.randint(*data.draw(st.sampled_from([(0, 4), (-2, 30000)])), shape).to(dtype)
    config = QuantizationConfig(data.draw(st.sampled_from([None, 4, 8])), data.draw(st.sampled_from([None, 16])))
    try:
        weight = gptq.read(tensors, 64, 32, WHERE, config)
    except CheckpointError:
        return
    assert weight.dequantize().shape == (64, 32)


def changed_weight(**change: object) -> PackedWeight:
    """A weight that GPTQ supports, with this change of its segment."""
    weight = read(oracles.gptq_tensors(64, 32, 4, [0] * 64, 1), QuantizationConfig(4, checkpoint_format="gptq_v2"))
    return replace(weight, segments=(replace(weight.segments[0], **change),))  # type: ignore[arg-type]


def weight_with_two_segments() -> PackedWeight:
    """A weight of two segments."""
    segment = changed_weight().segments[0]
    return PackedWeight("gptq", 128, 32, (segment, segment), torch.float16)


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (lambda: changed_weight(minimum=PlainScales(torch.ones(1, 32))), "minimums"),
        (lambda: changed_weight(codebook=torch.ones(16)), "codebooks"),
        (lambda: changed_weight(zero=0), "zero points from 0 to 0 with 4 bits as gptq"),
        (lambda: changed_weight(zero=17), "zero points from 17 to 17"),
        (lambda: changed_weight(zero=torch.arange(32, dtype=torch.uint8)[None]), "zero points from 0 to 31"),
        (
            lambda: changed_weight(scales=PlainScales(torch.ones(1, 32))),
            "plain float32 scales; it has plain float16",
        ),
        (
            lambda: changed_weight(scales=Exl2Scales(torch.zeros(1, 32), torch.ones(1))),
            "squared 4-bit scales",
        ),
        (lambda: changed_weight(bits=5, codes=oracles.random_words(10, 32)), "5-bit codes"),
        (lambda: replace(changed_weight(), dtype=torch.float32), "float32"),
        (weight_with_two_segments, "2 runs"),
        (lambda: changed_weight().take_columns(torch.arange(31)), "31 outputs"),
        (lambda: changed_weight().split(0, [(0, 33)])[0], "33 inputs"),
    ],
)
def test_what_gptq_does_not_support_is_refused(weight: Callable[[], PackedWeight], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        gptq.write(weight())


def test_gptq_v2_can_store_a_zero_point_of_0() -> None:
    tensors = gptq.write(changed_weight(zero=0), v2=True)
    assert not tensors["qzeros"].any()


def test_split_weights_can_be_written() -> None:
    group_of_input = (torch.randperm(128) // 32).tolist()
    tensors = oracles.gptq_tensors(128, 32, 4, group_of_input, 4)
    weight = read(tensors, QuantizationConfig(4))
    for dim, ranges in ((0, [(0, 64), (64, 128)]), (1, [(0, 8), (8, 32)])):
        pieces = [read(gptq.write(piece), QuantizationConfig(4)).dequantize() for piece in weight.split(dim, ranges)]
        assert torch.equal(torch.cat(pieces, dim), weight.dequantize())


def test_an_awq_config_is_refused() -> None:
    with pytest.raises(CheckpointError, match="AWQ's gemm"):
        read(oracles.gptq_tensors(64, 32, 4, [0] * 64, 1), QuantizationConfig(4, checkpoint_format="gemm"))
