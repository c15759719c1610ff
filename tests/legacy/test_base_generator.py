"""BaseGenerator with text prompts; adapters, embeddings and filters are in test_base_extras.py."""

from __future__ import annotations

import inspect
import random
import threading
import warnings
from typing import Any

import pytest
import torch

from exlm import (
    Cache,
    CacheFP8,
    CacheQ4,
    CacheQ6,
    CacheQ8,
    Generator,
    InputError,
    Model,
    PostSamplingResult,
    Settings,
    Tokenizer,
)
from exlm.legacy import BaseGenerator, TruncationWarning
from tests.generator.scripted import ID
from tests.legacy.scripted import make_base_generator, passes, recording, scripted

GREEDY = Settings.greedy()
PROMPTS = ["The history of the city", "In 1995, the", "import os\n\ndef main(", "The first season of the ser"]


@pytest.fixture
def generator(model: Model, tokenizer: Tokenizer) -> BaseGenerator:
    return BaseGenerator(model, Cache(model, max_seq_len=700), tokenizer)


@pytest.fixture(scope="module")
def expected(model: Model, tokenizer: Tokenizer) -> list[str]:
    """The greedy texts of the dynamic generator."""
    dynamic = Generator(model, Cache(model, max_seq_len=2048), tokenizer)
    texts: list[str] = dynamic.generate(PROMPTS, 24, gen_settings=GREEDY)
    return texts


def test_attributes(model: Model, tokenizer: Tokenizer) -> None:
    from exllamav2.generator import ExLlamaV2BaseGenerator

    cache = Cache(model, max_seq_len=256)
    generator = ExLlamaV2BaseGenerator(model, cache, tokenizer)
    assert (generator.model, generator.cache, generator.tokenizer) == (model, cache, tokenizer)
    assert generator.sequence_ids is None
    assert generator.abort_event is None
    assert generator.full() is False


@pytest.mark.parametrize("kind", [Cache, CacheFP8, CacheQ4, CacheQ6, CacheQ8])
def test_every_cache_class(kind: Any, model: Model, tokenizer: Tokenizer) -> None:
    generator = BaseGenerator(model, kind(model, max_seq_len=300), tokenizer)
    said = generator.generate_simple(PROMPTS[:2], GREEDY, 12)
    whole = Generator(model, kind(model, max_seq_len=512), tokenizer)
    assert said == whole.generate(PROMPTS[:2], 12, gen_settings=GREEDY)


def test_warmup_leaves_no_trace(generator: BaseGenerator) -> None:
    generator.warmup()
    assert generator.sequence_ids is None
    assert generator.cache.current_seq_len == 0


def test_full_is_true_at_the_maximum_length(toy: Tokenizer) -> None:
    generator = make_base_generator(toy, length=40)
    generator.generate_simple("abc", GREEDY, 36)
    assert not generator.full()
    generator.generate_simple("abc", GREEDY, 37)
    assert generator.full()
    assert generator.sequence_ids is not None
    assert generator.sequence_ids.shape == (1, 40)


def test_the_signature() -> None:
    parameters = list(inspect.signature(BaseGenerator.generate_simple).parameters.values())[1:]
    assert {parameter.name: parameter.default for parameter in parameters} == {
        "prompt": inspect.Parameter.empty,
        "gen_settings": inspect.Parameter.empty,
        "num_tokens": inspect.Parameter.empty,
        "seed": None,
        "token_healing": False,
        "encode_special_tokens": False,
        "decode_special_tokens": False,
        "loras": None,
        "stop_token": -1,
        "add_bos": False,
        "abort_event": None,
        "input_embeddings": None,
        "completion_only": False,
        "filters": None,
        "filter_prefer_eos": False,
    }
    assert all(parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)


def test_a_batch_equals_single_prompts(generator: BaseGenerator, expected: list[str]) -> None:
    assert generator.generate_simple(PROMPTS, GREEDY, 24) == expected
    assert [generator.generate_simple(prompt, GREEDY, 24) for prompt in PROMPTS] == expected
    assert generator.generate_simple(PROMPTS[:1], GREEDY, 24) == expected[:1]
    assert generator.generate_simple([], GREEDY, 24) == []


