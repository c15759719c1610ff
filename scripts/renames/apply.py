"""Apply rename maps to this checkout: `python scripts/renames/apply.py [--check] MAP...`.

A map has one entry a line, the left side in the names of the version it was written for:

    exlm.generator.loop:Loop -> Engine              class, function, constant
    exlm.generator.loop:Loop._equip -> _attach      method, attribute, dataclass field
    exlm.generator.loop:Loop.step(read) -> done     parameter
    exlm.generator.loop:Loop.step.found -> matched  local variable
    exlm.nn.*:*.heard -> needs_output               every class that defines it, in every matching module
    tests/nn/test_x.py:helper -> other              the same in a test file
    module exlm.generator.loop -> exlm.generator.engine
    module tests/nn/test_x.py -> tests/nn/test_y.py

A language server (`pip install basedpyright`) renames the symbols, the innermost first. Then `git mv` moves
the modules, and every import and every dotted or path spelling of theirs is replaced. `--check` only
reports entries that name nothing. What a language server cannot see (strings in monkeypatch calls, keywords
of `dataclasses.replace`) is listed at the end. mypy and the test suite are the proof.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import functools
import io
import itertools
import json
import keyword
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("src", "tests", "benchmarks", "examples", "scripts")
PAGES = ("docs", "deploy", "README.md", "ARCHITECTURE.md", "DESIGN.md", "CONTRIBUTING.md")
TEXTS = (*FOLDERS, *PAGES, "pyproject.toml", "Makefile", "hatch_build.py")
ENTRY = re.compile(
    r"^(?P<file>[\w.*/?\[\]-]+):(?P<symbol>[\w.*]+)(?:\((?P<parameter>\w+)\))?\s*->\s*(?P<new>\w+)\s*(?:#.*)?$"
)
MODULE = re.compile(r"^module\s+(?P<old>[\w./-]+)\s*->\s*(?P<new>[\w./-]+)\s*(?:#.*)?$")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Symbol:
    """An entry for a name inside a module."""

    line: str
    file: str  # a glob over paths from the root
    path: tuple[str, ...]
    parameter: str | None
    new: str

    @property
    def old(self) -> str:
        """The name that is replaced."""
        return self.parameter or self.path[-1]

    @property
    def depth(self) -> int:
        """Inner names go first: their outer names are still the old ones then."""
        return len(self.path) + (self.parameter is not None)


@dataclass(frozen=True)
class Move:
    """An entry for a module."""

    line: str
    old: Path
    new: Path


def file_of(module: str) -> str:
    """`exlm.nn.*` or a path as a glob over paths."""
    if "/" in module or module.endswith(".py"):
        return module
    top, *rest = module.split(".")
    folder = "/".join(("src", top, *rest) if top in ("exlm", "exllamav2") else (top, *rest))
    if (ROOT / folder / "__init__.py").exists():
        return f"{folder}/__init__.py"
    return f"{folder}.py"


def read_map(path: Path) -> tuple[list[Symbol], list[Move]]:
    """The entries of a map; a line that is neither is an error."""
    symbols, moves = [], []
    for number, raw in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith(("#", "prose:")):
            continue
        if found := MODULE.match(line):
            moves.append(Move(line, path_of(found["old"]), path_of(found["new"])))
        elif found := ENTRY.match(line):
            parts = tuple(found["symbol"].split("."))
            symbols.append(Symbol(line, file_of(found["file"]), parts, found["parameter"], found["new"]))
        else:
            raise SystemExit(f"{path}:{number}: neither an entry nor a comment: {line}")
    return symbols, moves


def path_of(module: str) -> Path:
    """A module's file or package folder, from the root."""
    if "/" in module or module.endswith(".py"):
        return Path(module)
    folder = Path("src", *module.split("."))
    return folder if (ROOT / folder).is_dir() else folder.with_suffix(".py")


# -- where a name stands ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A file and a position in it, both from 0."""

    file: Path
    line: int
    column: int


def python_files() -> list[Path]:
    """Every tracked Python file."""
    done = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / line for line in done.stdout.splitlines() if (ROOT / line).exists()]


class Trees:
    """Parsed files, parsed again when they have changed."""

    def __init__(self) -> None:
        self._kept: dict[Path, tuple[str, ast.Module]] = {}

    def get(self, file: Path) -> tuple[str, ast.Module]:
        """A file's text and tree."""
        text = file.read_text(encoding="utf-8")
        if self._kept.get(file, ("", None))[0] != text:
            self._kept[file] = text, ast.parse(text)
        return self._kept[file]


