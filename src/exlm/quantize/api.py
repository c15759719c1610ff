"""`quantize_model`: the whole way from a name to a new folder."""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .. import spec
from ..atomic import check_output_dir
from ..checkpoint import open_source
from ..config import Config
from ..errors import InputError
from ..model.devices import pick_device
from ..version import __version__
from . import pipeline
from .calibration import DEFAULT_LENGTH
from .config import TARGETS, Method, QuantConfig, calibration_name, parse_size
from .context import Progress, QuantContext, check_shapes, default_rows, job_facts, num_sampled_rows
from .evaluate import Quality, evaluate_model
from .layer_loader import layer_loader
from .measurement import Measurement, quantized_matrices
from .memory import PeakMemory
from .output import CARD, check_disk_space, check_float16_range, unquantized_bytes, write_model
from .recipe import HEAD_RECIPES, Recipe
from .report import write_report
from .step_store import open_step_store, store_dir

log = logging.getLogger(__name__)

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
    """Quantise the model at `source` into a new folder and return what became of its quality.

    The target is one of `bits` (a weight of the layers, scales and orders included; 4 if none is given),
    `size` (of the weights, in bytes or as "5.2GB") and `max_kld` (the divergence in nats a token; a model
    found to diverge more is made once again with more bits, and the card says whether that was enough). GPTQ
    has 4 bits and no target. `calibration` is "builtin" or a .txt, .jsonl or .parquet file; 128 `rows` of it
    are read, fewer of a large model on a processor, of 512 tokens each (`length`), or as many as it reads.
    A job that was killed goes on where it stopped when the same call is made again, and ends with the same
    weights; `restart` begins anew. `measurement` is a file `save_measurement` wrote for this model, or the
    old converter's measurement.json. Without `report` nothing is said of its quality. The folder appears when
    it is complete; the source is never changed.
    """
    untold = method == "exl2" and bits is None and size is None and max_kld is None
    config, device_ = Config(source), pick_device(device)
    wishes = QuantConfig(
        bits=4.0 if untold else bits,
        size=parse_size(size) if isinstance(size, str) else size,
        max_kld=max_kld,
        head_bits=head_bits,
        method=method,
        group_size=group_size,
        calibration=str(calibration),
        rows=default_rows(config.spec, device_) if rows is None else rows,
        length=_row_length(length, config),
    )
    return run_job(
        config,
        target,
        wishes,
        measurement=measurement,
        save_measurement=save_measurement,
        device=device_,
        shard_bytes=shard_bytes,
        overwrite=overwrite,
        restart=restart,
        report=report,
        progress=progress,
    )


def _row_length(asked: int | None, config: Config) -> int:
    """Tokens of a row, which the model must be able to read."""
    if asked is not None and asked > config.max_seq_len:
        raise InputError(
            f"A length of {asked:,} tokens is more than {config.model_dir} can read: take at most "
            f"{config.max_seq_len:,}."
        )
    return min(DEFAULT_LENGTH, config.max_seq_len) if asked is None else asked


def run_job(
    config: Config,
    target: str | Path,
    wishes: QuantConfig,
    *,
    measurement: str | Path | None,
    save_measurement: str | Path | None,
    device: torch.device,
    shard_bytes: int,
    overwrite: bool,
    restart: bool,
    report: bool,
    progress: Progress,
) -> Quality | None:
    """`quantize_model` with its wishes in one piece."""
    place = Path(target).expanduser()
    folder = Path(os.path.realpath(place))
    frozen = config.freeze()
    opened = open_source(frozen.path, frozen.spec.names, frozen.quantization)
    read = [Path(os.path.realpath(path)) for path in (frozen.path, *opened.files.paths)]
    check_output_dir(folder, read, overwrite=overwrite)
    if shard_bytes < 1:
        raise InputError(f"shard_bytes must be positive, found {shard_bytes}.")
    if wishes.method != "exl2" and (measurement is not None or save_measurement is not None):
        raise InputError(
            "Measurements go with method exl2: GPTQ has 4 bits for every weight, and makes none."
        )
    known, digest = (None, None) if measurement is None else _read_measurement(Path(measurement), frozen.spec)
    kept = None if save_measurement is None else Path(save_measurement).expanduser()
    if kept is not None:
        _check_measurement_path(kept, known)
    length = min(wishes.length, frozen.max_seq_len)
    shop = layer_loader(frozen, opened, length, device)
    about = job_facts(wishes, frozen, opened, digest, device)
    measures = wishes.method == "exl2" and known is None
    with open_step_store(folder, about, changeable=TARGETS, until="streams.", restart=restart) as job:
        work = QuantContext(config, frozen, opened, shop, job, wishes, progress)
        work.total = pipeline.progress_units(work.depth, wishes.method == "exl2")
        check_shapes(work.matrices, wishes.method)
        if wishes.method == "exl2":
            pipeline.check_target(work, known)
        check_disk_space(store_dir(folder), _disk_bytes(work))
        check_float16_range(work.plan, frozen.spec, work.matrices.keys())
        most = PeakMemory(frozen.spec, wishes.rows, length).peak_bytes(
            samples_text=num_sampled_rows(frozen.spec, wishes) > 0
        )
        work.advance(0, f"calibrating; at most {most / 1e9:.1f} GB of memory")
        work.calibration_ids()
        if wishes.method == "exl2":
            pipeline.backward_pass(work, measures)
            known = known or pipeline.collect_measurement(work)
            if kept is not None:
                known.save(kept)
        while True:
            pipeline.solve_layers(work, _recipes(work, known))
            work.advance(0, "writing")
            try:
                return _write_and_report(work, folder, shard_bytes, overwrite, report, frozen.path)
            except _TargetMissed as missed:
                log.info("%s: %s", folder.name, missed)