@pytest.mark.parametrize(("length", "batch"), [(257, 1), (61, 3), (512, 2)])
def test_any_length_and_batch_size(
    model: Model, tokenizer: Tokenizer, expected: list[str], length: int, batch: int
) -> None:
    cache = Cache(model, batch_size=batch, max_seq_len=length)
    assert BaseGenerator(model, cache, tokenizer).generate_simple(PROMPTS, GREEDY, 24) == expected


def test_the_ids_are_padded_on_both_sides(toy: Tokenizer) -> None:
    generator = make_base_generator(toy, lambda prefix: [prefix[-1] + 1 if prefix[-1] < ID["f"] else 0])
    assert generator.generate_simple(["abc", "de"], GREEDY, 4) == ["abcdef", "def"]
    pad = toy.pad_token_id
    assert generator.sequence_ids is not None
    assert generator.sequence_ids.tolist() == [[2, 3, 4, 5, 6, 7], [pad, 5, 6, 7, pad, pad]]


def test_sampling_settings_apply(generator: BaseGenerator) -> None:
    hot = Settings(temperature=1.5, top_k=0, top_p=0)
    wild = generator.generate_simple(PROMPTS[0], hot, 24, seed=1)
    assert wild != generator.generate_simple(PROMPTS[0], hot, 24, seed=2)
    narrow = Settings(temperature=1.5, top_k=1)
    assert generator.generate_simple(PROMPTS[0], narrow, 24, seed=1) == generator.generate_simple(
        PROMPTS[0], narrow, 24, seed=2
    )
    rude = Settings.greedy(token_repetition_penalty=5.0)
    assert generator.generate_simple(PROMPTS[0], rude, 24) != generator.generate_simple(PROMPTS[0], GREEDY, 24)


def test_never_more_than_num_tokens(toy: Tokenizer) -> None:
    generator = make_base_generator(toy)
    for count in (0, 1, 5):
        said = generator.generate_simple("abc", GREEDY, count, completion_only=True)
        assert said == "defgh"[:count]
    with pytest.raises(InputError, match="num_tokens"):
        generator.generate_simple("abc", GREEDY, -1)


def test_seeds(generator: BaseGenerator) -> None:
    settings = Settings(temperature=1.2, top_k=0, top_p=0.95)
    one = generator.generate_simple(PROMPTS, settings, 16, seed=7)
    assert generator.generate_simple(PROMPTS, settings, 16, seed=7) == one
    assert generator.generate_simple(PROMPTS[2], settings, 16, seed=9) == one[2]
    assert generator.generate_simple(PROMPTS, settings, 16, seed=8) != one
    said = []
    for _ in range(2):
        random.seed(5)
        said.append(generator.generate_simple(PROMPTS[0], settings, 16))
    assert said[0] == said[1]


def test_token_healing_none_is_off(toy: Tokenizer) -> None:
    off: Any = None  # as wrappers pass on what they were not told
    assert make_base_generator(toy).generate_simple("abc", GREEDY, 3, token_healing=off) == "abcdef"


def test_token_healing(toy: Tokenizer) -> None:
    script = {(2,): [5, ID["Hello"], ID["He"]], (2, ID["He"]): [ID["!"]], (2, ID["Hello"]): [ID[" world"]]}
    generator = make_base_generator(toy, lambda prefix: script.get(tuple(prefix), [ID["."]]))
    encode = toy.encode
    try:  # the toy tokenizer spells words in letters
        toy.encode = lambda *_, **__: torch.tensor([[2, ID["He"]]])  # type: ignore[method-assign,assignment]
        assert generator.generate_simple("aHe", GREEDY, 3, token_healing=True) == "aHello world."
        said = generator.generate_simple("aHe", GREEDY, 3, token_healing=True, completion_only=True)
        assert said == "llo world."  # the healed token is one of the three
        assert generator.generate_simple("aHe", GREEDY, 1, token_healing=True) == "aHello"
        assert generator.sequence_ids is not None
        assert generator.sequence_ids.tolist() == [[2, ID["Hello"]]]
    finally:
        toy.encode = encode  # type: ignore[method-assign]


