"""The rules that every file under src/ keeps, as functions from source text to violations.

They read code and never run it. A rule takes a `Source` and returns one line for each violation: where it is,
what is wrong, and what to do instead.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath

PUBLIC = "exlm"  # the package's own __init__: what `from exlm import …` reads
BASE = ("errors", "lazy", "libcuda", "version", "memory", "atomic")  # "base" in the rows below

IMPORT_TABLE = {
    # package: what it may import of exlm; only packages of earlier rows, so imports go one way.
    "errors": "",
    "lazy": "",
    "libcuda": "",
    "version": "",
    "memory": "errors",
    "atomic": "errors",
    "env": "base",
    "sampler_chain": "",
    "spec": "base",
    "families": "base spec",
    "formats": "base",
    "tokenizer": "base families",
    "hub": "base env",
    "checkpoint": "base spec formats",
    "config": "base env spec families formats checkpoint",
    "kernels": "base env sampler_chain spec formats",
    "kvcache": "base spec kernels",
    "nn": "base spec kernels kvcache",
    "sampling": "base sampler_chain kernels",
    "constrained": "base tokenizer",
    "lora": "base spec formats checkpoint kernels kvcache nn",
    "multimodal": "base tokenizer",
    "parallel": "base spec formats checkpoint kernels kvcache nn",
    "model": "base env spec formats checkpoint config kernels kvcache nn sampling lora multimodal parallel",
    "generator": "base tokenizer sampling constrained",
    "testing": "base generator",
    "convert": "base spec families formats tokenizer checkpoint config model",
    "quantize": "base spec formats tokenizer checkpoint config kernels kvcache nn model convert",
    "llm": "base tokenizer hub config kvcache sampling constrained lora multimodal model generator",
    "legacy": "base tokenizer config kernels kvcache sampling constrained multimodal model generator quantize",
    "exlm": "base tokenizer hub config kvcache sampling constrained lora multimodal model generator convert "
    "quantize llm legacy",
    "serve": "sampler_chain exlm",
    "batch": "atomic exlm serve",
    "scale": "exlm serve batch",
    "bench": "base env spec formats checkpoint config kernels kvcache nn sampling model generator exlm",
    "cli": "atomic libcuda env sampler_chain kernels exlm serve batch scale bench",
    "__main__": "cli",
    "exllamav2": "exlm legacy",
}
"""ARCHITECTURE.md prints this table; test_import_table.py holds the two equal."""

MAY_IMPORT = {
    package: frozenset(name for word in row.split() for name in (BASE if word == "base" else (word,)))
    for package, row in IMPORT_TABLE.items()
}

MAY_READ_ENV = (
    "exlm.env",
    "exlm.config",
    "exlm.hub",
    "exlm.kernels.dispatch",
    "exlm.model",
    "exlm.bench",
    "exlm.cli",
)
"""Who may import exlm.env; every other module takes what the environment says as an argument."""

SPEC_NAMES_FOR_CHECKPOINT = (
    "tensor_names",
    "KeyRename",
    "RowRange",
    "TensorLocation",
    "TensorNames",
)
"""exlm.spec.tensor_names, and what exlm.spec re-exports from it: all that checkpoint may use of spec."""

STANDARD_LIBRARY_ONLY = ("errors", "lazy", "libcuda", "memory", "version", "spec", "env")
WITHOUT_TORCH = ("spec", "families", "tokenizer", "generator")
TORCH_ALLOWED = ("exlm.generator.results", "exlm.tokenizer.tokenizer")  # make the tensors of public results
UNSAFE_MODULES = ("pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib")
ENVIRONMENT = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")


@dataclass(frozen=True)
class Import:
    """One module named by an import statement, in full."""

    module: str
    line: int
    runs_at_import: bool  # outside functions and `if TYPE_CHECKING:`


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
    def top_package(self) -> str:
        """`nn` for `exlm.nn.linear`; `exlm` for the package's own __init__."""
        return top_package_of(self.module)

    def at(self, node: ast.AST | int, message: str) -> str:
        """A violation with its place in front."""
        line = node if isinstance(node, int) else getattr(node, "lineno", 1)
        return f"src/{self.path}:{line} {message}"

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


def top_package_of(module: str) -> str:
    """The package below exlm that a module (or a name in one) belongs to; empty for third-party modules."""
    top, _, rest = module.partition(".")
    if top == "exllamav2":
        return top
    if top != "exlm":
        return ""
    first = rest.partition(".")[0]
    return first if first in MAY_IMPORT else PUBLIC


def is_in_the_import_table(source: Source) -> list[str]:
    """Every file belongs to a package with a row in the import table."""
    first = source.path.parts[1].removesuffix(".py") if source.path.parts[0] == "exlm" else ""
    if first in ("", "__init__") or first in MAY_IMPORT:
        return []
    return [
        source.at(
            1,
            f"is in no package of IMPORT_TABLE: give {first!r} a row in tests/contract/rules.py, or move it",
        )
    ]


def imports_point_down(source: Source) -> list[str]:
    """A package imports only what its row of the import table grants."""
    here, granted = source.top_package, MAY_IMPORT[source.top_package]
    return [
        source.at(found.line, f"{here} imports {found.module}: it may import only {sorted(granted) or 'nothing'}")
        for found in source.imports
        if (there := top_package_of(found.module)) and there != here and there not in granted
    ]


