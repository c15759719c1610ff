"""Encodes text to token ids, decodes token ids to text and renders chat templates.

It takes a model folder's tokenizer files (tokenizer.json or a SentencePiece tokenizer.model) or a GGUF file's
metadata, and gives `Tokenizer`, whose ids are tensors, and beneath it `Codec`, whose ids are lists of int,
`Detokenizer`, `Vocab` and `ChatTemplates`. constrained, generator, multimodal, testing and every package
above them may import it; none of it needs torch but `Tokenizer`, which is therefore imported on first use.
"""

from typing import TYPE_CHECKING

from ..lazy import lazy_exports
from .chat_template import ChatTemplate, ChatTemplates, render_chat
from .codec import EMBEDDING_INDEX, Codec, ConfigTokenIds
from .detokenizer import Detokenizer
from .template_sandbox import TemplateLimits, TemplateSandbox
from .vocab import Trie, Vocab

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

__all__ = [
    "EMBEDDING_INDEX",
    "ChatTemplate",
    "ChatTemplates",
    "Codec",
    "ConfigTokenIds",
    "Detokenizer",
    "TemplateLimits",
    "TemplateSandbox",
    "Tokenizer",
    "Trie",
    "Vocab",
    "render_chat",
]

__getattr__, __dir__ = lazy_exports(__name__, globals(), {"tokenizer": ("Tokenizer",)})
