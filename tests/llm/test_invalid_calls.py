"""What cannot be meant is told in the words of `LLM`, and nothing stays behind of it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exlm import LLM, InputError, RegexFilter, Settings
from exlm.llm import Stream
from tests import tiny

GREEDY = Settings.greedy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_chat_folder(tmp_path_factory.mktemp("chatty"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder) as loaded:
        yield loaded


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"stop_conditions": ["x"]}, "stop_conditions is given as stop here"),
        ({"gen_settings": GREEDY}, "gen_settings is given as settings here"),
        ({"input_ids": 1}, "input_ids is given as the prompt here"),
        ({"seed": "one"}, "seed must be an integer or None, found 'one'"),
        ({"filters": "x"}, r"filters must be a list, found str: write \[filter\]"),
    ],
)
def test_arguments(llm: LLM, wrong: dict[str, Any], message: str) -> None:
    for ask in (llm.generate, llm.chat, lambda *a, **b: list(llm.stream(*a, **b))):
        with pytest.raises(InputError, match=message):
            ask("Hi", max_new_tokens=2, **wrong)
    assert llm.generator.num_remaining_jobs() == 0


def test_a_filter_must_be_in_a_list_for_each_of_several_prompts(llm: LLM) -> None:
    with pytest.raises(InputError, match=r"found RegexFilter: write \[filter\]"):
        llm.generate(["a", "b"], filters=[RegexFilter(llm.tokenizer, "a+")] * 2, max_new_tokens=2)


@pytest.mark.parametrize("prompts", [None, 5, b"Hi", {"role": "user", "content": "Hi"}])
def test_prompts(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InputError, match=f"a list of them; found {type(prompts).__name__}"):
        llm.generate(prompts, max_new_tokens=2)


def test_settings(llm: LLM) -> None:
    wrong: Any = {"temperature": 0.5}
    with pytest.raises(InputError, match=r"settings must be Settings, or a list .*, found dict"):
        llm.generate("Hi", settings=wrong, max_new_tokens=2)
    with pytest.raises(InputError, match="for each of 2 prompts, found 1"):
        llm.generate(["Hi", "Ho"], settings=[GREEDY], max_new_tokens=2)


def test_a_template_by_name(llm: LLM) -> None:
    name: Any = "chatml"
    with pytest.raises(InputError, match=r"\{'chat_template': 'chatml'\}"):
        llm.chat("Hi", template=name, max_new_tokens=2)


def test_a_message_without_a_content_is_an_empty_one(llm: LLM) -> None:
    said = [{"role": "assistant", "content": None, "tool_calls": []}, {"role": "user", "content": "Hi"}]
    empty = [{"role": "assistant", "content": ""}, {"role": "user", "content": "Hi"}]
    written = llm.tokenizer.apply_chat_template(empty, tokenize=True)
    assert llm.chat(said, max_new_tokens=1).prompt_tokens == written.shape[1]


def test_an_unknown_template_name(llm: LLM) -> None:
    for ask in (llm.chat, llm.stream):
        with pytest.raises(InputError, match=r"No chat template is called 'mistral': .* of default, raw, llama"):
            ask([{"role": "user", "content": "Hi"}], template={"chat_template": "mistral"}, max_new_tokens=2)


def test_a_format_by_name_says_how_it_begins_and_ends(llm: LLM) -> None:
    messages = [{"role": "user", "content": "</s>"}]
    for ask in (llm.chat, llm.stream):
        typed = iter(llm.tokenizer.encode("No.\nU: And why? ")[0].tolist())

        def type_on(result: Any, typed: Iterator[int] = typed) -> None:
            result.sampled_token[:] = next(typed)

        settings = Settings(post_sampling_hooks=[type_on])
        answer: Any = ask(messages, template={"chat_template": "raw"}, settings=settings, max_new_tokens=15)
        if isinstance(answer, Stream):
            list(answer)
            answer = answer.completion
        assert (answer.finish_reason, answer.text) == ("stop_string", "No.\n")
        assert answer.prompt_tokens == 1 + len("User: </s>\nAssistant:")  # a BOS, and </s> is plain text


def test_tools_that_the_template_would_leave_out(llm: LLM) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    with pytest.raises(InputError, match="has no place for tools: describe them in a system message"):
        llm.chat("Hi", template={"tools": tools}, max_new_tokens=2)
    told = {"tools": tools, "chat_template": "{{ tools[0].function.name }}: {{ messages[0].content }}"}
    assert llm.chat("Hi", template=told, max_new_tokens=2).prompt_tokens == len("add: Hi")
    assert llm.chat("Hi", template={"tools": []}, max_new_tokens=2).new_tokens <= 2


def test_no_stop_is_none(llm: LLM) -> None:
    plain = llm.generate("Hi", settings=GREEDY, max_new_tokens=4)
    assert llm.generate("Hi", settings=GREEDY, stop=None, max_new_tokens=4).token_ids == plain.token_ids


@pytest.mark.parametrize("wrong", [2.5, b"Hi", True])
def test_stops(llm: LLM, wrong: Any) -> None:
    with pytest.raises(InputError, match=f"Unsupported type in stop_conditions: {wrong!r}"):
        llm.generate("Hi", stop=wrong, max_new_tokens=2)


def test_a_stop_token_may_be_a_number_of_numpys(llm: LLM) -> None:
    first = llm.generate("Hi", settings=GREEDY, max_new_tokens=2).token_ids[0]
    for stop in (np.int64(first), np.array([first])):
        ended = llm.generate("Hi", settings=GREEDY, stop=stop, max_new_tokens=2)
        assert (ended.finish_reason, ended.token_ids) == ("stop_token", ())


def test_sizes(folder: Path) -> None:
    with pytest.raises(InputError, match="cache_tokens must be a whole number of at least 1, found 0"):
        LLM(folder, cache_tokens=0)
    with pytest.raises(InputError, match="max_seq_len must be a whole number of at least 1, found -5"):
        LLM(folder, max_seq_len=-5)


def test_a_hook_that_calls_its_own_llm_raises_and_does_not_deadlock(llm: LLM) -> None:
    asking = Settings(post_sampling_hooks=[lambda _: llm.generate("Ho", max_new_tokens=1)])
    with pytest.raises(InputError, match="called the LLM during its step"):
        llm.generate("Hi", settings=asking, max_new_tokens=2)
    assert llm.generate("Hi", settings=GREEDY, max_new_tokens=2).new_tokens <= 2


def test_a_stream_garbage_collected_during_a_step_is_dropped(llm: LLM) -> None:
    def let_go() -> None:
        stream: Any = llm.stream("Hi", max_new_tokens=200)
        next(stream)
        stream.itself = stream  # so that only the collector finds it

    gc.disable()
    try:
        let_go()
        assert llm.generator.num_remaining_jobs() == 1
        collecting = Settings.greedy(post_sampling_hooks=[lambda _: gc.collect()])
        llm.generate("Ho", settings=collecting, max_new_tokens=4)
    finally:
        gc.enable()
    assert llm.generator.num_remaining_jobs() == 0


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_stream_may_be_closed_while_another_thread_waits_for_it(llm: LLM, elsewhere: bool) -> None:
    def close(_: object) -> None:
        if elsewhere:
            other = threading.Thread(target=stream.close)
            other.start()
            other.join()
        else:
            stream.close()

    stream = llm.stream("Hi", settings=Settings.greedy(post_sampling_hooks=[close]), max_new_tokens=200)
    assert list(stream) == []
    assert stream.completion is None
    assert llm.generator.num_remaining_jobs() == 0


def test_clearing_the_queue_ends_a_call(llm: LLM) -> None:
    clearing = Settings(post_sampling_hooks=[lambda _: llm.generator.clear_queue()])
    for ask in (
        lambda: llm.generate("Hi", settings=clearing, max_new_tokens=3),
        lambda: llm.generator.generate("Hi", gen_settings=clearing, max_new_tokens=3),
    ):
        with pytest.raises(InputError, match="dropped before its end"):
            ask()
