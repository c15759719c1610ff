"""Requests as real clients write them, with every field that their classes have."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import completion_create_params as text_fields
from openai.types.chat import completion_create_params as chat_fields
from pydantic import ValidationError

from exlm.serve import ChatRequest, CompletionRequest
from tests.serve.running_server import RunningServer

HI = {"role": "user", "content": "hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def chat(*messages: dict[str, Any], **more: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": list(messages), **more})


def test_nested_nulls_count_as_left_out() -> None:
    unused = dict.fromkeys(("name", "tool_calls", "tool_call_id", "function_call", "refusal", "audio"))
    part = {"type": "text", "text": "hi", "image_url": None, "input_audio": None}
    plain = [
        HI,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "", "tool_call_id": "1"},
    ]
    assert chat(*({**unused, **one} for one in plain)) == chat(*plain)
    assert chat({"role": "system", "content": "", **unused}, HI) == chat({"role": "system", "content": ""}, HI)
    assert chat({**HI, "content": [part]}) == chat({**HI, "content": [{"type": "text", "text": "hi"}]})
    more = {"stream": True, "stream_options": {"include_usage": None, "include_obfuscation": None}}
    assert chat(HI, **more, response_format={"type": "text", "json_schema": None}).stream_options is not None
    bare = {"id": None, "type": None, "index": None, "function": {"name": "f", "arguments": None}}
    called = chat(HI, {"role": "assistant", "tool_calls": [bare]})
    assert called == chat(HI, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]})


def test_every_field_of_the_official_client_may_be_null() -> None:
    chats = {name for name in chat_fields.CompletionCreateParamsBase.__annotations__ if name != "messages"}
    assert chat(HI, **dict.fromkeys(chats)) == chat(HI)
    texts = {name for name in text_fields.CompletionCreateParamsBase.__annotations__ if name != "prompt"}
    assert CompletionRequest.model_validate({**dict.fromkeys(texts), "prompt": "a"}).prompt == "a"


@pytest.mark.parametrize(
    "message",
    [
        {**HI, "toolcalls": None},
        {**HI, "tool_calls": [CALL]},
        {"role": "user", "content": None},
        {"role": "user"},
    ],
)
def test_unknown_and_missing_fields_are_still_refused(message: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        chat(message)


def test_messages_as_litellm_sends_them_back_are_accepted() -> None:
    notes = {"provider_specific_fields": {"refusal": None}}
    function = {**CALL["function"], **notes}  # type: ignore[dict-item]
    said = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{**CALL, "function": function, **notes}],
        **notes,
    }
    assert chat(HI, said, {"role": "tool", "content": "1", "tool_call_id": "1"}).messages


@pytest.mark.parametrize(
    "messages",
    [
        [HI],
        [
            HI,
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "content": "1", "tool_call_id": "1"},
        ],
    ],
)
def test_tokenize_counts_what_a_chat_uses(server: RunningServer, messages: list[Any]) -> None:
    counted = server.post("/tokenize", messages=messages)[1]["count"]
    reply = server.post("/v1/chat/completions", messages=messages, max_tokens=1)[1]
    assert reply["usage"]["prompt_tokens"] == counted


def test_no_op_values_of_unsupported_fields_are_accepted() -> None:
    asked = {"prompt": "a", "n": 2, "best_of": 2, "suffix": ""}
    assert CompletionRequest.model_validate(asked).n == 2
    for more in ({"best_of": 3}, {"suffix": "b"}, {"best_of": 2, "n": 1}):
        with pytest.raises(ValidationError):
            CompletionRequest.model_validate({**asked, **more})
