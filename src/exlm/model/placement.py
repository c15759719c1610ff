"""Fit a model into its devices: estimate each module's memory, then give each device consecutive modules.

Sizes come from the files' headers, the spec and the cache's layout, before anything is loaded. Consecutive
modules need one transfer of the hidden state between devices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from .. import spec
from ..checkpoint import WeightSource
from ..config import FrozenConfig
from ..errors import DoesNotFit, InputError
from ..kernels.dispatch import backends_for
from ..kernels.interface import MAX_DEQUANT_BYTES
from ..kvcache import PAGE_SIZE
from ..spec.model import Matrix, matrices
from .devices import DeviceInfo, pick_dtype

log = logging.getLogger(__name__)

GB = 1 << 30
MB = 1 << 20

ASSUMED_LOGITS_ROWS = 64
"""Rows of logits that a step is assumed to compute."""

MERGED_MATRICES = (
    ("attn.q", "attn.k", "attn.v"),
    ("delta.q", "delta.k", "delta.v"),
    ("delta.z", "delta.a", "delta.b"),
    ("mlp.gate", "mlp.up"),
)
"""Matrices that a GPU dequantises together, for one GEMM."""

MAX_CONTEXT = 1 << 24
"""Longest context that `plan` tries."""

STATES_PER_SEQUENCE = 3
"""Recurrent states of a running sequence: the one that a pass reads, the one that it writes, one to rewind to."""

REFERENCE_STATE_COPIES = 4
"""States of a row that a recurrence in plain torch has in memory at once: old, decayed, update, new."""

DEFAULT_RESERVE = 192 << 20, 64 << 20
"""Bytes left free by default on the first device and on each other one."""

ROPE_TABLE_DIVISOR = 4
"""RoPE tables may take 1 / ROPE_TABLE_DIVISOR of a device's free memory: a cache of the same length takes more."""

UNCHECKED_ROPE_BYTES = 1 << 28
"""RoPE tables up to this size are not checked; less than two million positions of a common model."""

CACHE_REMEDY = (
    "Take a cache with a smaller max_seq_len or of fewer bits (CacheQ4), lower reserve_vram, or name more "
    'devices, as in config.device = "cuda:0,cuda:1,cpu".'
)
SPLIT_REMEDY = "Raise the numbers of gpu_split (GB of weights for each device), leave it out, or name more devices."


@dataclass(frozen=True)
class ModuleMemory:
    """Memory of one module, in bytes."""

    name: str
    weights: int
    cache: int = 0
    workspace: int = 0  # while it runs; a device needs only its largest module's
    shared: int = 0  # weights that are the first module's too: free on its device
    states: int = 0  # the part of `cache` that recurrent states take, if it is known


@dataclass(frozen=True)
class DeviceBudget:
    """One device's usable memory, and what the modules on it take, in bytes."""

    name: str
    usable: int
    weights: int = 0
    cache: int = 0
    workspace: int = 0
    modules: int = 0
    states: int = 0  # the part of `cache` that recurrent states take

    @property
    def total(self) -> int:
        """Weights, cache and workspace."""
        return self.weights + self.cache + self.workspace

    def with_module(self, module: ModuleMemory, has_first: bool) -> DeviceBudget:
        """With one more module; `has_first`: the model's first module is on this device."""
        return replace(
            self,
            weights=self.weights + module.weights + (0 if has_first else module.shared),
            cache=self.cache + module.cache,
            workspace=max(self.workspace, module.workspace),
            modules=self.modules + 1,
            states=self.states + module.states,
        )


def place_modules(modules: Sequence[ModuleMemory], devices: Sequence[DeviceBudget], remedy: str) -> list[int]:
    """The index of each module's device. `devices` are budgets without modules; each is filled before the next is used.

    This finds a placement whenever there is one. If there is none, the error says what does not fit and
    gives the `remedy`.
    """
    placement: list[int] = []
    index, device = 0, devices[0]
    for module in modules:
        while True:
            grown = device.with_module(module, has_first=not placement or placement[0] == index)
            if grown.total <= device.usable:
                break
            index += 1
            if index == len(devices):
                raise _does_not_fit(modules, placement, devices, remedy)
            device = devices[index]
        device = grown
        placement.append(index)
    return placement


def budgets_with_modules(
    modules: Sequence[ModuleMemory], placement: Sequence[int], devices: Sequence[DeviceBudget]
) -> list[DeviceBudget]:
    """The budgets after each module of a placement is added to its device's."""
    out = list(devices)
    for module, index in zip(modules, placement, strict=True):
        out[index] = out[index].with_module(module, has_first=index == placement[0])
    return out


