"""LLM: the same tokens as the parts it is made of, sensible defaults, and nothing left behind."""

from __future__ import annotations

import gc
import json
import re
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exlm import (
    LLM,
    Cache,
    CacheFP8,
    CacheFP16,
    CacheQ4,
    CacheQ6,
    CacheQ8,
    CacheTooSmall,
    Completion,
    Config,
    Generator,
    InputError,
    Model,
    NotLoaded,
    SelectFilter,
    Settings,
    Tokenizer,
)
from tests import tiny

PROMPTS = ["The history of the city", "In the year 1900", "He was"]
GREEDY = Settings.greedy()


@pytest.fixture(scope="module")
def llm(fixtures_dir: Path) -> Iterator[LLM]:
    with LLM(fixtures_dir / "tiny-lm", max_seq_len=1024) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def separate_parts(fixtures_dir: Path) -> dict[str, Any]:
    """What a Generator makes of the prompts: text to last result."""
    config = Config(fixtures_dir / "tiny-lm")
    model = Model(config)
    model.load()
    generator = Generator(model, Cache(model, max_seq_len=1024), Tokenizer(config))
    texts, last = generator.generate(
        PROMPTS,
        16,
        gen_settings=GREEDY,
        completion_only=True,
        return_last_results=True,
        stop_conditions=[2],
    )
    return {"texts": texts, "last": last}


def test_a_str_gives_a_completion_and_a_list_a_list(llm: LLM, separate_parts: dict[str, Any]) -> None:
    alone = llm.generate(PROMPTS[0], max_new_tokens=16, settings=GREEDY)
    assert isinstance(alone, Completion)
    assert str(alone) == alone.text == separate_parts["texts"][0]
    together = llm.generate(PROMPTS, max_new_tokens=16, settings=GREEDY)
    assert [one.text for one in together] == separate_parts["texts"]
    for one, last in zip(together, separate_parts["last"], strict=True):
        assert (one.new_tokens, one.prompt_tokens) == (last["new_tokens"], last["prompt_tokens"])
        assert one.finish_reason == last["eos_reason"] == "max_new_tokens"
        assert llm.tokenizer.decode_unspecial(one.token_ids) == one.text
        assert one.time_prefill >= 0
        assert one.time_generate > 0
    assert llm.generate([]) == []


def test_a_stream_is_the_completion_in_pieces(llm: LLM, separate_parts: dict[str, Any]) -> None:
    stream = llm.stream(PROMPTS[0], max_new_tokens=16, settings=GREEDY)
    pieces = list(stream)
    assert len(pieces) > 8
    assert all(pieces)
    assert "".join(pieces) == separate_parts["texts"][0]
    assert stream.completion is not None
    assert stream.completion.text == separate_parts["texts"][0]
    assert next(stream, None) is None
    assert stream.completion is not None


