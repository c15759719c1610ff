"""The small files beside a tokenizer: what they declare, and how wrong ones are refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exlm.errors import TokenizerError
from exlm.tokenizer.tokenizer_files import AddedToken, AddedTokenMatcher, read_tokenizer_files
from tests.tokenizer.sample_vocabularies import write_folder


def test_an_empty_folder_declares_nothing(tmp_path: Path) -> None:
    folder = read_tokenizer_files(tmp_path)
    assert (folder.config, folder.added, dict(folder.token_by_role), folder.generation_eos_ids) == (
        None,
        (),
        {},
        (),
    )


def test_tokens_are_merged_in_order_of_their_ids(tmp_path: Path) -> None:
    decoder = {
        "9": {"content": "<b>", "special": False, "rstrip": True},
        "3": {"content": "<a>", "special": True},
    }
    write_folder(
        tmp_path,
        tokenizer_config={
            "added_tokens_decoder": decoder,
            "bos_token": {"content": "<a>"},
            "eos_token": None,
        },
        added_tokens={"<b>": 9, "<c>": 5},
        special_tokens_map={
            "bos_token": "<old>",
            "unk_token": "<u>",
            "additional_special_tokens": ["<x>", "<y>"],
        },
        generation_config={"eos_token_id": [7, 8]},
    )
    folder = read_tokenizer_files(tmp_path)
    assert folder.added == (
        AddedToken("<a>", 3, special=True, source="tokenizer_config.json"),
        AddedToken("<c>", 5, special=True, source="added_tokens.json"),
        AddedToken("<b>", 9, special=False, rstrip=True, normalized=True, source="tokenizer_config.json"),
    )
    assert folder.token_by_role == {"bos_token": "<a>", "eos_token": None, "unk_token": "<u>"}
    assert set(folder.special_token_texts) == {"<u>", "<a>", "<x>", "<y>"}
    assert folder.generation_eos_ids == (7, 8)


@pytest.mark.parametrize(("value", "ids"), [(-1, ()), ([-1], ()), ([7, -1], (7,)), (None, ())])
def test_a_negative_eos_id_is_ignored(tmp_path: Path, value: object, ids: tuple[int, ...]) -> None:
    write_folder(tmp_path, generation_config={"eos_token_id": value})
    assert read_tokenizer_files(tmp_path).generation_eos_ids == ids


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"tokenizer_config": "[1, 2]"}, "tokenizer_config.json should hold a JSON object, found a list"),
        ({"tokenizer_config": "{"}, "tokenizer_config.json is not valid JSON"),
        ({"tokenizer_config": "[" * 100_000}, "tokenizer_config.json is not valid JSON"),
        ({"tokenizer_config": {"bos_token": 5}}, "bos_token should be a string"),
        ({"tokenizer_config": {"added_tokens_decoder": []}}, "added_tokens_decoder should be an object"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": "<a>"}}}, "should map an id"),
        ({"tokenizer_config": {"added_tokens_decoder": {"1": {"content": 4}}}}, "`content` string"),
        ({"tokenizer_config": {"additional_special_tokens": 3}}, "should be a list of tokens"),
        ({"added_tokens": {"<a>": "one"}}, "added_tokens.json: the id of '<a>'"),
        ({"added_tokens": {"<a>": 1, "<b>": 1}}, "both claim the id 1"),
        ({"generation_config": {"eos_token_id": ["x"]}}, "generation_config.json: eos_token_id"),
        ({"generation_config": {"eos_token_id": [True]}}, "generation_config.json: eos_token_id"),
    ],
)
def test_errors_name_the_file_and_the_problem(tmp_path: Path, files: dict[str, object], says: str) -> None:
    write_folder(tmp_path, **files)
    with pytest.raises(TokenizerError) as raised:
        read_tokenizer_files(tmp_path)
    assert says in str(raised.value)
    assert str(tmp_path) in str(raised.value)


def test_files_that_disagree_are_refused(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": {"4": {"content": "<a>", "special": True}}}
    write_folder(tmp_path, tokenizer_config=config, added_tokens={"<a>": 5})
    with pytest.raises(TokenizerError, match=r"added_tokens.json gives '<a>' the id 5, but tokenizer_config.json"):
        read_tokenizer_files(tmp_path)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TokenizerError, match="is not UTF-8"):
        read_tokenizer_files(tmp_path)


WORDS = st.lists(st.text("ab<>", min_size=1, max_size=4), min_size=1, max_size=6, unique=True)


@given(WORDS, st.text("ab<> ", max_size=60))
def test_matches_equal_those_of_a_regular_expression(words: list[str], text: str) -> None:
    pattern = re.compile("|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)))
    finder = AddedTokenMatcher(AddedToken(word, n) for n, word in enumerate(words))
    expected = [(match.start(), match.end(), words.index(match.group())) for match in pattern.finditer(text)]
    assert [(start, end, token.id) for start, end, token in finder.find(text)] == expected


def test_no_tokens_match_nothing() -> None:
    assert list(AddedTokenMatcher([]).find("abc")) == []
    assert list(AddedTokenMatcher([AddedToken("", 1)]).find("abc")) == []


def test_stripping_takes_the_spaces_around_a_token_but_not_its_neighbours() -> None:
    finder = AddedTokenMatcher([AddedToken("<l>", 1, lstrip=True), AddedToken("<r>", 2, rstrip=True)])
    assert [tuple(found)[:2] for found in finder.find("a  <l> b <r> \n c")] == [(1, 6), (9, 15)]
    assert [tuple(found)[:2] for found in finder.find("<r>  <l>")] == [(0, 5), (5, 8)]


def test_a_single_word_is_not_found_inside_another() -> None:
    finder = AddedTokenMatcher([AddedToken("cat", 1, single_word=True), AddedToken("ca", 2)])
    assert [(found.start, found.token.id) for found in finder.find("cat cats (cat) _cat")] == [
        (0, 1),
        (4, 2),
        (10, 1),
        (16, 2),
    ]


def test_many_tokens_do_not_make_it_slow() -> None:
    finder = AddedTokenMatcher(AddedToken(f"<unused{n}>", n) for n in range(10_000))
    text = "a < b <unused77> " * 5_000
    assert sum(1 for _ in finder.find(text)) == 5_000
