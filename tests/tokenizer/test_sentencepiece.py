"""tokenizer.model: agreement with SentencePiece itself, and what SentencePiece does not know."""

from __future__ import annotations

from pathlib import Path

import pytest

from exlm.errors import BadText, TokenizerError
from exlm.tokenizer.codec import Codec, ConfigTokenIds
from exlm.tokenizer.hf import HFBackend
from exlm.tokenizer.sentencepiece import SentencePieceBackend
from exlm.tokenizer.tokenizer_files import AddedToken, TokenizerFiles
from tests.tokenizer.sample_vocabularies import (
    metaspace_json,
    mistral_v1_model,
    random_texts,
    sentencepiece_models,
    write_folder,
)

sentencepiece = pytest.importorskip("sentencepiece")

COUNT = 1000


def v1_backend(**declared: object) -> SentencePieceBackend:
    return SentencePieceBackend.from_file(mistral_v1_model(), TokenizerFiles(Path("folder"), **declared))  # type: ignore[arg-type]


def test_agrees_with_sentencepiece() -> None:
    texts = random_texts(COUNT, seed=3)
    for path in sentencepiece_models():
        oracle = sentencepiece.SentencePieceProcessor(model_file=str(path))
        ours = Codec(SentencePieceBackend.from_file(path, TokenizerFiles(path.parent)), TokenizerFiles(path.parent))
        for text in [*texts, "", " ", "  a", "\u2581", "[INST] hi [/INST]", "<s>"]:
            expected = oracle.encode(text)
            assert ours.encode(text) == expected, (path.name, text)
            assert ours.decode(expected) == oracle.decode(expected), (path.name, text)


def test_round_trips() -> None:
    ours = Codec(v1_backend(), TokenizerFiles(Path("folder")))
    for text in random_texts(COUNT, seed=4):
        assert ours.decode(ours.encode(text)) == text.replace("\u2581", " "), repr(text)


def test_is_the_same_as_its_own_tokenizer_json() -> None:
    ours, other = v1_backend(), HFBackend(metaspace_json(), TokenizerFiles(Path("folder")))
    for text in random_texts(COUNT, seed=5):
        text = text.lstrip(" \u2581")  # the library of tokenizer.json takes a first space for the one it adds
        for special in (False, True):
            assert ours.tokenize(text, parse_special=special) == other.tokenize(text, parse_special=special), repr(text)
    assert ours.vocab == other.vocab
    assert dict(ours.special_tokens) == dict(other.special_tokens)


def test_control_symbols_are_text_unless_asked() -> None:
    path = next(path for path in sentencepiece_models() if path.name.endswith("v3"))
    ours = SentencePieceBackend.from_file(path, TokenizerFiles(path.parent))
    start, stop = ours.special_tokens["[INST]"], ours.special_tokens["[/INST]"]
    ids = ours.tokenize("[INST] hi [/INST]", parse_special=True)
    assert (ids[0], ids[-1]) == (start, stop)
    plain = ours.tokenize("[INST] hi [/INST]", parse_special=False)
    assert not set(plain) & set(ours.special_tokens.values())
    assert ours.decode(plain) == "[INST] hi [/INST]"


def test_only_the_first_word_of_the_text_gets_a_space() -> None:
    ours = v1_backend()
    hello, bare = ours.piece_to_id("\u2581Hello"), ours.piece_to_id("Hello")
    assert ours.tokenize("Hello", parse_special=True) == [hello]
    assert ours.tokenize("<s>Hello", parse_special=True) == [1, bare]
    assert ours.tokenize("<s> Hello", parse_special=True) == [1, hello]
    assert ours.tokenize("Hello</s>Hello", parse_special=True) == [hello, 2, bare]
    assert ours.tokenize("Hello", parse_special=True, continues=True) == [bare]
    assert ours.decode([1, bare or 0]) == "<s>Hello"


