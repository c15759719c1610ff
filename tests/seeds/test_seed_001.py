"""Seed 001: ExLlamaV2BaseGenerator, one test for each item of the checklist."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from exllamav2 import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_8bit,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Cache_Q8,
    ExLlamaV2CacheBase,
    ExLlamaV2Config,
    ExLlamaV2Lora,
    ExLlamaV2Tokenizer,
)
from exllamav2.generator import (
    ExLlamaV2BaseGenerator,
    ExLlamaV2PostSamplingHook,
    ExLlamaV2PostSamplingResult,
    ExLlamaV2Sampler,
)
from exllamav2.generator.filters import ExLlamaV2PrefixFilter, ExLlamaV2SelectFilter
from exlm import RegexFilter
from tests.lora.peft_folders import Adapter, matrix_shapes, merge_into_model, write_adapter
from tests.seeds.conftest import PROMPT, loaded

Answer = Callable[..., str]
Settings = ExLlamaV2Sampler.Settings

EVERY_CACHE = [
    ExLlamaV2Cache,
    ExLlamaV2Cache_8bit,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Cache_Q8,
]

DEFAULTS: dict[str, Any] = {
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


@pytest.fixture
def base(model: ExLlamaV2, cache: ExLlamaV2Cache, tokenizer: ExLlamaV2Tokenizer) -> ExLlamaV2BaseGenerator:
    """The generator of this document."""
    return ExLlamaV2BaseGenerator(model, cache, tokenizer)


@pytest.fixture(scope="module")
def lora(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    """An adapter of random numbers for every matrix."""
    return write_adapter(tmp_path_factory.mktemp("adapters") / "lora", matrix_shapes(folder), size=2.0)


def test_item_036_the_names_resolve() -> None:
    import exllamav2
    import exllamav2.generator

    for name in ("ExLlamaV2", "ExLlamaV2Config", "ExLlamaV2Cache", "ExLlamaV2Tokenizer", "ExLlamaV2Lora"):
        assert isinstance(getattr(exllamav2, name), type)
    for name in ("ExLlamaV2BaseGenerator", "ExLlamaV2Sampler"):
        assert isinstance(getattr(exllamav2.generator, name), type)


def test_item_037_the_constructor_keeps_what_it_is_given(
    base: ExLlamaV2BaseGenerator, model: ExLlamaV2, cache: ExLlamaV2Cache, tokenizer: ExLlamaV2Tokenizer
) -> None:
    assert (base.model, base.cache, base.tokenizer) == (model, cache, tokenizer)
    assert base.sequence_ids is None
    assert base.abort_event is None
    base.generate_simple(PROMPT, Settings.greedy(), 3)
    assert base.sequence_ids is not None
    assert base.sequence_ids.shape == (1, tokenizer.encode(PROMPT).shape[1] + 3)


@pytest.mark.parametrize("kind", EVERY_CACHE)
def test_item_038_any_cache(
    model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer, kind: type[ExLlamaV2Cache], answer: Answer
) -> None:
    assert issubclass(kind, ExLlamaV2CacheBase)
    made = ExLlamaV2BaseGenerator(model, kind(model, max_seq_len=256), tokenizer)
    text = made.generate_simple(PROMPT, Settings.greedy(), 6, completion_only=True)
    assert text == answer(PROMPT, 6)


def test_item_039_warmup_has_no_visible_effect(base: ExLlamaV2BaseGenerator, passes: list[int]) -> None:
    base.warmup()
    assert len(passes) == 1
    assert base.sequence_ids is None
    assert base.cache.current_seq_len == 0


def test_item_040_full(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> None:
    made = ExLlamaV2BaseGenerator(model, ExLlamaV2Cache(model, max_seq_len=32), tokenizer)
    assert made.full() is False
    made.generate_simple(PROMPT, Settings.greedy(), 4)
    assert made.full() is False
    made.generate_simple(PROMPT, Settings.greedy(), 32 - tokenizer.encode(PROMPT).shape[1])
    assert made.full() is True


def test_item_041_parameters_and_defaults() -> None:
    parameters = inspect.signature(ExLlamaV2BaseGenerator.generate_simple).parameters
    assert list(parameters) == ["self", "prompt", "gen_settings", "num_tokens", *DEFAULTS]
    assert {name: parameters[name].default for name in DEFAULTS} == DEFAULTS


def test_item_042_the_result_is_like_the_prompt(base: ExLlamaV2BaseGenerator) -> None:
    assert isinstance(base.generate_simple(PROMPT, Settings(), 3), str)
    texts = base.generate_simple([PROMPT, "The"], Settings(), 3)
    assert isinstance(texts, list)
    assert len(texts) == 2
    assert base.sequence_ids is not None
    assert base.sequence_ids.shape[0] == 2


def test_item_043_prompts_of_different_lengths(base: ExLlamaV2BaseGenerator, answer: Answer) -> None:
    prompts = [PROMPT, "The", "Once upon a time, there was a big dog who"]
    texts = base.generate_simple(prompts, Settings.greedy(), 8)
    assert texts == [prompt + answer(prompt, 8) for prompt in prompts]


def test_item_044_settings_are_honoured(base: ExLlamaV2BaseGenerator, answer: Answer) -> None:
    for settings in (Settings(top_k=1), Settings(temperature=0.0), Settings(top_p=1e-6)):
        settings.token_repetition_penalty = 1.0
        assert base.generate_simple(PROMPT, settings, 6, completion_only=True) == answer(PROMPT, 6)
    seen: list[Any] = []
    settings = Settings.greedy(post_sampling_hooks=[seen.append])
    base.generate_simple(PROMPT, settings, 4)
    assert len(seen) == 4
    strict = Settings.greedy(token_repetition_penalty=3.0)
    text = base.generate_simple("#####", strict, 8, completion_only=True)
    ids = base.tokenizer.encode(text)[0].tolist()
    assert len(set(ids)) == len(ids)


def test_item_045_num_tokens_is_a_maximum(base: ExLlamaV2BaseGenerator) -> None:
    prompt = base.tokenizer.encode(PROMPT).shape[1]
    for count in (1, 5):
        base.generate_simple(PROMPT, Settings(), count)
        assert base.sequence_ids is not None
        assert base.sequence_ids.shape[1] == prompt + count


def test_item_046_a_seed_makes_it_reproducible(base: ExLlamaV2BaseGenerator) -> None:
    texts = [base.generate_simple(PROMPT, Settings(), 10, seed=seed) for seed in (1, 2, 3, 1)]
    assert texts[0] == texts[3]
    assert len(set(texts)) > 1


def test_item_047_token_healing(base: ExLlamaV2BaseGenerator) -> None:
    text = base.generate_simple("Once upon a ", Settings.greedy(), 6, token_healing=True)
    assert text.startswith("Once upon a time, there")


def test_item_048_special_text_in_a_prompt(base: ExLlamaV2BaseGenerator) -> None:
    lengths = []
    for special in (True, False):
        base.generate_simple("<|im_start|>user", Settings(), 1, encode_special_tokens=special)
        assert base.sequence_ids is not None
        lengths.append(base.sequence_ids.shape[1])
    assert lengths[0] < lengths[1]


def test_item_049_special_tokens_in_the_output(base: ExLlamaV2BaseGenerator, tokenizer: ExLlamaV2Tokenizer) -> None:
    settings = Settings.greedy()
    settings.allow_tokens(tokenizer, ["<|im_start|>"])
    assert base.generate_simple(PROMPT, settings, 2, decode_special_tokens=True) == PROMPT + "<|im_start|>" * 2
    assert base.generate_simple(PROMPT, settings, 2) == PROMPT


def test_item_050_one_adapter_a_list_or_none(
    folder: Path, lora: Adapter, tokenizer: ExLlamaV2Tokenizer, tmp_path: Path
) -> None:
    def text(model: ExLlamaV2, loras: Any = None) -> Any:
        made = ExLlamaV2BaseGenerator(model, ExLlamaV2Cache(model, max_seq_len=256), tokenizer)
        return made.generate_simple(PROMPT, Settings.greedy(), 8, loras=loras)

    model = loaded(folder)
    plain = text(model)
    one = ExLlamaV2Lora.from_directory(model, str(lora.folder))
    merged = text(loaded(merge_into_model(folder, tmp_path / "merged", (lora, 1.0))))  # while reading and generating
    assert merged != plain
    assert [text(model, loras) for loras in (None, one, [one], [])] == [plain, merged, merged, plain]


def test_item_051_the_stop_token(base: ExLlamaV2BaseGenerator, tokenizer: ExLlamaV2Tokenizer) -> None:
    period = tokenizer.single_id(".")
    text = base.generate_simple(PROMPT, Settings.greedy(), 30, stop_token=period, completion_only=True)
    assert text == ", there was a little girl named Tim"
    eager = Settings.greedy()
    eager.allow_tokens(tokenizer, [tokenizer.eos_token_id])
    prompt = tokenizer.encode(PROMPT).shape[1]
    for stop, count in ((-1, 0), (None, 5)):
        base.generate_simple(PROMPT, eager, 5, stop_token=stop)
        assert base.sequence_ids is not None
        assert base.sequence_ids.shape[1] == prompt + count


def test_item_052_add_bos(base: ExLlamaV2BaseGenerator, answer: Answer) -> None:
    text = base.generate_simple(PROMPT, Settings.greedy(), 8, add_bos=True)
    assert text == PROMPT + answer(PROMPT, 8, add_bos=True)
    assert base.sequence_ids is not None
    assert base.sequence_ids[0, 0] == base.tokenizer.bos_token_id


def test_item_053_another_thread_aborts(base: ExLlamaV2BaseGenerator, answer: Answer) -> None:
    abort = threading.Event()

    def fifth(result: ExLlamaV2PostSamplingResult) -> None:
        seen.append(result)
        if len(seen) == 5:
            thread = threading.Thread(target=abort.set)
            thread.start()
            thread.join()

    seen: list[Any] = []
    settings = Settings.greedy(post_sampling_hooks=[fifth])
    text = base.generate_simple(PROMPT, settings, 200, abort_event=abort, completion_only=True)
    assert text
    assert answer(PROMPT, 8).startswith(text)
    assert len(seen) <= 6


def test_item_053_an_abort_while_the_prompt_is_read(
    base: ExLlamaV2BaseGenerator, model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.config, "max_input_len", 256)  # so it is read in two parts
    abort, read = threading.Event(), base._runner.prefill
    monkeypatch.setattr(base._runner, "prefill", lambda *given: (abort.set(), read(*given))[1])
    assert base.generate_simple(PROMPT * 150, Settings.greedy(), 8, abort_event=abort) == ""


def test_item_054_embeddings_at_the_placeholder(
    base: ExLlamaV2BaseGenerator, vectors: Callable[[str], torch.Tensor], answer: Answer
) -> None:
    text = base.generate_simple(
        "Once{{EMBED_HERE}}",
        Settings.greedy(),
        8,
        input_embeddings=vectors(" upon a time")[None],
        completion_only=True,
    )
    assert text == answer(PROMPT, 8)


def test_item_055_completion_only(base: ExLlamaV2BaseGenerator) -> None:
    whole = base.generate_simple(PROMPT, Settings.greedy(), 5)
    assert whole == PROMPT + base.generate_simple(PROMPT, Settings.greedy(), 5, completion_only=True)


def test_item_056_filters(base: ExLlamaV2BaseGenerator, model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> None:
    def text(made: Any, **options: Any) -> str:
        return str(base.generate_simple(PROMPT, Settings.greedy(), 12, filters=[made], completion_only=True, **options))

    assert text(ExLlamaV2SelectFilter(model, tokenizer, [" yes", " no"])) in (" yes", " no")
    assert text(ExLlamaV2PrefixFilter(model, tokenizer, " and so")).startswith(" and so")
    short = text(RegexFilter(tokenizer, "[a-z]+"), filter_prefer_eos=True)
    assert tokenizer.encode(short).shape[1] == 1


def test_item_057_hooks_see_and_replace_tokens(base: ExLlamaV2BaseGenerator, tokenizer: ExLlamaV2Tokenizer) -> None:
    class Shout(ExLlamaV2PostSamplingHook):
        """Puts one token in the place of every second one."""

        def __init__(self) -> None:
            self.seen: list[int] = []

        def __call__(self, p: ExLlamaV2PostSamplingResult) -> None:
            self.seen.append(int(p.sampled_token))
            if len(self.seen) % 2 == 0:
                p.sampled_token = tokenizer.encode("!")

    hook = Shout()
    text = base.generate_simple(PROMPT, Settings.greedy(post_sampling_hooks=[hook]), 6, completion_only=True)
    assert len(hook.seen) == 6
    assert text.count("!") == 3
    assert text.startswith(",!")


def test_item_058_long_prompts_are_cut_from_the_left(
    model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer, answer: Answer
) -> None:
    made = ExLlamaV2BaseGenerator(model, ExLlamaV2Cache(model, max_seq_len=32), tokenizer)
    prompt = "word " * 40 + PROMPT
    with pytest.warns(UserWarning, match="was cut to its last 24"):
        text = made.generate_simple(prompt, Settings.greedy(), 8, completion_only=True)
    kept = tokenizer.decode(tokenizer.encode(prompt)[0, -24:])
    assert text == answer(kept, 8)


def test_item_059_prefill_of_all_but_the_last_token(
    base: ExLlamaV2BaseGenerator, model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer
) -> None:
    ids = tokenizer.encode(PROMPT)
    base.cache.current_seq_len = 3
    base._gen_begin_base(ids)
    assert base.cache.current_seq_len == ids.shape[1] - 1
    logits = model.forward(ids[:, -1:], base.cache)
    assert torch.allclose(logits, model.forward(ids)[:, -1:], atol=1e-4)


def test_item_060_a_config_needs_no_prepare(folder: Path) -> None:
    assert ExLlamaV2Config(str(folder)).hidden_size == 256


def test_item_061_load_without_arguments(folder: Path) -> None:
    model = ExLlamaV2(ExLlamaV2Config(str(folder)))
    assert not model.loaded
    model.load()
    assert model.loaded
    assert len(set(model.placement)) == 1
    assert model.forward(torch.tensor([[5, 300]])).shape == (1, 2, 2048)


def test_item_062_a_cache_after_loading(model: ExLlamaV2) -> None:
    cache = ExLlamaV2Cache(model, max_seq_len=4096)
    assert cache.allocated
    assert cache.max_seq_len == cache.key_states[0].shape[1] == 4096


def test_item_065_an_adapter_from_a_folder_is_its_merged_weights(folder: Path, lora: Adapter, tmp_path: Path) -> None:
    model = loaded(folder)
    one = ExLlamaV2Lora.from_directory(model, str(lora.folder))
    merged = loaded(merge_into_model(folder, tmp_path / "merged", (lora, 1.0)))
    ids = torch.tensor([[5, 300, 17, 42]])
    assert torch.allclose(model.forward(ids, loras=one), merged.forward(ids), atol=2e-3)
    assert not torch.allclose(model.forward(ids), merged.forward(ids), atol=0.1)
