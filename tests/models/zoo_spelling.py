"""config.json with the keys of transformers 5, and the same with the keys of earlier versions.

`old_spelling` converts new keys to old ones, as each family's published files have them: `rope_theta` and
`rope_scaling` for `rope_parameters`, `torch_dtype` for `dtype`, a pattern number for `layer_types`, and and
nothing where the family's default is meant. It converts in this direction only: a builder starts from the
new keys.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

Config = dict[str, Any]

TIED = {
    "CohereForCausalLM",
    "Cohere2ForCausalLM",
    "GPT2LMHeadModel",
    "GPTBigCodeForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "GemmaForCausalLM",
    "GemmoeForCausalLM",
    "MiniCPMForCausalLM",
    "SmolLM3ForCausalLM",
    "Starcoder2ForCausalLM",
}
"""Families with a tied head by default: their old files do not have the key."""

LISTED_LAYERS = {"GraniteMoeHybridForCausalLM", "Lfm2MoeForCausalLM", "OlmoHybridForCausalLM"}
"""Families whose old files list the layers' kinds."""

UNUSED_WINDOW = 40
"""Old Qwen files give a window and disable it."""

GEMMA3_DEFAULTS: Config = {
    "attn_logit_softcapping": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window_pattern": 6,
    "use_bidirectional_attention": False,
    "use_cache": True,
}
"""Keys that Google's Gemma 3 files leave out."""

SHORT_TYPE_KEY = {"linear", "dynamic", "yarn", "longrope", "mrope"}
"""RoPE scalings whose old files have `type`; later ones have `rope_type`."""


def old_spelling(config: Config) -> Config:
    """The same config with the old keys; does not change the argument."""
    result = copy.deepcopy(config)
    architecture = result["architectures"][0]
    text = result.get("text_config", result)
    if architecture in FAMILIES:
        FAMILIES[architecture](text, result)
    _rope(text)
    if architecture not in LISTED_LAYERS:
        text.pop("layer_types", None)
    if text.get("head_dim") and text["head_dim"] * text["num_attention_heads"] == text["hidden_size"]:
        del text["head_dim"]
    if architecture in TIED and result.get("tie_word_embeddings") is True:
        result.pop("tie_word_embeddings")
        text.pop("tie_word_embeddings", None)
    if "dtype" in result:
        result["torch_dtype"] = result.pop("dtype")
    result["transformers_version"] = "4.40.0"
    return result


def _rope(text: Config) -> None:
    """`rope_parameters` → `rope_theta`, `rope_scaling`, and partial factors."""
    parameters = text.pop("rope_parameters", None)
    if parameters is None:
        return
    text["rope_theta"] = parameters.pop("rope_theta")
    partial = parameters.pop("partial_rotary_factor", 1.0)
    if partial != 1.0:
        text["partial_rotary_factor"] = partial
    text["rope_scaling"] = _scaling(parameters)
    if "original_max_position_embeddings" in text and text["rope_scaling"]:
        text["rope_scaling"].pop("original_max_position_embeddings", None)


def _scaling(parameters: Config) -> Config | None:
    kind = parameters.pop("type", parameters["rope_type"])
    rest = {key: value for key, value in parameters.items() if key != "rope_type"}
    if kind == "default":
        return None
    return {"type" if kind in SHORT_TYPE_KEY else "rope_type": kind, **rest}


def _pattern(text: Config) -> int:
    """Every how many layers one has full attention."""
    types: list[str] = text["layer_types"]
    return types.index("full_attention") + 1


def _gemma(text: Config, _: Config) -> None:
    text["hidden_act"] = "gelu"


def _gemma3(text: Config, top: Config) -> None:
    text["sliding_window_pattern"] = _pattern(text)
    text.pop("_sliding_window_pattern", None)
    nested = text.pop("rope_parameters")
    text["rope_theta"] = nested["full_attention"].pop("rope_theta")
    text["rope_local_base_freq"] = nested["sliding_attention"]["rope_theta"]
    scaling = nested["full_attention"]
    text["rope_scaling"] = scaling if scaling["rope_type"] != "default" else None
    if text is not top:
        text.pop("tie_word_embeddings", None)
        for key, default in GEMMA3_DEFAULTS.items():
            if key in text and text[key] == default:
                del text[key]


def _cohere2(text: Config, _: Config) -> None:
    text["sliding_window_pattern"] = _pattern(text)


def _qwen(text: Config, _: Config) -> None:
    if not text["use_sliding_window"]:
        text["sliding_window"] = UNUSED_WINDOW


def _qwen3_moe(text: Config, top: Config) -> None:
    _qwen(text, top)
    text["num_experts"] = text.pop("num_local_experts")


def _qwen_vl(text: Config, top: Config) -> None:
    """Old files have no `text_config`: all keys are at the top."""
    _qwen(text, top)
    _rope(text)
    del top["text_config"]
    text.pop("layer_types")
    top.update({key: value for key, value in text.items() if key not in ("model_type", "dtype")})
    top["vision_config"]["model_type"] = top["model_type"]
    del top["vision_config"]["rope_parameters"]


