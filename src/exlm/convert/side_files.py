"""The files beside the weights of a converted model: config.json, tokenizer files, chat templates.

A folder's files are copied; what config.json says of a quantisation that is gone is changed or left out. A
GGUF file's metadata becomes the files that it was converted from. Code, pickles and weight indexes are never
copied.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..atomic import sync_file
from ..checkpoint import GgufCheckpoint, GgufFile, WeightSource
from ..config import FrozenConfig, read_json
from ..errors import Unsupported
from ..families.gguf import config_from_metadata
from ..formats.quantization_config import QuantizationConfig
from ..tokenizer.gguf import GgufVocabulary, tokenizer_from_metadata, tokenizer_json, tokenizer_model
from .plan import ConversionPlan

CONFIG_FILE = "config.json"
GPTQ_FILE = "quantize_config.json"
QUANTIZATION_FILES = (GPTQ_FILE, "quant_config.json")

COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".md", ".tiktoken", ".bpe", ".spm")
"""Suffixes of files that are copied."""

COPIED_PREFIXES = ("LICENSE", "NOTICE", "tokenizer.model")
"""Prefixes of other files that are copied, unless their suffix is in NEVER_COPIED."""

NEVER_COPIED = (".py", ".pyc", ".so", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".safetensors", ".gguf")
TEMPLATE_DIR = "additional_chat_templates"

MODEL_TYPES = {
    "FalconH1ForCausalLM": "falcon_h1",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "GemmaForCausalLM": "gemma",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "KimiLinearForCausalLM": "kimi_linear",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2_moe",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "NemotronHForCausalLM": "nemotron_h",
    "OlmoHybridForCausalLM": "olmo_hybrid",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
}
"""By architecture, the `model_type` of config.json, which transformers reads."""


class SideFiles(NamedTuple):
    """The files beside a new model's weights, by name: contents to write, and files to copy."""

    written: dict[str, bytes]
    copied: dict[str, Path]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.written.values())) + sum(p.stat().st_size for p in self.copied.values())

    def write_to(self, folder: Path) -> None:
        """Write and copy them into a folder, and flush them to the disk."""
        for name, content in self.written.items():
            (folder / name).write_bytes(content)
        for name, source in self.copied.items():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source, folder / name)
        for name in (*self.written, *self.copied):
            sync_file(folder / name)


def side_files(config: FrozenConfig, checkpoint: WeightSource, plan: ConversionPlan) -> SideFiles:
    """The files beside the weights of a model that was converted as planned."""
    if isinstance(checkpoint, GgufCheckpoint):
        return side_files_of_gguf(checkpoint.files, checkpoint.has("head"))
    return side_files_of_folder(config.path, plan, config.quantization)


def side_files_of_folder(folder: Path, plan: ConversionPlan, quantization: QuantizationConfig | None) -> SideFiles:
    """The files of a model folder, with config.json changed as the plan changes the weights."""
    config = dict(read_json(folder / CONFIG_FILE))
    copied = _files_to_copy(folder)
    written: dict[str, bytes] = {}
    if plan.to == "dense" or plan.has_action("rewrite"):
        for name in QUANTIZATION_FILES:
            copied.pop(name, None)
        quantization_config = config.pop("quantization_config", None)
        if plan.has_action("rewrite"):
            gptq_path = folder / GPTQ_FILE
            if quantization_config is None and gptq_path.is_file():
                quantization_config = read_json(gptq_path)
            config["quantization_config"] = _gptq_config(
                quantization_config or {}, plan, quantization or QuantizationConfig()
            )
            if gptq_path.is_file():
                written[GPTQ_FILE] = json_bytes(config["quantization_config"])
    if "head" in plan.actions and plan.actions["head"][1] == "unpack":
        # The reader uses a packed head as it is. For one of floats, these keys would make it normalise the
        # rows again, or use the embedding instead.
        for table in (config, config.get("text_config")):
            if isinstance(table, dict):
                table.pop("norm_head", None)
        config["tie_word_embeddings"] = False
    return SideFiles({CONFIG_FILE: json_bytes(config), **written}, copied)


def side_files_of_gguf(file: GgufFile, has_head: bool) -> SideFiles:
    """The files that a GGUF file's metadata was converted from."""
    source = str(file.path)
    config = config_from_metadata(file.metadata, source, tensors=file.tensors, factors=file.rope_factors())
    architecture = config["architectures"][0]
    if architecture not in MODEL_TYPES:
        raise Unsupported(
            f"{source}: the config.json of a {architecture} made from GGUF would have no model_type, by which other "
            "programs know the model. Take the model as safetensors."
        )
    config["model_type"] = MODEL_TYPES[architecture]
    config["tie_word_embeddings"] = not has_head
    return SideFiles({CONFIG_FILE: json_bytes(config), **_tokenizer_files(file.metadata, source)}, {})


def _tokenizer_files(metadata: Mapping[str, Any], source: str) -> dict[str, bytes]:
    """The vocabulary and tokenizer_config.json; none if the GGUF file has no tokenizer."""
    if "tokenizer.ggml.model" not in metadata:
        return {}
    files = tokenizer_from_metadata(metadata, source).files
    vocabulary = GgufVocabulary(metadata, source)
    tokenizer_config: dict[str, Any] = dict(files.config or {})
    if files.added:
        flags = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
        tokenizer_config["added_tokens_decoder"] = {
            str(token.id): {flag: getattr(token, flag) for flag in flags} for token in files.added
        }
    if vocabulary.model == "gpt2":
        tokenizer_config["tokenizer_class"] = "PreTrainedTokenizerFast"
        name, content = "tokenizer.json", tokenizer_json(vocabulary).encode()
    else:
        tokenizer_config["tokenizer_class"] = "LlamaTokenizer"
        name, content = "tokenizer.model", tokenizer_model(vocabulary)
    return {name: content, "tokenizer_config.json": json_bytes(tokenizer_config)}


def _files_to_copy(folder: Path) -> dict[str, Path]:
    """The files to copy, without config.json and weight indexes, by their name in the new folder."""
    found = {}
    for path in sorted(folder.iterdir()):
        name, suffix = path.name, path.suffix.lower()
        fits = suffix in COPIED_SUFFIXES or (name.startswith(COPIED_PREFIXES) and suffix not in NEVER_COPIED)
        if fits and name[0] != "." and name != CONFIG_FILE and not name.endswith(".index.json") and path.is_file():
            found[name] = path
    if (folder / TEMPLATE_DIR).is_dir():
        templates = sorted((folder / TEMPLATE_DIR).glob("*.jinja"))
        found |= {f"{TEMPLATE_DIR}/{path.name}": path for path in templates if path.is_file()}
    return found


def _gptq_config(known: Mapping[str, Any], plan: ConversionPlan, source_config: QuantizationConfig) -> dict[str, Any]:
    """The `quantization_config` of matrices that were rewritten."""
    layout = "gptq_v2" if plan.to == "gptq-v2" else "gptq"
    if source_config.method == "awq":
        facts = {"bits": source_config.bits or 4, "group_size": source_config.group_size}
        known = {key: value for key, value in facts.items() if value is not None}
        known |= {"desc_act": False, "sym": source_config.sym}
    elif "format" in known:
        known = {**known, "format": layout}
    return {**known, "quant_method": "gptq", "checkpoint_format": layout}


def json_bytes(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
