"""`TensorNames`: maps exlm's roles to the names that files give their tensors.

In exlm a tensor has a *role*: `embed`, `positions`, `layers.3.attn.q`, `layers.3.attn_norm`,
`layers.3.mlp.experts.5.down`, `final_norm`, `head`. In a file it has a *key*:
`model.layers.3.self_attn.q_proj`. The mapping has two steps: `key_renames` bring a file's keys into Llama's
spelling, and `locations` list, for each role, where it may be stored, in order of preference: alone, or as
some rows of a fused tensor.

A format that stores a matrix with an order or scales of its own cannot store it as rows of another. So a role that a
family only has fused may also be stored alone, under the fused tensor's key and its own part: `in_proj_qkv` holds
`delta.q`, and so does `in_proj_qkv.q`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

RowRange = tuple[int, int]


class KeyRename(NamedTuple):
    """Replaces `old` by `new` in a stored key: everywhere, or only where the key starts with it."""

    old: str
    new: str
    prefix_only: bool = False

    def __call__(self, key: str) -> str:
        if self.prefix_only:
            return self.new + key[len(self.old) :] if key.startswith(self.old) else key
        return key.replace(self.old, self.new)


@dataclass(frozen=True)
class TensorLocation:
    """One way a role may be stored; `{i}` is the layer, `{e}` the expert."""

    key: str
    rows: tuple[RowRange, ...] = ()  # these outputs of the matrix, in this order; () is all of them
    rows_per_expert: int = 0  # for stacked experts: stored rows of each; 0: not stacked
    expert_rows: RowRange | None = None  # that expert's rows, set by `for_expert`; cut before transposing
    transposed: bool = False  # stored (in, out) instead of (out, in)
    without_suffix: bool = False  # stored as `key`, without the `.weight` suffix

    @property
    def is_whole(self) -> bool:
        """Whether the tensors here hold this role alone."""
        return not self.rows and not self.rows_per_expert

    def tensor_key(self, suffix: str) -> str:
        """The key of one of the tensors here: of `weight`, `bias`, or a part of a quantised matrix."""
        return self.key if self.without_suffix and suffix == "weight" else f"{self.key}.{suffix}"

    @property
    def stored_rows(self) -> tuple[RowRange, ...]:
        """The rows of a fused tensor, or of stacked experts' tensors one after the other, in the role's order."""
        start, stop = self.expert_rows or (0, 0)
        return tuple((start + first, start + last) for first, last in self.rows or ((0, stop - start),))

    def for_expert(self, layer: int, expert: int) -> TensorLocation:
        """This location with the layer and the expert filled in."""
        key = self.key.replace("{i}", str(layer)).replace("{e}", str(expert))
        expert_rows = (
            (expert * self.rows_per_expert, (expert + 1) * self.rows_per_expert) if self.rows_per_expert else None
        )
        return replace(self, key=key, expert_rows=expert_rows)


def interleaved_rows(widths: Mapping[str, int], heads: int) -> dict[str, tuple[RowRange, ...]]:
    """The rows of parts of these widths, of a matrix that stores all parts of a head after the other, head by head."""
    found, first, stride = {}, 0, sum(widths.values())
    for part, width in widths.items():
        found[part] = tuple((h * stride + first, h * stride + first + width) for h in range(heads))
        first += width
    return found


LAYER_PREFIX = "model.layers.{i}."

LLAMA_LOCATIONS: tuple[tuple[str, tuple[TensorLocation, ...]], ...] = (
    ("embed", (TensorLocation("model.embed_tokens"),)),
    ("positions", (TensorLocation("model.wpe"),)),
    ("final_norm", (TensorLocation("model.norm"),)),
    ("head", (TensorLocation("lm_head"),)),
    ("attn_norm", (TensorLocation(LAYER_PREFIX + "input_layernorm"),)),
    ("mlp_norm", (TensorLocation(LAYER_PREFIX + "post_attention_layernorm"),)),
    ("attn.q", (TensorLocation(LAYER_PREFIX + "self_attn.q_proj"),)),
    ("attn.k", (TensorLocation(LAYER_PREFIX + "self_attn.k_proj"),)),
    ("attn.v", (TensorLocation(LAYER_PREFIX + "self_attn.v_proj"),)),
    ("attn.o", (TensorLocation(LAYER_PREFIX + "self_attn.o_proj"),)),
    ("attn.q_norm", (TensorLocation(LAYER_PREFIX + "self_attn.q_norm"),)),
    ("attn.k_norm", (TensorLocation(LAYER_PREFIX + "self_attn.k_norm"),)),
    ("mlp.gate", (TensorLocation(LAYER_PREFIX + "mlp.gate_proj"),)),
    ("mlp.up", (TensorLocation(LAYER_PREFIX + "mlp.up_proj"),)),
    ("mlp.down", (TensorLocation(LAYER_PREFIX + "mlp.down_proj"),)),
)

_LAYER_ROLE = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT_ROLE = re.compile(r"(.*\bexperts)\.(\d+)\.(.+)")


@dataclass(frozen=True)
class TensorNames:
    """The tensor names of a family: Llama's, and the differences from them."""

    key_renames: tuple[KeyRename, ...] = ()
    locations: tuple[tuple[str, tuple[TensorLocation, ...]], ...] = LLAMA_LOCATIONS

    def to_llama_key(self, key: str) -> str:
        """A stored key in Llama's spelling."""
        for rule in self.key_renames:
            key = rule(key)
        return key

    def locations_of(self, role: str) -> tuple[TensorLocation, ...]:
        """The locations where a role may be stored, the preferred first; KeyError for an unknown role."""
        found, part = self._family_locations(role)
        if any(location.is_whole for location in found):
            return found
        return (*found, TensorLocation(f"{found[0].key}.{part}"))

    def own_location(self, role: str) -> TensorLocation:
        """The preferred one of the locations that hold the role alone."""
        return next(location for location in self.locations_of(role) if location.is_whole)

    def fused_location(self, role: str) -> TensorLocation | None:
        """Where a family has a role that it stores only as rows of a tensor; None for other roles."""
        found, _ = self._family_locations(role)
        return None if any(location.is_whole for location in found) else found[0]

    def _family_locations(self, role: str) -> tuple[tuple[TensorLocation, ...], str]:
        """The locations that the family lists for a role, and the role's last part, of an expert with its number."""
        layer, expert, pattern = 0, 0, role
        if match := _LAYER_ROLE.fullmatch(pattern):
            layer, pattern = int(match[1]), match[2]
        part = pattern.rpartition(".")[2]
        if match := _EXPERT_ROLE.fullmatch(pattern):
            expert, pattern, part = int(match[2]), f"{match[1]}.{match[3]}", f"{match[2]}.{match[3]}"
        for known_role, candidates in self.locations:
            if known_role == pattern:
                return tuple(location.for_expert(layer, expert) for location in candidates), part
        raise KeyError(f"no tensor name is defined for the role {role!r}")

    def with_locations(self, **changes: TensorLocation | tuple[TensorLocation, ...]) -> TensorNames:
        """These names with other locations for some roles; `__` in a keyword stands for the role's dot."""
        table = dict(self.locations)
        for role, found in changes.items():
            table[role.replace("__", ".")] = found if isinstance(found, tuple) else (found,)
        return replace(self, locations=tuple(table.items()))
