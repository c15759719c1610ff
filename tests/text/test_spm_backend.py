"""tokenizer.model: agreement with SentencePiece itself, and what SentencePiece does not know."""

from __future__ import annotations

from pathlib import Path

import pytest

from exlm.errors import BadText, TokenizerError
from exlm.text.codec import Codec, ModelIds
from exlm.text.folder import AddedToken, Folder
from exlm.text.json_backend import JsonBackend
from exlm.text.spm_backend import SpmBackend
from tests.text.samples import metaspace_json, random_texts, vocabulary_files, vocabulary_v1, write_folder

sentencepiece = pytest.importorskip("sentencepiece")

COUNT = 1000


def v1(**declared: object) -> SpmBackend:
    return SpmBackend.from_file(vocabulary_v1(), Folder(Path("folder"), **declared))  # type: ignore[arg-type]


def test_agrees_with_sentencepiece() -> None:
    texts = random_texts(COUNT, seed=3)
    for path in vocabulary_files():
        oracle = sentencepiece.SentencePieceProcessor(model_file=str(path))
        ours = Codec(SpmBackend.from_file(path, Folder(path.parent)), Folder(path.parent))
        for text in [*texts, "", " ", "  a", "\u2581", "[INST] hi [/INST]", "<s>"]:
            expected = oracle.encode(text)
            assert ours.encode(text) == expected, (path.name, text)
            assert ours.decode(expected) == oracle.decode(expected), (path.name, text)


def test_round_trips() -> None:
    ours = Codec(v1(), Folder(Path("folder")))
    for text in random_texts(COUNT, seed=4):
        assert ours.decode(ours.encode(text)) == text.replace("\u2581", " "), repr(text)


def test_is_the_same_as_its_own_tokenizer_json() -> None:
    ours, other = v1(), JsonBackend(metaspace_json(), Folder(Path("folder")))
    for text in random_texts(COUNT, seed=5):
        text = text.lstrip(" \u2581")  # the library of tokenizer.json takes a first space for the one it adds
        for special in (False, True):
            assert ours.ids(text, special=special) == other.ids(text, special=special), repr(text)
    assert ours.vocab == other.vocab
    assert dict(ours.special) == dict(other.special)


def test_control_symbols_are_text_unless_asked() -> None:
    path = next(path for path in vocabulary_files() if path.name.endswith("v3"))
    ours = SpmBackend.from_file(path, Folder(path.parent))
    start, stop = ours.special["[INST]"], ours.special["[/INST]"]
    ids = ours.ids("[INST] hi [/INST]", special=True)
    assert (ids[0], ids[-1]) == (start, stop)
    plain = ours.ids("[INST] hi [/INST]", special=False)
    assert not set(plain) & set(ours.special.values())
    assert ours.decode(plain) == "[INST] hi [/INST]"


def test_only_the_first_word_of_the_text_gets_a_space() -> None:
    ours = v1()
    hello, bare = ours.piece_to_id("\u2581Hello"), ours.piece_to_id("Hello")
    assert ours.ids("Hello", special=True) == [hello]
    assert ours.ids("<s>Hello", special=True) == [1, bare]
    assert ours.ids("<s> Hello", special=True) == [1, hello]
    assert ours.ids("Hello</s>Hello", special=True) == [hello, 2, bare]
    assert ours.ids("Hello", special=True, continues=True) == [bare]
    assert ours.decode([1, bare or 0]) == "<s>Hello"


def test_added_tokens_are_found() -> None:
    declared = (
        AddedToken("<|im_start|>", 32000, source="added_tokens.json"),
        AddedToken("<tool>", 32003, special=False, source="tokenizer_config.json"),
    )
    ours = v1(added=declared)
    assert ours.ids("<|im_start|>user<tool>", special=True)[0] == 32000
    assert ours.ids("<tool>", special=False) == [32003]
    assert 32000 not in ours.ids("<|im_start|>", special=False)
    assert (ours.vocab_size(), ours.base_size, ours.defined(32001)) == (32004, 32000, False)
    assert ours.misread == {32003: "<tool>"}
    assert ours.decode([32000, 32003, 32001, -4, 10**9]) == "<|im_start|><tool>"


def test_a_declaration_may_rename_a_reserved_piece_but_not_move_one() -> None:
    ours = v1(added=(AddedToken("<pad>", 31999, source="tokenizer_config.json"),))
    assert ours.ids("<pad>", special=True) == [31999]
    with pytest.raises(TokenizerError, match="gives it 1"):
        v1(added=(AddedToken("<s>", 5, source="added_tokens.json"),))
    with pytest.raises(TokenizerError, match="ends at 31999"):
        v1(added=(AddedToken("<x>", 10**9, source="added_tokens.json"),))


def test_a_folder_with_only_a_model_file_is_enough(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(vocabulary_v1().read_bytes())
    ours = Codec.from_folder(tmp_path)
    assert (ours.bos_id, ours.eos_id, ours.unk_id, ours.pad_id) == (1, 2, 0, 2)
    assert ours.encode("Hello", add_bos=True, add_eos=True) == [1, 22557, 2]


def test_tokenizer_json_is_preferred_and_either_can_be_forced(tmp_path: Path) -> None:
    write_folder(tmp_path, tokenizer=metaspace_json())
    (tmp_path / "tokenizer.model").write_bytes(vocabulary_v1().read_bytes())
    assert isinstance(Codec.from_folder(tmp_path).backend, JsonBackend)
    assert isinstance(Codec.from_folder(tmp_path, kind="spm").backend, SpmBackend)
    assert isinstance(Codec.from_folder(tmp_path, kind="json").backend, JsonBackend)


def test_a_vocabulary_can_be_named(tmp_path: Path) -> None:
    path = next(path for path in vocabulary_files() if path.name.endswith("v3"))
    (tmp_path / "tokenizer.model.v3").write_bytes(path.read_bytes())
    assert Codec.from_folder(tmp_path, vocab_file="tokenizer.model.v3").encode("Hello") == [23325]
    assert Codec.from_folder(tmp_path, vocab_file=path).size == 32768
    with pytest.raises(TokenizerError, match=r"there is no .*tokenizer.model.v9"):
        Codec.from_folder(tmp_path, ModelIds(), vocab_file="tokenizer.model.v9")


def test_a_file_cut_short_is_refused_wherever_it_is_cut() -> None:
    data = vocabulary_v1().read_bytes()
    first = 2 + data[1]
    for size in [0, 1, 10, first, first + 2 + data[first + 1], 1000, 1001, len(data) // 2, len(data) - 1]:
        with pytest.raises(TokenizerError, match="folder/x"):
            SpmBackend(data[:size], Folder(Path("folder")), "folder/x")


def test_what_is_not_a_model_is_refused() -> None:
    for data in (b"{}" * 100, b"\x80" * 1000, bytes(range(256)), b"\x1a\x00", b"version https://git-lfs"):
        with pytest.raises(TokenizerError, match="SentencePiece model"):
            SpmBackend(data, Folder(Path("folder")), "tokenizer.model")


def test_a_piece_that_is_not_text_is_refused() -> None:
    data = vocabulary_v1().read_bytes()
    place = data.index("\u4e2d".encode())
    with pytest.raises(TokenizerError, match="not text"):
        SpmBackend(data[:place] + b"\xff" + data[place + 1 :], Folder(Path("folder")), "x")


def test_a_lone_surrogate_is_refused_with_its_place() -> None:
    with pytest.raises(BadText, match=r"U\+DFFF\) at character 0"):
        v1().encode("\udfff")
