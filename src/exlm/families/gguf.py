"""Translates a GGUF file's metadata to the config.json that its model would have, for the same families.

It translates numbers, names and token ids, and adds what llama.cpp hard-codes for an architecture and leaves
out of the file (Gemma's windows and softcaps). Two facts are in no metadata and are arguments: which biases
exist, and the RoPE factors, which are tensors.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from .. import spec
from ..errors import ConfigError, UnknownArchitecture, shown
from .config_reader import MAX_LAYERS

RopeFactors = Mapping[str, Sequence[float]]

END_OF_TURN_TOKENS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
"""End-of-turn tokens, for files that name only the end-of-text token."""

NON_MODEL_TYPES = {
    "adapter": "an adapter for one",
    "imatrix": "an importance matrix for one",
    "mmproj": "the vision or audio part of one",
}
"""Values of `general.type` of files that are not models, and what such a file is."""

CONTROL_TOKEN_TYPE = 3

NO_TOKEN_ID = 2**32 - 1
"""-1 as an unsigned number, which converters write for a token that does not exist."""


def config_from_metadata(
    metadata: Mapping[str, Any], source: str, *, tensors: Collection[str] = (), factors: RopeFactors | None = None
) -> dict[str, Any]:
    """The config.json of the model, for `families.build_spec(ConfigReader(config, source))`.

    `tensors` are the names of the stored tensors, `factors` the numbers of those with rotary factors
    (`rope_freqs.weight`, `rope_factors_long.weight`, `rope_factors_short.weight`).
    """
    other_kind = NON_MODEL_TYPES.get(str(metadata.get("general.type")))
    if other_kind is not None:
        raise ConfigError(f"{source} is not a model but {other_kind} (general.type). Give the model's own file.")
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise UnknownArchitecture(
            f"{source}: general.architecture {arch!r} is not supported in GGUF. Known: "
            f"{', '.join(sorted(ARCHITECTURES))}."
        )
    reader = GgufConfigReader(metadata, arch, source, tensors)
    config = _common_keys(reader) | _rope_keys(reader, factors or {})
    config |= ARCHITECTURES[arch](reader)
    return {key: value for key, value in config.items() if value is not None}


class GgufConfigReader:
    """Typed values of the metadata keys that describe the architecture."""

    def __init__(self, metadata: Mapping[str, Any], arch: str, source: str, tensors: Collection[str] = ()) -> None:
        self.metadata = metadata
        self.arch = arch
        self.source = source
        self.tensors = tensors

    def get(self, key: str) -> Any:
        """The value as stored, or None."""
        return self.metadata.get(f"{self.arch}.{key}")

    def size(self, key: str) -> int:
        """A required whole number of at least one; a list must have the same number for every layer."""
        found = self.optional_size(key)
        if not found:
            raise self.invalid_value(key, "a number of at least 1", self.get(key))
        return found

    def optional_size(self, key: str) -> int | None:
        """A whole number, or None if it is absent or zero; a list must have the same number for every layer."""
        value = self.get(key)
        if isinstance(value, list) and value:
            if value.count(value[0]) != len(value):
                raise self.invalid_value(key, "the same for every layer", value)
            value = value[0]
        if value is None or (type(value) is int and 0 <= value < 2**31):
            return value or None
        raise self.invalid_value(key, "a whole number", value)

    def layer_sizes(self, key: str) -> list[int]:
        """A whole number for each layer, 0 in layers without that part: a list, or one number for all of them."""
        value, depth = self.get(key), self.num_layers
        if type(value) is int:
            value = [value] * depth
        if not isinstance(value, list) or len(value) < depth:
            raise self.invalid_value(key, f"a number, or one for each of {depth} layers", value)
        if not all(type(n) is int and 0 <= n < 2**31 for n in value):
            raise self.invalid_value(key, "whole numbers", value)
        return value[:depth]

    def size_in_some_layers(self, key: str) -> int | None:
        """The number that layers with a part have in common; None if no layer has it, or the key is absent."""
        if self.get(key) is None:
            return None
        sizes = set(self.layer_sizes(key)) - {0}
        if len(sizes) > 1:
            raise self.invalid_value(key, "the same for every layer that has one", self.get(key))
        return next(iter(sizes), None)

    @property
    def num_layers(self) -> int:
        """Layers of the model, without those for multi-token prediction, which `block_count` includes."""
        count, extra = self.size("block_count"), self.num_draft_layers
        if count > MAX_LAYERS:
            raise self.invalid_value("block_count", f"at most {MAX_LAYERS}", count)
        if extra >= count:
            raise self.invalid_value("nextn_predict_layers", f"less than the {count} layers", extra)
        return count - extra

    @property
    def num_heads(self) -> int:
        """Attention heads; of a hybrid, those of the layers with attention."""
        if self.arch not in HYBRIDS:
            return self.size("attention.head_count")
        found = self.size_in_some_layers("attention.head_count")
        if found is None:
            raise self.invalid_value("attention.head_count", "a number of at least 1", self.get("attention.head_count"))
        return found

    @property
    def num_draft_layers(self) -> int:
        """Layers for multi-token prediction."""
        return self.optional_size("nextn_predict_layers") or 0

    def flag(self, key: str) -> bool | None:
        """True or false."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.invalid_value(key, "true or false", value)
        return value

    def has_tensor(self, name: str) -> bool:
        """Whether any layer has a tensor, such as `attn_q.bias`."""
        return any(stored.startswith("blk.") and stored.endswith("." + name) for stored in self.tensors)

    def real(self, key: str) -> float | None:
        """A finite number, with the fewest digits of its float32: 1e-05 and not 9.999999747378752e-06."""
        value = self.get(key)
        if value is None:
            return None
        if type(value) not in (int, float) or not abs(value) < 1e38:
            raise self.invalid_value(key, "a finite number", value)
        short = float(f"{value:.7g}")
        same = struct.pack("<f", short) == struct.pack("<f", value)
        return short if same else float(value)

    def text(self, key: str) -> str | None:
        """A string."""
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.invalid_value(key, "a string", value)
        return value

    def share_of(self, key: str, parts: int) -> int:
        """A size divided among equal parts."""
        total = self.size(key)
        if total % parts:
            raise self.invalid_value(key, f"a multiple of {parts}", total)
        return total // parts

    @property
    def head_dim(self) -> int:
        """The head dimension, stored or the hidden size divided by the heads."""
        stated = self.optional_size("attention.key_length")
        if stated is not None:
            return stated
        hidden, heads = self.size("embedding_length"), self.num_heads
        if hidden % heads:
            raise self.invalid_value(
                "attention.key_length", f"present: {heads} heads cannot share {hidden} evenly", None
            )
        return hidden // heads

    def invalid_value(self, key: str, expected: str, found: object) -> ConfigError:
        """The error for an invalid or missing value."""
        full = key if key.startswith("tokenizer.") else f"{self.arch}.{key}"
        return ConfigError(
            f'{self.source}: "{full}" must be {expected}, found {shown(found)}. Convert the model again.'
        )


