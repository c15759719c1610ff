"""Tiny models of every GGUF architecture: metadata, tensors by role, and the converted file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from exlm import spec
from exlm.families import ConfigReader, build_spec
from exlm.families.gguf import config_from_metadata
from exlm.spec.model import matrices
from tests.checkpoint.gguf_bytes import write_gguf

LAYER_TENSORS = {
    "attn.q": "attn_q",
    "attn.k": "attn_k",
    "attn.v": "attn_v",
    "attn.o": "attn_output",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "attn_norm": "attn_norm",
    "attn_post": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_post": "post_ffw_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
    "mlp.router": "ffn_gate_inp",
}
MODEL_TENSORS = {"embed": "token_embd", "final_norm": "output_norm", "head": "output"}

COMMON: dict[str, Any] = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope.dimension_count": 16}),
    "mixtral": ("llama", {"expert_count": 3, "expert_used_count": 2}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"attention.key_length": 24, "attention.value_length": 24}),
    "qwen3moe": ("qwen3moe", {"expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 32}),
    "gemma": ("gemma", {"attention.key_length": 24, "attention.value_length": 24}),
    "gemma2": ("gemma2", {"attention.sliding_window": 32}),
    "gemma3": ("gemma3", {"attention.sliding_window": 32}),
    "phi3": ("phi3", {"rope.dimension_count": 16}),
}


def metadata(variant: str, vocab: int = 64) -> dict[str, Any]:
    """The metadata of a tiny model."""
    arch, more = VARIANTS[variant]
    own = {f"{arch}.{key}": value for key, value in (COMMON | more).items()}
    return {"general.architecture": arch, **own, "tokenizer.ggml.tokens": [f"t{n}" for n in range(vocab)]}


def model_spec(variant: str) -> spec.Model:
    """The model that this metadata describes."""
    return build_spec(ConfigReader(config_from_metadata(metadata(variant), "tiny.gguf"), "tiny.gguf"))


def random_tensors(model: spec.Model) -> dict[str, Tensor]:
    """Random numbers for every role: matrices (outputs, inputs), biases as `role:bias`, norms."""
    generator = torch.Generator().manual_seed(5)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    out = {"embed": rand(model.vocab, model.hidden), "final_norm": rand(model.hidden)}
    for role, inputs, outputs, bias in matrices(model):
        out[role] = rand(outputs, inputs)
        if bias:
            out[role + ":bias"] = rand(outputs)
    for i, layer in enumerate(model.layers):
        for name in ("attn_norm", "mlp_norm", "attn_post", "mlp_post"):
            if getattr(layer, name) is not None:
                out[f"layers.{i}.{name}"] = rand(model.hidden)
        if layer.attention is not None and layer.attention.qk_norm is not None:
            out |= {f"layers.{i}.attn.{part}_norm": rand(layer.attention.head_dim) for part in "qk"}
    return out


def converted_tensors(
    model: spec.Model, arch: str, roles: dict[str, Tensor], *, stack: bool = True
) -> dict[str, Tensor]:
    """The tensors as llama.cpp's converter lays them out."""
    out: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {}
    for role, tensor in roles.items():
        role, _, suffix = role.partition(":")
        suffix = suffix or "weight"
        if role in MODEL_TENSORS:
            name, part = MODEL_TENSORS[role], role
        else:
            _, layer, part = role.split(".", 2)
            if part.startswith("mlp.experts."):
                _, _, expert, part = part.split(".")
                if stack:
                    experts.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", []).append(tensor)
                else:
                    out[f"blk.{layer}.ffn_{part}.{expert}.weight"] = tensor
                continue
            name = f"blk.{layer}.{LAYER_TENSORS[part]}"
        if arch == "llama" and part in ("attn.q", "attn.k"):
            d = model.attentions[0].head_dim
            tensor = tensor.reshape(-1, 2, d // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        if arch.startswith("gemma") and "norm" in name:
            tensor = tensor + 1
        out[f"{name}.{suffix}"] = tensor
    out |= {name: torch.stack(parts) for name, parts in experts.items()}
    return fuse_projections(out, model) if arch == "phi3" else out


def fuse_projections(tensors: dict[str, Tensor], model: spec.Model) -> dict[str, Tensor]:
    """Phi-3 keeps q, k, v in one tensor and gate, up in another."""
    for i in range(len(model.layers)):
        at = f"blk.{i}."
        tensors[at + "attn_qkv.weight"] = torch.cat([tensors.pop(f"{at}attn_{part}.weight") for part in "qkv"])
        tensors[at + "ffn_up.weight"] = torch.cat([tensors.pop(at + "ffn_gate.weight"), tensors[at + "ffn_up.weight"]])
    return tensors


def write_model(
    path: Path, variant: str, *, kind: str | None = None, stack: bool = True, leave_out: tuple[str, ...] = ()
) -> tuple[spec.Model, dict[str, Tensor]]:
    """A file of a tiny model, and the tensors it holds by role; matrices quantised if `kind` says how."""
    model, (arch, _) = model_spec(variant), VARIANTS[variant]
    roles = random_tensors(model)
    tensors = converted_tensors(model, arch, roles, stack=stack)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in leave_out}
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    kinds = {}
    for name, tensor in tensors.items():
        arrays[name] = np.ascontiguousarray(tensor.numpy())
        if kind is not None and tensor.dim() == 2:
            kinds[name] = gguf.GGMLQuantizationType[kind]
            arrays[name] = gguf.quants.quantize(arrays[name], kinds[name])
    values = {key: value for key, value in metadata(variant).items() if key != "general.architecture"}
    write_gguf(path, arch, arrays, values, kinds)
    return model, roles
