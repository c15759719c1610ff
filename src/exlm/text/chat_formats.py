"""Chat formats by name, for models that bring no template: plain data, each made into a Jinja template.

A format writes `first`, perhaps the system message, and for every turn of the user `user` around its text,
with `later` in front of all but the first; answers stand between them as they are. It also knows what the
template cannot say: how its text is encoded, and what ends an answer besides the model's own EOS.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

Around = tuple[str, str]
"""What stands before and after a text."""


@dataclass(frozen=True)
class ChatFormat:
    """One way to write a conversation."""

    user: Around
    system: Around | None = ("", "\n")
    first: str = ""
    later: str = ""
    bos: bool = False
    """Whether a BOS goes before everything."""
    special: bool = True
    """Whether special tokens written in the text are such tokens."""
    stop_tokens: tuple[str, ...] = ()
    """Special tokens that end an answer."""
    stop_strings: tuple[str, ...] = ()
    default_system: str | None = None
    """What a conversation without a system message is told."""

    @property
    def source(self) -> str:
        """The Jinja template; it always ends where an answer begins."""
        system = "raise_exception('This chat format has no place for a system message.')"
        if self.system is not None:
            system = f"{_quoted(self.system[0])} + messages[0].content + {_quoted(self.system[1])}"
        return (
            f"{{{{- {_quoted(self.first)} -}}}}"
            "{%- set talk = messages -%}"
            "{%- if messages[0].role == 'system' -%}{%- set talk = messages[1:] -%}"
            f"{{{{- {system} -}}}}"
            "{%- endif -%}"
            "{%- for message in talk -%}"
            "{%- if message.role == 'user' -%}"
            f"{{{{- '' if loop.first else {_quoted(self.later)} -}}}}"
            f"{{{{- {_quoted(self.user[0])} + message.content + {_quoted(self.user[1])} -}}}}"
            "{%- elif message.role == 'assistant' -%}{{- message.content -}}"
            "{%- else -%}{{- raise_exception('This chat format has no place for the role '"
            " ~ message.role ~ '.') -}}{%- endif -%}"
            "{%- endfor -%}"
        )

    def ends(self, single_id: Callable[[str], int | None]) -> list[int | str]:
        """What ends an answer: ids of tokens, and texts, also of tokens that the model does not have."""
        tokens = [(text, single_id(text)) for text in self.stop_tokens]
        return [*(text if number is None else number for text, number in tokens), *self.stop_strings]


def _quoted(text: str) -> str:
    """A string as Jinja writes it."""
    return json.dumps(text)


def _header(role: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


def _turn(role: str) -> str:
    return f"<|START_OF_TURN_TOKEN|><|{role}_TOKEN|>"


def _role(role: str) -> str:
    return f"<|start_of_role|>{role}<|end_of_role|>"


_LLAMA = ChatFormat(
    first="[INST] ",
    system=("<<SYS>>\n", "\n<</SYS>>\n\n"),
    user=("", " [/INST]"),
    later="[INST] ",
    bos=True,
    special=False,
)
_COHERE_END = "<|END_OF_TURN_TOKEN|>"

FORMATS: Mapping[str, ChatFormat] = MappingProxyType(
    {
        "raw": ChatFormat(
            user=("User: ", "\nAssistant:"),
            bos=True,
            special=False,
            stop_strings=("User:", "U:", "USER:", "user:"),
            default_system="This is a conversation between a helpful AI assistant and a user.",
        ),
        "llama": _LLAMA,
        "codellama": _LLAMA,
        "llama3": ChatFormat(
            system=(_header("system"), "<|eot_id|>"),
            user=(_header("user"), "<|eot_id|>" + _header("assistant")),
            later="<|eot_id|>",
            bos=True,
            stop_tokens=("<|eot_id|>", "<|start_header_id|>"),
        ),
        "qwq": ChatFormat(
            system=("<|im_start|>system\n", "<|im_end|>\n"),
            user=("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n<think>\n"),
            later="<|im_end|>\n",
            stop_tokens=("<|im_end|>",),
            stop_strings=("<|im_end|>",),
        ),
        "chatml": ChatFormat(
            system=("<|im_start|>system\n", "\n<|im_end|>\n"),
            user=("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
            later="<|im_end|>\n",
            stop_tokens=("<|im_end|>",),
            stop_strings=("<|im_end|>",),
        ),
        "tinyllama": ChatFormat(
            system=("<|im_start|>system\n", "\n<|im_end|>\n"),
            user=("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
            later="<|im_end|>\n",
            special=False,
            stop_strings=("<|im_end|>",),
        ),
        "zephyr": ChatFormat(
            system=("<|system|>\n", "\n</s>\n"),
            user=("<|user|>\n", "</s>\n<|assistant|>\n"),
            stop_strings=("<|user|>", "</s>"),
        ),
        "deepseek": ChatFormat(
            user=("### Instruction:\n", "\n### Response:\n"),
            stop_strings=("### Instruction",),
        ),
        "solar": ChatFormat(
            system=("### System\n", "\n\n"),
            user=("### User:\n", "\n\n### Assistant:\n"),
            stop_strings=("\n\n### User", "\n### User"),
        ),
        "openchat": ChatFormat(
            system=("", "<|end_of_turn|>"),
            user=("GPT4 Correct User:", "<|end_of_turn|>GPT4 Correct Assistant:"),
            stop_strings=("<|end_of_turn|>", "<|endoftext|>", "GPT4 Correct User:"),
        ),
        "nous": ChatFormat(
            system=("", "\n\n"),
            user=("USER:\n", "\n\nASSISTANT:\n"),
            stop_strings=("</s>",),
        ),
        "gemma": ChatFormat(
            system=None,
            user=("<bos><start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n"),
            later="<end_of_turn>\n",
            stop_tokens=("<end_of_turn>", "<start_of_turn>"),
        ),
        "cohere": ChatFormat(
            first="<BOS_TOKEN>",
            system=(_turn("SYSTEM"), _COHERE_END),
            user=(_turn("USER"), _COHERE_END + _turn("CHATBOT")),
            later=_COHERE_END,
            bos=True,
            stop_strings=(_COHERE_END,),
        ),
        "phi3": ChatFormat(
            first="<s>",
            system=("<|system|>\n", "<|end|>\n"),
            user=("<|user|>\n", "<|end|>\n<|assistant|>\n"),
            later="<|end|>\n",
            stop_tokens=("<|end|>", "<|assistant|>", "<|endoftext|>"),
        ),
        "granite": ChatFormat(
            system=("System:\n", "\n\n"),
            user=("Question:\n", "\n\nAnswer:\n"),
            later="\n\n",
            stop_strings=("\n\nQuestion:",),
        ),
        "granite3": ChatFormat(
            system=(_role("system"), "<|end_of_text|>"),
            user=(_role("user"), "<|end_of_text|>" + _role("assistant")),
            bos=True,
        ),
        "glm": ChatFormat(
            first="[gMASK]<sop>",
            system=("<|system|>\n", ""),
            user=("<|user|>\n", "<|assistant|>\n"),
            bos=True,
            stop_tokens=("<|user|>",),
            stop_strings=("<|user|>",),
        ),
    }
)
"""The formats of the old library's chat, by the names they had there."""
