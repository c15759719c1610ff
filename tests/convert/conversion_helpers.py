"""Models to convert, and comparisons of two models, for the tests of conversion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from exlm import Config, Model, Tokenizer
from exlm.formats import PackedWeight, PlainScales
from exlm.formats.packed import unpack
from exlm.spec.model import Matrix, matrices
from tests import tiny
from tests.model.random_quantized import random_gptq, replace_matrices

CPU = torch.device("cpu")
AWQ_JSON = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
PROJECTIONS = r"_proj\.weight"


def dequantized_matrices(path: Path) -> dict[str, Tensor]:
    """Every matrix of a model, dequantised, with its bias."""
    frozen = Config(path).freeze()
    source = frozen.open_checkpoint()
    found = {}
    for m in (Matrix("embed", frozen.spec.hidden, frozen.spec.vocab), *matrices(frozen.spec)):
        if m.role == "head" and not source.has("head"):
            continue
        weight = source.weight(m.role, m.in_features, m.out_features, bias=m.bias, dtype=None, device=CPU)
        found[m.role] = weight.dequantize()
        if weight.bias is not None:
            found[m.role + ":bias"] = weight.bias
    return found


def reference_logits(path: Path) -> Tensor:
    """Logits of the reference backend: a CPU's kernels round differently."""
    model = Model(Config(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXLM_CPU", "0")
        model.load()
    ids = torch.randint(3, 60, (2, 40), generator=torch.Generator().manual_seed(3))
    answer: Tensor = model.forward(ids)
    return answer


def assert_same(source: Path, target: Path, *, forms: set[str] | None = None) -> None:
    """The same numbers in the same precision, and the same answers; through one kernel, to the last bit."""
    before, after = dequantized_matrices(source), dequantized_matrices(target)
    assert before.keys() == after.keys()
    for role, tensor in before.items():
        assert tensor.dtype == after[role].dtype, role
        assert torch.equal(tensor, after[role]), role
    got, want = reference_logits(target), reference_logits(source)
    old, new = (Model(Config(path)).summary().matrices for path in (source, target))
    if [m.form.startswith("dense") for m in old] == [m.form.startswith("dense") for m in new]:
        assert torch.equal(got, want)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    found = {m.form for m in new}
    assert forms is None or found == forms
    assert not [path for path in target.parent.iterdir() if path.name.startswith(".")]


def read_tensors(folder: Path) -> dict[str, Tensor]:
    return {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}


def read_config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def write_awq(weight: PackedWeight) -> dict[str, Tensor]:
    """Pack AWQ words: eight columns of one row, interleaved, lowest nibble first."""
    segment = weight.segments[0]
    assert isinstance(segment.zero, Tensor)
    assert isinstance(segment.scales, PlainScales)

    def words(codes: Tensor) -> Tensor:
        nibbles = codes.to(torch.int64).view(codes.shape[0], -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        packed = (nibbles << torch.arange(0, 32, 4)).sum(-1)
        return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)

    codes = unpack(segment.codes, 4, weight.in_features)
    return {"qweight": words(codes), "qzeros": words(segment.zero), "scales": segment.scales.values}


def make_quantised(folder: Path, write: Any, make: Any, quantization_config: dict[str, Any] | None = None) -> Path:
    """A tiny Llama whose layers are quantised."""
    tiny.make(folder, torch.float16, hidden_size=64, intermediate_size=128)
    replace_matrices(folder, None, write, make, PROJECTIONS)
    return update_config(folder, quantization_config=quantization_config) if quantization_config else folder


def update_config(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**read_config(folder), **changes}))
    return folder


def gptq_with_zero_point(value: int, at: int = 0) -> Any:
    """Random GPTQ matrices, one zero point of which has this value."""

    def make(inputs: int, outputs: int) -> PackedWeight:
        weight = random_gptq(inputs, outputs)
        zero = weight.segments[0].zero
        assert isinstance(zero, Tensor)
        zero[at % len(zero), at % outputs] = value
        return weight

    return make


def assert_tokenizers(source: Path, target: Path, text: str) -> Tokenizer:
    """The same ids, pieces and special tokens."""
    one, two = Tokenizer(Config(source)), Tokenizer(Config(target))
    for special in (False, True):
        ids = one.encode(text, add_bos=True, encode_special_tokens=special)
        assert torch.equal(ids, two.encode(text, add_bos=True, encode_special_tokens=special))
        assert one.decode(ids, decode_special_tokens=special) == two.decode(ids, decode_special_tokens=special)
    for name in ("bos_token_id", "eos_token_ids", "pad_token_id", "unk_token_id", "extended_piece_to_id"):
        assert getattr(one, name) == getattr(two, name)
    assert one.has_chat_template == two.has_chat_template
    return two
