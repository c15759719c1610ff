"""What a model will need before anything is loaded: bytes of each module, and of each device they go to.

Sizes come from the files' headers, the description and the cache's own layout; which module goes where is
`placement`'s answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from .. import spec
from ..cache import PAGE, LayerShape
from ..checkpoint import Source
from ..config import FrozenConfig
from ..errors import DoesNotFit, InputError
from ..kernels.backend import UNPACKED
from ..kernels.select import choose
from ..spec.roles import Matrix, matrices
from .devices import Slot, pick_dtype
from .placement import GB, Load, Part, Space, loads, place

log = logging.getLogger(__name__)

LOGITS = 64
"""Rows of logits a step is taken to ask for."""

JOINED = ("attn.q", "attn.k", "attn.v"), ("mlp.gate", "mlp.up")
"""Matrices that a GPU multiplies as one, if they are not too large."""

LONGEST = 1 << 24
"""Tokens of a context beyond which nobody asks whether more would fit."""

RESERVE = 192 << 20, 64 << 20
"""Left free on the first device and on each other one, if the user says nothing."""

FIT_CACHE = "Take a cache with a smaller max_seq_len or of fewer bits (CacheQ4), lower reserve_vram, or name "
FIT_CACHE += 'more devices, as in config.device = "cuda:0,cuda:1,cpu".'
FIT_SPLIT = (
    "Raise the numbers of gpu_split (GB of weights for each device), leave it out, or name more devices."
)


@dataclass(frozen=True)
class Use:
    """How a model will be used: what its workspace depends on."""

    dtype: torch.dtype
    plain: bool  # plain torch computes: weights are unpacked and pages gathered for each call
    cached: int = 0  # tokens in the cache, all sequences together


@dataclass(frozen=True)
class Planned:
    """A model that is only thought of, as a cache sees it."""

    cache_shapes: Sequence[LayerShape]
    cache_dtype: torch.dtype
    cache_devices: Sequence[torch.device] | None = None
    cache_length: int = PAGE
    cache_mirror: None = None


@dataclass(frozen=True)
class DeviceBudget:
    """What one device would hold, in bytes."""

    name: str
    usable: int
    weights: int
    cache: int
    workspace: int
    modules: int


@dataclass(frozen=True)
class Budget:
    """What a model would need: on each device, whether that fits, and how long contexts could be."""

    devices: tuple[DeviceBudget, ...]
    fits: bool
    context: int  # tokens of each user
    largest: int  # the longest context that would fit; 0 if not even one page does
    problem: str  # why it does not fit, and what to change; empty if it does


def use(config: FrozenConfig, slots: Sequence[Slot], cached: int = 0, *, imagined: bool = False) -> Use:
    """How these devices would run it."""
    first = slots[0].device
    if imagined:
        return Use(pick_dtype(config.dtype or "float16", None, first), False, cached)
    dtype = pick_dtype(config.dtype, config.stored_dtype, first)
    plain = any(
        slot.device.type == "cpu" or choose(slot.device, dtype).backends[0].name == "reference"
        for slot in slots
    )
    return Use(dtype, plain, cached)


def measure(config: FrozenConfig, source: Source, use: Use, cache: Sequence[int]) -> list[Part]:
    """Every module's needs; `cache` has the bytes of each layer's pages."""
    m, item = config.spec, use.dtype.itemsize
    packed: dict[str, dict[str, int]] = {}  # numbers of each module's packed matrices
    held: dict[str, int] = {}
    for matrix in matrices(m):
        owner = ".".join(matrix.role.split(".")[:2]) if matrix.role != "head" else "head"
        tied = owner == "head" and m.head.tied and not source.has("head")
        nbytes, codes = _stored(source, matrix, item) if not tied else (0, False)
        held[owner] = held.get(owner, 0) + nbytes
        own = packed.setdefault(owner, {})
        if codes:
            own[matrix.role.removeprefix(owner + ".")] = matrix.in_features * matrix.out_features
    table, shared = _table(source, m, item)
    tokens = min(config.max_input_len, config.max_seq_len)
    parts = [Part("embedding", table + m.embed.positions * m.hidden * item, workspace=tokens * m.hidden * 4)]
    for i, layer in enumerate(m.layers):
        name = f"layers.{i}"
        workspace = _unpacked(packed[name], use) + _scratch(config, layer, use)
        parts.append(Part(name, held[name] + 6 * m.hidden * 4, cache[i], workspace))
    rows = config.max_output_len or LOGITS
    unpacked = _unpacked(packed["head"], use) if use.plain or rows > LOGITS else 0
    parts.append(Part("head", held["head"] + m.hidden * 4, 0, rows * m.vocab * 8 + unpacked, shared))
    return parts


def spaces(slots: Sequence[Slot], reserve: int | Sequence[int] | None) -> list[Space]:
    """The devices, less what must stay free on them."""
    numbers = reserve if isinstance(reserve, list | tuple) else [0 if reserve is None else reserve]
    if not all(isinstance(number, int | float) and 0 <= number < 1 << 50 for number in numbers):
        raise InputError(
            "reserve_vram is a number of bytes that are left free, 0 or more, or a list with one for each "
            f"device; found {reserve!r}."
        )
    if isinstance(reserve, int | float):
        kept = [int(reserve)] * len(slots)
    else:
        given = [int(one) for one in for_devices("reserve_vram", reserve or (), slots)]
        kept = [given[i] if i < len(given) else RESERVE[min(i, 1)] for i in range(len(slots))]
    return [Space(slot.name, max(0, slot.free - keep)) for slot, keep in zip(slots, kept, strict=True)]


def split(slots: Sequence[Slot], gpu_split: Sequence[float]) -> list[Space]:
    """The devices, with as many GB of each as the user gives for weights."""
    check_split(gpu_split)
    numbers = for_devices("gpu_split", gpu_split, slots)
    if not any(numbers):
        names = ", ".join(slot.name for slot in slots)
        raise InputError(
            f"gpu_split {list(gpu_split)} gives nothing to the devices that are here ({names}): its first "
            "number is for the first of them. Leave gpu_split out, or give that device a number above 0."
        )
    return [Space(slot.name, int(gb * GB)) for slot, gb in zip(slots, numbers, strict=False)]


def for_devices(name: str, numbers: Sequence[float], slots: Sequence[Slot]) -> Sequence[float]:
    """The numbers of a list that have a device here. Those beyond are ignored, which the log says once.

    Programs written for several GPUs give such lists also where there is one, and nothing else can be meant.
    """
    beyond = list(numbers[len(slots) :])
    if beyond:
        log.warning(
            "%s has %d numbers, and only %d of them for devices that are here (%s): %s is ignored. More "
            'devices are used if they are named, as in config.device = "cuda:0,cuda:1,cpu".',
            *(name, len(numbers), len(slots), ", ".join(slot.name for slot in slots), beyond),
        )
    return numbers[: len(slots)]


def check_split(gpu_split: object) -> None:
    """Refuse what is no list of GB, and a list that gives no device any."""
    found: object = gpu_split
    if isinstance(gpu_split, Sequence) and not isinstance(gpu_split, str):
        odd = [n for n in gpu_split if isinstance(n, bool) or not isinstance(n, int | float)]
        odd += [n for n in gpu_split if n not in odd and not 0 <= n < 1 << 20]
        if any(gpu_split) and not odd:
            return
        found = odd[0] if odd else gpu_split
    raise InputError(
        f"gpu_split is a list with GB for each device, as in [20, 24]; found {found!r}. load_autosplit "
        "divides a model by what is free."
    )


def budget(measured: Callable[[int], list[Part]], devices: Sequence[Space], context: int) -> Budget:
    """What a context means for each device, and the longest one that would fit.

    `measured` gives the modules for a number of tokens of each user.
    """

    def attempt(count: int) -> tuple[list[int] | None, str]:
        try:
            return place(measured(count), devices, FIT_CACHE), ""
        except DoesNotFit as error:
            return None, str(error)

    places, problem = attempt(context)
    low, high = 0, max(LONGEST, context) // PAGE
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if attempt(middle * PAGE)[0] is not None else (low, middle - 1)
    parts = measured(context)
    held = loads(parts, places, len(devices)) if places is not None else _forced(parts, devices)
    return Budget(
        tuple(
            DeviceBudget(space.name, space.free, load.weights, load.cache, load.workspace, load.parts)
            for space, load in zip(devices, held, strict=True)
        ),
        places is not None,
        context,
        low * PAGE,
        problem,
    )


def _forced(parts: Sequence[Part], devices: Sequence[Space]) -> list[Load]:
    """What would lie where if the last device took all that fits nowhere."""
    whole = sum(part.weights + part.cache + part.workspace + part.shared for part in parts)
    endless = [*devices[:-1], Space(devices[-1].name, whole)]
    return loads(parts, place(parts, endless, ""), len(devices))


def _stored(source: Source, matrix: Matrix, item: int) -> tuple[int, bool]:
    """Bytes of a matrix in memory, and whether it is packed."""
    words, nbytes = source.describe(matrix.role)
    if words.startswith("dense"):
        return (matrix.in_features + matrix.bias) * matrix.out_features * item, False
    return nbytes, True


def _table(source: Source, m: spec.Model, item: int) -> tuple[int, int]:
    """Bytes of the embedding's table: where it is looked up, and what the head shares of it."""
    words, nbytes = source.describe("embed")
    if not m.head.tied or source.has("head"):
        return nbytes, 0
    whole = m.vocab * m.hidden * item if words.startswith("dense") else nbytes
    return whole, whole


