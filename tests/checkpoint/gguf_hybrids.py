"""Tiny hybrid models as GGUF files, laid out as llama.cpp's converter lays them out.

Tensor names and the names of metadata are those of the gguf package; what the converter changes in a tensor is
written down here, family by family.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.models.zoo import Oracle
from tests.models.zoo_spelling import KIMI_KEYS

Tensors = dict[str, Tensor]
Config = dict[str, Any]

IGNORED = ("visual.", "vision_", "mtp.")


NO_LIMIT = {"time_step_limit": [0.0, float("inf")]}  # GGUF has no key for it
NEMOTRON = {"time_step_min": 0.001}
SHORT = ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"]
EXPERTS = ["linear_attention", "moe", "full_attention", "moe"]
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3next": ("qwen3next", "Qwen3NextForCausalLM", {}),
    "qwen35": ("qwen35", "Qwen3_5ForCausalLM", {}),
    "qwen35-vl": ("qwen35", "Qwen3_5ForConditionalGeneration", {}),
    "qwen35moe": ("qwen35moe", "Qwen3_5MoeForCausalLM", {}),
    "nemotron_h": ("nemotron_h", "NemotronHForCausalLM", {**NEMOTRON, "layers_block_type": SHORT}),
    "nemotron_h_moe": ("nemotron_h_moe", "NemotronHForCausalLM", {**NEMOTRON, "layers_block_type": EXPERTS}),
    "nemotron_h_moe-latent": (
        "nemotron_h_moe",
        "NemotronHForCausalLM",
        {**NEMOTRON, "layers_block_type": EXPERTS, "moe_latent_size": 32, "n_group": 1},
    ),
    "granitehybrid": ("granitehybrid", "GraniteMoeHybridForCausalLM", NO_LIMIT),
    "granitehybrid-dense": (
        "granitehybrid",
        "GraniteMoeHybridForCausalLM",
        {**NO_LIMIT, "num_local_experts": 0, "position_embedding_type": "rope", "mamba_proj_bias": True},
    ),
    "falcon-h1": ("falcon-h1", "FalconH1ForCausalLM", NO_LIMIT),
    "falcon-h1-gated": ("falcon-h1", "FalconH1ForCausalLM", {**NO_LIMIT, "mamba_rms_norm": False}),
    "lfm2": ("lfm2", "Lfm2ForCausalLM", {}),
    "lfm2moe": ("lfm2moe", "Lfm2MoeForCausalLM", {"routed_scaling_factor": 1.0}),
    "kimi-linear": ("kimi-linear", "KimiLinearForCausalLM", {"linear_num_heads": 4}),
    "kimi-linear-low-rank-q": (
        "kimi-linear",
        "KimiLinearForCausalLM",
        {"linear_num_heads": 4, "q_lora_rank": 20, "n_group": 1},
    ),
}
"""The architecture in GGUF, that of the folder, and its config."""


def write(oracle: Oracle, path: Path, arch: str, *, kind: str | None = None, draft_layers: int = 0) -> Path:
    """The oracle's folder as a GGUF file; `kind` is the type of its matrices, float32 by default.

    `draft_layers` are layers for multi-token prediction, with made-up tensors.
    """
    top = oracle.config()
    config: Config = {**top, **top.get("text_config", {})}
    config |= {name: config[own] for name, own in KIMI_KEYS.items() if own in config}
    tensors = {
        name.replace("model.language_model.", "model."): tensor
        for name, tensor in load_file(oracle.folder / "model.safetensors").items()
        if not any(part in name for part in IGNORED)
    }
    depth = len(config["layers_block_type"]) if arch.startswith("nemotron") else config["num_hidden_layers"]
    writer = gguf.GGUFWriter(path, arch)
    _common_keys(writer, config, depth + draft_layers)
    if draft_layers:
        writer.add_nextn_predict_layers(draft_layers)
    writer.add_array("tokenizer.ggml.tokens", [f"t{n}" for n in range(config["vocab_size"])])
    CONVERTERS[arch](writer, config, tensors)
    number = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, depth)
    for name, tensor in stacked_experts(tensors).items():
        stored = name
        if not name.startswith("blk."):
            stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert stored is not None, name
        add_tensor(writer, stored, tensor.float().numpy(), kind)
    for layer in range(depth, depth + draft_layers):
        add_tensor(writer, f"blk.{layer}.attn_norm.weight", np.ones(config["hidden_size"], np.float32), None)
        add_tensor(writer, f"blk.{layer}.nextn.eh_proj.weight", np.ones((64, 128), np.float32), None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray[Any, Any], kind: str | None) -> None:
    """Vectors, convolutions and routers stay floats, as in the converter."""
    values = np.ascontiguousarray(values)
    whole = any(part in name for part in ("conv", "norm", "ffn_gate_inp", "ssm_a", "ssm_d", "attn_k_b"))
    if kind is None or values.ndim < 2 or whole or values.shape[-1] % 32:
        writer.add_tensor(name, values)
        return
    quantised = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quants.quantize(values, quantised), raw_dtype=quantised)


def _common_keys(writer: gguf.GGUFWriter, config: Config, blocks: int) -> None:
    writer.add_block_count(blocks)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    eps = config.get("rms_norm_eps") or config.get("norm_eps")
    if eps is not None:
        writer.add_layer_norm_rms_eps(eps)
    if "layer_norm_epsilon" in config:
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    if config.get("rope_parameters"):
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    for keys, add in (
        (("num_local_experts", "num_experts", "n_routed_experts"), writer.add_expert_count),
        (("num_experts_per_tok",), writer.add_expert_used_count),
        (("n_group",), writer.add_expert_group_count),
        (("topk_group",), writer.add_expert_group_used_count),
    ):
        if (found := next((config[key] for key in keys if config.get(key)), None)) is not None:
            add(found)


def _heads(writer: gguf.GGUFWriter, config: Config, kinds: list[str] | None = None) -> None:
    """Key/value heads, 0 in layers of other kinds than attention; the width of heads."""
    heads = config["num_key_value_heads"]
    writer.add_head_count_kv(heads if kinds is None else [heads if kind == "full_attention" else 0 for kind in kinds])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])


def stacked_experts(tensors: Tensors) -> Tensors:
    """One tensor for all experts of a layer, in place of one for each."""
    found: Tensors = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.+\.experts)\.(\d+)\.(.+)", name):
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
        else:
            found[name] = tensor
    stacks = {name: torch.stack([parts[e] for e in sorted(parts)]) for name, parts in experts.items()}
    # Nemotron-H's and Kimi's stacks have names that only the converter uses.
    own = ((r"backbone(\.layers\.\d+)\.mixer\.experts", r"model\1.mlp.experts"),)
    for pattern, name in own:
        stacks = {re.sub(pattern, name, key): tensor for key, tensor in stacks.items()}
    return found | stacks


def swapped(tensor: Tensor, key_heads: int, share: int, width: int) -> Tensor:
    """Value heads in the converter's order: the first of every key head, then the second."""
    return tensor.view(key_heads, share, width, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)


