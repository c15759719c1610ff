"""AWQ in AutoAWQ's GEMM layout: 4 bits, eight columns interleaved in a word.

Detects, checks and reads the tensors of one matrix, and packs its codes down columns instead:

    qweight  (inputs, columns / 8) int32   codes along each row, columns interleaved (`NIBBLE_COLUMNS`)
    qzeros   (groups, columns / 8) int32   zero points, packed the same way
    scales   (groups, columns) float16

`quantization_config`, which reads the JSON of GPTQ and AWQ, refuses the other AWQ layouts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import CheckpointError
from .gptq import TENSORS, collapse_zeros, describe, read_scales, sequential_group_sizes
from .matrix_format import MatrixFormat, bad_tensor, check_features, require_tensor
from .packed import PackedWeight, PlainScales, Segment, pack
from .quantization_config import AWQ_BITS, QuantizationConfig

BITS = 4
# The column (of eight) that each nibble of a word holds, lowest nibble first.
NIBBLE_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def read(
    tensors: Mapping[str, Tensor],
    in_features: int,
    out_features: int,
    where: str,
    config: QuantizationConfig,
) -> PackedWeight:
    """The matrix in qweight, qzeros and scales."""
    if config.method != "awq" or config.bits not in (None, *AWQ_BITS):
        raise CheckpointError(
            f"{where}: expected AWQ's gemm layout of {BITS} bits, found {config.checkpoint_format} of "
            f"{config.bits} bits."
        )
    check_features(in_features, out_features, where)
    if out_features % len(NIBBLE_COLUMNS):
        raise bad_tensor(where, "qweight", f"outputs in multiples of {len(NIBBLE_COLUMNS)}", out_features)
    across = out_features // len(NIBBLE_COLUMNS)
    words = require_tensor(tensors, "qweight", where, (torch.int32,), (in_features, across))
    scales = read_scales(tensors, out_features, where)
    packed = require_tensor(tensors, "qzeros", where, (torch.int32,), (scales.shape[0], across))
    sizes = sequential_group_sizes(in_features, scales.shape[0], where, config)
    zero = collapse_zeros(_unpack_nibbles(packed), 0, where)
    return PackedWeight(
        format_name="awq",
        in_features=in_features,
        out_features=out_features,
        segments=(Segment(BITS, sizes, pack(_unpack_nibbles(words), BITS), PlainScales(scales), zero),),
        dtype=torch.float16,
    )


def _unpack_nibbles(words: Tensor) -> Tensor:
    """(rows, words) → (rows, columns) uint8."""
    out = torch.empty(*words.shape, len(NIBBLE_COLUMNS), dtype=torch.uint8, device=words.device)
    for nibble, column in enumerate(NIBBLE_COLUMNS):
        out[:, :, column] = (words >> (nibble * BITS)) & ((1 << BITS) - 1)
    return out.view(words.shape[0], words.shape[1] * len(NIBBLE_COLUMNS))


FORMAT = MatrixFormat("awq", "qweight", TENSORS, read, describe, quant_method="awq")
