"""`quantize_model`: checks everything that can be checked before any work, then runs the pipeline."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import spec
from ..atomic import check_disk_space, check_output_dir
from ..checkpoint import WeightSource, open_source
from ..config import Config, FrozenConfig
from ..convert.api import DEFAULT_SHARD_BYTES
from ..errors import InputError, Unsupported
from ..formats.exl2 import ALIGNMENT
from ..model.devices import pick_device
from ..spec.model import Matrix, matrices
from . import calibration, evaluate, pipeline, sensitivity
from .allocation import min_layer_bits, quantized_matrices
from .calibration import DEFAULT_LENGTH, default_rows, num_sampled_rows
from .evaluate import Quality
from .layer_loader import layer_loader
from .layer_solver import cluster_count
from .options import TARGETS, Method, QuantizeOptions, parse_size
from .output import check_float16_range, unquantized_bytes
from .pipeline import Progress, QuantContext
from .sensitivity import Measurement
from .step_store import open_step_store, store_dir

FLOAT_BYTES = 4
BASE_BYTES = 450 * 2**20
"""Python, torch, the tokenizer, and what malloc keeps of freed memory."""

SOLVER_TENSORS = 9
"""Tensors of the shape of the matrix being solved: target, codes, losses, scales, gradient, temporaries."""

TWO_SIDED_TENSORS = 5
"""More of them where the output Hessian is known."""


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
    return _run_job(
        model_config,
        options,
        output,
        None if measurement is None else Path(measurement).expanduser(),
        None if save_measurement is None else Path(save_measurement).expanduser(),
        device_,
        progress,
        restart=restart,
    )


def _run_job(
    model_config: Config,
    options: QuantizeOptions,
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
    exl2 = options.method == "exl2"
    if not exl2 and (measurement is not None or save_measurement is not None):
        raise InputError("Measurements go with method exl2: GPTQ has 4 bits for every weight and measures nothing.")
    existing, digest = (None, None) if measurement is None else _read_measurement(measurement, frozen.spec)
    if save_measurement is not None:
        _check_measurement_path(save_measurement, existing)
    length = min(options.length, frozen.max_seq_len)
    loader = layer_loader(frozen, source, length, device)
    fingerprint = _job_fingerprint(options, frozen, source, digest, device)
    with open_step_store(
        output.folder, fingerprint, changeable=TARGETS, changeable_until=pipeline.HIDDEN_STATES, restart=restart
    ) as store:
        ctx = QuantContext(model_config, frozen, source, loader, store, options, progress)
        ctx.total = pipeline.progress_units(ctx.depth, exl2)
        _check_shapes(ctx.matrices, options.method)
        if exl2:
            _check_target(ctx, existing)
        check_disk_space(store_dir(output.folder), _disk_bytes(ctx), "the job")
        check_float16_range(ctx.plan, frozen.spec, ctx.matrices.keys())
        samples_text = num_sampled_rows(frozen.spec, options) > 0
        peak = PeakMemory(frozen.spec, options.rows, length).peak_bytes(samples_text)
        ctx.report_progress(0, f"calibrating; at most {peak / 1e9:.1f} GB of memory")
        return pipeline.run(ctx, existing, save_measurement, output)


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


def _check_measurement_path(file: Path, existing: Measurement | None) -> None:
    """`InputError` if there will be no measurement to save, or no place for it."""
    if existing is not None and not existing.profiles:
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


# -- peak memory -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PeakMemory:
    """Predicts the peak memory of a job from shapes: that of its largest step.

    Counted for a CPU; on a GPU most of it is the GPU's. The terms follow the steps of `pipeline`,
    `calibration` and `evaluate` and must change with them; a test compares them with what a job really takes.
    """

    model: spec.Model
    rows: int
    length: int

    def peak_bytes(self, samples_text: bool) -> int:
        """The peak of the whole job; `samples_text` if the model is loaded whole to sample text."""
        steps = [
            self.head_backward(),
            self.layer_backward(),
            self.layer_solving(),
            self.head_solving(),
            self.evaluating(),
        ]
        return BASE_BYTES + max(*steps, self.sampling() if samples_text else 0)

    @property
    def pass_tokens(self) -> int:
        """Tokens of one forward pass."""
        return max(pipeline.PASS_TOKENS, self.length)

    @property
    def hidden_states(self) -> int:
        """Bytes of the hidden states of all rows."""
        return FLOAT_BYTES * self.rows * self.length * self.model.hidden

    @property
    def head(self) -> int:
        """Bytes of the head in float32."""
        return FLOAT_BYTES * self.model.vocab * self.model.hidden

    @property
    def clusters(self) -> int:
        """Clusters of the head's columns."""
        return cluster_count(self.model.hidden, self.model.vocab)

    def layers(self) -> list[list[Matrix]]:
        """The matrices of every layer."""
        layers: list[list[Matrix]] = [[] for _ in self.model.layers]
        for m in quantized_matrices(self.model):
            layers[int(m.role.split(".")[1])].append(m)
        return layers

    def sampling(self) -> int:
        """`sample_rows`: the model in float32, the KV buffers of a batch, its logits."""
        weights = sum(FLOAT_BYTES * m.in_features * m.out_features for m in matrices(self.model))
        embedding = 0 if self.model.head.tied else self.head
        kv_numbers = sum(_kv_numbers(layer.attn) for layer in self.model.layers)
        length = min(calibration.SAMPLE_LENGTH, self.length)
        kv = FLOAT_BYTES * calibration.SAMPLE_BATCH * length * kv_numbers
        return weights + embedding + kv + 4 * FLOAT_BYTES * calibration.SAMPLE_BATCH * self.model.vocab

    def head_backward(self) -> int:
        """`head_grad`: the head, logits of some tokens and their gradients, states and gradients."""
        cluster_weights = self.clusters * (2 * self.model.vocab + 2 * self.rows * self.length)
        logits = 6 * sensitivity.LOGIT_TOKENS * self.model.vocab
        return self.head + FLOAT_BYTES * (logits + cluster_weights) + 3 * self.hidden_states

    def layer_backward(self) -> int:
        """`vjp` and `measure_profile`: a layer, activations, Fisher sums, a matrix at several widths."""
        return 4 * self.hidden_states + max(
            FLOAT_BYTES * (sum(map(_num_weights, layer)) + sum(map(_fisher_numbers, layer)))
            + FLOAT_BYTES
            * max(5 * len(sensitivity.MEASURED_BITS) * _num_weights(m) + 5 * m.in_features**2 for m in layer)
            + self._activations(layer, 3)
            for layer in self.layers()
        )

    def layer_solving(self) -> int:
        """`solve_layer`: a layer three times, Hessians, a matrix being solved, hidden states twice."""
        return 6 * self.hidden_states + max(
            FLOAT_BYTES * 3 * sum(map(_num_weights, layer))
            + FLOAT_BYTES * max(_solver_numbers(m) + 10 * m.in_features**2 for m in layer)
            + self._activations(layer, 2)
            for layer in self.layers()
        )

    def head_solving(self) -> int:
        """`solve_head`: the head being solved, and the Hessians of its clusters."""
        clusters = self.clusters * (2 * self.model.hidden**2 + self.model.vocab + self.rows * self.length)
        return (SOLVER_TENSORS + 2) * self.head + 3 * self.hidden_states + FLOAT_BYTES * clusters

    def evaluating(self) -> int:
        """`evaluate_model`: the heads of both models, some tokens' logits of both, and states."""
        tokens = min(evaluate.LOGIT_TOKENS, self.length)
        return 4 * self.head + 7 * FLOAT_BYTES * tokens * self.model.vocab

    def _activations(self, layer: list[Matrix], copies: int) -> int:
        """What a layer computes for the tokens of one pass."""
        scores = self.length * max(one.attn.heads for one in self.model.layers)
        numbers = scores + sum(m.in_features + m.out_features for m in layer)
        return FLOAT_BYTES * copies * self.pass_tokens * numbers


def _num_weights(m: Matrix) -> int:
    return m.in_features * m.out_features


def _solver_numbers(m: Matrix) -> int:
    """Numbers held while a matrix is solved, but for those of its input side."""
    if m.out_features > sensitivity.MAX_FULL_OUTPUTS:
        return SOLVER_TENSORS * _num_weights(m)
    return (SOLVER_TENSORS + TWO_SIDED_TENSORS) * _num_weights(m) + 5 * m.out_features**2


def _fisher_numbers(m: Matrix) -> int:
    """Numbers in a matrix's `FisherStats`."""
    full = m.out_features <= sensitivity.MAX_FULL_OUTPUTS
    return m.in_features**2 + (m.out_features**2 if full else m.out_features)


def _kv_numbers(attn: spec.Attention) -> int:
    """Numbers of one token's keys and values."""
    return 2 * attn.kv_heads * attn.head_dim
