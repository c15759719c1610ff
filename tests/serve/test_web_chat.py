"""The web chat in a headless browser: what people do with it, and what can go wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from exlm.serve.errors import APIError, too_many_requests
from tests.serve.browser import DONE, Page, Script, browsing, messages, opened, say, told
from tests.serve.running_server import RunningServer

Open = Callable[..., Page]
KEPT = """() => Object.entries(localStorage)
  .filter(([key]) => key.startsWith("exlm.chat."))
  .map(([, text]) => JSON.parse(text))"""


@pytest.fixture
def script(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()
    monkeypatch.setattr(server.engine.models["tiny"], "submit", script)
    return script


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing() as browser:
        yield browser


@pytest.fixture
def open_page(server: RunningServer, browser: Any) -> Iterator[Open]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(opened(server, browser, **options))


@pytest.fixture
def page(open_page: Open, script: Script) -> Page:
    return open_page()


def test_an_answer(page: Page, script: Script) -> None:
    script.answers = ["**Bold**\n\n- one\n- two\n\n```py\nx = 1\n```"]
    body = told(page, "Hello\nthere")
    assert body["messages"] == [{"role": "user", "content": "Hello\nthere"}]
    assert body["stream_options"] == {"include_usage": True}
    assert body.keys() == {"messages", "model", "stream", "stream_options"}
    answer = page.locator(".assistant .markdown")
    assert answer.locator("strong").inner_text() == "Bold"
    assert answer.locator("li").all_inner_texts() == ["one", "two"]
    assert answer.locator("pre code").inner_text() == "x = 1"
    facts = page.inner_text(DONE)
    assert "50.0 tokens/s" in facts
    assert "prompt 40, 32 cached" in facts
    assert page.inner_text("#status") == "The answer is complete."
    page.reload()
    page.wait_for_selector("#list .name")
    page.click("#list .name")
    assert page.inner_text(DONE) == facts
    assert page.locator(".assistant pre code").inner_text() == "x = 1"


def test_a_real_model_answers(open_page: Open, server: RunningServer) -> None:
    page = open_page()
    page.click("#open-setup")
    page.fill("#set-temperature", "0")
    page.fill("#set-max_tokens", "8")
    body = told(page, "Hello")
    _, reply = server.post("/v1/chat/completions", **{**body, "stream": False, "stream_options": None})
    assert f" {reply['usage']['completion_tokens']} tokens" in page.inner_text(DONE)
    told(page, "Hello again")
    assert " cached" in page.inner_text(DONE)


def test_copying_code(open_page: Open, script: Script) -> None:
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    script.answers = ["```\na\n  b\n```"]
    told(page, "code")
    page.click(".code button")
    assert page.evaluate("navigator.clipboard.readText()") == "a\n  b"


def test_stopping_keeps_what_was_said(page: Page, script: Script) -> None:
    script.answers, script.pause = ["word " * 1000], 0.01
    say(page, "Go on")
    page.wait_for_function("() => document.querySelector('.assistant .markdown')?.textContent.length > 20")
    assert page.get_attribute("#send", "aria-label") == "Stop"
    page.keyboard.type("ahead")
    page.keyboard.press("Enter")
    assert page.input_value("#draft") == "ahead"
    page.keyboard.press("Escape")
    page.wait_for_selector(DONE)
    assert "stopped" in page.inner_text(DONE)
    assert page.get_attribute("#send", "aria-label") == "Send"
    assert messages(page)[1].startswith("word word")
    for _ in range(100):
        if script.runs[0].closed:
            break
        page.wait_for_timeout(20)
    assert script.runs[0].closed
    script.pause = 0
    assert [one["role"] for one in told(page, "And?")["messages"]] == ["user", "assistant", "user"]


def test_answering_again_keeps_both(page: Page, script: Script) -> None:
    script.answers = ["First.", "Second.", "Third."]
    told(page, "Hello")
    page.click(".assistant [aria-label='Answer again']")
    page.wait_for_selector(".count:text('2 / 2')")
    page.wait_for_selector(DONE)
    assert messages(page) == ["Hello", "Second."]
    page.click("[aria-label='The one before']")
    assert messages(page) == ["Hello", "First."]
    assert page.inner_text(".count") == "1 / 2"
    assert [one["content"] for one in told(page, "More")["messages"]] == ["Hello", "First.", "More"]


def test_editing_makes_a_branch(page: Page, script: Script) -> None:
    script.answers = ["One.", "Two.", "Three."]
    told(page, "a")
    told(page, "b")
    page.hover(".user >> nth=0")
    page.click(".user [aria-label='Edit, and go on from here'] >> nth=0")
    page.keyboard.press("Escape")
    assert messages(page) == ["a", "One.", "b", "Two."]
    page.click(".user [aria-label='Edit, and go on from here'] >> nth=0")
    page.fill(".edit textarea", "c")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.press(".edit textarea", "Enter")
    page.wait_for_selector(DONE)
    assert asked.value.post_data_json["messages"] == [{"role": "user", "content": "c"}]
    assert messages(page) == ["c", "Three."]
    page.click(".user [aria-label='The one before']")
    assert messages(page) == ["a", "One.", "b", "Two."]


def test_settings_go_along(page: Page) -> None:
    page.click("#open-setup")
    values = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1}
    values |= {"max_tokens": 20, "seed": 7, "frequency_penalty": -0.5, "dry_multiplier": 0.8}
    assert page.locator("#set-dry_multiplier").is_hidden()
    page.click("#sampling summary")
    for name, value in values.items():
        page.fill(f"#set-{name}", str(value))
    page.fill("#set-stop", "END\n\\n\\n")
    page.fill("#system", "Be brief.")
    body = told(page, "Hello")
    assert {name: body[name] for name in values} == values
    assert body["stop"] == ["END", "\n\n"]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    page.fill("#set-top_p", "7")
    page.fill("#set-top_k", "1.5")
    assert page.get_attribute("#set-top_p", "aria-invalid") == "true"
    body = told(page, "again")
    assert "top_p" not in body
    assert "top_k" not in body
    page.reload()
    page.click("#open-setup")
    assert page.input_value("#set-temperature") == "0.7"
    assert page.locator("#set-dry_multiplier").is_visible()
    assert page.input_value("#system") == "Be brief."
    page.click("text=Use the server's settings")
    assert told(page, "plain").keys() == {"messages", "model", "stream", "stream_options"}


def test_thoughts_are_folded(page: Page, script: Script) -> None:
    script.answers = ["<think>Let me *see*.</think>It is so."]
    told(page, "Why?")
    assert messages(page)[-1] == "It is so."
    assert page.locator(".thought .markdown").is_hidden()
    page.click(".thought summary")
    assert page.locator(".thought em").inner_text() == "see"
    assert told(page, "More")["messages"][1]["content"] == "It is so."


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (APIError(503, "The model went home."), "The model went home."),
        (too_many_requests("Too much is under way."), "Too much is under way."),
        (RuntimeError("x"), "The server failed: RuntimeError. Its log says more."),
    ],
)
def test_a_failure_in_words_and_again(page: Page, script: Script, problem: Exception, words: str) -> None:
    script.answers = [problem, "Now it works."]
    say(page, "Hello")
    assert page.inner_text(".failure p") == words
    assert words in page.inner_text("#status")
    page.click("text=Try again")
    page.wait_for_selector(DONE)
    assert messages(page)[-1] == "Now it works."
    assert page.locator(".failure").count() == 0


def test_a_refusal_before_the_first_word(page: Page, script: Script) -> None:
    page.click("#open-setup")
    page.fill("#set-max_tokens", "100000")
    say(page, "Hello")
    page.wait_for_selector(".failure p")
    assert "exceed the context of 2048" in page.inner_text(".failure p")
    page.fill("#set-max_tokens", "")
    page.click("text=Try again")
    page.wait_for_selector(DONE)
    assert messages(page) == ["Hello", "An answer."]
    assert page.locator(".count").count() == 0


def test_a_server_that_is_gone(page: Page) -> None:
    page.route("**/v1/**", lambda route: route.abort())
    say(page, "Hello")
    assert page.inner_text(".failure p") == "The server cannot be reached. Is it still running?"
    page.unroute("**/v1/**")
    page.route("**/v1/**", lambda route: route.fulfill(status=502, body="<html>", content_type="text/html"))
    page.click("text=Try again")
    assert "502" in page.inner_text(".failure p")
    page.unroute("**/v1/**")
    cut = 'data: {"choices":[{"index":0,"delta":{"content":"half"},"finish_reason":null}]}\n\n'
    page.route("**/v1/**", lambda route: route.fulfill(body=cut, content_type="text/event-stream"))
    page.click("text=Try again")
    page.wait_for_selector(".failure p:has-text('broke off')")
    assert "half" in messages(page)[-1]


def test_conversations(page: Page, script: Script, tmp_path: Path) -> None:
    for name in ("apples", "pears", "plums"):
        page.click("#new")
        told(page, name)
    names = page.locator("#list .name")
    assert names.all_inner_texts() == ["plums", "pears", "apples"]
    page.keyboard.press("Control+k")
    page.keyboard.type("pe")
    assert names.all_inner_texts() == ["pears"]
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert messages(page)[0] == "pears"
    page.fill("#filter", "")
    page.hover("#list li.here")
    page.click("[aria-label='Rename pears']")
    page.keyboard.type("quinces")
    page.keyboard.press("Enter")
    assert names.all_inner_texts() == ["plums", "quinces", "apples"]
    with page.expect_download() as download:
        page.click("#export")
    download.value.save_as(tmp_path / "chats.json")
    page.hover("#list li.here")
    page.click("[aria-label='Delete quinces']")
    assert names.all_inner_texts() == ["plums", "apples"]
    assert page.locator(".message").count() == 0
    page.click("text=Undo")
    assert names.all_inner_texts() == ["plums", "quinces", "apples"]
    page.evaluate("localStorage.clear()")
    page.reload()
    page.wait_for_function("() => document.querySelector('#model').value")
    assert names.count() == 0
    page.set_input_files("#import", tmp_path / "chats.json")
    page.wait_for_selector("#notice:has-text('3 of 3 imported.')")
    assert sorted(names.all_inner_texts()) == ["apples", "plums", "quinces"]
    page.click("#list .name >> nth=0")
    assert len(messages(page)) == 2


def test_junk_in_storage_breaks_nothing(page: Page, script: Script) -> None:
    told(page, "kept")
    good = page.evaluate(KEPT)[0]
    loop = {**good, "id": "loop", "messages": [{**good["messages"][0], "parent": 0}]}
    junk = {
        "exlm.chat.a": "{", "exlm.chat.b": "null", "exlm.chat.c": "[]", "exlm.chat.d": '{"id": "d"}',
        "exlm.chat.loop": json.dumps(loop), "exlm.chat.other": json.dumps(good),
        "exlm.chat.at": json.dumps({**good, "id": "at", "title": 7, "at": 99, "system": None}),
        "exlm.env": '[{"temperature": "hot"}', "exlm.theme": "}", "something": "else",
    }  # fmt: skip
    page.evaluate("(junk) => Object.entries(junk).forEach((one) => localStorage.setItem(...one))", junk)
    page.reload()
    page.wait_for_selector("#list .name")
    assert sorted(page.locator("#list .name").all_inner_texts()) == ["New chat", "kept"]
    assert "6 of the conversations kept here cannot be read, and were left alone" in page.inner_text("#notice")
    told(page, "goes on")
    assert page.evaluate("localStorage.getItem('exlm.chat.a')") == "{"
    page.set_input_files("#import", {"name": "x.json", "mimeType": "application/json", "buffer": b'{"chats": [3]}'})
    page.wait_for_selector("#notice:has-text('no conversations')")


def test_no_room_and_no_storage(open_page: Open, script: Script) -> None:
    page = open_page()
    page.evaluate("() => { Storage.prototype.setItem = () => { throw new DOMException('full'); }; }")
    told(page, "Hello")
    assert "no room left" in page.inner_text("#notice")
    page = open_page(before="Object.defineProperty(window, 'localStorage', { get() { throw new Error('no'); } })")
    told(page, "Hello")
    assert page.locator("#list .name").all_inner_texts() == ["Hello"]


def test_two_conversations_answer_at_once(page: Page, script: Script) -> None:
    script.answers, script.pause = ["slow " * 60, "quick"], 0.005
    say(page, "first")
    page.wait_for_selector(".assistant .markdown:not(:empty)")
    page.click("#new")
    told(page, "second")
    assert messages(page) == ["second", "quick"]
    page.click("#list .name:text('first')")
    page.wait_for_selector(DONE)
    assert messages(page) == ["first", ("slow " * 60).strip()]
    kept = {chat["title"]: chat["messages"][-1]["text"] for chat in page.evaluate(KEPT)}
    assert kept == {"first": "slow " * 60, "second": "quick"}


def test_another_window(open_page: Open, script: Script) -> None:
    page = open_page()
    told(page, "Hello")
    other = page.context.new_page()
    other.goto(page.url)
    other.click("#list .name")
    assert messages(other) == ["Hello", "An answer."]
    told(other, "More")
    page.wait_for_function("() => document.querySelectorAll('.message').length === 4")


def test_keys_on_the_keyboard(page: Page) -> None:
    page.fill("#draft", "")
    page.focus("#draft")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.input_value("#draft") == "one\ntwo"
    page.keyboard.press("Enter")
    page.wait_for_selector(DONE)
    assert messages(page)[0] == "one\ntwo"
    page.focus("#open-live")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "draft"
    assert page.input_value("#draft") == ""
    page.keyboard.press("Enter")
    assert len(messages(page)) == 2
