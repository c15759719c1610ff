"""The old name of a cache for tensor parallel: here every cache of a shared model is one."""

from __future__ import annotations

from .. import Cache, CacheBase, Model, NotLoaded


def cache_tp(
    model: Model, base: type[CacheBase] = Cache, batch_size: int = 1, max_seq_len: int = -1
) -> CacheBase:
    """A cache of class `base` for a model loaded with `load_tp`: each rank keeps the heads it computes."""
    if model.tp_context is None:
        raise NotLoaded("Cannot create TP cache unless model is loaded with load_tp(): call it first.")
    return base(model, batch_size, max_seq_len)
