"""What old scripts import of the EXL2 converter: its reader of texts to judge a model by; placeholders."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import InputError, Tokenizer
from ..quantize.calibrate import documents
from .placeholders import Unavailable, UnavailableObject, unavailable

QUANTIZE = (
    "Make EXL2 models with `exlm quantize`, or with exlm.quantize_model, where a measurement.json of the old "
    "converter works too; load them with exlm.Model."
)


def get_tokens(num_rows: int, length: int, filename: str | os.PathLike[str], tokenizer: Tokenizer) -> Tensor:
    """(num_rows, length) ids from the documents of a .parquet, .txt or .jsonl file, one after the other."""
    wanted, ids, have = num_rows * length, [], 0
    if num_rows < 1 or length < 1:
        raise InputError(f"get_tokens reads at least 1 row of 1 token, found {num_rows} and {length}.")
    for text in documents(Path(filename)):
        ids.append(tokenizer.encode(text)[0])
        have += len(ids[-1])
        if have >= wanted:
            return torch.cat(ids)[:wanted].view(num_rows, length)
    raise InputError(
        f"{filename} has {have:,} tokens, and {num_rows} rows of {length} take {wanted:,}: ask for fewer "
        "rows or give more text."
    )


def _stage(name: str) -> Any:
    return unavailable(f"exllamav2.conversion.{name}", QUANTIZE)


tokenize = _stage("tokenize.tokenize")
get_standard_calibration = _stage("tokenize.get_standard_calibration")
embeddings = _stage("measure.embeddings")
measure_quant = _stage("measure.measure_quant")
optimize = _stage("optimize.optimize")
quant = _stage("quantize.quant")
compile_model = _stage("compile.compile_model")
print_stage = _stage("bot_status.print_stage")
get_qparams_reduced = _stage("qparams.get_qparams_reduced")


def _table(name: str) -> UnavailableObject:
    return UnavailableObject(f"exllamav2.conversion.qparams.{name}", QUANTIZE)


qparams_attn = _table("qparams_attn")
qparams_mlp = _table("qparams_mlp")
qparams_headoptions = _table("qparams_headoptions")


class QParams(Unavailable):
    """Was one choice of widths for a matrix."""

    remedy = QUANTIZE


class AdaptiveGPTQ(Unavailable):
    """Was the rounding of one matrix."""

    remedy = QUANTIZE
