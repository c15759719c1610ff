"""Rename words of C, CUDA and Python by a table: `python scripts/renames/words.py [--check] TABLE...`.

For what a language server does not know: C has none here, and a Python local that many functions share has
no symbol of its own. A table has one entry a line; sections say where its entries hold:

    [src/exlm/kernels/cuda/csrc/*.cu tests/*.h]     these files (globs from the root)
    [src/exlm/kernels/cuda/csrc/*.h @ LayoutRow]    in them, the body of this function or struct
    old -> new            a whole identifier, outside comments and strings; never behind `.` or `->` in Python
    old => new            the same, also where `new` is a name in these files already (of another scope)
    .old -> .new          only behind `.` or `->`
    "old" -> "new"        a string literal
    prose: text -> text   inside comments, docstrings and other strings, as it stands there

All entries of a section are applied at once, so names can be exchanged. An entry that names nothing, and a
new name that stands in one of the files already, are errors: nothing is written then. Sections are applied
one after the other.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
C_TOKEN = re.compile(
    r"(?P<other>//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')"
    r"|(?P<name>[A-Za-z_]\w*)|(?P<number>\d[\w.]*)",
    re.DOTALL,
)
PY_TOKEN = re.compile(
    r"(?P<other>#[^\n]*|[rRbBuUfF]{0,2}(?:\"\"\".*?\"\"\"|'''.*?'''|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'))"
    r"|(?P<name>[A-Za-z_]\w*)|(?P<number>\d[\w.]*)",
    re.DOTALL,
)
FIELD = re.compile(r"(?<!\{)\{(?!\{)([^{}\"']*)\}")


@dataclass
class Section:
    """Files, a scope in them, and what changes there."""

    line: str
    files: list[Path]
    scope: str | None
    names: dict[str, str] = field(default_factory=dict)
    members: dict[str, str] = field(default_factory=dict)
    strings: dict[str, str] = field(default_factory=dict)
    prose: list[tuple[str, str]] = field(default_factory=list)
    shared: set[str] = field(default_factory=set)  # new names that may stand there already
    used: set[str] = field(default_factory=set)


def read(path: Path) -> list[Section]:
    """The sections of a table."""
    sections: list[Section] = []
    for number, raw in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        line = raw.split(" # ")[0].strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            globs, _, scope = line.strip("[]").partition("@")
            files = sorted({file for glob in globs.split() for file in ROOT.glob(glob)})
            if not files:
                raise SystemExit(f"{path}:{number}: no such files: {line}")
            sections.append(Section(f"{path.name}:{number}", files, scope.strip() or None))
            continue
        section = sections[-1]
        if line.startswith("prose:"):
            old, arrow, new = line.removeprefix("prose:").strip().partition(" -> ")
            section.prose.append((old, new))
        else:
            old, arrow, new = re.fullmatch(r"(\S+) (->|=>) (\S+)", line).groups()  # type: ignore[union-attr]
            target = section.members if old[0] == "." else section.strings if old[0] == '"' else section.names
            if old.strip('".') in target:
                raise SystemExit(f"{path}:{number}: {old} a second time")
            target[old.strip('".')] = new.strip('".')
            if arrow == "=>":
                section.shared.add(new)
    return sections


def scope_span(text: str, name: str) -> list[tuple[int, int]]:
    """Where functions or structs of a name are defined, from the name to the end of the body."""
    spans = []
    python = re.compile(rf"^([ \t]*)(?:def|class) {name}\b.*?(?=^\1[^\s)]|\Z)", re.MULTILINE | re.DOTALL)
    for found in python.finditer(text):
        spans.append(found.span())
    for found in re.finditer(rf"\b{name}\b", text):
        at, depth = found.end(), 0
        while at < len(text) and (depth or text[at] not in ";{,)=.+-*/"):  # up to the body: arguments are in ()
            depth += (text[at] in "(<") - (text[at] in ")>")
            at += 1
        if at < len(text) and text[at] == "{":
            depth = 1
            while depth:
                at += 1
                depth += (text[at] == "{") - (text[at] == "}")
            spans.append((found.start(), at + 1))
    return [one for one in spans if not any(o[0] < one[0] and one[1] <= o[1] for o in spans)]


def renamed(text: str, section: Section, file: Path) -> str:
    """The text in the new names."""
    python = file.suffix == ".py"
    pattern = PY_TOKEN if python else C_TOKEN

    def prose(part: str) -> str:
        for old, new in section.prose:
            if old in part:
                section.used.add(old)
                part = part.replace(old, new)
        return part

    def replace(match: re.Match[str]) -> str:
        part = match[0]
        if match["other"]:
            quoted = re.fullmatch(r"([\"'])(\w+)\1", part)
            if quoted and quoted[2] in section.strings:
                section.used.add(quoted[2])
                return f"{quoted[1]}{section.strings[quoted[2]]}{quoted[1]}"
            part = prose(part)
            if python and part[:2].lower().strip("r").startswith("f"):
                part = FIELD.sub(lambda one: "{" + renamed(one[1], section, file) + "}", part)
            return part
        if not match["name"]:
            return part
        before = text[: match.start()].rstrip()[-2:]
        member = (before.endswith(".") and not before.endswith("..")) or before == "->"
        for known in (section.members if member else {}, {} if python and member else section.names):
            if part in known:
                section.used.add(part)
                return known[part]
        return part

    return pattern.sub(replace, text)


def names_in(text: str, file: Path) -> set[str]:
    """Every identifier outside comments and strings."""
    pattern = PY_TOKEN if file.suffix == ".py" else C_TOKEN
    return {match["name"] for match in pattern.finditer(text) if match["name"]}


def main() -> None:
    """Read, check, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true", help="only report what is wrong")
    options = parser.parse_args()
    texts: dict[Path, str] = {}
    failed: list[str] = []
    for section in [one for path in options.tables for one in read(path)]:
        for file in section.files:
            text = texts.get(file) or file.read_text(encoding="utf-8")
            spans = [(0, len(text))] if section.scope is None else scope_span(text, section.scope)
            parts, at = [], 0
            for start, end in sorted(spans):
                body = text[start:end]
                taken = names_in(body, file) - section.names.keys()
                new = {n for o, n in section.names.items() if o in names_in(body, file)} - section.shared
                failed += [f"{section.line}: {name} stands in {file.name} already" for name in new & taken]
                parts += [text[at:start], renamed(body, section, file)]
                at = end
            texts[file] = "".join([*parts, text[at:]])
        every = {*section.names, *section.members, *section.strings, *(old for old, _ in section.prose)}
        failed += [f"{section.line}: {name} is nowhere" for name in sorted(every - section.used)]
    if not options.check and not failed:
        for file, text in texts.items():
            if text != file.read_text(encoding="utf-8"):
                file.write_text(text, encoding="utf-8")
                print(f"{file.relative_to(ROOT)}")
    print("\n".join([f"{len(failed)} wrong", *failed]), file=sys.stderr)
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
