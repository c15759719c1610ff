"""Codec: the ids that mean something, aliases, and what decoding leaves out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exlm.errors import TokenizerError
from exlm.text.codec import Codec, ModelIds
from exlm.text.folder import AddedToken, Folder
from exlm.text.json_backend import JsonBackend
from tests.text.samples import byte_level_json, metaspace_json, write_folder


def codec(model: ModelIds | None = None, **declared: Any) -> Codec:
    folder = Folder(Path("folder"), **declared)
    return Codec(JsonBackend(byte_level_json(), folder), folder, model)


@pytest.fixture
def tiny(fixtures_dir: Path) -> Codec:
    """The fixture's tokenizer with the ids of its config.json."""
    return Codec.from_folder(
        fixtures_dir / "tiny-lm", ModelIds(bos=0, eos=2, more_eos=[2], pad=0, vocab_size=2048)
    )


def test_encodes_as_the_reference_does(tiny: Codec, fixtures_dir: Path) -> None:
    cases = json.loads((fixtures_dir / "reference" / "tokenizer_cases.json").read_text(encoding="utf-8"))
    assert len(cases) >= 9
    for case in cases:
        text = case["text"]
        assert tiny.encode(text, special=True) == case["ids_special"]
        assert tiny.encode(text, special=True, add_bos=True) == case["ids_bos"]
        plain = tiny.encode(text)
        if "<|" not in text:
            assert plain == case["ids"]
        assert tiny.decode(plain) == text
        assert not set(plain) & set(tiny.special_texts)


def test_config_says_first_which_ids_begin_and_end(tmp_path: Path) -> None:
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
    given = Codec.from_folder(tmp_path, ModelIds(bos=5, eos=6, more_eos=(6, 9), pad=8))
    assert (given.bos_id, given.eos_id, given.pad_id) == (5, 6, 8)
    assert given.eos_ids == (6, 9, 2, 7, 0)
    named = Codec.from_folder(tmp_path)
    assert (named.bos_id, named.eos_id, named.pad_id) == (0, 2, 1)
    assert named.eos_ids == (2, 7, 0)


def test_without_any_word_the_usual_ids_count_if_they_are_special() -> None:
    ours = codec()
    assert (ours.bos_id, ours.eos_id, ours.pad_id, ours.unk_id) == (1, 2, 2, None)
    assert codec(named={"bos_token": None, "eos_token": None}).bos_id is None
    assert codec(named={"bos_token": "<not in the vocabulary>"}).bos_id is None


def test_padding_falls_back_to_pad_then_eos_then_nothing() -> None:
    size = codec().size
    assert codec(added=(AddedToken("<pad>", size, source="x"),)).pad_id == size
    assert codec(ModelIds(bos=1, eos=2)).pad_id == 2
    assert codec(ModelIds(bos=2, eos=2)).pad_id == -1


def test_bos_and_eos_come_only_when_asked_and_known() -> None:
    ours = codec(ModelIds(bos=1, eos=2))
    plain = ours.encode("hi")
    assert ours.encode("hi", add_bos=True, add_eos=True) == [1, *plain, 2]
    assert ours.encode("", add_bos=True) == [1]
    none = codec(named={"bos_token": None, "eos_token": None})
    assert none.encode("hi", add_bos=True, add_eos=True) == plain


def _with_start(*ids: int) -> str:
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
        (_with_start(1), {"tokenizer_class": "PreTrainedTokenizerFast"}, True),
        (_with_start(1), {"add_bos_token": None}, True),
        (_with_start(1), {"add_bos_token": False}, False),
        (_with_start(2), {}, False),
        (_with_start(), {}, False),
    ],
)
def test_a_bos_comes_first_where_the_files_put_one(text: str, config: Any, wanted: bool) -> None:
    folder = Folder(Path("folder"), config=config)
    assert Codec(JsonBackend(text, folder), folder, ModelIds(bos=1, eos=0)).wants_bos is wanted


def test_decoding_leaves_out_what_is_not_text() -> None:
    ours = codec(ModelIds(bos=1, eos=2, pad=0))
    a, b = ours.encode("a")[0], ours.encode("b")[0]
    ids = [0, 1, a, 2, b, -1, -7, 10**9, ours.size, 2**70, 2]
    assert ours.decode(ids) == "ab", "text after an EOS is still text"
    assert ours.decode(ids, special=True) == "<|im_start|>a<|im_end|>b<|im_end|>", "all but the padding"
    assert ours.decode([]) == ""


def test_an_ordinary_token_that_is_named_as_padding_is_still_text() -> None:
    number = codec().encode("!")[0]
    ours = codec(ModelIds(bos=1, eos=2, pad=number))
    assert ours.pad_id == number
    ids = ours.encode("Stop! Now!")
    for special in (False, True):
        stream = ours.detokenizer(special=special)
        assert ours.decode(ids, special=special) == stream.feed(ids) + stream.flush() == "Stop! Now!"


def test_ordinary_added_tokens_are_shown() -> None:
    ours = codec()
    assert ours.decode(ours.encode("x<tool_call>y")) == "x<tool_call>y"


def test_an_added_token_in_byte_letters_reads_as_written() -> None:
    number = codec().size
    ours = codec(added=(AddedToken("é\u0120", number, special=False, source="x"),))
    assert ours.encode("é\u0120") == [number]
    assert ours.decode([number]) == "é\u0120"
    assert ours.misread == {"é\u0120": number}


def test_aliases_stand_for_their_ids() -> None:
    ours = codec()
    aliases = {"<$EMB_1$>": [10**9, 10**9 + 1], "<$EMB_1$>b": [7], "{{EMBED_HERE}}": [10**9 + 2]}
    ids = ours.encode("a<$EMB_1$>c<$EMB_1$>b{{EMBED_HERE}}", aliases=aliases)
    assert ids == [*ours.encode("a"), 10**9, 10**9 + 1, *ours.encode("c"), 7, 10**9 + 2]
    assert ours.decode(ids[:3]) == "a"
    with pytest.raises(TokenizerError, match="alias must not be empty"):
        ours.encode("a", aliases={"": [1]})


def test_what_follows_an_alias_goes_on() -> None:
    folder = Folder(Path("folder"))
    ours = Codec(JsonBackend(metaspace_json(), folder), folder)
    hello, bare = ours.backend.piece_to_id("\u2581Hello"), ours.backend.piece_to_id("Hello")
    assert ours.encode("Hello<img>Hello", aliases={"<img>": [10**9]}) == [hello, 10**9, bare]
    assert ours.encode("<img> Hello", aliases={"<img>": [10**9]}) == [10**9, hello]


def test_roles_as_chat_templates_know_them() -> None:
    assert codec(ModelIds(bos=0, eos=2)).role_texts() == {
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
    }
    named = {"bos_token": None, "pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    assert codec(ModelIds(bos=1, eos=0), named=named).role_texts() == {
        "pad_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
    }


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        TokenizerError, match=r"No supported tokenizer found: .* has no tokenizer.json and no"
    ):
        Codec.from_folder(tmp_path)
    with pytest.raises(FileNotFoundError, match="No supported tokenizer found"):  # as old scripts expect it
        Codec.from_folder(tmp_path / "not there")


def test_only_text_is_encoded() -> None:
    with pytest.raises(TokenizerError, match="found bytes"):
        codec().encode(b"x")  # type: ignore[arg-type]
