"""The options of `serve` and `batch` that say how a model is loaded.

A command takes them as one parameter, `hosting`; the decorator `with_model_options` replaces it by an option
for each field of `ModelOptions`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from exlm import InputError

if TYPE_CHECKING:
    from exlm.serve import ModelSpec

MODEL_HELP = "A folder, a .gguf file or owner/name on the Hub; a small default model if left out."

Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1.")]
Dtype = Annotated[str | None, typer.Option(help="Compute precision: float32, float16 or bfloat16.")]
Name = Annotated[str | None, typer.Option(help="The model's name in requests; default: that of its file.")]
Adapters = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=FOLDER", help="A LoRA adapter, by the name that requests use."),
]


@dataclass(frozen=True)
class ModelOptions:
    """How a model is loaded, and its name in requests."""

    name: Name = None
    lora: Adapters = None
    max_seq_len: Annotated[
        int | None,
        typer.Option(min=1, help="Context length; default: the model's, at most 8192."),
    ] = None
    cache_tokens: Annotated[
        int | None, typer.Option(min=1, help="KV-cache tokens; default 4 × --max-seq-len.")
    ] = None
    cache_type: Annotated[str, typer.Option(help="Type of the KV cache: fp16, q8, q6, q4 or fp8.")] = "fp16"
    device: Device = None
    dtype: Dtype = None
    draft: Annotated[str | None, typer.Option(help="A draft model for speculative decoding, or ngram.")] = (
        None
    )
    max_batch_size: Annotated[int | None, typer.Option(min=1, help="Most sequences that decode at once.")] = (
        None
    )

    def listing(self, model: str | None) -> ModelSpec:
        """The model named on the command line."""
        named = self.name or ("default" if model is None else Path(model).name.removesuffix(".gguf"))
        return self.listing_of(
            named or "default", model, draft=self.draft, loras=parse_pairs("--lora", self.lora, "FOLDER")
        )

    def listing_of(self, name: str, model: str | None, **more: Any) -> ModelSpec:
        """A model loaded with these options; the draft and the adapters belong to the first one only."""
        from exlm.serve import ModelSpec

        return ModelSpec(
            name,
            model,
            max_seq_len=self.max_seq_len,
            cache_tokens=self.cache_tokens,
            cache_type=self.cache_type,
            device=self.device,
            dtype=self.dtype,
            max_batch_size=self.max_batch_size,
            **more,
        )


def with_model_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter `hosting` by an option for each field of `ModelOptions`."""
    types = get_type_hints(command, include_extras=True) | get_type_hints(ModelOptions, include_extras=True)
    option_parameters = inspect.signature(ModelOptions).parameters
    parameters: list[inspect.Parameter] = []
    for one in inspect.signature(command).parameters.values():
        parameters += option_parameters.values() if one.name == "hosting" else [one]

    @functools.wraps(command)
    def wrapper(**options: Any) -> None:
        chosen = {name: options.pop(name) for name in option_parameters if name in options}
        command(**options, hosting=ModelOptions(**chosen))

    wrapper.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [one.replace(kind=one.KEYWORD_ONLY, annotation=types[one.name]) for one in parameters]
    )
    wrapper.__annotations__ = {one.name: types[one.name] for one in parameters}
    return wrapper


def parse_pairs(option: str, given: list[str] | None, what: str) -> dict[str, str]:
    """Parse an option that takes NAME=VALUE and may be repeated."""
    found: dict[str, str] = {}
    for one in given or ():
        name, equals, value = one.partition("=")
        if not name or not equals or not value:
            raise InputError(f"{option} takes NAME={what}, found {one!r}.")
        if name in found:
            raise InputError(f"{option} names {name!r} twice: {found[name]} and {value}.")
        found[name] = value
    return found
