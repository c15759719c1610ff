"""The attributes, methods and arguments that TabbyAPI and text-generation-webui use, and their calls."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
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
    ExLlamaV2Config,
    ExLlamaV2Lora,
    ExLlamaV2Tokenizer,
)
from exllamav2.generator import (
    ExLlamaV2BaseGenerator,
    ExLlamaV2DynamicGeneratorAsync,
    ExLlamaV2DynamicJob,
    ExLlamaV2DynamicJobAsync,
    ExLlamaV2Sampler,
    ExLlamaV2StreamingGenerator,
)
from exlm import Generator

CACHES = [
    ExLlamaV2Cache,
    ExLlamaV2Cache_8bit,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Cache_Q8,
]

OPTIONS = {  # of a Config, with values that both clients set
    "max_seq_len": 1024,
    "max_output_len": 16,
    "max_input_len": 512,
    "max_attention_size": 512**2,
    "scale_pos_emb": 1.0,
    "scale_alpha_value": 1.5,
    "no_flash_attn": True,
    "no_xformers": True,
    "no_sdpa": True,
    "num_experts_per_token": 2,  # also for a model without experts
}

READ = [
    (ExLlamaV2Config, ["model_dir", "vision_model_type", "max_seq_len", "vocab_size", "hidden_size"]),
    (ExLlamaV2, ["config", "loaded"]),
    (
        ExLlamaV2Tokenizer,
        [
            *["bos_token", "eos_token", "pad_token", "unk_token", "eos_token_id", "bos_token_id"],
            *["pad_token_id", "unk_token_id", "extended_id_to_piece", "extended_piece_to_id"],
            *["unspecial_id_to_piece", "unspecial_piece_to_id", "actual_vocab_size", "tokenizer_model"],
            *["tokenizer_config_dict", "newline_token_id", "space_token_id"],
        ],
    ),
    (ExLlamaV2Cache, ["current_seq_len", "max_seq_len", "batch_size", "model"]),
]

TAKEN = [  # whose, what (or making one), how many arguments are given by position, and the keywords
    (ExLlamaV2Config, "prepare", 1, []),
    (ExLlamaV2Config, "arch_compat_overrides", 1, ["quiet", "warn_only"]),
    (ExLlamaV2, "__init__", 2, []),
    (ExLlamaV2, "load", 2, ["callback", "callback_gen", "progress"]),
    (ExLlamaV2, "load_gen", 2, ["callback_gen"]),
    (ExLlamaV2, "load_autosplit", 2, ["reserve_vram", "callback", "progress"]),
    (ExLlamaV2, "load_autosplit_gen", 2, ["reserve_vram", "last_id_only", "callback_gen"]),
    (ExLlamaV2, "load_tp", 2, ["callback", "progress", "expect_cache_tokens", "expect_cache_base"]),
    (ExLlamaV2, "load_tp_gen", 2, ["callback_gen", "expect_cache_base", "expect_cache_tokens"]),
    (ExLlamaV2, "forward", 2, ["cache", "preprocess_only", "loras", "last_id_only", "input_mask"]),
    (ExLlamaV2, "unload", 1, []),
    *((cache, "__init__", 2, ["max_seq_len", "lazy", "batch_size"]) for cache in CACHES),
    (ExLlamaV2Tokenizer, "__init__", 2, []),
    (ExLlamaV2Tokenizer, "encode", 2, ["add_bos", "encode_special_tokens", "embeddings"]),
    (ExLlamaV2Tokenizer, "decode", 2, ["decode_special_tokens"]),
    (ExLlamaV2Tokenizer, "get_id_to_piece_list", 2, []),
    (
        Generator,
        "__init__",
        1,
        ["model", "cache", "draft_model", "draft_cache", "tokenizer", "max_batch_size", "paged"],
    ),
    (Generator, "set_loras", 2, []),
    (ExLlamaV2DynamicGeneratorAsync, "close", 1, []),
    (ExLlamaV2DynamicJobAsync, "cancel", 1, []),
    (
        ExLlamaV2DynamicJob,
        "__init__",
        1,
        [
            *["input_ids", "max_new_tokens", "min_new_tokens", "gen_settings", "stop_conditions"],
            *["decode_special_tokens", "filters", "filter_prefer_eos", "return_probs", "return_top_tokens"],
            *["return_logits", "banned_strings", "token_healing", "identifier", "embeddings"],
        ],
    ),
    (ExLlamaV2Lora, "from_directory", 3, []),
    (ExLlamaV2Lora, "unload", 1, []),
    (ExLlamaV2Sampler.Settings, "disallow_tokens", 3, []),
    (ExLlamaV2Sampler.Settings, "allow_tokens", 3, []),
]

SETTINGS = [  # as "off" as both clients can say it, and the values a request may have
    *[("temperature", 1.0), ("temperature_last", False), ("smoothing_factor", 0.0), ("top_k", 1)],
    *[("top_p", 1.0), ("top_a", 0.0), ("min_p", 0.0), ("tfs", 1.0), ("typical", 1.0), ("skew", 0.0)],
    *[("mirostat", False), ("mirostat_tau", 1.5), ("mirostat_eta", 0.3), ("xtc_probability", 0.0)],
    *[("xtc_threshold", 0.1), ("min_temp", 1.0), ("max_temp", 1.0), ("temp_exponent", 1.0)],
    *[("token_repetition_penalty", 1.0), ("token_repetition_range", -1), ("token_repetition_decay", 0)],
    *[("token_frequency_penalty", 0.0), ("token_presence_penalty", 0.0), ("dry_multiplier", 0.0)],
    *[("dry_base", 1.75), ("dry_allowed_length", 2), ("dry_range", 0), ("dry_max_ngram", 20)],
    *[("dry_sequence_breakers", {1, 2}), ("cfg_scale", None), ("token_bias", None)],
]


@pytest.mark.parametrize(("name", "value"), OPTIONS.items())
def test_an_option_of_the_config_can_be_set(folder: Path, name: str, value: Any) -> None:
    config = ExLlamaV2Config()
    config.model_dir = str(folder)
    config.max_seq_len = 4096
    config.prepare()
    config.arch_compat_overrides()
    setattr(config, name, value)
    config.freeze()
    assert getattr(config, name) == value


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, names in READ for name in names], ids=str)
def test_an_attribute_exists(
    owner: type, name: str, model: ExLlamaV2, cache: ExLlamaV2Cache, tokenizer: ExLlamaV2Tokenizer
) -> None:
    holder = next(one for one in (model, model.config, cache, tokenizer) if type(one) is owner)
    assert hasattr(holder, name)


@pytest.mark.parametrize(
    ("owner", "name", "by_position", "keywords"),
    TAKEN,
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_call_accepts_the_arguments_of_clients(owner: type, name: str, by_position: int, keywords: list[str]) -> None:
    call = getattr(owner, name)
    inspect.signature(call).bind_partial(*[None] * by_position, **dict.fromkeys(keywords))


@pytest.mark.parametrize(("name", "value"), SETTINGS)
def test_a_sampler_setting_can_be_set(name: str, value: Any) -> None:
    settings = ExLlamaV2Sampler.Settings(**{name: value})
    setattr(settings, name, value)
    settings.check()


def counting(done: int, total: int) -> Iterator[tuple[int, int]]:
    """A callback_gen like TabbyAPI's."""
    yield done, total


