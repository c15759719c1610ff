"""`exlm generate`: a prompt in, text out, as it is made."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Annotated

import torch
import typer
from rich.console import Console

from exlm import Cache, Config, InputError, Model, Tokenizer, find_model


def generate(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] PROMPT",
            help="A folder, a .gguf file or owner/name on the Hub (if left out: a small model, fetched "
            "once), and what to say to it; - reads standard input.",
        ),
    ],
    max_new_tokens: Annotated[
        int, typer.Option("-n", "--max-new-tokens", help="Stop after so many tokens.")
    ] = 256,
    temperature: Annotated[float, typer.Option("-t", help="0 always takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt; use no chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="A system message for the chat template.")] = None,
    max_seq_len: Annotated[
        int | None, typer.Option(help="Longest sequence, instead of the model's own.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16.")] = None,
    quiet: Annotated[bool, typer.Option("-q", help="Only the text: no progress, no figures.")] = False,
) -> None:
    """Answer a prompt, or continue it, on the screen."""
    if max_new_tokens < 1 or temperature < 0:
        raise InputError("--max-new-tokens must be at least 1 and the temperature at least 0.")
    if len(words) > 2:
        raise InputError(f"generate takes a model and a prompt, found {len(words)} words: quote the prompt.")
    model, prompt = words if len(words) == 2 else (None, words[0])
    config = Config(find_model(model, progress=not quiet))
    config.device, config.dtype = device or config.device, dtype
    config.max_seq_len = max_seq_len or config.max_seq_len
    tokenizer = Tokenizer(config)
    ids = _encode(tokenizer, sys.stdin.read() if prompt == "-" else prompt, system, raw)
    room = config.max_seq_len - ids.shape[1]
    if room < 1:
        raise InputError(
            f"The prompt has {ids.shape[1]} tokens and the context {config.max_seq_len}: shorten the prompt, "
            "or give --max-seq-len."
        )
    language_model = Model(config)
    language_model.load(progress=not quiet)
    count, started = 0, time.perf_counter()
    stream = tokenizer.detokenizer()
    for token in _tokens(language_model, tokenizer, ids, min(room, max_new_tokens), temperature, seed):
        sys.stdout.write(stream.push(token))
        sys.stdout.flush()
        count += 1
    sys.stdout.write(stream.flush() + "\n")
    seconds = time.perf_counter() - started
    if not quiet:
        rate = f"{count / seconds:.1f} tokens/s, prompt of {ids.shape[1]} included"
        Console(stderr=True).print(f"[dim]{count} tokens in {seconds:.1f} s ({rate})[/]")


def _encode(tokenizer: Tokenizer, prompt: str, system: str | None, raw: bool) -> torch.Tensor:
    """The prompt as ids: through the chat template where there is one, else with a BOS if there is such."""
    if raw or not tokenizer.has_chat_template:
        if system is not None:
            raise InputError("--system needs a chat template, and this prompt does not go through one.")
        wants_bos = (tokenizer.tokenizer_config_dict or {}).get("add_bos_token", True)
        return tokenizer.encode(prompt, add_bos=bool(wants_bos), encode_special_tokens=True)
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return tokenizer.apply_chat_template(messages, tokenize=True)


def _tokens(
    model: Model, tokenizer: Tokenizer, ids: torch.Tensor, limit: int, temperature: float, seed: int
) -> Iterator[int]:
    """One token after the other, until a closing one or the limit."""
    cache = Cache(model, max_seq_len=ids.shape[1] + limit)
    random = torch.Generator().manual_seed(seed)
    logits = model.forward(ids, cache, last_id_only=True)
    for left in range(limit, 0, -1):
        row = logits[0, -1].cpu()
        if temperature == 0:
            token = int(row.argmax())
        else:
            token = int(torch.multinomial((row / temperature).softmax(-1), 1, generator=random))
        if token in tokenizer.eos_token_ids:
            return
        yield token
        if left > 1:
            logits = model.forward(torch.tensor([[token]]), cache)
