"""Codes and scales as the lanes of a tensor core want them, and the way back.

Only the order of numbers and bits; what is a brick, and what goes into it, is `tiles`' business.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE_K = 128  # inputs
TILE_N = 16  # outputs
MAX_M16 = 16  # rows up to which all are summed in one and the same way

BIT_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (4, 4)}
"""The bits of each plane, lowest first."""


def to_lanes(rows: Tensor) -> Tensor:
    """(inputs, outputs) → (tiles, blocks, lane, step, register, 2)."""
    # An input is (block, step, q, half, pair), an output (tile, eight, g); a register is (half, eight).
    shape = (rows.shape[0] // TILE_K, 8, 4, 2, 2, rows.shape[1] // TILE_N, 2, 8)
    lanes = rows.reshape(shape).permute(5, 0, 7, 2, 1, 3, 6, 4)  # tile, block, g, q, step, half, eight, pair
    return lanes.reshape(shape[5], shape[0], 32, 8, 4, 2)


def from_lanes(lanes: Tensor) -> Tensor:
    """The way back, to (outputs, inputs)."""
    tiles, blocks = lanes.shape[:2]
    parts = lanes.view(tiles, blocks, 8, 4, 8, 2, 2, 2)  # tile, block, g, q, step, half, eight, pair
    return parts.permute(0, 6, 2, 1, 4, 3, 5, 7).reshape(tiles * TILE_N, blocks * TILE_K)


def plane(lanes: Tensor, bits: int) -> Tensor:
    """Numbers of a few bits → (tiles, blocks, 256 · bits) uint8.

    In a word fields go upwards, pairs 16 bits apart; of four words or fewer each lane has its own in a row.
    """
    tiles, blocks = lanes.shape[:2]
    count = 2 * bits  # words of a lane
    fields = lanes.reshape(tiles, blocks, 32, count, 16 // bits, 2)
    words = torch.zeros(fields.shape[:4], dtype=torch.int32, device=lanes.device)
    for field in range(16 // bits):
        for pair in range(2):
            words |= fields[..., field, pair].to(torch.int32) << (bits * field + 16 * pair)
    pieces = words.view(tiles, blocks, 32, -1, min(4, count)).transpose(2, 3).contiguous()
    return pieces.view(torch.uint8).flatten(2)


def unplane(data: Tensor, bits: int) -> Tensor:
    """The way back, to (tiles, blocks, lane, step, register, 2) int32."""
    tiles, blocks = data.shape[:2]
    pieces = data.contiguous().view(torch.int32).view(tiles, blocks, -1, 32, min(4, 2 * bits))
    words = pieces.transpose(2, 3).flatten(3)
    shifts = torch.tensor([[bits * field + 16 * pair for pair in range(2)] for field in range(16 // bits)])
    numbers = (words[..., None, None] >> shifts.to(words.device)) & ((1 << bits) - 1)
    return numbers.reshape(tiles, blocks, 32, 8, 4, 2)


def spread(table: Tensor, groups: int) -> Tensor:
    """A table's number for every code: (tiles, blocks, lane, step, register, 1)."""
    tiles, blocks = table.shape[:2]
    grid = table.reshape(tiles, blocks, groups, 8, 2).repeat_interleave(8 // groups, 2)
    lanes = grid.transpose(2, 3)[:, :, :, None, :, None, :].expand(-1, -1, -1, 4, -1, 2, -1)
    return lanes.reshape(tiles, blocks, 32, 8, 4, 1)