def prepared(folder: Path) -> ExLlamaV2Config:
    config = ExLlamaV2Config()
    config.model_dir = str(folder.resolve())
    config.max_seq_len = 4096
    config.prepare()
    config.arch_compat_overrides()
    config.max_output_len = 16
    config.max_input_len, config.max_attention_size = 512, 512**2
    return config


def test_the_three_loaders_that_yield(folder: Path) -> None:
    model = ExLlamaV2(prepared(folder))
    seen = list(model.load_gen([], callback_gen=counting))
    total = seen[0][1]
    assert seen == [(done, total) for done in range(total + 1)]
    other = ExLlamaV2(prepared(folder))
    cache = ExLlamaV2Cache_Q6(other, max_seq_len=1024, lazy=True, batch_size=1)
    steps = other.load_autosplit_gen(cache, reserve_vram=[0], last_id_only=True, callback_gen=counting)
    assert not other.loaded
    assert list(steps) == seen
    assert other.loaded
    assert cache.allocated
    other.unload()
    assert not other.loaded
    steps = other.load_tp_gen(
        None, callback_gen=counting, expect_cache_base=ExLlamaV2Cache_Q6, expect_cache_tokens=1024
    )
    assert list(steps) == seen


async def tabby(folder: Path) -> list[Any]:
    """TabbyAPI's calls, from a model folder to streamed results."""

    @torch.inference_mode()
    def load() -> Iterator[Any]:
        for name in ("unspecial_piece_to_id", "extended_piece_to_id"):
            setattr(ExLlamaV2Tokenizer, name, {})
        yield from model.load_autosplit_gen(cache, reserve_vram=[96 * 2**20], last_id_only=True, callback_gen=counting)
        model.forward(torch.zeros((1, config.max_input_len), dtype=torch.long), cache=cache, preprocess_only=True)

    config = prepared(folder)
    model = ExLlamaV2(config)
    cache = ExLlamaV2Cache_Q8(model, max_seq_len=1024, lazy=True, batch_size=1)
    for _ in load():
        pass
    tokenizer = ExLlamaV2Tokenizer(config)
    generator = ExLlamaV2DynamicGeneratorAsync(
        model=model,
        cache=cache,
        draft_model=None,
        draft_cache=None,
        tokenizer=tokenizer,
        max_batch_size=None,
        paged=True,
    )
    generator.speculative_ngram = False  # TabbyAPI sets this attribute, which has no effect
    assert generator.generator.max_batch_size >= 1
    assert not generator.generator.current_loras
    settings = ExLlamaV2Sampler.Settings(token_repetition_penalty=1.1, top_k=1)
    ids = tokenizer.encode("Once upon a time", add_bos=True, encode_special_tokens=True, embeddings=[])
    assert ids.flatten().tolist()[0] == tokenizer.bos_token_id
    job = ExLlamaV2DynamicJobAsync(
        generator,
        input_ids=[ids],
        max_new_tokens=12,
        min_new_tokens=0,
        gen_settings=settings,
        stop_conditions=[tokenizer.eos_token_id, "never said"],
        decode_special_tokens=True,
        filters=[],
        filter_prefer_eos=False,
        return_probs=True,
        return_top_tokens=3,
        return_logits=True,
        banned_strings=[],
        token_healing=False,
        identifier="request",
        embeddings=[],
    )
    results: list[Any] = []
    async for result in job:
        settings.token_repetition_range = len(results)  # TabbyAPI widens the range while the text grows
        results.append(result)
    left = ExLlamaV2DynamicJobAsync(generator, input_ids=ids, max_new_tokens=200)
    async for _ in left:
        await left.cancel()
    generator.generator.set_loras([])
    await generator.close()
    model.unload()
    return results


