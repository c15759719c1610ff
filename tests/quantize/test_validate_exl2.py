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


def ascending_widths(t: dict[str, Tensor]) -> None:
    groups = t[Q + "q_groups"].view(-1, 2)
    groups[:, 0] = groups[:, 0].flip(0)


def duplicate_index(t: dict[str, Tensor]) -> None:
    t[Q + "q_invperm"][0] = t[Q + "q_invperm"][1]


def missing_columns(t: dict[str, Tensor]) -> None:
    t[Q + "q_weight"] = t[Q + "q_weight"][:, :-8].contiguous()


def late_first_group(t: dict[str, Tensor]) -> None:
    t[Q + "q_groups"][1] = 3


def unknown_width(t: dict[str, Tensor]) -> None:
    t[Q + "q_groups"][0] = 7


def no_scales(t: dict[str, Tensor]) -> None:
    del t[Q + "q_scale"]


def extra_bias(t: dict[str, Tensor]) -> None:
    t[Q + "bias"] = torch.zeros(256).half()


def infinite_maximum(t: dict[str, Tensor]) -> None:
    t[Q + "q_scale_max"][0] = torch.inf


def float32_norm(t: dict[str, Tensor]) -> None:
    t["model.norm.weight"] = t["model.norm.weight"].float()


def unknown_matrix(t: dict[str, Tensor]) -> None:
    t["model.layers.0.self_attn.qkv_proj.q_weight"] = torch.zeros(1, 32, dtype=torch.int32)


def missing_maximum(t: dict[str, Tensor]) -> None:
    t[Q + "q_scale_max"] = t[Q + "q_scale_max"][:-1].contiguous()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (ascending_widths, "descend"),
        (duplicate_index, "q_invperm"),
        (missing_columns, "columns"),
        (late_first_group, "begin at 0"),
        (unknown_width, "not one of the widths"),
        (no_scales, "q_scale missing"),
        (extra_bias, "does not expect"),
        (infinite_maximum, "finite"),
        (float32_norm, "expected float16"),
        (unknown_matrix, "no matrix of this model"),
        (missing_maximum, "q_scale_max: expected shape"),
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
