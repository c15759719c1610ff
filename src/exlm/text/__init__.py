"""Strings and ids: vocabularies, their lookup tables, streams of text, chat templates. No torch."""

from .chat import ChatTemplates, Template, render_chat
from .codec import EMBEDDING_INDEX, Codec, ModelIds
from .detokenize import Detokenizer
from .renderer import Limits, Renderer
from .vocab import Trie, Vocab

__all__ = [
    "EMBEDDING_INDEX",
    "ChatTemplates",
    "Codec",
    "Detokenizer",
    "Limits",
    "ModelIds",
    "Renderer",
    "Template",
    "Trie",
    "Vocab",
    "render_chat",
]