def test_tabby_api(folder: Path) -> None:
    results = asyncio.run(tabby(folder))
    assert all(result["identifier"] == "request" for result in results)
    assert [result["stage"] for result in results[:2]] == ["started", "prefill"]
    streamed = [result for result in results if result["stage"] == "streaming"]
    last = streamed[-1]
    assert last["eos"]
    assert last["eos_reason"] in ("max_new_tokens", "stop_token")
    assert "".join(result.get("text", "") for result in streamed) == last["full_completion"]
    first = streamed[0]
    assert first["top_k_tokens"].shape == first["top_k_probs"].shape == (1, 1, 3)
    assert first["logits"].shape[:2] == first["token_probs"].shape == (1, 1)
    for key in (
        "time_enqueued",
        "time_prefill",
        "time_generate",
        "prompt_tokens",
        "cached_tokens",
        "new_tokens",
    ):
        assert last[key] >= 0


def test_an_assigned_eos_token_id_ends_texts(model: ExLlamaV2, cache: ExLlamaV2Cache) -> None:
    own = ExLlamaV2Tokenizer(model.config)
    greedy = ExLlamaV2Sampler.Settings.greedy()
    ids = own.encode("Once upon a time")
    whole = ExLlamaV2BaseGenerator(model, cache, own).generate_simple("Once upon a time", greedy, 8)
    third = int(own.encode(whole)[0, ids.shape[1] + 2])
    own.eos_token_id = third
    short = ExLlamaV2BaseGenerator(model, cache, own).generate_simple("Once upon a time", greedy, 8)
    assert own.encode(short).shape[1] == ids.shape[1] + 2
    assert ExLlamaV2StreamingGenerator(model, cache, own).stop_tokens == {third}


@pytest.mark.parametrize("kind", CACHES)
def test_the_webui_reuses_a_prefix_by_setting_the_length(
    model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer, kind: type[ExLlamaV2Cache]
) -> None:
    cache = kind(model, max_seq_len=512, lazy=False)
    ids = tokenizer.encode("The quick brown fox", add_bos=True, encode_special_tokens=True)
    model.forward(ids[:, :-1], cache, input_mask=None, preprocess_only=True, loras=None)
    once = model.forward(ids[:, -1:], cache, input_mask=None, loras=None).float().cpu()
    cache.current_seq_len -= 1
    again = model.forward(ids[:, -1:], cache, loras=None).float().cpu()
    assert torch.equal(once, again)
    cache.current_seq_len = 0
    whole = model.forward(ids, cache, last_id_only=False, loras=None).float()
    assert whole.shape[1] == ids.shape[1]
    assert torch.allclose(whole[:, -1:], once, atol=1e-4 if kind is ExLlamaV2Cache else 1.0)
    assert tokenizer.decode(ids, decode_special_tokens=True)[0].endswith("brown fox")
