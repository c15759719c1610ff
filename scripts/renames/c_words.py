"""Apply a table of C identifiers to this checkout: `python scripts/renames/c_words.py [--check] TABLE`.

There is no language server for the C sources, so names are replaced word by word, outside comments
and strings:

    [*]                          files that the entries below hold for: globs over file names, several of them
    Band -> Panel                every identifier `Band`
    share( -> parallel_for(      `share` only where it is called or defined, not a variable of that name
    LANES = WIDE                 both names are joined on purpose; otherwise a new name must be free
    file native/bands.h -> csrc/w_panels.h

Later entries of the same word win over earlier ones, so that a section for one file may differ from `[*]`.
`--check` only reports entries that name nothing and new names that are taken. The proof of a table is that
the compiler makes the same machine code of the sources before and after.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("src/exlm/kernels/cpu/native", "src/exlm/kernels/cpu/csrc", "tests/kernels/cpu")
TOKEN = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\])*"|\b[A-Za-z_]\w*|.', re.DOTALL)
ENTRY = re.compile(r"^(\w+)(\(?)\s*(->|=)\s*(\w+)\(?$")

Words = dict[tuple[str, bool], tuple[str, bool, str]]
"""(old name, only as a function) → new name, whether it may be taken already, the line."""


def read_table(path: Path) -> tuple[list[tuple[list[str], Words]], list[tuple[str, str]]]:
    """Sections of file globs with their entries, and the files that move."""
    sections: list[tuple[list[str], Words]] = []
    moves = []
    for raw in path.read_text(encoding="utf-8").splitlines():
        for part in raw.split("#")[0].split(";"):
            line = part.strip()
            if not line:
                continue
            if line.startswith("file "):
                old, new = line.removeprefix("file ").split(" -> ")
                moves.append((old.strip(), new.strip()))
            elif line.startswith("["):
                sections.append((line.strip("[]").split(), {}))
            elif found := ENTRY.match(line):
                old, call, sign, new = found.groups()
                if sign == "=":
                    old, new = new, old
                sections[-1][1][old, bool(call)] = (new, sign == "=", line)
            else:
                raise SystemExit(f"{path}: not an entry: {line}")
    return sections, moves


def words_of(file: Path, sections: list[tuple[list[str], Words]]) -> Words:
    """The entries that hold for a file."""
    found: Words = {}
    for globs, words in sections:
        if any(fnmatch.fnmatch(file.name, glob) for glob in globs):
            found |= words
    return found


def renamed(text: str, words: Words, used: Counter[str]) -> str:
    """The text with every identifier replaced."""
    out = []
    tokens = list(TOKEN.finditer(text))
    for n, token in enumerate(tokens):
        word = token[0]
        called = n + 1 < len(tokens) and tokens[n + 1][0] == "("
        entry = (words.get((word, True)) if called else None) or words.get((word, False))
        if entry:
            used[entry[2]] += 1
        out.append(entry[0] if entry else word)
    return "".join(out)


def problems(file: Path, text: str, words: Words) -> list[str]:
    """New names that the file has already, and that stay there."""
    present = {token[0] for token in TOKEN.finditer(text) if re.match(r"[A-Za-z_]", token[0])}
    gone = {old for old, _ in words}
    targets: Counter[str] = Counter()
    bad = []
    for (old, _), (new, joined, line) in words.items():
        if old not in present or joined or old == new:
            continue
        targets[new] += 1
        if (new in present and new not in gone) or targets[new] > 1:
            bad.append(f"{file.name}: taken: {line}")
    return bad


def main() -> None:
    """Read the table, check it, apply it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--check", action="store_true", help="only say what is wrong with the table")
    options = parser.parse_args()
    sections, moves = read_table(options.table)
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).glob("*.[ch]"))]
    used: Counter[str] = Counter()
    failed = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        words = words_of(file, sections)
        failed += problems(file, text, words)
        changed = renamed(text, words, used)
        for old, new in moves:
            changed = changed.replace(f'#include "{Path(old).name}"', f'#include "{Path(new).name}"')
        if not options.check:
            file.write_text(changed, encoding="utf-8")
    lines = {line for _, words in sections for _, _, line in words.values()}
    failed += [f"names nothing: {line}" for line in sorted(lines) if not used[line]]
    for old, new in moves:
        before, after = (folder_of(name) for name in (old, new))
        if not before.exists() or after.exists():
            failed.append(f"cannot move: {old} -> {new}")
        elif not options.check:
            after.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["git", "mv", str(before), str(after)], cwd=ROOT, check=True)
    print("\n".join([f"{len(failed)} problems", *failed]))
    raise SystemExit(bool(failed))


def folder_of(name: str) -> Path:
    """A file of the kernels, or with a leading `tests/` of their tests."""
    if name.startswith("tests/"):
        return ROOT / "tests/kernels/cpu" / name.removeprefix("tests/")
    return ROOT / "src/exlm/kernels/cpu" / name


if __name__ == "__main__":
    main()
