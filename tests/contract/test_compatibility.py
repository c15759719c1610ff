"""The exllamav2 package holds exlm's own objects under old names, and refuses politely what has none."""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import exllamav2
import exlm

SAME = [
    ("exllamav2", "ExLlamaV2", "Model"),
    ("exllamav2", "ExLlamaV2Cache", "Cache"),
    ("exllamav2", "ExLlamaV2CacheBase", "CacheBase"),
    ("exllamav2", "ExLlamaV2Cache_8bit", "CacheFP8"),
    ("exllamav2", "ExLlamaV2Cache_Q4", "CacheQ4"),
    ("exllamav2", "ExLlamaV2Cache_Q6", "CacheQ6"),
    ("exllamav2", "ExLlamaV2Cache_Q8", "CacheQ8"),
    ("exllamav2", "ExLlamaV2Config", "Config"),
    ("exllamav2", "ExLlamaV2Lora", "Lora"),
    ("exllamav2", "ExLlamaV2Tokenizer", "Tokenizer"),
    ("exllamav2", "__version__", "__version__"),
    ("exllamav2.cache", "ExLlamaV2Cache", "Cache"),
    ("exllamav2.cache", "ExLlamaV2CacheBase", "CacheBase"),
    ("exllamav2.cache", "ExLlamaV2Cache_8bit", "CacheFP8"),
    ("exllamav2.cache", "ExLlamaV2Cache_Q4", "CacheQ4"),
    ("exllamav2.cache", "ExLlamaV2Cache_Q6", "CacheQ6"),
    ("exllamav2.cache", "ExLlamaV2Cache_Q8", "CacheQ8"),
    ("exllamav2.config", "ExLlamaV2Config", "Config"),
    ("exllamav2.embedding", "EMBEDDING_INDEX", "EMBEDDING_INDEX"),
    ("exllamav2.generator", "ExLlamaV2DynamicGenerator", "Generator"),
    ("exllamav2.generator", "ExLlamaV2DynamicGeneratorAsync", "AsyncGenerator"),
    ("exllamav2.generator", "ExLlamaV2DynamicJob", "Job"),
    ("exllamav2.generator", "ExLlamaV2DynamicJobAsync", "AsyncJob"),
    ("exllamav2.generator", "ExLlamaV2MMEmbedding", "MMEmbedding"),
    ("exllamav2.generator", "ExLlamaV2PostSamplingResult", "PostSamplingResult"),
    ("exllamav2.generator", "ExLlamaV2Sampler", "Sampler"),
    ("exllamav2.generator", "__version__", "__version__"),
    ("exllamav2.generator.base", "ExLlamaV2Filter", "Filter"),
    ("exllamav2.generator.dynamic", "ExLlamaV2DynamicGenerator", "Generator"),
    ("exllamav2.generator.dynamic", "ExLlamaV2DynamicGeneratorAsync", "AsyncGenerator"),
    ("exllamav2.generator.dynamic", "ExLlamaV2DynamicJob", "Job"),
    ("exllamav2.generator.dynamic", "ExLlamaV2DynamicJobAsync", "AsyncJob"),
    ("exllamav2.generator.dynamic_async", "ExLlamaV2DynamicGeneratorAsync", "AsyncGenerator"),
    ("exllamav2.generator.dynamic_async", "ExLlamaV2DynamicJobAsync", "AsyncJob"),
    ("exllamav2.generator.dynamic_embeddings", "EMBEDDING_INDEX", "EMBEDDING_INDEX"),
    ("exllamav2.generator.dynamic_embeddings", "ExLlamaV2MMEmbedding", "MMEmbedding"),
    ("exllamav2.generator.filters", "ExLlamaV2Filter", "Filter"),
    ("exllamav2.generator.filters", "ExLlamaV2PrefixFilter", "PrefixFilter"),
    ("exllamav2.generator.filters", "ExLlamaV2SelectFilter", "SelectFilter"),
    ("exllamav2.generator.filters", "__version__", "__version__"),
    ("exllamav2.generator.filters.base", "ExLlamaV2Filter", "Filter"),
    ("exllamav2.generator.filters.prefix", "ExLlamaV2PrefixFilter", "PrefixFilter"),
    ("exllamav2.generator.filters.select", "ExLlamaV2SelectFilter", "SelectFilter"),
    ("exllamav2.generator.hooks", "ExLlamaV2PostSamplingResult", "PostSamplingResult"),
    ("exllamav2.generator.sampler", "ExLlamaV2Sampler", "Sampler"),
    ("exllamav2.lora", "ExLlamaV2Lora", "Lora"),
    ("exllamav2.model", "ExLlamaV2", "Model"),
    ("exllamav2.model", "ExLlamaV2Cache", "Cache"),
    ("exllamav2.model", "ExLlamaV2CacheBase", "CacheBase"),
    ("exllamav2.model", "ExLlamaV2Config", "Config"),
    ("exllamav2.model", "ExLlamaV2Lora", "Lora"),
    ("exllamav2.server", "__version__", "__version__"),
    ("exllamav2.tokenizer", "ExLlamaV2Tokenizer", "Tokenizer"),
    ("exllamav2.tokenizer", "__version__", "__version__"),
    ("exllamav2.tokenizer.tokenizer", "ExLlamaV2Tokenizer", "Tokenizer"),
    ("exllamav2.version", "__version__", "__version__"),
    ("exllamav2.vlm", "__version__", "__version__"),
]
LEGACY = [
    ("exllamav2", "ExLlamaV2Cache_TP", "cache_tp.cache_tp"),
    ("exllamav2", "ExLlamaV2MultimodalProjector", "unavailable.MultimodalProjector"),
    ("exllamav2", "ExLlamaV2VisionTower", "unavailable.VisionTower"),
    ("exllamav2", "Intervention", "intervention.Intervention"),
    ("exllamav2", "SeqTensor", "seq_tensor.SeqTensor"),
    ("exllamav2", "Timer", "timer.Timer"),
    ("exllamav2.attn", "ExLlamaV2Attention", "unavailable.AttentionModule"),
    ("exllamav2.attn", "assert_paged_attn", "unavailable.assert_paged_attn"),
    ("exllamav2.attn", "has_flash_attn", "unavailable.has_flash_attn"),
    ("exllamav2.attn", "has_flash_attn_with_paged", "unavailable.has_flash_attn_with_paged"),
    ("exllamav2.attn", "has_xformers", "unavailable.has_xformers"),
    ("exllamav2.cache", "ExLlamaV2Cache_TP", "cache_tp.cache_tp"),
    ("exllamav2.compat", "pairwise", "moving.pairwise"),
    ("exllamav2.compat", "safe_move_tensor", "moving.safe_move_tensor"),
    ("exllamav2.generator", "ExLlamaV2BaseGenerator", "base_generator.BaseGenerator"),
    ("exllamav2.generator", "ExLlamaV2PostSamplingHook", "hook.PostSamplingHook"),
    ("exllamav2.generator", "ExLlamaV2StreamingGenerator", "streaming_generator.StreamingGenerator"),
    ("exllamav2.generator.base", "ExLlamaV2BaseGenerator", "base_generator.BaseGenerator"),
    ("exllamav2.generator.hooks", "ExLlamaV2PostSamplingHook", "hook.PostSamplingHook"),
    (
        "exllamav2.generator.streaming",
        "ExLlamaV2StreamingGenerator",
        "streaming_generator.StreamingGenerator",
    ),
    ("exllamav2.intervention", "Intervention", "intervention.Intervention"),
    ("exllamav2.model", "_torch_device", "moving.torch_device"),
    ("exllamav2.model_init", "add_args", "model_init.add_args"),
    ("exllamav2.model_init", "check_args", "model_init.check_args"),
    ("exllamav2.model_init", "init", "model_init.init"),
    ("exllamav2.model_init", "post_init_load", "model_init.post_init_load"),
    ("exllamav2.model_init", "print_options", "model_init.print_options"),
    ("exllamav2.server", "ExLlamaV2WebSocketServer", "unavailable.WebSocketServer"),
    ("exllamav2.tokenizer", "ExLlamaV2TokenizerBase", "vocabulary.Vocabulary"),
    ("exllamav2.tokenizer", "ExLlamaV2TokenizerHF", "unavailable.JsonVocabulary"),
    ("exllamav2.tokenizer", "ExLlamaV2TokenizerSPM", "unavailable.SentencePieceVocabulary"),
    ("exllamav2.util", "SeqTensor", "seq_tensor.SeqTensor"),
    ("exllamav2.util", "Timer", "timer.Timer"),
    ("exllamav2.util", "cuda_sync_active", "memory.cuda_sync_active"),
    ("exllamav2.util", "get_all_gpu_memory", "memory.get_all_gpu_memory"),
    ("exllamav2.util", "get_basic_progress", "progress.get_basic_progress"),
    ("exllamav2.util", "list_live_tensors", "memory.list_live_tensors"),
    ("exllamav2.util", "print_vram_usage", "memory.print_vram_usage"),
    ("exllamav2.util", "print_vram_usage_peak", "memory.print_vram_usage_peak"),
    ("exllamav2.vlm", "ExLlamaV2MultimodalProjector", "unavailable.MultimodalProjector"),
    ("exllamav2.vlm", "ExLlamaV2VisionTower", "unavailable.VisionTower"),
]
REFUSED = [
    "exllamav2.architecture",
    "exllamav2.conversion",
    "exllamav2.device",
    "exllamav2.ext",
    "exllamav2.fasttensors",
    "exllamav2.layernorm",
    "exllamav2.linear",
    "exllamav2.mlp",
    "exllamav2.module",
    "exllamav2.moe_mlp",
    "exllamav2.rmsnorm",
    "exllamav2.stloader",
    "exllamav2.tensor_p",
]