def names_only_from_spec(source: Source) -> list[str]:
    """The checkpoint package knows the names of tensors, not what a model is."""
    if source.top_package != "checkpoint":
        return []
    return [
        source.at(found.line, f"imports {found.module}: checkpoint may use only exlm.spec.tensor_names")
        for found in source.imports
        if top_package_of(found.module) == "spec" and found.module.split(".")[2] not in SPEC_NAMES_FOR_CHECKPOINT
    ]


def reads_env_where_allowed(source: Source) -> list[str]:
    """Only a few modules read the environment; all others take arguments."""
    if any(source.module == name or source.module.startswith(name + ".") for name in MAY_READ_ENV):
        return []
    return [
        source.at(found.line, "imports env: pass the value in as an argument")
        for found in source.imports
        if top_package_of(found.module) == "env"
    ]


def needs_only_what_it_may(source: Source) -> list[str]:
    """The lowest packages use only the standard library; packages that only decide do not import torch."""
    bad = []
    for found in source.imports:
        top = found.module.partition(".")[0]
        if source.top_package in STANDARD_LIBRARY_ONLY and top != "exlm" and top not in sys.stdlib_module_names:
            bad.append(source.at(found.line, f"imports {top}: {source.top_package} uses only the standard library"))
        elif top == "torch" and source.top_package in WITHOUT_TORCH and source.module not in TORCH_ALLOWED:
            bad.append(source.at(found.line, f"imports torch: {source.top_package} works without it"))
    return bad


def has_no_global(source: Source) -> list[str]:
    """No function changes module state through `global`."""
    return [
        source.at(node, f"global {', '.join(node.names)}: give the state an owner")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Global)
    ]


def leaves_environment_alone(source: Source) -> list[str]:
    """Only env.py reads the environment."""
    if source.module == "exlm.env":
        return []
    complaint = "uses the environment: only exlm/env.py may"
    named = [(found.line, found.module) for found in source.imports]
    bad = [source.at(line, complaint) for line, module in named if module in {f"os.{n}" for n in ENVIRONMENT}]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT and _name(node.value) == "os":
            bad.append(source.at(node, complaint))
    return bad


def runs_no_untrusted_code(source: Source) -> list[str]:
    """Nothing in a model folder is ever executed."""
    bad = []
    for found in source.imports:
        if found.module.partition(".")[0] in UNSAFE_MODULES or found.module == "torch.load":
            bad.append(source.at(found.line, f"imports {found.module}: it can run code from a file"))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr == "load" and _name(node.value) == "torch":
            bad.append(source.at(node, "torch.load unpickles: read safetensors or GGUF"))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
            bad.append(source.at(node, f"{node.func.id}() runs text as code"))
        elif "trust_remote_code" in (
            getattr(node, "arg", None),
            getattr(node, "value", None),
            _name(node),
        ):
            bad.append(source.at(node, "trust_remote_code: code in a model folder is never run"))
    return bad


def prints_nothing(source: Source) -> list[str]:
    """Only the command line writes to the terminal."""
    if source.top_package == "cli":
        return []
    bad = []
    for node in ast.walk(source.tree):
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        written = isinstance(node, ast.Attribute) and node.attr in ("stdout", "stderr") and _name(node.value) == "sys"
        if called or written:
            bad.append(source.at(node, "writes to the terminal: log, return it, or let cli/ print"))
    return bad


def has_a_module_docstring(source: Source) -> list[str]:
    """Every module says what it is for. Public names are checked in test_public_names.py."""
    return [] if ast.get_docstring(source.tree) else [source.at(1, "has no module docstring")]


def forward_reads_no_spec(source: Source) -> list[str]:
    """Specs are read while loading; a forward pass reads attributes set in the constructor."""
    return [
        source.at(node, "forward reads a spec: bind what it says in the constructor")
        for function in _functions(source)
        if function.name == "forward"
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute | ast.Name) and _name(node) == "spec"
    ]


def only_reexports(source: Source) -> list[str]:
    """A compatibility module holds imports, assignments, a docstring and, if it refuses, one raise."""
    bad, raises = [], 0
    for node in source.tree.body:
        raises += isinstance(node, ast.Raise)
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            bad.append(source.at(node, "imports *: name what is re-exported"))
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not (text or isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign | ast.Raise)):
            bad.append(source.at(node, f"holds a {type(node).__name__}: the code belongs in exlm"))
    return bad if raises <= 1 else [*bad, source.at(1, f"raises {raises} times; once is enough")]


def import_cycles(sources: list[Source]) -> list[str]:
    """Modules that need each other to load, as one path; only imports that run at load count."""
    known = {source.module for source in sources}
    graph: dict[str, set[str]] = {}
    for source in sources:
        named = (found.module for found in source.imports if found.runs_at_import)
        loaded = {name if name in known else name.rpartition(".")[0] for name in named}
        graph[source.module] = loaded & known - {source.module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [" → ".join(reversed(error.args[1])) + ": move what both need into a third module"]
    return []


PER_FILE = (
    is_in_the_import_table,
    imports_point_down,
    names_only_from_spec,
    reads_env_where_allowed,
    needs_only_what_it_may,
    has_no_global,
    leaves_environment_alone,
    runs_no_untrusted_code,
    prints_nothing,
    has_a_module_docstring,
    forward_reads_no_spec,
)
