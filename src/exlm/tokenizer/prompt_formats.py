"""Prompt formats by name, for models without a chat template: plain data that becomes a Jinja template.

A prompt consists of `prefix`, the system message within `system`, and each of the user's messages within
`user`, with `turn_separator` before all but the first; the assistant's messages stand between them unchanged.
A format also has what a template cannot express: how the prompt is encoded, and what stops generation besides
EOS. Users know prompt formats as chat formats.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

Affixes = tuple[str, str]
"""The strings before and after a message."""


@dataclass(frozen=True)
class PromptFormat:
    """How one kind of model writes a conversation; fields are described in the module's docstring."""

    user: Affixes
    system: Affixes | None = ("", "\n")
    prefix: str = ""
    turn_separator: str = ""
    add_bos: bool = False
    """Whether the prompt starts with BOS."""
    encode_special_tokens: bool = True
    """Whether special tokens written in the prompt are encoded as such, not as plain text."""
    stop_tokens: tuple[str, ...] = ()
    """Special tokens that end the assistant's message."""
    stop_strings: tuple[str, ...] = ()
    default_system: str | None = None
    """The system message of a conversation that has none."""

    @property
    def source(self) -> str:
        """The Jinja template; every prompt it renders ends where the assistant's next message begins."""
        system = "raise_exception('This chat format has no place for a system message.')"
        if self.system is not None:
            system = (
                f"{_jinja_string(self.system[0])} + messages[0].content + {_jinja_string(self.system[1])}"
            )
        return (
            f"{{{{- {_jinja_string(self.prefix)} -}}}}"
            "{%- set turns = messages -%}"
            "{%- if messages[0].role == 'system' -%}{%- set turns = messages[1:] -%}"
            f"{{{{- {system} -}}}}"
            "{%- endif -%}"
            "{%- for message in turns -%}"
            "{%- if message.role == 'user' -%}"
            f"{{{{- '' if loop.first else {_jinja_string(self.turn_separator)} -}}}}"
            f"{{{{- {_jinja_string(self.user[0])} + message.content + {_jinja_string(self.user[1])} -}}}}"
            "{%- elif message.role == 'assistant' -%}{{- message.content -}}"
            "{%- else -%}{{- raise_exception('This chat format has no place for the role '"
            " ~ message.role ~ '.') -}}{%- endif -%}"
            "{%- endfor -%}"
        )

    def stop_conditions(self, single_id: Callable[[str], int | None]) -> list[int | str]:
        """Stop conditions of a job: ids of stop tokens (their text if they have none) and stop strings."""
        tokens = [(text, single_id(text)) for text in self.stop_tokens]
        return [*(text if token_id is None else token_id for text, token_id in tokens), *self.stop_strings]


def _jinja_string(text: str) -> str:
    return json.dumps(text)


