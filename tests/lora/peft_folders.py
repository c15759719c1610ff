"""PEFT folders with random weights, and the oracle: the adapters merged into a model's own files."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PREFIX = "base_model.model."


@dataclass
class Adapter:
    """An adapter's folder, and by module its matrices A and B and the scaling of their product."""

    folder: Path
    pairs: dict[str, tuple[Tensor, Tensor, float]] = field(default_factory=dict)


def matrix_shapes(folder: Path, transposed: bool = False) -> dict[str, tuple[int, int]]:
    """The (in, out) shape of every matrix in a model folder but embeddings and norms, by module name."""
    out = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        excluded = any(word in name for word in ("embed", "norm", "wte", "wpe", "ln_", "vis", "experts.mlp"))
        if tensor.dim() == 2 and name.endswith(".weight") and not excluded:
            shape = tuple(tensor.shape)
            head = name.startswith("lm_head")
            out[name.removesuffix(".weight")] = shape if transposed and not head else shape[::-1]
    return out


def write_adapter(
    folder: Path,
    shapes: dict[str, tuple[int, int]],
    *,
    embedding: tuple[str, int, int] | None = None,
    ranks: dict[str, int] | None = None,
    factor: Any = None,
    seed: int = 0,
    size: float = 0.3,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Adapter:
    """An adapter for these modules; `factor(module, rank)` is the scaling its configuration amounts to."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", **config}
    rng = torch.Generator().manual_seed(seed)
    adapter, stored = Adapter(folder), {}

    def pair(module: str, inputs: int, outputs: int, a: str, b: str) -> None:
        rank = (ranks or {}).get(module, settings["r"])
        down = (torch.randn(rank, inputs, generator=rng) * inputs**-0.5).to(dtype)
        up = (torch.randn(outputs, rank, generator=rng) * size * rank**-0.5 / 2).to(dtype)
        stored[f"{PREFIX}{module}.{a}"], stored[f"{PREFIX}{module}.{b}"] = down, up
        scale = factor(module, rank) if factor else settings["lora_alpha"] / rank
        adapter.pairs[module] = (down.float(), up.float(), scale)

    for module, (inputs, outputs) in shapes.items():
        pair(module, inputs, outputs, "lora_A.weight", "lora_B.weight")
    if embedding:
        pair(*embedding, "lora_embedding_A", "lora_embedding_B")
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(stored, folder / "adapter_model.safetensors")
    return adapter


def merge_into_model(model: Path, target: Path, *adapters: tuple[Adapter, float], transposed: bool = False) -> Path:
    """A copy of a model's folder with (adapter, strength) pairs added to its weights.

    Embeddings, and with `transposed` all matrices but the head, are stored transposed.
    """
    shutil.copytree(model, target)
    tensors = load_file(target / "model.safetensors")
    for adapter, strength in adapters:
        for module, (a, b, factor) in adapter.pairs.items():
            key = module + ".weight"
            if key not in tensors:  # a tied head gets weights of its own
                assert module == "lm_head"
                embedding_key = next(key for key in tensors if "embed_tokens" in key or "wte" in key)
                tensors[key] = tensors[embedding_key].clone()
            change = (b @ a) * factor * strength
            is_transposed = "embed" in key or "wte" in key or (transposed and module != "lm_head")
            tensors[key] = tensors[key] + (change.T if is_transposed else change)
    save_file(tensors, target / "model.safetensors")
    return target
