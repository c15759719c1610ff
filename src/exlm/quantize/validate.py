"""Checks an EXL2 folder against every rule of the format that other readers rely on.

Stricter than our own reader, which accepts some files that others do not (another order of widths, other
dtypes). Only the form of the tensors is checked, not the quality of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint import SafetensorsFolder
from ..checkpoint.tensor_index import tensor_key
from ..config import Config
from ..convert.plan import vector_specs
from ..formats.bits import WORD_BITS
from ..formats.exl2 import ALIGNMENT, BIT_WIDTHS, TENSORS
from ..spec.weight_roles import Matrix, matrices

DTYPES = {
    "q_weight": torch.int32,
    "q_scale": torch.int32,
    "q_scale_max": torch.float16,
    "q_groups": torch.int16,
    "q_invperm": torch.int32,
}
MAX_OFFSET = 0x7FFF
"""The largest offset of a group, in words of q_weight, that is the same number as int16 and as uint16."""

MAX_INPUTS = 0xFFFF
"""The largest number of inputs whose permutation fits in uint16."""

FLOAT_DTYPES = (torch.float16,)


def validate_exl2(folder: str | Path) -> list[str]:
    """The violations found in an EXL2 model's files, one sentence each; empty if any reader can load it."""
    config = Config(folder)
    path, model = config.freeze().path, config.spec
    if not path.is_dir():
        return [f"{path} is a file: an EXL2 model is a folder."]
    files = SafetensorsFolder(path)
    stored = {model.names.to_llama_key(name): name for name in files.names()}
    violations: list[str] = []
    expected: set[str] = set()
    for m in matrices(model):
        location = model.names.locations_of(m.role)[0]
        names = {suffix: tensor_key(location, suffix) for suffix in (*TENSORS, "bias", "weight")}
        present = {s: files.load(stored[n]) for s, n in names.items() if n in stored}
        expected |= {n for s, n in names.items() if s in present}
        if m.role.endswith(".router"):
            violations += [] if "weight" in present else [f"{location.key}: a router must be plain floats."]
            continue
        violations += [f"{location.key}: {violation}" for violation in _check_matrix(m, present)]
    for role in ("embed", *(vector.role for vector in vector_specs(model))):
        name = tensor_key(model.names.locations_of(role)[0], "weight")
        expected |= {name, f"{name.removesuffix('weight')}bias"}
        if name not in stored:
            violations.append(f"{name} is missing.")
        elif files.dtype(stored[name]) not in FLOAT_DTYPES:
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
    for suffix, dtype in DTYPES.items():
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
    if starts[-1] > MAX_OFFSET:
        yield f"q_groups: offset {starts[-1]} is past {MAX_OFFSET}."
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
