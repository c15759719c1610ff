"""The official client's calls, against a trained tiny model and, where available, SmolLM2."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from exlm.serve import Engine, ModelSpec, load
from tests.serve.running_server import RunningServer, preloaded, running_server

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
PAD = 0  # the small model's padding token
HELLO: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello, who are you?"}]


class Verdict(BaseModel):
    """A schema for a constrained answer."""

    model_config = {"extra": "forbid", "json_schema_extra": {"x-guidance": {"whitespace_flexible": False}}}
    right: bool
    mark: Literal[1, 2, 3]


@pytest.fixture(scope="module", params=["tiny-lm", "SmolLM2"])
def running(request: pytest.FixtureRequest, fixtures_dir: Path) -> Iterator[RunningServer]:
    if request.param == "tiny-lm":
        engine = preloaded(fixtures_dir / "tiny-lm")
    else:
        path = os.environ.get("EXLM_SMOLLM2")
        if not path:
            pytest.skip("point EXLM_SMOLLM2 at SmolLM2-135M-Instruct.Q4_1.gguf")
        engine = Engine([ModelSpec("tiny", path, max_seq_len=2048, cache_tokens=4096, device="cpu")], load)
        engine.preload("tiny")
    with running_server(engine) as server:
        yield server


@pytest.fixture(scope="module")
def client(running: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=600) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12, temperature=0)
    choice = reply.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert reply.usage is not None
    assert 0 < reply.usage.completion_tokens <= 12
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    again = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12, temperature=0)
    assert again.choices[0].message.content == choice.message.content
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == reply.usage.prompt_tokens - 1


def test_a_stream_equals_the_whole_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12, temperature=0)
    stream = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_completion_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == (whole.choices[0].finish_reason)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_completions_with_several_prompts(client: openai.OpenAI) -> None:
    prompts = ["The history of", "The river"]
    reply = client.completions.create(model="tiny", prompt=prompts, max_tokens=6, temperature=0, n=2, echo=True)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert reply.choices[0].text == reply.choices[1].text
    assert reply.choices[0].text.startswith(prompts[0])
    assert reply.choices[2].text.startswith(prompts[1])
    alone = client.completions.create(model="tiny", prompt=prompts[1], max_tokens=6, temperature=0)
    assert prompts[1] + alone.choices[0].text == reply.choices[2].text


def test_n_and_seed(client: openai.OpenAI) -> None:
    def ask(seed: int) -> list[str | None]:
        reply = client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=8, n=3, seed=seed, temperature=1.5
        )
        return [choice.message.content for choice in reply.choices]

    first = ask(1)
    assert len({*first}) > 1
    assert ask(1) == first
    assert ask(100) != first


def test_stop(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="tiny", prompt="The history of", max_tokens=12, temperature=0)
    stop = reply.choices[0].text[3:5]
    cut = client.completions.create(model="tiny", prompt="The history of", max_tokens=12, temperature=0, stop=[stop])
    assert cut.choices[0].text == reply.choices[0].text.partition(stop)[0]
    assert cut.choices[0].finish_reason == "stop"


def test_logprobs(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    assert reply.choices[0].logprobs is not None
    tokens = reply.choices[0].logprobs.content
    assert tokens
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob  # greedy
        shares = [top.logprob for top in token.top_logprobs]
        assert shares == sorted(shares, reverse=True)
        assert shares[0] <= 0
    plain = client.completions.create(model="tiny", prompt="The", max_tokens=4, temperature=0, logprobs=2)
    listed = plain.choices[0].logprobs
    assert listed is not None
    assert "".join(listed.tokens or []) == plain.choices[0].text
    assert all(len(top) == 2 for top in listed.top_logprobs or [])


def test_logit_bias(client: openai.OpenAI, running: RunningServer) -> None:
    token = running.post("/tokenize", text="a")[1]["tokens"][0]
    reply = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=4, temperature=0, logit_bias={str(token): 100}
    )
    assert reply.choices[0].message.content == "aaaa"


def test_detokenize_inverts_tokenize(running: RunningServer) -> None:
    text = "<|im_start|>user\nné 👍<|im_end|>\n<|endoftext|><|endoftext|> x<|im_end|>"
    tokens = running.post("/tokenize", text=text)[1]["tokens"]
    assert running.post("/tokenize", text="<|endoftext|>")[1]["tokens"] == [PAD]
    assert tokens.count(PAD) == 2
    assert running.post("/detokenize", tokens=tokens) == (200, {"text": text})
    plain = running.post("/detokenize", tokens=tokens, decode_special_tokens=False)
    assert plain == (200, {"text": "user\nné 👍\n x"})


def test_json_schema(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="tiny", messages=HELLO, response_format=Verdict, max_tokens=120, temperature=0, seed=3
    )
    assert isinstance(parsed.choices[0].message.parsed, Verdict)


def test_json_object(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        response_format={"type": "json_object"},
        max_tokens=40,
        temperature=0,
        extra_body={"banned_strings": []},
    )
    text = reply.choices[0].message.content
    assert text is not None
    assert text.lstrip().startswith("{")
    if reply.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_tool_call(client: openai.OpenAI, choice: Any) -> None:
    reply = client.chat.completions.create(
        model="tiny", messages=HELLO, tools=[WEATHER], tool_choice=choice, max_tokens=160, temperature=0
    )
    assert reply.choices[0].finish_reason == "tool_calls"
    (call,) = reply.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


def test_a_streamed_call_equals_a_whole_one(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": HELLO,
        "tools": [WEATHER],
        "tool_choice": "required",
        "max_tokens": 160,
        "temperature": 0,
    }
    (whole,) = client.chat.completions.create(**asked).choices[0].message.tool_calls
    name, arguments, ids = "", "", []
    for chunk in client.chat.completions.create(**asked, stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.function is not None
            ids += [call.id] if call.id else []
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert len(ids) == 1
    assert (name, arguments) == (whole.function.name, whole.function.arguments)


def test_a_conversation_continues_after_tool_calls(client: openai.OpenAI) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
    }
    messages: Any = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
    ]
    reply = client.chat.completions.create(model="tiny", messages=messages, tools=[WEATHER], max_tokens=8)
    assert reply.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_a_reply_can_be_sent_back_unchanged(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 4}
    reply = client.chat.completions.create(**asked, messages=HELLO).choices[0].message
    for said in (reply, reply.model_dump()):
        messages = [*HELLO, said, {"role": "user", "content": "Go on."}]
        assert client.chat.completions.create(**asked, messages=messages).choices


def test_what_the_client_assembled_from_a_stream_can_be_sent_back(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "temperature": 0}
    forced: Any = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 160}
    with client.chat.completions.stream(**asked, **forced, messages=HELLO) as stream:
        called = stream.get_final_completion().choices[0].message
    assert called.tool_calls
    told = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "Sunny."}
    for said in (called, called.model_dump()):
        assert client.chat.completions.create(**asked, messages=[*HELLO, said, told], max_tokens=4).choices
    parsed = client.chat.completions.parse(**asked, messages=HELLO, response_format=Verdict, max_tokens=120)
    judged = parsed.choices[0].message
    assert judged.parsed is not None
    whole = {**judged.model_dump(exclude={"parsed"}), "parsed": judged.parsed.model_dump(), "annotations": []}
    messages = [*HELLO, whole, {"role": "user", "content": "Go on."}]
    assert client.chat.completions.create(**asked, messages=messages, max_tokens=4).choices


def test_nulls_count_as_left_out(client: openai.OpenAI) -> None:
    unused = dict.fromkeys(("n", "stream", "logprobs", "stop", "tools", "seed", "top_p", "banned_strings"))
    reply = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2, extra_body=unused)
    assert len(reply.choices) == 1
    with pytest.raises(openai.BadRequestError, match="frequenzy"):
        client.chat.completions.create(model="tiny", messages=HELLO, extra_body={"frequenzy": None})


def test_fields_without_effect_are_accepted(client: openai.OpenAI) -> None:
    noted: Any = {
        "metadata": {"chat": "1"},
        "store": False,
        "service_tier": "auto",
        "user": "u",
        "extra_body": {"safety_identifier": "u", "prompt_cache_key": "k"},
    }
    asked: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 2, "modalities": ["text"]}
    assert client.chat.completions.create(**asked, **noted).choices
    unused = dict.fromkeys(("functions", "function_call", "audio", "prediction", "reasoning_effort"))
    assert client.chat.completions.create(**asked, extra_body=unused).choices
    plain: Any = {"model": "tiny", "prompt": "The", "max_tokens": 2}
    assert client.completions.create(**plain, best_of=1, suffix=None, extra_body={"suffix": None}).choices
    for asks, value in (("suffix", " end"), ("best_of", 3), ("store", True)):
        with pytest.raises(openai.BadRequestError, match=f"'{asks}'"):
            client.completions.create(**plain, extra_body={asks: value})


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="frequenzy"):
        client.chat.completions.create(model="tiny", messages=HELLO, extra_body={"frequenzy": 1})
    with pytest.raises(openai.NotFoundError, match="no-such"):
        client.chat.completions.create(model="no-such", messages=HELLO)
    with pytest.raises(openai.UnprocessableEntityError, match="temperature"):
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="context") as caught:
        client.completions.create(model="tiny", prompt="word " * 5000, stream=True)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.InternalServerError, match="Embeddings are not supported"):
        client.embeddings.create(model="tiny", input="text")


def test_our_own_fields_are_accepted(client: openai.OpenAI) -> None:
    own = {
        "top_k": 20,
        "min_p": 0.05,
        "dry_multiplier": 0.5,
        "dry_sequence_breakers": ["\n"],
        "xtc_probability": 0.1,
        "mirostat": False,
        "token_repetition_penalty": 1.1,
        "banned_strings": ["the"],
        "min_tokens": 2,
        "token_healing": True,
        "speculative": False,
    }
    reply = client.completions.create(model="tiny", prompt="The history of", max_tokens=8, extra_body=own)
    assert "the" not in reply.choices[0].text.lower()
    guided = {"negative_prompt": "The river", "cfg_scale": 1.5}
    assert client.completions.create(model="tiny", prompt="The", max_tokens=4, extra_body=guided).choices
    only = client.completions.create(model="tiny", prompt="The", max_tokens=8, n=3, extra_body={"regex": "[ab]{3}"})
    for choice in only.choices:
        assert len(choice.text) == 3
        assert {*choice.text} <= {"a", "b"}
    told = client.completions.create(
        model="tiny", prompt="The", max_tokens=8, extra_body={"grammar": 'start: "yes" | "no"'}
    )
    assert told.choices[0].text in ("yes", "no")