def _dbrx(text: Config, _: Config) -> None:
    """RoPE's base is in `attn_config` only."""
    del text["rope_parameters"], text["num_key_value_heads"]
    keep: dict[str, tuple[str, ...]] = {
        "attn_config": ("clip_qkv", "kv_n_heads", "model_type", "rope_theta"),
        "ffn_config": ("ffn_hidden_size", "model_type", "moe_jitter_eps", "moe_num_experts", "moe_top_k"),
    }
    shares = "moe_normalize_expert_weights"
    if text["ffn_config"][shares] != 1:
        keep["ffn_config"] += (shares,)
    for part, keys in keep.items():
        text[part] = {key: text[part][key] for key in keys}


def _starcoder2(text: Config, _: Config) -> None:
    text["layer_norm_epsilon"] = text["norm_epsilon"]


def _bigcode(text: Config, _: Config) -> None:
    del text["num_key_value_heads"]


def _llava(text: Config, top: Config) -> None:
    """The language part has no key for tying; old Mistral 3 files have it nowhere."""
    text.pop("tie_word_embeddings", None)
    top.pop("tie_word_embeddings", None)
    _rope(top["vision_config"])
    top["vision_config"].pop("rope_scaling")


def _full_attention(text: Config) -> list[int]:
    return [i for i, kind in enumerate(text["layer_types"]) if kind == "full_attention"]


def _qwen_hybrid(text: Config, _: Config) -> None:
    text["full_attention_interval"] = _full_attention(text)[0] + 1
    if "mrope_section" in text["rope_parameters"]:
        table = text.pop("rope_parameters")
        text["rope_theta"], text["partial_rotary_factor"] = table.pop("rope_theta"), table.pop("partial_rotary_factor")
        text["rope_scaling"] = {**table, "mrope_interleaved": True}


def _nemotron_h(text: Config, _: Config) -> None:
    kinds = text.pop("layers_block_type")
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
    text["hybrid_override_pattern"] = "".join(letters[kind] for kind in kinds)
    text["num_hidden_layers"] = len(kinds)


def _granite_hybrid(text: Config, _: Config) -> None:
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    text["layer_types"] = [names[kind] for kind in text["layer_types"]]
    if text["position_embedding_type"] is None:
        text["position_embedding_type"] = "nope"


def _lfm2(text: Config, _: Config) -> None:
    text["full_attn_idxs"] = _full_attention(text)
    text["block_ff_dim"] = text.pop("intermediate_size")
    text["tie_embedding"] = text.pop("tie_word_embeddings")


def _kimi_linear(text: Config, _: Config) -> None:
    """The names of the published files, and the numbers of layers from 1."""
    full, dense = _full_attention(text), text.pop("mlp_layer_types").count("dense")
    text["linear_attn_config"] = {
        "full_attn_layers": [i + 1 for i in full],
        "kda_layers": [i + 1 for i in range(text["num_hidden_layers"]) if i not in full],
        "head_dim": text.pop("linear_head_dim"),
        "num_heads": text.pop("linear_num_heads"),
        "short_conv_kernel_size": text.pop("linear_conv_kernel_dim"),
    }
    text["first_k_dense_replace"] = dense
    for new, old in KIMI_KEYS.items():
        if new in text:
            text[old] = text.pop(new)


KIMI_KEYS = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}

FAMILIES: dict[str, Callable[[Config, Config], None]] = {
    "GraniteMoeHybridForCausalLM": _granite_hybrid,
    "KimiLinearForCausalLM": _kimi_linear,
    "Lfm2ForCausalLM": _lfm2,
    "NemotronHForCausalLM": _nemotron_h,
    "Qwen3NextForCausalLM": _qwen_hybrid,
    "Qwen3_5ForCausalLM": _qwen_hybrid,
    "Qwen3_5ForConditionalGeneration": _qwen_hybrid,
    "Qwen3_5MoeForCausalLM": _qwen_hybrid,
    "Qwen3_5MoeForConditionalGeneration": _qwen_hybrid,
    "Cohere2ForCausalLM": _cohere2,
    "DbrxForCausalLM": _dbrx,
    "GPTBigCodeForCausalLM": _bigcode,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3,
    "GemmaForCausalLM": _gemma,
    "GemmoeForCausalLM": _gemma,
    "LlavaForConditionalGeneration": _llava,
    "Mistral3ForConditionalGeneration": _llava,
    "Qwen2ForCausalLM": _qwen,
    "Qwen2VLForConditionalGeneration": _qwen_vl,
    "Qwen2_5_VLForConditionalGeneration": _qwen_vl,
    "Qwen3ForCausalLM": _qwen,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Starcoder2ForCausalLM": _starcoder2,
}
"""What a family's old files have in addition to all old files' differences."""