def test_a_str_to_chat_is_a_message_of_the_user(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    written = llm.tokenizer.apply_chat_template(messages)
    expected = llm.generate(written, encode_special_tokens=True, max_new_tokens=12, settings=GREEDY)
    assert llm.chat("Hello", max_new_tokens=12, settings=GREEDY).token_ids == expected.token_ids
    assert llm.chat(messages, max_new_tokens=12, settings=GREEDY).token_ids == expected.token_ids
    assert "".join(llm.stream(messages, max_new_tokens=12, settings=GREEDY)) == expected.text


def test_the_template_takes_variables(tmp_path: Path) -> None:
    folder = tiny.make_chat_folder(tmp_path / "m")
    with LLM(folder) as llm:
        spoken = llm.chat("a", template={"chat_template": "{{ mood }}:"} | {"mood": "sad"}, max_new_tokens=1)
    assert spoken.prompt_tokens == len("sad:")


def test_a_turn_of_a_conversation_costs_only_itself(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Tell me of the city. " * 30}]
    answer = llm.chat(messages, max_new_tokens=40, settings=GREEDY)
    messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And then?"}]
    second = llm.chat(messages, max_new_tokens=4, settings=GREEDY)
    assert second.cached_tokens >= answer.prompt_tokens


def test_answers_end_at_every_eos_and_at_stops(llm: LLM) -> None:
    word = llm.generate(PROMPTS[0], max_new_tokens=64, settings=GREEDY, stop=" Soviet")
    assert (word.text, word.finish_reason) == (" of the", "stop_string")
    several = llm.generate(PROMPTS[0], max_new_tokens=64, settings=GREEDY, stop=["\n", " Union"])
    assert several.text == " of the Soviet"
    token = word.token_ids[1]
    by_id = llm.generate(PROMPTS[0], max_new_tokens=64, settings=GREEDY, stop=token)
    assert (by_id.text, by_id.finish_reason) == (" of", "stop_token")
    assert by_id.token_ids == word.token_ids[:1]
    assert by_id.new_tokens == 2


def test_an_eos_of_generation_config_ends_an_answer(tmp_path: Path, fixtures_dir: Path) -> None:
    for file in (fixtures_dir / "tiny-lm").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with LLM(tmp_path) as llm:
        said = llm.generate(PROMPTS[0], max_new_tokens=8, settings=GREEDY)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, said.token_ids[3]]}))
    with LLM(tmp_path) as llm:
        short = llm.generate(PROMPTS[0], max_new_tokens=8, settings=GREEDY)
    assert short.finish_reason == "stop_token"
    assert short.token_ids == said.token_ids[:3]


def test_without_a_number_the_answer_fills_what_is_left_at_most(tmp_path: Path) -> None:
    folder = tiny.make_chat_folder(tmp_path / "m", max_position_embeddings=40)
    with LLM(folder) as llm:
        settings = Settings()
        settings.disallow_tokens(llm.tokenizer, llm.tokenizer.eos_token_ids)
        answer = llm.generate("0123456789", settings=settings, add_bos=False)
        assert answer.prompt_tokens == 10
        assert answer.new_tokens == 30
        with pytest.raises(InputError, match="40"):
            llm.generate("0123456789" * 4, add_bos=False)
        with pytest.warns(UserWarning, match="max_new_tokens is 31, and 30 is used"):
            answer = llm.generate("0123456789", max_new_tokens=31, settings=settings, add_bos=False)
        assert answer.new_tokens == 30


def test_the_default_answer_has_512_tokens(llm: LLM) -> None:
    settings = Settings()
    settings.disallow_tokens(llm.tokenizer, llm.tokenizer.eos_token_ids)
    stream = llm.stream("He was", settings=settings)
    next(stream)
    assert [job.max_new_tokens for job in llm.generator.active_jobs] == [512]
    stream.close()


def test_seeds_give_the_same_text_and_move_on_in_a_batch(llm: LLM) -> None:
    hot = Settings(temperature=2.0, top_k=0, top_p=0)
    first = llm.generate(["He was", "He was"], seed=7, settings=hot, max_new_tokens=8)
    assert first[0].text != first[1].text
    assert llm.generate("He was", seed=8, settings=hot, max_new_tokens=8).text == first[1].text
    assert "".join(llm.stream("He was", seed=8, settings=hot, max_new_tokens=8)) == first[1].text


def test_settings_for_each_prompt(llm: LLM, separate_parts: dict[str, Any]) -> None:
    hot = Settings(temperature=3.0, top_k=0, top_p=0)
    answers = llm.generate(PROMPTS[:2], settings=[GREEDY, hot], max_new_tokens=16, seed=1)
    assert answers[0].text == separate_parts["texts"][0]
    assert answers[1].text != separate_parts["texts"][1]
    with pytest.raises(InputError, match="each of 3 prompts"):
        llm.generate(PROMPTS, settings=[GREEDY], max_new_tokens=4)


