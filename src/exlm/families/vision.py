"""The language halves of vision models; the pictures themselves arrive as injected embeddings."""

from __future__ import annotations

from dataclasses import replace

from .. import spec
from ..spec.tensor_names import TensorNames
from .config_reader import ConfigReader
from .gemma import VISION_PREFIXES
from .llama import mistral

LLAMA_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": 32000,
}

MISTRAL_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "vocab_size": 32000,
}


def pixtral(c: ConfigReader) -> spec.Model:
    """Mistral behind a Pixtral tower: LLaVA and Mistral 3 files."""
    tower = c.text("vision_config.model_type", default=None)
    if tower != "pixtral":
        raise c.invalid_value(
            "vision_config.model_type", '"pixtral" (the only tower known for this architecture)', tower
        )
    kind = c.text("text_config.model_type", default="mistral")
    if kind not in {"mistral", "llama"}:
        raise c.invalid_value("text_config.model_type", '"mistral" or "llama"', kind)
    defaults = LLAMA_DEFAULTS if kind == "llama" else MISTRAL_DEFAULTS
    nested = c.with_missing_keys(defaults) if c.table("text_config") else c
    return replace(mistral(nested), names=TensorNames(key_renames=VISION_PREFIXES))
