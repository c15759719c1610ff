"""A headless browser for tests of the web chat, and a model that answers what a test tells it to."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from exlm.serve.generation import FinishInfo, GenerationRequest, OutputDelta
from tests.serve.running_server import RunningServer

if TYPE_CHECKING:
    from playwright.sync_api import Page as Page
else:
    Page: TypeAlias = Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
COMPLAINTS = ("error", "warning")
DONE = ".message.assistant:last-child:not([aria-busy]) > footer .facts:not(:empty)"
"""The facts below an answer that is complete."""


@contextmanager
def opened(server: RunningServer, browser: Any, before: str = "", **options: Any) -> Iterator[Page]:
    """The chat in a fresh profile, after a script; fails if the page logs an error or asks another server."""
    with browser.new_context(**options) as context:
        page = context.new_page()
        page.add_init_script(before)
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: said.type in COMPLAINTS and complaints.append(said.text))
        page.on(
            "request",
            lambda asked: asked.url.startswith((server.url, "blob:")) or complaints.append(asked.url),
        )
        page.set_default_timeout(15_000)
        page.goto(server.url)
        page.wait_for_function("() => document.querySelector('#model').value")
        yield page
        expected = ("Failed to load resource",)  # logged by the browser itself for a refused request
        assert [one for one in complaints if not one.startswith(expected)] == []


@contextmanager
def browsing() -> Iterator[Any]:
    """Chromium; tests are skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with playwright.sync_playwright() as driver:
        found = next(filter(None, map(shutil.which, NAMES)), None)
        if found is None and not Path(driver.chromium.executable_path).exists():
            pytest.skip("needs a Chromium: install one, or run `playwright install chromium`")
        with driver.chromium.launch(executable_path=found) as browser:
            yield browser


def say(page: Page, text: str) -> None:
    """Type a message and send it."""
    page.fill("#draft", text)
    page.press("#draft", "Enter")


def told(page: Page, text: str) -> dict[str, Any]:
    """Send a message and wait for the answer; returns the request that was sent."""
    with page.expect_request("**/v1/chat/completions") as asked:
        say(page, text)
    page.wait_for_selector(DONE)
    body: dict[str, Any] = asked.value.post_data_json
    return body


def messages(page: Page) -> list[str]:
    """The texts on the page, without reasoning."""
    return [one.strip() for one in page.locator(".message .said, .message > .markdown").all_inner_texts()]


class Script:
    """Replaces a model's `submit`: streams a text in deltas; raises an exception among them."""

    def __init__(self) -> None:
        self.answers: list[str | Exception] = []
        self.pause = 0.0
        self.runs: list[Line] = []

    def __call__(self, request: GenerationRequest) -> Line:
        answer = self.answers.pop(0) if self.answers else "An answer."
        self.runs.append(Line(request, answer, self.pause))
        return self.runs[-1]


class Line:
    """One scripted answer: a `RequestStream` without jobs."""

    def __init__(self, request: GenerationRequest, answer: str | Exception, pause: float) -> None:
        self.request = request
        self.finishes: list[FinishInfo] = []
        self._answer, self._pause = answer, pause
        self._left = list(answer) if isinstance(answer, str) else ["c", "u", "t", answer]
        self.closed = False

    def token_counts(self) -> tuple[int, int, int]:
        return 40, 32, len(str(self._answer))

    async def wait_for_first(self, seconds: float) -> None:
        """Return at once."""

    async def next(self) -> tuple[int, OutputDelta]:
        await asyncio.sleep(self._pause)
        if not self._left:
            count = len(str(self._answer))
            self.finishes.append(FinishInfo("stop", 40, 32, count, 0, 0, (0.0, 0.1, count / 50)))
            return 0, OutputDelta(finish=self.finishes[-1])
        one = self._left.pop(0)
        if isinstance(one, Exception):
            raise one
        return 0, OutputDelta(one)

    def close(self) -> None:
        self.closed = True