def test_answers_match_schema_regex_and_grammar(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["age"],
        "additionalProperties": False,
    }
    for answer in llm.generate(["He is", "She is"], json_schema=schema, max_new_tokens=60, settings=GREEDY):
        assert isinstance(json.loads(answer.text)["age"], int)
    assert re.fullmatch(r"[A-C]{3}\d", llm.chat("Hi", regex=r"[A-C]{3}\d", max_new_tokens=20).text)
    either = llm.stream("Is it?", grammar='start: "yes" | "no"', max_new_tokens=10)
    assert "".join(either) in ("yes", "no")


def test_filters_go_to_their_prompts(llm: LLM) -> None:
    one, two = (SelectFilter(None, llm.tokenizer, [word]) for word in ("alpha", "beta"))
    answers = llm.generate(["a", "b"], filters=[[one], [two]], max_new_tokens=20)
    assert [answer.text for answer in answers] == ["alpha", "beta"]
    assert llm.generate("a", filters=[one], max_new_tokens=20).text == "alpha"
    assert llm.chat("a", filters=[two], max_new_tokens=20).finish_reason == "end_filter"
    with pytest.raises(InputError, match="filters must be a list"):
        llm.generate(["a", "b"], filters=[[one]], max_new_tokens=20)


def test_a_pair_of_prompts_is_guided(llm: LLM) -> None:
    same = Settings.greedy(cfg_scale=1.0)
    pair = ("The history of the city", "The name of")
    guided = llm.generate(pair, settings=same, max_new_tokens=8)
    assert guided.text == llm.generate(pair[0], settings=GREEDY, max_new_tokens=8).text


def test_a_pair_without_a_number_fits_a_cache_of_an_odd_number_of_pages(tmp_path: Path) -> None:
    with LLM(tiny.make_chat_folder(tmp_path / "m"), max_seq_len=512, cache_tokens=768) as llm:
        stream = llm.stream(("ab", "cd"), settings=Settings.greedy(cfg_scale=1.5), add_bos=False)
        next(stream)
        assert [job.max_new_tokens for job in llm.generator.active_jobs] == [256 - 2]
        stream.close()


def test_further_arguments_are_those_of_a_job(llm: LLM) -> None:
    free = llm.generate(PROMPTS[0], settings=GREEDY, max_new_tokens=12)
    tamed = llm.generate(PROMPTS[0], settings=GREEDY, max_new_tokens=12, banned_strings=["soviet"])
    assert "Soviet" in free.text
    assert "soviet" not in tamed.text.lower()
    twice = llm.generate([PROMPTS[0]] * 2, settings=GREEDY, stop=iter(["ov"]), banned_strings=iter(["the"]))
    assert all("ov" not in one.text and "the" not in one.text for one in twice)
    with pytest.raises(InputError, match="max_new_tokens"):
        llm.generate(PROMPTS[0], max_tokens=12)


@pytest.mark.parametrize("add_bos", [True, False, None])
def test_a_bos_comes_first_if_the_files_want_one(llm: LLM, add_bos: bool | None) -> None:
    assert llm.tokenizer.tokenizer_config_dict is not None
    answer = llm.generate("He was", add_bos=add_bos, max_new_tokens=1)
    assert answer.prompt_tokens == llm.tokenizer.num_tokens("He was") + bool(add_bos)


def test_special_text_is_text_unless_asked_for(llm: LLM) -> None:
    plain = llm.generate("<|im_start|>", max_new_tokens=1).prompt_tokens
    assert plain > 1
    assert llm.generate("<|im_start|>", encode_special_tokens=True, max_new_tokens=1).prompt_tokens == 1


def test_a_stream_left_early_drops_its_job(llm: LLM) -> None:
    for piece in llm.stream("He was", max_new_tokens=200):
        assert piece
        break
    assert llm.generator.num_remaining_jobs() == 0
    stream = llm.stream("He was", max_new_tokens=200)
    assert llm.generator.num_remaining_jobs() == 0, "nothing runs before the first piece"
    next(stream)
    stream.close()
    assert llm.generator.num_remaining_jobs() == 0
    assert stream.completion is None


