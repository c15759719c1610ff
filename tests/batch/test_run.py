"""Batches from file to file: every kind of row, errors in every place, and what ends a run."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from exlm import Generator, InputError, MissingExtra, Settings
from exlm.batch import Journal, JournalError, Progress, read_rows, run_rows
from exlm.batch import rows as rows_module
from exlm.cli.__main__ import app
from exlm.serve import CompletionRequest, GeneratorParts, ModelInfo, ModelSpec
from tests import tiny
from tests.serve.running_server import load_tiny

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> GeneratorParts:
    return load_tiny(ModelSpec("tiny", str(tiny.make_chat_folder(tmp_path_factory.mktemp("tiny"))), max_batch_size=3))


@pytest.fixture
def run(loaded: GeneratorParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the command on these lines with the tiny model; returns the responses."""
    monkeypatch.setattr("exlm.serve.load", lambda listing, progress: loaded)

    def call(*lines: Any, options: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        text = "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines)
        (tmp_path / "in.jsonl").write_text(text)
        command = ["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "--model", "m/tiny"]
        done = CliRunner(env={"COLUMNS": "160"}).invoke(app, [*command, *options])
        if done.exception is not None:
            raise done.exception
        call.told = done.stderr  # type: ignore[attr-defined]
        return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]

    return call


def row(name: str, url: str = TEXT, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def before_each_request(monkeypatch: pytest.MonkeyPatch, hook: Callable[[Any], None]) -> None:
    """Call `hook` with every completion request before it is turned into a generation request."""
    original = rows_module.to_generation_request

    def hooked(request: Any, *arguments: Any) -> Any:
        if isinstance(request, CompletionRequest):
            hook(request)
        return original(request, *arguments)

    monkeypatch.setattr(rows_module, "to_generation_request", hooked)


def texts(answer: dict[str, Any]) -> list[str]:
    assert answer["error"] is None
    return [one["text"] for one in answer["response"]["body"]["choices"]]


def test_responses_equal_the_generators_in_row_order(run: Any, loaded: GeneratorParts) -> None:
    prompts = [f"Row {i} {'x' * (7 * i % 40)}" for i in range(10)]
    rows = [row(f"{i}", prompt=prompt, max_tokens=1 + 5 * i % 13, temperature=0) for i, prompt in enumerate(prompts)]
    found = run(*rows)
    assert [one["custom_id"] for one in found] == [f"{i}" for i in range(10)]
    generator = Generator(loaded.model, loaded.cache, loaded.tokenizer)
    for one, asked, prompt in zip(found, rows, prompts, strict=True):
        want = generator.generate(
            prompt,
            asked["body"]["max_tokens"],
            add_bos=True,
            completion_only=True,
            gen_settings=Settings.greedy(),
            stop_conditions=[2],
        )
        assert texts(one) == [want]
        body = one["response"]["body"]
        assert one["response"]["status_code"] == 200
        assert body["model"] == "tiny"
        assert set(body["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens"}


def test_chats_choices_and_logprobs(run: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    chat, several = run(
        row("a", CHAT, messages=messages, max_tokens=5, logprobs=True, top_logprobs=2),
        row("b", prompt=["x", "y"], n=2, max_tokens=4, temperature=1),
    )
    message = chat["response"]["body"]["choices"][0]
    assert message["message"]["role"] == "assistant"
    assert len(message["logprobs"]["content"]) == 5
    assert len(texts(several)) == 4
    assert chat["response"]["body"]["id"].startswith("chatcmpl-")
    assert "100%" in run.told


def test_the_custom_id_decides_the_seed(run: Any, tmp_path: Path) -> None:
    asked = {"prompt": "Once", "max_tokens": 12, "temperature": 1.5}
    first = run(row("a", **asked), row("b", **asked), row("c", seed=1, **asked), row("d", seed=1, **asked))
    a, b, c, d = (texts(one) for one in first)
    assert a != b
    assert c == d
    (tmp_path / "out.jsonl").unlink()
    again = run(row("d", seed=1, **asked), row("a", **asked), row("b", seed=-1, **asked))
    assert [texts(one) for one in again] == [d, a, b]


@pytest.mark.parametrize(
    ("line", "code", "reason"),
    [
        ("nonsense", "invalid_row", "not JSON"),
        ("[1]", "invalid_row", "must be an object, found list"),
        ("[" * 100_000, "invalid_row", "not JSON"),
        ('{"custom_id": NaN}', "invalid_row", "NaN is no number"),
        ({"method": "POST", "url": TEXT, "body": {}}, "invalid_row", "custom_id must be"),
        (row("") | {"custom_id": 3}, "invalid_row", "custom_id must be"),
        (row("x") | {"method": "GET"}, "invalid_row", "method must be 'POST', found 'GET'"),
        (row("x", "/v1/embeddings"), "invalid_row", "url must be"),
        (row("x") | {"body": [1]}, "invalid_row", "body must be an object, found list"),
        (row("x", prompt="y") | {"boby": 1}, "invalid_row", "no field 'boby'"),
        (row("x"), "invalid_request", "prompt"),
        (row("x", prompt="y", temprature=1), "unknown_field", "'temprature'"),
        (row("x", prompt="y", stream=True), "invalid_request", "cannot be a stream"),
        (row("x", prompt="y", model="gpt"), "model_not_found", "this batch runs 'tiny'"),
        (row("x", prompt="cut in half \ud83d"), "invalid_request", "lone surrogate (U+D83D) at character 12"),
        (row("x", CHAT, messages=[{"role": "user", "content": "\ud83d"}]), "invalid_request", "(U+D83D)"),
        (row("x", prompt="y" * 600), "context_length_exceeded", "shorten it"),
        (row("x", prompt="y", max_tokens=600), "context_length_exceeded", "exceed"),
        (row("x", prompt="y", lora="loud"), "invalid_request", "No adapter"),
        (row("x", prompt="y", logit_bias={"9999": 1}), "invalid_request", "9999"),
        (row("x", CHAT, messages=[]), "invalid_request", "messages"),
        (row("x", CHAT, messages=[{"role": "user", "content": "a" * 600}]), "context_length_exceeded", ""),
    ],
)
def test_a_bad_row_gets_an_error_and_does_not_affect_others(run: Any, line: Any, code: str, reason: str) -> None:
    good = row("good", prompt="Hi", max_tokens=2)
    before, bad, after = run(good, "", line, good | {"custom_id": "better"})
    assert texts(before)
    assert texts(after)
    assert bad["error"]["code"] == code
    assert bad["error"]["line"] == 3
    assert bad["error"]["message"].startswith("Line 3: ")
    assert reason in bad["error"]["message"]
    named = isinstance(line, dict) and line.get("custom_id") == "x"
    assert bad["custom_id"] == ("x" if named else None)
    if code != "invalid_row":
        assert bad["response"]["status_code"] in (400, 404, 422)
        assert bad["response"]["body"]["error"]["message"] in bad["error"]["message"]
    assert "1 errors" in run.told


def test_duplicate_custom_ids_are_refused_before_anything_runs(run: Any, tmp_path: Path) -> None:
    twice = row("same", prompt="x")
    with pytest.raises(InputError, match="lines 1 and 3 have the same custom_id 'same'"):
        run(twice, row("other", prompt="x"), twice)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_invalid_inputs(run: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no requests"):
        run("", "  ")
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_rows(tmp_path / "none")
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        read_rows(tmp_path)
    with pytest.raises(InputError, match="NAME=FOLDER"):
        run(row("a", prompt="x"), options=("--lora", "loud"))


def test_a_changed_input_or_model_is_refused_and_nothing_is_lost(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row(f"{i}", prompt="x", max_tokens=2) for i in range(9)]
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "remove", lambda self: None)
        want = run(*rows)
    (tmp_path / "out.jsonl").unlink()
    whole = (tmp_path / "out.jsonl.journal").read_bytes()
    with pytest.raises(JournalError, match="input was"):
        run(*rows[1:])
    with pytest.raises(JournalError, match="cache_type was 'fp16', is 'q4'"):
        run(*rows, options=("--cache-type", "q4"))
    assert (tmp_path / "out.jsonl.journal").read_bytes() == whole
    monkeypatch.setattr("exlm.serve.load", lambda *_, **__: pytest.fail("there is nothing left to run"))
    assert run(*rows) == want


def test_an_existing_output_is_never_lost(run: Any, tmp_path: Path) -> None:
    rows = [row(f"{i}", prompt="x", max_tokens=2) for i in range(3)]
    want = run(*rows, "bad")
    assert run(*rows, "bad") == want
    assert "has every answer already" in run.told
    with pytest.raises(InputError, match="holds something else: move it away"):
        run(*rows)
    with pytest.raises(InputError, match="holds something else: move it away"):
        run(*rows, "bad", options=("--name", "other"))
    with pytest.raises(InputError, match="holds something else: move it away"):
        run(*rows[:2], row("2", prompt="y", max_tokens=2), "bad")
    (tmp_path / "out.jsonl").write_text("My novel\n")
    with pytest.raises(InputError, match="move it away"):
        run(*rows, "bad")
    (tmp_path / "out.jsonl.journal").touch()
    with pytest.raises(InputError, match="move it away"):
        run(*rows, "bad")
    (tmp_path / "out.jsonl.journal").unlink()
    assert (tmp_path / "out.jsonl").read_text() == "My novel\n"
    (tmp_path / "out.jsonl").unlink()
    (tmp_path / "out.jsonl").hardlink_to(tmp_path / "in.jsonl")
    with pytest.raises(InputError, match="name another"):
        run(*rows)


def test_a_full_disk_at_the_end_keeps_the_journal(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(f"{i}", prompt="x", max_tokens=2) for i in range(3)]

    def full(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(JournalError, match=r"no room .* Every answer is safe in"):
            run(*rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl.journal"]
    assert len(run(*rows)) == 3


def test_an_error_without_a_row_ends_the_run_and_the_next_continues(
    loaded: GeneratorParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row(f"{i}", prompt="x", max_tokens=2)) + "\n" for i in range(20)))
    rows = read_rows(path)
    generator = Generator(loaded.model, loaded.cache, loaded.tokenizer, max_batch_size=2)
    host = ModelInfo("tiny", loaded.tokenizer, 512, loaded.model.config.vocab_size)
    journal = Journal(tmp_path / "journal", {}, 20, created=0)
    calls = iter(range(100))

    def raise_at_tenth_row(_: Any) -> None:
        if next(calls) == 9:
            raise MissingExtra("pip install something")

    before_each_request(monkeypatch, raise_at_tenth_row)
    with pytest.raises(MissingExtra):
        run_rows(rows, journal, generator, host)
    assert 0 < len(journal.done) < 20
    assert generator.num_remaining_jobs() == 0
    told: list[int] = []
    progress = run_rows(rows, journal, generator, host, on_progress=lambda now: told.append(now.done))
    assert progress == Progress(done=20, errors=0, new_tokens=progress.new_tokens)
    assert told == sorted(told)
    assert told[-1] == 20
    journal.close()


class PowerLost(Exception):
    """Stands for anything that ends a process."""


def test_stopped_after_any_step_and_truncated_it_ends_the_same(loaded: GeneratorParts, tmp_path: Path) -> None:
    requests = [row(f"{i}", prompt="x" * i, max_tokens=1 + i % 4, temperature=float(i % 2)) for i in range(1, 8)]
    path = tmp_path / "in.jsonl"
    path.write_text("bad\n" + "".join(json.dumps(one) + "\n" for one in requests))
    rows = read_rows(path)
    generator = Generator(loaded.model, loaded.cache, loaded.tokenizer, max_batch_size=2)
    host = ModelInfo("tiny", loaded.tokenizer, 512, loaded.model.config.vocab_size)
    chance = random.Random(0)

    def finished(name: str, crash: int | None) -> dict[int, bytes]:
        """Run with a crash after every `crash` steps; returns the responses."""
        steps = itertools.count(1)

        def told(_: Progress) -> None:
            if crash is not None and next(steps) % crash == 0:
                raise PowerLost

        while True:
            journal = Journal(tmp_path / name, {}, 8, created=0)
            with closing(journal):
                try:
                    run_rows(rows, journal, generator, host, on_progress=told)
                    return {place: journal.answer(place) for place in journal.done}
                except PowerLost:
                    first = journal.path.read_bytes().index(b"\n") + 1
                    size = journal.path.stat().st_size
            os.truncate(tmp_path / name, max(first, size - chance.choice((0, 0, 0, 1, 100))))

    want = finished("whole", None)
    assert sorted(want) == list(range(8))
    for crash in range(6, 14):
        assert finished(f"torn-{crash}", crash) == want


def test_an_internal_error_affects_only_its_row(
    run: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raise_at_trip(request: Any) -> None:
        if request.prompt == "trip":
            raise KeyError("secret")

    before_each_request(monkeypatch, raise_at_trip)
    good, bad = run(row("a", prompt="x", max_tokens=2), row("b", prompt="trip"))
    assert texts(good)
    assert bad["response"]["status_code"] == 500
    assert "secret" not in json.dumps(bad)
    assert "Line 2 failed" in caplog.text


def test_tool_call_ids_are_the_same_in_every_run(run: Any, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": [{}]}}}
    asked = row(
        "a",
        CHAT,
        messages=[{"role": "user", "content": "x"}],
        tools=[tool],
        tool_choice="required",
        max_tokens=100,
    )
    first = run(asked)
    (tmp_path / "out.jsonl").unlink()
    second = run(asked)
    for one in (*first, *second):
        del one["response"]["body"]["created"]
    assert first == second
    assert first[0]["response"]["body"]["choices"][0]["message"]["tool_calls"][0]["id"].startswith("call_")
