"""However a text is cut into deltas, the events of a stream add up to the whole response."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from exlm.serve.chat_prompt import ChatPrompt
from exlm.serve.generation import (
    MIN_LOGPROB,
    FinishInfo,
    GenerationRequest,
    OutputDelta,
    TokenLogprobs,
    output_delta,
)
from exlm.serve.openai import response_writer
from exlm.serve.tool_formats import GENERIC, HERMES, LLAMA3, MISTRAL, ToolFormat

END = FinishInfo(
    "stop",
    prompt_tokens=5,
    cached_tokens=2,
    new_tokens=7,
    accepted_draft_tokens=1,
    rejected_draft_tokens=2,
    seconds=(0.1, 0.2, 0.5),
)
CALL = '{"name": "f", "arguments": {"a": "é}"}}'
FRAGMENTS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    CALL,
    f"[{CALL}]",
    " ",
    "\n",
    "hi",
    "; ",
]


class Words:
    """A tokenizer of five words."""

    def get_id_to_piece_list(self, include_special_tokens: bool = False) -> list[str]:
        return ["a", "b", "c", "\ufffd", ""]


def order(style: ToolFormat | None, top: int | None = None, count: int = 1, **options: Any) -> GenerationRequest:
    talk = ChatPrompt("", style, frozenset({"f"}))
    return GenerationRequest("m", Words(), job_arguments=({},) * count, top_logprobs=top, chat=talk, **options)  # type: ignore[arg-type]


def accumulate(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client assembles from a stream's events."""
    message: dict[str, Any] = {"role": None, "content": "", "reasoning_content": "", "tool_calls": []}
    reason = None
    for told in events:
        (choice,) = told["choices"]
        assert reason is None, "something came after the end"
        reason = choice["finish_reason"]
        delta = choice["delta"]
        message["role"] = delta.get("role", message["role"])
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name, "")
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"id": call["id"], "type": call["type"], "function": call["function"]})
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return {"message": message, "finish_reason": reason}


@given(
    st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=2), max_size=6).map("".join),
    st.sampled_from([None, HERMES, LLAMA3, MISTRAL, GENERIC]),
    st.lists(st.integers(0, 200), max_size=6),
)
def test_events_add_up_to_the_reply(text: str, style: ToolFormat | None, cuts: list[int]) -> None:
    answer = response_writer(order(style), "id", 1)
    events = answer.start_events()
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    for start, stop in pairwise(places):
        events += answer.push(0, OutputDelta(text[start:stop]))
    events += answer.push(0, OutputDelta(finish=END))
    (choice,) = answer.body()["choices"]
    whole = {"content": "", "reasoning_content": "", "tool_calls": [], **choice["message"]}
    whole["content"] = whole["content"] or ""
    assert accumulate(events) == {"message": whole, "finish_reason": choice["finish_reason"]}
    assert (choice["finish_reason"] == "tool_calls") == bool(whole["tool_calls"])


def test_usage_counts_a_shared_prompt_once() -> None:
    answer = response_writer(order(None, count=4, n=2, include_usage=True))
    for place in range(4):
        answer.push(place, OutputDelta("x", finish=END))
    usage = answer.usage()
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (10, 28, 38)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 4
    assert answer.timings()["tokens_per_second"] == 56
    (last,) = answer.final_events()
    assert last["choices"] == []
    assert last["usage"] == usage


def test_every_token_is_sent_exactly_once() -> None:
    tokens = [TokenLogprobs(letter, -1.0, ()) for letter in "abc"]
    answer = response_writer(order(HERMES, top=0))
    events = answer.push(0, OutputDelta(" ", (tokens[0],)))  # held back: it may be the space before a call
    assert events == []
    events += answer.push(0, OutputDelta("b", (tokens[1],)))
    events += answer.push(0, OutputDelta(finish=END, tokens=(tokens[2],)))
    told = [
        token["token"]
        for event in events
        for token in (event["choices"][0].get("logprobs") or {"content": []})["content"]
    ]
    assert told == ["a", "b", "c"]
    assert [token["token"] for token in answer.body()["choices"][0]["logprobs"]["content"]] == ["a", "b", "c"]


def test_logprobs_are_the_models_own() -> None:
    logits = torch.tensor([[[1.0, 3.0, 2.0, float("-inf"), 0.0]]])
    result = {
        "stage": "streaming",
        "eos": False,
        "text": "c",
        "logits": logits,
        "token_ids": torch.tensor([[3]]),
    }
    piece = output_delta(result, order(None, top=2))
    assert piece is not None
    (token,) = piece.tokens
    assert token.logprob == MIN_LOGPROB
    assert [text for text, _ in token.top_logprobs] == ["b", "c"]
    assert abs(token.top_logprobs[0][1] - float(torch.log_softmax(logits[0, 0], -1)[1])) < 1e-6
    assert output_delta({"stage": "started"}, order(None)) is None
    assert output_delta({"stage": "streaming", "eos": False}, order(None)) is None


def test_top_logprobs_of_a_completion_include_the_sampled_token() -> None:
    asked = GenerationRequest("m", Words(), job_arguments=({},), top_logprobs=1)  # type: ignore[arg-type]
    answer = response_writer(asked)
    taken = (TokenLogprobs("a", -1.0, (("b", -0.5),)), TokenLogprobs("b", -0.5, (("b", -0.5),)))
    answer.push(0, OutputDelta("ab", taken, END))
    told = answer.body()["choices"][0]["logprobs"]
    assert told["top_logprobs"] == [{"b": -0.5, "a": -1.0}, {"b": -0.5}]


def test_text_offsets_agree_in_streams_and_whole_responses() -> None:
    """Tokens may stand for more text than is shown: a healed token, bytes of a character, a special token."""

    def tokens(*texts: str) -> tuple[TokenLogprobs, ...]:
        return tuple(TokenLogprobs(text, -1.0, ()) for text in texts)

    asked = GenerationRequest("m", Words(), job_arguments=({},), top_logprobs=0, echo=("ab",))  # type: ignore[arg-type]
    answer = response_writer(asked)
    pieces = [
        OutputDelta("r", tokens("or")),
        OutputDelta("ical", tokens("ical")),
        OutputDelta("é", tokens("\ufffd", "\ufffd")),
        OutputDelta("", tokens("<|hidden|>")),
        OutputDelta("x", tokens("x"), END),
    ]
    events = [event for piece in pieces for event in answer.push(0, piece)]
    places = [place for event in events for place in event["choices"][0]["logprobs"]["text_offset"]]
    (choice,) = answer.body()["choices"]
    assert choice["text"] == "abricaléx"
    assert choice["logprobs"]["text_offset"] == places == [2, 3, 7, 8, 8, 8]
