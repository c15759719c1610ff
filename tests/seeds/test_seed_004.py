"""Seed 004: from a folder to text, one test for each item of the checklist."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from exllamav2 import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Cache_Q8,
    ExLlamaV2Cache_TP,
    ExLlamaV2Config,
    ExLlamaV2Tokenizer,
    Timer,
)
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exlm import InputError, NotLoaded, UnknownArchitecture
from exlm.model.devices import Slot, inventory
from tests.seeds.conftest import PROMPT, drain, loaded
from tests.text.samples import vocabulary_v1
from tests.tiny import make

Answer = Callable[..., str]
Settings = ExLlamaV2Sampler.Settings

CACHES = [ExLlamaV2Cache, ExLlamaV2Cache_Q4, ExLlamaV2Cache_Q6, ExLlamaV2Cache_Q8]


def job(ids: torch.Tensor, count: int, **options: Any) -> ExLlamaV2DynamicJob:
    return ExLlamaV2DynamicJob(ids, count, gen_settings=Settings.greedy(), **options)


def some_ids(count: int, start: int = 0) -> torch.Tensor:
    """A prompt that is like no other with another start."""
    return (torch.arange(start, start + count) * 7 % 1900 + 10)[None]


def test_item_095_the_folder_is_all_there_is_to_give(folder: Path) -> None:
    config = ExLlamaV2Config(str(folder))
    raw = json.loads((folder / "config.json").read_text())
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
        assert getattr(config, name) == raw[name]
    assert (config.vocab_size, config.head_dim) == (raw["vocab_size"], raw["head_dim"])
    assert config.rotary_embedding_base == raw["rope_theta"]
    assert config.max_seq_len == raw["max_position_embeddings"]


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "GemmaForCausalLM"]
)
def test_item_096_architectures_are_detected(tmp_path: Path, name: str) -> None:
    config = ExLlamaV2Config(str(make(tmp_path, architectures=[name], hidden_act="silu")))
    assert config.architecture == name
    assert config.arch.lm.requires_bos == (name == "GemmaForCausalLM")


def test_item_096_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownArchitecture, match="NobodyForCausalLM"):
        ExLlamaV2Config(str(make(tmp_path, architectures=["NobodyForCausalLM"])))


@pytest.mark.parametrize(
    "name", ["tiny-lm-exl2-4.0bpw", "tiny-lm-exl2-2.5bpw", "tiny-lm-gptq-g128-sym", "tiny-lm-gptq-g128-act"]
)
def test_item_097_exl2_and_gptq_load_and_generate(fixtures_dir: Path, name: str) -> None:
    model = loaded(fixtures_dir / name)
    made = ExLlamaV2DynamicGenerator(
        model, ExLlamaV2Cache(model, max_seq_len=256), ExLlamaV2Tokenizer(model.config)
    )
    text = made.generate(PROMPT, 8, gen_settings=Settings.greedy(), add_bos=True)
    assert text.startswith(PROMPT + ", there was a")


def test_item_098_compatibility_overrides_can_be_applied(folder: Path) -> None:
    config = ExLlamaV2Config(str(folder))
    before = config.freeze()
    config.arch_compat_overrides()
    config.arch_compat_overrides(quiet=True, warn_only=True)
    assert config.freeze() == before


def test_item_099_the_length_can_be_changed_before_loading(folder: Path) -> None:
    config = ExLlamaV2Config(str(folder))
    config.max_seq_len = 512
    model = ExLlamaV2(config)
    model.load()
    assert ExLlamaV2Cache(model).max_seq_len == 512


@pytest.mark.parametrize(("option", "value"), [("scale_alpha_value", 2.5), ("scale_pos_emb", 2.0)])
def test_item_100_rotations_can_be_stretched(
    folder: Path, model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer, option: str, value: float
) -> None:
    config = ExLlamaV2Config(str(folder))
    setattr(config, option, value)
    config.max_seq_len = 4096
    stretched = ExLlamaV2(config)
    stretched.load()
    ids = tokenizer.encode("The quick brown fox jumps")
    assert not torch.allclose(stretched.forward(ids), model.forward(ids), atol=1e-2)
    if option == "scale_pos_emb":  # positions are divided by it
        positions = 2 * torch.arange(ids.shape[1])[None]
        assert torch.allclose(stretched.forward(ids, positions=positions), model.forward(ids), atol=1e-4)


def test_item_101_the_cache_has_the_size_it_is_given(folder: Path) -> None:
    model = ExLlamaV2(ExLlamaV2Config(str(folder)))
    cache = ExLlamaV2Cache(model, max_seq_len=768, lazy=True)
    assert not cache.allocated
    model.load()
    cache.allocate()
    assert cache.max_seq_len == 768
    assert cache.key_states[0].shape == (1, 768, 2, 64)
    with pytest.raises(InputError, match=r"77[0-9]|768"):
        model.forward(torch.zeros((1, 770), dtype=torch.long), cache)


def test_item_102_four_precisions(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer, answer: Answer) -> None:
    sizes = []
    for kind in CACHES:
        cache = kind(model, max_seq_len=512)
        made = ExLlamaV2DynamicGenerator(model, cache, tokenizer)
        text = made.generate(PROMPT, 10, gen_settings=Settings.greedy(), completion_only=True)
        assert text[:10] == answer(PROMPT, 10)[:10]
        sizes.append(cache.footprint()[0])
    plain, q4, q6, q8 = sizes
    assert q4 < q6 < q8 < plain


def test_item_103_the_cache_bounds_concurrency(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> None:
    made = ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=2048), tokenizer)
    jobs = [job(some_ids(300, 1000 * n), 512 - 300) for n in range(5)]
    made.enqueue(jobs)
    made.iterate()
    assert made.active_jobs == jobs[:4]  # 2048 tokens are four sequences of 512
    assert made.pending_jobs == jobs[4:]
    made.clear_queue()


def test_item_104_pages_have_256_tokens(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> None:
    with pytest.raises(InputError, match=r"multiple of 256, received 1000"):
        ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=1000), tokenizer)
    made = ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=1024), tokenizer)
    assert (made.page_size, made.max_pages, made.max_total_tokens) == (256, 4, 1024)


def test_item_105_auto_split_needs_a_lazy_cache(folder: Path, model: ExLlamaV2) -> None:
    fresh = ExLlamaV2(ExLlamaV2Config(str(folder)))
    cache = ExLlamaV2Cache(fresh, lazy=True)
    fresh.load_autosplit(cache)
    assert fresh.loaded
    assert cache.allocated
    with pytest.raises(InputError, match="lazy=True"):
        fresh.load_autosplit(ExLlamaV2Cache(model, max_seq_len=256))


def two_devices(first: int, second: int = 1 << 40) -> Callable[[str | None], list[Slot]]:
    """A machine with two devices, made up: so many bytes are free on each."""
    return lambda wish: [
        Slot(f"device {i}", torch.device("cpu"), free) for i, free in enumerate((first, second))
    ]


def test_item_106_three_ways_to_load(folder: Path, tokenizer: ExLlamaV2Tokenizer, answer: Answer) -> None:
    def greedy(cache: Any) -> Any:
        made = ExLlamaV2DynamicGenerator(model, cache, tokenizer)
        return made.generate(PROMPT, 10, gen_settings=Settings.greedy(), completion_only=True)

    model = ExLlamaV2(ExLlamaV2Config(str(folder)))
    model.inventory = two_devices(1 << 40)
    model.load([0.01, 24])  # GB of weights
    assert set(model.placement) == {"device 0", "device 1"}
    assert greedy(ExLlamaV2Cache(model, max_seq_len=512)) == answer(PROMPT, 10)
    cache = ExLlamaV2Cache(model, max_seq_len=512, lazy=True)
    model.load_autosplit(cache)
    assert greedy(cache) == answer(PROMPT, 10)
    with pytest.raises(NotLoaded, match=r"unless model is loaded with load_tp\(\)"):
        ExLlamaV2Cache_TP(model)
    model.config.device = "cpu"
    model.inventory = inventory
    model.load_tp([1, 1])  # two processes, each with half of every layer
    try:
        assert model.tp_context == 2
        assert greedy(ExLlamaV2Cache_TP(model, base=ExLlamaV2Cache_Q8, max_seq_len=512)) == answer(PROMPT, 10)
    finally:
        model.unload()


def test_item_107_auto_split_moves_on_when_a_device_is_full(folder: Path) -> None:
    model = ExLlamaV2(ExLlamaV2Config(str(folder)))
    places = []
    for tokens in (256, 2048):  # the longer cache takes the room of layers
        model.inventory = two_devices(114 << 20)
        cache = ExLlamaV2Cache(model, max_seq_len=tokens, lazy=True)
        model.load_autosplit(cache, reserve_vram=[0])
        places.append(model.placement.count("device 0"))
        assert model.forward(some_ids(4), cache).shape == (1, 4, 2048)
    assert 0 < places[1] < places[0]
    model.inventory = two_devices(1 << 20, 1 << 20)
    with pytest.raises(RuntimeError, match="Insufficient memory for model and cache"):
        model.load_autosplit(ExLlamaV2Cache(model, lazy=True))


def test_item_108_loading_takes_a_moment(folder: Path) -> None:
    model = ExLlamaV2(ExLlamaV2Config(str(folder)))
    with Timer() as timer:
        model.load()
    assert timer.interval < 5
    assert [path.name for path in folder.glob("*.safetensors")]


def test_item_109_progress(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, seen = ExLlamaV2(ExLlamaV2Config(str(folder))), []
    model.load(callback=lambda done, total: seen.append((done, total)))
    total = seen[-1][1]
    assert seen == [(done, total) for done in range(total + 1)]
    assert total > 4
    model.load(progress=True)
    assert "Loading" in capsys.readouterr().out
    with pytest.raises(InputError, match="not both"):
        model.load(callback=print, progress=True)


def test_item_110_both_kinds_of_tokenizer_files(folder: Path, tmp_path: Path) -> None:
    assert ExLlamaV2Tokenizer(ExLlamaV2Config(str(folder))).get_vocab_size() == 2048
    make(tmp_path, vocab_size=32000)
    shutil.copy(vocabulary_v1(), tmp_path / "tokenizer.model")
    made = ExLlamaV2Tokenizer(ExLlamaV2Config(str(tmp_path)))
    assert made.get_vocab_size() == 32000
    assert made.decode(made.encode("Hello, world"))[0] == "Hello, world"


@pytest.mark.parametrize("text", ["Hello, world", "  spaces\n\tand lines\n", "naïve 漢字 😀", ""])
def test_item_111_text_survives_the_way_there_and_back(tokenizer: ExLlamaV2Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == [text]
    both = tokenizer.encode(text, add_bos=True, add_eos=True)[0].tolist()
    assert both == [tokenizer.bos_token_id, *ids[0].tolist(), tokenizer.eos_token_id]


def test_item_112_chat_templates(tokenizer: ExLlamaV2Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.apply_chat_template(messages, tokenize=True)
    assert ids[0, 0] == tokenizer.single_id("<|im_start|>")
    assert tokenizer.decode(ids, decode_special_tokens=True) == [text]


def test_item_113_model_cache_and_tokenizer_make_a_generator(
    model: ExLlamaV2, cache: ExLlamaV2Cache, tokenizer: ExLlamaV2Tokenizer
) -> None:
    made = ExLlamaV2DynamicGenerator(model, cache, tokenizer)
    assert (made.model, made.cache, made.tokenizer) == (model, cache, tokenizer)
    assert made.generate(PROMPT, 2).startswith(PROMPT)


def test_item_114_prompts_are_cached(generator: ExLlamaV2DynamicGenerator) -> None:
    ids = some_ids(600)
    generator.enqueue(job(ids, 3))
    first = drain(generator)[-1]
    generator.enqueue(job(ids, 3))
    second = drain(generator)[-1]
    assert first["cached_tokens"] == 0
    assert (second["cached_pages"], second["cached_tokens"]) == (2, 599)
    assert second["full_completion"] == first["full_completion"]


def test_item_115_common_prefixes_share_pages(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> None:
    made = ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=1536), tokenizer)
    start = some_ids(768)
    jobs = [job(torch.cat([start, some_ids(20, 50 * n + 1)], 1), 4) for n in range(3)]
    made.enqueue(jobs)  # alone each needs four pages of the six
    made.iterate()
    assert len(made.active_jobs) == 3
    drain(made)
    assert [one.cached_pages for one in jobs] == [0, 3, 3]


def test_item_116_warming_up_changes_nothing(
    model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer, greedy: Settings
) -> None:
    texts = []
    for warm in (True, False):
        made = ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=512), tokenizer)
        if warm:
            made.warmup()
        text, result = made.generate(PROMPT, 6, gen_settings=greedy, return_last_results=True)
        assert result["cached_tokens"] == 0
        texts.append(text)
    assert texts[0] == texts[1]


def test_item_117_many_prompts_over_a_cache_of_one_row(
    generator: ExLlamaV2DynamicGenerator, greedy: Settings, answer: Answer
) -> None:
    assert generator.cache.batch_size == generator.model.config.max_batch_size == 1
    prompts = [PROMPT, "The", "#include", "She was"]
    texts = generator.generate(prompts, 6, gen_settings=greedy)
    assert texts == [prompt + answer(prompt, 6) for prompt in prompts]


def test_item_118_batch_and_queue_sizes(
    model: ExLlamaV2, cache: ExLlamaV2Cache, tokenizer: ExLlamaV2Tokenizer
) -> None:
    made = ExLlamaV2DynamicGenerator(model, cache, tokenizer, max_batch_size=2, max_q_size=1)
    assert made.max_batch_size == 2
    made.enqueue([job(some_ids(5, n), 4) for n in range(5)])
    most = 0
    while made.num_remaining_jobs():
        made.iterate()
        most = max(most, len(made.active_jobs))
    assert most == 2


def test_item_119_a_draft_model(
    model: ExLlamaV2, draft_model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer, answer: Answer
) -> None:
    made = ExLlamaV2DynamicGenerator(
        model,
        ExLlamaV2Cache(model, max_seq_len=512),
        tokenizer,
        draft_model=draft_model,
        draft_cache=ExLlamaV2Cache(draft_model, max_seq_len=512),
    )
    text, result = made.generate(
        PROMPT, 20, gen_settings=Settings.greedy(), completion_only=True, return_last_results=True
    )
    assert text == answer(PROMPT, 20)
    assert result["accepted_draft_tokens"] > 5
    assert result["rejected_draft_tokens"] >= 0


def test_item_120_one_prompt_or_a_list(generator: ExLlamaV2DynamicGenerator, greedy: Settings) -> None:
    one = generator.generate(PROMPT, 5, gen_settings=greedy)
    assert [one, one] == generator.generate([PROMPT, PROMPT], 5, gen_settings=greedy)


@pytest.mark.parametrize("stop", [".", "id of ."])
def test_item_121_ids_and_strings_stop(
    generator: ExLlamaV2DynamicGenerator, tokenizer: ExLlamaV2Tokenizer, greedy: Settings, stop: str
) -> None:
    condition = tokenizer.single_id(".") if stop.startswith("id") else stop
    text = generator.generate(
        PROMPT, 40, gen_settings=greedy, stop_conditions=[condition], completion_only=True
    )
    assert text == ", there was a little girl named Tim"


def test_item_122_settings_for_all_or_for_each(generator: ExLlamaV2DynamicGenerator) -> None:
    greedy, hot = Settings.greedy(), Settings(temperature=5.0, top_k=0, top_p=1.0)
    shared = generator.generate([PROMPT] * 2, 8, gen_settings=greedy)
    assert shared[0] == shared[1]
    own = generator.generate([PROMPT] * 2, 8, gen_settings=[greedy, hot], seed=1)
    assert own[0] == shared[0]
    assert own[1] != shared[0]
    with pytest.raises(InputError, match="one entry for each of 2 prompts, found 3"):
        generator.generate([PROMPT] * 2, 8, gen_settings=[greedy] * 3)


def test_item_123_base_models_get_their_bos(
    generator: ExLlamaV2DynamicGenerator, greedy: Settings, answer: Answer
) -> None:
    text = generator.generate(PROMPT, 14, add_bos=True, gen_settings=greedy)
    assert text == PROMPT + answer(PROMPT, 14, add_bos=True)
    assert "named Lily" in text  # without BOS it is Tim


def test_item_124_healing_repairs_the_seam(generator: ExLlamaV2DynamicGenerator, greedy: Settings) -> None:
    for prompt in ("Once upon a ", "Once upon a t", "Once up"):
        text = generator.generate(prompt, 6, gen_settings=greedy, token_healing=True, add_bos=True)
        assert text.startswith("Once upon a time")


def test_item_125_settings_take_effect(
    generator: ExLlamaV2DynamicGenerator, tokenizer: ExLlamaV2Tokenizer
) -> None:
    def ids(**fields: Any) -> list[int]:
        settings = Settings.greedy(**fields)
        generator.enqueue(made := ExLlamaV2DynamicJob(tokenizer.encode("####"), 10, gen_settings=settings))
        drain(generator)
        return made.sequences[0].ids[-10:]

    plain = ids()
    assert len(set(plain)) < 10
    for fields in (
        {"token_repetition_penalty": 3.0},
        {"token_frequency_penalty": 20.0},
        {"token_presence_penalty": 50.0},
        {"dry_multiplier": 50.0, "dry_sequence_breakers": {0}},
    ):
        assert ids(**fields) != plain
    settings = Settings(temperature=4.0, top_k=0, top_p=1.0, token_repetition_penalty=1.0)
    free = {generator.generate(PROMPT, 4, gen_settings=settings, seed=seed) for seed in range(4)}
    settings.top_k = 1
    assert (
        len(free) > len({generator.generate(PROMPT, 4, gen_settings=settings, seed=s) for s in range(4)}) == 1
    )


def test_item_126_thousands_of_jobs(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> None:
    made = ExLlamaV2DynamicGenerator(
        model, ExLlamaV2Cache(model, max_seq_len=128 * 256), tokenizer, max_batch_size=128, max_q_size=1
    )
    settings = Settings.greedy()
    jobs = [ExLlamaV2DynamicJob(some_ids(1, n), 1, gen_settings=settings, identifier=n) for n in range(1000)]
    assert made.enqueue(jobs) == list(range(1000))
    ended = [result["identifier"] for result in drain(made) if result["eos"]]
    assert sorted(ended) == list(range(1000))
