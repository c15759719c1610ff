"""Lookup tables against their definitions; they are built fast, once, and from any thread."""

from __future__ import annotations

import json
import random
import threading
import time
from functools import lru_cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from exlm.tokenizer.codec import Codec, ConfigTokenIds
from exlm.tokenizer.hf import HFBackend
from exlm.tokenizer.sentencepiece import SentencePieceBackend
from exlm.tokenizer.tokenizer_files import AddedToken, TokenizerFiles
from exlm.tokenizer.vocab import (
    UNDEFINED,
    Trie,
    Vocab,
    byte_to_unicode,
    indices_by_prefix,
    token_bytes_from_decoder,
)
from tests.tokenizer.sample_vocabularies import byte_level_json, metaspace_json, mistral_v1_model


@lru_cache
def codec(kind: str) -> Codec:
    folder = TokenizerFiles(Path("folder"), added=(AddedToken("<late>", 32_003 if kind == "spm" else 603, source="x"),))
    if kind == "spm":
        return Codec(
            SentencePieceBackend.from_file(mistral_v1_model(), folder),
            folder,
            ConfigTokenIds(vocab_size=32_010),
        )
    return Codec(HFBackend(byte_level_json(), folder), folder, ConfigTokenIds(vocab_size=610))


KINDS = ["json", "spm"]


@given(st.lists(st.binary(max_size=4), max_size=40))
def test_keys_that_start_with_a_key(keys: list[bytes]) -> None:
    expected = {key: [n for n, other in enumerate(keys) if other.startswith(key)] for key in keys if key}
    assert indices_by_prefix(keys) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_special_pieces_are_empty_unless_wanted(kind: str) -> None:
    ours = codec(kind)
    plain, special = ours.vocab.pieces(), ours.vocab.pieces(special=True)
    assert len(plain) == len(special) == ours.size
    for number, text in ours.special_texts.items():
        assert (plain[number], special[number]) == ("", text)
    size = ours.backend.base_vocab_size
    undefined = [n for n in range(size, ours.size) if n not in ours.special_texts]
    assert undefined
    assert {plain[n] for n in undefined} == {special[n] for n in undefined} == {UNDEFINED}


