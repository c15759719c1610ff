"""`quantize_model`: checks everything that can be checked before any work, then runs the pipeline."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .. import spec
from ..atomic import check_disk_space, check_output_dir
from ..checkpoint import WeightSource
from ..config import Config, FrozenConfig
from ..convert.api import DEFAULT_SHARD_BYTES
from ..errors import InputError, Unsupported
from ..formats.exl2 import ALIGNMENT
from ..model.devices import pick_device
from ..spec.model import Matrix
from . import pipeline, sensitivity
from .allocation import min_layer_bits, quantized_matrices
from .calibration import DEFAULT_LENGTH, default_rows, num_sampled_rows
from .evaluate import Quality
from .layer_loader import layer_loader
from .options import SOLVER_ONLY_OPTIONS, Method, QuantizeOptions, parse_size
from .output import check_float16_range, unquantized_bytes
from .peak_memory import peak_bytes
from .pipeline import Progress, QuantContext
from .sensitivity import Measurement
from .step_store import open_step_store, store_dir


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
    exl2 = method == "exl2"
    no_target = exl2 and bits is None and size is None and max_kld is None
    model_config, device_ = Config(source), pick_device(device)
    options = QuantizeOptions(
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
    output = pipeline.OutputOptions(Path(os.path.realpath(Path(target).expanduser())), shard_bytes, overwrite, report)
    frozen = model_config.freeze()
    weights = frozen.open_checkpoint()
    reads = [Path(os.path.realpath(path)) for path in (frozen.path, *weights.files.paths)]
    check_output_dir(output.folder, reads, overwrite=overwrite)
    if shard_bytes < 1:
        raise InputError(f"shard_bytes must be positive, found {shard_bytes}.")
    if not exl2 and (measurement is not None or save_measurement is not None):
        raise InputError("Measurements go with method exl2: GPTQ has 4 bits for every weight and measures nothing.")
    existing, digest = (None, None) if measurement is None else _read_measurement(measurement, frozen.spec)
    saved_to = None if save_measurement is None else Path(save_measurement).expanduser()
    if saved_to is not None:
        _check_measurement_path(saved_to, existing)
    loader = layer_loader(frozen, weights, options.length, device_)
    fingerprint = _job_fingerprint(options, frozen, weights, digest, device_)
    with open_step_store(
        output.folder,
        fingerprint,
        changeable=SOLVER_ONLY_OPTIONS,
        changeable_until=pipeline.HIDDEN_STATES,
        restart=restart,
    ) as store:
        ctx = QuantContext(model_config, frozen, weights, loader, store, options, progress)
        ctx.total = pipeline.progress_units(ctx.depth, exl2)
        _check_shapes(ctx.matrices, method)
        if exl2:
            _check_target(ctx, existing)
        check_disk_space(store_dir(output.folder), _disk_bytes(ctx), "the job")
        check_float16_range(ctx.plan, ctx.matrices.keys())
        samples_text = num_sampled_rows(frozen.spec, options) > 0
        peak = peak_bytes(frozen.spec, options.rows, options.length, samples_text=samples_text)
        ctx.report_progress(0, f"calibrating; at most {peak / 1e9:.1f} GB of memory")
        return pipeline.run(ctx, existing, saved_to, output)


def _row_length(wanted: int | None, config: Config) -> int:
    """Tokens of a row; `InputError` if the model cannot read so many."""
    if wanted is not None and wanted > config.max_seq_len:
        raise InputError(
            f"A length of {wanted:,} tokens is more than {config.model_dir} can read: take at most "
            f"{config.max_seq_len:,}."
        )
    return min(DEFAULT_LENGTH, config.max_seq_len) if wanted is None else wanted


def _read_measurement(path: str | Path, model: spec.Model) -> tuple[Measurement, str]:
    """A measurement and its file's digest."""
    file = Path(path).expanduser()
    return Measurement.load(file, model), hashlib.sha256(file.read_bytes()).hexdigest()


