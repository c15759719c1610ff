"""From a settled configuration and a device for each module to modules in memory, one at a time."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import spec
from ..cache import LayerShape, Mirror
from ..checkpoint import Source, open_source
from ..config import FrozenConfig
from ..kernels.backend import FEW
from ..kernels.select import Chain, choose
from ..parallel import Leader
from ..settings import legacy_switches
from .build import Builder
from .decoder import Decoder
from .devices import Slot, current, guard, pick_dtype
from .graphs import LARGEST
from .progress import Callback
from .rehearsal import Rehearsal
from .rotary import check_rotary_tables

log = logging.getLogger(__name__)

Yielding = Callable[[int, int], Iterator[Any]]

_LAYER = re.compile(r"(?:model\.layers|blk)\.(\d{1,6})\.")


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model in memory: what it is, its modules, and where each of them computes."""

    config: FrozenConfig
    decoder: Decoder
    slots: tuple[Slot, ...]  # of the embedding, each layer, the head
    chains: tuple[Chain, ...]  # of the same
    ranks: int = 0  # among which it was shared; 0: it was not
    leader: Leader | None = None  # of the processes that hold the rest of it
    mirror: Mirror | None = None  # by whom those hear of caches
    whole: spec.Model | None = None  # the model that this is a part of; None: it is all here

    @property
    def shapes(self) -> list[LayerShape]:
        """What each layer stores for a token, in this process."""
        return shapes(self.config.spec)

    @property
    def devices(self) -> list[torch.device]:
        """Every device in use, the first module's first."""
        return list(dict.fromkeys(chain.device for chain in self.chains))

    def device(self, role: str) -> torch.device:
        """Where a role's module takes new numbers: its device, or where they can be cut for several ranks."""
        if self.leader is not None:
            return torch.device("cpu")
        match role.split("."):
            case ["embed"]:
                return self.chains[0].device
            case ["layers", layer, *_]:
                return self.chains[int(layer) + 1].device
        return self.chains[-1].device

    @property
    def recordable(self) -> int:
        """Tokens up to which decode passes can be recorded: they wait for nothing, always launch the same.

        Of many tokens the host must know how many each expert gets.
        """
        chosen = {one.role: one.backend for one in self.chains[0].choices}
        attention = {backend for role, backend in chosen.items() if role.endswith(".attn")}
        sparse = [i for i, one in enumerate(self.config.spec.layers) if isinstance(one.mlp, spec.Moe)]
        experts = {chosen.get(f"layers.{i}.mlp") for i in sparse}
        alone = len(set(map(id, self.chains))) == 1 and not self.ranks
        if not alone or attention - {"cuda", "triton"} or experts - {"cuda"} or legacy_switches().no_graphs:
            return 0
        return FEW if experts else LARGEST

    def explain(self) -> str:
        """Which backend runs each part, and why; device by device, where there are several."""
        distinct = {id(chain): (slot, chain) for slot, chain in zip(self.slots, self.chains, strict=True)}
        if len(distinct) == 1:
            return self.chains[0].explain()
        return "\n".join(f"on {slot.name}:\n{chain.explain()}" for slot, chain in distinct.values())


def shapes(model: spec.Model) -> list[LayerShape]:
    """What each layer stores for a token."""
    return [LayerShape(layer.attn.kv_heads, layer.attn.head_dim) for layer in model.layers]


def opened(config: FrozenConfig) -> Source:
    """The model's files; only headers are read."""
    return open_source(config.path, config.spec.names, config.quantization)


def stored_bytes(path: Path) -> int:
    """Bytes of a model's weight files; 0 if they cannot be looked at."""
    files = [path] if path.suffix == ".gguf" else path.glob("*.safetensors")
    try:
        return sum(file.stat().st_size for file in files)
    except OSError:
        return 0


def tell_depth(config: FrozenConfig, source: Source) -> None:
    """Warn of layers that are stored and not described: meant so, or another model's config.json."""
    depth = len(config.spec.layers)
    found = map(_LAYER.match, map(config.spec.names.canonical, source.unused()))
    stored = max((int(one[1]) + 1 for one in found if one is not None), default=0)
    if stored > depth:
        log.warning(
            "%s describes %d layers, and the files hold %d: the last %d are left out. If that is not meant, "
            "take the description from the model's own page.",
            *(config.path, depth, stored, stored - depth),
        )


def precision(config: FrozenConfig, slots: Sequence[Slot]) -> torch.dtype:
    """The one precision of the whole model: the first device's."""
    return pick_dtype(config.dtype, config.stored_dtype, slots[0].device)


def load_steps(
    config: FrozenConfig,
    source: Source,
    slots: Sequence[Slot],
    callback: Callback,
    callback_gen: Yielding | None,
    *,
    embeds: bool = True,
    heads: bool = True,
) -> Generator[Any, None, Loaded]:
    """Build every module on its slot, telling the callbacks; equal slots share their backends.

    Without `embeds` or `heads` the embedding or the head is left out: another process has it.
    """
    check_rotary_tables(config, slots)
    dtype = precision(config, slots)
    made: dict[int, Chain] = {}
    for slot in slots:
        if id(slot) not in made:
            guard(slot.device, dtype)
            made[id(slot)] = choose(slot.device, dtype)
    chains = [made[id(slot)] for slot in slots]
    builder = Builder(config.spec, source, chains[0], config.max_seq_len, chains, embeds, heads)
    total, steps = len(builder), builder.build()
    worth = embeds and heads and len(made) == 1 and slots[0].device.type == "cuda" and chains[0].compact
    with Rehearsal() as rehearsal:
        for i in range(total):
            callback(i, total)
            if callback_gen is not None:
                yield from callback_gen(i, total)
            with torch.no_grad(), current(slots[i].device):
                decoder = next(steps)
                if i == 0 and worth:
                    rehearsal.begin(decoder, slots[0].device)
    return Loaded(config, decoder, tuple(slots), tuple(chains))
