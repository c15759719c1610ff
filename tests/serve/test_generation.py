"""From requests to jobs and from results to responses, without a server, as a batch uses them."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from exlm import ChatTemplateError, Generator, InputError, Job
from exlm.serve import (
    APIError,
    ChatRequest,
    CompletionRequest,
    Limits,
    ModelInfo,
    ModelSpec,
    load,
    output_delta,
    response_writer,
    to_generation_request,
)
from exlm.serve.chat_prompt import render_chat, template_messages
from exlm.serve.errors import to_api_error, validation_error
from exlm.serve.generation import make_output_parser, needs_grammar, sampling_settings
from exlm.serve.limits import FairLimiter
from exlm.serve.output_parser import ContentDelta
from exlm.serve.tool_formats import GENERIC, HERMES, MISTRAL
from tests.serve.running_server import load_tiny

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
NATIVE = (
    "{% if tools %}<tool_call>{% for t in tools %}{{ t.function.name }}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "assistant:"
)

TURNS = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('take turns') }}{% endif %}"
    "{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "assistant:"
)


@pytest.fixture(scope="module")
def generator(chatty: Path) -> Generator:
    loaded = load_tiny(ModelSpec("tiny", str(chatty)))
    return Generator(loaded.model, loaded.cache, loaded.tokenizer)


@pytest.fixture
def host(generator: Generator) -> ModelInfo:
    return ModelInfo("tiny", generator.tokenizer, generator.max_seq_len, generator.model.config.vocab_size)


@pytest.fixture
def templated(host: ModelInfo, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModelInfo]:
    """The same model with another chat template."""

    def change(source: str) -> ModelInfo:
        from exlm.tokenizer.chat_template import ChatTemplate

        monkeypatch.setitem(host.tokenizer.chat_templates.templates, "default", ChatTemplate(source, "test"))
        return host

    return change


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}], **fields})


def test_a_request_is_answered_without_a_server(generator: Generator, host: ModelInfo) -> None:
    request = CompletionRequest.model_validate({"prompt": ["ab", "cd"], "n": 2, "max_tokens": 5, "seed": 3})
    order = to_generation_request(request, host, Limits())
    jobs = [Job(**arguments) for arguments in order.job_arguments]
    generator.enqueue(jobs)
    answer = response_writer(order, "1", 7)
    while not answer.done:
        for result in generator.iterate():
            if (piece := output_delta(result, order)) is not None:
                answer.push(jobs.index(result["job"]), piece)
    body = answer.body()
    assert (body["id"], body["created"], body["object"]) == ("cmpl-1", 7, "text_completion")
    assert [choice["text"] for choice in body["choices"]] == [job.full_completion for job in jobs]
    assert body["usage"]["prompt_tokens"] == jobs[0].prompt_tokens + jobs[2].prompt_tokens
    json.dumps(body)


def test_sampling_is_neutral_by_default(host: ModelInfo) -> None:
    plain = sampling_settings(chat(), host, Limits())
    assert (plain.temperature, plain.top_p, plain.top_k, plain.token_repetition_penalty) == (1.0, 1.0, 0, 1.0)
    default = Limits(sampling={"temperature": 0.3, "min_p": 0.1})
    assert sampling_settings(chat(temperature=0.5), host, default).temperature == 0.5
    assert sampling_settings(chat(), host, default).min_p == 0.1
    assert sampling_settings(chat(frequency_penalty=0.5), host, default).token_frequency_penalty == 0.5
    assert sampling_settings(chat(xtc_ignore_tokens=["a", 5]), host, default).xtc_ignore_tokens == {
        host.tokenizer.single_id("a"),
        5,
    }


def test_server_defaults_may_name_tokens_by_their_text(host: ModelInfo) -> None:
    default = Limits(sampling={"dry_sequence_breakers": ["a", 5], "dry_multiplier": 0.8})
    number = host.tokenizer.single_id("a")
    assert sampling_settings(chat(), host, default).dry_sequence_breakers == {number, 5}
    assert sampling_settings(chat(dry_sequence_breakers=[7]), host, default).dry_sequence_breakers == {7}
    with pytest.raises(APIError, match="no single token is 'two words'"):
        sampling_settings(chat(), host, Limits(sampling={"xtc_ignore_tokens": ["two words"]}))


def test_max_tokens_without_a_value_is_what_fits(host: ModelInfo) -> None:
    def new(bounds: Limits, **fields: Any) -> int:
        return int(to_generation_request(chat(**fields), host, bounds).job_arguments[0]["max_new_tokens"])

    prompt = to_generation_request(chat(), host, Limits()).job_arguments[0]["input_ids"][0].shape[1]
    assert new(Limits(answer=100)) == 100
    assert new(Limits(answer=100_000)) == host.max_seq_len - prompt
    assert new(Limits(answer=100, tokens=50)) == 50
    assert new(Limits(answer=100), max_tokens=200) == 200
    with pytest.raises(APIError, match="exceed the context"):
        new(Limits(), max_tokens=host.max_seq_len)


def test_minus_one_means_off(host: ModelInfo) -> None:
    request = chat(top_k=-1, max_tokens=-1, seed=-1)
    (job,) = to_generation_request(request, host, Limits(answer=100)).job_arguments
    assert job["gen_settings"].top_k == 0
    assert job["max_new_tokens"] == host.max_seq_len - job["input_ids"][0].shape[1]
    assert job["seed"] is None
    allowed = to_generation_request(chat(max_completion_tokens=-1), host, Limits(answer=100, tokens=300))
    assert allowed.job_arguments[0]["max_new_tokens"] == 300
    for wrong in ({"top_k": -2}, {"max_tokens": 0}, {"max_tokens": -2}):
        with pytest.raises(ValidationError, match="greater than or equal"):
            chat(**wrong)


def test_a_guided_pair_may_be_as_long_as_the_cache_has_room(generator: Generator, host: ModelInfo) -> None:
    hosted = replace(host, max_seq_len=generator.max_sequence_length(), max_cfg_len=generator.max_sequence_length(2))
    assert hosted.max_cfg_len == min(generator.max_seq_len, generator.max_total_tokens // 2)
    asked = {
        "prompt": "a" * (host.max_seq_len - 8),
        "negative_prompt": "b",
        "cfg_scale": 1.5,
        "max_tokens": 4,
    }
    order = to_generation_request(CompletionRequest.model_validate(asked), hosted, Limits())
    job = Job(**order.job_arguments[0])
    assert job.prompt_tokens > host.max_seq_len // 2
    generator.enqueue(job)
    generator.clear_queue()
    with pytest.raises(APIError, match=f"the context {host.max_seq_len // 2}"):
        to_generation_request(
            CompletionRequest.model_validate(asked),
            replace(host, max_cfg_len=host.max_seq_len // 2),
            Limits(),
        )


def test_a_template_that_supports_tools_gets_them(templated: Callable[[str], ModelInfo]) -> None:
    host = templated(NATIVE)
    talk = render_chat(chat(tools=[TOOL]), host.tokenizer)
    assert talk.text == "<tool_call>fuser:hi\nassistant:"
    assert (talk.tool_format, talk.tool_names, talk.forced_call_schema) == (HERMES, {"f"}, None)
    forced = render_chat(chat(tools=[TOOL], tool_choice="required"), host.tokenizer)
    assert forced.text.endswith("assistant:<tool_call>\n")
    assert forced.forced_call_schema is not None
    assert render_chat(chat(tools=[TOOL], tool_choice="none"), host.tokenizer).tool_format is None
    mistral = templated(NATIVE.replace("<tool_call>", "[TOOL_CALLS]"))
    assert render_chat(chat(tools=[TOOL], tool_choice="required"), mistral.tokenizer).tool_format == MISTRAL
    bare = templated(NATIVE.replace("<tool_call>", ""))
    assert render_chat(chat(tools=[TOOL]), bare.tokenizer).tool_format == GENERIC


def test_other_templates_get_tools_in_the_system_message(host: ModelInfo) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    request = chat(messages=messages, tools=[TOOL])
    text = render_chat(request, host.tokenizer).text
    assert '"name": "f"' in text
    assert "user: hi" in text
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' in text
    assert "<tool_response>\n42\n</tool_response>" in text
    native = template_messages(request.messages)
    assert native[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert native[2] == {"role": "tool", "content": "42", "tool_call_id": "1"}


def test_a_template_without_system_messages_gets_tools_in_the_first_turn(
    templated: Callable[[str], ModelInfo],
) -> None:
    host = templated(TURNS)
    calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in ("1", "2")]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": "41", "tool_call_id": "1"},
        {"role": "tool", "content": "42", "tool_call_id": "2"},
    ]
    text = render_chat(chat(messages=messages, tools=[TOOL]), host.tokenizer).text
    asked, answers = text.split("user:")[1:]
    assert '"name": "f"' in asked.partition("\n\nhi\n")[0]
    assert "<tool_response>\n41\n</tool_response>\n<tool_response>\n42\n</tool_response>" in answers
    instructed = chat(messages=[{"role": "system", "content": "Be brief."}, *messages], tools=[TOOL])
    with pytest.raises(ChatTemplateError, match="no system"):
        render_chat(instructed, host.tokenizer)


def test_reasoning_is_parsed_where_the_prompt_opens_it(templated: Callable[[str], ModelInfo]) -> None:
    host = templated(NATIVE + "<think>\n")
    order = to_generation_request(chat(), host, Limits())
    parser = make_output_parser(order)
    assert [type(part).__name__ for part in parser.feed("hm</think>yes") + parser.end()] == [
        "ReasoningDelta",
        "ContentDelta",
    ]
    forced = render_chat(chat(tools=[TOOL], tool_choice="required"), host.tokenizer)
    assert forced.text.endswith("<think>\n</think>\n\n<tool_call>\n")


@pytest.mark.parametrize(
    "form", [{"response_format": {"type": "json_object"}}, {"regex": "[{].*"}, {"grammar": "start: /[{].*/"}]
)
def test_a_constrained_answer_is_not_parsed_as_reasoning(
    templated: Callable[[str], ModelInfo], form: dict[str, Any]
) -> None:
    order = to_generation_request(chat(**form), templated(NATIVE + "<think>\n"), Limits())
    assert order.chat is not None
    assert order.chat.text.endswith("<think>\n</think>\n\n")
    assert order.tokenizer.decode(order.job_arguments[0]["input_ids"][0][0]).endswith("</think>\n\n")
    parser = make_output_parser(order)
    assert parser.feed('{"a": 1}') + parser.end() == [ContentDelta('{"a": 1}')]


def test_needs_grammar() -> None:
    assert not needs_grammar(chat(tools=[TOOL]))
    assert needs_grammar(chat(tools=[TOOL], tool_choice="required"))
    assert needs_grammar(chat(response_format={"type": "json_object"}))
    assert needs_grammar(chat(regex="a"))
    assert not needs_grammar(chat(response_format={"type": "text"}))


def test_the_limiter_counts() -> None:
    gate = FairLimiter(1, "requests")
    with gate.slot():
        with pytest.raises(APIError, match="1 requests") as caught, gate.slot():
            pass
        assert caught.value.headers["Retry-After"].isdigit()
    assert gate.in_use == 0


@given(st.integers(1, 12), st.lists(st.tuples(st.sampled_from("abcde"), st.booleans()), max_size=60))
@settings(max_examples=200)
def test_a_shared_limiter_keeps_a_slot_for_a_caller_without_one(most: int, walk: list[tuple[str, bool]]) -> None:
    gate = FairLimiter(most, "requests", shared=True)
    there: dict[str, list[ExitStack]] = {name: [] for name in "abcde"}
    for name, comes in walk:
        inside = sum(map(len, there.values()))
        assert gate.in_use == inside
        if not comes:
            if there[name]:
                there[name].pop().close()
            continue
        if len(there[name]) < most - inside:
            there[name].append(ExitStack())
            there[name][-1].enter_context(gate.slot(name))
        else:
            with pytest.raises(APIError) as caught, gate.slot(name):
                pass
            assert caught.value.code == ("queue_full" if inside == most else "key_queue_full")
        at_work = [stacks for stacks in there.values() if stacks]
        if all(len(stacks) > 1 for stacks in at_work):
            assert gate.in_use < most


def test_api_errors_do_not_reveal_internals() -> None:
    assert "secret" not in to_api_error(RuntimeError("secret")).message
    assert to_api_error(RuntimeError("secret")).status == 500
    assert validation_error([{"type": "missing", "loc": ("body", "a", 0), "msg": "needed"}]).param == "a.0"


def test_a_model_spec_is_loaded_as_it_says(chatty: Path) -> None:
    loaded = load(ModelSpec("tiny", str(chatty), cache_type="fp8", cache_tokens=300, draft=str(chatty)))
    assert (type(loaded.cache).__name__, loaded.cache.max_seq_len) == ("CacheFP8", 512)
    assert loaded.options["draft_cache"].max_seq_len == 512
    loaded.unload()
    with pytest.raises(InputError, match="cache type"):
        load(ModelSpec("tiny", str(chatty), cache_type="q3"))


def test_an_incompatible_draft_model_is_refused_before_loading(chatty: Path, fixtures_dir: Path) -> None:
    with pytest.raises(InputError, match="has another vocabulary, of 2,048 tokens; the model's has 259"):
        load(ModelSpec("tiny", str(chatty), draft=str(fixtures_dir / "tiny-lm")))


def test_errors_do_not_reveal_model_paths(templated: Callable[[str], ModelInfo], chatty: Path) -> None:
    host = templated("{{ raise_exception('roles must alternate') }}")
    template = host.tokenizer.chat_templates.templates["default"]
    with pytest.MonkeyPatch.context() as patch:
        placed = replace(template, origin=str(chatty / "tokenizer_config.json"))
        patch.setitem(host.tokenizer.chat_templates.templates, "default", placed)
        with pytest.raises(ChatTemplateError, match="roles must alternate") as caught:
            to_generation_request(chat(), host, Limits())
        assert str(chatty) not in str(caught.value)
        assert str(caught.value).startswith("tiny/tokenizer_config.json")
        patch.setattr(host.tokenizer.chat_templates, "templates", {})
        with pytest.raises(APIError, match=r"tiny has no chat template.*/v1/completions"):
            to_generation_request(chat(), host, Limits())
