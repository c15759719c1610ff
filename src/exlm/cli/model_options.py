"""The options that `serve` and `batch` share: how a model is loaded, and on how many GPUs of a Ray cluster.

A command takes the first kind as one parameter, `model_options`; the decorator `with_model_options` replaces
it by an option for each field of `ModelOptions`.
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
    from exlm.scale import ClusterConfig
    from exlm.serve import ModelSpec

MODEL_HELP = "A folder, a .gguf file or owner/name on the Hub; a small default model if left out."

Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1.")]
Dtype = Annotated[str | None, typer.Option(help="Compute precision: float32, float16 or bfloat16.")]
CpuActivationBits = Annotated[
    int, typer.Option(metavar="16 or 8", help="On a CPU: bits of activations. 8 reads prompts faster, less exactly.")
]
Name = Annotated[str | None, typer.Option(help="The model's name in requests; default: that of its file.")]
Adapters = Annotated[
    list[str] | None, typer.Option(metavar="NAME=FOLDER", help="A LoRA adapter, by the name that requests use.")
]
Ray = Annotated[bool, typer.Option("--ray", help="Use the running Ray cluster, or start one on this machine.")]
Replicas = Annotated[
    str, typer.Option(metavar="N or LEAST..MOST", help="With --ray: copies of the model; 2..8 scales with the queue.")
]
Gpus = Annotated[
    float | None, typer.Option(help="With --ray: GPUs per replica (tensor parallel); default 1 if the cluster has any.")
]


@dataclass(frozen=True)
class ModelOptions:
    """How a model is loaded, and its name in requests."""

    name: Name = None
    lora: Adapters = None
    max_seq_len: Annotated[
        int | None, typer.Option(min=1, help="Context length; default: the model's, at most 8192.")
    ] = None
    cache_tokens: Annotated[int | None, typer.Option(min=1, help="KV-cache tokens; default 4 × --max-seq-len.")] = None
    cache_type: Annotated[str, typer.Option(help="Type of the KV cache: fp16, q8, q6, q4 or fp8.")] = "fp16"
    device: Device = None
    dtype: Dtype = None
    cpu_activation_bits: CpuActivationBits = 16
    draft: Annotated[
        str | None,
        typer.Option(help="A draft model, ngram or none; default: ngram on a CPU, while one sequence decodes."),
    ] = None
    max_batch_size: Annotated[int | None, typer.Option(min=1, help="Most sequences that decode at once.")] = None

    def main_model(self, path: str | None) -> ModelSpec:
        """The model that the command line's argument names, with its draft model and adapters."""
        name = self.name or ("" if path is None else Path(path).name.removesuffix(".gguf"))
        return self._model_spec(
            name or "default", path, draft=self.draft, loras=parse_pairs("--lora", self.lora, "FOLDER")
        )

    def additional_model(self, name: str, path: str) -> ModelSpec:
        """Another model, loaded with the same options but without a draft model and adapters."""
        return self._model_spec(name, path)

    def _model_spec(self, name: str, path: str | None, **more: Any) -> ModelSpec:
        from exlm.serve import ModelSpec

        return ModelSpec(
            name,
            path,
            max_seq_len=self.max_seq_len,
            cache_tokens=self.cache_tokens,
            cache_type=self.cache_type,
            device=self.device,
            dtype=self.dtype,
            cpu_activation_bits=self.cpu_activation_bits,
            max_batch_size=self.max_batch_size,
            **more,
        )


def with_model_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter `model_options` by an option for each field of `ModelOptions`."""
    types = get_type_hints(command, include_extras=True) | get_type_hints(ModelOptions, include_extras=True)
    option_parameters = inspect.signature(ModelOptions).parameters
    parameters: list[inspect.Parameter] = []
    for one in inspect.signature(command).parameters.values():
        parameters += option_parameters.values() if one.name == "model_options" else [one]

    @functools.wraps(command)
    def wrapper(**options: Any) -> None:
        chosen = {name: options.pop(name) for name in option_parameters if name in options}
        command(**options, model_options=ModelOptions(**chosen))

    wrapper.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [one.replace(kind=one.KEYWORD_ONLY, annotation=types[one.name]) for one in parameters]
    )
    wrapper.__annotations__ = {one.name: types[one.name] for one in parameters}
    return wrapper


def refuse_without_ray(ray: bool, replicas: str, gpus: float | None, tenant_requests: int | None = None) -> None:
    """Refuse options that need a cluster when --ray was not given."""
    cluster_options = {
        "--replicas": replicas != "1",
        "--gpus": gpus is not None,
        "--tenant-requests": tenant_requests is not None,
    }
    if not ray and any(cluster_options.values()):
        named = ", ".join(option for option, is_set in cluster_options.items() if is_set)
        raise InputError(f"{named}: only with --ray; without it one copy of the model runs, here.")


def cluster_config(replicas: str, gpus: float | None, device: str | None, **more: Any) -> ClusterConfig:
    """The replicas and GPUs of the connected cluster to use; by default one GPU each if it has any."""
    from exlm.scale import ClusterConfig, import_ray

    if gpus is None:
        gpus = float(device != "cpu" and import_ray().cluster_resources().get("GPU", 0) > 0)
    return ClusterConfig.from_replicas(replicas, gpus=gpus, tensor_parallel=max(1, int(gpus)), **more)


def parse_pairs(option: str, values: list[str] | None, value_name: str) -> dict[str, str]:
    """Parse an option that takes NAME=VALUE and may be repeated."""
    found: dict[str, str] = {}
    for one in values or ():
        name, _, value = one.partition("=")
        if not name or not value:
            raise InputError(f"{option} takes NAME={value_name}, found {one!r}.")
        if name in found:
            raise InputError(f"{option} names {name!r} twice: {found[name]} and {value}.")
        found[name] = value
    return found
