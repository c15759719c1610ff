"""The models that a server can load: `ModelSpec` describes one, `load` makes the parts of its generator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from exlm import CACHES, CacheBase, Config, InputError, Lora, Model, Tokenizer, find_model

DEFAULT_MAX_SEQ_LEN = 8192
ALL_MEMORY_GB = 1 << 19
"""More than any device has: a tensor-parallel rank may use all of its device."""


@dataclass(frozen=True)
class ModelSpec:
    """A model and the name that requests use for it; clients never see its path.

    `path` is what `find_model` takes. `cache_tokens` is the size of the cache that all requests share; None
    is four sequences of full length. `draft` is a draft model, "ngram" or "none"; None drafts by n-grams on a CPU while
    one sequence decodes. The other fields are as in `LLM`.
    """

    name: str
    path: str | None = None
    max_seq_len: int | None = None
    cache_tokens: int | None = None
    cache_type: str = "fp16"
    device: str | None = None
    dtype: str | None = None
    cpu_activation_bits: int | None = None
    draft: str | None = None
    max_batch_size: int | None = None
    loras: Mapping[str, str] = field(default_factory=dict)
    """Folders of adapters by the names that requests use."""


@dataclass(frozen=True)
class GeneratorParts:
    """The model, cache and tokenizer that a generator needs, and the adapters by name."""

    model: Any
    cache: Any
    tokenizer: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the generator."""
    loras: Mapping[str, Any] = field(default_factory=dict)

    def unload(self) -> None:
        """Free the memory of the model and its draft model."""
        for model in (self.model, self.options.get("draft_model")):
            if model is not None and hasattr(model, "unload"):
                model.unload()


def load(spec: ModelSpec, progress: bool = False, tensor_parallel: int = 1) -> GeneratorParts:
    """Load a model, its draft model and its adapters; with tensor parallelism on that many devices."""
    if spec.cache_type not in CACHES:
        raise InputError(f"The cache type must be one of {', '.join(CACHES)}, found {spec.cache_type!r}.")
    if tensor_parallel > 1 and spec.draft not in (None, "none", "ngram"):
        raise InputError(f"A model shared by several GPUs takes no draft model but ngram, found {spec.draft!r}.")
    config = _config(spec, spec.path, spec.max_seq_len, progress)
    tokenizer = Tokenizer(config)
    cache_tokens = spec.cache_tokens or 4 * config.max_seq_len
    cache_tokens = -(-cache_tokens // CacheBase.page_size) * CacheBase.page_size
    options: dict[str, Any] = {"max_batch_size": spec.max_batch_size}
    if spec.draft in (None, "ngram"):
        options["use_ngram_draft"] = "auto" if spec.draft is None else True
    elif spec.draft != "none":
        draft_config = _config(spec, spec.draft, config.max_seq_len, progress)
        tokenizer.check_draft(draft_config)
        options["draft_model"], options["draft_cache"] = _model_and_cache(draft_config, spec, cache_tokens, progress)
    if tensor_parallel > 1:
        model = Model(config)
        model.load_tp([ALL_MEMORY_GB] * tensor_parallel)
        cache = CACHES[spec.cache_type](model, max_seq_len=cache_tokens)
    else:
        model, cache = _model_and_cache(config, spec, cache_tokens, progress)
    loras = {name: Lora.from_directory(model, folder) for name, folder in spec.loras.items()}
    return GeneratorParts(model, cache, tokenizer, options, loras)


def _config(spec: ModelSpec, path: str | None, max_seq_len: int | None, progress: bool) -> Config:
    config = Config(find_model(path, progress=progress))
    config.device, config.dtype = spec.device or config.device, spec.dtype or config.dtype
    config.cpu_activation_bits = spec.cpu_activation_bits or config.cpu_activation_bits
    config.max_seq_len = max_seq_len or min(config.max_seq_len, DEFAULT_MAX_SEQ_LEN)
    return config


def _model_and_cache(config: Config, spec: ModelSpec, cache_tokens: int, progress: bool) -> tuple[Model, CacheBase]:
    model = Model(config)
    cache = CACHES[spec.cache_type](model, max_seq_len=cache_tokens, lazy=True)
    model.load_autosplit(cache, progress=progress)
    return model, cache
