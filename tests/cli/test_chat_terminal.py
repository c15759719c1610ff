"""`exlm chat` on a terminal, with Ctrl-C at every moment."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from exlm import Settings
from exlm.cli.chat import Chat
from exlm.cli.conversation import Conversation
from exlm.cli.input import MessageReader, SigintHandler
from exlm.cli.model_session import ModelSession
from tests import tiny
from tests.cli.pty_driver import STEP
from tests.conftest import ROOT

CTRL_C = "\x03"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_chat_folder(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


class EndlessSession(ModelSession):
    """A model whose answers end only at their token limit."""

    @property
    def stop_conditions(self) -> list[int | str]:
        return []


@pytest.fixture(scope="module")
def session(folder: Path) -> ModelSession:
    session = EndlessSession.open(str(folder), max_seq_len=None, device=None, dtype=None, quiet=True)
    session.load(1, 511)
    return session


class ScriptedReader(MessageReader):
    """A reader that returns these messages; None is a Ctrl-C in the middle of a line."""

    def __init__(self, *messages: str | None) -> None:
        super().__init__()
        self.messages = list(messages)

    def read(self) -> str | None:
        if not self.messages:
            return None
        if (text := self.messages.pop(0)) is None:
            signal.raise_signal(signal.SIGINT)
        return text


def chat_of(session: ModelSession, *messages: str | None, **options: Any) -> Chat:
    conversation = Conversation(Settings.greedy(), **{"max_new_tokens": 400, **options})
    return Chat(session, conversation, ScriptedReader(*messages), stats=False, quiet=True)


@contextmanager
def sigint_at_steps(session: ModelSession, monkeypatch: pytest.MonkeyPatch, *steps: int) -> Iterator[list[int]]:
    """Press Ctrl-C just before these steps of the generator; returns the number of steps made."""
    steps_made: list[int] = []
    generator: Any = session.generator
    original = generator.iterate

    def iterate() -> Any:
        steps_made.append(len(steps_made))
        if steps_made[-1] in steps:
            signal.raise_signal(signal.SIGINT)
        return original()

    with monkeypatch.context() as patch:
        patch.setattr(generator, "iterate", iterate)
        yield steps_made
    assert generator.num_remaining_jobs() == 0


def test_ctrl_c_ends_an_answer_within_a_step(
    session: ModelSession, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    chat = chat_of(session, "Hi", "/set max_new_tokens 3", "And now?")
    with sigint_at_steps(session, monkeypatch, 7) as steps_made:
        chat.run()
    first, second = chat.conversation.turns
    assert first.assistant
    assert second.assistant  # the program continued
    assert 8 < len(steps_made) < 16
    assert capfd.readouterr().err.count("(stopped)") == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_before_the_first_step(session: ModelSession, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = chat_of(session, "Hi", "/quit")
    with sigint_at_steps(session, monkeypatch, 0) as steps_made:
        chat.run()
    assert len(steps_made) == 1


def test_repeated_ctrl_c_stops_one_answer(session: ModelSession, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = chat_of(session, "Hi", "Again", "/quit", max_new_tokens=5)
    original = Chat._note

    def note(self: Chat, text: str) -> None:
        for _ in range(3):  # also outside of generating and typing
            signal.raise_signal(signal.SIGINT)
        original(self, text)

    monkeypatch.setattr(Chat, "_note", note)
    with sigint_at_steps(session, monkeypatch, 3, 4):
        chat.run()
    # The signals that arrive while "(stopped)" is printed count at the prompt: twice.
    assert len(chat.conversation.turns) == 1
    assert chat.leaving is False


def test_ctrl_c_at_the_prompt_drops_the_line_and_twice_leaves(
    session: ModelSession, capfd: pytest.CaptureFixture[str]
) -> None:
    chat = chat_of(session, None, "Hi", None, None, "never", max_new_tokens=3)
    chat.run()
    assert [turn.user for turn in chat.conversation.turns] == ["Hi"]
    assert capfd.readouterr().err.count("(Ctrl-C once more leaves)") == 2


def test_an_interrupt_between_typing_and_answering_is_not_lost() -> None:
    handler = SigintHandler()
    with handler.installed():
        signal.raise_signal(signal.SIGINT)
        assert handler.stop_requested
        with pytest.raises(KeyboardInterrupt), handler.typing():
            pytest.fail("the stop was requested before")
        with handler.typing():
            pass
        assert not handler.take_request()
        with pytest.raises(KeyboardInterrupt), handler.typing():
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert handler.take_request()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


class Terminal:
    """The test's end of a pseudo-terminal."""

    def __init__(self, handle: int) -> None:
        self.handle, self.shown = handle, ""

    def expect(self, pattern: str, seconds: float = 60) -> None:
        """Read until a text is shown, and discard everything up to it."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.shown)):
            left = deadline - time.monotonic()
            assert left > 0, f"{pattern!r} is not in {self.shown!r}"
            if select.select([self.handle], [], [], left)[0]:
                self.shown += os.read(self.handle, 4096).decode(errors="replace")
        self.shown = self.shown[found.end() :]

    def send(self, text: str) -> None:
        os.write(self.handle, text.encode())


@contextmanager
def running_chat(folder: Path, cache: Path) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    """`exlm chat` on a terminal, past its greeting; every token takes a while and prints a mark."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "tests.cli.pty_driver", os.ttyname(slave)]
    command += ["chat", str(folder), "--context", "1024"]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "TERM": "dumb",
        "EXLM_CACHE": str(cache),
        "EXLM_CPU": "0",  # nothing to compile for an empty cache
    }
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True) as process:
        try:
            terminal = Terminal(master)
            terminal.expect("it leaves")
            yield terminal, process
        finally:
            process.kill()
            os.close(slave)
            os.close(master)


def test_on_a_terminal(folder: Path, tmp_path: Path) -> None:
    """Two pasted lines are one message; Ctrl-C stops an answer, drops a line or leaves; history is kept."""
    with running_chat(folder, tmp_path) as (terminal, process):

        def say(text: str) -> None:
            terminal.expect("> ")
            terminal.send(text)

        say("/set max_new_tokens 3\r")
        say("Two\\\r")
        terminal.expect(r"\. ")
        terminal.send("lines\r")
        say("/set max_new_tokens 900\r")
        for message in ("Hello\r", "Still there?\r"):
            say(message)
            for _ in range(4):
                terminal.expect(re.escape(STEP))
            terminal.send(CTRL_C)
            terminal.expect(r"\(stopped\)")
        say("half a line")
        terminal.expect("half a line")
        terminal.send(CTRL_C)
        terminal.expect("once more leaves")
        say("/system\r")
        terminal.expect("no system message")
        say(CTRL_C)  # as soon as possible
        terminal.expect("once more leaves")
        say(CTRL_C)
        assert process.wait(30) == 0
    history = tmp_path / "chat-history.jsonl"
    assert history.stat().st_mode & 0o077 == 0
    assert [json.loads(line) for line in history.read_text().splitlines()] == [
        "/set max_new_tokens 3",
        "Two\nlines",
        "/set max_new_tokens 900",
        "Hello",
        "Still there?",
        "/system",
    ]