def _common_keys(k: GgufConfigReader) -> dict[str, Any]:
    """The keys that every architecture has."""
    head_dim, value = k.head_dim, k.optional_size("attention.value_length")
    is_hybrid, tensors = k.arch in HYBRIDS, k.tensors
    read_width = k.optional_size if k.arch == "qwen3moe" else k.size  # its experts' width has its own key
    read_kv_heads = k.optional_size
    if is_hybrid:
        read_width = read_kv_heads = k.size_in_some_layers
    if value is not None and value != head_dim and k.arch != "kimi-linear":  # its heads have keys of their own
        raise k.invalid_value("attention.value_length", f"{head_dim}, as wide as keys", value)

    def has_bias(name: str) -> bool:
        return k.has_tensor(name) if is_hybrid else f"blk.0.{name}" in tensors

    return {
        "hidden_size": k.size("embedding_length"),
        "intermediate_size": read_width("feed_forward_length"),
        "num_hidden_layers": k.num_layers,
        "num_nextn_predict_layers": k.num_draft_layers or None,
        "num_attention_heads": k.num_heads,
        "num_key_value_heads": read_kv_heads("attention.head_count_kv"),
        "head_dim": head_dim,
        "max_position_embeddings": k.size("context_length"),
        "rms_norm_eps": k.real("attention.layer_norm_rms_epsilon"),
        # As in every reader of GGUF, a file without a head uses the embedding.
        "tie_word_embeddings": True,
        "attention_bias": all(map(has_bias, ("attn_q.bias", "attn_output.bias"))) or None,
        "mlp_bias": has_bias("ffn_down.bias") or None,
        **_vocabulary_keys(k),
    }


