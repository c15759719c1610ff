"""Every Python block of every page runs, every link leads somewhere, and the lists are complete.

The blocks of a page run in order, in one namespace, as they stand; only the paths of `places` are replaced.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exlm import LLM, Completion, Config, Generator, Job, Settings, StreamingResult
from exlm.families import FAMILIES
from tests.conftest import ROOT
from tests.docs.path_substitutions import path_substitutions

DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([\w-]+))?\)")
MAX_LINE_LENGTH = 120


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> Iterator[tuple[int, str]]:
    """Each Python block and the line it begins on."""
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        yield text.count("\n", 0, found.start()) + 1, found[1]


def link_target_exists(page: Path, path: str, heading: str) -> bool:
    """Whether a file is there, and the heading in it that the link names, if it names one."""
    target = page.parent / path if path else page
    if not heading or not target.is_file():
        return target.exists()
    titles = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
    return heading in (re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles)


@pytest.fixture(scope="module")
def replaced(fixtures_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return path_substitutions(fixtures_dir, tmp_path_factory.mktemp("places"))


@pytest.mark.parametrize("page", [page for page in PAGES if BLOCK.search(page.read_text())], ids=page_name)
def test_a_page_runs(page: Path, replaced: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "page"}
    for line, source in blocks(page):
        for written, there in replaced.items():
            source = source.replace(f'"{written}"', f'"{there}"')
        code = compile("\n" * line + source, str(page), "exec")
        exec(code, namespace)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_resolve_and_lines_are_short(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in LINK.findall(text) if "://" not in link[0]]
    assert [link for link in links if not link_target_exists(page, *link)] == []
    wide = [line for line in text.splitlines() if len(line) > MAX_LINE_LENGTH and not line.startswith("|")]
    assert wide == []


def test_the_index_names_every_page() -> None:
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    missing = {page.name for page in DOCS.glob("*.md") if f"({page.name})" not in text}
    assert missing == {"index.md"}, "give the page a line in docs/index.md"


def test_the_navigation_names_every_page() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"^ +- ([\w/-]+\.md)$", navigation, re.MULTILINE))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    generated = {"dev/architecture.md", "dev/changelog.md", "dev/contributing.md", "dev/security.md", "dev/testing.md"}
    assert named == pages | generated | {"examples.md", "reference/cli.md"}


def arguments(call: Any) -> list[str]:
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = inspect.signature(call).parameters.values()
    return [one.name for one in parameters if one.name != "self" and one.kind not in kinds]


def options(config: Config) -> list[str]:
    return [field for field in vars(config) if not field.startswith("_")]


DOCUMENTED_NAMES = [
    ("sampling.md", [field.name for field in dataclasses.fields(Settings)]),
    ("configuration.md", options(Config())),
    ("models.md", list(FAMILIES)),
    ("llm.md", [*arguments(LLM.__init__), *arguments(LLM.generate), *arguments(LLM.chat)]),
    ("llm.md", [field.name for field in dataclasses.fields(Completion)]),
    ("generator.md", arguments(Generator.__init__)),
    ("completion.md", [*arguments(Generator.generate), *arguments(Job.__init__)]),
    ("streaming.md", list(StreamingResult.__annotations__)),
]


@pytest.mark.parametrize(("page", "names"), DOCUMENTED_NAMES, ids=[page for page, _ in DOCUMENTED_NAMES])
def test_a_page_names_everything(page: str, names: list[str]) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert [one for one in names if not re.search(rf"`[^`\n]*\b{re.escape(one)}\b[^`\n]*`", text)] == []


def test_every_llama_cpp_row_names_its_build() -> None:
    """A comparison with a llama.cpp built for AVX2 only flatters; a row must say which build it measured."""
    text = "".join((DOCS / page).read_text(encoding="utf-8") for page in ("performance.md", "dev/kernel-log.md"))
    rows = [line for line in text.splitlines() if line.startswith("| llama.cpp")]
    assert len(rows) >= 10
    assert [row for row in rows if not re.match(r"\| llama\.cpp \((AVX2 wheel|native)\)", row)] == []
    assert "docs/performance.md#which-llamacpp" in (ROOT / "README.md").read_text(encoding="utf-8")