def _check_measurement_path(file: Path, existing: Measurement | None) -> None:
    """`InputError` if there will be no measurement to save, or no place for it."""
    if existing is not None and not existing.sensitivities:
        raise InputError(
            "save_measurement: the measurement that was given is exllamav2's, and nothing else is measured. "
            "Keep that file, or leave it out to measure again."
        )
    if file.is_dir() or not file.parent.is_dir():
        problem = "is a folder" if file.is_dir() else "would lie in a folder that does not exist"
        raise InputError(f"save_measurement: {file} {problem}. Choose another path for the measurement.")


def _check_shapes(wanted: Mapping[str, Matrix], method: str) -> None:
    """`Unsupported` names the first matrix whose shape the format cannot store."""
    for role, m in wanted.items():
        unit = ALIGNMENT if method == "exl2" else 8
        if m.in_features % unit:
            raise Unsupported(
                f"{role} has {m.in_features} inputs, and {method.upper()} stores multiples of {unit} only."
            )
        if method == "gptq" and m.out_features % unit:
            raise Unsupported(f"{role} has {m.out_features} outputs, and GPTQ stores multiples of {unit} only.")


def _check_target(ctx: QuantContext, existing: Measurement | None) -> None:
    """`InputError` if even the fewest bits that the layers can take exceed the target."""
    options, weights = ctx.options, ctx.num_weights
    if existing is None:
        fewest = min_layer_bits(ctx.model)
    else:
        fewest = sum(min(candidate.bits for candidate in candidates) for candidates in existing.candidate_sets)
    if options.bits is not None and fewest > int(weights * options.bits):
        raise InputError(
            f"{options.bits:g} bits a weight cannot be reached: the smallest this model can be is "
            f"{fewest / weights:.3f}, scales and row permutations included. Ask for more bits."
        )
    if options.size is not None and fewest > 8 * options.size - ctx.fixed_bits:
        fixed = -(-ctx.fixed_bits // 8)
        raise InputError(
            f"A size of {options.size:,} bytes cannot be reached: the smallest this model can be is "
            f"{fixed - (-fewest // 8):,}, of which {fixed:,} are embedding and norms in float16, and the "
            f"head in {options.head_bits} bits. Ask for more, or for fewer head_bits."
        )


def _disk_bytes(ctx: QuantContext) -> int:
    """About the bytes the job has still to write: hidden states, output Hessians, the model twice."""
    options, model = ctx.options, ctx.model
    states = 4 * model.hidden * options.length * (ctx.depth + 4) * options.rows
    hessians = sum(
        2 * m.out_features**2 for m in quantized_matrices(model) if m.out_features <= sensitivity.MAX_FULL_OUTPUTS
    )
    weights = sum(m.in_features * m.out_features for m in ctx.matrices.values())
    unquantized = unquantized_bytes(ctx.plan, model, ctx.matrices.keys())
    written = sum(path.stat().st_size for path in ctx.store.folder.glob("*.safetensors"))
    return max(0, states + hessians + 2 * weights + unquantized - written) + 2**20


def _job_fingerprint(
    options: QuantizeOptions, frozen: FrozenConfig, source: WeightSource, measurement: str | None, device: torch.device
) -> dict[str, Any]:
    """What job.json records; an unfinished job continues only if it has the same fingerprint.

    `measurement` is the digest of a measurement that was given.
    """
    files = {}
    for path in source.files.paths:
        stat = path.stat()
        files[str(path)] = [stat.st_size, stat.st_mtime_ns]
    return {
        **options.fingerprint(),
        "source": files,
        "config.json": _digest(frozen.path / "config.json"),
        "calibration text": _digest(Path(options.calibration).expanduser()),
        "measurement": measurement,
        "device": device.type,
    }


def _digest(file: Path) -> str | None:
    """The SHA-256 of a file; None if it cannot be read, which the step that needs it reports."""
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError:
        return None
