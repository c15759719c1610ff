"""The `exlm` program: registers the commands, and turns errors into a message and an exit code."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from exlm import ExlmError, __version__, env

from . import restore_sigint
from .batch import batch
from .bench import bench, tune
from .cache import cache
from .chat import chat
from .convert import convert
from .generate import generate
from .info import info, plan
from .quantize import eval_, quantize
from .serve import serve
from .startup import ensure_stdio

app = typer.Typer(
    help="Runs quantised language models: a folder of weights in, text out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Run a model": {"generate": generate, "chat": chat, "serve": serve, "batch": batch},
    "Inspect a model": {"info": info, "plan": plan, "eval": eval_},
    "Quantise and convert": {"quantize": quantize, "convert": convert},
    "Measure speed": {"bench": bench, "tune": tune},
    "Cache folder": {"cache": cache},
}
"""Every command by its name, in the groups of `exlm --help`."""

for _group, _commands in COMMANDS.items():
    for _name, _command in _commands.items():
        app.command(_name, rich_help_panel=_group)(_command)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"exlm {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    logging.basicConfig(level=env.log_level(), format="%(name)s: %(message)s")


def main() -> None:
    """Run a command; errors of exlm and of the system are shown in one paragraph, without a traceback."""
    restore_sigint()
    ensure_stdio()
    if isinstance(sys.stdout, io.TextIOWrapper):
        with suppress(OSError):  # the file descriptor may have been closed and reused
            sys.stdout.reconfigure(errors="replace")  # models write characters some terminals cannot show
    if isinstance(sys.stdin, io.TextIOWrapper):
        with suppress(OSError):
            sys.stdin.reconfigure(errors="surrogateescape")  # `input.check_utf8` reports invalid UTF-8
    try:
        app()
    except (ExlmError, OSError) as error:  # OSError: such as a full disk or a file without read permission
        logging.getLogger(__name__).debug("Traceback of this error:", exc_info=True)
        Console(stderr=True, soft_wrap=True).print(
            f"[bold red]{type(error).__name__}[/]:", escape(str(error)), markup=True
        )
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
