"""Quantised matrices from a checkpoint: gather the tensors, hand them to their format, cut what was fused.

What the bits mean is in `formats`; where a role is stored in `lookup`. What is returned shares no memory with
the files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from ..formats import PackedWeight, awq, exl2, gptq
from .dense import read_bias
from .tensor_index import TensorIndex, WeightRequest, key_at

EXL2 = ("q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm")
GPTQ = ("qweight", "qzeros", "scales", "g_idx")


def read_exl2(lookup: TensorIndex, wanted: WeightRequest) -> PackedWeight:
    """A matrix in EXL2's five tensors."""
    tensors, where = _gather(lookup, wanted, EXL2)
    width = lookup.stored_outputs(wanted.role, wanted.location, wanted.out_features)
    return _finish(lookup, wanted, exl2.read(tensors, wanted.in_features, width, None, where))


def read_gptq(lookup: TensorIndex, wanted: WeightRequest) -> PackedWeight:
    """A matrix in the three or four tensors that GPTQ and AWQ share the names of."""
    tensors, where = _gather(lookup, wanted, GPTQ)
    width = lookup.stored_outputs(wanted.role, wanted.location, wanted.out_features)
    read = awq.read if lookup.quantization.method == "awq" else gptq.read
    return _finish(lookup, wanted, read(tensors, wanted.in_features, width, None, where, lookup.quantization))


def _gather(
    lookup: TensorIndex, wanted: WeightRequest, suffixes: Iterable[str]
) -> tuple[dict[str, Tensor], str]:
    """The tensors that are there, in memory that the weight may keep, and the words for them in an error."""
    infos = {s: lookup.use(key) for s in suffixes if (key := key_at(wanted.location, s)) in lookup}
    first = next(iter(infos.values()))
    tensors = {suffix: lookup.files.load(info.name) for suffix, info in infos.items()}
    return tensors, f"{first.file}: {wanted.location.key}"


def _finish(lookup: TensorIndex, wanted: WeightRequest, weight: PackedWeight) -> PackedWeight:
    """Only the wanted outputs, on their device and with their bias."""
    if wanted.location.rows:
        spans = [torch.arange(start, stop) for start, stop in wanted.location.rows]
        weight = weight.take_columns(torch.cat(spans))
    return replace(weight.to(wanted.device), bias=read_bias(lookup, wanted))