def _does_not_fit(
    modules: Sequence[ModuleMemory], placed: Sequence[int], devices: Sequence[DeviceBudget], remedy: str
) -> DoesNotFit:
    missing = modules[len(placed)]
    together = budgets_with_modules(modules, [0] * len(modules), devices[:1])[0]
    states = f" with {format_bytes(together.states)} of recurrent states" if together.states else ""
    available = ", ".join(f"{device.name} {format_bytes(device.usable)}" for device in devices)
    return DoesNotFit(
        f"Insufficient memory for model and cache: {len(placed)} of {len(modules)} modules fit, "
        f"{missing.name} does not. All together need {format_bytes(together.total)} (weights "
        f"{format_bytes(together.weights)}, cache "
        f"{format_bytes(together.cache)}{states}, workspace {format_bytes(together.workspace)}); "
        f"usable are {available}. {remedy}"
    )


def placement_remedy(state_bytes: int) -> str:
    """The remedy where model and cache do not fit; `state_bytes` are those of one recurrent state in all layers."""
    if not state_bytes:
        return CACHE_REMEDY
    return (
        f"{CACHE_REMEDY} One sequence's recurrent state takes {format_bytes(state_bytes)}, however long the "
        "sequence is: fewer sequences at once need less."
    )


def format_bytes(count: int) -> str:
    return f"{count / GB:,.2f} GB" if count >= GB // 10 else f"{count / MB:,.1f} MB"


@dataclass(frozen=True)
class ComputeProfile:
    """What the size of a model's workspace depends on."""

    dtype: torch.dtype
    uses_reference: bool  # plain torch: dequantises weights and gathers pages in each call
    num_cached_tokens: int = 0  # tokens in the cache, of all sequences
    sequences: int = 1  # that run at once


@dataclass(frozen=True)
class MemoryPlan:
    """The result of `Model.plan`: memory needed on each device, whether it fits, and the longest context that does."""

    devices: tuple[DeviceBudget, ...]
    fits: bool
    context: int  # tokens of each sequence
    largest: int  # the longest context that would fit; 0 if not even one page does
    problem: str  # why it does not fit and the remedy; empty if it fits

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent states on all devices."""
        return sum(device.states for device in self.devices)


def compute_profile(
    config: FrozenConfig, device_infos: Sequence[DeviceInfo], num_cached_tokens: int = 0, *, hypothetical: bool = False
) -> ComputeProfile:
    first = device_infos[0].device
    if hypothetical:
        return ComputeProfile(pick_dtype(config.dtype or "float16", None, first), False, num_cached_tokens)
    dtype = pick_dtype(config.dtype, config.stored_dtype, first)
    uses_reference = any(
        device_info.device.type == "cpu" or backends_for(device_info.device, dtype).backends[0].name == "reference"
        for device_info in device_infos
    )
    return ComputeProfile(dtype, uses_reference, num_cached_tokens)


def estimate_modules(
    config: FrozenConfig,
    source: WeightSource,
    profile: ComputeProfile,
    cache_bytes: Sequence[int],
    state_bytes: Sequence[int] = (),
) -> list[ModuleMemory]:
    """Each module's memory; `cache_bytes` has those of each layer's pages, `state_bytes` those of recurrent states."""
    m, item_bytes = config.spec, profile.dtype.itemsize
    packed_sizes: dict[str, dict[str, int]] = {}  # weights in each module's packed matrices
    weight_bytes: dict[str, int] = {}
    for matrix in matrices(m):
        owner = ".".join(matrix.role.split(".")[:2]) if matrix.role != "head" else "head"
        tied = owner == "head" and m.head.tied and not source.has("head")
        nbytes, codes = _matrix_bytes(source, matrix, item_bytes) if not tied else (0, False)
        weight_bytes[owner] = weight_bytes.get(owner, 0) + nbytes
        owner_sizes = packed_sizes.setdefault(owner, {})
        if codes:
            owner_sizes[matrix.role.removeprefix(owner + ".")] = matrix.in_features * matrix.out_features
    table_bytes, shared_bytes = _embedding_bytes(source, m, item_bytes)
    tokens = min(config.max_input_len, config.max_seq_len)
    modules = [
        ModuleMemory(
            "embedding",
            table_bytes + m.embed.learned_positions * m.hidden * item_bytes,
            workspace=tokens * m.hidden * 4,
        )
    ]
    for i, layer in enumerate(m.layers):
        name = f"layers.{i}"
        workspace = _dequantized_bytes(packed_sizes[name], profile) + _activation_bytes(config, layer, profile)
        states = state_bytes[i] if state_bytes else 0
        weights = weight_bytes[name] + _parameter_bytes(layer, m.hidden)
        modules.append(ModuleMemory(name, weights, cache_bytes[i] + states, workspace, states=states))
    rows = config.max_output_len or ASSUMED_LOGITS_ROWS
    dequantized = (
        _dequantized_bytes(packed_sizes["head"], profile) if profile.uses_reference or rows > ASSUMED_LOGITS_ROWS else 0
    )
    modules.append(
        ModuleMemory("head", weight_bytes["head"] + m.hidden * 4, 0, rows * m.vocab * 8 + dequantized, shared_bytes)
    )
    return modules


def device_budgets(device_infos: Sequence[DeviceInfo], reserve: int | Sequence[int] | None) -> list[DeviceBudget]:
    """Each device's budget without modules: its free memory less what is reserved is usable."""
    numbers = reserve if isinstance(reserve, list | tuple) else [0 if reserve is None else reserve]
    if not all(isinstance(number, int | float) and 0 <= number < 1 << 50 for number in numbers):
        raise InputError(
            "reserve_vram is a number of bytes that are left free, 0 or more, or a list with one for each "
            f"device; found {reserve!r}."
        )
    if isinstance(reserve, int | float):
        reserved = [int(reserve)] * len(device_infos)
    else:
        given = [int(one) for one in numbers_for_devices("reserve_vram", reserve or (), device_infos)]
        reserved = [given[i] if i < len(given) else DEFAULT_RESERVE[min(i, 1)] for i in range(len(device_infos))]
    return [
        DeviceBudget(device_info.name, max(0, device_info.free - keep))
        for device_info, keep in zip(device_infos, reserved, strict=True)
    ]


