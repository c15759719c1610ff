"""Prompt formats by name: the exact prompts, with and without a system message."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from exlm.errors import ChatTemplateError
from exlm.tokenizer.chat_template import PROMPT_FORMATS, ChatTemplate, ChatTemplates, render_chat
from exlm.tokenizer.template_sandbox import TemplateSandbox

I3 = ("<|im_start|>user\n{U}<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>\n")
H3 = "<|start_header_id|>{}<|end_header_id|>\n\n"
ASK3 = H3.format("user") + "{U}<|eot_id|>" + H3.format("assistant")
COHERE = "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{U}<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
GEMMA = "<bos><start_of_turn>user\n{U}<end_of_turn>\n<start_of_turn>model\n"
GRANITE3 = "<|start_of_role|>user<|end_of_role|>{U}<|end_of_text|><|start_of_role|>assistant<|end_of_role|>"

# name: first prompt with a system message, the same without, later prompts, stop tokens, stop strings,
# (BOS, special tokens encoded)
TABLE: dict[str, tuple[str | None, str, str, set[str], set[str], tuple[bool, bool]]] = {
    "raw": (
        "{S}\nUser: {U}\nAssistant:",
        "User: {U}\nAssistant:",
        "User: {U}\nAssistant:",
        set(),
        {"User:", "U:", "USER:", "user:"},
        (True, False),
    ),
    "llama": (
        "[INST] <<SYS>>\n{S}\n<</SYS>>\n\n{U} [/INST]",
        "[INST] {U} [/INST]",
        "[INST] {U} [/INST]",
        set(),
        set(),
        (True, False),
    ),
    "codellama": (
        "[INST] <<SYS>>\n{S}\n<</SYS>>\n\n{U} [/INST]",
        "[INST] {U} [/INST]",
        "[INST] {U} [/INST]",
        set(),
        set(),
        (True, False),
    ),
    "llama3": (
        H3.format("system") + "{S}<|eot_id|>" + ASK3,
        ASK3,
        "<|eot_id|>" + ASK3,
        {"<|eot_id|>", "<|start_header_id|>"},
        set(),
        (True, True),
    ),
    "qwq": (
        "<|im_start|>system\n{S}<|im_end|>\n" + I3[0] + "<think>\n",
        I3[0] + "<think>\n",
        "".join(reversed(I3)) + "<think>\n",
        {"<|im_end|>"},
        {"<|im_end|>"},
        (False, True),
    ),
    "chatml": (
        "<|im_start|>system\n{S}\n<|im_end|>\n" + I3[0],
        I3[0],
        "".join(reversed(I3)),
        {"<|im_end|>"},
        {"<|im_end|>"},
        (False, True),
    ),
    "tinyllama": (
        "<|im_start|>system\n{S}\n<|im_end|>\n" + I3[0],
        I3[0],
        "".join(reversed(I3)),
        set(),
        {"<|im_end|>"},
        (False, False),
    ),
    "zephyr": (
        "<|system|>\n{S}\n</s>\n<|user|>\n{U}</s>\n<|assistant|>\n",
        "<|user|>\n{U}</s>\n<|assistant|>\n",
        "<|user|>\n{U}</s>\n<|assistant|>\n",
        set(),
        {"<|user|>", "</s>"},
        (False, True),
    ),
    "deepseek": (
        "{S}\n### Instruction:\n{U}\n### Response:\n",
        "### Instruction:\n{U}\n### Response:\n",
        "### Instruction:\n{U}\n### Response:\n",
        set(),
        {"### Instruction"},
        (False, True),
    ),
    "solar": (
        "### System\n{S}\n\n### User:\n{U}\n\n### Assistant:\n",
        "### User:\n{U}\n\n### Assistant:\n",
        "### User:\n{U}\n\n### Assistant:\n",
        set(),
        {"\n\n### User", "\n### User"},
        (False, True),
    ),
    "openchat": (
        "{S}<|end_of_turn|>GPT4 Correct User:{U}<|end_of_turn|>GPT4 Correct Assistant:",
        "GPT4 Correct User:{U}<|end_of_turn|>GPT4 Correct Assistant:",
        "GPT4 Correct User:{U}<|end_of_turn|>GPT4 Correct Assistant:",
        set(),
        {"<|end_of_turn|>", "<|endoftext|>", "GPT4 Correct User:"},
        (False, True),
    ),
    "nous": (
        "{S}\n\nUSER:\n{U}\n\nASSISTANT:\n",
        "USER:\n{U}\n\nASSISTANT:\n",
        "USER:\n{U}\n\nASSISTANT:\n",
        set(),
        {"</s>"},
        (False, True),
    ),
    "gemma": (
        None,
        GEMMA,
        "<end_of_turn>\n" + GEMMA,
        {"<end_of_turn>", "<start_of_turn>"},
        set(),
        (False, True),
    ),
    "cohere": (
        "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{S}<|END_OF_TURN_TOKEN|>" + COHERE,
        "<BOS_TOKEN>" + COHERE,
        "<|END_OF_TURN_TOKEN|>" + COHERE,
        set(),
        {"<|END_OF_TURN_TOKEN|>"},
        (True, True),
    ),
    "phi3": (
        "<s><|system|>\n{S}<|end|>\n<|user|>\n{U}<|end|>\n<|assistant|>\n",
        "<s><|user|>\n{U}<|end|>\n<|assistant|>\n",
        "<|end|>\n<|user|>\n{U}<|end|>\n<|assistant|>\n",
        {"<|end|>", "<|assistant|>", "<|endoftext|>"},
        set(),
        (False, True),
    ),
    "granite": (
        "System:\n{S}\n\nQuestion:\n{U}\n\nAnswer:\n",
        "Question:\n{U}\n\nAnswer:\n",
        "\n\nQuestion:\n{U}\n\nAnswer:\n",
        set(),
        {"\n\nQuestion:"},
        (False, True),
    ),
    "granite3": (
        "<|start_of_role|>system<|end_of_role|>{S}<|end_of_text|>" + GRANITE3,
        GRANITE3,
        GRANITE3,
        set(),
        set(),
        (True, True),
    ),
    "glm": (
        "[gMASK]<sop><|system|>\n{S}<|user|>\n{U}<|assistant|>\n",
        "[gMASK]<sop><|user|>\n{U}<|assistant|>\n",
        "<|user|>\n{U}<|assistant|>\n",
        {"<|user|>"},
        {"<|user|>"},
        (True, True),
    ),
}

SYSTEM = 'Be "brief".\n{{ 1 + 1 }} {U} \\n é'
QUESTIONS = ("Why?\n{S} {% raw %}", "{{ messages }} 'so' \\")


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateSandbox]:
    made = TemplateSandbox()
    yield made
    made.close()


def messages_of(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    """A conversation: the user and the assistant by turns."""
    start = [] if system is None else [{"role": "system", "content": system}]
    return [*start, *({"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts))]


def fill(part: str, user: str, system: str = "") -> str:
    before, _, after = part.partition("{U}")
    return before.replace("{S}", system) + user + after


def test_all_formats_of_exllamav2_are_there() -> None:
    assert list(PROMPT_FORMATS) == list(TABLE)
    assert len(PROMPT_FORMATS) == 18


@pytest.mark.parametrize("name", TABLE)
def test_a_format_renders_the_expected_prompt(name: str, renderer: TemplateSandbox) -> None:
    with_system, without, later, _, _, _ = TABLE[name]
    template = ChatTemplates({}).choose(name)
    one, two = QUESTIONS
    assert render_chat(renderer, template, messages_of(one)) == fill(without, one)
    whole = fill(without, one) + " An answer.\n" + fill(later, two)
    assert render_chat(renderer, template, messages_of(one, " An answer.\n", two)) == whole
    if with_system is None:
        with pytest.raises(ChatTemplateError, match="no place for a system message"):
            render_chat(renderer, template, messages_of(one, system=SYSTEM))
        return
    assert render_chat(renderer, template, messages_of(one, system=SYSTEM)) == fill(with_system, one, SYSTEM)
    whole = fill(with_system, one, SYSTEM) + "Yes" + fill(later, two)
    assert render_chat(renderer, template, messages_of(one, "Yes", two, system=SYSTEM)) == whole


@pytest.mark.parametrize("name", TABLE)
def test_a_format_has_the_expected_flags_and_stops(name: str) -> None:
    *_, tokens, strings, encoded = TABLE[name]
    known = PROMPT_FORMATS[name]
    assert (set(known.stop_tokens), set(known.stop_strings)) == (tokens, strings)
    assert (known.add_bos, known.encode_special_tokens) == encoded


def test_unsupported_roles_are_refused(renderer: TemplateSandbox) -> None:
    messages = [*messages_of("Hi"), {"role": "tool", "content": "4"}]
    with pytest.raises(ChatTemplateError, match="no place for the role tool"):
        render_chat(renderer, ChatTemplates({}).choose("chatml"), messages)


def test_a_models_own_template_of_that_name_wins() -> None:
    own = ChatTemplate("{{ 1 }}", "a file")
    templates = ChatTemplates({"llama": own})
    assert templates.choose("llama") is own
    assert templates.choose("llama3").format is PROMPT_FORMATS["llama3"]
    assert templates.names.count("llama") == 1
    assert set(templates.names) == set(PROMPT_FORMATS)
