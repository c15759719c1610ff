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
from .calibrate import LENGTH
from .evaluate import Quality, evaluate_model
from .job import open_job, place_of
from .layers import workshop
from .measurement import Measurement, quantised
from .memory import Shapes
from .output import CARD, check_kept, check_space, kept_bytes, new_model
from .recipe import HEAD, Recipe
from .report import write_report
from .wishes import TARGETS, Method, Wishes, calibration_name, parse_size
from .work import Progress, Work, check_shapes, facts, own_rows, usual_rows

log = logging.getLogger(__name__)

SHARD = 2 * 2**30


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
    shard_bytes: int = SHARD,
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
    wishes = Wishes(
        bits=4.0 if untold else bits,
        size=parse_size(size) if isinstance(size, str) else size,
        max_kld=max_kld,
        head_bits=head_bits,
        method=method,
        group_size=group_size,
        calibration=str(calibration),
        rows=usual_rows(config.spec, device_) if rows is None else rows,
        length=_length(length, config),
    )
    return carry_out(
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


def _length(asked: int | None, config: Config) -> int:
    """Tokens of a row, which the model must be able to read."""
    if asked is not None and asked > config.max_seq_len:
        raise InputError(
            f"A length of {asked:,} tokens is more than {config.model_dir} can read: take at most "
            f"{config.max_seq_len:,}."
        )
    return min(LENGTH, config.max_seq_len) if asked is None else asked


def carry_out(
    config: Config,
    target: str | Path,
    wishes: Wishes,
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
    known, digest = (None, None) if measurement is None else _read(Path(measurement), frozen.spec)
    kept = None if save_measurement is None else Path(save_measurement).expanduser()
    if kept is not None:
        _check_place(kept, known)
    length = min(wishes.length, frozen.max_seq_len)
    shop = workshop(frozen, opened, length, device)
    about = facts(wishes, frozen, opened, digest, device)
    measures = wishes.method == "exl2" and known is None
    with open_job(folder, about, later=TARGETS, mark="streams.", restart=restart) as job:
        work = Work(config, frozen, opened, shop, job, wishes, progress)
        work.total = pipeline.units(work.depth, wishes.method == "exl2")
        check_shapes(work.matrices, wishes.method)
        if wishes.method == "exl2":
            pipeline.check_target(work, known)
        check_space(place_of(folder), _disk(work))
        check_kept(work.plan, frozen.spec, work.matrices.keys())
        most = Shapes(frozen.spec, wishes.rows, length).most(writes=own_rows(frozen.spec, wishes) > 0)
        work.step(0, f"calibrating; at most {most / 1e9:.1f} GB of memory")
        work.calibration()
        if wishes.method == "exl2":
            pipeline.listen(work, measures)
            known = known or pipeline.measured(work)
            if kept is not None:
                known.save(kept)
        while True:
            pipeline.quantise(work, _recipes(work, known))
            work.step(0, "writing")
            try:
                return _written(work, folder, shard_bytes, overwrite, report, frozen.path)
            except _Missed as missed:
                log.info("%s: %s", folder.name, missed)


def _read(file: Path, model: spec.Model) -> tuple[Measurement, str]:
    """A measurement, and what tells it from others."""
    file = file.expanduser()
    return Measurement.load(file, model), hashlib.sha256(file.read_bytes()).hexdigest()


def _check_place(file: Path, known: Measurement | None) -> None:
    """A measurement that cannot be written is known before there is something to write."""
    if known is not None and not known.profiles:
        raise InputError(
            "save_measurement: the measurement that was given is the old converter's, and nothing else is "
            "measured. Keep that file, or leave it out to measure anew."
        )
    if file.is_dir() or not file.parent.is_dir():
        what = "is a folder" if file.is_dir() else "would lie in a folder that is not there"
        raise InputError(f"save_measurement: {file} {what}. Choose another place for the measurement.")


class _Missed(Exception):
    """The model diverges more than it may, and is to be made anew with more bits."""


def _recipes(work: Work, known: Measurement | None) -> dict[str, Recipe]:
    """What each matrix gets; nothing for a format without choices."""
    if work.wishes.method != "exl2":
        return {}
    assert known is not None
    chosen = pipeline.allocate(work, known)
    recipes = {role: made for choice in chosen.choices for role, made in choice.recipes.items()}
    return recipes | {"head": HEAD[work.wishes.head_bits]}


def _written(
    work: Work, folder: Path, shard_bytes: int, overwrite: bool, report: bool, source: str | Path
) -> Quality | None:
    """The new folder from what the job has made, with its report; `_Missed` before it has its name."""
    said, wanted = _said(work), work.wishes.max_kld
    made = new_model(
        folder,
        work.frozen,
        work.source,
        work.matrices.keys(),
        lambda role: pipeline.stored(work, role),
        said,
        shard_bytes=shard_bytes,
        overwrite=overwrite,
    )
    with made as hidden:
        _check_whole(hidden, work)
        if not report and wanted is None:
            return None
        work.step(0, "judging the result")
        device = str(work.shop.backends.device)
        quality = evaluate_model(hidden, source, device=device, speed=report)
        assert quality.kl is not None
        if wanted is not None and quality.kl > wanted:
            words = f"a divergence of {quality.kl:.3g} was found, at most {wanted:g} was asked for."
            if pipeline.aim_again(work, quality.kl):
                raise _Missed(words)
            log.warning("%s: %s Ask for less, or calibrate with more text.", folder.name, words)
        quality = replace(quality, model=folder.name, against=_called(Path(source)))
        if report:
            write_report(hidden, quality, _words(work, said, quality, _called(Path(source))), CARD)
        return quality


def _called(source: Path) -> str:
    """A model's name for people; the folder of a snapshot from the Hub is called by its commit."""
    kept, repository = source.parent.name, source.parent.parent.name
    if kept == "snapshots" and repository.startswith("models--"):
        return f"{repository.removeprefix('models--').replace('--', '/', 1)}@{source.name}"
    return source.name


def _words(work: Work, said: dict[str, Any], quality: Quality, source: str) -> dict[str, str]:
    """What the card says of how the model was made."""
    rows, wanted = work.calibration().shape, work.wishes.max_kld
    words = {"method": str(said["quant_method"]), "source": source, "bits a weight": f"{quality.bits:.3f}"}
    if wanted is not None:
        kept = "kept" if quality.kl is not None and quality.kl <= wanted else "not kept"
        words["divergence asked for"] = f"at most {wanted:g}: {kept}"
    calibration = f"{calibration_name(work.wishes)}, {rows[0]} rows of {rows[1]} tokens"
    return words | {"calibration": calibration, "made with": f"exlm {__version__}"}


def _said(work: Work) -> dict[str, Any]:
    """What config.json says of the new matrices."""
    wishes, rows = work.wishes, work.calibration().shape
    if wishes.method == "gptq":
        return {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": wishes.group_size,
            "desc_act": True,
            "sym": False,
            "checkpoint_format": "gptq",
        }
    weights = sum(m.in_features * m.out_features for m in quantised(work.model))
    used = sum(8 * t.nbytes for m in quantised(work.model) for t in pipeline.stored(work, m.role).values())
    return {
        "quant_method": "exl2",
        "version": f"exlm {__version__}",
        "bits": wishes.bits if wishes.bits is not None else round(used / weights, 4),
        "head_bits": wishes.head_bits,
        "calibration": {"rows": rows[0], "length": rows[1], "dataset": calibration_name(wishes)},
    }


def _check_whole(hidden: Path, work: Work) -> None:
    """A model that does not hold what it should must not get its name."""
    frozen = Config(hidden).freeze()
    opened = open_source(frozen.path, frozen.spec.names, frozen.quantization)
    for role in work.matrices:
        words, _ = opened.describe(role)
        if not words.startswith(work.wishes.method):
            raise InputError(f"{role} was to be {work.wishes.method} and was written as {words}.")


def _disk(work: Work) -> int:
    """About the bytes a job has still to write: states, gradients, the model twice, less what is there."""
    wishes, model = work.wishes, work.model
    states = 4 * model.hidden * wishes.length
    held = states * (work.depth + 4) * wishes.rows
    outputs = sum(2 * m.out_features**2 for m in quantised(model) if m.out_features <= 2048)
    matrices = sum(m.in_features * m.out_features for m in work.matrices.values())
    kept = kept_bytes(work.plan, model, work.matrices.keys())
    there = sum(path.stat().st_size for path in work.job.folder.glob("*.safetensors"))
    return max(0, held + outputs + 2 * matrices + kept - there) + 2**20
