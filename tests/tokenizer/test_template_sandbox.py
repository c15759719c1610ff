"""Hostile templates: each is stopped in time, in bounded memory, and says why; the next one still works."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from exlm.errors import ChatTemplateError, MissingExtra
from exlm.tokenizer import template_sandbox as renderer_module
from exlm.tokenizer.template_sandbox import TemplateLimits, TemplateSandbox

SECONDS = 0.5


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateSandbox]:
    """One renderer with a short limit, which survives everything below."""
    made = TemplateSandbox(TemplateLimits(seconds=SECONDS, characters=1_000_000, memory=256 * 2**20))
    yield made
    made.close()


MESSAGES = [{"role": "user", "content": "hi"}]
RANGE = "range(99999)"

ENDLESS_LOOP = f"{{% for i in {RANGE} %}}{{% for j in {RANGE} %}}X{{% endfor %}}{{% endfor %}}"
DOUBLE = "{% set n = namespace(s=START) %}{% for i in range(64) %}X{% endfor %}"


def endless(body: str) -> str:
    """What to do for ever."""
    return ENDLESS_LOOP.replace("X", body)


def doubling(start: str, body: str) -> str:
    """What to do 64 times to n.s."""
    return DOUBLE.replace("START", start).replace("X", body)


ENDLESS_TEMPLATES = {
    "nested loops": endless(""),
    "nested loops that write": endless("{{ '' }}"),
    "a loop over a namespace": "{% set n = namespace(x=0) %}" + endless("{% set n.x = n.x + 1 %}"),
    "squaring a number": "{% set n = namespace(x=3) %}" + endless("{% set n.x = n.x * n.x %}"),
    "filters in filters": endless("{% set x = range(9999) | map('string') | join | length %}"),
    "a macro called for ever": "{% macro f() %}" + endless("") + "{% endmacro %}{{ f() }}",
    "a sort inside a loop": endless("{% set x = range(9999) | list | sort(reverse=true) %}"),
    "a recursive loop": "{% for i in range(9999) recursive %}" + endless("") + "{% endfor %}",
}

RESOURCE_ATTACKS = {
    "repeating a string": "{{ 'a' * 10 ** 10 }}",
    "repeating a list": "{{ ([1] * 10 ** 10) | length }}",
    "doubling a string": doubling("'aa'", "{% set n.s = n.s ~ n.s %}"),
    "doubling by adding": doubling("'aa'", "{% set n.s = n.s + n.s %}"),
    "doubling a list": doubling("[1, 2]", "{% set n.s = n.s + n.s %}"),
    "doubling by blocks": doubling("'aa'", "{% set s %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = s %}"),
    "replacing": doubling("'aa'", "{% set n.s = n.s.replace('a', n.s) %}"),
    "centring": "{{ 'a' | center(10 ** 10) }}",
    "justifying": "{{ 'a'.ljust(10 ** 10) }}",
    "a wide format": "{{ '%9999999999d' % 1 }}",
    "a wide format filter": "{{ '%9999999999d' | format(1) }}",
    "a wide str.format": "{{ '{:>9999999999}'.format(1) }}",
    "indenting": "{{ [1, [2]] | tojson(indent=10 ** 9) }}",
    "a batch": "{{ [1] | batch(10 ** 9, 0) | list | length }}",
    "lorem ipsum": "{{ lipsum(n=10 ** 9) }}",
    "a long range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "a power": "{{ 10 ** (10 ** 9) }}",
    "a power of powers": "{{ 9 ** (9 ** (9 ** 9)) }}",
    "a negative power of a power": "{{ (-7) ** (7 ** 12) }}",
    "a macro that calls itself": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "a deep expression": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "too much output": "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
}

SANDBOX_ESCAPES = {
    "the class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__.os }}",
    "a function's globals by name": "{{ (raise_exception | attr('__globals__'))['os'] }}",
    "builtins": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "a format string": "{{ '{0.__class__.__mro__}'.format('') }}",
    "a format map": "{{ '{x.__class__.__mro__}'.format_map({'x': 1}) }}",
    "the format method by name": "{{ ('{0.__class__.__mro__}' | attr('format'))('') }}",
    "changing a message": "{{ messages.append(1) }}",
    "changing a message's text": "{{ messages[0].update({'content': 'x'}) }}",
    "the template itself": "{{ self._TemplateReference__context.environment }}",
    "a generator's frame": "{{ (messages | map('upper')).gi_frame.f_globals }}",
    "a namespace's insides": "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    "another file": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}",
    "a parent": "{% extends '/etc/passwd' %}",
}


@pytest.mark.parametrize("name", ENDLESS_TEMPLATES)
def test_endless_templates_are_stopped(renderer: TemplateSandbox, name: str) -> None:
    source = ENDLESS_TEMPLATES[name]
    started = time.monotonic()
    with pytest.raises(ChatTemplateError, match=r"x\.jinja: the chat template ran longer than 0\.5 s"):
        renderer.render(source, {"messages": MESSAGES}, "x.jinja")
    assert time.monotonic() - started < SECONDS + 10


@pytest.mark.parametrize("name", RESOURCE_ATTACKS)
def test_resource_attacks_are_stopped(renderer: TemplateSandbox, name: str) -> None:
    started = time.monotonic()
    with pytest.raises(ChatTemplateError, match=r"x\.jinja.* the (chat template|process rendering)"):
        renderer.render(RESOURCE_ATTACKS[name], {"messages": MESSAGES}, "x.jinja")
    assert time.monotonic() - started < SECONDS + 10


@pytest.mark.parametrize("name", SANDBOX_ESCAPES)
def test_sandbox_escapes_fail(renderer: TemplateSandbox, name: str) -> None:
    with pytest.raises(
        ChatTemplateError, match=r"x\.jinja, line 1: .*(tried to access what the sandbox forbids|no loader)"
    ):
        renderer.render(SANDBOX_ESCAPES[name], {"messages": MESSAGES}, "x.jinja")


def test_forbidden_attributes_render_as_empty(renderer: TemplateSandbox) -> None:
    assert renderer.render("{{ raise_exception.__globals__ }}{{ ''.__class__ }}", {}, "x") == ""


def test_the_next_template_still_works(renderer: TemplateSandbox) -> None:
    assert renderer.render("{{ messages[0].content }}", {"messages": MESSAGES}, "x") == "hi"
    with pytest.raises(ChatTemplateError):
        renderer.render(ENDLESS_TEMPLATES["nested loops"], {}, "x")
    assert renderer.render("{{ messages[0].content }}", {"messages": MESSAGES}, "x") == "hi"


def test_errors_say_where_and_why(renderer: TemplateSandbox) -> None:
    for source, says in [
        ("a\n{% if %}", r"t\.json, line 2: the chat template is not valid"),
        ("a\n\n{{ raise_exception('no system role') }}", r"line 3: .*refused these messages: no system role"),
        ("{{ nothing.at.all }}", r"line 1: .*'nothing' is undefined"),
        ("{{ 1 / 0 }}", "line 1: the chat template failed: ZeroDivisionError"),
        ("{{ ''.__class__.x }}", "tried to access what the sandbox forbids|is unsafe"),
    ]:
        with pytest.raises(ChatTemplateError, match=says):
            renderer.render(source, {"messages": MESSAGES}, "t.json")


def test_variables_must_be_json_values(renderer: TemplateSandbox) -> None:
    with pytest.raises(ChatTemplateError, match="found a object"):
        renderer.render("x", {"messages": [{"image": object()}]}, "x")
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(ChatTemplateError, match="only JSON values"):
        renderer.render("x", {"messages": loop}, "x")
    odd = {"text": "\ud800\x00\u2028\U0001f999", "number": 1.5, "none": None, "tuple": (1, 2)}
    assert renderer.render("{{ v.text }}{{ v.number }}{{ v.none }}{{ v.tuple }}", {"v": odd}, "x") == (
        "\ud800\x00\u2028\U0001f9991.5None[1, 2]"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_worker_has_a_memory_limit(renderer: TemplateSandbox) -> None:
    renderer.render("x", {}, "x")
    limits = Path(f"/proc/{worker_pid(renderer)}/limits").read_text()
    rows = {line[:26].strip(): line[26:].split()[:2] for line in limits.splitlines()}
    assert rows["Max address space"] == [str(256 * 2**20)] * 2
    assert rows["Max file size"] == ["0", "0"]


def worker_pid(renderer: TemplateSandbox) -> int:
    worker = renderer._worker
    assert worker is not None
    return worker._process.pid


def test_a_dead_idle_worker_is_replaced(renderer: TemplateSandbox) -> None:
    renderer.render("x", {}, "x")
    os.kill(worker_pid(renderer), signal.SIGKILL)
    assert renderer.render("y", {}, "x") == "y"


def test_threads_share_one_process() -> None:
    shared = TemplateSandbox()
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(shared.render("{{ n }}", {"n": n}, "x"))) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shared.close()
    assert sorted(found) == [str(n) for n in range(8)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_gets_its_own_worker() -> None:
    program = (
        "import os, sys\n"
        "from exlm.tokenizer.template_sandbox import TemplateSandbox\n"
        "r = TemplateSandbox()\n"
        "assert r.render('a', {}, 'x') == 'a'\n"
        "child = os.fork()\n"
        "assert r.render('{{ n }}', {'n': child}, 'x') == str(child)\n"
        "if child:\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "    assert r.render('b', {}, 'x') == 'b'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": source_path()}, timeout=60)
    assert done.returncode == 0


def source_path() -> str:
    return str(Path(renderer_module.__file__).parents[2])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_ends_with_its_owner() -> None:
    made = TemplateSandbox()
    made.render("x", {}, "x")
    number = worker_pid(made)
    assert Path(f"/proc/{number}").exists()
    del made
    gc.collect()
    assert not Path(f"/proc/{number}").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_orphaned_worker_in_an_endless_loop_ends() -> None:
    program = (
        "import os, threading, time\n"
        "from exlm.tokenizer.template_sandbox import TemplateLimits, TemplateSandbox\n"
        "r = TemplateSandbox(TemplateLimits(seconds=1.0))\n"
        "r.render('x', {}, 'x')\n"
        "loop = '{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}'\n"
        "threading.Thread(target=r.render, args=(loop, {}, 'x'), daemon=True).start()\n"
        "time.sleep(0.3)\n"
        "print(r._worker._process.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    environment = {**os.environ, "PYTHONPATH": source_path()}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, timeout=60)
    number = int(done.stdout)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{number}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{number}").exists()


def test_a_process_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(ChatTemplateError, match=r"did not start: .*/no/such/python"):
        TemplateSandbox().render("x", {}, "x")


def test_a_template_that_nothing_could_stop_is_not_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    made = TemplateSandbox()
    assert made.render("x", {}, "x") == "x"
    with monkeypatch.context() as patched:
        patched.setattr("threading.Thread.start", _no_thread)
        for renderer in (made, TemplateSandbox()):
            with pytest.raises(ChatTemplateError, match=r"can't start new thread.*ulimit -v"):
                renderer.render("x", {}, "x")
    assert made.render("y", {}, "x") == "y"
    made.close()


def _no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_the_default_limits() -> None:
    made = TemplateSandbox()
    started = time.monotonic()
    with pytest.raises(ChatTemplateError, match="ran longer than 2 s"):
        made.render(endless(""), {}, "x")
    assert 2 <= time.monotonic() - started < 12
    made.close()


def test_without_jinja_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="pip install 'jinja2"):
        TemplateSandbox().render("x", {}, "x")
