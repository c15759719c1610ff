"""The web chat's looks and doors, in a headless browser: live view, themes, narrow windows, names, keys."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exlm.serve import ApiKeys, Options
from tests.serve.browser import DONE, Script, browsing, opened, told
from tests.serve.running_server import RunningServer, preloaded, running_server, slow_decode


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing() as browser:
        yield browser


def test_the_live_view_asks_only_while_open(server: RunningServer, browser: Any) -> None:
    with opened(server, browser) as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url) if "state" in request.url else None)
        page.wait_for_timeout(200)
        assert not asked
        body = {"prompt": "a" * 300, "max_tokens": 200, "min_tokens": 200}
        with slow_decode(server, lambda: time.sleep(0.005)):
            work = threading.Thread(target=server.post, args=["/v1/completions"], kwargs=body)
            work.start()
            page.click("#open-live")
            page.wait_for_selector(".jobs progress")
            assert page.locator("#live h4").first.inner_text().startswith("Batch · 1")
            assert page.get_attribute("canvas", "aria-label") == page.inner_text("article .facts")
            page.wait_for_function("() => document.querySelectorAll('.jobs li').length === 0")
            work.join()
        assert "0 of 16 pages in use" in page.inner_text("article .facts")
        assert "0 requests under way" in page.inner_text("#live > .facts")
        page.click("#close-panel")
        page.wait_for_timeout(100)
        count = len(asked)
        assert count > 1
        page.wait_for_timeout(1000)
        assert len(asked) == count


def test_light_and_dark(server: RunningServer, browser: Any) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    with opened(server, browser, color_scheme="dark") as page:
        dark = page.evaluate(ground)
        page.click("#theme")
        light = page.evaluate(ground)
        assert dark != light
        page.reload()
        assert page.evaluate(ground) == light
        page.click("#theme")
        assert page.evaluate(ground) == dark
        page.emulate_media(color_scheme="light")
        assert page.evaluate(ground) == light


def test_a_phone(server: RunningServer, browser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(server, browser, viewport={"width": 360, "height": 640}, has_touch=True) as page:
        script = Script()
        script.answers = [f"|a|b|\n|-|-|\n|{'wide' * 40}|x|\n\n```\n{'long ' * 80}\n```\n{'w' * 300}"]
        monkeypatch.setattr(server.engine.models["tiny"], "submit", script)
        told(page, "q" * 200)
        for wide in ("html", "#scroll"):
            assert page.evaluate("(one) => document.querySelector(one).scrollWidth <= 360", wide)
        assert page.locator("#chats").is_hidden()
        page.click("#open-chats")
        assert page.locator("#chats").is_visible()
        assert page.evaluate("document.querySelector('main').inert")
        page.keyboard.press("Escape")
        assert page.locator("#chats").is_hidden()
        page.click("#open-setup")
        page.click("#scrim", position={"x": 5, "y": 300})
        assert page.locator("#panel").is_hidden()
        assert not page.evaluate("document.querySelector('main').inert")


def test_controls_have_names(server: RunningServer, browser: Any) -> None:
    with opened(server, browser) as page:
        told(page, "Hello")
        page.click("#open-setup")
        nameless = page.evaluate(
            """() => [...document.querySelectorAll("button, input, select, textarea")]
              .filter((one) => !(one.ariaLabel || one.textContent.trim() || one.labels?.length))
              .map((one) => one.outerHTML)"""
        )
        assert nameless == []


def test_with_a_key(chatty: Path, browser: Any) -> None:
    with running_server(preloaded(chatty), Options(api_keys=ApiKeys(["sk-web"]))) as server:
        assert "Basic" in server.ask("GET", "/")[2]["www-authenticate"]
        known = {"username": "me", "password": "sk-web"}
        with opened(server, browser, http_credentials=known) as page:
            page.click("#open-setup")
            page.fill("#set-max_tokens", "3")
            told(page, "Hello")
            assert " tokens/s" in page.inner_text(DONE)
