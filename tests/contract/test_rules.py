"""Each rule: sources that break it and the message they get, and sources that keep it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePosixPath

import pytest

from tests.contract import rules
from tests.contract.rules import Source

Rule = Callable[[Source], list[str]]


def source(path: str, text: str) -> Source:
    return Source(PurePosixPath(path), text)


BAD: list[tuple[Rule, str, str, str]] = [
    (rules.is_in_the_import_table, "exlm/stuff/thing.py", "", "'stuff'"),
    (rules.is_in_the_import_table, "exlm/stuff.py", "", "in no package of IMPORT_TABLE"),
    (
        rules.imports_point_down,
        "exlm/spec/a.py",
        "from ..families import llama",
        "spec imports exlm.families",
    ),
    (
        rules.imports_point_down,
        "exlm/tokenizer/a.py",
        "from ..spec.model import Model",
        "tokenizer imports exlm.spec",
    ),
    (rules.imports_point_down, "exlm/formats/a.py", "from ..kernels import dispatch", "formats imports"),
    (rules.imports_point_down, "exlm/kvcache/a.py", "from ..checkpoint.files import File", "kvcache imports"),
    (rules.imports_point_down, "exlm/nn/a.py", "from ..formats import Weight", "nn imports exlm.formats"),
    (rules.imports_point_down, "exlm/nn/a.py", "from ..checkpoint import writer", "nn imports"),
    (
        rules.imports_point_down,
        "exlm/nn/a.py",
        "import exlm.families.llama",
        "nn imports exlm.families.llama",
    ),
    (
        rules.imports_point_down,
        "exlm/nn/deep/a.py",
        "from ...model.build import build",
        "nn imports exlm.model",
    ),
    (rules.imports_point_down, "exlm/nn/a.py", "def f():\n    from .. import model", "nn imports exlm.model"),
    (rules.imports_point_down, "exlm/nn/a.py", "import exlm", "nn imports exlm"),
    (rules.imports_point_down, "exlm/nn/a.py", "from .. import Model", "nn imports exlm.Model"),
    (rules.imports_point_down, "exlm/config.py", "from .tokenizer import Tokenizer", "config imports"),
    (
        rules.imports_point_down,
        "exlm/generator/a.py",
        "from ..model.runner import Runner",
        "generator imports",
    ),
    (rules.imports_point_down, "exlm/generator/a.py", "from ..kvcache import Cache", "generator imports"),
    (rules.imports_point_down, "exlm/testing.py", "from .nn import Linear", "testing imports"),
    (rules.imports_point_down, "exlm/errors.py", "from .spec import Model", "it may import only nothing"),
    (rules.imports_point_down, "exlm/serve/a.py", "from ..errors import ExlmError", "serve imports"),
    (rules.imports_point_down, "exlm/cli/chat.py", "from exlm.model import Model", "cli imports exlm.model"),
    (
        rules.imports_point_down,
        "exlm/cli/chat.py",
        "from .. import tokenizer",
        "cli imports exlm.tokenizer",
    ),
    (rules.imports_point_down, "exlm/__init__.py", "from .cli import main", "exlm imports exlm.cli"),
    (
        rules.imports_point_down,
        "exlm/tokenizer/a.py",
        "import_module('exlm.nn')",
        "tokenizer imports exlm.nn",
    ),
    (
        rules.imports_point_down,
        "exllamav2/a.py",
        "from exlm.model import Model",
        "exllamav2 imports exlm.model",
    ),
    (
        rules.names_only_from_spec,
        "exlm/checkpoint/a.py",
        "from ..spec.model import Model",
        "exlm.spec.tensor_names",
    ),
    (rules.names_only_from_spec, "exlm/checkpoint/a.py", "from ..spec import Model, TensorLocation", "Model"),
    (rules.reads_env_where_allowed, "exlm/nn/a.py", "from .. import env", "as an argument"),
    (rules.reads_env_where_allowed, "exlm/kernels/interface.py", "from ..env import x", "env"),
    (rules.reads_env_where_allowed, "exlm/modelling.py", "from .env import x", "env"),
    (rules.needs_only_what_it_may, "exlm/spec/a.py", "import numpy as np", "imports numpy"),
    (rules.needs_only_what_it_may, "exlm/env.py", "import torch", "only the standard library"),
    (rules.needs_only_what_it_may, "exlm/families/a.py", "from torch import nn", "imports torch"),
    (rules.needs_only_what_it_may, "exlm/tokenizer/a.py", "def f():\n    import torch", "works without it"),
    (rules.needs_only_what_it_may, "exlm/generator/a.py", "import torch.nn", "works without it"),
    (rules.needs_only_what_it_may, "exlm/tokenizer/a.py", "if TYPE_CHECKING:\n    import torch", "torch"),
    (rules.has_no_global, "exlm/a.py", "def f():\n    global count\n    count = 1", "global count"),
    (rules.leaves_environment_alone, "exlm/nn/a.py", "import os\nx = os.environ['A']", ":2 "),
    (rules.leaves_environment_alone, "exlm/nn/a.py", "import os\nx = os.getenv('A')", "env.py"),
    (rules.leaves_environment_alone, "exlm/cli/a.py", "from os import environ", "env.py"),
    (rules.leaves_environment_alone, "exlm/sampling/settings.py", "import os\nos.putenv('A', 'b')", ":2 "),
    (rules.runs_no_untrusted_code, "exlm/a.py", "import pickle", "imports pickle"),
    (rules.runs_no_untrusted_code, "exlm/a.py", "from pickle import loads", "imports pickle"),
    (rules.runs_no_untrusted_code, "exlm/a.py", "def f():\n    import dill as d", "imports dill"),
    (rules.runs_no_untrusted_code, "exlm/a.py", "x = torch.load('a.bin')", "unpickles"),
    (rules.runs_no_untrusted_code, "exlm/a.py", "from torch import load", "torch.load"),
    (rules.runs_no_untrusted_code, "exlm/a.py", "eval('1')", "eval()"),
    (rules.runs_no_untrusted_code, "exlm/a.py", "exec(text)", "exec()"),
    (rules.runs_no_untrusted_code, "exlm/a.py", "load(d, trust_remote_code=True)", "never run"),
    (rules.runs_no_untrusted_code, "exlm/a.py", "options['trust_remote_code'] = True", "never run"),
    (rules.runs_no_untrusted_code, "exlm/a.py", "def f(trust_remote_code): pass", "never run"),
    (rules.prints_nothing, "exlm/model/a.py", "print('loading')", "terminal"),
    (rules.prints_nothing, "exlm/model/a.py", "import sys\nsys.stderr.write('x')", ":2 "),
    (rules.has_a_module_docstring, "exlm/a.py", "x = 1", "no module docstring"),
    (
        rules.forward_reads_no_spec,
        "exlm/nn/a.py",
        "def forward(self, x):\n    return self.spec.eps",
        "bind what",
    ),
    (
        rules.forward_reads_no_spec,
        "exlm/nn/a.py",
        "def forward(x, spec):\n    return spec.eps",
        "forward reads",
    ),
    (rules.only_reexports, "exllamav2/a.py", "def f(): ...", "FunctionDef"),
    (rules.only_reexports, "exllamav2/a.py", "class A: ...", "ClassDef"),
    (rules.only_reexports, "exllamav2/a.py", "if x:\n    y = 1", "If"),
    (rules.only_reexports, "exllamav2/a.py", "from exlm import *", "imports *"),
    (rules.only_reexports, "exllamav2/a.py", "raise ImportError('a')\nraise ImportError('b')", "2 times"),
    (rules.only_reexports, "exllamav2/a.py", "print('hello')", "holds a Expr"),
]

GOOD: list[tuple[Rule, str, str]] = [
    (rules.has_a_module_docstring, "exlm/a.py", "'''A.'''\ndef f(): ..."),
    (rules.is_in_the_import_table, "exlm/__init__.py", ""),
    (rules.is_in_the_import_table, "exlm/config.py", ""),
    (rules.imports_point_down, "exlm/families/qwen.py", "from ..spec import Model\nfrom .llama import llama"),
    (rules.imports_point_down, "exlm/families/__init__.py", "from . import llama\nimport torchvision"),
    (
        rules.imports_point_down,
        "exlm/nn/a.py",
        "from ..kvcache import Cache\nfrom ..errors import InputError",
    ),
    (rules.imports_point_down, "exlm/model/a.py", "from ..config import Config\nfrom .. import checkpoint"),
    (
        rules.imports_point_down,
        "exlm/__init__.py",
        "from .model import Model\nfrom .version import __version__",
    ),
    (
        rules.imports_point_down,
        "exlm/cli/a.py",
        "from .. import Model\nfrom exlm import Config\nfrom . import b",
    ),
    (
        rules.imports_point_down,
        "exllamav2/a.py",
        "from exlm import Model\nfrom exlm.legacy import BaseGenerator",
    ),
    (
        rules.names_only_from_spec,
        "exlm/checkpoint/a.py",
        "from ..spec import TensorLocation\nfrom ..spec.tensor_names import TensorNames",
    ),
    (rules.names_only_from_spec, "exlm/nn/a.py", "from ..spec import Model"),
    (rules.reads_env_where_allowed, "exlm/kernels/dispatch.py", "from ..settings import legacy_switches"),
    (rules.reads_env_where_allowed, "exlm/sampling/sampler.py", "from .settings import Settings"),
    (rules.needs_only_what_it_may, "exlm/generator/results.py", "import torch"),
    (rules.needs_only_what_it_may, "exlm/tokenizer/a.py", "import tokenizers"),
    (rules.needs_only_what_it_may, "exlm/spec/a.py", "import dataclasses\nfrom .layers import Norm"),
    (rules.leaves_environment_alone, "exlm/env.py", "import os\nx = os.environ"),
    (rules.leaves_environment_alone, "exlm/nn/a.py", "import os\nx = os.cpu_count()"),
    (
        rules.runs_no_untrusted_code,
        "exlm/a.py",
        "'''No trust_remote_code.'''\nmodel.eval()\nsafetensors.torch.x",
    ),
    (rules.prints_nothing, "exlm/cli/a.py", "print('hello')"),
    (rules.forward_reads_no_spec, "exlm/nn/a.py", "def __init__(self, spec):\n    self.eps = spec.eps"),
    (rules.only_reexports, "exllamav2/a.py", "'''A.'''\nfrom exlm import Model as M\n__all__ = ['M']"),
    (rules.only_reexports, "exllamav2/ext.py", "'''Gone.'''\nraise ImportError('use exlm.Model')"),
]


@pytest.mark.parametrize(("rule", "path", "text", "complaint"), BAD)
def test_a_source_that_breaks_a_rule(rule: Rule, path: str, text: str, complaint: str) -> None:
    found = rule(source(path, text))
    assert len(found) == 1, found
    assert complaint in found[0]
    assert found[0].startswith(f"src/{path}:")


@pytest.mark.parametrize(("rule", "path", "text"), GOOD)
def test_a_source_that_keeps_a_rule(rule: Rule, path: str, text: str) -> None:
    assert rule(source(path, text)) == []


def test_every_rule_has_a_bad_example() -> None:
    shown = {rule for rule, *_ in BAD}
    assert shown == {*rules.PER_FILE, rules.only_reexports}


def test_an_import_cycle_is_found_and_its_path_named() -> None:
    files = [
        source("exlm/nn/__init__.py", "from .a import A"),
        source("exlm/nn/a.py", "from .b import B"),
        source("exlm/nn/b.py", "from . import c"),
        source("exlm/nn/c.py", "from .a import A"),
    ]
    (found,) = rules.import_cycles(files)
    for step in ("exlm.nn.a → exlm.nn.b", "exlm.nn.b → exlm.nn.c", "exlm.nn.c → exlm.nn.a"):
        assert step in found


def test_imports_that_do_not_run_at_load_make_no_cycle() -> None:
    files = [
        source("exlm/nn/a.py", "from .b import B"),
        source("exlm/nn/b.py", "def f():\n    from .a import A"),
        source("exlm/nn/c.py", "if TYPE_CHECKING:\n    from .d import D"),
        source("exlm/nn/d.py", "from .c import C"),
    ]
    assert rules.import_cycles(files) == []
