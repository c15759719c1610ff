"""Loading a replica's model: as the server does, or with a share of every layer on each of some devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from exlm import CACHES, Config, InputError, Lora, Model, Tokenizer, find_model
from exlm.serve import GeneratorParts, ModelSpec, load
from exlm.serve.models import DEFAULT_MAX_SEQ_LEN, PAGE

ANY = 1 << 19
"""GB of a device that a rank may have: as many as it needs."""


def loader(tensor_parallel: int = 1) -> Callable[[ModelSpec], GeneratorParts]:
    """What reads a listed model into memory, shared among so many devices."""
    return load if tensor_parallel == 1 else partial(_load_shared, ranks=tensor_parallel)


def _load_shared(listing: ModelSpec, ranks: int) -> GeneratorParts:
    if listing.draft not in (None, "ngram"):
        raise InputError(
            f"A model shared by several GPUs takes no draft model but ngram, found {listing.draft!r}."
        )
    if listing.cache_type not in CACHES:
        raise InputError(f"The cache type must be one of {', '.join(CACHES)}, found {listing.cache_type!r}.")
    config = Config(find_model(listing.path))
    config.device, config.dtype = listing.device or config.device, listing.dtype or config.dtype
    config.max_seq_len = listing.max_seq_len or min(config.max_seq_len, DEFAULT_MAX_SEQ_LEN)
    model = Model(config)
    model.load_tp([ANY] * ranks)
    room = listing.cache_tokens or 4 * config.max_seq_len
    cache = CACHES[listing.cache_type](model, max_seq_len=-(-room // PAGE) * PAGE)
    options = {"max_batch_size": listing.max_batch_size, "use_ngram_draft": listing.draft == "ngram"}
    loras = {name: Lora.from_directory(model, folder) for name, folder in listing.loras.items()}
    return GeneratorParts(model, cache, Tokenizer(config), options, loras)
