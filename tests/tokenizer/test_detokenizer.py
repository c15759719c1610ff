"""Incremental decoding: the parts join to the whole text, and only incomplete characters are buffered."""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from exlm.tokenizer.codec import Codec
from exlm.tokenizer.detokenizer import Detokenizer
from exlm.tokenizer.hf import HFBackend
from exlm.tokenizer.sentencepiece import SentencePieceBackend
from exlm.tokenizer.tokenizer_files import TokenizerFiles
from tests.tokenizer.sample_vocabularies import byte_level_json, metaspace_json, mistral_v1_model

FOLDER = TokenizerFiles(Path("folder"))


@lru_cache
def codec(kind: str) -> Codec:
    if kind == "sentencepiece":
        return Codec(SentencePieceBackend.from_file(mistral_v1_model(), FOLDER), FOLDER)
    if kind == "unigram":
        pieces = ["<unk>", "\u2581", "\u2581the", "\u2581cat", "s", "a", "t", "\u00e9", ","]
        library = tokenizers.Tokenizer(models.Unigram([(piece, -float(n)) for n, piece in enumerate(pieces)], 0, False))
        library.pre_tokenizer = pre_tokenizers.Metaspace()
        library.decoder = decoders.Metaspace()
        return Codec(HFBackend(library.to_str(), FOLDER), FOLDER)
    return Codec(HFBackend(byte_level_json() if kind == "byte_level" else metaspace_json(), FOLDER), FOLDER)


KINDS = ["byte_level", "metaspace", "sentencepiece", "unigram"]


def push_in_parts(stream: Detokenizer, ids: list[int], cuts: list[int]) -> str:
    """Feed the ids in runs of these lengths."""
    text, place = "", 0
    for cut in [*cuts, len(ids)]:
        text += stream.feed(ids[place : place + cut])
        place += cut
    return text + stream.flush()


@pytest.mark.parametrize("kind", KINDS[:3])
@given(text=st.text(max_size=40), cuts=st.lists(st.integers(0, 5), max_size=20), special=st.booleans())
@settings(max_examples=150)
def test_parts_of_encoded_text_join_to_the_decoded_whole(kind: str, text: str, cuts: list[int], special: bool) -> None:
    ours = codec(kind)
    ids = ours.encode(text, parse_special=special)
    for continues in (False, True):
        stream = ours.detokenizer(show_special=special, continues=continues)
        assert push_in_parts(stream, ids, cuts) == ours.decode(ids, show_special=special, continues=continues)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=200)
def test_parts_of_any_ids_join_to_the_decoded_whole(kind: str, data: st.DataObject) -> None:
    ours = codec(kind)
    # the low ids hold the special tokens and the bytes, where characters can break
    number = st.one_of(st.integers(-3, 270), st.integers(0, ours.size + 5))
    ids = data.draw(st.lists(number, max_size=40))
    special, continues = data.draw(st.booleans()), data.draw(st.booleans())
    stream = ours.detokenizer(show_special=special, continues=continues)
    parts = [stream.push(one) for one in ids]
    assert "".join(parts) + stream.flush() == ours.decode(ids, show_special=special, continues=continues)


@pytest.mark.parametrize("kind", KINDS[:3])
@given(data=st.data())
def test_only_incomplete_characters_are_held_back(kind: str, data: st.DataObject) -> None:
    ours = codec(kind)
    known = ours.backend.token_bytes
    assert known is not None
    ids = data.draw(st.lists(st.integers(0, 270), max_size=20))
    stream = ours.detokenizer(show_special=True, continues=True)
    text = stream.feed(ids)
    raw = b"".join(known.table[n] for n in ids if n != ours.pad_id)
    held = next(n for n in range(4) if raw[: len(raw) - n].decode("utf-8", "replace") == text)
    assert stream.pending == (held > 0)
    if held:
        tail = raw[len(raw) - held :]
        assert any(_is_character(tail + more) for more in _continuations(4 - len(tail)))


def _is_character(raw: bytes) -> bool:
    try:
        return len(raw.decode()) == 1
    except UnicodeDecodeError:
        return False


def _continuations(most: int) -> list[bytes]:
    """Some of the bytes that may follow, enough to complete any beginning."""
    firsts = [bytes([byte]) for byte in (0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF)]
    return [first + b"\x80" * extra for extra in range(most) for first in firsts]


def test_two_bytes_of_a_surrogate_are_not_held_back() -> None:
    ours = codec("byte_level")
    known = ours.backend.token_bytes
    assert known is not None
    first, second = (known.table.index(bytes([byte])) for byte in (0xED, 0xA1))
    stream = ours.detokenizer(continues=True)
    assert stream.push(first) == ""
    assert stream.push(second) == "\ufffd\ufffd"
    assert not stream.pending


def test_an_invalid_byte_does_not_delay_what_follows() -> None:
    ours = codec("sentencepiece")
    stray, letter = ours.backend.piece_to_id("<0xFF>"), ours.backend.piece_to_id("a")
    assert stray is not None
    assert letter is not None
    stream = ours.detokenizer(continues=True)
    assert stream.push(stray) == "\ufffd"
    assert [stream.push(letter) for _ in range(3)] == ["a", "a", "a"]


def test_a_literal_replacement_character_is_decoded() -> None:
    ours = codec("byte_level")
    ids = ours.encode("\ufffd\ufffdx")
    stream = ours.detokenizer()
    assert stream.feed(ids) == "\ufffd\ufffdx"
    assert not stream.pending


def test_a_character_arrives_whole() -> None:
    ours = codec("sentencepiece")
    ids = [ours.backend.piece_to_id(f"<0x{byte:02X}>") or 0 for byte in "\U0001f999".encode()]
    stream = ours.detokenizer(continues=True)
    assert [stream.push(n) for n in ids] == ["", "", "", "\U0001f999"]
    assert stream.feed(ids[:2]) == ""
    assert stream.pending
    assert stream.flush() == "\ufffd"
    assert not stream.pending


def test_the_first_space_is_dropped_only_at_the_start_of_a_text() -> None:
    ours = codec("sentencepiece")
    ids = ours.encode("Hello world")
    assert ours.detokenizer().feed(ids) == "Hello world"
    assert ours.detokenizer(continues=True).feed(ids) == " Hello world"


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_independent(kind: str) -> None:
    ours = codec(kind)
    ids = ours.encode("the cats, the cat é")
    stream = ours.detokenizer()
    begun = stream.feed(ids[:3])
    other = stream.copy()
    assert begun + stream.feed(ids[3:]) + stream.flush() == ours.decode(ids)
    assert begun + other.feed(ids[3:]) + other.flush() == ours.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "unigram"])
def test_a_long_stream_costs_the_same_per_token_as_a_short_one(kind: str) -> None:
    ours = codec(kind)
    ids = ours.encode("the cats at the cat, ") * 3000
    stream = ours.detokenizer()
    started = time.perf_counter()
    stream.feed(ids[:3000])
    first = time.perf_counter() - started
    stream.feed(ids[3000:-3000])
    started = time.perf_counter()
    stream.feed(ids[-3000:])
    assert time.perf_counter() - started < 10 * first + 0.05
