"""Builds the documentation site: `python scripts/build_docs.py`, or `make docs`.

Pages that are made from other files join those of docs/ in build/docs: the root's ARCHITECTURE, CONTRIBUTING, CHANGELOG
and SECURITY, one page of all examples, and the reference of the command line. Zensical then renders them to build/site,
and every link, image and anchor of the result is checked. Nothing is fetched.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import typer.main
import yaml

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
ROOT_PAGES = {
    "ARCHITECTURE.md": "dev/architecture.md",
    "CHANGELOG.md": "dev/changelog.md",
    "CONTRIBUTING.md": "dev/contributing.md",
    "SECURITY.md": "dev/security.md",
    "tests/README.md": "dev/testing.md",
}
OTHER_PAGES = {**ROOT_PAGES, "README.md": "index.md", "examples": "examples.md"}  # by their paths in the repository
LINK = re.compile(r"\]\(([^)#\s:]+)(#[\w-]+)?\)")


def main() -> None:
    """Gather the pages, build the site, check it."""
    write_sources(BUILD / "docs")
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    missing = sorted(
        set(pages_in(config["nav"])) ^ {str(p.relative_to(BUILD / "docs")) for p in (BUILD / "docs").rglob("*.md")}
    )
    if missing:
        sys.exit(f"mkdocs.yml: nav and docs/ disagree about {', '.join(missing)}; give every page one entry")
    for plugin in config["plugins"]:
        if isinstance(plugin, dict) and "mkdocstrings" in plugin:
            plugin["mkdocstrings"]["handlers"]["python"]["paths"] = [str(ROOT / "src")]
    (BUILD / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    shutil.rmtree(BUILD / "site", ignore_errors=True)
    zensical = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", str(BUILD / "mkdocs.yml")]
    if subprocess.run(zensical, cwd=BUILD).returncode:
        sys.exit(1)  # zensical has printed the reason
    broken = list(broken_links(BUILD / "site"))
    if broken:
        sys.exit("Broken links:\n" + "\n".join(broken))
    print(f"{BUILD / 'site' / 'index.html'}")


def pages_in(nav: Any) -> Iterator[str]:
    """The paths in the navigation of mkdocs.yml."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, list):
        for entry in nav:
            yield from pages_in(entry)
    else:
        yield from pages_in(list(nav.values()))


def write_sources(folder: Path) -> None:
    """Copy docs/ to `folder` and add the generated pages."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder)
    sources = {str(path.relative_to(folder)): f"docs/{path.relative_to(folder)}" for path in folder.rglob("*.md")}
    for page, source in [*sources.items(), *((page, name) for name, page in ROOT_PAGES.items())]:
        text = (ROOT / source).read_text(encoding="utf-8")
        (folder / page).write_text(rewrite_links(text, source, page), encoding="utf-8")
    (folder / "examples.md").write_text(examples_page(), encoding="utf-8")
    (folder / "reference" / "cli.md").write_text(cli_page(), encoding="utf-8")


def rewrite_links(text: str, source: str, page: str) -> str:
    """Rewrite the links of the file `source` in the repository for its page in the site."""

    def target(found: re.Match[str]) -> str:
        linked = os.path.normpath(os.path.join(os.path.dirname(source), found[1]))
        if linked in OTHER_PAGES:
            linked_page = OTHER_PAGES[linked]
        elif linked.startswith("docs/"):
            linked_page = linked.removeprefix("docs/")
        else:
            return found[0]
        return f"]({os.path.relpath(linked_page, os.path.dirname(page) or '.')}{found[2] or ''})"

    return LINK.sub(target, text)


def examples_page() -> str:
    """Every program of examples/ under its docstring."""
    parts = [
        "# Examples\n\nThese are the programs of the repository's `examples/` folder. The test suite runs every one. "
        "Each takes a model's path or name as its first argument, and `--help` lists the others.\n"
    ]
    for path in sorted((ROOT / "examples").glob("*.py")):
        source = path.read_text(encoding="utf-8")
        title = path.stem.replace("_", " ").capitalize()
        code = source.split('"""', 2)[2].strip()
        parts.append(
            f"## {title}\n\n{ast.get_docstring(ast.parse(source))}\n\n"
            f'```python title="examples/{path.name}"\n{code}\n```\n'
        )
    return "\n".join(parts)


def cli_page() -> str:
    """Arguments and options of every command, from the commands themselves."""
    from exlm.cli.__main__ import app

    root: Any = typer.main.get_command(app)
    parts = [f"# Command line\n\n{root.help}\n\n`exlm COMMAND --help` shows the same in the terminal.\n"]
    for name, command in root.commands.items():
        with command.make_context(f"exlm {name}", [], resilient_parsing=True) as context:
            parts.append(command_section(f"exlm {name}", command, context))
    return "\n".join(parts)


def command_section(name: str, command: Any, context: Any) -> str:
    """One command: what it does, its usage, a table of its arguments and options."""
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    usage = " ".join(["[OPTIONS]", *(argument_name(one) for one in arguments)])
    rows = "\n".join(parameter_row(parameter, context) for parameter in command.params if not parameter.hidden)
    text = re.sub(r"\[/?(?:bold|dim)\]", "", command.help or "").replace("\b\n", "")
    return f"## {name}\n\n{text}\n\n```\n{name} {usage}\n```\n\n| | | default |\n|---|---|---|\n{rows}\n"


def argument_name(argument: Any) -> str:
    """The placeholder of a positional argument."""
    return str(argument.metavar or argument.name.upper())


def parameter_row(parameter: Any, context: Any) -> str:
    """A row of the table: names, help, default."""
    default = parameter.get_default(context, call=False)
    shown = "" if default in (None, False, ()) or callable(default) else f"`{default}`"
    if parameter.param_type_name == "argument":
        names = f"`{argument_name(parameter)}`"
    else:
        names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    return f"| {names} | {parameter.help or ''} | {shown} |".replace("\n", " ")


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record what the tag points to and how it can be pointed to."""
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def broken_links(site: Path) -> Iterator[str]:
    """Links of the built pages whose file or anchor does not exist; links to other hosts are not followed."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link.startswith("//"):
                continue
            target = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                yield f"{path.relative_to(site)}: {link}"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{path.relative_to(site)}: {link} (no such heading)"


if __name__ == "__main__":
    main()