def _vocabulary_keys(k: GgufConfigReader) -> dict[str, Any]:
    tokens = k.metadata.get("tokenizer.ggml.tokens")
    size = len(tokens) if isinstance(tokens, list) else k.size("vocab_size")

    def token_id(name: str, required: bool = True) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        value = k.metadata.get(key)
        if value is None or value in (-1, NO_TOKEN_ID):
            return None
        if type(value) is int and 0 <= value < size:
            return value
        if type(value) is int and not required:
            return None
        raise k.invalid_value(key, f"an id below {size}", value)

    eos_ids = [token_id(name) for name in ("eos", "eot", "eom")]
    if eos_ids[1] is None and isinstance(tokens, list):
        eos_ids += _end_of_turn_ids(k, tokens, eos_ids[0])
    return {
        "vocab_size": size,
        "bos_token_id": token_id("bos"),
        "eos_token_id": list(dict.fromkeys(end for end in eos_ids if end is not None)) or None,
        # A padding token that the embedding has no row for occurs in no text.
        "pad_token_id": token_id("padding", required=False),
    }


def _end_of_turn_ids(k: GgufConfigReader, tokens: list[Any], eos: int | None) -> list[int]:
    """The end-of-turn control tokens, unless the EOS token is one of them."""
    token_types = k.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(token_types, list) or len(token_types) != len(tokens):
        return []
    if eos is not None and tokens[eos] in END_OF_TURN_TOKENS:
        return []
    return [n for n, text in enumerate(tokens) if token_types[n] == CONTROL_TOKEN_TYPE and text in END_OF_TURN_TOKENS]


def _rope_keys(k: GgufConfigReader, factors: RopeFactors) -> dict[str, Any]:
    """The RoPE base and scaling."""
    found: dict[str, Any] = {"rope_theta": k.real("rope.freq_base")}
    original = k.optional_size("rope.scaling.original_context_length")
    if "rope_freqs.weight" in factors:
        same = list(factors["rope_freqs.weight"])
        table = {"rope_type": "longrope", "short_factor": same, "long_factor": same, "attention_factor": 1.0}
        return found | {"rope_scaling": table}
    if "rope_factors_long.weight" in factors and "rope_factors_short.weight" in factors:
        table = {
            "rope_type": "longrope",
            "short_factor": list(factors["rope_factors_short.weight"]),
            "long_factor": list(factors["rope_factors_long.weight"]),
        }
        if (attn_factor := k.real("rope.scaling.attn_factor")) is not None:
            table["attention_factor"] = attn_factor
        return found | {"rope_scaling": table, "original_max_position_embeddings": original}
    return found | {"rope_scaling": _rope_scaling(k, original)}


def _rope_scaling(k: GgufConfigReader, original: int | None) -> dict[str, Any] | None:
    factor = k.real("rope.scaling.factor") or k.real("rope.scale_linear")
    kind = k.text("rope.scaling.type") or ("linear" if factor else "none")
    if kind == "none" or (kind == "linear" and factor in (None, 1.0)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise k.invalid_value("rope.scaling.type", "none, linear, yarn, or longrope with its factor tensors", kind)
    if factor is None:
        raise k.invalid_value("rope.scaling.factor", "a number above 0", None)
    table: dict[str, Any] = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for yarn_key in ("beta_fast", "beta_slow"):
        table[yarn_key] = k.real(f"rope.scaling.yarn_{yarn_key}")
    # yarn_attn_factor replaces YaRN's own attention factor, attn_factor multiplies either.
    table["attention_factor"] = k.real("rope.scaling.yarn_attn_factor")
    if (attn_factor := k.real("rope.scaling.attn_factor")) is not None:
        yarn_attn_factor = table["attention_factor"]
        table["attention_factor"] = attn_factor * (
            spec.YarnScaling.mscale(factor) if yarn_attn_factor is None else yarn_attn_factor
        )
    return {key: value for key, value in table.items() if value is not None}


def _llama(k: GgufConfigReader) -> dict[str, Any]:
    """Llama, Mistral with a window, Mixtral with experts: one name in GGUF."""
    rotary_dim = k.optional_size("rope.dimension_count")
    if rotary_dim is not None and rotary_dim != k.head_dim:
        raise k.invalid_value("rope.dimension_count", f"{k.head_dim}, the whole head", rotary_dim)
    window = k.optional_size("attention.sliding_window")
    experts = k.optional_size("expert_count")
    if experts is None:
        name = "LlamaForCausalLM" if window is None else "MistralForCausalLM"
        return {"architectures": [name], "sliding_window": window}
    return {
        "architectures": ["MixtralForCausalLM"],
        "rope_theta": k.real("rope.freq_base") or 10000.0,  # GGUF's own default, not the family's
        "sliding_window": window,
        "num_local_experts": experts,
        "num_experts_per_tok": k.size("expert_used_count"),
    }


def _qwen3moe(k: GgufConfigReader) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": k.size("expert_count"),
        "num_experts_per_tok": k.size("expert_used_count"),
        "moe_intermediate_size": k.size("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _query_pre_attn_scalar(k: GgufConfigReader, largest_num_layers: int) -> float:
    """The head dimension; hidden size / heads in the family's largest model, known by its layer count."""
    if k.size("block_count") == largest_num_layers:
        return k.size("embedding_length") // k.size("attention.head_count")
    return k.head_dim


def _gemma2(k: GgufConfigReader) -> dict[str, Any]:
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "sliding_window": k.optional_size("attention.sliding_window") or 4096,
        "attn_logit_softcapping": k.real("attn_logit_softcapping") or 50.0,
        "final_logit_softcapping": k.real("final_logit_softcapping") or 30.0,
        "query_pre_attn_scalar": _query_pre_attn_scalar(k, 46),
    }


def _gemma3(k: GgufConfigReader) -> dict[str, Any]:
    pattern = k.get("attention.sliding_window_pattern")
    kinds = None
    if isinstance(pattern, list):
        kinds = ["sliding_attention" if local else "full_attention" for local in pattern]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": k.optional_size("attention.sliding_window"),
        "sliding_window_pattern": None if kinds else k.optional_size("attention.sliding_window_pattern"),
        "layer_types": kinds,
        "rope_local_base_freq": k.real("rope.freq_base_swa"),
        "final_logit_softcapping": k.real("final_logit_softcapping") or None,
        "query_pre_attn_scalar": _query_pre_attn_scalar(k, 62),
    }