def split_budgets(device_infos: Sequence[DeviceInfo], gpu_split: Sequence[float]) -> list[DeviceBudget]:
    """Each device's budget without modules: the GB of weights that `gpu_split` gives it are usable."""
    check_gpu_split(gpu_split)
    numbers = numbers_for_devices("gpu_split", gpu_split, device_infos)
    if not any(numbers):
        names = ", ".join(device_info.name for device_info in device_infos)
        raise InputError(
            f"gpu_split {list(gpu_split)} gives nothing to the devices that are here ({names}): its first "
            "number is for the first of them. Leave gpu_split out, or give that device a number above 0."
        )
    return [
        DeviceBudget(device_info.name, int(gb * GB)) for device_info, gb in zip(device_infos, numbers, strict=False)
    ]


def numbers_for_devices(name: str, numbers: Sequence[float], device_infos: Sequence[DeviceInfo]) -> Sequence[float]:
    """The numbers of a list that have a device; the rest is ignored with a warning.

    Programs written for several GPUs pass such lists on machines with one, too.
    """
    beyond = list(numbers[len(device_infos) :])
    if beyond:
        log.warning(
            "%s has %d numbers, and only %d of them for devices that are here (%s): %s is ignored. More "
            'devices are used if they are named, as in config.device = "cuda:0,cuda:1,cpu".',
            *(name, len(numbers), len(device_infos), ", ".join(info.name for info in device_infos), beyond),
        )
    return numbers[: len(device_infos)]


def check_gpu_split(gpu_split: object) -> None:
    """Raise for anything but a list of GB with a positive number."""
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


def plan_memory(
    estimate_at: Callable[[int], list[ModuleMemory]], devices: Sequence[DeviceBudget], context: int, remedy: str
) -> MemoryPlan:
    """Each device's memory for a context, and the longest context that would fit.

    `estimate_at`: tokens of each sequence → each module's memory. `remedy` is for what does not fit.
    """

    def try_context(count: int) -> tuple[list[int] | None, str]:
        try:
            return place_modules(estimate_at(count), devices, remedy), ""
        except DoesNotFit as error:
            return None, str(error)

    placement, problem = try_context(context)
    low, high = 0, max(MAX_CONTEXT, context) // PAGE_SIZE
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if try_context(middle * PAGE_SIZE)[0] is not None else (low, middle - 1)
    modules, fits = estimate_at(context), placement is not None
    if placement is None:  # the last device takes everything that does not fit
        total = sum(module.weights + module.cache + module.workspace + module.shared for module in modules)
        placement = place_modules(modules, [*devices[:-1], replace(devices[-1], usable=total)], "")
    return MemoryPlan(tuple(budgets_with_modules(modules, placement, devices)), fits, context, low * PAGE_SIZE, problem)


def _matrix_bytes(source: WeightSource, matrix: Matrix, item_bytes: int) -> tuple[int, bool]:
    """Bytes of a matrix in memory, and whether it is packed."""
    form, nbytes = source.describe(matrix.role)
    if form.startswith("dense"):
        return (matrix.in_features + matrix.bias) * matrix.out_features * item_bytes, False
    return nbytes, True