def test_special_tokens(model: Model, tokenizer: Tokenizer, generator: BaseGenerator) -> None:
    special = tokenizer.eos_token
    prompt = f"{special}The city"
    generator.generate_simple(prompt, GREEDY, 1)
    assert generator.sequence_ids is not None
    assert generator.sequence_ids[0, 0] != tokenizer.eos_token_id
    said = generator.generate_simple(prompt, GREEDY, 1, encode_special_tokens=True, decode_special_tokens=True)
    assert generator.sequence_ids[0, 0] == tokenizer.eos_token_id
    assert said.startswith(prompt)  # type: ignore[union-attr]
    hidden = generator.generate_simple(prompt, GREEDY, 1, encode_special_tokens=True)
    assert special + hidden == said  # type: ignore[operator]


def test_stop_tokens(toy: Tokenizer) -> None:
    generator = make_base_generator(toy, scripted(5, 6, 7, 0, 8))
    assert generator.generate_simple("abc", GREEDY, 10) == "abcdef"
    assert generator.generate_simple("abc", GREEDY, 10, completion_only=True) == "def"
    assert generator.generate_simple("abc", GREEDY, 2) == "abcde"
    assert generator.generate_simple("abc", GREEDY, 6, stop_token=None) == "abcdefgg"
    assert generator.generate_simple("abc", GREEDY, 10, stop_token=7) == "abcde"
    assert generator.sequence_ids is not None
    assert generator.sequence_ids.tolist() == [[2, 3, 4, 5, 6]]


def test_bos(toy: Tokenizer) -> None:
    generator = make_base_generator(toy)
    assert generator.generate_simple("abc", GREEDY, 2, add_bos=True) == "abcde"
    assert generator.sequence_ids is not None
    assert generator.sequence_ids.tolist() == [[1, 2, 3, 4, 5, 6]]


def test_an_abort_returns_the_text_so_far(toy: Tokenizer) -> None:
    event = threading.Event()

    def script(prefix: list[int]) -> list[int]:
        if len(prefix) == 6:
            event.set()
        return [prefix[-1] + 1]

    generator = make_base_generator(toy, script)
    event.set()  # has no effect: a call clears it
    assert generator.generate_simple("abc", GREEDY, 20, abort_event=event) == "abcdefg"
    assert generator.abort_event is event
    said = generator.generate_simple(["abc", "ab"], GREEDY, 20, abort_event=event, completion_only=True)
    assert said == ["defg", "cdef"]
    assert generator.generate_simple("abc", GREEDY, 3) == "abcdef"


def test_an_abort_during_prefill(toy: Tokenizer) -> None:
    event = threading.Event()
    generator = make_base_generator(toy, length=4096)
    generator.model.config.max_input_len = 256
    runner = generator._runner
    read = runner.prefill

    def prefill(*arguments: Any) -> None:
        event.set()
        read(*arguments)

    runner.prefill = prefill  # type: ignore[method-assign]
    prompt = "abcd" * 300
    assert generator.generate_simple(prompt, GREEDY, 8, abort_event=event) == ""
    assert generator.generate_simple([prompt, "abc" * 200], GREEDY, 8, abort_event=event) == ["", ""]
    assert {kind for kind, _, _ in passes(generator)} == {"prefill"}


def test_hooks_see_and_replace_tokens(toy: Tokenizer) -> None:
    seen: list[int] = []

    def hook(result: PostSamplingResult) -> None:
        seen.append(result.token)
        if result.token == ID["e"]:
            result.sampled_token = torch.tensor([[ID["x"]]])

    generator = make_base_generator(toy)
    settings = Settings.greedy(post_sampling_hooks=[hook])
    assert generator.generate_simple("abc", settings, 4) == "abcdxyz"
    assert seen == [ID["d"], ID["e"], ID["y"], ID["z"]]


