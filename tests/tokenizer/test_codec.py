"""Codec: the ids that mean something, aliases, and what decoding leaves out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exlm.errors import TokenizerError
from exlm.tokenizer.codec import Codec, ConfigTokenIds
from exlm.tokenizer.hf import HFBackend
from exlm.tokenizer.tokenizer_files import AddedToken, TokenizerFiles
from tests.tokenizer.sample_vocabularies import byte_level_json, metaspace_json, write_folder


def codec(model: ConfigTokenIds | None = None, **declared: Any) -> Codec:
    folder = TokenizerFiles(Path("folder"), **declared)
    return Codec(HFBackend(byte_level_json(), folder), folder, model)


@pytest.fixture
def tiny(fixtures_dir: Path) -> Codec:
    """The fixture's tokenizer with the ids of its config.json."""
    return Codec.from_folder(
        fixtures_dir / "tiny-lm", ConfigTokenIds(bos=0, eos=2, all_eos=[2], pad=0, vocab_size=2048)
    )


def test_encodes_as_the_reference_does(tiny: Codec, fixtures_dir: Path) -> None:
    cases = json.loads((fixtures_dir / "reference" / "tokenizer_cases.json").read_text(encoding="utf-8"))
    assert len(cases) >= 9
    for case in cases:
        text = case["text"]
        assert tiny.encode(text, parse_special=True) == case["ids_special"]
        assert tiny.encode(text, parse_special=True, add_bos=True) == case["ids_bos"]
        plain = tiny.encode(text)
        if "<|" not in text:
            assert plain == case["ids"]
        assert tiny.decode(plain) == text
        assert not set(plain) & set(tiny.special_texts)


def test_config_json_takes_precedence_for_bos_and_eos(tmp_path: Path) -> None:
    write_folder(
        tmp_path,
        tokenizer=byte_level_json(),
        tokenizer_config={
            "bos_token": "<|endoftext|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_start|>",
        },
        generation_config={"eos_token_id": [2, 7, 0]},
    )
    given = Codec.from_folder(tmp_path, ConfigTokenIds(bos=5, eos=6, all_eos=(6, 9), pad=8))
    assert (given.bos_id, given.eos_id, given.pad_id) == (5, 6, 8)
    assert given.eos_ids == (6, 9, 2, 7, 0)
    named = Codec.from_folder(tmp_path)
    assert (named.bos_id, named.eos_id, named.pad_id) == (0, 2, 1)
    assert named.eos_ids == (2, 7, 0)


def test_default_bos_and_eos_are_used_if_they_are_special() -> None:
    ours = codec()
    assert (ours.bos_id, ours.eos_id, ours.pad_id, ours.unk_id) == (1, 2, 2, None)
    assert codec(token_by_role={"bos_token": None, "eos_token": None}).bos_id is None
    assert codec(token_by_role={"bos_token": "<not in the vocabulary>"}).bos_id is None


def test_pad_id_falls_back_to_pad_then_eos_then_none() -> None:
    size = codec().size
    assert codec(added=(AddedToken("<pad>", size, source="x"),)).pad_id == size
    assert codec(ConfigTokenIds(bos=1, eos=2)).pad_id == 2
    assert codec(ConfigTokenIds(bos=2, eos=2)).pad_id == -1


def test_bos_and_eos_come_only_when_asked_and_known() -> None:
    ours = codec(ConfigTokenIds(bos=1, eos=2))
    plain = ours.encode("hi")
    assert ours.encode("hi", add_bos=True, add_eos=True) == [1, *plain, 2]
    assert ours.encode("", add_bos=True) == [1]
    none = codec(token_by_role={"bos_token": None, "eos_token": None})
    assert none.encode("hi", add_bos=True, add_eos=True) == plain


def _json_with_start_ids(*ids: int) -> str:
    """The byte-level vocabulary, whose file puts these special tokens before a text and EOS behind it."""
    state = json.loads(byte_level_json())
    names = {token["id"]: token["content"] for token in state["added_tokens"]}
    used = {names[number]: number for number in (*ids, 0)}
    start, end = ([{"SpecialToken": {"id": names[n], "type_id": 0}} for n in some] for some in (ids, (0,)))
    state["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [*start, {"Sequence": {"id": "A", "type_id": 0}}, *end],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [n], "tokens": [name]} for name, n in used.items()},
    }
    return json.dumps(state)


