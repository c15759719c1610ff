"""The new model's folder: quantised matrices, everything else as in the source, and config.json.

It is written under a hidden name and renamed when it is complete; the caller gives the quantised tensors.

`validate_exl2` checks an EXL2 folder against every rule of the format that other readers rely on. It is
stricter than our own reader, which accepts some files that others do not (another order of widths, other
dtypes). Only the form of the tensors is checked, not the quality of the model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import spec
from ..atomic import atomic_dir, report_write_errors
from ..checkpoint import GgufCheckpoint, SafetensorsFolder, WeightSource, save_sharded
from ..config import Config, FrozenConfig
from ..convert.plan import ConversionPlan, vector_specs
from ..convert.planners import make_plan
from ..convert.side_files import CONFIG_FILE, QUANTIZATION_FILES, SideFiles, json_bytes, side_files
from ..errors import InputError
from ..formats.exl2 import ALIGNMENT, BIT_WIDTHS, TENSORS
from ..formats.packed import WORD_BITS
from ..spec.model import Matrix, matrices
from .allocation import quantized_matrices

MODEL_CARD = "README.md"
"""Where the model's card goes; a card of the source is kept as README-source.md."""

EXL2_DTYPES = {
    "q_weight": torch.int32,
    "q_scale": torch.int32,
    "q_scale_max": torch.float16,
    "q_groups": torch.int16,
    "q_invperm": torch.int32,
}
MAX_SIGNED_OFFSET = 0x7FFF
"""The largest offset of a group, in words of q_weight, that is the same number as int16 and as uint16."""

MAX_INPUTS = 0xFFFF
"""The largest number of inputs whose permutation fits in uint16."""


LoadQuantized = Callable[[str], Mapping[str, Tensor]]
"""(role) → the tensors of a quantised matrix, by their names in the new model's files."""


def conversion_plan(frozen: FrozenConfig, source: WeightSource, roles: Set[str]) -> ConversionPlan:
    """How the source becomes a folder of safetensors, with `roles` to be replaced; no tensor is read yet.

    A head that is not in `roles` is dequantised: readers of the new format may not know the source's.
    """
    is_gguf = isinstance(source, GgufCheckpoint)
    return make_plan(frozen, source, "safetensors" if "head" in roles and not is_gguf else "dense", roles)


def unquantized_bytes(plan: ConversionPlan, model: spec.Model, roles: Set[str]) -> int:
    """Bytes of everything that is not quantised: embedding and norms in float16, the rest as it is."""
    vectors = {vector.role for vector in plan.vectors if not vector.keeps_precision}
    total = 0
    for step in plan.steps:
        if step.label in roles:
            continue
        if step.label == "embed":
            total += 2 * model.hidden * model.vocab
        else:
            total += step.nbytes if step.label not in vectors else step.nbytes // 2
    return total


@contextmanager
def write_model(
    target: Path,
    frozen: FrozenConfig,
    source: WeightSource,
    roles: Set[str],
    load_quantized: LoadQuantized,
    quantization_config: Mapping[str, Any],
    *,
    shard_bytes: int,
    overwrite: bool,
) -> Iterator[Path]:
    """Write the model to a hidden folder, which gets its name when the block ends without an error.

    `load_quantized` gives the tensors of the quantised `roles`; `quantization_config` is config.json's section.
    """
    plan = conversion_plan(frozen, source, roles)
    with atomic_dir(target, overwrite=overwrite) as hidden:
        weights = save_sharded(hidden, _model_tensors(plan, roles, load_quantized), shard_bytes=shard_bytes)
        with report_write_errors(target):
            _side_files(frozen, source, plan, quantization_config).write_to(hidden)
            for path in weights:
                shutil.copymode(hidden / CONFIG_FILE, path)
        yield hidden


