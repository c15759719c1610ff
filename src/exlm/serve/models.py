"""A model that may be served, and loading it: from a registered name to the parts of a generator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from exlm import (
    CACHES,
    CacheBase,
    Config,
    InputError,
    Lora,
    Model,
    Tokenizer,
    find_model,
)

PAGE = 256
DEFAULT_MAX_SEQ_LEN = 8192


@dataclass(frozen=True)
class ModelSpec:
    """A model under the name that requests know it by. Where it lies is known only here.

    `path` is what `find_model` takes. `cache_tokens` is the room that all requests share; None is four
    sequences of full length. The rest is as in `LLM`.
    """

    name: str
    path: str | None = None
    max_seq_len: int | None = None
    cache_tokens: int | None = None
    cache_type: str = "fp16"
    device: str | None = None
    dtype: str | None = None
    draft: str | None = None
    max_batch_size: int | None = None
    loras: Mapping[str, str] = field(default_factory=dict)
    """Folders of adapters by the names that requests know them by."""


@dataclass(frozen=True)
class GeneratorParts:
    """The parts of a generator, and its adapters by name."""

    model: Any
    cache: Any
    tokenizer: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the generator."""
    loras: Mapping[str, Any] = field(default_factory=dict)

    def unload(self) -> None:
        """Give the memory back."""
        for model in (self.model, self.options.get("draft_model")):
            if model is not None and hasattr(model, "unload"):
                model.unload()


def load(spec: ModelSpec, progress: bool = False) -> GeneratorParts:
    """Read a model, its draft model and its adapters into memory."""
    if spec.cache_type not in CACHES:
        raise InputError(f"The cache type must be one of {', '.join(CACHES)}, found {spec.cache_type!r}.")
    config = _config(spec, spec.path, spec.max_seq_len, progress)
    tokenizer = Tokenizer(config)
    room = spec.cache_tokens or 4 * config.max_seq_len
    tokens = -(-room // PAGE) * PAGE
    options: dict[str, Any] = {"max_batch_size": spec.max_batch_size}
    if spec.draft == "ngram":
        options["use_ngram_draft"] = True
    elif spec.draft is not None:
        small = _config(spec, spec.draft, config.max_seq_len, progress)
        tokenizer.check_draft(small)
        options["draft_model"], options["draft_cache"] = _model_and_cache(small, spec, tokens, progress)
    model, cache = _model_and_cache(config, spec, tokens, progress)
    loras = {name: Lora.from_directory(model, folder) for name, folder in spec.loras.items()}
    return GeneratorParts(model, cache, tokenizer, options, loras)


def _config(listing: ModelSpec, path: str | None, length: int | None, progress: bool) -> Config:
    config = Config(find_model(path, progress=progress))
    config.device, config.dtype = listing.device or config.device, listing.dtype or config.dtype
    config.max_seq_len = length or min(config.max_seq_len, DEFAULT_MAX_SEQ_LEN)
    return config


def _model_and_cache(
    config: Config, listing: ModelSpec, tokens: int, progress: bool
) -> tuple[Model, CacheBase]:
    model = Model(config)
    cache = CACHES[listing.cache_type](model, max_seq_len=tokens, lazy=True)
    model.load_autosplit(cache, progress=progress)
    return model, cache
