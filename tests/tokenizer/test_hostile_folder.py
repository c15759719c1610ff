"""Malicious tokenizer files: each is refused with a typed error that names the file.

They have half characters, ids beyond any vocabulary, pipes in the place of files, and parts of a pipeline
that make the library panic.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exlm import Config, ExlmError, Tokenizer, TokenizerError
from exlm.tokenizer.gguf import GgufVocabulary, tokenizer_model
from exlm.tokenizer.tokenizer_files import MAX_FILE_BYTES, MAX_ID, MAX_ID_GAP, require_memory_to_read
from tests import tiny

HALF = "\ud800"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with a byte-level tokenizer.json."""
    return tiny.make_chat_folder(tmp_path / "m")


@pytest.fixture
def pieces(folder: Path) -> Path:
    """The same with a SentencePiece tokenizer.model in its place."""
    pytest.importorskip("sentencepiece")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "a", "\u2581"]
    told: dict[str, Any] = {"model": "llama", "tokens": tokens, "scores": [0.0] * len(tokens)}
    told["token_type"] = [2, 3, 3] + [6] * 256 + [1, 1]
    data = tokenizer_model(GgufVocabulary({f"tokenizer.ggml.{key}": value for key, value in told.items()}, "x"))
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer.model").write_bytes(data)
    return folder


def written(folder: Path, name: str, value: object) -> Config:
    (folder / name).write_text(json.dumps(value))
    return Config(folder)


NAMED: list[tuple[str, Any, str]] = [
    (
        "tokenizer_config.json",
        {"added_tokens_decoder": {"7": {"content": HALF}}},
        "added_tokens_decoder.7.content",
    ),
    ("tokenizer_config.json", {"added_tokens_decoder": {"7": "a" + HALF}}, "added_tokens_decoder.7"),
    (
        "tokenizer_config.json",
        {"added_tokens_decoder": {HALF: "a"}},
        r"the key '\\ud800' of added_tokens_decoder",
    ),
    ("tokenizer_config.json", {"bos_token": HALF}, "bos_token"),
    (
        "tokenizer_config.json",
        {"additional_special_tokens": ["<s>", "\udfff"]},
        "additional_special_tokens.1",
    ),
    ("tokenizer_config.json", {"extra_special_tokens": {"x": HALF}}, "extra_special_tokens.x"),
    ("tokenizer_config.json", {"chat_template": "{{ '" + HALF + "' }}"}, "chat_template"),
    ("tokenizer_config.json", {"chat_template": [{"name": HALF, "template": "x"}]}, "chat_template.0.name"),
    ("tokenizer_config.json", {"tokenizer_class": HALF}, "tokenizer_class"),
    ("special_tokens_map.json", {"eos_token": {"content": HALF}}, "eos_token.content"),
    ("added_tokens.json", {HALF: 7}, r"the key '\\ud800'"),
    ("chat_template.json", {"chat_template": HALF}, "chat_template"),
    ("generation_config.json", {"eos_token_id": [2], "note": HALF}, "note"),
]


@pytest.mark.parametrize(("name", "value", "entry"), NAMED)
def test_half_a_character_is_refused_by_file_and_entry(folder: Path, name: str, value: Any, entry: str) -> None:
    config = written(folder, name, value)
    with pytest.raises(TokenizerError, match=rf"{name}: {entry} .*half a character") as raised:
        Tokenizer(config)
    str(raised.value).encode()


@pytest.mark.parametrize(("name", "value", "entry"), [one for one in NAMED if "token" in one[2]])
def test_half_a_character_beside_sentencepiece_is_refused(pieces: Path, name: str, value: Any, entry: str) -> None:
    with pytest.raises(TokenizerError, match=rf"{name}: {entry} .*half a character"):
        Tokenizer(written(pieces, name, value))


def test_whole_characters_may_be_written_in_halves(folder: Path) -> None:
    text = '{"added_tokens_decoder": {"259": {"content": "\\ud83e\\udd99", "special": true}}}'
    (folder / "tokenizer_config.json").write_text(text)
    assert Tokenizer(Config(folder)).encode_special("\U0001f999") == [259]


