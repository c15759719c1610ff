"""`exlm generate`: stream the answer to one prompt."""

from __future__ import annotations

import os
import sys
from glob import escape, glob
from typing import Annotated

import typer
from rich.console import Console

from exlm import InputError

from .input import check_utf8
from .model_options import CpuActivationBits, Device, Dtype
from .model_session import ModelSession, Temperature, TopP

Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print the text only: no progress, no statistics.")]


def generate(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] PROMPT",
            help="A folder, a .gguf file or owner/name on the Hub (if left out: a small model, downloaded "
            "once), and the prompt; - reads it from standard input.",
        ),
    ],
    max_new_tokens: Annotated[int, typer.Option("-n", "--max-new-tokens", help="Longest answer, in tokens.")] = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampler: the same seed gives the same text.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt; use no chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="A system message for the chat template.")] = None,
    max_seq_len: Annotated[int | None, typer.Option(min=1, help="Context length, instead of the model's.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    cpu_activation_bits: CpuActivationBits = 16,
    quiet: Quiet = False,
) -> None:
    """Answer a prompt, or continue it with --raw.

    Example: exlm generate ./llama.gguf "Why is the sky blue?"
    """
    if max_new_tokens < 1 or not temperature >= 0:  # written so that NaN is refused, too
        raise InputError("--max-new-tokens must be at least 1 and the temperature at least 0.")
    if len(words) > 2:
        raise InputError(f"generate takes a model and a prompt, found {len(words)} words: quote the prompt.")
    if len(words) == 1 and _is_model(words[0]):
        raise InputError(
            f"{words[0]} is a model, and there is no prompt: add the prompt in quotes. If this is the prompt "
            "for the default model, give - and write it to standard input."
        )
    model, prompt = words if len(words) == 2 else (None, words[0])
    session = ModelSession.open(
        model,
        max_seq_len=max_seq_len,
        device=device,
        dtype=dtype,
        cpu_activation_bits=cpu_activation_bits,
        quiet=quiet,
    )
    text = check_utf8(sys.stdin.read() if prompt == "-" else prompt)
    if raw or not session.tokenizer.has_chat_template:
        if system is not None:
            raise InputError("--system needs a chat template, and this prompt does not go through one.")
        ids = session.encode_raw(text)
    else:
        messages = [{"role": "user", "content": text}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        ids = session.encode_chat(messages)
    session.load(ids.shape[1], max_new_tokens)
    answer = session.stream_sampled(ids, max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    for piece in answer:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()  # before the statistics, where both streams go to one file
    if not quiet:
        Console(stderr=True).print(f"[dim]{session.stats}[/]")


def _is_model(word: str) -> bool:
    """Whether a word is the path of a model. It may be any text, even one too long for a path."""
    path = os.path.expanduser(word)
    if os.path.isdir(path):
        return os.path.isfile(os.path.join(path, "config.json")) or bool(glob(f"{escape(path)}/*.gguf"))
    return path.lower().endswith(".gguf") and os.path.isfile(path)
