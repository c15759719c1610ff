"""`quantize_model`: checks everything that can be checked before any work, then runs the pipeline."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch

from .. import spec
from ..atomic import check_output_dir
from ..checkpoint import open_source
from ..config import Config
from ..errors import InputError
from ..model.devices import pick_device
from . import pipeline
from .allocation import min_layer_bits, quantized_matrices
from .calibration import DEFAULT_LENGTH, default_rows, num_sampled_rows
from .config import TARGETS, Method, QuantConfig, parse_size
from .context import Progress, QuantContext, check_shapes, job_facts
from .evaluate import Quality
from .layer_loader import layer_loader
from .memory import PeakMemory
from .output import check_disk_space, check_float16_range, unquantized_bytes
from .sensitivity import MAX_FULL_OUTPUTS, Measurement
from .step_store import open_step_store, store_dir

DEFAULT_SHARD_BYTES = 2 * 2**30


def quantize_model(
    source: str | Path,
    target: str | Path,
    bits: float | None = None,
    *,
    size: int | str | None = None,
    max_kld: float | None = None,
    head_bits: int = 6,
    method: Method = "exl2",
    group_size: int = 128,
    calibration: str | Path = "builtin",
    rows: int | None = None,
    length: int | None = None,
    measurement: str | Path | None = None,
    save_measurement: str | Path | None = None,
    device: str | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    restart: bool = False,
    report: bool = True,
    progress: Progress = lambda done, total, what: None,
) -> Quality | None:
    """Quantise the model at `source` into a new folder; returns the report's figures.

    The target is one of `bits` (per weight of the layers, scales and row permutations included; 4 if no
    target is given), `size` (of all weight files, in bytes or as "5.2GB") and `max_kld` (the KL divergence
    from the source in nats per token; a model found to diverge more is made once again with more bits, and
    the card says whether that was enough). GPTQ has 4 bits and no target. `calibration` is "builtin" or a
    .txt, .jsonl or .parquet file, of which `rows` of `length` tokens are read: 128, fewer for large models on
    a CPU, of 512 tokens, or as many as the model can read. `measurement` is a file that `save_measurement`
    wrote for this model, or exllamav2's measurement.json. Without `report` the result is not evaluated,
    except for `max_kld`.

    A job that was killed continues where it stopped when the same call is made again, and ends with the same
    weights; `restart` discards it instead. The folder appears when it is complete; the source is never
    changed.
    """
    no_target = method == "exl2" and bits is None and size is None and max_kld is None
    model_config, device_ = Config(source), pick_device(device)
    config = QuantConfig(
        bits=4.0 if no_target else bits,
        size=parse_size(size) if isinstance(size, str) else size,
        max_kld=max_kld,
        head_bits=head_bits,
        method=method,
        group_size=group_size,
        calibration=str(calibration),
        rows=default_rows(model_config.spec, device_) if rows is None else rows,
        length=_row_length(length, model_config),
    )
    output = pipeline.OutputOptions(
        Path(os.path.realpath(Path(target).expanduser())), shard_bytes, overwrite, report
    )
    return _run_job(
        model_config,
        config,
        output,
        None if measurement is None else Path(measurement).expanduser(),
        None if save_measurement is None else Path(save_measurement).expanduser(),
        device_,
        progress,
        restart=restart,
    )


def _run_job(
    model_config: Config,
    config: QuantConfig,
    output: pipeline.OutputOptions,
    measurement: Path | None,
    save_measurement: Path | None,
    device: torch.device,
    progress: Progress,
    *,
    restart: bool,
) -> Quality | None:
    """Check, open the step store, check what needs the job's context, run."""
    frozen = model_config.freeze()
    source = open_source(frozen.path, frozen.spec.names, frozen.quantization)
    reads = [Path(os.path.realpath(path)) for path in (frozen.path, *source.files.paths)]
    check_output_dir(output.folder, reads, overwrite=output.overwrite)
    if output.shard_bytes < 1:
        raise InputError(f"shard_bytes must be positive, found {output.shard_bytes}.")
    exl2 = config.method == "exl2"
    if not exl2 and (measurement is not None or save_measurement is not None):
        raise InputError(
            "Measurements go with method exl2: GPTQ has 4 bits for every weight and measures nothing."
        )
    known, digest = (None, None) if measurement is None else _read_measurement(measurement, frozen.spec)
    if save_measurement is not None:
        _check_measurement_path(save_measurement, known)
    length = min(config.length, frozen.max_seq_len)
    loader = layer_loader(frozen, source, length, device)
    facts = job_facts(config, frozen, source, digest, device)
    with open_step_store(
        output.folder, facts, changeable=TARGETS, until="streams.", restart=restart
    ) as store:
        ctx = QuantContext(model_config, frozen, source, loader, store, config, progress)
        ctx.total = pipeline.progress_units(ctx.depth, exl2)
        check_shapes(ctx.matrices, config.method)
        if exl2:
            _check_target(ctx, known)
        check_disk_space(store_dir(output.folder), _disk_bytes(ctx))
        check_float16_range(ctx.plan, frozen.spec, ctx.matrices.keys())
        samples_text = num_sampled_rows(frozen.spec, config) > 0
        peak = PeakMemory(frozen.spec, config.rows, length).peak_bytes(samples_text)
        ctx.advance(0, f"calibrating; at most {peak / 1e9:.1f} GB of memory")
        return pipeline.run(ctx, known, save_measurement, output)


