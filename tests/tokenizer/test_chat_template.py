"""Chat templates: byte for byte what transformers renders, found wherever a folder keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from exlm.errors import ChatTemplateError, TokenizerError
from exlm.tokenizer.chat_template import ChatTemplate, ChatTemplates, render_chat
from exlm.tokenizer.template_sandbox import TemplateSandbox
from exlm.tokenizer.tokenizer_files import read_tokenizer_files
from tests.tokenizer.sample_vocabularies import byte_level_json, write_folder

CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- 'Tools you may call, one JSON object each:\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{% for message in messages if message.role != 'system' %}
    {% if message.tool_calls is defined and message.tool_calls %}
<|im_start|>{{ message.role }}
        {% for call in message.tool_calls %}
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson(indent=2) }}
        {% endfor %}
<|im_end|>
    {% elif message.role == 'assistant' %}
<|im_start|>assistant
{% generation %}{{ message.content | trim }}{% endgeneration %}<|im_end|>
    {% else %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA = """{{- bos_token }}
{%- set ns = namespace(system='', turns=0) %}
{%- if messages[0]['role'] == 'system' %}
    {%- set ns.system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none %}
    {{- 'Environment: tools\\n' }}
{%- endif %}
{%- if documents %}
    {%- for document in documents %}
        {{- loop.index ~ '. ' ~ document.title | upper ~ ': ' ~ document.text ~ '\\n' }}
    {%- endfor %}
{%- endif %}
{{- 'Today: ' + date_string | default(strftime_now('%Y')) + '\\n\\n' }}
{%- if tools is not none %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) + '\\n\\n' }}
    {%- endfor %}
{%- endif %}
{{- ns.system + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if message.role == 'stop' %}{% break %}{% endif %}
    {%- set ns.turns = ns.turns + 1 %}
    {%- if message.role not in ['user', 'assistant', 'tool'] %}
        {{- raise_exception('unknown role ' ~ message.role) }}
    {%- endif %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('one tool call at a time') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
    {%- elif message.content is iterable and message.content is not string %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {%- for part in message.content %}{{ part.text if part.type == 'text' else '<|image|>' }}{% endfor %}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says what the weather is like <there> & 'then'",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TOOL_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 3}}}
SYSTEM = {"role": "system", "content": "  You are terse. Ünïcödé 你好 🦙 <b>&</b>\n"}
CONVERSATION: list[dict[str, Any]] = [
    SYSTEM,
    {"role": "user", "content": "What's it like in Zürich?"},
    {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]},
    {"role": "tool", "content": '{"rain": true}'},
    {"role": "assistant", "content": " Rain. \n"},
    {"role": "user", "content": "\tOh.  "},
]


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateSandbox]:
    """One process for all of them."""
    made = TemplateSandbox()
    yield made
    made.close()


@pytest.fixture(scope="module")
def oracle() -> Any:
    """A transformers tokenizer to render with."""
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    library = tokenizers.Tokenizer.from_str(byte_level_json())
    return transformers.PreTrainedTokenizerFast(tokenizer_object=library, bos_token="<|endoftext|>")


@pytest.mark.parametrize("template", [CHATML, LLAMA], ids=["chatml", "llama"])
@pytest.mark.parametrize("tools", [None, [TOOL], [TOOL, TOOL]])
@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize(
    "messages", [CONVERSATION, CONVERSATION[1:], CONVERSATION[:2], [{"role": "user", "content": ""}]]
)
def test_renders_what_transformers_renders(
    renderer: TemplateSandbox, oracle: Any, template: str, tools: Any, prompt: bool, messages: Any
) -> None:
    given = {"date_string": "26 Jul 2024"}
    expected = oracle.apply_chat_template(
        messages, chat_template=template, tools=tools, add_generation_prompt=prompt, tokenize=False, **given
    )
    variables = {"bos_token": "<|endoftext|>", **given}
    found = render_chat(
        renderer,
        ChatTemplate(template, "x"),
        messages,
        add_generation_prompt=prompt,
        tools=tools,
        variables=variables,
    )
    assert found == expected


def test_documents_loop_controls_and_parts_render_the_same(renderer: TemplateSandbox, oracle: Any) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image"}]},
        {"role": "skip", "content": "x"},
        {"role": "user", "content": "again"},
        {"role": "stop", "content": "x"},
        {"role": "user", "content": "never"},
    ]
    documents = [{"title": "straße", "text": "long"}, {"title": "b", "text": "c"}]
    expected = oracle.apply_chat_template(messages, chat_template=LLAMA, documents=documents, tokenize=False)
    variables = {"bos_token": "<|endoftext|>"}
    assert expected == render_chat(
        renderer,
        ChatTemplate(LLAMA, "x"),
        messages,
        add_generation_prompt=False,
        documents=documents,
        variables=variables,
    )