def rename(tensors: Tensors, old: str, new: str) -> None:
    """Another end of the names that have this one."""
    for name in [one for one in tensors if one.endswith(old)]:
        tensors[name.removesuffix(old) + new] = tensors.pop(name)


def change(tensors: Tensors, end: str, how: Callable[[Tensor], Tensor]) -> None:
    """Change the tensors whose names have this end."""
    for name in tensors:
        if name.endswith(end):
            tensors[name] = how(tensors[name])


def _delta(writer: gguf.GGUFWriter, config: Config, tensors: Tensors) -> None:
    """What Qwen3-Next and Qwen 3.5 have in common."""
    _heads(writer, config)
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    rope = config["rope_parameters"]
    writer.add_rope_dimension_count(int(config["head_dim"] * rope["partial_rotary_factor"]))
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    change(tensors, ".A_log", lambda x: -x.exp())
    rename(tensors, ".dt_bias", ".dt_proj.bias")
    change(tensors, ".conv1d.weight", torch.squeeze)
    for name in tensors:
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            tensors[name] = tensors[name] + 1


def qwen3next(writer: gguf.GGUFWriter, config: Config, tensors: Tensors) -> None:
    """q, k, v and z head by head become one matrix of q, k, v and one of z."""
    _delta(writer, config, tensors)
    heads, k = config["linear_num_key_heads"], config["linear_key_head_dim"]
    v = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    for name in [one for one in tensors if one.endswith("in_proj_qkvz.weight")]:
        layer = name.split(".")[2]
        parts = tensors.pop(name).view(heads, 2 * k + 2 * v, -1).split([k, k, v, v], 1)
        q, keys, values, z = (part.reshape(-1, part.shape[-1]) for part in parts)
        tensors[f"blk.{layer}.attn_qkv.weight"] = torch.cat((q, keys, values))
        tensors[f"blk.{layer}.attn_gate.weight"] = z