def test_half_a_character_in_the_vocabulary_is_refused(folder: Path) -> None:
    table = json.loads((folder / "tokenizer.json").read_text())
    table["model"]["vocab"][HALF] = 259
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer(written(folder, "tokenizer.json", table))


@pytest.mark.parametrize("number", ["1000000000", "4194304", str(2**63), "9" * 5000])
def test_ids_beyond_any_vocabulary_are_refused(folder: Path, number: str) -> None:
    config = written(folder, "tokenizer_config.json", {"added_tokens_decoder": {number: {"content": "<x>"}}})
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: added_tokens_decoder.*an id below 4,194,304"):
        Tokenizer(config)


@pytest.mark.parametrize("number", [10**9, 2**63, 10**400, -1, True, 1.5, "3", [], {}, None])
def test_ids_beyond_any_vocabulary_in_added_tokens_json_are_refused(folder: Path, number: object) -> None:
    with pytest.raises(TokenizerError, match=r"added_tokens\.json: the id of '<x>' should be a number from 0 to"):
        Tokenizer(written(folder, "added_tokens.json", {"<x>": number}))


@pytest.mark.parametrize("backend", ["folder", "pieces"])
def test_undefined_ids_are_bounded_all_together(backend: str, request: pytest.FixtureRequest) -> None:
    place: Path = request.getfixturevalue(backend)
    step = MAX_ID_GAP - 1
    tokens = {str(250 + step * n): {"content": f"<x{n}>"} for n in range(1, MAX_ID // step)}
    with pytest.raises(TokenizerError, match=r"gives '<x2>' the id \d+, but .* ends at \d+"):
        Tokenizer(written(place, "tokenizer_config.json", {"added_tokens_decoder": tokens}))
    some = {str(MAX_ID_GAP + 100): {"content": "<x0>"}, str(MAX_ID_GAP + 101): {"content": "<x1>"}}
    made = Tokenizer(written(place, "tokenizer_config.json", {"added_tokens_decoder": some}))
    assert made.get_vocab_size() == MAX_ID_GAP + 102


@pytest.mark.parametrize("value", [10**9, 2**63, [2, 10**400]])
def test_an_end_beyond_any_vocabulary_is_refused(folder: Path, value: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ExlmError, match=r'generation_config\.json: "eos_token_id" must be below 4,194,304'):
        Config(folder)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes with names")
@pytest.mark.parametrize(
    "name",
    [
        "tokenizer_config.json",
        "added_tokens.json",
        "special_tokens_map.json",
        "chat_template.json",
        "chat_template.jinja",
    ],
)
def test_a_pipe_is_not_waited_for(folder: Path, name: str) -> None:
    config = Config(folder)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(TokenizerError, match=rf"{name} should be a file, found a folder, pipe or device"):
        Tokenizer(config)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_file_without_end_is_not_read(folder: Path, name: str) -> None:
    config = Config(folder)
    with (folder / name).open("r+b") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(TokenizerError, match=rf"{name} has 268,435,457 bytes; .* at most 268,435,456"):
        Tokenizer(config)


UNKNOWN_TOKEN = {"SpecialToken": {"id": "3", "type_id": 0}}

PANICS: list[tuple[str, Any]] = [
    ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    ("normalizer", {"type": "Replace", "pattern": {"String": ""}, "content": "b"}),
    ("pre_tokenizer", {"type": "FixedLength", "length": 0}),
    (
        "post_processor",
        {"type": "TemplateProcessing", "single": [UNKNOWN_TOKEN], "pair": [], "special_tokens": {}},
    ),
]


def read_and_asked(config: Config) -> None:
    made = Tokenizer(config)
    made.encode("abc")
    assert made.codec.wants_bos is not None


@pytest.mark.parametrize(("part", "value"), PANICS)
def test_a_panic_of_the_library_is_a_typed_error(folder: Path, part: str, value: Any) -> None:
    table = json.loads((folder / "tokenizer.json").read_text())
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        read_and_asked(written(folder, "tokenizer.json", {**table, part: value}))


def test_space_for_a_vocabulary_is_asked_for_in_its_name() -> None:
    require_memory_to_read(10**6, "x/tokenizer.json")
    with pytest.raises(
        ExlmError, match=r"x/tokenizer\.json: the tokenizer could not be read \(1,000,000,000,000,000 bytes\)"
    ):
        require_memory_to_read(10**15, "x/tokenizer.json")


HOSTILE: list[Any] = [-1, 0, 10**9, 2**31, 2**63, 1e308, float("nan"), True, "3", "", HALF, [], [10**9], {}]

FILES: dict[str, dict[str, Any]] = {
    "config.json": {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 0},
    "tokenizer_config.json": {
        "added_tokens_decoder": {"1": {"content": "<s>", "special": True, "lstrip": False}},
        "additional_special_tokens": ["<s>"],
        "bos_token": "<s>",
        "eos_token": {"content": "</s>"},
        "add_bos_token": True,
        "tokenizer_class": "LlamaTokenizer",
        "chat_template": "x",
    },
    "special_tokens_map.json": {"pad_token": {"content": "<pad>"}, "extra_special_tokens": {"x": "<s>"}},
    "added_tokens.json": {"<pad>": 0, "<new>": 259},
    "generation_config.json": {"eos_token_id": [2]},
}
PIPELINE: dict[str, Any] = {
    "truncation": {"max_length": 5, "stride": 0, "strategy": "LongestFirst", "direction": "Right"},
    "padding": {
        "strategy": {"Fixed": 8},
        "direction": "Right",
        "pad_to_multiple_of": 4,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    },
    "normalizer": {"type": "Prepend", "prepend": "_"},
    "pre_tokenizer": {"type": "FixedLength", "length": 2},
    "post_processor": {"type": "BertProcessing", "sep": ["</s>", 2], "cls": ["<s>", 1]},
    "decoder": {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    "model": {
        "type": "Unigram",
        "unk_id": 0,
        "vocab": [["<unk>", 0.0], ["a", -1.0]],
        "byte_fallback": False,
    },
    "added_tokens": [
        {
            "id": 0,
            "content": "<pad>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ],
}


def mutants(value: Any) -> Iterator[Any]:
    """The value with each of its parts exchanged for each hostile one."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            for other in [*HOSTILE, *mutants(inner)]:
                copy = value.copy()
                copy[key] = other
                yield copy


def tried(folder: Path) -> bool:
    """Whether it reads and encodes; only our own errors, which can be printed, may say no."""
    try:
        made = Tokenizer(Config(folder), lazy_init=False)
        made.encode(["abc", "a<s>"], add_bos=True, add_eos=True, encode_special_tokens=True)
        made.codec.texts_by_role()
    except ExlmError as error:
        str(error).encode()
        return False
    return True


@pytest.mark.parametrize("name", FILES)
def test_hostile_values_in_the_small_files_are_read_or_refused(folder: Path, name: str) -> None:
    plain = json.loads((folder / name).read_text()) if name == "config.json" else {}
    (folder / name).write_text(json.dumps({**plain, **FILES[name]}))
    assert tried(folder)
    refused = 0
    for mutant in mutants(FILES[name]):
        (folder / name).write_text(json.dumps({**plain, **mutant}))
        refused += not tried(folder)
    assert refused


@pytest.mark.parametrize("part", PIPELINE)
def test_hostile_values_in_a_pipeline_are_read_or_refused(folder: Path, part: str) -> None:
    table = json.loads((folder / "tokenizer.json").read_text())
    refused = 0
    for mutant in mutants(PIPELINE[part]):
        (folder / "tokenizer.json").write_text(json.dumps({**table, part: mutant}))
        refused += not tried(folder)
    assert refused
