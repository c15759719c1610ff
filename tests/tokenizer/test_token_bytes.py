"""Bytes of tokens: the byte alphabet, and that the bulk tables are what the library's decoders say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import pre_tokenizers

from exlm.tokenizer.hf import HFBackend
from exlm.tokenizer.token_bytes import byte_to_unicode, from_decoder
from exlm.tokenizer.tokenizer_files import TokenizerFiles
from tests.tokenizer.sample_vocabularies import byte_level_json, metaspace_json


def test_byte_to_unicode_is_that_of_the_library() -> None:
    letters = byte_to_unicode()
    assert sorted(letters) == list(range(256))
    assert set(letters.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    text = "".join(map(chr, range(256)))
    written = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    assert written[0][0] == "".join(letters[byte] for byte in text.encode())


def by_definition(library: tokenizers.Tokenizer, number: int, before: list[int]) -> str:
    """A token's text in the middle of another: decode it after `before` and drop what that decodes to."""
    skip = len(library.decode(before, skip_special_tokens=False))
    return str(library.decode([*before, number], skip_special_tokens=False)[skip:])


@pytest.mark.parametrize("source", [byte_level_json, metaspace_json])
def test_every_piece_is_what_the_definition_says(source: object) -> None:
    text = source()  # type: ignore[operator]
    library = tokenizers.Tokenizer.from_str(text)
    letter = library.encode(" t", add_special_tokens=False).ids
    alone = len(letter) == 1 and len(library.decode(letter, skip_special_tokens=False)) == 2
    before = [] if alone else library.encode(" ", add_special_tokens=False).ids[:1]
    backend = HFBackend(text, TokenizerFiles(Path()))
    assert backend.token_bytes() is not None
    assert backend.vocab == [by_definition(library, n, before) for n in range(backend.vocab_size())]


def test_the_fixture_is_what_the_definition_says(fixtures_dir: Path) -> None:
    path = fixtures_dir / "tiny-lm" / "tokenizer.json"
    library = tokenizers.Tokenizer.from_file(str(path))
    backend = HFBackend.from_file(path, TokenizerFiles(path.parent))
    assert backend.vocab == [by_definition(library, n, []) for n in range(2048)]


def test_letters_outside_the_alphabet_stand_for_themselves() -> None:
    decoder = {"type": "ByteLevel"}
    found = from_decoder(decoder, ["é", "\u0120a", "日", "é\n", None, "\u00e9\u00a0"], {}, {})
    assert found is not None
    assert found.table == [b"\xe9", b" a", "日".encode(), "é\n".encode(), b"", "é\u00a0".encode()]


def test_added_tokens_stand_for_their_text() -> None:
    found = from_decoder({"type": "ByteLevel"}, ["é", "<x>", "ü"], {"<x>": 1}, {"é": 0})
    assert found is not None
    assert found.table == ["é".encode(), b"<x>", b"\xfc"]
    assert found.decode_overrides == {0: "é"}


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"},
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "_"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                {"type": "Fuse"},
            ],
        },
    ],
)
def test_a_decoder_of_another_kind_gets_no_table(decoder: dict[str, object] | None) -> None:
    assert from_decoder(json.loads(json.dumps(decoder)), ["a"], {}, {}) is None
