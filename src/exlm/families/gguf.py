"""Translates a GGUF file's metadata to the config.json that its model would have, for the same families.

It translates numbers, names and token ids, and adds what llama.cpp hard-codes for an architecture and leaves
out of the file (Gemma's windows and softcaps). Two facts are in no metadata and are arguments: which biases
exist, and the RoPE factors, which are tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from .. import spec
from ..errors import ConfigError, UnknownArchitecture, shown

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
    reader = GgufConfigReader(metadata, arch, source)
    config = _common_keys(reader, tensors) | _rope_keys(reader, factors or {})
    config |= ARCHITECTURES[arch](reader)
    return {key: value for key, value in config.items() if value is not None}


class GgufConfigReader:
    """Typed values of the metadata keys that describe the architecture."""

    def __init__(self, metadata: Mapping[str, Any], arch: str, source: str) -> None:
        self.metadata = metadata
        self.arch = arch
        self.source = source

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

    @property
    def head_dim(self) -> int:
        """The head dimension, stored or the hidden size divided by the heads."""
        stated = self.optional_size("attention.key_length")
        if stated is not None:
            return stated
        hidden, heads = self.size("embedding_length"), self.size("attention.head_count")
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


def _common_keys(k: GgufConfigReader, tensors: Collection[str]) -> dict[str, Any]:
    """The keys that every architecture has."""
    head_dim, value = k.head_dim, k.optional_size("attention.value_length")
    read_width = k.optional_size if k.arch == "qwen3moe" else k.size  # its experts' width has its own key
    if value is not None and value != head_dim:
        raise k.invalid_value("attention.value_length", f"{head_dim}, as wide as keys", value)
    return {
        "hidden_size": k.size("embedding_length"),
        "intermediate_size": read_width("feed_forward_length"),
        "num_hidden_layers": k.size("block_count"),
        "num_attention_heads": k.size("attention.head_count"),
        "num_key_value_heads": k.optional_size("attention.head_count_kv"),
        "head_dim": head_dim,
        "max_position_embeddings": k.size("context_length"),
        "rms_norm_eps": k.real("attention.layer_norm_rms_epsilon"),
        # As in every reader of GGUF, a file without a head uses the embedding.
        "tie_word_embeddings": True,
        "attention_bias": {"blk.0.attn_q.bias", "blk.0.attn_output.bias"} <= set(tensors) or None,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors or None,
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


ARCHITECTURES: dict[str, Callable[[GgufConfigReader], dict[str, Any]]] = {
    "gemma": lambda _: {"architectures": ["GemmaForCausalLM"]},
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "llama": _llama,
    "phi3": _phi3,
    "qwen2": lambda _: {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": lambda _: {"architectures": ["Qwen3ForCausalLM"]},
    "qwen3moe": _qwen3moe,
}
"""For each `general.architecture`, a function that gives the keys of config.json specific to it."""