def _llama3_header(role: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


def _cohere_turn(role: str) -> str:
    return f"<|START_OF_TURN_TOKEN|><|{role}_TOKEN|>"


def _granite_role(role: str) -> str:
    return f"<|start_of_role|>{role}<|end_of_role|>"


_LLAMA = PromptFormat(
    prefix="[INST] ",
    system=("<<SYS>>\n", "\n<</SYS>>\n\n"),
    user=("", " [/INST]"),
    turn_separator="[INST] ",
    add_bos=True,
    encode_special_tokens=False,
)
_COHERE_END = "<|END_OF_TURN_TOKEN|>"

PROMPT_FORMATS: Mapping[str, PromptFormat] = MappingProxyType(
    {
        "raw": PromptFormat(
            user=("User: ", "\nAssistant:"),
            add_bos=True,
            encode_special_tokens=False,
            stop_strings=("User:", "U:", "USER:", "user:"),
            default_system="This is a conversation between a helpful AI assistant and a user.",
        ),
        "llama": _LLAMA,
        "codellama": _LLAMA,
        "llama3": PromptFormat(
            system=(_llama3_header("system"), "<|eot_id|>"),
            user=(_llama3_header("user"), "<|eot_id|>" + _llama3_header("assistant")),
            turn_separator="<|eot_id|>",
            add_bos=True,
            stop_tokens=("<|eot_id|>", "<|start_header_id|>"),
        ),
        "qwq": PromptFormat(
            system=("<|im_start|>system\n", "<|im_end|>\n"),
            user=("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n<think>\n"),
            turn_separator="<|im_end|>\n",
            stop_tokens=("<|im_end|>",),
            stop_strings=("<|im_end|>",),
        ),
        "chatml": PromptFormat(
            system=("<|im_start|>system\n", "\n<|im_end|>\n"),
            user=("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
            turn_separator="<|im_end|>\n",
            stop_tokens=("<|im_end|>",),
            stop_strings=("<|im_end|>",),
        ),
        "tinyllama": PromptFormat(
            system=("<|im_start|>system\n", "\n<|im_end|>\n"),
            user=("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
            turn_separator="<|im_end|>\n",
            encode_special_tokens=False,
            stop_strings=("<|im_end|>",),
        ),
        "zephyr": PromptFormat(
            system=("<|system|>\n", "\n</s>\n"),
            user=("<|user|>\n", "</s>\n<|assistant|>\n"),
            stop_strings=("<|user|>", "</s>"),
        ),
        "deepseek": PromptFormat(
            user=("### Instruction:\n", "\n### Response:\n"),
            stop_strings=("### Instruction",),
        ),
        "solar": PromptFormat(
            system=("### System\n", "\n\n"),
            user=("### User:\n", "\n\n### Assistant:\n"),
            stop_strings=("\n\n### User", "\n### User"),
        ),
        "openchat": PromptFormat(
            system=("", "<|end_of_turn|>"),
            user=("GPT4 Correct User:", "<|end_of_turn|>GPT4 Correct Assistant:"),
            stop_strings=("<|end_of_turn|>", "<|endoftext|>", "GPT4 Correct User:"),
        ),
        "nous": PromptFormat(
            system=("", "\n\n"),
            user=("USER:\n", "\n\nASSISTANT:\n"),
            stop_strings=("</s>",),
        ),
        "gemma": PromptFormat(
            system=None,
            user=("<bos><start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n"),
            turn_separator="<end_of_turn>\n",
            stop_tokens=("<end_of_turn>", "<start_of_turn>"),
        ),
        "cohere": PromptFormat(
            prefix="<BOS_TOKEN>",
            system=(_cohere_turn("SYSTEM"), _COHERE_END),
            user=(_cohere_turn("USER"), _COHERE_END + _cohere_turn("CHATBOT")),
            turn_separator=_COHERE_END,
            add_bos=True,
            stop_strings=(_COHERE_END,),
        ),
        "phi3": PromptFormat(
            prefix="<s>",
            system=("<|system|>\n", "<|end|>\n"),
            user=("<|user|>\n", "<|end|>\n<|assistant|>\n"),
            turn_separator="<|end|>\n",
            stop_tokens=("<|end|>", "<|assistant|>", "<|endoftext|>"),
        ),
        "granite": PromptFormat(
            system=("System:\n", "\n\n"),
            user=("Question:\n", "\n\nAnswer:\n"),
            turn_separator="\n\n",
            stop_strings=("\n\nQuestion:",),
        ),
        "granite3": PromptFormat(
            system=(_granite_role("system"), "<|end_of_text|>"),
            user=(_granite_role("user"), "<|end_of_text|>" + _granite_role("assistant")),
            add_bos=True,
        ),
        "glm": PromptFormat(
            prefix="[gMASK]<sop>",
            system=("<|system|>\n", ""),
            user=("<|user|>\n", "<|assistant|>\n"),
            add_bos=True,
            stop_tokens=("<|user|>",),
            stop_strings=("<|user|>",),
        ),
    }
)
"""The prompt formats of exllamav2's chat example, under the names they have there."""
