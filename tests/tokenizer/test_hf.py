"""tokenizer.json: agreement with transformers, special text as text, tokens that other files declare."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from exlm.errors import BadText, TokenizerError
from exlm.tokenizer.codec import Codec
from exlm.tokenizer.hf import LONG_TEXT_CHARS, HFBackend
from exlm.tokenizer.tokenizer_files import AddedToken, TokenizerFiles, read_tokenizer_files
from tests.tokenizer.sample_vocabularies import byte_level_json, metaspace_json, random_texts, write_folder

COUNT = 1000


def backend(text: str, **declared: Any) -> HFBackend:
    return HFBackend(text, TokenizerFiles(Path("folder"), **declared))


def transformers_tokenizer(text: str) -> Any:
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(text))


@pytest.fixture(params=["fixture", "byte_level", "metaspace"])
def source(request: pytest.FixtureRequest) -> str:
    """The text of a tokenizer.json."""
    if request.param == "fixture":
        folder = request.getfixturevalue("fixtures_dir")
        return str((folder / "tiny-lm" / "tokenizer.json").read_text(encoding="utf-8"))
    return byte_level_json() if request.param == "byte_level" else metaspace_json()


def test_agrees_with_transformers(source: str) -> None:
    oracle = transformers_tokenizer(source)
    ours = Codec(backend(source), TokenizerFiles(Path("folder")))
    for text in [
        *random_texts(COUNT),
        "",
        " ",
        "  ",
        "\n",
        "<|im_start|>user\nHi<|im_end|>",
        "a<s>b",
        "</s></s>",
    ]:
        expected = oracle.encode(text, add_special_tokens=False)
        assert ours.encode(text, parse_special=True) == expected, repr(text)
        plain = oracle.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ours.encode(text) == plain, repr(text)
        if ours.pad_id not in expected:
            assert ours.decode(expected, show_special=True) == oracle.decode(expected), repr(text)
        assert ours.decode(plain) == oracle.decode(plain, skip_special_tokens=True), repr(text)


def test_round_trips(source: str) -> None:
    ours = Codec(backend(source), TokenizerFiles(Path("folder")))
    known = ours.backend.token_bytes
    assert known is not None
    for text in random_texts(COUNT, seed=11):
        # where a lower block is a space, it comes back as one, and the file takes a first space for its own
        expected = text.replace("\u2581", " ").removeprefix(" ") if known.strips_leading_space else text
        assert ours.decode(ours.encode(text)) == expected, repr(text)


def test_special_text_is_text_unless_asked() -> None:
    ours = backend(byte_level_json())
    ids = ours.tokenize("a<|im_end|>b", parse_special=False)
    assert not set(ids) & set(ours.special_tokens.values())
    assert ours.decode(ids) == "a<|im_end|>b"
    assert ours.tokenize("<|im_end|>", parse_special=True) == [ours.special_tokens["<|im_end|>"]]


def test_ordinary_added_tokens_are_always_found() -> None:
    ours = backend(byte_level_json())
    for special in (False, True):
        assert ours.nonspecial_added_tokens["<tool_call>"] in ours.tokenize("x<tool_call>y", parse_special=special)


def json_with_merges_to(text: str) -> str:
    """A BPE whose own merges spell a special token."""
    vocab = {letter: n for n, letter in enumerate("abc</s>")}
    vocab |= {"</": 7, "s>": 8, "</s>": 9, "b</s>": 10, "<unk>": 11}
    merges = [("<", "/"), ("s", ">"), ("</", "s>"), ("b", "</s>")]
    library = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>"))
    library.add_special_tokens([text, "<unk>"])
    return str(library.to_str())


def test_merges_that_spell_a_special_token_are_not_followed() -> None:
    ours = backend(json_with_merges_to("</s>"))
    assert ours.tokenize("a</s>", parse_special=True) == [0, 9]
    assert ours.tokenize("a</s>", parse_special=False) == [0, 7, 8]
    assert ours.tokenize("b</s>", parse_special=False) == [10], "an ordinary token may contain the text"
    assert ours.tokenize("</s", parse_special=False) == [7, 5]
    assert ours.tokenize("z", parse_special=False) == [11], "an unknown letter is still unknown"


def test_a_whole_word_that_is_a_special_token_is_not_taken() -> None:
    state = json.loads(json_with_merges_to("</s>"))
    state["model"]["ignore_merges"] = True
    ours = backend(json.dumps(state))
    assert ours.tokenize("</s>", parse_special=False) == [7, 8]


@pytest.mark.parametrize("kind", ["Unigram", "WordLevel", "WordPiece"])
def test_vocabularies_that_contain_special_text_do_not_emit_it(kind: str) -> None:
    pieces = ["<unk>", "<s>", "<", "s", ">", "x"]
    if kind == "Unigram":
        model: Any = models.Unigram([(piece, -float(n)) for n, piece in enumerate(pieces)], 0, False)
    elif kind == "WordLevel":
        model = models.WordLevel({piece: n for n, piece in enumerate(pieces)}, unk_token="<unk>")
    else:
        model = models.WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token="<unk>")
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<s>", "<unk>"])
    ours = backend(library.to_str())
    assert ours.tokenize("x <s>", parse_special=True) == [5, 1]
    plain = ours.tokenize("x <s>", parse_special=False)
    assert plain == ([5, 2, 3, 4] if kind == "Unigram" else [5, 0])


def test_a_special_letter_keeps_its_id() -> None:
    library = tokenizers.Tokenizer.from_str(byte_level_json())
    library.add_special_tokens(["!"])
    ours = backend(library.to_str())
    assert (
        ours.tokenize("!", parse_special=False) == ours.tokenize("!", parse_special=True) == [ours.special_tokens["!"]]
    )


def test_the_file_cannot_add_truncate_or_pad() -> None:
    library = tokenizers.Tokenizer.from_str(byte_level_json())
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    library.enable_truncation(3)
    library.enable_padding(length=64)
    assert backend(library.to_str()).encode("Hello world") == backend(byte_level_json()).encode("Hello world")


def test_dropout_is_switched_off() -> None:
    state = json.loads(byte_level_json())
    state["model"]["dropout"] = 0.9
    ours = backend(json.dumps(state))
    assert len({tuple(ours.encode("The quick brown fox jumps")) for _ in range(20)}) == 1


def test_tokens_of_other_files_get_their_ids() -> None:
    size = backend(byte_level_json()).vocab_size()
    declared = (
        AddedToken("<a>", size, source="added_tokens.json"),
        AddedToken("<b>", size + 5, special=False, source="tokenizer_config.json"),
    )
    ours = backend(byte_level_json(), added=declared, token_by_role={"bos_token": "quick"})
    assert ours.tokenize("<a><b>", parse_special=True) == [size, size + 5]
    assert ours.tokenize("<b>", parse_special=False) == [size + 5]
    assert size not in ours.tokenize("<a>", parse_special=False)
    assert (ours.base_vocab_size, ours.vocab_size()) == (size, size + 6)
    assert [ours.is_defined(n) for n in range(size, size + 7)] == [
        True,
        False,
        False,
        False,
        False,
        True,
        False,
    ]
    assert ours.id_to_piece(size + 2) == ""
    assert ours.id_to_piece(-1) == ""
    assert ours.piece_to_id("<b>") == size + 5


def test_a_named_token_of_the_vocabulary_is_special() -> None:
    plain = backend(byte_level_json())
    number = plain.piece_to_id("the")
    assert number is not None
    ours = backend(byte_level_json(), token_by_role={"eos_token": "the"})
    assert ours.special_tokens["the"] == number
    assert number in ours.tokenize("the", parse_special=True)
    assert number not in ours.tokenize("the", parse_special=False)


def test_a_flag_in_tokenizer_config_wins_as_in_transformers() -> None:
    number = backend(byte_level_json()).nonspecial_added_tokens["<tool_call>"]
    declared = AddedToken("<tool_call>", number, special=True, source="tokenizer_config.json")
    assert "<tool_call>" in backend(byte_level_json(), added=(declared,)).special_tokens
    bare = AddedToken("<tool_call>", number, source="added_tokens.json")
    assert "<tool_call>" in backend(byte_level_json(), added=(bare,)).nonspecial_added_tokens


@pytest.mark.parametrize(
    ("content", "number", "says"),
    [
        ("<|im_end|>", 7, "gives it 2"),
        ("<new>", 7, "uses that id for another"),
        ("<far>", 10**9, "ends at"),
    ],
)
def test_inconsistent_declarations_are_refused(content: str, number: int, says: str) -> None:
    declared = AddedToken(content, number, source="added_tokens.json")
    with pytest.raises(TokenizerError) as raised:
        backend(byte_level_json(), added=(declared,))
    assert says in str(raised.value)
    assert "added_tokens.json" in str(raised.value)


def test_stripping_flags_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    flags = {"lstrip": True, "rstrip": True, "normalized": False, "single_word": False, "special": True}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {
            "2": {"content": "<|im_end|>", **flags},
            "1": {"content": "<|im_start|>", **flags, "lstrip": False, "single_word": True},
        },
    }
    write_folder(tmp_path, tokenizer=byte_level_json(), tokenizer_config=config)
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = Codec.from_folder(tmp_path)
    for text in ["a  <|im_end|>\n\n b", " <|im_end|> ", "a<|im_start|>", "a <|im_start|>  b", "x <|im_end|>"]:
        assert ours.encode(text, parse_special=True) == oracle.encode(text, add_special_tokens=False), repr(text)


def test_a_continuation_gets_no_prefix_space() -> None:
    ours = backend(metaspace_json())
    assert ours.tokenize("Hello", parse_special=False) == [ours.piece_to_id("\u2581Hello")]
    assert ours.tokenize("Hello", parse_special=False, continues=True) == [ours.piece_to_id("Hello")]
    assert ours.tokenize(" Hello", parse_special=False, continues=True) == [ours.piece_to_id("\u2581Hello")]
    same = backend(byte_level_json())
    assert same.tokenize("Hello", parse_special=False, continues=True) == same.tokenize("Hello", parse_special=False)


def test_decoders_of_other_kinds_decode_as_their_library_does() -> None:
    library = tokenizers.Tokenizer(models.WordPiece({"[U]": 0, "play": 1, "##ing": 2, "now": 3}, unk_token="[U]"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.decoder = tokenizers.decoders.WordPiece()
    ours = backend(library.to_str())
    assert ours.token_bytes is None
    assert ours.decode(ours.encode("playing now")) == "playing now"
    assert ours.vocab[1:] == [" play", "ing", " now"]


@pytest.mark.parametrize("text", ["", "{}", "[]", "{", '{"version": "1.0", "model": {"type": "Nonsense"}}'])
def test_what_is_not_a_tokenizer_is_refused(tmp_path: Path, text: str) -> None:
    write_folder(tmp_path, tokenizer=text)
    with pytest.raises(TokenizerError, match=r"tokenizer.json is not a tokenizer"):
        Codec.from_folder(tmp_path)


def test_an_empty_vocabulary_is_refused() -> None:
    with pytest.raises(TokenizerError, match="empty vocabulary"):
        backend(tokenizers.Tokenizer(models.BPE()).to_str())


def test_huge_ids_are_refused() -> None:
    state = json.loads(tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, [])).to_str())
    state["model"]["vocab"]["b"] = 4_000_000_000
    with pytest.raises(TokenizerError, match="has 2 tokens, but ids up to 4000000000"):
        backend(json.dumps(state))


def test_a_lone_surrogate_is_refused_with_its_place() -> None:
    with pytest.raises(BadText, match=r"U\+D800\) at character 2"):
        backend(byte_level_json()).encode("ab\ud800")


def test_long_texts_are_encoded_as_short_ones_are(fixtures_dir: Path) -> None:
    file = fixtures_dir / "tiny-lm" / "tokenizer.json"
    library = tokenizers.Tokenizer.from_file(str(file))
    made = HFBackend.from_file(file, read_tokenizer_files(file.parent))
    text = "The café, <|im_end|> 1234 and 語\n\t  more. " * 400
    assert len(text) > LONG_TEXT_CHARS
    library.encode_special_tokens = False
    assert made.tokenize(text, parse_special=True) == library.encode(text, add_special_tokens=False).ids
    library.encode_special_tokens = True
    assert made.tokenize(text, parse_special=False) == library.encode(text, add_special_tokens=False).ids
    with pytest.raises(BadText, match=rf"U\+D800\) at character {len(text)}"):
        made.tokenize(text + "\ud800", parse_special=False)


def test_other_threads_run_while_a_long_text_is_encoded(fixtures_dir: Path) -> None:
    file = fixtures_dir / "tiny-lm" / "tokenizer.json"
    made = HFBackend.from_file(file, read_tokenizer_files(file.parent))
    encoding = threading.Thread(target=lambda: made.tokenize("words and words " * 30_000, parse_special=False))
    encoding.start()
    turns = 0
    while encoding.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 10


def test_threads_with_different_options_do_not_interfere() -> None:
    ours = backend(byte_level_json())
    wrong: list[bool] = []

    def work(special: bool) -> None:
        for _ in range(300):
            ids = ours.tokenize("<|im_start|>user", parse_special=special)
            wrong.extend([True] if (ids[0] == 1) != special else [])

    threads = [threading.Thread(target=work, args=(n % 2 == 0,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