def test_streams_and_calls_may_be_nested(llm: LLM, separate_parts: dict[str, Any]) -> None:
    streams = [llm.stream(prompt, max_new_tokens=16, settings=GREEDY) for prompt in PROMPTS[:2]]
    texts = ["", ""]
    for _ in range(5):
        for i, stream in enumerate(streams):
            texts[i] += next(stream)
    assert llm.generate(PROMPTS[2], max_new_tokens=16, settings=GREEDY).text == separate_parts["texts"][2]
    for i, stream in enumerate(streams):
        texts[i] += "".join(stream)
    assert texts == separate_parts["texts"][:2]


def test_threads_take_turns(llm: LLM, separate_parts: dict[str, Any]) -> None:
    answers: dict[int, str] = {}

    def ask(i: int) -> None:
        answers[i] = llm.generate(PROMPTS[i], max_new_tokens=16, settings=GREEDY).text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[i] for i in range(len(PROMPTS))] == separate_parts["texts"]


def test_a_job_that_fails_raises_and_leaves_nothing(llm: LLM) -> None:
    class Broken:
        def begin(self, prefix: str) -> None: ...

        def feed(self, token: Any) -> None: ...

        def next(self) -> Any:
            raise RuntimeError("broken filter")

    with pytest.raises(InputError, match="broken filter"):
        llm.generate("He was", filters=[Broken()], max_new_tokens=4)
    assert llm.generator.num_remaining_jobs() == 0
    assert llm.generate("He was", max_new_tokens=2, settings=GREEDY).new_tokens == 2


def test_a_request_whose_job_was_dropped_raises(llm: LLM) -> None:
    stream = llm.stream("He was", max_new_tokens=100)
    next(stream)
    llm.generator.clear_queue()
    with pytest.raises(InputError, match="dropped"):
        list(stream)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("fp16", CacheFP16), ("q8", CacheQ8), ("q6", CacheQ6), ("q4", CacheQ4), ("fp8", CacheFP8)],
)
def test_caches_of_every_kind(fixtures_dir: Path, name: Any, kind: type) -> None:
    with LLM(fixtures_dir / "tiny-lm", cache_type=name, cache_tokens=700) as llm:
        assert type(llm.cache) is kind
        assert llm.cache.max_seq_len == 768
        assert llm.generate("The history of", max_new_tokens=3).new_tokens == 3


def test_lengths(tmp_path: Path) -> None:
    long = tiny.make_chat_folder(tmp_path / "long", max_position_embeddings=100_000)
    with LLM(long) as llm:
        assert (llm.config.max_seq_len, llm.cache.max_seq_len) == (8192, 8192)
    with LLM(long, max_seq_len=300) as llm:
        assert (llm.config.max_seq_len, llm.cache.max_seq_len) == (300, 512)
    config = Config(long)
    config.max_seq_len = 9000
    with LLM(config) as llm:
        assert llm.config is config
        assert (llm.config.max_seq_len, llm.cache.max_seq_len) == (9000, 9216)
    with LLM(long, cache_tokens=256) as llm:
        with pytest.raises(CacheTooSmall):
            llm.generate("x", max_new_tokens=1000)
        assert llm.generate("x", settings=GREEDY, stop=5).prompt_tokens == 2


def test_device_and_precision_are_passed_on(tmp_path: Path) -> None:
    with LLM(tiny.make_chat_folder(tmp_path / "m"), device="cpu", dtype="bfloat16") as llm:
        assert str(llm.model.cache_dtype) == "torch.bfloat16"
        assert llm.generate("a", max_new_tokens=2).new_tokens == 2


REPEATED = "The history of the city. " * 8


