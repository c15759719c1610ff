"""How files spell our roles.

Inside the house a tensor has a *role*: `embed`, `positions`, `layers.3.attn.q`, `layers.3.attn_norm`,
`layers.3.mlp.experts.5.down`, `final_norm`, `head`. A file has a *key*: `model.layers.3.self_attn.q_proj`.
`Names` maps the one to the other in two steps: `rename` brings the keys of a file into Llama's spelling, and
`places` says, for each role, where it may be found, in order of preference: alone, or as some rows of a
tensor that holds several.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import NamedTuple

Span = tuple[int, int]


class Rename(NamedTuple):
    """Replace `old` by `new` in a stored key: everywhere, or only where the key starts with it."""

    old: str
    new: str
    start: bool = False

    def __call__(self, key: str) -> str:
        if self.start:
            return self.new + key[len(self.old) :] if key.startswith(self.old) else key
        return key.replace(self.old, self.new)


@dataclass(frozen=True)
class Place:
    """One way a role may be stored; `{i}` is the layer, `{e}` the expert."""

    key: str
    rows: tuple[Span, ...] = ()  # these outputs of the matrix, in this order; () is all of them
    stack: int = 0  # the tensor stacks experts, so many stored rows each; `{e}` picks one
    slab: Span | None = (
        None  # that expert's stored rows, filled in by `at`; cut before anything is transposed
    )
    transposed: bool = False  # stored (in, out) instead of (out, in)
    bare: bool = False  # stored as `key`, without the `.weight` suffix

    def at(self, layer: int, expert: int) -> Place:
        """This place with the layer and the expert filled in."""
        key = self.key.replace("{i}", str(layer)).replace("{e}", str(expert))
        slab = (expert * self.stack, (expert + 1) * self.stack) if self.stack else None
        return replace(self, key=key, slab=slab)


LAYER = "model.layers.{i}."

LLAMA: tuple[tuple[str, tuple[Place, ...]], ...] = (
    ("embed", (Place("model.embed_tokens"),)),
    ("positions", (Place("model.wpe"),)),
    ("final_norm", (Place("model.norm"),)),
    ("head", (Place("lm_head"),)),
    ("attn_norm", (Place(LAYER + "input_layernorm"),)),
    ("mlp_norm", (Place(LAYER + "post_attention_layernorm"),)),
    ("attn.q", (Place(LAYER + "self_attn.q_proj"),)),
    ("attn.k", (Place(LAYER + "self_attn.k_proj"),)),
    ("attn.v", (Place(LAYER + "self_attn.v_proj"),)),
    ("attn.o", (Place(LAYER + "self_attn.o_proj"),)),
    ("attn.q_norm", (Place(LAYER + "self_attn.q_norm"),)),
    ("attn.k_norm", (Place(LAYER + "self_attn.k_norm"),)),
    ("mlp.gate", (Place(LAYER + "mlp.gate_proj"),)),
    ("mlp.up", (Place(LAYER + "mlp.up_proj"),)),
    ("mlp.down", (Place(LAYER + "mlp.down_proj"),)),
)

_LAYERED = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Names:
    """Where this family's files keep each role: Llama's spelling, and the differences from it."""

    rename: tuple[Rename, ...] = ()
    places: tuple[tuple[str, tuple[Place, ...]], ...] = LLAMA

    def canonical(self, key: str) -> str:
        """A stored key in Llama's spelling."""
        for rule in self.rename:
            key = rule(key)
        return key

    def find(self, role: str) -> tuple[Place, ...]:
        """The places a role may be stored, best first. Asking for a role nobody defined is our mistake."""
        layer, expert, pattern = 0, 0, role
        if match := _LAYERED.fullmatch(pattern):
            layer, pattern = int(match[1]), match[2]
        if match := _EXPERT.fullmatch(pattern):
            expert, pattern = int(match[2]), f"{match[1]}.{match[3]}"
        for known, places in self.places:
            if known == pattern:
                return tuple(place.at(layer, expert) for place in places)
        raise KeyError(f"no place is defined for the role {role!r}")

    def with_places(self, **changes: Place | tuple[Place, ...]) -> Names:
        """These names with some roles elsewhere; `__` in a keyword stands for the role's dot."""
        table = dict(self.places)
        for role, places in changes.items():
            table[role.replace("__", ".")] = places if isinstance(places, tuple) else (places,)
        return replace(self, places=tuple(table.items()))