@pytest.mark.parametrize(
    ("text", "config", "wanted"),
    [
        (byte_level_json(), None, True),
        (byte_level_json(), {"tokenizer_class": "PreTrainedTokenizerFast"}, False),
        (byte_level_json(), {"tokenizer_class": "GPT2Tokenizer"}, False),
        (byte_level_json(), {"add_bos_token": True}, True),
        (byte_level_json(), {"tokenizer_class": "LlamaTokenizerFast"}, True),
        (_json_with_start_ids(1), {"tokenizer_class": "PreTrainedTokenizerFast"}, True),
        (_json_with_start_ids(1), {"add_bos_token": None}, True),
        (_json_with_start_ids(1), {"add_bos_token": False}, False),
        (_json_with_start_ids(2), {}, False),
        (_json_with_start_ids(), {}, False),
    ],
)
def test_a_bos_comes_first_where_the_files_put_one(text: str, config: Any, wanted: bool) -> None:
    folder = TokenizerFiles(Path("folder"), config=config)
    assert Codec(HFBackend(text, folder), folder, ConfigTokenIds(bos=1, eos=0)).wants_bos is wanted


def test_decoding_leaves_out_what_is_not_text() -> None:
    ours = codec(ConfigTokenIds(bos=1, eos=2, pad=0))
    a, b = ours.encode("a")[0], ours.encode("b")[0]
    ids = [0, 1, a, 2, b, -1, -7, 10**9, ours.size, 2**70, 2]
    assert ours.decode(ids) == "ab", "text after an EOS is still text"
    assert ours.decode(ids, show_special=True) == "<|im_start|>a<|im_end|>b<|im_end|>", "all but the padding"
    assert ours.decode([]) == ""


def test_an_ordinary_token_that_is_named_as_padding_is_still_text() -> None:
    number = codec().encode("!")[0]
    ours = codec(ConfigTokenIds(bos=1, eos=2, pad=number))
    assert ours.pad_id == number
    ids = ours.encode("Stop! Now!")
    for special in (False, True):
        stream = ours.detokenizer(show_special=special)
        assert ours.decode(ids, show_special=special) == stream.feed(ids) + stream.flush() == "Stop! Now!"


def test_ordinary_added_tokens_are_shown() -> None:
    ours = codec()
    assert ours.decode(ours.encode("x<tool_call>y")) == "x<tool_call>y"


def test_an_added_token_in_byte_letters_reads_as_written() -> None:
    number = codec().size
    ours = codec(added=(AddedToken("é\u0120", number, special=False, source="x"),))
    assert ours.encode("é\u0120") == [number]
    assert ours.decode([number]) == "é\u0120"
    assert ours.backend.decode_overrides == {number: "é\u0120"}


def test_aliases_stand_for_their_ids() -> None:
    ours = codec()
    aliases = {"<$EMB_1$>": [10**9, 10**9 + 1], "<$EMB_1$>b": [7], "{{EMBED_HERE}}": [10**9 + 2]}
    ids = ours.encode("a<$EMB_1$>c<$EMB_1$>b{{EMBED_HERE}}", aliases=aliases)
    assert ids == [*ours.encode("a"), 10**9, 10**9 + 1, *ours.encode("c"), 7, 10**9 + 2]
    assert ours.decode(ids[:3]) == "a"
    with pytest.raises(TokenizerError, match="alias must not be empty"):
        ours.encode("a", aliases={"": [1]})


def test_text_after_an_alias_is_a_continuation() -> None:
    folder = TokenizerFiles(Path("folder"))
    ours = Codec(HFBackend(metaspace_json(), folder), folder)
    hello, bare = ours.backend.piece_to_id("\u2581Hello"), ours.backend.piece_to_id("Hello")
    assert ours.encode("Hello<img>Hello", aliases={"<img>": [10**9]}) == [hello, 10**9, bare]
    assert ours.encode("<img> Hello", aliases={"<img>": [10**9]}) == [10**9, hello]


def test_special_token_texts_for_chat_templates() -> None:
    assert codec(ConfigTokenIds(bos=0, eos=2)).texts_by_role() == {
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
    }
    named = {"bos_token": None, "pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    assert codec(ConfigTokenIds(bos=1, eos=0), token_by_role=named).texts_by_role() == {
        "pad_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
    }


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"No supported tokenizer found: .* has no tokenizer.json and no"):
        Codec.from_folder(tmp_path)
    with pytest.raises(FileNotFoundError, match="No supported tokenizer found"):  # as old scripts expect it
        Codec.from_folder(tmp_path / "not there")


def test_only_text_is_encoded() -> None:
    with pytest.raises(TokenizerError, match="found bytes"):
        codec().encode(b"x")  # type: ignore[arg-type]