@pytest.mark.parametrize(("module", "old", "new"), SAME)
def test_an_old_name_is_the_new_object(module: str, old: str, new: str) -> None:
    found = importlib.import_module(module)
    assert getattr(found, old) is getattr(exlm, new)
    assert old in found.__all__


@pytest.mark.parametrize(("module", "old", "new"), LEGACY)
def test_an_old_name_is_a_legacy_object(module: str, old: str, new: str) -> None:
    found = importlib.import_module(module)
    home, _, name = new.rpartition(".")
    assert getattr(found, old) is getattr(importlib.import_module(f"exlm.legacy.{home}"), name)
    assert old in found.__all__


def test_the_tables_are_complete() -> None:
    modules = {name for _, name, _ in pkgutil.walk_packages(exllamav2.__path__, "exllamav2.")} - set(REFUSED)
    listed = {(module, old) for module, old, _ in (*SAME, *LEGACY)}
    for module in {"exllamav2", *modules}:
        assert {(module, name) for name in importlib.import_module(module).__all__} <= listed


def test_the_installation_says_which_version_it_stands_for() -> None:
    """TabbyAPI will not start without, and asks for 0.2.8 at least."""
    said = importlib.metadata.version("exllamav2")
    assert said.split("+") == ["0.3.2", "exlm"]
    config = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = config["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert "exllamav2.egg-info" in wheel["force-include"].values()


def test_modules_are_there_without_being_imported() -> None:
    """In a process of its own: this one has imported them all."""
    names = ("util", "attn", "cache", "config", "generator", "lora", "model", "tokenizer", "version", "vlm")
    script = "import exllamav2; " + "; ".join(f"exllamav2.{name}" for name in names)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_every_package_says_its_version() -> None:
    for package in ("", ".generator", ".generator.filters", ".tokenizer", ".vlm", ".server"):
        assert isinstance(importlib.import_module(f"exllamav2{package}").__version__, str)


@pytest.mark.parametrize("module", REFUSED)
def test_what_has_no_counterpart_says_what_to_use(module: str) -> None:
    with pytest.raises(ImportError, match=rf"{module} does not exist in exlm: .* exlm\.Model"):
        importlib.import_module(module)