@pytest.mark.parametrize("draft", ["ngram", "tiny-lm-gptq-g128-sym"])
def test_a_draft_changes_no_greedy_text(
    fixtures_dir: Path, llm: LLM, separate_parts: dict[str, Any], draft: str
) -> None:
    name = draft if draft == "ngram" else fixtures_dir / draft
    with LLM(fixtures_dir / "tiny-lm", max_seq_len=1024, draft=name) as guessing:
        answers = guessing.generate(PROMPTS, max_new_tokens=16, settings=GREEDY)
        long = guessing.generate(REPEATED, max_new_tokens=64, settings=GREEDY)
    assert [answer.text for answer in answers] == separate_parts["texts"]
    assert all(answer.new_tokens == 16 for answer in answers)
    assert long.text == llm.generate(REPEATED, max_new_tokens=64, settings=GREEDY).text
    assert long.accepted_draft_tokens > 0


def test_a_draft_made_for_less_is_stretched(tmp_path: Path) -> None:
    main = tiny.make_chat_folder(tmp_path / "main", max_position_embeddings=600)
    small = tiny.make_chat_folder(tmp_path / "small", max_position_embeddings=300)
    with LLM(main, draft=small) as llm:
        assert llm.generator.draft_model.config.max_seq_len == 600
        assert llm.generate("a" * 500, max_new_tokens=20, settings=GREEDY, add_bos=False).new_tokens <= 20


def test_a_draft_of_another_vocabulary_is_refused(tmp_path: Path, fixtures_dir: Path) -> None:
    with pytest.raises(InputError, match="another vocabulary, of 259 tokens; the model's has 2,048"):
        LLM(fixtures_dir / "tiny-lm", draft=tiny.make_chat_folder(tmp_path / "other"))


def test_close_frees_everything(tmp_path: Path) -> None:
    llm = LLM(tiny.make_chat_folder(tmp_path / "m"))
    stream = llm.stream("a", max_new_tokens=50)
    next(stream)
    model, tensor = weakref.ref(llm.model), weakref.ref(llm.cache.all_tensors()[0])
    llm.close()
    llm.close()
    with pytest.raises(InputError, match="dropped"):
        list(stream)
    del stream
    gc.collect()
    assert model() is None
    assert tensor() is None
    for call in (lambda: llm.generate("a"), lambda: llm.chat("a"), lambda: llm.stream("a")):
        with pytest.raises(NotLoaded, match="closed"):
            call()


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    folder = tiny.make_chat_folder(tmp_path / "m")
    with pytest.raises(InputError, match="fp16, q8, q6, q4, fp8"):
        LLM(folder, cache_type="q5")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="cache_tokens must be a whole number of at least 1"):
        LLM(folder, cache_tokens=0)
    with LLM(folder) as llm:
        with pytest.raises(InputError, match="A prompt is a string"):
            llm.generate([5])  # type: ignore[list-item]
        with pytest.raises(InputError, match="stop_conditions"):
            llm.stream("a", stop=[1.5])  # type: ignore[list-item]


def test_max_new_tokens_is_capped_at_the_models_length(fixtures_dir: Path) -> None:
    config = Config(fixtures_dir / "tiny-lm")
    config.max_seq_len = 300
    with LLM(config, max_seq_len=300) as llm:
        with pytest.warns(UserWarning, match="max_new_tokens is 5000, and 2.. is used"):
            completion = llm.generate(PROMPTS[0], max_new_tokens=5000, settings=GREEDY)
        assert completion.prompt_tokens + completion.new_tokens <= 300
        with pytest.warns(UserWarning, match="max_new_tokens is 5000, and 2.. is used"):
            assert "".join(llm.stream(PROMPTS[0], max_new_tokens=5000, settings=GREEDY)) == completion.text
        with pytest.raises(InputError, match="the model's length is 300"):
            llm.generate(PROMPTS[0] * 100, max_new_tokens=1)