@pytest.mark.parametrize(
    "template",
    [
        "{{ tools }}{{ documents }}{{ nothing }}",
        "{{ {'a': '<>&\\u00e9', 'b': [1, 2.5, none, true]} | tojson }}",
        "{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':'), ensure_ascii=false) }}",
        "{% set ns = namespace(a=1, b={}) %}{{ ns.a }}{% set ns.c = 3 %}{{ ns.c }}{{ ns.missing }}",
        "{{ dict(a=1) }}{{ dict([['x', 2]]) }}{{ dict.fromkeys(['k']) }}",
        "  {% if true %}\n    x\n  {% endif %}\n  y\n",
        "{% macro m(x, y=2) %}{{ x }}-{{ y }}{% endmacro %}{{ m(1) }}{{ m(1, y=3) }}",
        "{{ messages | map(attribute='role') | join(',') }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | list }}",
        "{{ 'abc'[::-1] }}{{ 'a,b'.split(',') }}{{ ' x '.strip() }}{{ 'x'.startswith('x') }}{{ '%s' % 3 }}",
        "{{ 7 // 2 }}{{ 7 % 2 }}{{ 2 ** 10 }}{{ 'ab' * 3 }}{{ [1] * 2 }}{{ [1] + [2] }}{{ 1 ~ 'a' }}",
        "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{{ loop is defined }}",
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
        "{% for m in messages %}{{ loop.index0 }}{{ loop.first }}{{ loop.previtem is defined }}{% endfor %}",
    ],
)
def test_the_environment_is_that_of_transformers(renderer: TemplateSandbox, oracle: Any, template: str) -> None:
    expected = oracle.apply_chat_template(CONVERSATION, chat_template=template, tokenize=False)
    found = render_chat(renderer, ChatTemplate(template, "x"), CONVERSATION, add_generation_prompt=False)
    assert found == expected


def test_strftime_now_gives_the_date(renderer: TemplateSandbox) -> None:
    text = render_chat(renderer, ChatTemplate("{{ strftime_now('%Y-%m') }}", "x"), CONVERSATION)
    assert len(text) == 7
    assert text[4] == "-"


def test_a_template_may_raise(renderer: TemplateSandbox) -> None:
    with pytest.raises(ChatTemplateError, match=r"config.json, line \d+: .* refused these messages: unknown role x"):
        render_chat(renderer, ChatTemplate(LLAMA, "config.json"), [{"role": "x", "content": ""}])


def test_every_file_that_may_contain_a_template(tmp_path: Path) -> None:
    path = write_folder(tmp_path)
    assert ChatTemplates.from_folder(read_tokenizer_files(path)).default is None
    write_folder(path, chat_template={"chat_template": "from json"})
    assert ChatTemplates.from_folder(read_tokenizer_files(path)).choose().source == "from json"
    write_folder(path, tokenizer_config={"chat_template": "from config"})
    found = ChatTemplates.from_folder(read_tokenizer_files(path)).choose()
    assert (found.source, found.origin) == ("from config", str(path / "tokenizer_config.json"))
    (path / "chat_template.jinja").write_text("from jinja")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "rag.jinja").write_text("with documents")
    templates = ChatTemplates.from_folder(read_tokenizer_files(path))
    assert templates.choose().source == "from jinja"
    assert templates.choose("rag").source == "with documents"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    write_folder(tmp_path, tokenizer_config={"chat_template": named})
    templates = ChatTemplates.from_folder(read_tokenizer_files(tmp_path))
    assert templates.choose().source == "plain"
    assert templates.choose(with_tools=True).source == "with tools"
    assert templates.choose("tool_use").source == "with tools"
    assert templates.choose("{{ given }}").source == "{{ given }}"


