"""The validator: files of the reference pass, and every violation is named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from exlm import validate_exl2

Q = "model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize("bits", ["2.5", "4.0", "6.0", "8.0"])
def test_files_of_exllamav2_are_valid(fixtures_dir: Path, bits: str) -> None:
    assert validate_exl2(fixtures_dir / f"tiny-lm-exl2-{bits}bpw") == []


def test_float_models_are_not_valid_exl2(fixtures_dir: Path) -> None:
    assert any("q_weight" in words for words in validate_exl2(fixtures_dir / "tiny-lm"))


def widths_up(t: dict[str, Tensor]) -> None:
    groups = t[Q + "q_groups"].view(-1, 2)
    groups[:, 0] = groups[:, 0].flip(0)


def twice(t: dict[str, Tensor]) -> None:
    t[Q + "q_invperm"][0] = t[Q + "q_invperm"][1]


def narrow(t: dict[str, Tensor]) -> None:
    t[Q + "q_weight"] = t[Q + "q_weight"][:, :-8].contiguous()


def offset(t: dict[str, Tensor]) -> None:
    t[Q + "q_groups"][1] = 3


def width(t: dict[str, Tensor]) -> None:
    t[Q + "q_groups"][0] = 7


def missing(t: dict[str, Tensor]) -> None:
    del t[Q + "q_scale"]


def bias(t: dict[str, Tensor]) -> None:
    t[Q + "bias"] = torch.zeros(256).half()


def infinite(t: dict[str, Tensor]) -> None:
    t[Q + "q_scale_max"][0] = torch.inf


def wide_norm(t: dict[str, Tensor]) -> None:
    t["model.norm.weight"] = t["model.norm.weight"].float()


def stray(t: dict[str, Tensor]) -> None:
    t["model.layers.0.self_attn.qkv_proj.q_weight"] = torch.zeros(1, 32, dtype=torch.int32)


def short(t: dict[str, Tensor]) -> None:
    t[Q + "q_scale_max"] = t[Q + "q_scale_max"][:-1].contiguous()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (widths_up, "descend"),
        (twice, "q_invperm"),
        (narrow, "columns"),
        (offset, "begin at 0"),
        (width, "not one of the widths"),
        (missing, "q_scale missing"),
        (bias, "does not expect"),
        (infinite, "finite"),
        (wide_norm, "expected float16"),
        (stray, "no matrix of this model"),
        (short, "q_scale_max: expected shape"),
    ],
)
def test_each_violation_is_named(
    fixtures_dir: Path, tmp_path: Path, damage: Callable[[dict[str, Tensor]], None], words: str
) -> None:
    source = fixtures_dir / "tiny-lm-exl2-4.0bpw"
    shutil.copyfile(source / "config.json", tmp_path / "config.json")
    tensors = load_file(source / "output.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "output.safetensors")
    assert any(words in complaint for complaint in validate_exl2(tmp_path))
