"""The journal: truncated or changed anywhere, full, foreign, locked."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exlm.batch import Journal, JournalError
from exlm.batch import journal as module

FACTS = {"input": "abc", "model": None}
ROWS = 5
ANSWERS = {2: b'{"a": 1}', 0: b"", 4: b"12 34", 3: b'"\xc3\xa9 \\n"', 1: b" deadbeef 1 x "}


@contextmanager
def opened(path: Path, created: int = 1, **changes: Any) -> Iterator[Journal]:
    with closing(Journal(path, {**FACTS, **changes}, ROWS, created=created)) as journal:
        yield journal


def contents(journal: Journal) -> dict[int, bytes]:
    return {row: journal.answer(row) for row in journal.done}


def written(path: Path, answers: dict[int, bytes] = ANSWERS) -> bytes:
    """The bytes of a journal with these responses."""
    with opened(path) as journal:
        journal.add(answers.items())
    return path.read_bytes()


def test_written_rows_are_recovered(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with opened(path) as journal:
        journal.add([(1, b"one"), (0, b"null")])
        journal.add([])
        assert contents(journal) == {1: b"one", 0: b"null"}
    with opened(path, created=2) as journal:
        assert journal.created == 1
        assert contents(journal) == {1: b"one", 0: b"null"}
        journal.add([(4, b"four")])
        assert contents(journal) == {1: b"one", 0: b"null", 4: b"four"}
        journal.remove()
    assert not path.exists()


def test_truncated_at_every_byte_it_keeps_the_whole_records(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    whole = written(path)
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        kept = dict(list(ANSWERS.items())[: max(0, sum(end <= cut for end in ends) - 1)])
        with opened(path) as journal:
            assert contents(journal) == kept
            journal.add([(row, answer) for row, answer in ANSWERS.items() if row not in kept])
            assert contents(journal) == ANSWERS
        assert path.read_bytes() == whole


@given(st.data())
@settings(max_examples=100)
def test_every_changed_byte_is_detected(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("changed") / "journal"
    answers = data.draw(
        st.dictionaries(
            st.integers(0, ROWS - 1),
            st.binary(max_size=30).map(lambda b: b.replace(b"\n", b"")),
            min_size=1,
        )
    )
    whole = bytearray(written(path, answers))
    start = whole.index(b"\n") + 1
    place = data.draw(st.integers(start, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    before = whole[:place].count(b"\n") - 1
    with opened(path) as journal:
        assert contents(journal) == dict(list(answers.items())[:before])


def test_a_run_with_other_facts_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    whole = written(path)
    with pytest.raises(JournalError, match="input was 'abc', is 'abd'"), opened(path, input="abd"):
        pass
    with pytest.raises(JournalError, match="delete it to start over"), opened(path, model="x"):
        pass
    with pytest.raises(JournalError, match="rows was 5"):
        Journal(path, FACTS, ROWS + 1, created=1)
    assert path.read_bytes() == whole


def test_an_empty_journal_takes_the_new_facts(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path, {})
    with opened(path, created=2, model="another") as journal:
        journal.add([(0, b"x")])
    with opened(path, created=3, model="another") as journal:
        assert journal.created == 2
        assert contents(journal) == {0: b"x"}


@pytest.mark.parametrize(
    "foreign",
    [
        b"Dear diary\n",
        b"Dear diary",
        b"exlm batch journal 1 {}\n",
        b"exlm batch journal 2 x",
        b"exlm batch journal 1 x\n",
    ],
)
def test_a_file_that_is_not_a_journal_is_left_alone(tmp_path: Path, foreign: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(foreign)
    with pytest.raises(JournalError, match="no journal"), opened(path):
        pass
    assert path.read_bytes() == foreign


def test_a_journal_is_locked(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with opened(path), pytest.raises(JournalError, match="Another process is at work"), opened(path):
        pass
    with opened(path):
        pass


def test_a_journal_removed_meanwhile_is_not_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    written(path)
    real = module.lock_handle

    def late(handle: int) -> bool:
        locked = real(handle)
        if path.exists():
            path.unlink()
            monkeypatch.setattr(module, "lock_handle", real)
        return locked

    monkeypatch.setattr(module, "lock_handle", late)
    with opened(path) as journal:
        assert contents(journal) == {}
    assert path.exists()


@pytest.mark.parametrize("room", range(0, 24, 5))
def test_a_full_disk_loses_only_the_last_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    path = tmp_path / "journal"
    real, left = os.write, [room]

    def limited(handle: int, text: bytes) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = real(handle, text[: left[0]])
        left[0] -= count
        return count

    with opened(path) as journal:
        journal.add([(0, b"first")])
        monkeypatch.setattr(os, "write", limited)
        with pytest.raises(JournalError, match=r"no room .* The 1 rows done so far are safe. Make room"):
            journal.add([(1, b"x" * 40)])
        assert contents(journal) == {0: b"first"}
        monkeypatch.undo()
        journal.add([(2, b"third")])
    with opened(path) as journal:
        assert contents(journal) == {0: b"first", 2: b"third"}


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="cannot be written: No such file"), opened(tmp_path / "no" / "j"):
        pass


def test_the_header_is_readable_json(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first = written(path).split(b"\n")[0].removeprefix(module.MAGIC)
    assert json.loads(first) == {**FACTS, "rows": ROWS, "created": 1}