def check_float16_range(plan: ConversionPlan, roles: Set[str]) -> None:
    """`InputError` names the first unquantised tensor that float16 cannot hold, before hours of work."""
    labels = _float16_labels(plan, roles)
    for step in plan.steps:
        if step.label in labels:
            for name, tensor in step.make_tensors():
                _to_float16(name, tensor)


def _float16_labels(plan: ConversionPlan, roles: Set[str]) -> set[str]:
    """The labels of the plan whose tensors are converted to float16."""
    vectors = {vector.role for vector in plan.vectors if not vector.keeps_precision}
    return {"embed", *vectors, *plan.actions} - set(roles)


def _model_tensors(
    plan: ConversionPlan, roles: Set[str], load_quantized: LoadQuantized
) -> Iterator[tuple[str, Tensor]]:
    labels = _float16_labels(plan, roles)
    for step in plan.steps:
        if step.label in roles:
            yield from load_quantized(step.label).items()
        elif step.label in labels:
            for name, tensor in step.make_tensors():
                yield name, _to_float16(name, tensor)
        else:
            yield from step.make_tensors()
    if "head" in roles and all(step.label != "head" for step in plan.steps):
        yield from load_quantized("head").items()  # the source ties it to the embedding


def _to_float16(name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    half = tensor.half()
    if not bool(torch.isfinite(half).all()):
        if bool(torch.isfinite(tensor).all()):
            raise InputError(f"{name} holds numbers that float16 cannot: the model cannot be stored in float16.")
        raise InputError(f"{name} of the source holds NaN or infinity. Download the model again.")
    return half


def _side_files(
    frozen: FrozenConfig, source: WeightSource, plan: ConversionPlan, quantization_config: Mapping[str, Any]
) -> SideFiles:
    files = side_files(frozen, source, plan)
    config = json.loads(files.written[CONFIG_FILE])
    config["quantization_config"] = dict(quantization_config)
    written = {**files.written, CONFIG_FILE: json_bytes(config)}
    copied = {name: path for name, path in files.copied.items() if name not in QUANTIZATION_FILES}
    if MODEL_CARD in copied:
        copied["README-source.md"] = copied.pop(MODEL_CARD)
    return SideFiles(written, copied)


# -- checking an EXL2 folder -----------------------------------------------------------------------


def validate_exl2(folder: str | Path) -> list[str]:
    """The violations found in an EXL2 model's files, one sentence each; empty if any reader can load it."""
    config = Config(folder)
    path, model = config.freeze().path, config.spec
    if not path.is_dir():
        return [f"{path} is a file: an EXL2 model is a folder."]
    files = SafetensorsFolder(path)
    stored = {model.names.to_llama_key(name): name for name in files.tensors}
    violations: list[str] = []
    expected: set[str] = set()
    quantized = {m.role for m in quantized_matrices(model)} | {"head"}

    def has(role: str) -> bool:
        return any(location.tensor_key("weight") in stored for location in model.names.locations_of(role))

    for m in matrices(model):
        location = model.names.own_location(m.role)
        if m.role not in quantized:
            violations += [] if has(m.role) else [f"{location.key}: {m.role} must be plain floats."]
            expected |= {one.tensor_key("weight") for one in model.names.locations_of(m.role)}
            continue
        names = {suffix: location.tensor_key(suffix) for suffix in (*TENSORS, "bias", "weight")}
        present = {s: files.load(stored[n]) for s, n in names.items() if n in stored}
        expected |= {n for s, n in names.items() if s in present}
        violations += [f"{location.key}: {violation}" for violation in _check_matrix(m, present)]
    for role, keeps_precision in (("embed", False), *((v.role, v.keeps_precision) for v in vector_specs(model, has))):
        name = model.names.own_location(role).tensor_key("weight")
        expected |= {name, f"{name.removesuffix('weight')}bias"}
        if name not in stored:
            violations.append(f"{name} is missing.")
        elif not keeps_precision and files.dtype(stored[name]) is not torch.float16:
            violations.append(f"{name}: expected float16, found {files.dtype(stored[name])}.")
    known = {name.rpartition(".")[0] for name in expected}
    for name in stored:
        key, _, suffix = name.rpartition(".")
        if suffix in TENSORS and key not in known:
            violations.append(f"{name}: no matrix of this model has that name.")
    return violations


def _check_matrix(m: Matrix, t: dict[str, Tensor]) -> Iterator[str]:
    """The violations in one matrix's tensors."""
    missing = [suffix for suffix in TENSORS if suffix not in t]
    if missing:
        yield f"{', '.join(missing)} missing."
        return
    if ("bias" in t) != m.bias:
        yield "has a bias that the model does not expect." if "bias" in t else "its bias is missing."
    for suffix, dtype in EXL2_DTYPES.items():
        if t[suffix].dtype is not dtype:
            yield f"{suffix}: expected {dtype}, found {t[suffix].dtype}."
            return
    if m.in_features % ALIGNMENT or m.in_features > MAX_INPUTS:
        yield f"{m.in_features} inputs: expected a multiple of {ALIGNMENT} up to {MAX_INPUTS}."
    width, (words, columns) = -(-m.out_features // ALIGNMENT) * ALIGNMENT, t["q_weight"].shape
    if columns != width:
        yield f"q_weight: expected {width} columns, padding included, found {columns}."
    count = t["q_groups"].numel() // 2
    if t["q_groups"].numel() != 2 * count or not count:
        yield f"q_groups: expected pairs, found {t['q_groups'].numel()} numbers."
        return
    for suffix, shape in {"q_scale": [count, width // 8], "q_scale_max": [count]}.items():
        if list(t[suffix].shape) != shape:
            yield f"{suffix}: expected shape {shape}, found {list(t[suffix].shape)}."
    if not bool(torch.isfinite(t["q_scale_max"]).all()) or bool((t["q_scale_max"] < 0).any()):
        yield "q_scale_max: expected finite numbers of at least 0."
    order = t["q_invperm"].flatten().long()
    if not torch.equal(order.sort().values, torch.arange(m.in_features)):
        yield f"q_invperm: expected each of 0 to {m.in_features - 1} once."
    yield from _check_groups((t["q_groups"].long() & 0xFFFF).tolist(), words, m.in_features)


def _check_groups(table: list[int], words: int, inputs: int) -> Iterator[str]:
    """The violations in the group table q_groups."""
    widths, starts = table[::2], table[1::2]
    if odd := [b for b in widths if b not in BIT_WIDTHS]:
        yield f"q_groups: {odd[0]} is not one of the widths {BIT_WIDTHS}."
        return
    if widths != sorted(widths, reverse=True):
        yield f"q_groups: widths must descend, found {[b for b, _ in groupby(widths)]}."
    stops = [*starts[1:], words]
    if starts[0] != 0 or any(a >= b for a, b in zip(starts, stops, strict=True)):
        yield "q_groups: offsets must begin at 0 and ascend to the end of q_weight."
        return
    if starts[-1] > MAX_SIGNED_OFFSET:
        yield f"q_groups: offset {starts[-1]} is past {MAX_SIGNED_OFFSET}."
    rows = []
    for bits, a, b in zip(widths, starts, stops, strict=True):
        if (b - a) * WORD_BITS % bits:
            yield f"q_groups: {b - a} words are no whole number of {bits}-bit rows."
        rows.append((b - a) * WORD_BITS // bits)
    if sum(rows) != inputs:
        yield f"q_groups: expected {inputs} rows in all, found {sum(rows)}."
    runs = {b: sum(r for w, r in zip(widths, rows, strict=True) if w == b) for b in widths}
    for bits, count in runs.items():
        unit = 16 if bits == 2 else ALIGNMENT
        if count % unit:
            yield f"q_groups: {count} rows of {bits} bits are not a multiple of {unit}."