def _phi3(k: GgufConfigReader) -> dict[str, Any]:
    rotary_dim = k.optional_size("rope.dimension_count")
    return {
        "architectures": ["Phi3ForCausalLM"],
        "sliding_window": k.optional_size("attention.sliding_window"),
        "partial_rotary_factor": None if rotary_dim in (None, k.head_dim) else rotary_dim / k.head_dim,
    }


def _qwen_hybrid(k: GgufConfigReader) -> dict[str, Any]:
    """Gated delta nets, and gated attention in some layers."""
    heads = k.size("ssm.time_step_rank")
    rotary_dim = k.optional_size("rope.dimension_count")
    found: dict[str, Any] = {
        "linear_conv_kernel_dim": k.size("ssm.conv_kernel"),
        "linear_key_head_dim": k.size("ssm.state_size"),
        "linear_num_key_heads": k.size("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": k.share_of("ssm.inner_size", heads),
        "full_attention_interval": k.optional_size("full_attention_interval"),
        "partial_rotary_factor": None if rotary_dim is None else _fraction(rotary_dim, k.head_dim),
    }
    if k.get("attention.recurrent_layers") is not None:
        recurrent = k.get("attention.recurrent_layers")
        if not isinstance(recurrent, list) or len(recurrent) < k.num_layers:
            raise k.invalid_value(
                "attention.recurrent_layers", f"one entry for each of {k.num_layers} layers", recurrent
            )
        found["layer_types"] = ["linear_attention" if one else "full_attention" for one in recurrent[: k.num_layers]]
    return found


def _fraction(part: int, whole: int) -> float:
    """A number that gives the part when the whole is multiplied by it and the product is rounded down."""
    found = part / whole
    return found if int(whole * found) == part else math.nextafter(found, math.inf)


def _qwen_experts(k: GgufConfigReader) -> dict[str, Any]:
    width = k.size("expert_feed_forward_length")
    return {
        "num_experts": k.size("expert_count"),
        "num_experts_per_tok": k.size("expert_used_count"),
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": k.optional_size("expert_shared_feed_forward_length") or width,
        "norm_topk_prob": True,
    }


def _qwen3next(k: GgufConfigReader) -> dict[str, Any]:
    return {"architectures": ["Qwen3NextForCausalLM"], **_qwen_hybrid(k), **_qwen_experts(k)}


def _qwen35(k: GgufConfigReader) -> dict[str, Any]:
    """With M-RoPE, unless the sections do not fit: the converter writes default ones where a model has none."""
    found = _qwen_hybrid(k)
    rotary_dim = k.optional_size("rope.dimension_count") or int(k.head_dim * 0.25)
    sections = k.get("rope.dimension_sections")
    if isinstance(sections, list) and all(type(n) is int for n in sections) and 2 * sum(sections) == rotary_dim:
        found["rope_parameters"] = {"mrope_section": sections[:3]}
    return {"architectures": ["Qwen3_5ForCausalLM"], **found}


def _qwen35moe(k: GgufConfigReader) -> dict[str, Any]:
    return _qwen35(k) | {"architectures": ["Qwen3_5MoeForCausalLM"], **_qwen_experts(k)}


def _mamba_keys(k: GgufConfigReader) -> dict[str, Any]:
    """The mixer's sizes under the names that Granite, Falcon-H1 and Bamba share."""
    heads = k.size("ssm.time_step_rank")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": k.share_of("ssm.inner_size", heads),
        "mamba_d_ssm": k.size("ssm.inner_size"),
        "mamba_n_groups": k.size("ssm.group_count"),
        "mamba_d_state": k.size("ssm.state_size"),
        "mamba_d_conv": k.size("ssm.conv_kernel"),
        "mamba_conv_bias": k.has_tensor("ssm_conv1d.bias"),
        "mamba_proj_bias": k.has_tensor("ssm_in.bias"),
    }