def _read_measurement(file: Path, model: spec.Model) -> tuple[Measurement, str]:
    """A measurement, and what tells it from others."""
    file = file.expanduser()
    return Measurement.load(file, model), hashlib.sha256(file.read_bytes()).hexdigest()


def _check_measurement_path(file: Path, known: Measurement | None) -> None:
    """A measurement that cannot be written is known before there is something to write."""
    if known is not None and not known.profiles:
        raise InputError(
            "save_measurement: the measurement that was given is the old converter's, and nothing else is "
            "measured. Keep that file, or leave it out to measure anew."
        )
    if file.is_dir() or not file.parent.is_dir():
        what = "is a folder" if file.is_dir() else "would lie in a folder that is not there"
        raise InputError(f"save_measurement: {file} {what}. Choose another place for the measurement.")


class _TargetMissed(Exception):
    """The model diverges more than it may, and is to be made anew with more bits."""


def _recipes(work: QuantContext, known: Measurement | None) -> dict[str, Recipe]:
    """What each matrix gets; nothing for a format without choices."""
    if work.config.method != "exl2":
        return {}
    assert known is not None
    chosen = pipeline.allocate_bits(work, known)
    recipes = {role: made for choice in chosen.choices for role, made in choice.recipes.items()}
    return recipes | {"head": HEAD_RECIPES[work.config.head_bits]}


def _write_and_report(
    work: QuantContext, folder: Path, shard_bytes: int, overwrite: bool, report: bool, source: str | Path
) -> Quality | None:
    """The new folder from what the job has made, with its report; `_Missed` before it has its name."""
    said, wanted = _quantization_config(work), work.config.max_kld
    made = write_model(
        folder,
        work.frozen,
        work.source,
        work.matrices.keys(),
        lambda role: pipeline.stored_tensors(work, role),
        said,
        shard_bytes=shard_bytes,
        overwrite=overwrite,
    )
    with made as hidden:
        _check_written(hidden, work)
        if not report and wanted is None:
            return None
        work.advance(0, "judging the result")
        device = str(work.loader.backends.device)
        quality = evaluate_model(hidden, source, device=device, speed=report)
        assert quality.kl is not None
        if wanted is not None and quality.kl > wanted:
            words = f"a divergence of {quality.kl:.3g} was found, at most {wanted:g} was asked for."
            if pipeline.plan_retry(work, quality.kl):
                raise _TargetMissed(words)
            log.warning("%s: %s Ask for less, or calibrate with more text.", folder.name, words)
        quality = replace(quality, model=folder.name, against=_display_name(Path(source)))
        if report:
            write_report(hidden, quality, _card_facts(work, said, quality, _display_name(Path(source))), CARD)
        return quality


def _display_name(source: Path) -> str:
    """A model's name for people; the folder of a snapshot from the Hub is called by its commit."""
    kept, repository = source.parent.name, source.parent.parent.name
    if kept == "snapshots" and repository.startswith("models--"):
        return f"{repository.removeprefix('models--').replace('--', '/', 1)}@{source.name}"
    return source.name


def _card_facts(work: QuantContext, said: dict[str, Any], quality: Quality, source: str) -> dict[str, str]:
    """What the card says of how the model was made."""
    rows, wanted = work.calibration_ids().shape, work.config.max_kld
    words = {"method": str(said["quant_method"]), "source": source, "bits a weight": f"{quality.bits:.3f}"}
    if wanted is not None:
        kept = "kept" if quality.kl is not None and quality.kl <= wanted else "not kept"
        words["divergence asked for"] = f"at most {wanted:g}: {kept}"
    calibration = f"{calibration_name(work.config)}, {rows[0]} rows of {rows[1]} tokens"
    return words | {"calibration": calibration, "made with": f"exlm {__version__}"}


def _quantization_config(work: QuantContext) -> dict[str, Any]:
    """What config.json says of the new matrices."""
    wishes, rows = work.config, work.calibration_ids().shape
    if wishes.method == "gptq":
        return {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": wishes.group_size,
            "desc_act": True,
            "sym": False,
            "checkpoint_format": "gptq",
        }
    weights = sum(m.in_features * m.out_features for m in quantized_matrices(work.model))
    used = sum(
        8 * t.nbytes
        for m in quantized_matrices(work.model)
        for t in pipeline.stored_tensors(work, m.role).values()
    )
    return {
        "quant_method": "exl2",
        "version": f"exlm {__version__}",
        "bits": wishes.bits if wishes.bits is not None else round(used / weights, 4),
        "head_bits": wishes.head_bits,
        "calibration": {"rows": rows[0], "length": rows[1], "dataset": calibration_name(wishes)},
    }


def _check_written(hidden: Path, work: QuantContext) -> None:
    """A model that does not hold what it should must not get its name."""
    frozen = Config(hidden).freeze()
    opened = open_source(frozen.path, frozen.spec.names, frozen.quantization)
    for role in work.matrices:
        words, _ = opened.describe(role)
        if not words.startswith(work.config.method):
            raise InputError(f"{role} was to be {work.config.method} and was written as {words}.")


def _disk_bytes(work: QuantContext) -> int:
    """About the bytes a job has still to write: states, gradients, the model twice, less what is there."""
    wishes, model = work.config, work.model
    states = 4 * model.hidden * wishes.length
    held = states * (work.depth + 4) * wishes.rows
    outputs = sum(2 * m.out_features**2 for m in quantized_matrices(model) if m.out_features <= 2048)
    matrices = sum(m.in_features * m.out_features for m in work.matrices.values())
    kept = unquantized_bytes(work.plan, model, work.matrices.keys())
    there = sum(path.stat().st_size for path in work.store.folder.glob("*.safetensors"))
    return max(0, held + outputs + 2 * matrices + kept - there) + 2**20
