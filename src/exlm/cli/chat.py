"""`exlm chat`: a conversation on the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from exlm import InputError

from .session import Session

HELP = "Say something. /clear starts afresh, /quit (or an empty line at the end of input) leaves."


def chat(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A folder, a .gguf file or owner/name on the Hub; the default model if left out."
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_new_tokens: Annotated[
        int, typer.Option("-n", "--max-new-tokens", help="Longest answer in tokens.")
    ] = 512,
    temperature: Annotated[float, typer.Option("-t", help="0 always takes the likeliest token.")] = 0.7,
    top_p: Annotated[
        float, typer.Option(help="Sample from the likeliest tokens that make up this share.")
    ] = 0.95,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same conversation.")] = None,
    context: Annotated[int, typer.Option(help="Tokens the conversation may have in all.")] = 4096,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16.")] = None,
    quiet: Annotated[bool, typer.Option("-q", help="Only the text: no progress, no figures.")] = False,
) -> None:
    """Talk with a model; what was said stays in its cache, so each turn costs only itself."""
    if max_new_tokens < 1 or temperature < 0 or context < 1:
        raise InputError("--max-new-tokens and --context must be at least 1, the temperature at least 0.")
    session = Session.open(model, max_seq_len=None, device=device, dtype=dtype, quiet=quiet)
    if not session.tokenizer.has_chat_template:
        raise InputError("This model has no chat template: use `exlm generate --raw`.")
    session.load(1, context - 1)
    console = Console(stderr=True)
    if not quiet:
        console.print(f"[dim]{HELP}[/]")
    start = [{"role": "system", "content": system}] if system is not None else []
    messages = list(start)
    while (text := _ask(console)) not in (None, "/quit"):
        if text == "/clear":
            messages = list(start)
            continue
        messages.append({"role": "user", "content": str(text)})
        ids = session.encode_chat(messages)
        said = []
        try:
            for piece in session.answer(ids, max_new_tokens, temperature=temperature, top_p=top_p, seed=seed):
                said.append(piece)
                sys.stdout.write(piece)
                sys.stdout.flush()
        except KeyboardInterrupt:
            console.print("[dim](stopped)[/]")
        except InputError as error:
            messages.pop()
            console.print(f"[red]{error}[/] /clear starts afresh.")
            continue
        sys.stdout.write("\n")
        messages.append({"role": "assistant", "content": "".join(said)})
        if not quiet:
            console.print(f"[dim]{session.figures}[/]")


def _ask(console: Console) -> str | None:
    """The next line that is not blank; None at the end of input."""
    while True:
        try:
            text = console.input("[bold]> [/]").strip()
        except (EOFError, KeyboardInterrupt):
            return None
        if text:
            return text