def column(text: str, line: int, offset: int) -> int:
    """From ast's byte offset to characters."""
    return len(text.splitlines()[line - 1].encode()[:offset].decode())


def named(file: Path, text: str, node: ast.AST, name: str) -> Place:
    """Where `name` stands in the first lines of a node."""
    line: int = getattr(node, "lineno")  # noqa: B009
    start = column(text, line, getattr(node, "col_offset"))  # noqa: B009
    lines = text.splitlines()
    for number in range(line, min(line + 8, len(lines)) + 1):
        found = re.compile(rf"\b{name}\b").search(lines[number - 1], start if number == line else 0)
        if found:
            return Place(file, number - 1, found.start())
    raise LookupError(name)


def scopes(tree: ast.AST, parts: tuple[str, ...]) -> Iterator[ast.AST]:
    """The classes or functions that a path names; `*` is any class."""
    if not parts:
        yield tree
        return
    for node in statements(tree):
        if not isinstance(node, (ast.ClassDef, *FUNCTIONS)):
            continue
        if node.name == parts[0] or (parts[0] == "*" and isinstance(node, ast.ClassDef)):
            yield from scopes(node, parts[1:])


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Statements of a scope, those below `if`, `try` and `with` included, inner scopes as one statement."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (ast.ClassDef, *FUNCTIONS, ast.expr)):
            yield from statements(child)


def defined(scope: ast.AST, name: str) -> list[ast.AST]:
    """Nodes that define a name in a scope: definitions, targets of assignments, attributes of self."""
    found: list[ast.AST] = []
    for node in statements(scope):
        if isinstance(node, (ast.ClassDef, *FUNCTIONS)) and node.name == name:
            found.append(node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)) and not isinstance(scope, ast.Module):
            continue
        elif isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
            found.append(node)
    if found:
        return found
    if isinstance(scope, ast.ClassDef):
        for node in ast.walk(scope):
            if not isinstance(node, ast.Attribute) or node.attr != name or not isinstance(node.ctx, ast.Store):
                continue
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                return [node]
    else:
        for node in ast.walk(scope):
            if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
                return [node]
    return []


def places(symbol: Symbol, trees: Trees, files: list[Path]) -> list[Place]:
    """Where the definitions of an entry stand; empty if there are none."""
    found = []
    for file in files:
        if not fnmatch.fnmatch(str(file.relative_to(ROOT)), symbol.file):
            continue
        text, tree = trees.get(file)
        if symbol.parameter:
            for scope in scopes(tree, symbol.path):
                if isinstance(scope, FUNCTIONS):
                    every = scope.args
                    args = [*every.posonlyargs, *every.args, *every.kwonlyargs]
                    args += [one for one in (every.vararg, every.kwarg) if one]
                    found += [named(file, text, a, a.arg) for a in args if a.arg == symbol.parameter]
            continue
        for scope in scopes(tree, symbol.path[:-1]):
            for node in defined(scope, symbol.old)[:1]:
                found.append(attribute_place(file, text, node, symbol.old))
    return found


def attribute_place(file: Path, text: str, node: ast.AST, name: str) -> Place:
    """Where a definition's name stands; of `self.name` it is the end."""
    if isinstance(node, ast.Attribute):
        line, end = node.end_lineno or node.lineno, node.end_col_offset or 0
        return Place(file, line - 1, column(text, line, end) - len(name))
    return named(file, text, node, name)


# -- the language server ---------------------------------------------------------------------------


class LanguageServer:
    """A basedpyright process that answers rename requests."""

    def __init__(self, command: str) -> None:
        self._process = subprocess.Popen(
            [command, "--stdio"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
        )
        self._number = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._arrived = threading.Condition()
        self._versions: dict[str, int] = {}
        threading.Thread(target=self._read, daemon=True).start()
        folder = {"uri": ROOT.as_uri(), "name": ROOT.name}
        capabilities = {"workspace": {"workspaceEdit": {"documentChanges": True}, "configuration": True}}
        self.request(
            "initialize",
            {
                "processId": os.getpid(),
                "rootUri": ROOT.as_uri(),
                "workspaceFolders": [folder],
                "capabilities": capabilities,
            },
        )
        self._notify("initialized", {})
        time.sleep(3)  # it finds the files of the workspace in the background

    def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self._process.stdin is not None
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self._process.stdin.flush()

    def _read(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        while True:
            length = 0
            while line := stream.readline().strip():
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            if not length:
                return
            message = json.loads(stream.read(length))
            if "method" in message and "id" in message:
                items = message.get("params", {}).get("items", ()) if "configuration" in message["method"] else ()
                self._send({"id": message["id"], "result": [SETTINGS.get(i.get("section")) for i in items] or None})
            elif "id" in message:
                with self._arrived:
                    self._answers[message["id"]] = message
                    self._arrived.notify_all()

    def request(self, method: str, params: dict[str, Any]) -> Any:
        """Ask and wait."""
        self._number += 1
        number = self._number
        self._send({"id": number, "method": method, "params": params})
        with self._arrived:
            if not self._arrived.wait_for(lambda: number in self._answers, 300):
                raise SystemExit(f"The language server did not answer {method} within 300 s.")
            answer = self._answers.pop(number)
        if "error" in answer:
            raise LookupError(str(answer["error"].get("message")))
        return answer["result"]

    def _notify(self, method: str, params: dict[str, Any]) -> None:
        self._send({"method": method, "params": params})

    def sync(self, file: Path) -> None:
        """Tell the server a file's text."""
        uri, text = file.as_uri(), file.read_text(encoding="utf-8")
        self._versions[uri] = version = self._versions.get(uri, 0) + 1
        if version == 1:
            document = {"uri": uri, "languageId": "python", "version": 1, "text": text}
            self._notify("textDocument/didOpen", {"textDocument": document})
        else:
            changed = {"textDocument": {"uri": uri, "version": version}, "contentChanges": [{"text": text}]}
            self._notify("textDocument/didChange", changed)

    def rename(self, place: Place, new: str) -> dict[Path, list[dict[str, Any]]]:
        """The edits that a rename needs, by file."""
        if place.file.as_uri() not in self._versions:
            self.sync(place.file)
        position = {"line": place.line, "character": place.column}
        params = {"textDocument": {"uri": place.file.as_uri()}, "position": position, "newName": new}
        result = self.request("textDocument/rename", params) or {}
        by_uri = {one["textDocument"]["uri"]: one["edits"] for one in result.get("documentChanges", ())}
        by_uri |= result.get("changes") or {}
        return {file_from(uri): edits for uri, edits in by_uri.items()}


ANALYSIS = {
    "diagnosticMode": "openFilesOnly",
    "typeCheckingMode": "off",
    "indexing": False,
    "extraPaths": ["src"],
}
SETTINGS: dict[str | None, Any] = {
    "basedpyright.analysis": ANALYSIS,
    "basedpyright": {"analysis": ANALYSIS},
    "python": {"pythonPath": sys.executable},
}


def file_from(uri: str) -> Path:
    """The path of a file: URI."""
    from urllib.parse import unquote, urlparse

    return Path(unquote(urlparse(uri).path))


def apply_edits(file: Path, edits: list[dict[str, Any]]) -> None:
    """Replace ranges, the last first."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]
    text = "".join(lines)

    def at(position: dict[str, int]) -> int:
        return starts[position["line"]] + position["character"]

    for edit in sorted(edits, key=lambda one: at(one["range"]["start"]), reverse=True):
        first, last = at(edit["range"]["start"]), at(edit["range"]["end"])
        text = text[:first] + edit["newText"] + text[last:]
    file.write_text(text, encoding="utf-8")


# -- names that need no language server ---------------------------------------------------------------


class Index:
    """Where every identifier is defined or spelled, over the whole tree, kept up to date file by file."""

    def __init__(self, files: list[Path], trees: Trees) -> None:
        self.trees = trees
        self.definitions: dict[str, Counter[Path]] = defaultdict(Counter)
        self.spelled: dict[str, set[Path]] = defaultdict(set)
        for file in files:
            self.add(file)

    def add(self, file: Path) -> None:
        """Read a file."""
        text, tree = self.trees.get(file)
        for name in set(re.findall(r"[A-Za-z_]\w*", text)):
            self.spelled[name].add(file)
        for node in ast.walk(tree):
            if isinstance(node, (ast.ClassDef, *FUNCTIONS)):
                self.definitions[node.name][file] += 1
            elif isinstance(node, ast.arg):
                self.definitions[node.arg][file] += 1
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.definitions[node.id][file] += 1
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                self.definitions[node.attr][file] += 1
            elif isinstance(node, ast.keyword) and node.arg:
                self.definitions[node.arg][file] += 1
            elif isinstance(node, ast.alias):
                self.definitions[node.asname or node.name][file] += int(bool(node.asname))

    def changed(self, file: Path) -> None:
        """Read a file again."""
        for counts in self.definitions.values():
            counts.pop(file, None)
        self.add(file)


@functools.cache
def foreign_names() -> frozenset[str]:
    """Attributes of what others wrote, which a replacement by spelling would hit as well."""
    import asyncio
    import builtins
    import collections
    import logging
    import threading
    import typing

    import numpy
    import torch

    known: list[Any] = [
        str,
        bytes,
        dict,
        list,
        set,
        tuple,
        int,
        float,
        Path,
        collections.deque,
        threading,
        asyncio,
    ]
    known += [
        collections.OrderedDict,
        collections.Counter,
        threading.Event,
        asyncio.Queue,
        asyncio.Task,
        builtins,
    ]
    known += [
        torch,
        torch.Tensor,
        torch.cuda,
        torch.nn,
        torch.nn.functional,
        torch.nn.Module,
        torch.device,
        torch.dtype,
    ]
    known += [
        numpy,
        numpy.ndarray,
        os,
        re,
        json,
        subprocess,
        sys,
        time,
        ast,
        itertools,
        functools,
        logging,
        typing,
    ]
    known += [
        torch.cuda.Event,
        torch.cuda.Stream,
        torch.cuda.CUDAGraph,
        re.Pattern,
        re.Match,
        subprocess.Popen,
    ]
    return frozenset(name for one in known for name in dir(one)) | {
        "mark",
        "fixture",
        "param",
        "parametrize",
        "group",
    }


def spelled_places(file: Path, text: str, name: str) -> list[Place]:
    """Every NAME token of this spelling; strings, comments and the modules of imports are left alone."""
    found = []
    modules = {
        (node.lineno, place)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and name in (node.module or "").split(".")
        for place in range(node.col_offset, node.col_offset + 6 + node.level + len(node.module or ""))
    }
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string == name and token.start not in modules:
            found.append(Place(file, token.start[0] - 1, token.start[1]))
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.JoinedStr):  # one token before Python 3.12
            for inner in ast.walk(node):
                ends = {ast.Name: "id", ast.Attribute: "attr", ast.keyword: "arg"}.get(type(inner))
                if ends is None or getattr(inner, ends) != name:
                    continue
                line = getattr(inner, "lineno")  # noqa: B009
                if isinstance(inner, ast.Attribute):
                    last = inner.end_lineno or line
                    start = column(text, last, inner.end_col_offset or 0) - len(name)
                    line = last
                else:
                    start = column(text, line, getattr(inner, "col_offset"))  # noqa: B009
                place = Place(file, line - 1, start)
                if lines[place.line][start : start + len(name)] == name and place not in found:
                    found.append(place)
    return found


def by_spelling(symbol: Symbol, count: int, index: Index) -> list[Place] | None:
    """The places of a name that only this entry defines anywhere; None if others define it, too."""
    old = symbol.old
    if symbol.parameter or old in foreign_names() or len(old) < 4 or keyword.iskeyword(old):
        return None
    files = [file for file, number in index.definitions[old].items() if number]
    if not fnmatch.fnmatch(symbol.file, "*[*]*") and [
        file for file in files if not fnmatch.fnmatch(str(file.relative_to(ROOT)), symbol.file)
    ]:
        return None
    if len(symbol.path) == 1 and sum(index.definitions[old].values()) != count:
        return None
    if len(symbol.path) > 1:
        # an attribute: everything that defines the name in its file must be a member of the class
        for file in files:
            if not only_in_class(index.trees.get(file)[1], symbol.path[:-1], old):
                return None
    found: list[Place] = []
    for file in sorted(index.spelled[old]):
        if file.exists():
            found += spelled_places(file, file.read_text(encoding="utf-8"), old)
    return found


def only_in_class(tree: ast.Module, path: tuple[str, ...], name: str) -> bool:
    """Whether everything that defines a name in a file is a member of that class."""
    inside = {id(node) for scope in scopes(tree, path) if isinstance(scope, ast.ClassDef) for node in ast.walk(scope)}
    members = {
        id(node) for scope in scopes(tree, path) if isinstance(scope, ast.ClassDef) for node in statements(scope)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store):
            if id(node) not in inside or not isinstance(node.value, ast.Name) or node.value.id != "self":
                return False
        elif isinstance(node, (ast.ClassDef, *FUNCTIONS, ast.Name)):
            defined_name = node.id if isinstance(node, ast.Name) else node.name
            if defined_name == name and id(node) not in members:
                return False
        elif isinstance(node, (ast.arg, ast.keyword)) and node.arg == name:
            return False
    return True


def local_places(symbol: Symbol, index: Index, files: list[Path]) -> list[Place] | None:
    """The places of a local variable; None if the entry is something else."""
    if symbol.parameter or len(symbol.path) < 2:
        return None
    found: list[Place] = []
    for file in files:
        if not fnmatch.fnmatch(str(file.relative_to(ROOT)), symbol.file):
            continue
        text, tree = index.trees.get(file)
        for scope in scopes(tree, symbol.path[:-1]):
            if not isinstance(scope, FUNCTIONS) or any(
                isinstance(node, FUNCTIONS) and node is not scope and node.name == symbol.old
                for node in ast.walk(scope)
            ):
                return None
            arguments = [*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs]
            if symbol.old in [argument.arg for argument in arguments]:
                return None
            for node in ast.walk(scope):
                if isinstance(node, ast.arg) and node.arg == symbol.old:
                    return None  # a parameter of an inner function: the language server knows scopes
                if isinstance(node, ast.Name) and node.id == symbol.old:
                    found.append(Place(file, node.lineno - 1, column(text, node.lineno, node.col_offset)))
                elif isinstance(node, (ast.Nonlocal, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and (
                    symbol.old in getattr(node, "names", ()) or getattr(node, "name", None) == symbol.old
                ):
                    return None
    return found or None


def parameter_places(symbol: Symbol, index: Index, files: list[Path]) -> list[Place] | None:
    """The places of a parameter; None if calls pass it by keyword and it is unclear to which function."""
    if not symbol.parameter:
        return None
    found: list[Place] = []
    old, name = symbol.parameter, symbol.path[-1]
    if name == "__init__":
        name = symbol.path[-2]
    for file in files:
        if not fnmatch.fnmatch(str(file.relative_to(ROOT)), symbol.file):
            continue
        text, tree = index.trees.get(file)
        for scope in scopes(tree, symbol.path):
            if not isinstance(scope, FUNCTIONS):
                return None
            every = scope.args
            outer = [*every.posonlyargs, *every.args, *every.kwonlyargs]
            outer += [one for one in (every.vararg, every.kwarg) if one]
            for node in ast.walk(scope):
                if isinstance(node, ast.arg) and node.arg == old:
                    if node not in outer:
                        return None  # also of an inner function
                    found.append(Place(file, node.lineno - 1, column(text, node.lineno, node.col_offset)))
                elif isinstance(node, ast.Name) and node.id == old:
                    found.append(Place(file, node.lineno - 1, column(text, node.lineno, node.col_offset)))
    for file in index.spelled[old] & index.spelled[name]:
        if not file.exists():
            continue
        _, tree = index.trees.get(file)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and any(one.arg == old for one in node.keywords):
                called = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if called in (name, "partial", "super", "cls") or called == "__init__":
                    return None
    return found or None


def edits_at(found: list[Place], old: str, new: str) -> dict[Path, list[dict[str, Any]]]:
    """Places as the edits of a language server."""
    edits: dict[Path, list[dict[str, Any]]] = defaultdict(list)
    for place in dict.fromkeys(found):
        start = {"line": place.line, "character": place.column}
        end = {"line": place.line, "character": place.column + len(old)}
        edits[place.file].append({"range": {"start": start, "end": end}, "newText": new})
    return edits


# -- the passes ------------------------------------------------------------------------------------


def rename_symbols(symbols: list[Symbol], server: str) -> list[str]:
    """Rename every symbol; returns what failed."""
    trees, files, failed = Trees(), python_files(), []
    index = Index(files, trees)
    language: LanguageServer | None = None
    stale: set[Path] = set()
    ordered = sorted(symbols, key=lambda one: -one.depth)
    for number, symbol in enumerate(ordered, 1):
        found = places(symbol, trees, files)
        if not found:
            failed.append(f"not found: {symbol.line}")
        count, how = 0, ""
        while found:
            edits: dict[Path, list[dict[str, Any]]] = {}
            if local := local_places(symbol, index, files) or parameter_places(symbol, index, files):
                edits, how = edits_at(local, symbol.old, symbol.new), "local"
            elif spelled := by_spelling(symbol, len(found), index):
                edits, how = edits_at(spelled, symbol.old, symbol.new), "spelling"
            else:
                language, how = language or LanguageServer(server), "server"
                for file in stale:
                    language.sync(file)
                stale.clear()
                try:
                    edits = language.rename(found[0], symbol.new)
                except LookupError as error:
                    failed.append(f"refused ({error}): {symbol.line}")
                    break
            inside = {file: changes for file, changes in edits.items() if file.is_relative_to(ROOT)}
            if not inside:
                failed.append(f"no edits: {symbol.line}")
                break
            for file, changes in inside.items():
                apply_edits(file, changes)
                index.changed(file)
                count += len(changes)
            stale.update(inside)
            rest = places(symbol, trees, files)  # a wildcard may name several
            found = rest if len(rest) < len(found) else []
            if rest and not found:
                failed.append(f"still there: {symbol.line}")
        print(f"[{number}/{len(ordered)}] {symbol.line}: {count} {how}", flush=True)
    return failed


def text_files() -> list[Path]:
    """Every file that may spell a module's name."""
    done = subprocess.run(["git", "ls-files", *TEXTS], cwd=ROOT, capture_output=True, text=True, check=True)
    endings = {".py", ".md", ".toml", ".ini", ".c", ".h", ".cu", ".txt", ".yaml", ".yml", ""}
    files = [ROOT / line for line in done.stdout.splitlines()]
    return [file for file in files if file.is_file() and file.suffix in endings and "texts" not in file.parts]


def dotted(path: Path) -> str:
    """`src/exlm/nn/x.py` as `exlm.nn.x`."""
    parts = path.with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "src" else parts)


def move_modules(moves: list[Move]) -> list[str]:
    """Move files, and rewrite every import and every spelling."""
    failed = []
    for move in moves:
        if not (ROOT / move.old).exists():
            failed.append(f"not found: {move.line}")
            continue
        (ROOT / move.new).parent.mkdir(parents=True, exist_ok=True)
        package = (ROOT / move.new).parent
        if move.new.parts[0] == "src" and not (package / "__init__.py").exists():
            (package / "__init__.py").write_text("", encoding="utf-8")
            subprocess.run(["git", "add", str(package / "__init__.py")], cwd=ROOT, check=True)
        subprocess.run(["git", "mv", str(move.old), str(move.new)], cwd=ROOT, check=True)
        rewrite_imports(move)
        old, new = dotted(move.old), dotted(move.new)
        pairs = [
            (rf"(?<![\w.]){re.escape(old)}(?=\b)", new),
            (re.escape(str(move.old)) + r"(?![\w])", str(move.new)),
        ]
        short = str(Path(*move.old.parts[2:])), str(Path(*move.new.parts[2:]))
        if move.old.parts[0] == "src" and "/" in short[0]:
            pairs.append((rf"(?<![\w/]){re.escape(short[0])}(?![\w])", short[1]))
        for file in text_files():
            text = changed = file.read_text(encoding="utf-8", errors="surrogateescape")
            for pattern, replacement in pairs:
                changed = re.sub(pattern, replacement, changed)
            if changed != text:
                file.write_text(changed, encoding="utf-8", errors="surrogateescape")
        print(f"moved {move.old} -> {move.new}", flush=True)
    return failed


def module_name(file: Path) -> str:
    """The dotted name of a source file."""
    name = dotted(file.relative_to(ROOT))
    return name.removesuffix(".__init__")


def rewrite_imports(move: Move) -> None:
    """Make every `import` of the moved module, and those inside it, say where things are now."""
    old, new = dotted(move.old), dotted(move.new)
    for file in python_files():
        text = file.read_text(encoding="utf-8")
        here = module_name(file)
        is_package = file.name == "__init__.py"
        was = old + here[len(new) :] if here == new or here.startswith(new + ".") else here
        moved = was != here
        if not moved and old.rsplit(".", 1)[-1] not in text:
            continue
        lines = text.splitlines(keepends=True)
        changed = False
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.ImportFrom):
                continue
            target = absolute(was, is_package, node)
            if target is None:
                continue
            result = statement(node, target, old, new, here, is_package, moved)
            if result is None:
                continue
            first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
            tail = lines[last].encode()[node.end_col_offset :].decode()
            head = lines[first].encode()[: node.col_offset].decode()
            lines[first : last + 1] = [head + result + tail] + [""] * (last - first)
            changed = True
        if changed:
            file.write_text("".join(lines), encoding="utf-8")


def absolute(module: str, is_package: bool, node: ast.ImportFrom) -> str | None:
    """The absolute name of what an import statement imports from."""
    if not node.level:
        return node.module
    parts = module.split(".")
    up = node.level - (1 if is_package else 0)
    base = parts[: len(parts) - up]
    return ".".join([*base, *([node.module] if node.module else [])])


def relative(here: str, is_package: bool, target: str) -> str:
    """`target` as seen from `here`."""
    mine, theirs = here.split("."), target.split(".")
    if not is_package:
        mine = mine[:-1]
    common = 0
    while common < min(len(mine), len(theirs)) and mine[common] == theirs[common]:
        common += 1
    if not common:
        return target
    return "." * (len(mine) - common + 1) + ".".join(theirs[common:])


def statement(
    node: ast.ImportFrom, target: str, old: str, new: str, here: str, is_package: bool, moved: bool
) -> str | None:
    """An import statement in the new names; None if it need not change."""
    groups: dict[str, list[str]] = {}
    changed = False
    for alias in node.names:
        source, name, shown = target, alias.name, alias.asname
        if source == old or source.startswith(old + "."):
            source = new + source[len(old) :]
        elif f"{source}.{name}" == old:
            source, fresh = new.rsplit(".", 1)
            shown = shown or (name if fresh != name else None)
            name = fresh
        changed |= (source, name) != (target, alias.name)
        groups.setdefault(source, []).append(f"{name} as {shown}" if shown else name)
    if not changed and not (moved and node.level):
        return None
    made = []
    for source, names in groups.items():
        said = relative(here, is_package, source) if node.level else source
        made.append(f"from {said} import {names[0]}" if len(names) == 1 else f"from {said} import ({', '.join(names)})")
    return f"\n{' ' * node.col_offset}".join(made)


def leftovers(symbols: list[Symbol]) -> list[str]:
    """Words that a language server does not see: quoted names, keywords of replace()."""
    new = {one.old: one.new for one in symbols}
    quoted = re.compile(
        r"""(?:attr|attrgetter|methodcaller|patch\.object)\((?:[^()"']*, )?["'](\w+)["']"""
        r"""|replace\([^()]*\b(\w+)="""
    )
    found = []
    for file in python_files():
        text = file.read_text(encoding="utf-8")
        for hit in quoted.finditer(text):
            name = hit[1] or hit[2]
            if name in new:
                line = text.count("\n", 0, hit.start()) + 1
                found.append(f"{file.relative_to(ROOT)}:{line}: {hit[0]!r} (now {new[name]})")
    return found


def main() -> None:
    """Read maps, check them, apply them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("maps", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true", help="only say which entries name nothing")
    parser.add_argument("--server", default=shutil.which("basedpyright-langserver") or "basedpyright-langserver")
    options = parser.parse_args()
    symbols: list[Symbol] = []
    moves: list[Move] = []
    for path in options.maps:
        more, others = read_map(path)
        symbols, moves = symbols + more, moves + others
    if options.check:
        trees, files = Trees(), python_files()
        failed = [f"not found: {one.line}" for one in symbols if not places(one, trees, files)]
        failed += [f"not found: {one.line}" for one in moves if not (ROOT / one.old).exists()]
        failed += [f"taken: {one.line}" for one in moves if (ROOT / one.new).exists()]
    else:
        failed = rename_symbols(symbols, options.server) + move_modules(moves)
        for step in (["check", "--fix-only", "--quiet", "--select", "I"], ["format", "--quiet"]):
            subprocess.run([sys.executable, "-m", "ruff", *step, "."], cwd=ROOT, check=True)
        print("\n".join(["", "Spelled elsewhere; look at each:", *leftovers(symbols)]))
    print("\n".join(["", f"{len(failed)} entries failed", *failed]))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
