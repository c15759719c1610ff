"""The filters under every name they are imported by."""

from __future__ import annotations

import importlib

import pytest

import exlm

ALIASES = [
    ("exllamav2.generator.base", "ExLlamaV2Filter", "Filter"),
    ("exllamav2.generator.filters", "ExLlamaV2Filter", "Filter"),
    ("exllamav2.generator.filters", "ExLlamaV2PrefixFilter", "PrefixFilter"),
    ("exllamav2.generator.filters", "ExLlamaV2SelectFilter", "SelectFilter"),
    ("exllamav2.generator.filters", "__version__", "__version__"),
    ("exllamav2.generator.filters.base", "ExLlamaV2Filter", "Filter"),
]


@pytest.mark.parametrize(("module", "old", "new"), ALIASES)
def test_an_old_name_is_the_new_object(module: str, old: str, new: str) -> None:
    found = importlib.import_module(module)
    assert getattr(found, old) is getattr(exlm, new)
    assert old in found.__all__


def test_exlm_exports_the_filters() -> None:
    assert {
        "Filter",
        "GrammarFilter",
        "JsonSchemaFilter",
        "PrefixFilter",
        "RegexFilter",
        "SelectFilter",
    } <= set(exlm.__all__)
