"""Load a model in this process: `load_modules` builds its modules on their devices, as a `LoadedModel`.

A rank of a parallel model is a `LoadedModel` too, of its shard.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import Any, Self

import torch

from .. import spec
from ..checkpoint import Checkpoint, WeightSource
from ..config import FrozenConfig
from ..env import legacy_switches
from ..kernels.dispatch import BackendList, backends_for
from ..kernels.interface import FUSE_MAX_TOKENS
from ..kvcache import PAGE_SIZE, CacheReplicator, LayerShape
from ..nn import Batch
from ..nn.block import no_transfer
from ..parallel import RankDriver
from ..sampling import Sampler, SamplerState, SamplingRequest, Settings
from ..spec.model import matrices
from .builder import Builder, module_index
from .cuda_graphs import MAX_GRAPH_TOKENS
from .decoder import Decoder
from .devices import DeviceInfo, device_context, disable_broken_amx, pick_dtype
from .placement import check_rope_tables

log = logging.getLogger(__name__)

STORED_LAYER = re.compile(r"(?:model\.layers|blk)\.(\d{1,6})\.")

ProgressCallback = Callable[[int, int], object]
"""(modules loaded, modules in all) → anything."""

ProgressGenerator = Callable[[int, int], Iterator[Any]]
"""(modules loaded, modules in all) → an iterator, whose items the loader yields."""


@dataclass(frozen=True)
class LoadProgress:
    """The two callbacks that loading reports progress to."""

    callback: ProgressCallback | None = None
    callback_gen: ProgressGenerator | None = None

    def report(self, done: int, total: int) -> Iterator[Any]:
        """Call both; yield what the second one yields."""
        if self.callback is not None:
            self.callback(done, total)
        if self.callback_gen is not None:
            yield from self.callback_gen(done, total)


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A loaded model: its configuration, its modules and their devices."""

    config: FrozenConfig
    decoder: Decoder
    module_devices: tuple[DeviceInfo, ...]  # of the embedding, each layer, the head
    module_backends: tuple[BackendList, ...]  # of the same modules
    num_ranks: int = 0  # of tensor or pipeline parallel; 0: this process alone
    driver: RankDriver | None = None  # controls the workers, on rank 0
    cache_replicator: CacheReplicator | None = None  # repeats operations on caches on the workers
    full_spec: spec.Model | None = None  # of the whole model; None: this is the whole model

    @property
    def layer_shapes(self) -> list[LayerShape]:
        """The cache shape of each layer, in this process."""
        return kv_shapes(self.config.spec)

    @property
    def device(self) -> torch.device:
        """The first module's device, where inputs go."""
        return self.module_backends[0].device

    @property
    def dtype(self) -> torch.dtype:
        """The precision of all modules."""
        return self.module_backends[0].dtype

    def device_of(self, role: str) -> torch.device:
        """Where a LoRA of this role must be: its module's device, or the CPU to be sharded for ranks."""
        if self.driver is not None:
            return torch.device("cpu")
        return self.module_backends[module_index(role)].device

    @property
    def max_graph_tokens(self) -> int:
        """Tokens up to which decode steps can be captured as CUDA graphs; 0: not at all.

        They must launch the same kernels every time and not synchronise; large MoE batches synchronise, since
        the host must know each expert's number of tokens.
        """
        backend_by_role = {one.role: one.backend for one in self.module_backends[0].records}
        kernels = (".attn", ".delta", ".mamba", ".conv")
        mixers = {backend for role, backend in backend_by_role.items() if role.endswith(kernels)}
        moe_layers = [i for i, one in enumerate(self.config.spec.layers) if isinstance(one.mlp, spec.Moe)]
        experts = {backend_by_role.get(f"layers.{i}.mlp") for i in moe_layers}
        one_device = len(set(map(id, self.module_backends))) == 1 and not self.num_ranks
        synchronizes = mixers - {"cuda", "triton"} or experts - {"cuda"}
        if not one_device or synchronizes or legacy_switches().no_graphs:
            return 0
        return FUSE_MAX_TOKENS if experts else MAX_GRAPH_TOKENS

    def explain(self) -> str:
        """The backend of each part and why, device by device."""
        distinct = {
            id(backends): (device_info, backends)
            for device_info, backends in zip(self.module_devices, self.module_backends, strict=True)
        }
        if len(distinct) == 1:
            return self.module_backends[0].explain()
        return "\n".join(f"on {device_info.name}:\n{backends.explain()}" for device_info, backends in distinct.values())


class Warmup:
    """Runs one token through embedding, head and sampler, in a thread while layers load; leaving waits for it.

    On a GPU, libraries are loaded and kernels compiled at first use. Embedding and head are loaded first, so
    this token causes most of that while the layers load. Errors are only logged: they occur again on real use.
    """

    def __init__(self) -> None:
        self._thread: Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._thread.join()

    def start(self, decoder: Decoder, device: torch.device) -> None:
        """Start with the decoder's embedding and head; on a GPU in the caller's current stream."""
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        embedding_and_head = Decoder(decoder.embedding, [], decoder.head, [no_transfer])
        self._thread = Thread(
            target=_run_ignoring_errors, args=(embedding_and_head, device, stream), name="exlm-warmup"
        )
        self._thread.start()


