"""EXL2: against the reference's matrices and a slow decoder; corrupt tensors are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exlm.errors import BadTensor, CheckpointError, MissingTensor, Unsupported
from exlm.formats import Exl2Scales, PackedWeight, PlainScales, Segment, exl2
from exlm.formats.packed import pack
from tests.formats import oracles
from tests.formats.corrupt_tensors import Corruption, drop_tensor, replace_number, replace_tensor
from tests.formats.oracles import Tensors

RATES = ("2.5", "4.0", "6.0", "8.0")
WIDTHS = (2, 3, 4, 5, 6, 8)
WORDS_MULTIPLE = {2: 1, 3: 3, 4: 1, 5: 5, 6: 3, 8: 1}  # a group's words come in multiples of these
WHERE = "layers.0.q in model.safetensors"

group = st.sampled_from(WIDTHS).flatmap(
    lambda bits: st.tuples(st.just(bits), st.integers(1, 4).map(lambda n: n * WORDS_MULTIPLE[bits]))
)


def read(tensors: Tensors, out_features: int | None = None) -> PackedWeight:
    """Read with the shape that the tensors have."""
    width = int(tensors["q_weight"].shape[1])
    return exl2.read(tensors, len(tensors["q_invperm"]), out_features or width, WHERE)


@pytest.mark.parametrize("rate", RATES)
def test_reference_matrices(fixtures_dir: Path, rate: str) -> None:
    wanted = oracles.references(fixtures_dir / "reference" / f"exl2-{rate}bpw.safetensors", "dq.")
    stored = dict(oracles.matrices(fixtures_dir / f"tiny-lm-exl2-{rate}bpw", "q_weight"))
    assert wanted
    for key, matrix in wanted.items():
        inputs, outputs = matrix.shape
        assert torch.equal(exl2.read(stored[key], inputs, outputs, key).dequantize(), matrix)


@pytest.mark.parametrize("rate", RATES)
def test_every_matrix_of_real_files(fixtures_dir: Path, rate: str) -> None:
    count = 0
    for _, tensors in oracles.matrices(fixtures_dir / f"tiny-lm-exl2-{rate}bpw", "q_weight"):
        weight = read(tensors)
        columns = [0, 13, weight.out_features - 1]
        assert torch.equal(weight.dequantize()[:, columns], oracles.exl2(tensors, columns))
        assert oracles.same_tensors(exl2.write(weight), tensors)
        count += 1
    assert count == 29


@pytest.mark.parametrize(
    ("largest", "codes", "weights"),
    [
        (0x22B5, (0x035A, 0x178A, 0x22B4), (0x8DDE, 0xA299, 0xADDE)),
        (0x1264, (0x0033, 0x072C, 0x1260), (0x8165, 0x9246, 0x9D94)),
    ],
)
def test_published_scales(largest: int, codes: tuple[int, ...], weights: tuple[int, ...]) -> None:
    tensors = oracles.exl2_tensors([(4, 4)], 32, permuted=False)
    tensors["q_scale_max"] = torch.tensor([largest], dtype=torch.int16).view(torch.float16)
    tensors["q_scale"] = torch.tensor([[0xF50, 0, 0, 0]], dtype=torch.int32)  # columns 0, 1, 2: 0, 5, 15
    tensors["q_weight"].fill_(0x11111111)  # code 1: 7 below the zero point
    weight = read(tensors)
    table = weight.segments[0].scales.expand()[0, :3]
    assert [bits & 0xFFFF for bits in table.view(torch.int16).tolist()] == list(codes)
    found = weight.dequantize()[0, :3]
    assert [bits & 0xFFFF for bits in found.view(torch.int16).tolist()] == list(weights)


@given(
    groups=st.lists(group, min_size=1, max_size=8),
    blocks=st.integers(1, 2),
    seed=st.integers(0, 2**32),
)
def test_read_equals_the_slow_decoder(groups: list[tuple[int, int]], blocks: int, seed: int) -> None:
    torch.manual_seed(seed)
    tensors = oracles.exl2_tensors(groups, 32 * blocks, permuted=seed % 4 > 0)
    outputs = 32 * blocks - seed % 32  # the rest is padding
    weight = read(tensors, outputs)
    assert torch.equal(weight.dequantize(), oracles.exl2(tensors, range(outputs)))
    assert (weight.perm is None) == torch.equal(tensors["q_invperm"], torch.arange(weight.in_features))
    widths = [segment.bits for segment in weight.segments]
    assert all(left != right for left, right in pairwise(widths))


@given(groups=st.lists(group, min_size=1, max_size=8), seed=st.integers(0, 2**32))
def test_written_tensors_equal_those_read(groups: list[tuple[int, int]], seed: int) -> None:
    torch.manual_seed(seed)
    groups.sort(reverse=True)
    for bits in dict(groups):  # fill each width up to whole blocks of 32 rows
        rows = sum(words * 32 // width for width, words in groups if width == bits)
        if rows % 32:
            groups.append((bits, (32 - rows % 32) * bits // 32))
    groups.sort(key=lambda pair: -pair[0])
    tensors = oracles.exl2_tensors(groups, 64, permuted=seed % 4 > 0)
    bias = torch.randn(64).half() if seed % 2 else None
    written = exl2.write(replace(read(tensors), bias=bias))
    assert oracles.same_tensors(written, tensors if bias is None else {**tensors, "bias": bias})


@st.composite
def weights(draw: st.DrawFn) -> PackedWeight:
    """Any weight that EXL2 supports: widths in any order, short groups, any number of outputs."""
    torch.manual_seed(draw(st.integers(0, 2**32)))
    outputs = draw(st.integers(1, 70))
    parts = []
    for bits in draw(st.lists(st.sampled_from(WIDTHS), min_size=1, max_size=4)):
        sizes = draw(st.lists(st.sampled_from([32, 64, 96]), max_size=2))
        sizes += [16, 16] if bits in (2, 4, 6, 8) and draw(st.booleans()) else [32]
        parts.append(
            Segment(
                bits,
                tuple(sizes),
                pack(torch.randint(0, 1 << bits, (sum(sizes), outputs)), bits),
                Exl2Scales(
                    torch.randint(0, 16, (len(sizes), outputs), dtype=torch.uint8),
                    oracles.random_scales(len(sizes)),
                ),
                1 << (bits - 1),
            )
        )
    rows = sum(part.in_features for part in parts)
    order = torch.randperm(rows).to(torch.int32) if draw(st.booleans()) else None
    return PackedWeight("exl2", rows, outputs, tuple(parts), torch.float16, order)


@given(weights())
def test_written_weights_read_back_equal(weight: PackedWeight) -> None:
    tensors = exl2.write(weight)
    again = exl2.read(tensors, weight.in_features, weight.out_features, WHERE)
    assert torch.equal(again.dequantize(), weight.dequantize())
    widths = [segment.bits for segment in again.segments]
    assert widths == sorted(set(widths), reverse=True)
    padding = read(tensors).dequantize()[:, weight.out_features :]
    assert not padding.any()
    nibbles = oracles.read_bit_stream(tensors["q_scale"][0].tolist(), 4, tensors["q_weight"].shape[1])
    assert set(nibbles[weight.out_features :]) <= {15}


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_q_invperm_may_have_any_integer_dtype(dtype: torch.dtype) -> None:
    tensors = oracles.exl2_tensors([(8, 16), (4, 16)], 32)
    wanted = read(tensors).dequantize()
    tensors["q_invperm"] = tensors["q_invperm"].to(dtype)
    assert torch.equal(read(tensors).dequantize(), wanted)


def test_int16_tables_are_unsigned() -> None:
    tensors = oracles.exl2_tensors([(8, 33000), (2, 16)], 32)
    assert int(tensors["q_groups"].min()) < 0
    tensors["q_invperm"] = torch.arange(132256 - 1, -1, -1, dtype=torch.int32)
    weight = read(tensors)
    assert [segment.in_features for segment in weight.segments] == [132000, 256]
    assert oracles.same_tensors(exl2.write(weight), tensors)
    narrow = oracles.exl2_tensors([(8, 10000)], 32)
    wanted = read(narrow).dequantize()
    narrow["q_invperm"] = narrow["q_invperm"].to(torch.int16)
    assert int(narrow["q_invperm"].min()) < 0
    assert torch.equal(read(narrow).dequantize(), wanted)


def test_a_stored_permutation_is_ignored() -> None:
    tensors = oracles.exl2_tensors([(4, 8)], 32)
    weight = read({**tensors, "q_perm": torch.zeros(7)})
    assert torch.equal(weight.dequantize(), read(tensors).dequantize())


def test_codes_are_not_copied() -> None:
    tensors = oracles.exl2_tensors([(8, 16), (4, 16)], 32)
    first, second = read(tensors).segments
    assert first.codes.data_ptr() == tensors["q_weight"].data_ptr()
    assert second.codes.data_ptr() == tensors["q_weight"][16:].data_ptr()


def duplicate_index(tensors: Tensors, random: Random) -> None:
    """A permutation with a duplicate."""
    first, second = random.sample(range(len(tensors["q_invperm"])), 2)
    tensors["q_invperm"][first] = tensors["q_invperm"][second]


CORRUPTIONS: dict[str, Corruption] = {
    **{f"no {name}": drop_tensor(name) for name in ("q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm")},
    "codes turned round": replace_tensor("q_weight", lambda t: t.T),
    "codes of 64 bits": replace_tensor("q_weight", lambda t: t.long()),
    "codes as floats": replace_tensor("q_weight", lambda t: t.float()),
    "codes in one line": replace_tensor("q_weight", lambda t: t.flatten()),
    "a column too many": replace_tensor("q_weight", lambda t: torch.cat([t, t[:, :1]], 1)),
    "a row too few": replace_tensor("q_weight", lambda t: t[:-1]),
    "a row too many": replace_tensor("q_weight", lambda t: torch.cat([t, t[:1]])),
    "no rows": replace_tensor("q_weight", lambda t: t[:0]),
    "scales turned round": replace_tensor("q_scale", lambda t: t.T),
    "scales as floats": replace_tensor("q_scale", lambda t: t.float()),
    "scales for a group too few": replace_tensor("q_scale", lambda t: t[1:]),
    "scales for eight columns too few": replace_tensor("q_scale", lambda t: t[:, 1:]),
    "maxima of 32 bits": replace_tensor("q_scale_max", lambda t: t.float()),
    "a maximum too many": replace_tensor("q_scale_max", lambda t: torch.cat([t, t[:1]])),
    "a maximum that is no number": replace_number("q_scale_max", lambda r: r.randrange(4), lambda r: float("nan")),
    "an infinite maximum": replace_number("q_scale_max", lambda r: r.randrange(4), lambda r: float("-inf")),
    "groups of 32 bits": replace_tensor("q_groups", lambda t: t.int()),
    "no groups": replace_tensor("q_groups", lambda t: t[:0]),
    "half a group": replace_tensor("q_groups", lambda t: t[:-1]),
    "groups in pairs": replace_tensor("q_groups", lambda t: t.view(-1, 2)),
    "groups backwards": replace_tensor("q_groups", lambda t: t.view(-1, 2).flip(0).flatten()),
    "a group too few": replace_tensor("q_groups", lambda t: t[:-2]),
    "a group twice": replace_tensor("q_groups", lambda t: torch.cat([t, t[-2:]])),
    "as many groups as there are numbers": replace_tensor("q_groups", lambda t: t.repeat(1000)),
    "another width": replace_number(
        "q_groups", lambda r: 2 * r.randrange(4), lambda r: r.choice([0, 1, 7, 9, 10, 16, 32, -8, -1, 255])
    ),
    "a first group that is not first": replace_number("q_groups", lambda r: 1, lambda r: r.choice([1, 3, -1])),
    "a huge offset": replace_number(
        "q_groups", lambda r: 2 * r.randrange(1, 4) + 1, lambda r: r.choice([32767, -1, -9])
    ),
    "an offset again": replace_number("q_groups", lambda r: 2 * r.randrange(1, 4) + 1, lambda r: 0),
    "words that end inside a code": replace_number("q_groups", lambda r: 3, lambda r: r.choice([4, 6, 7, 8, 9])),
    "a permutation of floats": replace_tensor("q_invperm", lambda t: t.float()),
    "a permutation of bytes": replace_tensor("q_invperm", lambda t: t.to(torch.uint8)),
    "a longer permutation": replace_tensor("q_invperm", lambda t: torch.cat([t, t[:1]])),
    "a shorter permutation": replace_tensor("q_invperm", lambda t: t[t < len(t) - 1]),
    "a permutation with a hole": duplicate_index,
    "a row that is not there": replace_number(
        "q_invperm", lambda r: r.randrange(9), lambda r: r.choice([160, 2**31 - 1])
    ),
    "a negative row": replace_number("q_invperm", lambda r: r.randrange(9), lambda r: r.choice([-1, -160, -(2**31)])),
}


@pytest.mark.parametrize("corrupt", CORRUPTIONS.values(), ids=CORRUPTIONS)
@pytest.mark.parametrize("seed", range(5))
def test_corrupt_tensors_are_refused(corrupt: Corruption, seed: int) -> None:
    torch.manual_seed(seed)
    tensors = oracles.exl2_tensors([(5, 5), (5, 5), (4, 8), (3, 3)], 64)
    assert exl2.read(tensors, 160, 64, WHERE).in_features == 160
    corrupt(tensors, Random(seed))
    with pytest.raises((BadTensor, MissingTensor), match=WHERE):
        exl2.read(tensors, 160, 64, WHERE)


@pytest.mark.parametrize(
    "shape",
    [(128, 64), (161, 64), (160, 65), (160, 32), (160, 0), (0, 64), (-160, 64), (10**15, 64), (160, 10**15)],
)
def test_a_wrong_shape_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(BadTensor, match="expected"):
        exl2.read(oracles.exl2_tensors([(5, 5), (5, 5), (4, 8), (3, 3)], 64), *shape, WHERE)


@given(st.data())
def test_random_corruption_is_read_or_refused(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**32)))
    tensors = oracles.exl2_tensors([(5, 5), (4, 8), (2, 2)], 32)
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(tensors)))
        dtype = data.draw(st.sampled_from([tensors[name].dtype, torch.int16, torch.int32, torch.float16]))
        shape = data.draw(
            st.sampled_from([tuple(tensors[name].shape), (), (0,), (3,), (6,), (128,), (15, 32), (3, 4), (3, 4, 1)])
        )
        reach = data.draw(st.sampled_from([2, 9, 200, 30000]))
        tensors[name] = torch.randint(-reach // 4, reach, shape).to(dtype)
    try:
        weight = exl2.read(tensors, 128, 32, WHERE)
    except CheckpointError:
        return
    assert torch.equal(weight.dequantize(), oracles.exl2(tensors, range(32)))


def two_groups_far_apart(words: int) -> PackedWeight:
    """Two groups of 8 bits, the second of 32 rows after so many words."""
    scales = Exl2Scales(torch.zeros(2, 1, dtype=torch.uint8), oracles.random_scales(2))
    segment = Segment(8, (4 * words, 32), oracles.random_words(words + 8, 1), scales, 128)
    return PackedWeight("exl2", segment.in_features, 1, (segment,), torch.float16)


def changed_weight(**change: object) -> PackedWeight:
    """A weight that EXL2 supports, with this change of its first segment."""
    weight = read(oracles.exl2_tensors([(4, 8), (2, 2)], 32))
    first, second = weight.segments
    return replace(weight, segments=(replace(first, **change), second))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (lambda: changed_weight(minimum=PlainScales(torch.ones(1, 32))), "minimums"),
        (lambda: changed_weight(codebook=torch.ones(16)), "codebooks"),
        (lambda: changed_weight(zero=7), "zero points other than 8 for 4 bits"),
        (lambda: changed_weight(zero=torch.full((1, 32), 8, dtype=torch.uint8)), "zero points other than 8"),
        (lambda: changed_weight(scales=PlainScales(torch.ones(1, 32))), "plain float32 scales"),
        (lambda: replace(changed_weight(), dtype=torch.float32), "float32"),
        (lambda: changed_weight(bits=7, codes=oracles.random_words(14, 32)), "7-bit codes"),
        (lambda: read(oracles.exl2_tensors([(4, 4), (2, 1)], 32)), "48 inputs"),
        (lambda: read(oracles.exl2_tensors([(4, 6), (2, 1)], 32)), "48 rows of 4 bits"),
        (lambda: read(oracles.exl2_tensors([(4, 8), (2, 4)], 32)).split(0, [(0, 32)])[0], "rows of"),
        (lambda: two_groups_far_apart(65600), "word 65600, past 65535"),
    ],
)
def test_what_exl2_does_not_support_is_refused(weight: Callable[[], PackedWeight], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        exl2.write(weight())