def test_a_choice_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="has no chat template"):
        ChatTemplates.from_folder(read_tokenizer_files(tmp_path)).choose()
    write_folder(tmp_path, tokenizer_config={"chat_template": {"b": "1", "a": "2"}})
    with pytest.raises(ChatTemplateError, match=r"several chat templates and no default.*: a, b"):
        ChatTemplates.from_folder(read_tokenizer_files(tmp_path)).choose()


@pytest.mark.parametrize("value", [5, ["x"], [{"name": "a"}], {"a": 1}])
def test_a_template_of_the_wrong_shape_is_refused(tmp_path: Path, value: object) -> None:
    write_folder(tmp_path, tokenizer_config={"chat_template": value})
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json: .*chat_template"):
        ChatTemplates.from_folder(read_tokenizer_files(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": "hi"}, "messages should be a list of objects, found str"),
        ({"messages": {"role": "user"}}, "messages should be a list of objects, found dict"),
        ({"messages": ["hi"]}, r"messages\[0\] should be an object, found str"),
        ({"messages": CONVERSATION, "tools": [print]}, r"tools\[0\] should be an object"),
        ({"messages": CONVERSATION, "documents": "x"}, "documents should be a list"),
    ],
)
def test_messages_of_the_wrong_shape_are_refused(renderer: TemplateSandbox, arguments: Any, says: str) -> None:
    with pytest.raises(ChatTemplateError, match=says):
        render_chat(renderer, ChatTemplate("x", "x"), **arguments)


TEXT_TEMPLATE = "{% for one in messages %}{{ one.role }}: {{ one.content }}{{ '\\n' }}{% endfor %}"
PARTS_TEMPLATE = """{% for one in messages %}{{ one.role }}: \
{% for part in one.content | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}\
{% for part in one.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}\
{{ '\\n' }}{% endfor %}"""
EITHER_TEMPLATE = """{% for one in messages %}{{ one.role }}: \
{% if one.content is string %}{{ one.content }}{% else %}\
{% for part in one.content %}{{ part['text'] if part.type == 'text' else '<image>' }}{% endfor %}\
{% endif %}{{ '\\n' }}{% endfor %}"""


@pytest.mark.parametrize("source", [TEXT_TEMPLATE, PARTS_TEMPLATE, EITHER_TEMPLATE])
def test_strings_and_text_parts_render_the_same(renderer: TemplateSandbox, source: str) -> None:
    halves = [{"type": "text", "text": "Is this "}, {"type": "text", "text": "read?"}]
    for said in ("Is this read?", halves):
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": said}]
        text = render_chat(renderer, ChatTemplate(source, "it"), messages)
        assert text.splitlines() == ["system: Be brief.", "user: Is this read?"]


def test_images_are_refused_for_templates_that_read_text_only(renderer: TemplateSandbox) -> None:
    seen = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]
    for source in (PARTS_TEMPLATE, EITHER_TEMPLATE):
        assert render_chat(renderer, ChatTemplate(source, "it"), seen).strip() == "user: <image>What is it?"
    with pytest.raises(ChatTemplateError, match=r"messages\[0\] holds a part of type 'image', and it reads"):
        render_chat(renderer, ChatTemplate(TEXT_TEMPLATE, "it"), seen)


def test_messages_stay_unchanged_if_the_content_format_is_unknown(renderer: TemplateSandbox) -> None:
    strict = "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}" + TEXT_TEMPLATE
    messages = [{"role": "system", "content": [{"type": "text", "text": "Hi"}]}]
    assert "'text': 'Hi'" in render_chat(renderer, ChatTemplate(strict, "it"), messages)
