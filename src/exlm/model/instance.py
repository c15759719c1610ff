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
from ..checkpoint import Source, open_source
from ..config import FrozenConfig
from ..env import legacy_switches
from ..kernels.dispatch import BackendList, backends_for
from ..kernels.interface import FUSE_MAX_TOKENS
from ..kvcache import CacheReplicator, LayerShape
from ..parallel import RankDriver
from .builder import Builder
from .cuda_graphs import MAX_GRAPH_TOKENS
from .decoder import Decoder
from .devices import DeviceInfo, device_context, disable_broken_amx, pick_dtype
from .memory import check_rotary_tables
from .warmup import Warmup

log = logging.getLogger(__name__)


ProgressCallback = Callable[[int, int], object]

ProgressGenerator = Callable[[int, int], Iterator[Any]]

_LAYER = re.compile(r"(?:model\.layers|blk)\.(\d{1,6})\.")


def no_progress(done: int, total: int) -> None:
    """Tells nobody."""


@dataclass(frozen=True, eq=False)
class ModelInstance:
    """A model in memory: what it is, its modules, and where each of them computes."""

    config: FrozenConfig
    decoder: Decoder
    module_devices: tuple[DeviceInfo, ...]  # of the embedding, each layer, the head
    module_backends: tuple[BackendList, ...]  # of the same
    num_ranks: int = 0  # among which it was shared; 0: it was not
    driver: RankDriver | None = None  # of the processes that hold the rest of it
    cache_replicator: CacheReplicator | None = None  # by whom those hear of caches
    full_spec: spec.Model | None = None  # the model that this is a part of; None: it is all here

    @property
    def layer_shapes(self) -> list[LayerShape]:
        """What each layer stores for a token, in this process."""
        return kv_shapes(self.config.spec)

    @property
    def devices(self) -> list[torch.device]:
        """Every device in use, the first module's first."""
        return list(dict.fromkeys(backends.device for backends in self.module_backends))

    def device_of(self, role: str) -> torch.device:
        """Where a role's module takes new numbers: its device, or where they can be cut for several ranks."""
        if self.driver is not None:
            return torch.device("cpu")
        match role.split("."):
            case ["embed"]:
                return self.module_backends[0].device
            case ["layers", layer, *_]:
                return self.module_backends[int(layer) + 1].device
        return self.module_backends[-1].device

    @property
    def max_graph_tokens(self) -> int:
        """Tokens up to which decode passes can be recorded: they wait for nothing, always launch the same.

        Of many tokens the host must know how many each expert gets.
        """
        backend_by_role = {one.role: one.backend for one in self.module_backends[0].records}
        attention = {backend for role, backend in backend_by_role.items() if role.endswith(".attn")}
        moe_layers = [i for i, one in enumerate(self.config.spec.layers) if isinstance(one.mlp, spec.Moe)]
        experts = {backend_by_role.get(f"layers.{i}.mlp") for i in moe_layers}
        one_device = len(set(map(id, self.module_backends))) == 1 and not self.num_ranks
        if (
            not one_device
            or attention - {"cuda", "triton"}
            or experts - {"cuda"}
            or legacy_switches().no_graphs
        ):
            return 0
        return FUSE_MAX_TOKENS if experts else MAX_GRAPH_TOKENS

    def explain(self) -> str:
        """Which backend runs each part, and why; device by device, where there are several."""
        distinct = {
            id(backends): (device_info, backends)
            for device_info, backends in zip(self.module_devices, self.module_backends, strict=True)
        }
        if len(distinct) == 1:
            return self.module_backends[0].explain()
        return "\n".join(
            f"on {device_info.name}:\n{backends.explain()}" for device_info, backends in distinct.values()
        )


def kv_shapes(model: spec.Model) -> list[LayerShape]:
    """What each layer stores for a token."""
    return [LayerShape(layer.attn.kv_heads, layer.attn.head_dim) for layer in model.layers]


def open_checkpoint(config: FrozenConfig) -> Source:
    """The model's files; only headers are read."""
    return open_source(config.path, config.spec.names, config.quantization)


def stored_bytes(path: Path) -> int:
    """Bytes of a model's weight files; 0 if they cannot be looked at."""
    files = [path] if path.suffix == ".gguf" else path.glob("*.safetensors")
    try:
        return sum(file.stat().st_size for file in files)
    except OSError:
        return 0


def warn_about_unused_layers(config: FrozenConfig, source: Source) -> None:
    """Warn of layers that are stored and not described: meant so, or another model's config.json."""
    depth = len(config.spec.layers)
    found = map(_LAYER.match, map(config.spec.names.to_llama_key, source.unused()))
    stored = max((int(one[1]) + 1 for one in found if one is not None), default=0)
    if stored > depth:
        log.warning(
            "%s describes %d layers, and the files hold %d: the last %d are left out. If that is not meant, "
            "take the description from the model's own page.",
            *(config.path, depth, stored, stored - depth),
        )


def model_dtype(config: FrozenConfig, device_infos: Sequence[DeviceInfo]) -> torch.dtype:
    """The one precision of the whole model: the first device's."""
    return pick_dtype(config.dtype, config.stored_dtype, device_infos[0].device)


def load_steps(
    config: FrozenConfig,
    source: Source,
    device_infos: Sequence[DeviceInfo],
    callback: ProgressCallback,
    callback_gen: ProgressGenerator | None,
    *,
    has_embedding: bool = True,
    has_head: bool = True,
) -> Generator[Any, None, ModelInstance]:
    """Build every module on its slot, telling the callbacks; equal slots share their backends.

    Without `has_embedding` or `has_head` the embedding or the head is left out: another process has it.
    """
    check_rotary_tables(config, device_infos)
    dtype = model_dtype(config, device_infos)
    backends_by_device: dict[int, BackendList] = {}
    for device_info in device_infos:
        if id(device_info) not in backends_by_device:
            disable_broken_amx(device_info.device, dtype)
            backends_by_device[id(device_info)] = backends_for(device_info.device, dtype)
    module_backends = [backends_by_device[id(device_info)] for device_info in device_infos]
    builder = Builder(
        config.spec, source, module_backends[0], config.max_seq_len, module_backends, has_embedding, has_head
    )
    total, steps = len(builder), builder.build()
    should_warm_up = (
        has_embedding
        and has_head
        and len(backends_by_device) == 1
        and device_infos[0].device.type == "cuda"
        and module_backends[0].can_bind_concurrently
    )
    with Warmup() as warmup:
        for i in range(total):
            callback(i, total)
            if callback_gen is not None:
                yield from callback_gen(i, total)
            with torch.no_grad(), device_context(device_infos[i].device):
                decoder = next(steps)
                if i == 0 and should_warm_up:
                    warmup.start(decoder, device_infos[0].device)
    return ModelInstance(config, decoder, tuple(device_infos), tuple(module_backends))
