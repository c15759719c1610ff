"""What a job refuses before it has worked for hours, and models that look broken but are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from exlm import Config, InputError, Model, quantize_model
from tests import tiny

SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
FEW: dict[str, Any] = {"rows": 6, "length": 64, "report": False}


def test_weights_that_are_not_finite_are_told(tmp_path: Path) -> None:
    folder = tiny.chatty(tmp_path / "nan", **SHAPE)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match="NaN or infinity as it writes text to calibrate with"):
        quantize_model(folder, tmp_path / "out", 5.0, **FEW)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["exl2", "gptq"])
def test_a_layer_that_is_switched_off(tmp_path: Path, method: Any) -> None:
    """Values of zeros: what o reads is zero on every token, and its covariance singular."""
    folder = tiny.chatty(tmp_path / "off", **SHAPE)
    tensors = load_file(folder / "model.safetensors")
    for part in ("self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        tensors[f"model.layers.1.{part}.weight"].zero_()
    save_file(tensors, folder / "model.safetensors")
    quantize_model(folder, tmp_path / "out", method=method, **FEW)
    model = Model(Config(tmp_path / "out"))
    model.load()
    assert bool(model.forward(torch.tensor([[3, 4, 5]])).isfinite().all())
