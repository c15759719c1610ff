"""The worker process that renders chat templates. It is started by its path and imports nothing from exlm.

A chat template is untrusted code. Jinja's sandbox keeps it from Python's internals but limits neither time
nor memory. So the process sets a resource limit on its memory, and a watchdog thread that does not need the
GIL (faulthandler's) ends it when a rendering takes too long. Requests and responses are JSON, each preceded
by its length in eight bytes.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import IO, Any

MIN_JINJA = (3, 1, 6)  # earlier versions have known sandbox escapes
MAX_POWER_BITS = 4096  # of the result of **
MAX_REPEATED_ELEMENTS = 10_000_000  # of a string or list that * repeats


def main() -> None:
    """Serve requests until the parent closes the pipe."""
    requests = sys.stdin.buffer
    responses = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    setup = read_message(requests)
    if setup is None:
        return
    sys.path[:0] = setup["path"]
    try:
        jinja_problem = _jinja_problem()
    except ImportError as error:
        jinja_problem = str(error)
    write_message(responses, {"problem": jinja_problem})
    if jinja_problem:
        return
    _limit_resources(setup["memory"])
    renderer = TemplateRenderer()
    with open(os.devnull, "w") as devnull:
        while (request := read_message(requests)) is not None:
            faulthandler.dump_traceback_later(request["seconds"], exit=True, file=devnull)
            response = renderer.respond(request)
            faulthandler.cancel_dump_traceback_later()
            write_message(responses, response)


def read_message(stream: IO[bytes], max_bytes: int = 2**63) -> dict[str, Any] | None:
    """The next message; None at the end of the stream, and if it is longer than `max_bytes`."""
    header = stream.read(8)
    size = int.from_bytes(header, "big")
    if len(header) < 8 or size > max_bytes:
        return None
    body = stream.read(size)
    message: dict[str, Any] | None = json.loads(body) if len(body) == size else None
    return message


def write_message(stream: IO[bytes], message: Mapping[str, Any]) -> None:
    """Write a message and flush the stream."""
    body = json.dumps(message).encode("ascii")
    stream.write(len(body).to_bytes(8, "big") + body)
    stream.flush()


def _jinja_problem() -> str | None:
    import jinja2

    version = tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdigit())
    return None if version >= MIN_JINJA else f"found jinja2 {jinja2.__version__}"


def _limit_resources(memory: int) -> None:
    """Limit memory and forbid writing files and core dumps, where the system supports it."""
    try:
        import resource
    except ImportError:
        return
    for resource_kind, limit in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        try:
            resource.setrlimit(resource_kind, (limit, limit))
        except (OSError, ValueError):
            continue


class OutputTooLong(Exception):
    """The output exceeds its limit."""


class TemplateRenderer:
    """Compiles templates, caches them and renders them."""

    MAX_COMPILED = 16

    def __init__(self) -> None:
        """Make the environment that all templates share; no template can change it."""
        self._environment = make_environment()
        self._compiled: dict[str, Any] = {}

    def respond(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The rendered `text`; or the kind of failure, `failed`, with `detail` and the template's `line`."""
        import jinja2

        try:
            return {"text": self._render(request["source"], request["variables"], request["characters"])}
        except jinja2.TemplateSyntaxError as error:
            return {"failed": "syntax", "detail": error.message, "line": error.lineno}
        except OutputTooLong:
            return {"failed": "long"}
        except MemoryError:
            return {"failed": "memory"}
        except RecursionError:
            return {"failed": "recursion"}
        except jinja2.exceptions.SecurityError as error:
            return {"failed": "security", "detail": _message(error), "line": _template_line(error)}
        except jinja2.TemplateError as error:
            return {"failed": "raised", "detail": _message(error), "line": _template_line(error)}
        except Exception as error:
            detail = f"{type(error).__name__}: {_message(error)}"
            return {"failed": "error", "detail": detail, "line": _template_line(error)}

    def _render(self, source: str, variables: dict[str, Any], characters: int) -> str:
        if source not in self._compiled:
            if len(self._compiled) >= self.MAX_COMPILED:
                self._compiled.clear()
            self._compiled[source] = self._environment.from_string(source)
        parts: list[str] = []
        size = 0
        for part in self._compiled[source].generate(variables):
            size += len(part)
            if size > characters:
                raise OutputTooLong
            parts.append(part)
        return "".join(parts)


def make_environment() -> Any:
    """A Jinja sandbox with the extensions, filters and globals that chat templates use."""
    import jinja2.exceptions
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox
    import jinja2.utils

    class Generation(jinja2.ext.Extension):
        """`{% generation %}`, which marks the assistant's text for training; renders its body unchanged."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    class Namespace(jinja2.utils.Namespace):
        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a namespace may not have an attribute named {name!r}")
            super().__setitem__(name, value)

    class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_size(operator, left, right)
            return super().call_binop(context, operator, left, right)

    class Dict:
        def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
            return dict(*args, **values)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def namespace(*args: Any, **values: Any) -> Namespace:
        made = Namespace()
        for name, value in dict(*args, **values).items():
            made[name] = value
        return made

    jinja_environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    jinja_environment.filters["tojson"] = to_json
    jinja_environment.globals["raise_exception"] = raise_exception
    jinja_environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    jinja_environment.globals["namespace"] = namespace
    jinja_environment.globals["dict"] = Dict()
    return jinja_environment


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` filter, without Jinja's HTML escapes and with non-ASCII letters unchanged."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _check_size(operator: str, left: Any, right: Any) -> None:
    """Refuse products and powers that are so large that only an attack computes them."""
    if operator == "*":
        for sequence, count in ((left, right), (right, left)):
            if (
                isinstance(sequence, (str, bytes, list, tuple))
                and isinstance(count, int)
                and len(sequence) * count > MAX_REPEATED_ELEMENTS
            ):
                raise OverflowError(f"repeating {len(sequence)} elements {count} times")
    elif isinstance(left, int) and isinstance(right, int) and left.bit_length() * max(right, 0) > MAX_POWER_BITS:
        raise OverflowError("a power of too many digits")


def _message(error: Exception) -> str:
    return str(error)[:2000]


def _template_line(error: Exception) -> int | None:
    """The line of the template that raised the error."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


if __name__ == "__main__":
    main()