def test_added_tokens_are_found() -> None:
    declared = (
        AddedToken("<|im_start|>", 32000, source="added_tokens.json"),
        AddedToken("<tool>", 32003, special=False, source="tokenizer_config.json"),
    )
    ours = v1_backend(added=declared)
    assert ours.tokenize("<|im_start|>user<tool>", parse_special=True)[0] == 32000
    assert ours.tokenize("<tool>", parse_special=False) == [32003]
    assert 32000 not in ours.tokenize("<|im_start|>", parse_special=False)
    assert (ours.vocab_size(), ours.base_vocab_size, ours.is_defined(32001)) == (32004, 32000, False)
    assert ours.decode_overrides == {32003: "<tool>"}
    assert ours.decode([32000, 32003, 32001, -4, 10**9]) == "<|im_start|><tool>"


def test_a_declaration_may_rename_a_reserved_piece_but_not_move_one() -> None:
    ours = v1_backend(added=(AddedToken("<pad>", 31999, source="tokenizer_config.json"),))
    assert ours.tokenize("<pad>", parse_special=True) == [31999]
    with pytest.raises(TokenizerError, match="gives it 1"):
        v1_backend(added=(AddedToken("<s>", 5, source="added_tokens.json"),))
    with pytest.raises(TokenizerError, match="ends at 31999"):
        v1_backend(added=(AddedToken("<x>", 10**9, source="added_tokens.json"),))


def test_a_folder_with_only_a_model_file_is_enough(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(mistral_v1_model().read_bytes())
    ours = Codec.from_folder(tmp_path)
    assert (ours.bos_id, ours.eos_id, ours.unk_id, ours.pad_id) == (1, 2, 0, 2)
    assert ours.encode("Hello", add_bos=True, add_eos=True) == [1, 22557, 2]


def test_tokenizer_json_is_preferred_and_either_can_be_forced(tmp_path: Path) -> None:
    write_folder(tmp_path, tokenizer=metaspace_json())
    (tmp_path / "tokenizer.model").write_bytes(mistral_v1_model().read_bytes())
    assert isinstance(Codec.from_folder(tmp_path).backend, HFBackend)
    assert isinstance(Codec.from_folder(tmp_path, kind="spm").backend, SentencePieceBackend)
    assert isinstance(Codec.from_folder(tmp_path, kind="json").backend, HFBackend)


def test_a_vocabulary_can_be_named(tmp_path: Path) -> None:
    path = next(path for path in sentencepiece_models() if path.name.endswith("v3"))
    (tmp_path / "tokenizer.model.v3").write_bytes(path.read_bytes())
    assert Codec.from_folder(tmp_path, vocab_file="tokenizer.model.v3").encode("Hello") == [23325]
    assert Codec.from_folder(tmp_path, vocab_file=path).size == 32768
    with pytest.raises(TokenizerError, match=r"there is no .*tokenizer.model.v9"):
        Codec.from_folder(tmp_path, ConfigTokenIds(), vocab_file="tokenizer.model.v9")


def test_a_file_cut_short_is_refused_wherever_it_is_cut() -> None:
    data = mistral_v1_model().read_bytes()
    first = 2 + data[1]
    for size in [0, 1, 10, first, first + 2 + data[first + 1], 1000, 1001, len(data) // 2, len(data) - 1]:
        with pytest.raises(TokenizerError, match="folder/x"):
            SentencePieceBackend(data[:size], TokenizerFiles(Path("folder")), "folder/x")


def test_what_is_not_a_model_is_refused() -> None:
    for data in (b"{}" * 100, b"\x80" * 1000, bytes(range(256)), b"\x1a\x00", b"version https://git-lfs"):
        with pytest.raises(TokenizerError, match="SentencePiece model"):
            SentencePieceBackend(data, TokenizerFiles(Path("folder")), "tokenizer.model")


def test_a_piece_that_is_not_text_is_refused() -> None:
    data = mistral_v1_model().read_bytes()
    place = data.index("\u4e2d".encode())
    with pytest.raises(TokenizerError, match="not text"):
        SentencePieceBackend(data[:place] + b"\xff" + data[place + 1 :], TokenizerFiles(Path("folder")), "x")


def test_a_lone_surrogate_is_refused_with_its_place() -> None:
    with pytest.raises(BadText, match=r"U\+DFFF\) at character 0"):
        v1_backend().encode("\udfff")
