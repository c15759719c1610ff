"""The tokenizer in GGUF metadata gives the ids of the files it was converted from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from exlm.errors import ChatTemplateError, TokenizerError
from exlm.tokenizer import ChatTemplates, Codec
from exlm.tokenizer.gguf import PRE_TOKENIZERS, tokenizer_from_metadata
from tests.tokenizer.sample_vocabularies import (
    CORPUS,
    byte_level_json,
    mistral_v1_model,
    random_texts,
    sentencepiece_models,
)

COUNT = 1000
SOURCE = "model.gguf"


def codec(metadata: dict[str, Any]) -> Codec:
    return Codec(*tokenizer_from_metadata(metadata, SOURCE))


def metadata_from_json(text: str, pre: str = "gpt-2", **more: Any) -> dict[str, Any]:
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


def metadata_from_model(path: Path, **more: Any) -> dict[str, Any]:
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
    ours = codec(metadata_from_json(byte_level_json()))
    theirs = tokenizers.Tokenizer.from_str(byte_level_json())
    for text in [*random_texts(COUNT), *CORPUS, "<|im_start|>user\n<tool_call>hi<|im_end|>"]:
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, parse_special=True) == expected, repr(text)
        assert ours.backend.decode(expected) == theirs.decode(expected, skip_special_tokens=False)


def test_special_text_is_text_unless_asked_for() -> None:
    ours = codec(metadata_from_json(byte_level_json()))
    assert ours.encode("<|im_end|>", parse_special=True) == [ours.special_tokens["<|im_end|>"]]
    plain = ours.encode("<|im_end|>")
    assert ours.special_tokens["<|im_end|>"] not in plain
    assert ours.decode(plain) == "<|im_end|>"


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_round_trips(pre: str) -> None:
    ours = codec(metadata_from_json(byte_level_json(), pre))
    for text in [*random_texts(100, seed=5), *CORPUS]:
        whole = ours.decode(ours.encode(text))
        assert whole == text or PRE_TOKENIZERS[pre].nfc, repr(text)


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
def test_pre_tokenizer_splits(pre: str, text: str, words: list[str]) -> None:
    state = json.dumps(PRE_TOKENIZERS[pre].pre_tokenizer())
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    document = json.loads(library.to_str())
    document["pre_tokenizer"] = json.loads(state)
    library = tokenizers.Tokenizer.from_str(json.dumps(document))
    assert library.pre_tokenizer is not None
    assert [word for word, _ in library.pre_tokenizer.pre_tokenize_str(text)] == words


def test_ignore_merges_prefers_whole_words() -> None:
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
    assert ours.encode("ab<end>", parse_special=True) == [1, 3, 5]
    assert (ours.size, ours.decode([0, 1, 2, 3, 4])) == (6, "ab")


def test_sentencepiece_ids_are_those_of_the_library() -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    for path in sentencepiece_models():
        theirs = sentencepiece.SentencePieceProcessor(model_file=str(path))
        ours = codec(metadata_from_model(path))
        assert (ours.bos_id, ours.eos_id, ours.unk_id) == (theirs.bos_id(), theirs.eos_id(), theirs.unk_id())
        for text in [*random_texts(COUNT, seed=9), "", " ", "  a", "\u2581", "[INST] hi [/INST]"]:
            expected = theirs.encode(text)
            assert ours.encode(text) == expected, (path.name, text)
            assert ours.decode(expected) == theirs.decode(expected), (path.name, text)


def test_no_space_before_the_first_word() -> None:
    spaced, bare = (
        codec(metadata_from_model(mistral_v1_model())),
        codec(metadata_from_model(mistral_v1_model(), add_space_prefix=False)),
    )
    assert spaced.backend.id_to_piece(spaced.encode("Hello")[0]) == "\u2581Hello"
    assert bare.backend.id_to_piece(bare.encode("Hello")[0]) == "Hello"
    assert bare.decode(bare.encode(" Hello")) == " Hello"


def test_user_defined_pieces_are_never_split() -> None:
    metadata = metadata_from_model(mistral_v1_model())
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


def test_phi3_special_tokens_strip_whitespace_to_their_right() -> None:
    metadata = metadata_from_model(mistral_v1_model())
    tokens = [*metadata["tokenizer.ggml.tokens"], "<|user|>", "<|endoftext|>"]
    more = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], 3, 3],
        "tokenizer.ggml.scores": [*metadata["tokenizer.ggml.scores"], -1000.0, -1000.0],
    }
    phi = codec(metadata | more | {"general.architecture": "phi3"})
    other = codec(metadata | more | {"general.architecture": "llama"})
    assert phi.encode("<|user|>\n hi", parse_special=True) == phi.encode("<|user|>hi", parse_special=True)
    assert other.encode("<|user|>\n hi", parse_special=True) != other.encode("<|user|>hi", parse_special=True)
    assert phi.encode("<|endoftext|>\n", parse_special=True) == other.encode("<|endoftext|>\n", parse_special=True)


def test_token_roles_and_flags_are_read() -> None:
    metadata = metadata_from_json(
        byte_level_json(), bos_token_id=1, eos_token_id=2, padding_token_id=0, add_bos_token=False
    )
    ours = codec(metadata)
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (1, 2, 0)
    assert ours.texts_by_role() == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    assert ours.files.config is not None
    assert ours.files.config["add_bos_token"] is False


@pytest.mark.parametrize(("pre", "wanted"), [("qwen2", False), ("smollm", False), ("llama-bpe", True)])
def test_add_bos_defaults_depend_on_the_pre_tokenizer(pre: str, wanted: bool) -> None:
    metadata = metadata_from_json(byte_level_json(), bos_token_id=1) | {"tokenizer.ggml.pre": pre}
    assert codec(metadata).wants_bos is wanted
    assert codec(metadata | {"tokenizer.ggml.add_bos_token": not wanted}).wants_bos is not wanted


def test_chat_templates() -> None:
    metadata = metadata_from_json(byte_level_json())
    none = ChatTemplates.from_folder(codec(metadata).files)
    assert none.templates == {}
    with pytest.raises(ChatTemplateError, match=r"model\.gguf has no .* \(looked in tokenizer\.chat_template\)"):
        none.choose()
    one = codec(metadata | {"tokenizer.chat_template": "{{ 1 }}"})
    template = ChatTemplates.from_folder(one.files).default
    assert template is not None
    assert template.source == "{{ 1 }}"
    assert template.origin == "model.gguf: tokenizer.chat_template"  # and no file beside it
    several = metadata | {"tokenizer.chat_template": "{{ 1 }}", "tokenizer.chat_template.tool_use": "{{ 2 }}"}
    templates = ChatTemplates.from_folder(codec(several).files)
    assert {name: one.source for name, one in templates.templates.items()} == {
        "default": "{{ 1 }}",
        "tool_use": "{{ 2 }}",
    }
    with pytest.raises(TokenizerError, match=r"model\.gguf: tokenizer\.chat_template should be a string"):
        codec(metadata | {"tokenizer.chat_template": 7})


def small_bpe_metadata(**changes: Any) -> dict[str, Any]:
    values = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "merges": ["a b"]} | changes
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def small_spm_metadata(**changes: Any) -> dict[str, Any]:
    return small_bpe_metadata(
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
        (small_bpe_metadata(model="t5"), "model should be gpt2 or llama, found 't5'"),
        (small_bpe_metadata(model=None), "model should be gpt2 or llama, found None"),
        (small_bpe_metadata(pre="strange"), "pre is 'strange'.*Known: command-r, dbrx.*smollm.*tekken"),
        (small_bpe_metadata(pre=None), "pre is None"),
        (small_bpe_metadata(tokens=[]), "tokens should be a list of texts"),
        (small_bpe_metadata(tokens=["a", 1]), "tokens should be a list of str"),
        (small_bpe_metadata(tokens=["a", "a"]), "'a' as 0 and as 1"),
        (small_bpe_metadata(token_type=[1]), "token_type should be a list of 3"),
        (
            small_bpe_metadata(merges=["ab"]),
            "merges should be two pieces with a space between them, found 'ab'",
        ),
        (small_bpe_metadata(merges=["a c"]), "not a tokenizer"),
        (small_bpe_metadata(bos_token_id=3), "bos_token_id should be an id below 3, found 3"),
        (small_bpe_metadata(add_bos_token=1), "add_bos_token should be true or false"),
        (small_spm_metadata(scores=None), "scores should be there"),
        (small_spm_metadata(scores=[0.0, float("nan"), 0.0]), "scores should be a list of finite numbers"),
        (small_spm_metadata(token_type=[2, 2, 1]), "exactly one token"),
        (small_spm_metadata(token_type=[1, 1, 1]), "exactly one token"),
        (small_spm_metadata(token_type=[2, 1, 9]), "numbers from 1 to 6, found 9"),
        (small_spm_metadata(tokens=["<unk>", "a", "a"]), "'a' again as 2"),
        (small_spm_metadata(token_type=[2, 1, 6]), "byte piece b is invalid"),
    ],
)
def test_invalid_metadata_is_named(metadata: dict[str, Any], complaint: str) -> None:
    with pytest.raises(TokenizerError, match=complaint) as caught:
        codec(metadata)
    assert SOURCE in str(caught.value)


@pytest.mark.parametrize("kind", [small_bpe_metadata, small_spm_metadata])
def test_unsigned_minus_one_means_no_token(kind: Callable[..., dict[str, Any]]) -> None:
    """As in the published stories260K, and wherever a converter knew no padding."""
    keys = ("bos_token_id", "eos_token_id", "padding_token_id", "seperator_token_id")
    ours = codec(kind(**dict.fromkeys(keys, 2**32 - 1)))
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (None, None, -1)
    assert "pad_token" not in ours.texts_by_role()


def test_a_padding_that_the_vocabulary_does_not_have_is_none() -> None:
    ours = codec(small_spm_metadata(eos_token_id=2, padding_token_id=3, seperator_token_id=3))
    assert (ours.eos_id, ours.pad_id) == (2, 2)
    with pytest.raises(TokenizerError, match="padding_token_id should be an id below 3, found '<pad>'"):
        codec(small_spm_metadata(padding_token_id="<pad>"))


def test_the_unknown_piece_may_be_named_by_its_id() -> None:
    ours = codec(small_spm_metadata(token_type=[1, 1, 1], unknown_token_id=0))
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
        assert ours.encode(case.get("text") or case["prompt"], parse_special=True) == case["input_ids"]
        ids = case["greedy_ids_64"]
        assert ours.decode(ids[: case["eos_at"]] if case["eos_at"] else ids).startswith(case["text_out"])
    assert [ours.decode([one]) for one in ours.encode(" 2024")] == [" ", "2", "0", "2", "4"]