@pytest.mark.parametrize("kind", KINDS)
def test_prefixes_by_text(kind: str) -> None:
    vocab = codec(kind).vocab
    pieces = ["" if piece == UNDEFINED else piece for piece in vocab.pieces()]
    table = vocab.prefix_to_ids()
    assert table.keys() == {piece for piece in pieces if piece}
    for piece in random.Random(1).sample(sorted(table), 200):
        assert table[piece] == [n for n, other in enumerate(pieces) if other.startswith(piece)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_healing_table_lets_every_token_be_replaced_by_those_that_start_like_it(kind: str) -> None:
    ours = codec(kind)
    table = ours.vocab.prefix_id_to_ids()
    known = ours.backend.token_bytes
    assert known is not None
    assert list(table) == list(range(610 if kind == "json" else 32_010))
    raw = [b"" if n in ours.special_texts else key for n, key in enumerate(known.table)]
    for number in [*random.Random(2).sample(range(ours.size), 200), *range(256)]:
        expected = [n for n, other in enumerate(raw) if other.startswith(raw[number])] if raw[number] else [number]
        assert table[number] == expected
        assert number in table[number]
    assert table[max(table)] == [max(table)]


def test_healing_by_text_is_the_same_where_tokens_are_whole_characters() -> None:
    vocab = codec("spm").vocab
    pieces, by_text, by_id = vocab.pieces(), vocab.prefix_to_ids(), vocab.prefix_id_to_ids()
    whole = [n for n, piece in enumerate(pieces) if piece and "\ufffd" not in piece]
    assert all(by_id[n] == by_text[pieces[n]] for n in whole)


def test_tokens_with_equal_bytes_can_replace_each_other() -> None:
    ours = codec("spm")
    fallback, letter = ours.backend.piece_to_id("<0x41>"), ours.backend.piece_to_id("A")
    assert fallback is not None
    assert letter is not None
    assert fallback != letter
    table = ours.vocab.prefix_id_to_ids()
    assert table[fallback] == table[letter]
    assert {fallback, letter} <= set(table[letter])


def test_a_partial_character_cannot_replace_another() -> None:
    ours = codec("spm")
    one, other = ours.backend.piece_to_id("<0xE4>"), ours.backend.piece_to_id("<0xF0>")
    assert one is not None
    assert other is not None
    assert ours.vocab.pieces()[one] == ours.vocab.pieces()[other] == "\ufffd"
    group = ours.vocab.prefix_id_to_ids()[one]
    assert other not in group
    assert ours.backend.piece_to_id("中") in group, "but the byte may grow into the character it begins"


@pytest.mark.parametrize("kind", KINDS)
def test_single_bytes_and_highest_ids(kind: str) -> None:
    ours = codec(kind)
    ords, pieces = ours.vocab.ords(), ours.vocab.pieces()
    assert {value for value in ords if value >= 0} == set(range(256))
    assert all(pieces[n] == chr(value) for n, value in enumerate(ords) if 0 <= value < 128)
    table = ours.vocab.piece_to_id()
    assert "" not in table
    assert UNDEFINED not in table
    highest: dict[str, int] = {}
    for number, piece in enumerate(pieces):
        highest[piece] = number
    assert table == {piece: number for piece, number in highest.items() if piece not in ("", UNDEFINED)}


@pytest.mark.parametrize("ignore_case", [False, True])
def test_tries_lead_to_every_token(ignore_case: bool) -> None:
    vocab = codec("json").vocab
    root = vocab.trie(ignore_case)
    pieces = ["" if piece == UNDEFINED else piece for piece in vocab.pieces()]
    found: dict[str, list[int]] = {}
    walk = [("", root)]
    while walk:
        text, node = walk.pop()
        if node.leaf:
            found[text] = node.leaf
        walk += [(text + letter, child) for letter, child in node.children.items()]
    expected: dict[str, list[int]] = {}
    for number, piece in enumerate(pieces):
        if piece:
            expected.setdefault(piece.lower() if ignore_case else piece, []).append(number)
    assert found == expected


def test_a_trie_starts_empty_or_as_given() -> None:
    assert (Trie().children, Trie().leaf) == ({}, [])
    child = Trie(leaf=[3])
    assert Trie({"a": child}, [1]).children["a"].leaf == [3]


def synthetic_vocab(count: int) -> Vocab:
    """A byte-level vocabulary of this size: the alphabet, then words that grow from earlier ones."""
    source = random.Random(0)
    words = [bytes([byte]) for byte in range(256)]
    seen = set(words)
    while len(words) < count:
        word = source.choice(words) + source.choice(words[:512])
        if len(word) <= 16 and word not in seen:
            seen.add(word)
            words.append(word)
    return Vocab(
        pieces=lambda: [word.decode("utf-8", "replace") for word in words],
        token_bytes=lambda: words,
        special=[],
        undefined=[],
        model_size=count,
    )


def test_a_large_vocabulary_is_built_in_seconds() -> None:
    vocab = synthetic_vocab(150_000)
    started = time.perf_counter()
    for build in (vocab.ords, vocab.piece_to_id, vocab.prefix_to_ids, vocab.prefix_id_to_ids, vocab.trie):
        build()
    vocab.pieces(special=True)
    vocab.trie(ignore_case=True)
    assert time.perf_counter() - started < 20  # some two seconds on a machine with nothing else to do


def test_threads_that_ask_at_once_get_the_same_table() -> None:
    vocab = synthetic_vocab(5_000)
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(vocab.prefix_id_to_ids())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(table) for table in found}) == 1


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
    assert backend.token_bytes is not None
    assert backend.vocab == [by_definition(library, n, before) for n in range(backend.vocab_size())]


def test_the_fixture_is_what_the_definition_says(fixtures_dir: Path) -> None:
    path = fixtures_dir / "tiny-lm" / "tokenizer.json"
    library = tokenizers.Tokenizer.from_file(str(path))
    backend = HFBackend.from_file(path, TokenizerFiles(path.parent))
    assert backend.vocab == [by_definition(library, n, []) for n in range(2048)]


def test_letters_outside_the_alphabet_stand_for_themselves() -> None:
    decoder = {"type": "ByteLevel"}
    found = token_bytes_from_decoder(decoder, ["é", "\u0120a", "日", "é\n", None, "\u00e9\u00a0"], {}, {})
    assert found is not None
    assert found.table == [b"\xe9", b" a", "日".encode(), "é\n".encode(), b"", "é\u00a0".encode()]


def test_added_tokens_stand_for_their_text() -> None:
    found = token_bytes_from_decoder({"type": "ByteLevel"}, ["é", "<x>", "ü"], {"<x>": 1}, {"é": 0})
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
    assert token_bytes_from_decoder(json.loads(json.dumps(decoder)), ["a"], {}, {}) is None
