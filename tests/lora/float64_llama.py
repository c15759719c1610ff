"""A reference Llama in float64 with adapters merged into its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.lora.peft_folders import Adapter


def logits(folder: Path, ids: Tensor, *adapters: tuple[Adapter, float]) -> Tensor:
    """The logits (rows, n, vocab) of ids (rows, n), each adapter with its strength."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    weights = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    for adapter, strength in adapters:
        for module, (down, up, factor) in adapter.pairs.items():
            weights[module + ".weight"] += up.double() @ down.double() * factor * strength
    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        layer_weights = {name.removeprefix(start): w for name, w in weights.items() if name.startswith(start)}
        x = x + attention(norm(x, layer_weights["input_layernorm.weight"], config), layer_weights, config)
        h = norm(x, layer_weights["post_attention_layernorm.weight"], config)
        gate, up = (h @ layer_weights[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ layer_weights["mlp.down_proj.weight"].T
    return norm(x, weights["model.norm.weight"], config) @ weights["lm_head.weight"].T


def norm(x: Tensor, scale: Tensor, config: dict[str, Any]) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt() * scale


def attention(x: Tensor, weights: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config["hidden_size"] // heads
    q, k, v = (
        (x @ weights[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, size)).transpose(1, 2) for name in "qkv"
    )
    q, k = apply_rope(q), apply_rope(k)
    k, v = (part.repeat_interleave(heads // kv_heads, 1) for part in (k, v))
    future = torch.full((x.shape[1], x.shape[1]), -torch.inf, dtype=x.dtype).triu(1)
    attended = (q @ k.transpose(-1, -2) * size**-0.5 + future).softmax(-1) @ v
    return attended.transpose(1, 2).flatten(2) @ weights["self_attn.o_proj.weight"].T


def apply_rope(x: Tensor) -> Tensor:
    """RoPE with angles computed in float32, as checkpoints were trained."""
    half = x.shape[-1] // 2
    steps = 1.0 / 10000.0 ** (torch.arange(half).float() / half)
    angles = torch.outer(torch.arange(x.shape[-2]).float(), steps).double().repeat(1, 2)
    return x * angles.cos() + torch.cat((-x[..., half:], x[..., :half]), -1) * angles.sin()