def _nemotron_h(k: GgufConfigReader) -> dict[str, Any]:
    """The kind of each layer follows from the lists of kv heads and MLP widths."""
    is_moe = k.arch == "nemotron_h_moe"
    kv_heads, widths = k.layer_sizes("attention.head_count_kv"), k.layer_sizes("feed_forward_length")
    kinds = [
        "attention" if heads else ("moe" if is_moe else "mlp") if width else "mamba"
        for heads, width in zip(kv_heads, widths, strict=True)
    ]
    mamba = _mamba_keys(k)
    found: dict[str, Any] = {
        "architectures": ["NemotronHForCausalLM"],
        "layers_block_type": kinds,
        "layer_norm_epsilon": k.real("attention.layer_norm_rms_epsilon") or k.real("attention.layer_norm_epsilon"),
        "mamba_num_heads": mamba["mamba_n_heads"],
        "mamba_head_dim": mamba["mamba_d_head"],
        "n_groups": mamba["mamba_n_groups"],
        "ssm_state_size": mamba["mamba_d_state"],
        "conv_kernel": mamba["mamba_d_conv"],
        "use_conv_bias": mamba["mamba_conv_bias"],
        "use_bias": mamba["mamba_proj_bias"],
    }
    if not is_moe:
        return found
    width = k.size("expert_feed_forward_length")
    return found | {
        "n_routed_experts": k.size("expert_count"),
        "num_experts_per_tok": k.size("expert_used_count"),
        "moe_intermediate_size": width,
        "moe_shared_expert_intermediate_size": k.optional_size("expert_shared_feed_forward_length") or width,
        "moe_latent_size": k.optional_size("moe_latent_size"),
        "mlp_bias": k.has_tensor("ffn_down_shexp.bias") or None,
        **_sigmoid_routing(k),
    }


def _sigmoid_routing(k: GgufConfigReader) -> dict[str, Any]:
    """The weights and groups of experts; a file without these keys means renormalised weights and no groups."""
    return {
        "norm_topk_prob": k.flag("expert_weights_norm"),
        "routed_scaling_factor": k.real("expert_weights_scale") or None,
        "n_group": k.optional_size("expert_group_count"),
        "topk_group": k.optional_size("expert_group_used_count"),
    }


def _granitehybrid(k: GgufConfigReader) -> dict[str, Any]:
    has_rope = k.flag("rope.scaling.finetuned") is not False  # the key that switches RoPE; on where it is absent
    rotary_dim = k.optional_size("rope.dimension_count")
    if has_rope and rotary_dim not in (None, k.head_dim):
        raise k.invalid_value(
            "rope.dimension_count", f"{k.head_dim}, the whole head (Bamba comes as a folder)", rotary_dim
        )
    width, experts = k.size_in_some_layers("feed_forward_length"), k.optional_size("expert_count")
    mamba = _mamba_keys(k)
    expand, rest = divmod(mamba.pop("mamba_d_ssm"), k.size("embedding_length"))
    if rest or not expand:
        raise k.invalid_value("ssm.inner_size", "a multiple of embedding_length", k.get("ssm.inner_size"))
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["attention" if heads else "mamba" for heads in k.layer_sizes("attention.head_count_kv")],
        **mamba,
        "mamba_expand": expand,
        "position_embedding_type": "rope" if has_rope else "nope",
        "attention_multiplier": k.real("attention.scale") or k.head_dim**-0.5,
        "embedding_multiplier": k.real("embedding_scale") or None,
        "residual_multiplier": k.real("residual_scale") or None,
        "logits_scaling": k.real("logit_scale") or None,
        "num_local_experts": experts or 0,
        "num_experts_per_tok": k.optional_size("expert_used_count"),
        "shared_intermediate_size": k.optional_size("expert_shared_feed_forward_length") if experts else width,
    }


