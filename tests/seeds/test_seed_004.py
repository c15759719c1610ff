"""Seed 004, from a folder to a model: one test for each item of the checklist, up to 112."""

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
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2Sampler
from exlm import InputError, NotLoaded, UnknownArchitecture
from exlm.model.devices import DeviceInfo, list_devices
from tests.seeds.conftest import PROMPT, loaded, make_job, some_ids
from tests.tiny import make
from tests.tokenizer.sample_vocabularies import mistral_v1_model

Answer = Callable[..., str]
Settings = ExLlamaV2Sampler.Settings

CACHES = [ExLlamaV2Cache, ExLlamaV2Cache_Q4, ExLlamaV2Cache_Q6, ExLlamaV2Cache_Q8]


def test_item_095_the_folder_is_all_there_is_to_give(folder: Path) -> None:
    config = ExLlamaV2Config(str(folder))
    raw = json.loads((folder / "config.json").read_text())
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
        assert getattr(config, name) == raw[name]
    assert (config.vocab_size, config.head_dim) == (raw["vocab_size"], raw["head_dim"])
    assert config.rotary_embedding_base == raw["rope_theta"]
    assert config.max_seq_len == raw["max_position_embeddings"]


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "GemmaForCausalLM"])
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
    made = ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=256), ExLlamaV2Tokenizer(model.config))
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
    found = stretched.forward(ids)
    assert not torch.allclose(found, model.forward(ids), atol=1e-2)
    if option == "scale_pos_emb":  # positions are divided by it
        positions = 2 * torch.arange(ids.shape[1])[None]
        assert torch.allclose(stretched.forward(ids, positions=positions), model.forward(ids), atol=1e-4)
    else:  # turns slow down as if the base were larger
        config.scale_alpha_value = 1.0
        config.rotary_embedding_base *= value ** (config.head_dim / (config.head_dim - 2))
        stretched.load()
        assert torch.allclose(stretched.forward(ids), found, atol=1e-4)


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
        text = made.generate(PROMPT, 8, gen_settings=Settings.greedy(), completion_only=True)
        assert text == answer(PROMPT, 8)
        sizes.append(cache.footprint()[0])
    plain, q4, q6, q8 = sizes
    assert q4 < q6 < q8 < plain


def test_item_103_the_cache_bounds_concurrency(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> None:
    made = ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=2048), tokenizer)
    jobs = [make_job(some_ids(300, 1000 * n), 512 - 300) for n in range(5)]
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


def two_devices(first: int, second: int = 1 << 40) -> Callable[[str | None], list[DeviceInfo]]:
    """A machine with two devices, made up: so many bytes are free on each."""
    return lambda wish: [DeviceInfo(f"device {i}", torch.device("cpu"), free) for i, free in enumerate((first, second))]


def test_item_106_three_ways_to_load(folder: Path, tokenizer: ExLlamaV2Tokenizer, answer: Answer) -> None:
    def greedy(cache: Any) -> Any:
        made = ExLlamaV2DynamicGenerator(model, cache, tokenizer)
        return made.generate(PROMPT, 10, gen_settings=Settings.greedy(), completion_only=True)

    model = ExLlamaV2(ExLlamaV2Config(str(folder)))
    model.list_devices = two_devices(1 << 40)
    model.load([0.01, 24])  # GB of weights
    assert set(model.placement) == {"device 0", "device 1"}
    assert greedy(ExLlamaV2Cache(model, max_seq_len=512)) == answer(PROMPT, 10)
    cache = ExLlamaV2Cache(model, max_seq_len=512, lazy=True)
    model.load_autosplit(cache)
    assert greedy(cache) == answer(PROMPT, 10)
    with pytest.raises(NotLoaded, match=r"unless model is loaded with load_tp\(\)"):
        ExLlamaV2Cache_TP(model)
    model.config.device = "cpu"
    model.list_devices = list_devices
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
        model.list_devices = two_devices(114 << 20)
        cache = ExLlamaV2Cache(model, max_seq_len=tokens, lazy=True)
        model.load_autosplit(cache, reserve_vram=[0])
        places.append(model.placement.count("device 0"))
        assert model.forward(some_ids(4), cache).shape == (1, 4, 2048)
    assert 0 < places[1] < places[0]
    model.list_devices = two_devices(1 << 20, 1 << 20)
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
    assert "Loading" in capsys.readouterr().err
    with pytest.raises(InputError, match="not both"):
        model.load(callback=print, progress=True)


def test_item_110_both_kinds_of_tokenizer_files(folder: Path, tmp_path: Path) -> None:
    assert ExLlamaV2Tokenizer(ExLlamaV2Config(str(folder))).get_vocab_size() == 2048
    make(tmp_path, vocab_size=32000)
    shutil.copy(mistral_v1_model(), tmp_path / "tokenizer.model")
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
