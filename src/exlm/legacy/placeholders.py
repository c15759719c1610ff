"""Names that old scripts import and that stand for nothing here. Importing one is harmless; using one raises
`Unsupported`, which says what is missing and what to do instead. A check for what is never missing passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

from .. import Unsupported


class _Explained(type):
    """The class of placeholders: who looks for something in one, or puts it there, is told the remedy."""

    def __getattr__(cls, name: str) -> NoReturn:
        """An AttributeError, so that a script may ask first, with the remedy in it."""
        raise AttributeError(f"{cls.__name__}.{name} does not exist in exlm. {cls._said()}")

    def __setattr__(cls, name: str, value: object) -> None:
        """Refuse: a method that a script exchanges would never be called."""
        if not name.startswith("__"):
            raise Unsupported(f"{cls.__name__}.{name} cannot be exchanged: nothing calls it. {cls._said()}")
        super().__setattr__(name, value)

    def _said(cls) -> str:
        """The remedy; a class that has none of its own gives that of its base."""
        return next((str(vars(base)["remedy"]) for base in cls.__mro__ if "remedy" in vars(base)), "")


class Unavailable(metaclass=_Explained):
    """A class that old scripts import: it can be asked for and compared with, and nothing is made of it."""

    remedy: ClassVar[str]

    def __init__(self, *arguments: object, **options: object) -> None:
        raise Unsupported(self.remedy)


def unavailable(name: str, remedy: str) -> Callable[..., NoReturn]:
    """A function that old scripts import: it can be called in one way only, which raises the remedy."""

    def refuse(*arguments: Any, **options: Any) -> NoReturn:
        raise Unsupported(f"{name} does not exist in exlm. {remedy}")

    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    refuse.__doc__ = f"Was a function of exllamav2. {remedy}"
    return refuse


class UnavailableObject:
    """An object or table that old scripts import: its functions can be named, and nothing can be done."""

    def __init__(self, name: str, remedy: str) -> None:
        self._error = f"{name} does not exist in exlm. {remedy}"
        self._name, self._remedy = name, remedy

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        """Any function of it; a script may name them all before it calls one."""
        if name.startswith("_"):
            raise AttributeError(name)
        return unavailable(f"{self._name}.{name}", self._remedy)

    def __repr__(self) -> str:
        """What it stands for."""
        return f"<{self._error}>"

    def _refuse(self, *arguments: object, **options: object) -> NoReturn:
        raise Unsupported(self._error)

    __call__ = __getitem__ = __setitem__ = __contains__ = __iter__ = _refuse


class VisionTower(Unavailable):
    """Would turn images into embeddings; exlm reads only the language half of such models."""

    remedy = (
        "This version has no vision tower: it runs the language model of a multimodal folder. Compute image "
        "embeddings elsewhere and pass them as ExLlamaV2MMEmbedding(model, embeddings)."
    )


class MultimodalProjector(Unavailable):
    """Would map image features into a language model's space."""

    remedy = (
        "This version has no multimodal projector. Project image features elsewhere and pass the result as "
        "ExLlamaV2MMEmbedding(model, embeddings)."
    )


class WebSocketServer(Unavailable):
    """Would serve the old JSON protocol over a web socket."""

    remedy = (
        "This version has no web-socket server. `exlm serve` streams over HTTP, with the OpenAI API; or use "
        "ExLlamaV2DynamicGeneratorAsync in a server of your own."
    )


class AttentionModule(Unavailable):
    """Was one layer's attention; exlm binds attention while it loads and shows no such module."""

    remedy = (
        "Attention has no public module: it is bound to its kernels while the model loads. Use "
        "model.forward(ids, cache), or a generator."
    )

    class Params(Unavailable):
        """Was what a forward pass told every layer."""

        remedy = "Attention parameters are not public: call model.forward(ids, cache, input_mask=…)."

    class PagedParams(Params):
        """Was the same, for pages."""

        remedy = "Page tables are not public: use ExLlamaV2DynamicGenerator, which owns them."


AttentionParams, PagedAttentionParams = AttentionModule.Params, AttentionModule.PagedParams

has_flash_attn = has_flash_attn_with_paged = has_flash_attn_with_window = has_flash_attn_with_softcap = True
"""Old scripts ask before they choose a generator: pages, windows and caps work on every device."""

has_xformers = has_lower_right_sdpa = False
"""Nothing is computed with them."""


class SentencePieceVocabulary(Unavailable):
    """Was the reader of tokenizer.model."""

    remedy = (
        "A vocabulary is opened by ExLlamaV2Tokenizer(config), which finds its file: use its "
        "`tokenizer_model` attribute."
    )


class JsonVocabulary(Unavailable):
    """Was the reader of tokenizer.json."""

    remedy = (
        "A vocabulary is opened by ExLlamaV2Tokenizer(config), which finds its file: use its "
        "`tokenizer_model` attribute."
    )


def assert_paged_attn() -> None:
    """Nothing: pages work on every device, so there is nothing to find missing."""
