"""Names that old scripts import and that stand for nothing here. Importing one is harmless; making one raises
`Unsupported`, which says what is missing and what to do instead. A check for what is never missing passes."""

from __future__ import annotations

from typing import ClassVar

from .. import Unsupported


class _Unavailable:
    remedy: ClassVar[str]

    def __init__(self, *arguments: object, **options: object) -> None:
        raise Unsupported(self.remedy)


class VisionTower(_Unavailable):
    """Would turn images into embeddings; exlm reads only the language half of such models."""

    remedy = (
        "This version has no vision tower: it runs the language model of a multimodal folder. Compute image "
        "embeddings elsewhere and pass them as ExLlamaV2MMEmbedding(model, embeddings)."
    )


class MultimodalProjector(_Unavailable):
    """Would map image features into a language model's space."""

    remedy = (
        "This version has no multimodal projector. Project image features elsewhere and pass the result as "
        "ExLlamaV2MMEmbedding(model, embeddings)."
    )


class WebSocketServer(_Unavailable):
    """Would serve the old JSON protocol over a web socket."""

    remedy = (
        "This version has no web-socket server. `exlm serve` streams over HTTP, with the OpenAI API; or use "
        "ExLlamaV2DynamicGeneratorAsync in a server of your own."
    )


class AttentionModule(_Unavailable):
    """Was one layer's attention; exlm binds attention while it loads and shows no such module."""

    remedy = (
        "Attention has no public module: it is bound to its kernels while the model loads. Use "
        "model.forward(ids, cache), or a generator."
    )

    class Params(_Unavailable):
        """Was what a forward pass told every layer."""

        remedy = "Attention parameters are not public: call model.forward(ids, cache, input_mask=…)."

    class PagedParams(Params):
        """Was the same, for pages."""

        remedy = "Page tables are not public: use ExLlamaV2DynamicGenerator, which owns them."


has_flash_attn = has_flash_attn_with_paged = True
"""Old scripts ask before they choose a generator: pages, windows and caps work on every device."""

has_xformers = False
"""Nothing is computed with it."""


class SentencePieceVocabulary(_Unavailable):
    """Was the reader of tokenizer.model."""

    remedy = (
        "A vocabulary is opened by ExLlamaV2Tokenizer(config), which finds its file: use its "
        "`tokenizer_model` attribute."
    )


class JsonVocabulary(_Unavailable):
    """Was the reader of tokenizer.json."""

    remedy = (
        "A vocabulary is opened by ExLlamaV2Tokenizer(config), which finds its file: use its "
        "`tokenizer_model` attribute."
    )


def assert_paged_attn() -> None:
    """Nothing: pages work on every device, so there is nothing to find missing."""
