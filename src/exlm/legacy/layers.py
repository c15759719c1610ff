"""The classes of single layers that old scripts import, mostly to find layers of a kind in `model.modules`.

There are none here: a layer is bound to its kernels while the model loads, and several may be one call.
"""

from __future__ import annotations

from .placeholders import Unavailable


class LayerModule(Unavailable):
    """Was the base of all layers."""

    remedy = (
        "Layers have no public modules: they are bound to their kernels while the model loads. Use "
        "model.forward(ids, cache), or a generator; model.explain() says what runs each part."
    )


class Linear(LayerModule):
    """Was one matrix."""


class MLP(LayerModule):
    """Was one layer's MLP."""


class MoEMLP(LayerModule):
    """Was one layer's router and experts."""


class ParallelDecoder(LayerModule):
    """Was one layer whose attention and MLP read the same input."""


class LinearAttention(LayerModule):
    """Was the layer without attention of models that were searched for (DeciLM)."""


class EmbeddingModule(LayerModule):
    """Was the table of token vectors."""


class PositionEmbedding(LayerModule):
    """Was the table of learned positions."""


class RMSNorm(LayerModule):
    """Was one norm."""


class LayerNorm(LayerModule):
    """Was one norm with a mean and a bias."""


class HeadNorm(LayerModule):
    """Was the norm of each head of queries or keys."""


class Convolution(LayerModule):
    """Was the first layer of a vision tower."""