def _parameter_bytes(layer: spec.Layer, hidden: int) -> int:
    """Bytes of a layer's norms, and of a recurrent mixer's convolution, in float32."""
    total = 6 * hidden
    if layer.state is not None:
        past, channels = layer.state.conv
        total += (past + 3) * channels  # its taps and bias, and a norm of the outputs
    return 4 * total


def _embedding_bytes(source: WeightSource, m: spec.Model, item_bytes: int) -> tuple[int, int]:
    """Bytes of the embedding, and of those what a tied head shares."""
    form, nbytes = source.describe("embed")
    if not m.head.tied or source.has("head"):
        return nbytes, 0
    total = m.vocab * m.hidden * item_bytes if form.startswith("dense") else nbytes
    return total, total


def _dequantized_bytes(packed_sizes: Mapping[str, int], profile: ComputeProfile) -> int:
    """Bytes of a module's matrices dequantised, of which a large GEMM needs some at a time."""
    item_bytes, largest = profile.dtype.itemsize, max(packed_sizes.values(), default=0)
    if profile.uses_reference:
        return largest * (item_bytes + 8)
    merged = (item_bytes * sum(packed_sizes.get(role, 0) for role in roles) for roles in MERGED_MATRICES)
    return max(item_bytes * largest, *(nbytes for nbytes in merged if nbytes <= MAX_DEQUANT_BYTES), 0)


def _activation_bytes(config: FrozenConfig, layer: spec.Layer, profile: ComputeProfile) -> int:
    """Bytes of one layer's activations, and of its RoPE tables."""
    attn, item_bytes = layer.attention, profile.dtype.itemsize
    wide = 6 * config.spec.hidden
    if attn is not None:
        wide += 2 * (attn.heads + 2 * attn.kv_heads) * attn.head_dim
    if layer.mixer is not None and layer.state is not None:  # what is projected, convolved and gated
        wide += 3 * sum(matrix.out_features for matrix in layer.mixer.matrices(config.spec.hidden))
    if (mlp := layer.mlp) is not None:
        wide += 3 * mlp.width * (mlp.active if isinstance(mlp, spec.Moe) else 1)
        if isinstance(mlp, spec.Moe) and mlp.shared is not None:
            wide += 3 * mlp.shared.width
    total = min(config.max_input_len, config.max_seq_len) * wide * item_bytes
    if profile.uses_reference and layer.state is not None:
        total += REFERENCE_STATE_COPIES * profile.sequences * layer.state.nbytes(4)
    if attn is None:
        return total
    if attn.rope is not None:
        total += config.max_seq_len * attn.rope.dim * 4
    if profile.uses_reference:
        seen = min(config.max_attention_size, config.max_input_len * config.max_seq_len)
        total += (
            attn.heads * seen * item_bytes + 2 * profile.num_cached_tokens * attn.kv_heads * attn.head_dim * item_bytes
        )
    return total


def check_rope_tables(config: FrozenConfig, module_devices: Sequence[DeviceInfo]) -> None:
    """DoesNotFit if the RoPE tables of a device's layers take too much of its memory."""
    length = config.max_seq_len
    for device_info in {id(one): one for one in module_devices}.values():
        needed = _rope_bytes_per_position(config.spec, module_devices, device_info) * length
        most = max(UNCHECKED_ROPE_BYTES, device_info.free // ROPE_TABLE_DIVISOR)
        if needed > most:
            raise DoesNotFit(
                f"{config.path}: config.max_seq_len is {length:,}, and rotary tables for so many positions "
                f"take {format_bytes(needed)} on {device_info.name}, which has "
                f"{format_bytes(device_info.free)} free. Set config.max_seq_len to the longest sequence "
                "you want before loading: with at most "
                f"{most * length // needed:,} the tables leave room for weights and cache."
            )


def _rope_bytes_per_position(model: spec.Model, module_devices: Sequence[DeviceInfo], device_info: DeviceInfo) -> int:
    """Peak bytes that one position takes while the RoPE tables of a device's layers are made."""
    layers = zip(module_devices[1:], model.layers, strict=False)
    ropes = {
        layer.attention.rope
        for device, layer in layers
        if device is device_info and layer.attention is not None and layer.attention.rope is not None
    }
    widths = [rope.dim for rope in ropes]
    # Two float32 numbers for each pair of dimensions. A CPU makes the tables: angles and a product of the
    # last table's size are in memory for a while.
    making = max(widths, default=0) if device_info.device.type == "cpu" else 0
    return 4 * (sum(widths) + making)
