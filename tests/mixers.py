"""A tiny model with a layer of every mixer and MLP, by a description of its own, and its folder of random weights.

No published family has them all. Some matrices are stored only as rows of a fused tensor, as DeepSeek stores keys and
values (kv_b_proj), and the convolution of the delta net in three parts, as Kimi Linear does.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from exlm import spec
from exlm.spec.model import matrices
from exlm.spec.tensor_names import LAYER_PREFIX, TensorLocation, TensorNames
from tests import tiny

ARCHITECTURE = "EveryMixerForCausalLM"
HIDDEN, VOCAB = 64, 259  # as many tokens as `tiny.make_chat_folder` has

NORM = spec.Norm()
ROPE = spec.Rope(1e4, 16)
ATTENTION = spec.Attention(4, 2, 16, ROPE, 0.25)
DELTA = spec.DeltaNet(2, 4, 32, 16, 4, 1e-6, decay="channel", gate_act="sigmoid", gate_rank=32)
LATENT = spec.LatentAttention(4, 16, 16, 24, kv_rank=64, q_rank=32, rope=None, scale=32**-0.5, norm_eps=1e-6)
MAMBA = spec.Mamba2(8, 8, 2, 16, 4, NORM, norm_groups=2)
CONV = spec.ShortConv(HIDDEN, 3)
MLP = spec.Mlp(96)
PLAIN = spec.Mlp(96, "relu2", gated=False)
MOE = spec.Moe(32, 4, 2, "relu2", gated=False, routing="sigmoid", selection_bias=True, weight_scale=2.0, shared=PLAIN)
GATED_MOE = spec.Moe(32, 4, 2, shared=MLP, shared_gated=True)

LAYERS = (
    spec.Layer(DELTA, MLP, NORM, NORM),
    spec.Layer(LATENT, MOE, NORM, NORM),
    spec.Layer(spec.ParallelMixers(ATTENTION, MAMBA, 0.9, 1.1, 0.8), MLP, NORM, NORM),
    spec.Layer(CONV, GATED_MOE, NORM, NORM),
    spec.Layer(MAMBA, None, NORM, None),
    spec.Layer(None, PLAIN, None, NORM),
    spec.Layer(spec.Attention(4, 2, 16, ROPE, 0.25, gated=True), MLP, NORM, NORM),
)


def _at(key: str, **options: bool) -> TensorLocation:
    return TensorLocation(LAYER_PREFIX + key, **options)


def _names() -> TensorNames:
    """Every role that Llama lacks; keys of the latent attention fused by head."""
    heads, own, value = LATENT.heads, LATENT.nope_dim, LATENT.value_dim
    starts = [head * (own + value) for head in range(heads)]
    kv = LAYER_PREFIX + "self_attn.kv_b_proj"
    plain = {
        "attn__gate": "self_attn.gate_proj",
        "attn__q_down": "self_attn.q_a_proj",
        "attn__q_up": "self_attn.q_b_proj",
        "attn__q_latent_norm": "self_attn.q_a_layernorm",
        "attn__kv_down": "self_attn.kv_a_proj_with_mqa",
        "attn__kv_latent_norm": "self_attn.kv_a_layernorm",
        **{f"delta__{part}": f"delta.{part}_proj" for part in ("q", "k", "v", "b", "o")},
        **{f"delta__{part}": f"delta.{part}" for part in ("z_down", "z_up", "a_down", "a_up", "norm")},
        **{f"delta__{part}_conv": f"delta.{part}_conv1d" for part in "qkv"},
        "delta__conv": "delta.conv1d",
        **{f"mamba__{part}": f"mamba.{part}_proj" for part in ("in", "out")},
        "mamba__conv": "mamba.conv1d",
        "mamba__norm": "mamba.norm",
        **{f"conv__{part}": f"conv.{part}_proj" for part in ("in", "out")},
        "conv__conv": "conv.conv",
        "mlp__router": "mlp.gate",
        "mlp__shared_gate": "mlp.shared_expert_gate",
        **{f"mlp__shared__{part}": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
        **{f"mlp__experts__{part}": f"mlp.experts.{{e}}.{part}_proj" for part in ("gate", "up", "down")},
    }
    bare = {
        **{f"delta__{name}": f"delta.{name}" for name in ("a_log", "dt_bias")},
        **{f"mamba__{name}": f"mamba.{name}" for name in ("a_log", "dt_bias", "d")},
        "mlp__selection_bias": "mlp.gate.e_score_correction_bias",
    }
    return TensorNames().with_locations(
        attn__k_up=TensorLocation(kv, rows=tuple((start, start + own) for start in starts)),
        attn__v_up=TensorLocation(kv, rows=tuple((start + own, start + own + value) for start in starts)),
        **{role: _at(key) for role, key in plain.items()},
        **{role: _at(key, without_suffix=True) for role, key in bare.items()},
    )


MODEL = spec.Model(ARCHITECTURE, VOCAB, HIDDEN, LAYERS, NORM, 512, names=_names())


def parameters() -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that is no matrix, by the key of the file."""
    delta, mamba, width = DELTA, MAMBA, HIDDEN
    found: dict[str, tuple[int, ...]] = {"model.norm.weight": (width,), "model.embed_tokens.weight": (VOCAB, width)}
    for i, layer in enumerate(LAYERS):
        at = f"model.layers.{i}."
        found |= {at + "input_layernorm.weight": (width,)} if layer.attn_norm else {}
        found |= {at + "post_attention_layernorm.weight": (width,)} if layer.mlp_norm else {}
        if isinstance(layer.mixer, spec.DeltaNet):
            widths = {"q": delta.key_width, "k": delta.key_width, "v": delta.value_width}
            found |= {f"{at}delta.{part}_conv1d.weight": (n, 1, 4) for part, n in widths.items()}
            found |= {at + "delta.a_log": (4,), at + "delta.dt_bias": (delta.decay_width,)}
            found |= {at + "delta.norm.weight": (delta.value_dim,)}
        if isinstance(layer.mixer, spec.LatentAttention):
            found |= {at + "self_attn.q_a_layernorm.weight": (32,), at + "self_attn.kv_a_layernorm.weight": (64,)}
        if isinstance(layer.mixer, spec.Mamba2 | spec.ParallelMixers):
            channels = mamba.conv_channels
            found |= {at + "mamba.conv1d.weight": (channels, 1, 4), at + "mamba.conv1d.bias": (channels,)}
            found |= {at + f"mamba.{name}": (mamba.heads,) for name in ("a_log", "dt_bias", "d")}
            found |= {at + "mamba.norm.weight": (mamba.width,)}
        if isinstance(layer.mixer, spec.ShortConv):
            found |= {at + "conv.conv.weight": (width, 1, 3)}
        if isinstance(layer.mlp, spec.Moe) and layer.mlp.selection_bias:
            found |= {at + "mlp.gate.e_score_correction_bias": (4,)}
    return found