def qwen35(writer: gguf.GGUFWriter, config: Config, tensors: Tensors) -> None:
    """The value heads are reordered, M-RoPE's sections padded to four."""
    _delta(writer, config, tensors)
    sections = config["rope_parameters"].get("mrope_section", [11, 11, 10])
    writer.add_rope_dimension_sections([*sections, 0])
    heads, width = config["linear_num_key_heads"], config["linear_value_head_dim"]
    share, first = config["linear_num_value_heads"] // heads, 2 * heads * config["linear_key_head_dim"]

    def values(x: Tensor) -> Tensor:
        return torch.cat((x[:first], swapped(x[first:], heads, share, width)))

    for end in ("in_proj_qkv.weight", "conv1d.weight"):
        change(tensors, end, values)
    change(tensors, "in_proj_z.weight", lambda x: swapped(x, heads, share, width))
    for end in ("in_proj_a.weight", "in_proj_b.weight", ".A_log", ".dt_proj.bias"):
        change(tensors, end, lambda x: swapped(x, heads, share, 1))
    change(tensors, "linear_attn.out_proj.weight", lambda x: swapped(x.T, heads, share, width).T)


def _mamba(writer: gguf.GGUFWriter, tensors: Tensors, heads: int, width: int, sizes: tuple[int, int, int]) -> None:
    kernel, state, groups = sizes
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_inner_size(width)
    writer.add_ssm_time_step_rank(heads)
    change(tensors, ".A_log", lambda x: -x.exp().reshape(-1, 1))
    change(tensors, ".D", lambda x: x.reshape(-1, 1))
    change(tensors, ".conv1d.weight", torch.squeeze)
    for end in ("mixer.norm.weight", "mamba.norm.weight"):
        change(tensors, end, lambda x: x.reshape(groups, -1))
    rename(tensors, ".dt_bias", ".dt_proj.bias")


