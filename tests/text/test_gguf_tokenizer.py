"""The tokenizer in GGUF metadata: the ids of the files it was made from, and nothing guessed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from exlm.errors import ChatTemplateError, TokenizerError
from exlm.text import ChatTemplates, Codec
from exlm.text.gguf_splits import SPLITS
from exlm.text.gguf_tokenizer import tokenizer_from_metadata
from tests.text.samples import CORPUS, byte_level_json, random_texts, vocabulary_files, vocabulary_v1

COUNT = 1000
SOURCE = "model.gguf"


def codec(metadata: dict[str, Any]) -> Codec:
    return Codec(*tokenizer_from_metadata(metadata, SOURCE))


def from_json(text: str, pre: str = "gpt-2", **more: Any) -> dict[str, Any]:
    """What a converter makes of a tokenizer.json: lists of tokens, types and merges."""
    state = json.loads(text)
    library = tokenizers.Tokenizer.from_str(text)
    vocab = library.get_vocab(with_added_tokens=True)
    tokens = [f"[PAD{n}]" for n in range(1 + max(vocab.values()))]
    kinds = [5] * len(tokens)
    for piece, number in vocab.items():
        tokens[number], kinds[number] = piece, 1
    for token in state["added_tokens"]:
        kinds[token["id"]] = 3 if token["special"] else 4
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in state["model"]["merges"]]
    values = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": kinds, "merges": merges} | more
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def from_model(path: Path, **more: Any) -> dict[str, Any]:
    """What a converter makes of a tokenizer.model: pieces, scores and types."""
    sentencepiece = pytest.importorskip("sentencepiece")
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    numbers = list(range(library.get_piece_size()))
    kinds = [
        2 if unknown else 3 if control else 5 if unused else 6 if byte else 1
        for unknown, control, unused, byte in zip(
            library.is_unknown(numbers),
            library.is_control(numbers),
            library.is_unused(numbers),
            library.is_byte(numbers),
            strict=True,
        )
    ]
    values = {
        "model": "llama",
        "pre": "default",
        "tokens": library.id_to_piece(numbers),
        "scores": library.get_score(numbers),
        "token_type": kinds,
        "bos_token_id": library.bos_id(),
        "eos_token_id": library.eos_id(),
        "unknown_token_id": library.unk_id(),
    } | more
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def test_byte_level_ids_are_those_of_the_json() -> None:
    ours = codec(from_json(byte_level_json()))
    theirs = tokenizers.Tokenizer.from_str(byte_level_json())
    for text in [*random_texts(COUNT), *CORPUS, "<|im_start|>user\n<tool_call>hi<|im_end|>"]:
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, special=True) == expected, repr(text)
        assert ours.backend.decode(expected) == theirs.decode(expected, skip_special_tokens=False)


def test_special_text_is_text_unless_asked_for() -> None:
    ours = codec(from_json(byte_level_json()))
    assert ours.encode("<|im_end|>", special=True) == [ours.special["<|im_end|>"]]
    plain = ours.encode("<|im_end|>")
    assert ours.special["<|im_end|>"] not in plain
    assert ours.decode(plain) == "<|im_end|>"


@pytest.mark.parametrize("pre", SPLITS)
def test_every_way_to_split_gives_the_text_back(pre: str) -> None:
    ours = codec(from_json(byte_level_json(), pre))
    for text in [*random_texts(100, seed=5), *CORPUS]:
        whole = ours.decode(ours.encode(text))
        assert whole == text or SPLITS[pre].composed, repr(text)


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "It's 1234 x", ["It", "'s", "Ġ1234", "Ġx"]),
        ("smollm", "It's 1234 x", ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġx"]),
        ("starcoder", "v12", ["v", "1", "2"]),
        ("command-r", "v12", ["v", "1", "2"]),
        ("llama-bpe", "IT'S 12345\n\n x", ["IT", "'S", "Ġ", "123", "45", "ĊĊ", "Ġx"]),
        ("qwen2", "a 123\n", ["a", "Ġ", "1", "2", "3", "Ċ"]),
        ("tekken", "aBc 12 x/\n", ["a", "Bc", "Ġ", "1", "2", "Ġx", "/Ċ"]),
        ("gpt-4o", "aBc's 1234", ["a", "Bc's", "Ġ", "123", "4"]),
        ("deepseek-v3", "a1234.b 日本x", ["a", "123", "4", ".b", "Ġ", "æĹ¥æľ¬", "x"]),
        ("deepseek-coder", "a12\n(b) 日", ["a", "1", "2", "Ċ", "(", "b", ")", "Ġ", "æĹ¥"]),
        ("default", "a-1234 12 b", ["a", "-", "123", "4", "Ġ", "12", "Ġb"]),
    ],
)
def test_words_before_merging(pre: str, text: str, words: list[str]) -> None:
    state = json.dumps(SPLITS[pre].pre_tokenizer())
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    document = json.loads(library.to_str())
    document["pre_tokenizer"] = json.loads(state)
    library = tokenizers.Tokenizer.from_str(json.dumps(document))
    assert library.pre_tokenizer is not None
    assert [word for word, _ in library.pre_tokenizer.pre_tokenize_str(text)] == words


def test_whole_words_are_taken_before_merges() -> None:
    letters = ["a", "b", "c", "ab", "abc"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": letters,
        "tokenizer.ggml.merges": ["a b"],
    }
    assert codec(metadata | {"tokenizer.ggml.pre": "llama-bpe"}).encode("abc") == [4]
    assert codec(metadata | {"tokenizer.ggml.pre": "gpt-2"}).encode("abc") == [3, 2]


def test_unused_and_empty_tokens_keep_their_ids() -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["[PAD0]", "a", "", "b", "[PAD4]", "<end>"],
        "tokenizer.ggml.token_type": [5, 1, 1, 1, 5, 3],
        "tokenizer.ggml.merges": [],
    }
    ours = codec(metadata)
    assert ours.encode("ab<end>", special=True) == [1, 3, 5]
    assert (ours.size, ours.decode([0, 1, 2, 3, 4])) == (6, "ab")


def test_sentencepiece_ids_are_those_of_the_library() -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    for path in vocabulary_files():
        theirs = sentencepiece.SentencePieceProcessor(model_file=str(path))
        ours = codec(from_model(path))
        assert (ours.bos_id, ours.eos_id, ours.unk_id) == (theirs.bos_id(), theirs.eos_id(), theirs.unk_id())
        for text in [*random_texts(COUNT, seed=9), "", " ", "  a", "\u2581", "[INST] hi [/INST]"]:
            expected = theirs.encode(text)
            assert ours.encode(text) == expected, (path.name, text)
            assert ours.decode(expected) == theirs.decode(expected), (path.name, text)


def test_no_space_before_the_first_word() -> None:
    spaced, bare = (
        codec(from_model(vocabulary_v1())),
        codec(from_model(vocabulary_v1(), add_space_prefix=False)),
    )
    assert spaced.backend.id_to_piece(spaced.encode("Hello")[0]) == "\u2581Hello"
    assert bare.backend.id_to_piece(bare.encode("Hello")[0]) == "Hello"
    assert bare.decode(bare.encode(" Hello")) == " Hello"


def test_pieces_a_user_defined_are_found_whole() -> None:
    metadata = from_model(vocabulary_v1())
    tokens, kinds = list(metadata["tokenizer.ggml.tokens"]), list(metadata["tokenizer.ggml.token_type"])
    tokens += ["<turn>", "   @"]
    kinds += [4, 4]
    scores = [*metadata["tokenizer.ggml.scores"], -1000.0, -1000.0]
    ours = codec(
        metadata
        | {
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.scores": scores,
        }
    )
    assert ours.encode("a<turn>b")[1] == 32000
    assert 32001 in ours.encode("x   @y")
    assert ours.decode(ours.encode("x   @y")) == "x   @y"


def test_phi3s_special_tokens_swallow_white_space() -> None:
    metadata = from_model(vocabulary_v1())
    tokens = [*metadata["tokenizer.ggml.tokens"], "<|user|>", "<|endoftext|>"]
    more = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], 3, 3],
        "tokenizer.ggml.scores": [*metadata["tokenizer.ggml.scores"], -1000.0, -1000.0],
    }
    phi = codec(metadata | more | {"general.architecture": "phi3"})
    other = codec(metadata | more | {"general.architecture": "llama"})
    assert phi.encode("<|user|>\n hi", special=True) == phi.encode("<|user|>hi", special=True)
    assert other.encode("<|user|>\n hi", special=True) != other.encode("<|user|>hi", special=True)
    assert phi.encode("<|endoftext|>\n", special=True) == other.encode("<|endoftext|>\n", special=True)


def test_roles_and_flags_come_along() -> None:
    metadata = from_json(
        byte_level_json(), bos_token_id=1, eos_token_id=2, padding_token_id=0, add_bos_token=False
    )
    ours = codec(metadata)
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (1, 2, 0)
    assert ours.role_texts() == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    assert ours.folder.config is not None
    assert ours.folder.config["add_bos_token"] is False


@pytest.mark.parametrize(("pre", "wanted"), [("qwen2", False), ("smollm", False), ("llama-bpe", True)])
def test_a_file_without_the_flag_means_what_its_kind_does(pre: str, wanted: bool) -> None:
    metadata = from_json(byte_level_json(), bos_token_id=1) | {"tokenizer.ggml.pre": pre}
    assert codec(metadata).wants_bos is wanted
    assert codec(metadata | {"tokenizer.ggml.add_bos_token": not wanted}).wants_bos is not wanted


def test_chat_templates() -> None:
    metadata = from_json(byte_level_json())
    none = ChatTemplates.from_folder(codec(metadata).folder)
    assert none.templates == {}
    with pytest.raises(
        ChatTemplateError, match=r"model\.gguf has no .* \(looked in tokenizer\.chat_template\)"
    ):
        none.choose()
    one = codec(metadata | {"tokenizer.chat_template": "{{ 1 }}"})
    template = ChatTemplates.from_folder(one.folder).default
    assert template is not None
    assert template.source == "{{ 1 }}"
    assert template.origin == "model.gguf: tokenizer.chat_template"  # and no file beside it
    several = metadata | {"tokenizer.chat_template": "{{ 1 }}", "tokenizer.chat_template.tool_use": "{{ 2 }}"}
    templates = ChatTemplates.from_folder(codec(several).folder)
    assert {name: one.source for name, one in templates.templates.items()} == {
        "default": "{{ 1 }}",
        "tool_use": "{{ 2 }}",
    }
    with pytest.raises(TokenizerError, match=r"model\.gguf: tokenizer\.chat_template should be a string"):
        codec(metadata | {"tokenizer.chat_template": 7})


def small(**changes: Any) -> dict[str, Any]:
    values = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "merges": ["a b"]} | changes
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def pieces(**changes: Any) -> dict[str, Any]:
    return small(
        **{
            "model": "llama",
            "tokens": ["<unk>", "a", "b"],
            "token_type": [2, 1, 1],
            "scores": [0.0, -1.0, -2.0],
            "merges": None,
        }
        | changes
    )


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        ({}, "tokens should be a list of texts, found None"),
        (small(model="t5"), "model should be gpt2 or llama, found 't5'"),
        (small(model=None), "model should be gpt2 or llama, found None"),
        (small(pre="strange"), "pre is 'strange'.*Known: command-r, dbrx.*smollm.*tekken"),
        (small(pre=None), "pre is None"),
        (small(tokens=[]), "tokens should be a list of texts"),
        (small(tokens=["a", 1]), "tokens should be a list of str"),
        (small(tokens=["a", "a"]), "'a' as 0 and as 1"),
        (small(token_type=[1]), "token_type should be a list of 3"),
        (small(merges=["ab"]), "merges should be two pieces with a space between them, found 'ab'"),
        (small(merges=["a c"]), "not a tokenizer"),
        (small(bos_token_id=3), "bos_token_id should be an id below 3, found 3"),
        (small(add_bos_token=1), "add_bos_token should be true or false"),
        (pieces(scores=None), "scores should be there"),
        (pieces(scores=[0.0, float("nan"), 0.0]), "scores should be a list of finite numbers"),
        (pieces(token_type=[2, 2, 1]), "exactly one token"),
        (pieces(token_type=[1, 1, 1]), "exactly one token"),
        (pieces(token_type=[2, 1, 9]), "numbers from 1 to 6, found 9"),
        (pieces(tokens=["<unk>", "a", "a"]), "'a' again as 2"),
        (pieces(token_type=[2, 1, 6]), "byte piece b is invalid"),
    ],
)
def test_what_is_wrong_is_named(metadata: dict[str, Any], complaint: str) -> None:
    with pytest.raises(TokenizerError, match=complaint) as caught:
        codec(metadata)
    assert SOURCE in str(caught.value)


@pytest.mark.parametrize("kind", [small, pieces])
def test_minus_one_without_a_sign_names_no_token(kind: Callable[..., dict[str, Any]]) -> None:
    """As in the published stories260K, and wherever a converter knew no padding."""
    keys = ("bos_token_id", "eos_token_id", "padding_token_id", "seperator_token_id")
    ours = codec(kind(**dict.fromkeys(keys, 2**32 - 1)))
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (None, None, -1)
    assert "pad_token" not in ours.role_texts()


def test_a_padding_that_the_vocabulary_does_not_have_is_none() -> None:
    ours = codec(pieces(eos_token_id=2, padding_token_id=3, seperator_token_id=3))
    assert (ours.eos_id, ours.pad_id) == (2, 2)
    with pytest.raises(TokenizerError, match="padding_token_id should be an id below 3, found '<pad>'"):
        codec(pieces(padding_token_id="<pad>"))


def test_the_unknown_piece_may_be_named_by_its_id() -> None:
    ours = codec(pieces(token_type=[1, 1, 1], unknown_token_id=0))
    assert ours.unk_id == 0
    assert ours.encode("ab", continues=True) == [1, 2]


@pytest.mark.weights
def test_smollm2(fixtures_dir: Path) -> None:
    path = os.environ.get("EXLM_SMOLLM2")
    if not path:
        pytest.skip("point EXLM_SMOLLM2 at SmolLM2-135M-Instruct.Q4_1.gguf")
    from exlm.checkpoint.gguf_file import GgufFile

    ours = Codec(*tokenizer_from_metadata(GgufFile(path).metadata, path))
    cases = json.loads((fixtures_dir / "reference" / "smollm2.json").read_text())["cases"]
    for case in cases:
        assert ours.encode(case.get("text") or case["prompt"], special=True) == case["input_ids"]
        ids = case["greedy_ids_64"]
        assert ours.decode(ids[: case["eos_at"]] if case["eos_at"] else ids).startswith(case["text_out"])
    assert [ours.decode([one]) for one in ours.encode(" 2024")] == [" ", "2", "0", "2", "4"]
