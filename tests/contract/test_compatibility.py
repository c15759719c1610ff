"""The exllamav2 package holds exlm's own objects under old names, and refuses politely what has none."""

from __future__ import annotations

import importlib

import pytest

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
    ("exllamav2", "ExLlamaV2Tokenizer", "Tokenizer"),
    ("exllamav2", "__version__", "__version__"),
    ("exllamav2.generator", "ExLlamaV2DynamicGenerator", "Generator"),
    ("exllamav2.generator", "ExLlamaV2DynamicGeneratorAsync", "AsyncGenerator"),
    ("exllamav2.generator", "ExLlamaV2DynamicJob", "Job"),
    ("exllamav2.generator", "ExLlamaV2DynamicJobAsync", "AsyncJob"),
    ("exllamav2.generator", "ExLlamaV2Sampler", "Sampler"),
    ("exllamav2.generator", "__version__", "__version__"),
    ("exllamav2.generator.dynamic", "ExLlamaV2DynamicGenerator", "Generator"),
    ("exllamav2.generator.dynamic", "ExLlamaV2DynamicJob", "Job"),
    ("exllamav2.generator.sampler", "ExLlamaV2Sampler", "Sampler"),
    ("exllamav2.generator.base", "ExLlamaV2Filter", "Filter"),
    ("exllamav2.generator.filters", "__version__", "__version__"),
    ("exllamav2.generator.filters", "ExLlamaV2Filter", "Filter"),
    ("exllamav2.generator.filters", "ExLlamaV2PrefixFilter", "PrefixFilter"),
    ("exllamav2.generator.filters", "ExLlamaV2SelectFilter", "SelectFilter"),
    ("exllamav2.generator.filters.base", "ExLlamaV2Filter", "Filter"),
    ("exllamav2.cache", "ExLlamaV2Cache", "Cache"),
    ("exllamav2.cache", "ExLlamaV2CacheBase", "CacheBase"),
    ("exllamav2.cache", "ExLlamaV2Cache_8bit", "CacheFP8"),
    ("exllamav2.cache", "ExLlamaV2Cache_Q4", "CacheQ4"),
    ("exllamav2.cache", "ExLlamaV2Cache_Q6", "CacheQ6"),
    ("exllamav2.cache", "ExLlamaV2Cache_Q8", "CacheQ8"),
    ("exllamav2.config", "ExLlamaV2Config", "Config"),
    ("exllamav2.model", "ExLlamaV2", "Model"),
    ("exllamav2.tokenizer", "ExLlamaV2Tokenizer", "Tokenizer"),
    ("exllamav2.tokenizer", "__version__", "__version__"),
    ("exllamav2.tokenizer.tokenizer", "ExLlamaV2Tokenizer", "Tokenizer"),
    ("exllamav2.version", "__version__", "__version__"),
]


@pytest.mark.parametrize(("module", "old", "new"), SAME)
def test_an_old_name_is_the_new_object(module: str, old: str, new: str) -> None:
    found = importlib.import_module(module)
    assert getattr(found, old) is getattr(exlm, new)
    assert old in found.__all__


def test_the_table_is_complete() -> None:
    listed = {(module, old) for module, old, _ in SAME}
    for module in {module for module, _, _ in SAME}:
        assert {(module, name) for name in importlib.import_module(module).__all__} <= listed


@pytest.mark.parametrize("module", ["exllamav2.attn", "exllamav2.ext"])
def test_what_has_no_counterpart_says_what_to_use(module: str) -> None:
    with pytest.raises(ImportError, match=rf"{module} does not exist in exlm: .* exlm\.Model"):
        importlib.import_module(module)
