"""Text to token ids and back: vocabularies, detokenizers and chat templates.

It takes the tokenizer files of a model folder (tokenizer.json, SentencePiece, or a GGUF file's metadata) and
gives `Tokenizer`, and without torch what it is made of: `Codec`, `Detokenizer`, `Vocab`, `ChatTemplates`. Any
package above `errors` may import it; `Tokenizer` is imported when first used, because its tensors need torch.
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