def _row_length(wanted: int | None, config: Config) -> int:
    """Tokens of a row; `InputError` if the model cannot read so many."""
    if wanted is not None and wanted > config.max_seq_len:
        raise InputError(
            f"A length of {wanted:,} tokens is more than {config.model_dir} can read: take at most "
            f"{config.max_seq_len:,}."
        )
    return min(DEFAULT_LENGTH, config.max_seq_len) if wanted is None else wanted


def _read_measurement(file: Path, model: spec.Model) -> tuple[Measurement, str]:
    """A measurement and its file's digest."""
    return Measurement.load(file, model), hashlib.sha256(file.read_bytes()).hexdigest()


def _check_measurement_path(file: Path, known: Measurement | None) -> None:
    """`InputError` if there will be no measurement to save, or no place for it."""
    if known is not None and not known.profiles:
        raise InputError(
            "save_measurement: the measurement that was given is exllamav2's, and nothing else is measured. "
            "Keep that file, or leave it out to measure again."
        )
    if file.is_dir() or not file.parent.is_dir():
        problem = "is a folder" if file.is_dir() else "would lie in a folder that does not exist"
        raise InputError(f"save_measurement: {file} {problem}. Choose another path for the measurement.")


def _check_target(ctx: QuantContext, known: Measurement | None) -> None:
    """`InputError` if even the fewest bits that the layers can take exceed the target."""
    config, weights = ctx.config, ctx.num_weights
    if known is None:
        fewest = min_layer_bits(ctx.model)
    else:
        fewest = sum(min(choice.bits for choice in slot) for slot in known.slots)
    if config.bits is not None and fewest > int(weights * config.bits):
        raise InputError(
            f"{config.bits:g} bits a weight cannot be reached: the smallest this model can be is "
            f"{fewest / weights:.3f}, scales and row permutations included. Ask for more bits."
        )
    if config.size is not None and fewest > 8 * config.size - ctx.fixed_bits:
        fixed = -(-ctx.fixed_bits // 8)
        raise InputError(
            f"A size of {config.size:,} bytes cannot be reached: the smallest this model can be is "
            f"{fixed - (-fewest // 8):,}, of which {fixed:,} are embedding and norms in float16, and the "
            f"head in {config.head_bits} bits. Ask for more, or for fewer head_bits."
        )


def _disk_bytes(ctx: QuantContext) -> int:
    """About the bytes the job has still to write: hidden states, output Hessians, the model twice."""
    config, model = ctx.config, ctx.model
    states = 4 * model.hidden * config.length * (ctx.depth + 4) * config.rows
    hessians = sum(
        2 * m.out_features**2 for m in quantized_matrices(model) if m.out_features <= MAX_FULL_OUTPUTS
    )
    weights = sum(m.in_features * m.out_features for m in ctx.matrices.values())
    unquantized = unquantized_bytes(ctx.plan, model, ctx.matrices.keys())
    written = sum(path.stat().st_size for path in ctx.store.folder.glob("*.safetensors"))
    return max(0, states + hessians + 2 * weights + unquantized - written) + 2**20