def _run_ignoring_errors(decoder: Decoder, device: torch.device, stream: torch.cuda.Stream | None) -> None:
    try:
        with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
            run_one_token(decoder, device)
    except Exception:  # occurs again, and is reported, on real use
        log.debug("The warm-up failed.", exc_info=True)


def run_one_token(decoder: Decoder, device: torch.device) -> int:
    """Run token 0 through embedding, head and sampler of a decoder without layers; returns the greedy token."""
    zeros = torch.zeros(1, 1, dtype=torch.int64, device=device)
    batch = Batch(
        ids=zeros,
        positions=zeros,
        past_lens=zeros[0],
        page_table=zeros.int(),
        max_kv_len=1,
        uniform=True,
        outputs="last",
    )
    logits, _ = decoder.forward(batch, [])
    assert logits is not None  # outputs="last"
    sampler = Sampler(vocab_size=logits.shape[-1])
    output = sampler.sample_batch(logits[:, -1], [SamplingRequest(Settings.greedy(), SamplerState())])
    return output.tokens[0]


LoadSteps = Generator[Any, None, LoadedModel]
"""A load in progress: yields what `callback_gen` yields, returns the model."""


@dataclass(frozen=True)
class CacheOwnerInfo:
    """A `CacheOwner` without a model: the plan of one, or a rank's shard."""

    cache_shapes: Sequence[LayerShape]
    cache_dtype: torch.dtype
    cache_devices: Sequence[torch.device] | None = None
    cache_max_seq_len: int = PAGE_SIZE
    cache_replicator: None = None


def kv_shapes(model: spec.Model) -> list[LayerShape]:
    """The cache shape of each layer."""

    def shape(layer: spec.Layer) -> LayerShape:
        attn = layer.attention
        return LayerShape(0 if attn is None else attn.kv_heads, 0 if attn is None else attn.head_dim, layer.state)

    return [shape(layer) for layer in model.layers]


def model_dtype(config: FrozenConfig, device_infos: Sequence[DeviceInfo]) -> torch.dtype:
    """The precision of the whole model, chosen for the first device."""
    return pick_dtype(config.dtype, config.stored_dtype, device_infos[0].device)


def warn_about_unused_layers(config: FrozenConfig, source: WeightSource) -> None:
    """Warn if the files have more layers than config.json: it may belong to another model.

    Layers for multi-token prediction that config.json counts are expected, and left out silently.
    """
    num_layers = len(config.spec.layers)
    matches = map(STORED_LAYER.match, map(config.spec.names.to_llama_key, source.unused()))
    num_stored = max((int(match[1]) + 1 for match in matches if match is not None), default=0)
    if num_stored > num_layers + config.spec.draft_layers:
        log.warning(
            "%s describes %d layers, and the files hold %d: the last %d are left out. If that is wrong, "
            "take config.json from the model's own page.",
            config.path,
            num_layers,
            num_stored,
            num_stored - num_layers,
        )


def load_modules(
    config: FrozenConfig,
    source: WeightSource,
    module_devices: Sequence[DeviceInfo],
    progress: LoadProgress,
    *,
    has_embedding: bool = True,
    has_head: bool = True,
) -> LoadSteps:
    """Build all modules on their devices; modules on the same `DeviceInfo` object share backends.

    Without `has_embedding` or `has_head`, another rank has the embedding or the head.
    """
    check_rope_tables(config, module_devices)
    dtype = model_dtype(config, module_devices)
    backends_by_device: dict[int, BackendList] = {}
    for device_info in module_devices:
        if id(device_info) not in backends_by_device:
            disable_broken_amx(device_info.device, dtype)
            backends_by_device[id(device_info)] = backends_for(device_info.device, dtype, config.cpu_activation_bits)
    module_backends = [backends_by_device[id(device_info)] for device_info in module_devices]
    builder = Builder(config.spec, source, module_backends, config.max_seq_len, has_embedding, has_head)
    total, steps = len(builder), builder.build()
    if len(backends_by_device) == 1 and isinstance(source, Checkpoint):  # no shard of one
        module_backends[0].open_packed(partial(_fingerprint, config, source), str(config.path))
    on_one_gpu = len(backends_by_device) == 1 and module_devices[0].device.type == "cuda"
    can_warm_up = on_one_gpu and has_embedding and has_head and module_backends[0].can_bind_concurrently
    with Warmup() as warmup:
        for i in range(total):
            yield from progress.report(i, total)
            with torch.no_grad(), device_context(module_devices[i].device):
                decoder = next(steps)
                if i == 0 and can_warm_up:
                    warmup.start(decoder, module_devices[0].device)
    module_backends[0].close_packed()
    return LoadedModel(config, decoder, tuple(module_devices), tuple(module_backends))


def _fingerprint(config: FrozenConfig, source: Checkpoint) -> str:
    """Identifies the matrices of a model: what the files hold, and what is read from them."""
    return repr((source.fingerprint(), list(matrices(config.spec)), config.spec.head.normalize_rows))


def run_to_end(steps: LoadSteps) -> LoadedModel:
    """Run a load without its progress."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            loaded: LoadedModel = end.value
            return loaded