def tensors() -> dict[str, Tensor]:
    """Random weights, in the spelling of `MODEL.names`."""
    generator = torch.Generator().manual_seed(3)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    out: dict[str, Tensor] = {}
    for key, shape in parameters().items():
        scale, offset = (0.2, 1.0) if "norm" in key else (2.0, 0.0) if "embed" in key else (0.5, 0.0)
        out[key] = rand(*shape) * scale + offset
    for matrix in matrices(MODEL):
        location = MODEL.names.locations_of(matrix.role)[0]
        weight = rand(matrix.out_features, matrix.in_features) * matrix.in_features**-0.5
        if not location.rows:
            out[f"{location.key}.weight"] = weight
            continue
        fused = out.setdefault(f"{location.key}.weight", torch.zeros(4 * 40, matrix.in_features))
        fused[torch.cat([torch.arange(*span) for span in location.rows])] = weight
    return out


def make_folder(folder: Path) -> Path:
    """A model folder with a byte-level tokenizer; `ARCHITECTURE` must be among the families to load it."""
    tiny.make_chat_folder(folder)
    config = {"architectures": [ARCHITECTURE], "hidden_size": HIDDEN, "vocab_size": VOCAB}
    config |= {"num_hidden_layers": len(LAYERS), "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors(), folder / "model.safetensors")
    return folder