def _unpacked(packed: Mapping[str, int], use: Use) -> int:
    """Bytes of a module's matrices in full, of which one product of many rows takes some at a time."""
    item, largest = use.dtype.itemsize, max(packed.values(), default=0)
    if use.plain:
        return largest * (item + 8)
    together = (item * sum(packed.get(role, 0) for role in roles) for roles in JOINED)
    return max(item * largest, *(nbytes for nbytes in together if nbytes <= UNPACKED), 0)


def _scratch(config: FrozenConfig, layer: spec.Layer, use: Use) -> int:
    """Bytes that one layer's step takes for a while, and the tables it turns by."""
    attn, mlp, item = layer.attn, layer.mlp, use.dtype.itemsize
    active = mlp.active if isinstance(mlp, spec.Moe) else 1
    wide = 6 * config.spec.hidden + 2 * (attn.heads + 2 * attn.kv_heads) * attn.head_dim
    total = min(config.max_input_len, config.max_seq_len) * (wide + 3 * mlp.width * active) * item
    if attn.rope is not None:
        total += config.max_seq_len * attn.rope.dim * 4
    if use.plain:
        seen = min(config.max_attention_size, config.max_input_len * config.max_seq_len)
        total += attn.heads * seen * item + 2 * use.cached * attn.kv_heads * attn.head_dim * item
    return total
