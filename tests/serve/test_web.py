"""The web chat's files: content types, headers, and no references to other servers."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import exlm.serve
from exlm.serve import ChatRequest
from exlm.serve.app import SAMPLER_SETTINGS_SCRIPT
from exlm.serve.schema import sampler_settings_script
from tests.serve.running_server import RunningServer

WEB_FOLDER = Path(exlm.serve.__file__).with_name("web")
FILES = sorted(
    path.relative_to(WEB_FOLDER).as_posix() for path in WEB_FOLDER.rglob("*") if path.suffix not in ("", ".txt")
)
OWN = [name for name in FILES if not name.startswith("vendor/")]
SCRIPTS = [name for name in OWN if name.endswith(".js")]
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}


class Page(HTMLParser):
    """What index.html is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and data.strip():
            self.texts.append((self.tags[-1][0], data))


@pytest.fixture(scope="module")
def page() -> Page:
    page = Page()
    page.feed((WEB_FOLDER / "index.html").read_text())
    return page


def test_every_file_is_served_with_its_type(server: RunningServer) -> None:
    for path in ["/", *(f"/{name}" for name in FILES)]:
        status, _, headers = server.ask("GET", path)
        assert status == 200
        assert headers["content-type"].split(";")[0] == TYPES[Path(path).suffix or ".html"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-cache"


def test_pages_may_do_nothing_but_ask_their_server(server: RunningServer) -> None:
    policy = server.ask("GET", "/")[2]["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules.pop("require-trusted-types-for") == "'script'"
    assert {*rules.values()} == {"'none'", "'self'"}
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert "content-security-policy" not in server.ask("GET", "/v1/models")[2]


@pytest.mark.parametrize("path", ["/../app.py", "/..%2fapp.py", "/web/index.html", "/nothing.js", "/%00", "/a/b"])
def test_nothing_else_is_served(server: RunningServer, path: str) -> None:
    assert server.ask("GET", path)[0] == 404


def test_routes_that_are_not_there_are_named(server: RunningServer) -> None:
    """The pages are mounted at `/` and would answer for everything, each method in its own wrong way."""
    for method in ("GET", "POST"):
        status, reply, _ = server.ask(method, "/v1/responses", None if method == "GET" else {})
        assert (status, reply["error"]["type"]) == (404, "not_found_error")
        assert "/v1/responses" in reply["error"]["message"]
    status, reply, headers = server.ask("GET", "/v1/chat/completions")
    assert (status, headers["allow"]) == (405, "POST")
    assert reply["error"]["message"] == "/v1/chat/completions takes POST, not GET."
    assert server.ask("DELETE", "/v1/models")[0] == 405


def test_a_file_that_has_not_changed_is_not_sent_again(server: RunningServer) -> None:
    first = server.ask("GET", "/main.js")[2]
    status, text, headers = server.ask("GET", "/main.js", **{"If-None-Match": first["etag"]})
    assert (status, text) == (304, "")
    assert "content-security-policy" in headers


@pytest.mark.parametrize("name", OWN)
def test_nothing_comes_from_elsewhere(name: str) -> None:
    text = (WEB_FOLDER / name).read_text()
    namespaces = text.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://\w|url\(|@import|\bsrcset\b|(?:src|href)=[\"']//", namespaces)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_read_no_text_as_code(name: str) -> None:
    text = (WEB_FOLDER / name).read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)
    for found in re.findall(r'from "(.*?)"', text):
        assert (WEB_FOLDER / found).is_file() or found == f"./{SAMPLER_SETTINGS_SCRIPT}"


def test_vendored_files_are_listed_small_and_complete() -> None:
    """Each with its version and licence; together at most 1 MB; style sheets ask for nothing else."""
    vendored = [name.removeprefix("vendor/") for name in FILES if name.startswith("vendor/")]
    listed = (WEB_FOLDER / "vendor" / "VENDORED.txt").read_text()
    assert not [name for name in vendored if name.partition("/")[0] not in listed]
    assert sum((WEB_FOLDER / "vendor" / name).stat().st_size for name in vendored) <= 1_000_000
    for name in vendored:
        if name.endswith(".css"):
            asked = re.findall(r"url\((.*?)\)", (WEB_FOLDER / "vendor" / name).read_text())
            assert asked
            assert all((WEB_FOLDER / "vendor" / one).is_file() for one in asked)


def test_scripts_are_few_and_short() -> None:
    lines = {name: len((WEB_FOLDER / name).read_text().splitlines()) for name in SCRIPTS}
    assert max(lines.values()) <= 400
    assert sum(lines.values()) <= 1600


def test_every_setting_of_the_panel_is_one_of_the_server() -> None:
    panel = json.loads(sampler_settings_script().removeprefix("export const SAMPLER_SETTINGS = ").rstrip(";\n"))
    shown = re.findall(r'\{ name: "(\w+)"', (WEB_FOLDER / "settings.js").read_text())
    shown += [field["name"] for field in panel]
    assert len(shown) > 10
    assert {*shown} <= ChatRequest.model_fields.keys()
    assert {"temperature", "top_k", "repetition_penalty", "seed"} <= {*shown}
    for field in panel:
        for value in (field["min"], field["max"]):
            ChatRequest(messages=[{"role": "user", "content": "hi"}], **{field["name"]: value})


def test_the_script_of_the_panel_is_served(server: RunningServer) -> None:
    status, text, headers = server.ask("GET", f"/{SAMPLER_SETTINGS_SCRIPT}")
    assert (status, text) == (200, sampler_settings_script())
    assert headers["content-type"].split(";")[0] == "text/javascript"
    assert "content-security-policy" in headers


def test_the_page_has_nothing_inline(page: Page) -> None:
    assert not [attrs for _, attrs in page.tags if any(name == "style" or name.startswith("on") for name in attrs)]
    assert not [tag for tag, text in page.texts if tag in ("script", "style")]
    for tag, attrs in page.tags:
        for name in ("src", "href"):
            if name in attrs and tag != "use":
                assert (WEB_FOLDER / (attrs[name] or "")).is_file()


def test_every_control_of_the_page_has_a_name(page: Page) -> None:
    labelled = {attrs.get("for") for tag, attrs in page.tags if tag == "label"}
    for tag, attrs in page.tags:
        if tag in ("input", "select", "textarea"):
            assert "aria-label" in attrs or attrs.get("id") in labelled, attrs
        if tag == "button" and "icon" in (attrs.get("class") or ""):
            assert attrs["aria-label"] == attrs["title"].split(" (")[0]  # type: ignore[union-attr]
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len({*ids})


def test_every_symbol_is_there(page: Page) -> None:
    symbols = {attrs["id"] for tag, attrs in page.tags if tag == "symbol"}
    used = {(attrs["href"] or "")[1:] for tag, attrs in page.tags if tag == "use"}
    for name in SCRIPTS:
        text = (WEB_FOLDER / name).read_text()
        used |= {f"i-{one}" for one in re.findall(r'(?:\bicon|iconButton|turn)\("(\w+)"', text)}
    assert used == symbols
