"""Whether rotary tables of the configured length have room, asked before any of them is made.

A table has the sine and cosine of every position up to `config.max_seq_len`, which is what the model's files
name unless the user says less. Files may name a length of a thousand million.
"""

from __future__ import annotations

from collections.abc import Sequence

from .. import spec
from ..config import FrozenConfig
from ..errors import DoesNotFit
from .devices import DeviceInfo
from .placement import format_bytes

SHARE = 4
"""Of a device's free memory the tables get one part in so many: a cache as long takes more."""

SMALL = 1 << 28
"""Bytes of tables that are not worth a question; less than two million positions of a common model."""


def check_rotary_tables(config: FrozenConfig, slots: Sequence[DeviceInfo]) -> None:
    """DoesNotFit if the tables of a device's layers take too much of it; `slots` has each module's device."""
    length = config.max_seq_len
    for slot in {id(one): one for one in slots}.values():
        needed, most = _bytes_for_position(config.spec, slots, slot) * length, max(SMALL, slot.free // SHARE)
        if needed > most:
            raise DoesNotFit(
                f"{config.path}: config.max_seq_len is {length:,}, and rotary tables for so many positions "
                f"take {format_bytes(needed)} on {slot.name}, which has {format_bytes(slot.free)} free. Set "
                "config.max_seq_len to the longest sequence you want before loading: with at most "
                f"{most * length // needed:,} the tables leave room for weights and cache."
            )


def _bytes_for_position(model: spec.Model, slots: Sequence[DeviceInfo], slot: DeviceInfo) -> int:
    """What one position takes in the tables of a device's layers, each table once, while they are made."""
    at = zip(slots[1:], model.layers, strict=False)
    ropes = {layer.attn.rope for place, layer in at if place is slot and layer.attn.rope is not None}
    widths = [rope.dim for rope in ropes]
    # Two numbers of four bytes for each pair of dimensions. On a CPU, which makes them, as much again lies
    # beside the last table for a while: the angles, and a product.
    making = max(widths, default=0) if slot.device.type == "cpu" else 0
    return 4 * (sum(widths) + making)