def _falcon_h1(k: GgufConfigReader) -> dict[str, Any]:
    """The multipliers are not among the metadata: the converter multiplied the matrices by them."""
    return {
        "architectures": ["FalconH1ForCausalLM"],
        **_mamba_keys(k),
        "mamba_rms_norm": k.has_tensor("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": k.has_tensor("ssm_out.bias"),
    }


def _lfm2(k: GgufConfigReader) -> dict[str, Any]:
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "norm_eps": k.real("attention.layer_norm_rms_epsilon"),
        "layer_types": ["full_attention" if heads else "conv" for heads in k.layer_sizes("attention.head_count_kv")],
        "conv_L_cache": k.size("shortconv.l_cache"),
        "conv_bias": k.has_tensor("shortconv.in_proj.bias"),
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2moe(k: GgufConfigReader) -> dict[str, Any]:
    routing = _sigmoid_routing(k)
    return _lfm2(k) | {
        "architectures": ["Lfm2MoeForCausalLM"],
        "num_experts": k.size("expert_count"),
        "num_experts_per_tok": k.size("expert_used_count"),
        "moe_intermediate_size": k.size("expert_feed_forward_length"),
        "num_dense_layers": k.optional_size("leading_dense_block_count") or 0,
        "use_expert_bias": any("exp_probs_b" in name for name in k.tensors),
        "norm_topk_prob": routing["norm_topk_prob"],
        "routed_scaling_factor": routing["routed_scaling_factor"],
    }


def _kimi_linear(k: GgufConfigReader) -> dict[str, Any]:
    heads, rope_dim = k.num_heads, k.size("rope.dimension_count")
    nope_dim = k.size("attention.key_length_mla") - rope_dim
    if nope_dim < 1:
        raise k.invalid_value("attention.key_length_mla", f"more than {rope_dim}, the shared part of a key", nope_dim)
    kinds = ["full_attention" if kv else "linear_attention" for kv in k.layer_sizes("attention.head_count_kv")]
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "num_key_value_heads": heads,  # stored as 1, since llama.cpp keeps the latent in its cache
        "head_dim": None,
        "layer_types": kinds,
        "linear_num_heads": heads,
        "linear_head_dim": k.size("kda.head_dim"),
        "linear_conv_kernel_dim": k.size("ssm.conv_kernel"),
        "kv_lora_rank": k.size("attention.kv_lora_rank"),
        "q_lora_rank": k.optional_size("attention.q_lora_rank"),
        "qk_nope_head_dim": nope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": k.size("attention.value_length_mla"),
        "num_local_experts": k.size("expert_count"),
        "num_experts_per_tok": k.size("expert_used_count"),
        "n_shared_experts": k.optional_size("expert_shared_count") or 1,
        "moe_intermediate_size": k.size("expert_feed_forward_length"),
        "first_k_dense_replace": k.optional_size("leading_dense_block_count") or 0,
        **_sigmoid_routing(k),
    }


HYBRIDS: dict[str, Callable[[GgufConfigReader], dict[str, Any]]] = {
    "falcon-h1": _falcon_h1,
    "granitehybrid": _granitehybrid,
    "kimi-linear": _kimi_linear,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2moe,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35moe,
    "qwen3next": _qwen3next,
}
"""Architectures with recurrent mixers: lists of sizes have zeros for layers without a part."""

ARCHITECTURES: dict[str, Callable[[GgufConfigReader], dict[str, Any]]] = {
    "gemma": lambda _: {"architectures": ["GemmaForCausalLM"]},
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "llama": _llama,
    "phi3": _phi3,
    "qwen2": lambda _: {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": lambda _: {"architectures": ["Qwen3ForCausalLM"]},
    "qwen3moe": _qwen3moe,
    **HYBRIDS,
}
"""For each `general.architecture`, a function that gives the keys of config.json specific to it."""