def interleaved_rope(config: Config, tensors: Tensors) -> None:
    """Rows of q and k for rotary pairs side by side, as in Llama."""
    d = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for end in ("q_proj.weight", "k_proj.weight"):
        change(tensors, end, lambda x: x.view(-1, 2, d // 2, x.shape[1]).transpose(1, 2).reshape(x.shape))


def nemotron_h(writer: gguf.GGUFWriter, config: Config, tensors: Tensors) -> None:
    """The lists of kv heads and MLP widths say what each layer is."""
    kinds, is_moe = config["layers_block_type"], "moe" in config["layers_block_type"]
    _heads(writer, config, kinds)
    widths = {"mlp": config["intermediate_size"], "moe": config["moe_intermediate_size"]}
    writer.add_feed_forward_length([widths.get(kind, 0) for kind in kinds])
    sizes = config["conv_kernel"], config["ssm_state_size"], config["n_groups"]
    _mamba(writer, tensors, config["mamba_num_heads"], config["mamba_num_heads"] * config["mamba_head_dim"], sizes)
    interleaved_rope(config, tensors)
    if is_moe:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        if config.get("moe_latent_size"):
            writer.add_moe_latent_size(config["moe_latent_size"])
        rename(tensors, ".e_score_correction_bias", ".e_score_correction.bias")
        rename(tensors, ".dt_proj.bias", ".dt.bias")


def _kinds(config: Config) -> list[str]:
    kinds: list[str] = config["layer_types"]
    return kinds


def granitehybrid(writer: gguf.GGUFWriter, config: Config, tensors: Tensors) -> None:
    """Gate and up are cut apart; RoPE's key says whether there is any."""
    _heads(writer, config, _kinds(config))
    heads = config["mamba_n_heads"]
    sizes = config["mamba_d_conv"], config["mamba_d_state"], config["mamba_n_groups"]
    _mamba(writer, tensors, heads, config["mamba_expand"] * config["hidden_size"], sizes)
    interleaved_rope(config, tensors)
    has_rope = config["position_embedding_type"] == "rope"
    writer.add_rope_scaling_finetuned(has_rope)
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    is_moe = config["num_local_experts"] > 0
    if not is_moe:
        writer.add_feed_forward_length(config["shared_intermediate_size"])
    for name in list(tensors):
        layer = name.split(".")[2] if ".layers." in name else ""
        if name.endswith("shared_mlp.input_linear.weight"):
            for part, half in zip(("gate", "up"), tensors.pop(name).chunk(2), strict=True):
                tensors[f"blk.{layer}.ffn_{part}{'_shexp' * is_moe}.weight"] = half
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            for part, half in zip(("gate", "up"), tensors.pop(name).chunk(2, 1), strict=True):
                tensors[f"blk.{layer}.ffn_{part}_exps.weight"] = half
        elif name.endswith("shared_mlp.output_linear.weight") and not is_moe:
            tensors[f"blk.{layer}.ffn_down.weight"] = tensors.pop(name)


def falcon_h1(writer: gguf.GGUFWriter, config: Config, tensors: Tensors) -> None:
    """The matrices are multiplied by the multipliers."""
    _heads(writer, config)
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    width, groups, state = config["mamba_d_ssm"], config["mamba_n_groups"], config["mamba_d_state"]
    _mamba(writer, tensors, config["mamba_n_heads"], width, (config["mamba_d_conv"], state, groups))
    gate, down = config["mlp_multipliers"]
    before, after = config["attention_in_multiplier"], config["attention_out_multiplier"]
    parts = [width, width, groups * state, groups * state, config["mamba_n_heads"]]
    by_row = torch.cat([torch.full((n,), m) for n, m in zip(parts, config["ssm_multipliers"], strict=True)])
    factors: dict[str, float | Tensor] = {
        "down_proj.weight": down,
        "gate_proj.weight": gate,
        "k_proj.weight": config["key_multiplier"] * before,
        "q_proj.weight": before,
        "v_proj.weight": before,
        "o_proj.weight": after,
        "mamba.out_proj.weight": config["ssm_out_multiplier"],
        "mamba.in_proj.weight": config["ssm_in_multiplier"] * by_row[:, None],
        "lm_head.weight": config["lm_head_multiplier"],
        "embed_tokens.weight": config["embedding_multiplier"],
    }
    for end, factor in factors.items():
        change(tensors, end, lambda x, f=factor: x * f)  # type: ignore[misc]


def lfm2(writer: gguf.GGUFWriter, config: Config, tensors: Tensors) -> None:
    """The final norm is called a norm of the embedding."""
    _heads(writer, config, _kinds(config))
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    change(tensors, "conv.conv.weight", lambda x: x.squeeze(1))
    if "num_experts" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        rename(tensors, ".expert_bias", ".expert_bias.bias")
        for name in list(tensors):
            if match := re.fullmatch(r"model\.(layers\.\d+\.feed_forward\.experts\.\d+\.w\d\.weight)", name):
                tensors[match[1]] = tensors.pop(name)
    else:
        width = tensors["model.layers.0.feed_forward.w1.weight"].shape[0]
        writer.add_feed_forward_length(width)


def kimi_linear(writer: gguf.GGUFWriter, config: Config, tensors: Tensors) -> None:
    """kv_b is cut in two, its key part transposed; heads count as one for the latent."""
    writer.add_head_count_kv([int(kind == "full_attention") for kind in _kinds(config)])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_kda_head_dim(config["linear_head_dim"])
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    nope, shared, width = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_rope_dimension_count(shared)
    writer.add_key_length(rank + shared)
    writer.add_key_length_mla(nope + shared)
    writer.add_value_length_mla(width)
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    for part in "qkv":
        change(tensors, f".{part}_conv1d.weight", lambda x: x.reshape(1, x.shape[0], 1, x.shape[-1]))
    change(tensors, ".A_log", lambda x: -x.exp())
    rename(tensors, ".dt_bias", ".dt_proj.bias")
    rename(tensors, ".e_score_correction_bias", ".e_score_correction.bias")
    for name in [one for one in tensors if one.endswith("kv_b_proj.weight")]:
        k, v = tensors.pop(name).view(heads, nope + width, rank).split([nope, width], 1)
        tensors[name.replace("kv_b_proj", "k_b_proj")] = k.transpose(1, 2)
        tensors[name.replace("kv_b_proj", "v_b_proj")] = v


CONVERTERS: dict[str, Callable[[gguf.GGUFWriter, Config, Tensors], None]] = {
    "falcon-h1": falcon_h1,
    "granitehybrid": granitehybrid,
    "kimi-linear": kimi_linear,
    "lfm2": lfm2,
    "lfm2moe": lfm2,
    "nemotron_h": nemotron_h,
    "nemotron_h_moe": nemotron_h,
    "qwen35": qwen35,
    "qwen35moe": qwen35,
    "qwen3next": qwen3next,
}