def test_prompts_are_truncated_from_the_left_with_a_warning(toy: Tokenizer) -> None:
    generator = make_base_generator(toy, length=40)
    with pytest.warns(TruncationWarning, match=r"52 tokens was cut to its last 30.*22 tokens are lost"):
        said = generator.generate_simple("abcdefghijklmnopqrstuvwxyz" * 2, GREEDY, 10)
    assert said == ("abcdefghijklmnopqrstuvwxyz" * 3)[22 : 52 + 10]
    with pytest.warns(TruncationWarning):
        both = generator.generate_simple(["abcdefghijklmnopqrstuvwxyz" * 2, "abc"], GREEDY, 10)
    assert both == [said, "abcdefghijklm"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generator.generate_simple("abcde", GREEDY, 35)
    for count in (40, 400):
        with pytest.raises(InputError, match="num_tokens must be from 0 to 39"):
            generator.generate_simple("abc", GREEDY, count)


def test_the_model_may_be_shorter_than_the_cache(toy: Tokenizer) -> None:
    generator = make_base_generator(toy, length=400)
    generator.model.config.max_seq_len = 30
    with pytest.warns(TruncationWarning, match="cut to its last 20"):
        generator.generate_simple("abcdefghijklmnopqrstuvwxyz", GREEDY, 10)


def test_gen_begin_base_prepares_a_manual_loop(model: Model, tokenizer: Tokenizer) -> None:
    cache = Cache(model, batch_size=2, max_seq_len=100)
    generator = BaseGenerator(model, cache, tokenizer)
    generator.generate_simple(PROMPTS[:2], GREEDY, 8)
    ids, offsets = tokenizer.encode(PROMPTS[:2], return_offsets=True)
    mask = tokenizer.padding_mask(ids)
    generator._gen_begin_base(ids, mask, None, position_offsets=offsets)
    assert cache.current_seq_len == ids.shape[1] - 1
    assert generator.sequence_ids is not None
    assert generator.sequence_ids.tolist() == ids.tolist()
    for _ in range(8):
        logits = model.forward(ids[:, -1:], cache, input_mask=mask, position_offsets=offsets)
        ids = torch.cat((ids, logits[:, -1].argmax(-1, keepdim=True)), 1)
    expected = generator.generate_simple(PROMPTS[:2], GREEDY, 8)
    assert tokenizer.decode(ids) == expected


def test_a_row_that_fails_fails_the_call_and_nothing_stays_behind(toy: Tokenizer) -> None:
    def broken(result: PostSamplingResult) -> None:
        raise KeyError("hook")

    generator = make_base_generator(toy)
    with pytest.raises(InputError, match="hook"):
        generator.generate_simple(["abc", "de"], Settings.greedy(post_sampling_hooks=[broken]), 4)
    assert generator.generate_simple("abc", GREEDY, 3) == "abcdef"


def test_nothing_is_kept_between_calls(toy: Tokenizer) -> None:
    generator = make_base_generator(toy)
    generator.generate_simple("abc" * 100, GREEDY, 3)
    first = passes(generator)
    generator.generate_simple("abc" * 100, GREEDY, 3)
    assert passes(generator) == first


def test_many_prompts_run_side_by_side(model: Model, tokenizer: Tokenizer) -> None:
    generator = BaseGenerator(model, Cache(model, max_seq_len=2048), tokenizer)
    calls: list[Any] = []
    generator._runner.decode = recording(generator._runner.decode, calls)  # type: ignore[method-assign]
    generator.generate_simple(PROMPTS, GREEDY, 10)
    assert len(calls) == 10


def test_a_completion_needs_settings(toy: Tokenizer) -> None:
    with pytest.raises(InputError, match="gen_settings must be Settings, found NoneType"):
        make_base_generator(toy).generate_simple("abc", None, 5)  # type: ignore[arg-type]


def test_arguments_of_another_kind_are_named(toy: Tokenizer) -> None:
    generator: Any = make_base_generator(toy)
    with pytest.raises(InputError, match=r"num_tokens must be .* found 5\.0"):
        generator.generate_simple("abc", GREEDY, 5.0)
    with pytest.raises(InputError, match="seed must be an integer or None, found '7'"):
        generator.generate_simple("abc", GREEDY, 5, seed="7")
    with pytest.raises(InputError, match="prompt must be a string or a list of them, found int"):
        generator.generate_simple(5, GREEDY, 5)
