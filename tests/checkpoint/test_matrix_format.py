"""The registry of formats: the reader detects, describes and reads a new format from one entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from exlm.checkpoint import safetensors_checkpoint
from exlm.errors import BadTensor, Unsupported
from exlm.formats import DENSE, FORMATS, MatrixFormat, PackedWeight, PlainScales, Segment
from exlm.formats.matrix_format import require_tensor
from exlm.formats.packed import pack
from exlm.formats.quantization_config import QuantizationConfig
from tests.checkpoint.checkpoint_helpers import CPU, Q, open_checkpoint


def read_int8(
    tensors: Mapping[str, Tensor],
    in_features: int,
    out_features: int,
    where: str,
    _config: QuantizationConfig,
) -> PackedWeight:
    """A format of this test: `codes` (outputs, inputs) uint8 with a zero point of 128, a scale per output."""
    codes = require_tensor(tensors, "codes", where, (torch.uint8,), (out_features, in_features))
    scale = require_tensor(tensors, "scale", where, (torch.float16,), (out_features,))
    segment = Segment(8, (in_features,), pack(codes.T, 8), PlainScales(scale[None]), 128)
    return PackedWeight("int8", in_features, out_features, (segment,), torch.float16)


def describe_int8(
    shapes: Mapping[str, tuple[int, ...]], read_tensor: Callable[[str], Tensor], _config: QuantizationConfig
) -> str:
    """`int8 2 x 4`, with the shape of the codes."""
    assert read_tensor("scale").dim() == 1
    return f"int8 {' x '.join(map(str, shapes['codes']))}"


INT8 = MatrixFormat("int8", "codes", ("codes", "scale"), read_int8, describe_int8)


def int8_tensors(outputs: int, inputs: int) -> dict[str, Tensor]:
    codes = torch.randint(0, 256, (outputs, inputs)).to(torch.uint8)
    return {f"{Q}.codes": codes, f"{Q}.scale": torch.rand(outputs).half()}


def test_a_new_format_is_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_checkpoint, "FORMATS", (INT8, *FORMATS))
    tensors = int8_tensors(2, 4)
    bias = torch.randn(2)
    checkpoint = open_checkpoint(tmp_path, {**tensors, f"{Q}.bias": bias})
    assert checkpoint.has("layers.0.attn.q")
    assert checkpoint.describe("layers.0.attn.q") == ("int8 2 x 4", 8 + 4 + 8)
    weight = checkpoint.weight("layers.0.attn.q", 4, 2, bias=True, dtype=torch.float32, device=CPU)
    codes, scale = tensors[f"{Q}.codes"], tensors[f"{Q}.scale"]
    assert torch.equal(weight.dequantize(), ((codes.float() - 128) * scale.float()[:, None]).half().T)
    assert weight.bias is not None
    assert torch.equal(weight.bias, bias)
    assert checkpoint.unused() == []
    with pytest.raises(BadTensor, match=r"self_attn\.q_proj: codes: expected uint8 of shape \[2, 5\]"):
        checkpoint.weight("layers.0.attn.q", 5, 2, bias=True, dtype=None, device=CPU)


def test_without_the_entry_it_is_not_found(tmp_path: Path) -> None:
    assert not open_checkpoint(tmp_path, int8_tensors(2, 4)).has("layers.0.attn.q")


def test_a_format_without_a_reader_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_checkpoint, "FORMATS", (MatrixFormat("INT8", "codes"), *FORMATS))
    checkpoint = open_checkpoint(tmp_path, int8_tensors(2, 4))
    assert checkpoint.describe("layers.0.attn.q")[0] == "INT8"
    with pytest.raises(Unsupported, match=r"q_proj\.codes.* is stored as INT8, which this version cannot read"):
        checkpoint.weight("layers.0.attn.q", 4, 2, bias=False, dtype=None, device=CPU)


def test_markers_are_ambiguous_only_where_the_config_decides() -> None:
    for method in ("gptq", "awq"):
        markers = [one.marker for one in FORMATS if one.quant_method in (None, method)]
        assert len(markers) == len(set(markers))
    assert FORMATS[-1] is DENSE, "packed tensors are preferred to floats"
