"""What stands in for the paths that docs and examples use: small real models, and an adapter made here."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 4


def path_substitutions(fixtures: Path, scratch: Path) -> dict[str, Path]:
    """Each path as the pages write it, and a path that is there."""
    return {
        "/path/to/model": fixtures / "tiny-lm",
        "/path/to/draft": fixtures / "tiny-lm-gptq-g128-sym",
        "/path/to/hybrid": fixtures / "tiny-qwen3_5",
        "/path/to/lora": write_random_lora(fixtures / "tiny-lm", scratch / "lora", 1),
        "/path/to/other_lora": write_random_lora(fixtures / "tiny-lm", scratch / "other_lora", 2),
    }


def write_random_lora(model: Path, folder: Path, seed: int) -> Path:
    """A PEFT folder of random numbers, large enough to change what a model says."""
    config = json.loads((model / "config.json").read_text())
    hidden, heads, head = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    widths = {"q_proj": heads * head, "v_proj": config["num_key_value_heads"] * head}
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in widths.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(RANK, hidden, generator=draw) / hidden**0.5
            tensors[f"{at}.lora_B.weight"] = torch.randn(width, RANK, generator=draw)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": [*widths]}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder
