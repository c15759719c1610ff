"""The house rules as functions from source text to complaints. They read code and never run it.

A checker takes a `Source` and returns one line for each violation: where, what, and what to do instead.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath

MAX_FILE = 400
MAX_FUNCTION = 60

DOOR = "exlm"  # the package itself: what `from exlm import …` reads
FLOOR = frozenset({"errors", "memory", "version"})  # every room inside may stand on these
ROOMS = (  # from the ground up; a room sees only lower lines, and of those only what MAY_IMPORT grants
    ("spec", "settings"),
    ("families", "formats", "sampling", "text"),
    ("kernels", "filters"),
    ("cache", "checkpoint"),
    ("nn",),
    ("parallel", "adapters", "vision", "config", "tokenizer", "hub"),
    ("model",),
    ("generator", "quantize"),
    ("llm",),
)


def _below(level: int) -> frozenset[str]:
    return frozenset(name for line in ROOMS[:level] for name in line)


MAY_IMPORT: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "memory": frozenset({"errors"}),
    "version": frozenset(),
    "spec": FLOOR,
    "settings": FLOOR,
    "families": FLOOR | {"spec"},
    "formats": FLOOR,
    "sampling": FLOOR,
    "text": FLOOR,
    "testing": FLOOR | {"text"},
    "kernels": FLOOR | {"formats", "spec", "settings"},
    "filters": FLOOR | {"text"},
    "cache": FLOOR | {"kernels", "spec"},
    "checkpoint": FLOOR | {"formats", "spec"},
    "nn": FLOOR | {"spec", "kernels", "cache"},
    **dict.fromkeys(ROOMS[5], FLOOR | _below(5)),
    "hub": FLOOR | {"settings"},
    "model": FLOOR | _below(6),
    "generator": FLOOR | {"text", "sampling", "filters"},
    "quantize": FLOOR | _below(7),
    "llm": FLOOR | _below(8),
    DOOR: FLOOR | _below(9),
    "legacy": frozenset({DOOR}) | _below(8),
    "serve": frozenset({DOOR}),
    "batch": frozenset({DOOR, "serve"}),
    "scale": frozenset({DOOR, "batch", "serve"}),
    "bench": frozenset({DOOR}) | FLOOR | _below(8),
    "cli": frozenset({DOOR, "batch", "bench", "scale", "serve", "settings"}),
    "__main__": frozenset({"cli"}),
    "exllamav2": frozenset({DOOR, "legacy"}),
}

MAY_READ_SETTINGS = (
    "exlm.settings",
    "exlm.config",
    "exlm.hub",
    "exlm.kernels.select",
    "exlm.model",
    "exlm.bench",
    "exlm.cli",
)
NAMES = ("names", "Names", "Place", "Rename")  # exlm.spec.names, and what exlm.spec re-exports from it
STANDARD_LIBRARY_ONLY = ("errors", "memory", "version", "spec", "settings")
WITHOUT_TORCH = ("spec", "families", "text", "generator")
TORCH_ALLOWED = ("exlm.generator.results",)  # the one translator from verdicts to public results
UNSAFE_MODULES = ("pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib")
ENVIRONMENT = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")
VAGUE_NAMES = ("Manager", "Helper", "Handler", "Utils")


@dataclass(frozen=True)
class Import:
    """One module named by an import statement, in full."""

    module: str
    line: int
    at_load: bool  # outside functions and `if TYPE_CHECKING:`


@dataclass(frozen=True)
class Source:
    """A Python file as the rules see it: where it is under src/, and its text."""

    path: PurePosixPath
    text: str

    @classmethod
    def read(cls, file: Path, src: Path) -> Source:
        """A file on disk."""
        return cls(PurePosixPath(file.relative_to(src).as_posix()), file.read_text(encoding="utf-8"))

    @cached_property
    def tree(self) -> ast.Module:
        """The file, parsed."""
        return ast.parse(self.text, filename=str(self.path))

    @property
    def package(self) -> tuple[str, ...]:
        """The package that relative imports start from."""
        return self.path.parent.parts

    @property
    def module(self) -> str:
        """`exlm.nn.linear`."""
        return ".".join((*self.package, *([] if self.path.stem == "__init__" else [self.path.stem])))

    @property
    def room(self) -> str:
        """`nn`; the door for the package's own __init__."""
        return room_of(self.module)

    def at(self, node: ast.AST | int, complaint: str) -> str:
        """A complaint with its place in front."""
        line = node if isinstance(node, int) else getattr(node, "lineno", 1)
        return f"src/{self.path}:{line} {complaint}"

    @cached_property
    def imports(self) -> list[Import]:
        """Every module this file names in an import, wherever the statement stands."""
        later = {id(node) for outer in ast.walk(self.tree) if _runs_later(outer) for node in ast.walk(outer)}
        return [
            Import(module, node.lineno, id(node) not in later)
            for node in ast.walk(self.tree)
            for module in self._modules(node)
            if isinstance(node, ast.stmt | ast.expr)
        ]

    def _modules(self, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = self.package[: len(self.package) - node.level + 1] if node.level else ()
            start = ".".join((*base, *([node.module] if node.module else [])))
            yield from (f"{start}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__") and node.args:
            named = node.args[0]
            if isinstance(named, ast.Constant) and isinstance(named.value, str):
                yield named.value


def _name(node: ast.AST) -> str:
    """The last name of `a.b.c` or `c`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _runs_later(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return _name(node.test) == "TYPE_CHECKING"
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def _functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def room_of(module: str) -> str:
    """The room a module (or a name in one) belongs to; empty for modules that are not ours."""
    top, _, rest = module.partition(".")
    if top == "exllamav2":
        return top
    if top != "exlm":
        return ""
    first = rest.partition(".")[0]
    return first if first in MAY_IMPORT else DOOR


def has_a_place(source: Source) -> list[str]:
    """Every file belongs to a room with import rules."""
    first = source.path.parts[1].removesuffix(".py") if source.path.parts[0] == "exlm" else ""
    if first in ("", "__init__", "door") or first in MAY_IMPORT:
        return []
    return [source.at(1, f"is in no layer: give {first!r} a line in tests/contract/rules.py, or move it")]


def imports_point_down(source: Source) -> list[str]:
    """A room sees only the rooms below it that it was granted."""
    here, granted = source.room, MAY_IMPORT[source.room]
    return [
        source.at(
            found.line, f"{here} imports {found.module}: it may import only {sorted(granted) or 'nothing'}"
        )
        for found in source.imports
        if (there := room_of(found.module)) and there != here and there not in granted
    ]


def names_only_from_spec(source: Source) -> list[str]:
    """Files know how tensors are called, not what a model is."""
    if source.room != "checkpoint":
        return []
    return [
        source.at(found.line, f"imports {found.module}: checkpoint may use only exlm.spec.names")
        for found in source.imports
        if room_of(found.module) == "spec" and found.module.split(".")[2] not in NAMES
    ]


def reads_settings_where_allowed(source: Source) -> list[str]:
    """Only a few modules ask the environment; all others are told."""
    if any(source.module == name or source.module.startswith(name + ".") for name in MAY_READ_SETTINGS):
        return []
    return [
        source.at(found.line, "imports settings: pass the value in as an argument")
        for found in source.imports
        if room_of(found.module) == "settings"
    ]


def needs_only_what_it_may(source: Source) -> list[str]:
    """The bottom stands on the standard library; the rooms that only decide do without torch."""
    bad = []
    for found in source.imports:
        top = found.module.partition(".")[0]
        if source.room in STANDARD_LIBRARY_ONLY and top != "exlm" and top not in sys.stdlib_module_names:
            bad.append(source.at(found.line, f"imports {top}: {source.room} uses only the standard library"))
        elif top == "torch" and source.room in WITHOUT_TORCH and source.module not in TORCH_ALLOWED:
            bad.append(source.at(found.line, f"imports torch: {source.room} works without it"))
    return bad


def is_short(source: Source) -> list[str]:
    """A file fits in the head, a function on the screen."""
    lines = len(source.text.splitlines())
    bad = [source.at(1, f"is {lines} lines long, over {MAX_FILE}: split it")] if lines > MAX_FILE else []
    for node in _functions(source):
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION:
            bad.append(source.at(node, f"{node.name} is {length} lines long, over {MAX_FUNCTION}: split it"))
    return bad


def has_no_global(source: Source) -> list[str]:
    """State has an owner."""
    return [
        source.at(node, f"global {', '.join(node.names)}: give the state an owner")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Global)
    ]


def leaves_environment_alone(source: Source) -> list[str]:
    """Only settings.py reads the environment."""
    if source.module == "exlm.settings":
        return []
    complaint = "uses the environment: only exlm/settings.py may"
    named = [(found.line, found.module) for found in source.imports]
    bad = [source.at(line, complaint) for line, module in named if module in {f"os.{n}" for n in ENVIRONMENT}]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT and _name(node.value) == "os":
            bad.append(source.at(node, complaint))
    return bad


def runs_no_foreign_code(source: Source) -> list[str]:
    """Nothing in a model folder is ever executed."""
    bad = []
    for found in source.imports:
        if found.module.partition(".")[0] in UNSAFE_MODULES or found.module == "torch.load":
            bad.append(source.at(found.line, f"imports {found.module}: it can run code from a file"))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr == "load" and _name(node.value) == "torch":
            bad.append(source.at(node, "torch.load unpickles: read safetensors or GGUF"))
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("eval", "exec")
        ):
            bad.append(source.at(node, f"{node.func.id}() runs text as code"))
        elif "trust_remote_code" in (
            getattr(node, "arg", None),
            getattr(node, "value", None),
            _name(node),
        ):
            bad.append(source.at(node, "trust_remote_code: code in a model folder is never run"))
    return bad


def prints_nothing(source: Source) -> list[str]:
    """Only the command line talks to the terminal."""
    if source.room == "cli":
        return []
    bad = []
    for node in ast.walk(source.tree):
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        written = (
            isinstance(node, ast.Attribute)
            and node.attr in ("stdout", "stderr")
            and _name(node.value) == "sys"
        )
        if called or written:
            bad.append(source.at(node, "writes to the terminal: log, return it, or let cli/ print"))
    return bad


def is_documented(source: Source) -> list[str]:
    """Every public module, class, function and method says what it is."""
    bad = [] if ast.get_docstring(source.tree) else [source.at(1, "has no module docstring")]
    scopes: list[tuple[str, ast.Module | ast.ClassDef]] = [("", source.tree)]
    for prefix, scope in scopes:
        for node in scope.body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if node.name.startswith("_") or {_name(mark) for mark in node.decorator_list} & {
                "overload",
                "setter",
            }:
                continue
            if not ast.get_docstring(node):
                bad.append(source.at(node, f"{prefix}{node.name} has no docstring"))
            if isinstance(node, ast.ClassDef):
                scopes.append((f"{prefix}{node.name}.", node))
    return bad


def forward_reads_no_spec(source: Source) -> list[str]:
    """Specs are read while loading; a forward pass runs on what they became."""
    return [
        source.at(node, "forward reads a spec: bind what it says in the constructor")
        for function in _functions(source)
        if function.name == "forward"
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute | ast.Name) and _name(node) == "spec"
    ]


def has_clear_names(source: Source) -> list[str]:
    """A name says what a thing is, not that it manages something."""
    bad = []
    if source.path.stem.strip("_") in ("util", "utils", "helper", "helpers", "misc"):
        bad.append(source.at(1, "is a drawer for anything: name the file after what it holds"))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and node.name.endswith(VAGUE_NAMES):
            bad.append(source.at(node, f"class {node.name}: name it after what it is"))
    return bad


def only_reexports(source: Source) -> list[str]:
    """A compatibility module holds imports, assignments, a docstring and, if it refuses, one raise."""
    bad, raises = [], 0
    for node in source.tree.body:
        raises += isinstance(node, ast.Raise)
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            bad.append(source.at(node, "imports *: name what is re-exported"))
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not (
            text or isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign | ast.Raise)
        ):
            bad.append(source.at(node, f"holds a {type(node).__name__}: the code belongs in exlm"))
    return bad if raises <= 1 else [*bad, source.at(1, f"raises {raises} times; once is enough")]


def cycles(sources: list[Source]) -> list[str]:
    """Modules that need each other to load, as one path; only imports that run at load count."""
    known = {source.module for source in sources}
    graph: dict[str, set[str]] = {}
    for source in sources:
        named = (found.module for found in source.imports if found.at_load)
        loaded = {name if name in known else name.rpartition(".")[0] for name in named}
        graph[source.module] = loaded & known - {source.module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [" → ".join(reversed(error.args[1])) + ": move what both need into a third module"]
    return []


PER_FILE = (
    has_a_place,
    imports_point_down,
    names_only_from_spec,
    reads_settings_where_allowed,
    needs_only_what_it_may,
    is_short,
    has_no_global,
    leaves_environment_alone,
    runs_no_foreign_code,
    prints_nothing,
    is_documented,
    forward_reads_no_spec,
    has_clear_names,
)
