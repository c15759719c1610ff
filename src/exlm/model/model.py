"""`Model`, the public class: load, describe, forward, unload.

A model is loaded completely or not at all: on one device, on several, or in several processes.
"""

from __future__ import annotations

import gc
import re
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import WeightSource
from ..config import Config, FrozenConfig
from ..env import refuse_removed_variables
from ..errors import InputError, NotLoaded, Unsupported
from ..formats.host_buffers import release_pool
from ..kernels.interface import Backend, LayerKVCache
from ..kvcache import PAGE_SIZE, Cache, CacheBase, CacheReplicator, LayerShape, NoCache
from ..lora import ModelHandle, active_loras, resolve_loras
from ..memory import memory_errors
from ..multimodal import MMEmbedding
from ..spec.model import matrices
from .devices import DeviceInfo, hypothetical_devices, list_devices, start_openmp
from .inputs import (
    EMBED_HERE,
    SequenceExtras,
    check_cache_room,
    check_embeddings,
    check_forward_inputs,
    check_ids,
    chunk_ranges,
    prompt_mrope_positions,
    requested_outputs,
    uses_mrope,
)
from .loader import (
    CacheOwnerInfo,
    LoadedModel,
    LoadProgress,
    LoadSteps,
    ProgressCallback,
    ProgressGenerator,
    kv_shapes,
    load_modules,
    model_dtype,
    warn_about_unused_layers,
)
from .model_runner import PagedModelRunner
from .multiprocess import load_parallel
from .placement import (
    CACHE_REMEDY,
    SPLIT_REMEDY,
    STATES_PER_SEQUENCE,
    MemoryPlan,
    ModuleMemory,
    compute_profile,
    device_budgets,
    estimate_modules,
    format_bytes,
    place_modules,
    placement_remedy,
    plan_memory,
    split_budgets,
)
from .summary import Summary, summarize

OUT_OF_MEMORY_REMEDY = (
    "Free memory, raise the limit of this process (ulimit -v, or that of its container), or load a smaller "
    "model, one of fewer bits, or fewer tokens (config.max_seq_len)."
)

ATTENTION_MATRIX = re.compile(r"layers\.\d+\.attn\.[qkvo]")


class Model:
    """A language model: make it with `Model(config)`, `load()` it, then call `forward(ids, cache)`."""

    def __init__(self, config: Config, lazy_load: bool = False) -> None:
        if not isinstance(config, Config):
            is_path = isinstance(config, str | PathLike)
            example = f"Config({str(config)!r})" if is_path else "Config('/path/to/model')"
            raise InputError(
                f"A model is made of a Config, found {type(config).__name__}: write Model({example}), or "
                "give the path to LLM."
            )
        self.config = config
        self.loaded = False
        self.list_devices: Callable[[str | None], list[DeviceInfo]] = list_devices
        """Lists the devices that `config.device` names; tests replace it."""
        self.open_checkpoint: Callable[[FrozenConfig], WeightSource] = FrozenConfig.open_checkpoint
        """Opens the weights; may be replaced to read them from somewhere else."""
        self._loaded: LoadedModel | None = None
        self._runners: weakref.WeakSet[PagedModelRunner] = weakref.WeakSet()  # generators' runners

    def load(
        self,
        gpu_split: Sequence[float] | None = None,
        lazy: bool = False,
        stats: bool = False,
        callback: ProgressCallback | None = None,
        callback_gen: ProgressGenerator | None = None,
        progress: bool = False,
    ) -> None:
        """Read the weights and bind their kernels.

        `gpu_split` has GB of weights for each device, which are filled in order; without it everything goes
        to the first device, or, if `config.device` names several, to each as much as it has room for.
        Numbers for devices that are not here are ignored with a warning in the log.
        `callback(i, n)` is called before module i of n and once with (n, n); `progress=True` shows a bar. If
        anything fails, the model is unloaded. `lazy` and `stats` are accepted for old scripts.
        """
        _run_load(partial(self.load_gen, gpu_split), callback, callback_gen, progress)

    def load_gen(
        self,
        gpu_split: Sequence[float] | None = None,
        lazy: bool = False,
        stats: bool = False,
        callback: ProgressCallback | None = None,
        callback_gen: ProgressGenerator | None = None,
    ) -> Iterator[Any]:
        """`load` as a generator: it yields what `callback_gen(i, n)` yields; run it to its end."""
        yield from self._load(partial(self._load_split, gpu_split), callback, callback_gen)

    def load_autosplit(
        self,
        cache: CacheBase,
        reserve_vram: int | Sequence[int] | None = None,
        last_id_only: bool = False,
        callback: ProgressCallback | None = None,
        callback_gen: ProgressGenerator | None = None,
        progress: bool = False,
    ) -> None:
        """Load the model and allocate a lazy cache, each layer's pages on the device of the layer.

        Each device is filled, but for `reserve_vram` bytes (one number for all, or a list; 192 MB on the
        first and 64 MB on the others if left out), before the next one is begun. The CPU counts if
        `config.device` names it. Numbers for devices that are not here are ignored with a warning.
        """
        _run_load(partial(self.load_autosplit_gen, cache, reserve_vram), callback, callback_gen, progress)

    def load_autosplit_gen(
        self,
        cache: CacheBase,
        reserve_vram: int | Sequence[int] | None = None,
        last_id_only: bool = False,
        callback: ProgressCallback | None = None,
        callback_gen: ProgressGenerator | None = None,
    ) -> Iterator[Any]:
        """`load_autosplit` as a generator: run it to its end."""
        self._check_lazy(cache)
        yield from self._load(partial(self._load_with_cache, cache, reserve_vram), callback, callback_gen, cache)

    def load_tp(
        self,
        gpu_split: Sequence[float] | None = None,
        callback: ProgressCallback | None = None,
        callback_gen: ProgressGenerator | None = None,
        progress: bool = False,
        expect_cache_tokens: int = 0,
        expect_cache_base: type[CacheBase] | None = None,
    ) -> None:
        """Load with tensor parallelism: every layer is sharded among devices, each in its own process.

        One rank for each device that `gpu_split` gives more than 0 GB of weights; all of them without it.
        Numbers for devices that are not here are ignored with a warning.
        On a machine with CPUs only it makes that many processes. Any cache made afterwards is sharded in the
        same way. `expect_cache_tokens` and `expect_cache_base` are accepted for old scripts: shards are
        equal, so nothing depends on them. Under torchrun, only rank 0 returns from this call.
        """
        _run_load(partial(self.load_tp_gen, gpu_split), callback, callback_gen, progress)

    def load_tp_gen(
        self,
        gpu_split: Sequence[float] | None = None,
        callback: ProgressCallback | None = None,
        callback_gen: ProgressGenerator | None = None,
        expect_cache_tokens: int = 0,
        expect_cache_base: type[CacheBase] | None = None,
    ) -> Iterator[Any]:
        """`load_tp` as a generator: run it to its end."""
        yield from self._load(partial(self._load_ranks, "tensor", gpu_split), callback, callback_gen)

    def load_pipeline(
        self,
        gpu_split: Sequence[float] | None = None,
        callback: ProgressCallback | None = None,
        callback_gen: ProgressGenerator | None = None,
        progress: bool = False,
    ) -> None:
        """Load with pipeline parallelism: each of several processes has a run of layers.

        This is for models that are larger than one machine. Ranks are chosen as by `load_tp`. On one machine
        `load_autosplit` does the same in one process.
        """
        _run_load(partial(self.load_pipeline_gen, gpu_split), callback, callback_gen, progress)

    def load_pipeline_gen(
        self,
        gpu_split: Sequence[float] | None = None,
        callback: ProgressCallback | None = None,
        callback_gen: ProgressGenerator | None = None,
    ) -> Iterator[Any]:
        """`load_pipeline` as a generator: run it to its end."""
        yield from self._load(partial(self._load_ranks, "pipeline", gpu_split), callback, callback_gen)

    def _load(
        self,
        steps: Callable[[LoadProgress], LoadSteps],
        callback: ProgressCallback | None,
        callback_gen: ProgressGenerator | None,
        lazy_cache: CacheBase | None = None,
    ) -> Iterator[Any]:
        """Unload, load the modules, allocate the cache; undo everything if one fails."""
        progress = LoadProgress(callback, callback_gen)
        refuse_removed_variables()
        self.unload()
        try:
            with memory_errors(self._failure_message, OUT_OF_MEMORY_REMEDY):
                start_openmp(self._failure_message())
                self._loaded = yield from steps(progress)
                self.loaded = True
                if lazy_cache is not None:
                    lazy_cache.allocate()
            total = len(self._loaded.module_devices)
            yield from progress.report(total, total)
        except BaseException:
            self.unload()
            if lazy_cache is not None:
                lazy_cache.release()
            raise

    def _load_split(self, gpu_split: Sequence[float] | None, progress: LoadProgress) -> LoadSteps:
        """Load in this process, on the devices that `gpu_split` and `config.device` give."""
        config, devices = self._config_and_devices()
        source, num_layers = self.open_checkpoint(config), len(config.spec.layers)
        warn_about_unused_layers(config, source)
        if not gpu_split and (config.device is None or len(devices) == 1):
            placement = [0] * (num_layers + 2)
        else:
            modules = estimate_modules(config, source, compute_profile(config, devices), [0] * num_layers)
            if gpu_split:
                weights = [replace(module, workspace=0) for module in modules]
                placement = place_modules(weights, split_budgets(devices, gpu_split), SPLIT_REMEDY)
            else:
                placement = place_modules(modules, device_budgets(devices, None), CACHE_REMEDY)
        return (yield from load_modules(config, source, [devices[i] for i in placement], progress))

    def _load_with_cache(
        self, cache: CacheBase, reserve_vram: int | Sequence[int] | None, progress: LoadProgress
    ) -> LoadSteps:
        """Load in this process, leaving room for each layer's pages on the layer's device."""
        config, devices = self._config_and_devices()
        source = self.open_checkpoint(config)
        warn_about_unused_layers(config, source)
        profile = compute_profile(config, devices, cache.num_pages * PAGE_SIZE)
        modules = estimate_modules(config, source, replace(profile, sequences=cache.batch_size), cache.layer_bytes())
        remedy = placement_remedy(cache.state_bytes)
        placement = place_modules(modules, device_budgets(devices, reserve_vram), remedy)
        return (yield from load_modules(config, source, [devices[i] for i in placement], progress))

    def _load_ranks(self, strategy: str, gpu_split: Sequence[float] | None, progress: LoadProgress) -> LoadSteps:
        """Load in several processes, of which this one is rank 0."""
        devices = self._config_and_devices()[1]
        return (yield from load_parallel(strategy, self.config, devices, gpu_split, progress))

    def _config_and_devices(self) -> tuple[FrozenConfig, list[DeviceInfo]]:
        """The configuration as it is now, and the devices it allows."""
        frozen = self.config.freeze()
        return frozen, self.list_devices(frozen.device)

    def _check_lazy(self, cache: CacheBase) -> None:
        """Raise for a cache that cannot be allocated while this model loads."""
        if not isinstance(cache, CacheBase):
            raise InputError(
                f"load_autosplit allocates a cache, found {cache!r}: give it Cache(model, lazy=True), or "
                "call load() without one."
            )
        owner: object = cache.model
        if owner is not self:
            raise InputError(
                "This cache was made for another model, and would be allocated beside that: give "
                f"load_autosplit {type(cache).__name__}(model, lazy=True) of this one."
            )
        if cache.allocated:
            raise InputError(
                "load_autosplit needs a cache made with lazy=True that has no tensors yet: it allocates them "
                "itself. Call cache.release() if what it holds is not needed, or make a new one."
            )

    def _failure_message(self) -> str:
        """The first part of the message when memory runs out."""
        path = self.config.model_dir or "the model"
        stored = _stored_bytes(Path(path))
        weights = f" ({format_bytes(stored)} of weights)" if stored else ""
        return f"{path}: the model could not be loaded{weights}"

    def unload(self) -> None:
        """Release all weights; the model can be loaded again, but its generators cannot continue."""
        loaded, self._loaded, self.loaded = self._loaded, None, False
        if loaded is None:
            return
        for runner in self._runners:
            runner.release_model()
        self._runners.clear()
        if loaded.driver is not None:
            loaded.driver.close()
        on_gpu = any(info.device.type == "cuda" for info in loaded.module_devices)
        del loaded
        release_pool()
        if on_gpu:
            gc.collect()
            torch.cuda.empty_cache()

    def plan(
        self,
        context: int,
        users: int = 1,
        cache: type[CacheBase] = Cache,
        memory: Sequence[float] | None = None,
        reserve_vram: int | Sequence[int] | None = None,
    ) -> MemoryPlan:
        """The memory that the model and a cache would need on each device; loads nothing.

        The cache holds `context` tokens, and recurrent states where layers have them, for each of `users` sequences.
        `memory` has the GB of each of some hypothetical GPUs, which the plan is for instead of this machine's devices.
        """
        for name, count in (("context", context), ("users", users)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise InputError(f"{name} must be a whole number of at least 1, found {count!r}.")
        if memory is None:
            config, devices = self._config_and_devices()
        else:
            config, devices = self.config.freeze(), hypothetical_devices(memory)
        source = self.open_checkpoint(config)
        profile = replace(compute_profile(config, devices, hypothetical=memory is not None), sequences=users)
        shapes = kv_shapes(config.spec)
        owner = CacheOwnerInfo([replace(shape, state=None) for shape in shapes], profile.dtype)
        page_bytes = cache(owner, max_seq_len=PAGE_SIZE, lazy=True).layer_bytes()
        conv_item_bytes = profile.dtype.itemsize
        state_bytes = [0 if shape.state is None else shape.state.nbytes(conv_item_bytes) for shape in shapes]

        def estimate_at(tokens: int) -> list[ModuleMemory]:
            num_pages = -(-tokens // PAGE_SIZE) * users
            return estimate_modules(
                replace(config, max_seq_len=tokens),
                source,
                replace(profile, num_cached_tokens=num_pages * PAGE_SIZE),
                [num_pages * layer_bytes for layer_bytes in page_bytes],
                [users * STATES_PER_SEQUENCE * layer_bytes for layer_bytes in state_bytes],
            )

        remedy = placement_remedy(sum(state_bytes))
        return plan_memory(estimate_at, device_budgets(devices, reserve_vram), context, remedy)

    def summary(self) -> Summary:
        """The model's size and formats, from its files' headers."""
        frozen = self.config.freeze()
        return summarize(frozen, self.open_checkpoint(frozen))

    def explain(self) -> str:
        """Which backend runs each part, and why."""
        if self._loaded is None:
            raise NotLoaded("Kernels are chosen while loading: call model.load() first.")
        return self._loaded.explain()

    @property
    def tp_context(self) -> int | None:
        """The number of ranks after `load_tp` or `load_pipeline`; None after `load`, and before loading."""
        return None if self._loaded is None else self._loaded.num_ranks or None

    @property
    def placement(self) -> list[str]:
        """The device of each module: the embedding, every layer, the head; empty before loading."""
        return [] if self._loaded is None else [device.name for device in self._loaded.module_devices]

    @property
    def modules(self) -> list[LegacyModule]:
        """The modules as exllamav2 lists them, read-only."""
        layers = len((self._loaded or self).config.spec.layers)
        keys = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(layers)), "lm_head"]
        names = ["Embedding", *["Layer"] * layers, "Head"]
        indices: list[int | None] = [None] * len(keys)
        if self._loaded is not None:
            devices = [info.device for info in self._loaded.module_devices]
            indices = [-1 if device.type == "cpu" else device.index or 0 for device in devices]
        return [LegacyModule(*module) for module in zip(keys, names, indices, strict=True)]

    @modules.setter
    def modules(self, value: object) -> None:
        raise Unsupported(
            "Layers cannot be exchanged in a loaded model, since several of them may be one call. Write the "
            "layers that you want into a model folder and load that."
        )

    @property
    def modules_dict(self) -> dict[str, LegacyModule]:
        """`modules` by key."""
        return {module.key: module for module in self.modules}

    def get_modules(self) -> list[LegacyModule]:
        """`modules`."""
        return self.modules

    @property
    def max_seq_len(self) -> int:
        """The longest sequence: as configured when the model was loaded, or less if the config says so now.

        A larger length takes effect when the model is loaded again, since RoPE tables are made then.
        """
        configured = self.config.max_seq_len
        return configured if self._loaded is None else min(configured, self._loaded.config.max_seq_len)

    # CacheOwner

    @property
    def cache_shapes(self) -> list[LayerShape]:
        """The cache shape of each layer."""
        return kv_shapes(self.config.spec) if self._loaded is None else self._loaded.layer_shapes

    @property
    def cache_devices(self) -> list[torch.device] | None:
        """Each layer's device; None before loading."""
        if self._loaded is None:
            return None
        return [backends.device for backends in self._loaded.module_backends[1:-1]]

    @property
    def cache_dtype(self) -> torch.dtype:
        """The precision of computed keys and values, also before loading."""
        if self._loaded is not None:
            return self._loaded.dtype
        return model_dtype(*self._config_and_devices())

    @property
    def cache_max_seq_len(self) -> int:
        """The longest sequence."""
        return self.max_seq_len

    @property
    def cache_replicator(self) -> CacheReplicator | None:
        """Repeats operations on caches in other processes; None without other processes."""
        return None if self._loaded is None else self._loaded.cache_replicator

    # LoRAs and injected embeddings

    def model_handle(self) -> ModelHandle:
        """The loaded modules, for `lora`."""
        loaded = self._require_loaded()
        return ModelHandle(loaded.decoder, loaded.full_spec or loaded.config.spec, loaded.device_of, loaded.dtype)

    def make_extras(self, ids: Sequence[int], loras: Any = None, embeddings: Any = None) -> SequenceExtras:
        """Check a prompt's ids, LoRAs and embeddings; returns what it has besides its ids.

        `loras`: a LoRA or a list of them, each maybe in a pair with its scale; `embeddings`:
        the `MMEmbedding` objects whose ids are in the prompt.
        """
        loaded = self._require_loaded()
        model, decoder = loaded.config.spec, loaded.decoder
        mm_embeddings = check_embeddings(embeddings, model.hidden)
        check_ids(ids, mm_embeddings, model.vocab)
        return SequenceExtras(
            active_loras(decoder, loras),
            mm_embeddings,
            tuple(lora for lora, _ in resolve_loras(decoder, loras)),
            prompt_mrope_positions(model, ids, mm_embeddings),
        )

    def wrap_embeddings(self, text: str, embeddings: Any) -> list[MMEmbedding]:
        """Wrap embeddings for a prompt; bare vectors (n, hidden) get the alias {{EMBED_HERE}}."""
        embedding_list = embeddings if isinstance(embeddings, list | tuple) else [embeddings]
        if other := [one for one in embedding_list if not isinstance(one, Tensor) and not hasattr(one, "get_ids")]:
            raise InputError(f"embeddings must be MMEmbedding or vectors, found {type(other[0]).__name__}.")
        num_tensors = sum(isinstance(one, Tensor) for one in embedding_list)
        if num_tensors and (num_tensors > 1 or text.count(EMBED_HERE) != 1):
            raise InputError(
                f"A prompt with bare vectors must contain {EMBED_HERE} exactly once for the one tensor it "
                f"may have, found {text.count(EMBED_HERE)} for {num_tensors}. Wrap vectors as "
                "MMEmbedding(model, vectors) and write their text_alias into the prompt to have several."
            )
        return [MMEmbedding(self, one, EMBED_HERE) if isinstance(one, Tensor) else one for one in embedding_list]

    def runner(self, cache: CacheBase) -> PagedModelRunner:
        """The generator's runner over this cache."""
        loaded = self._require_loaded()
        self._check_cache_shapes(cache)
        mrope = uses_mrope(loaded.config.spec)
        runner = PagedModelRunner(loaded.decoder, cache, loaded.device, mrope, loaded.max_graph_tokens)
        self._runners.add(runner)
        return runner

    @property
    def backends(self) -> Sequence[Backend]:
        """The backends of the first module, fastest first."""
        return self._require_loaded().module_backends[0].backends

    # Forward

    def is_quant(self) -> bool:
        """Whether attention matrices are quantised, in memory or, before loading, in the files."""
        if self._loaded is not None:
            distinct = {id(backends): backends for backends in self._loaded.module_backends}.values()
            records = (record for backends in distinct for record in backends.records)
            forms = {record.detail for record in records if ATTENTION_MATRIX.fullmatch(record.role)}
        else:
            frozen = self.config.freeze()
            source, roles = self.open_checkpoint(frozen), (matrix.role for matrix in matrices(frozen.spec))
            forms = {source.describe(role)[0] for role in roles if ATTENTION_MATRIX.fullmatch(role)}
        return not all(form.startswith("dense") for form in forms)

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        cache: CacheBase | Sequence[CacheBase] | None = None,
        input_mask: Tensor | None = None,
        preprocess_only: bool = False,
        last_id_only: bool = False,
        loras: Any = None,
        return_last_state: bool = False,
        position_offsets: Tensor | None = None,
        abort_event: threading.Event | None = None,
        cpu_logits: bool = False,
        positions: Tensor | None = None,
        indexed_embeddings: Any = None,
    ) -> Any:
        """Logits for token ids: (rows, tokens, vocabulary) in float32, tokens = 1 with `last_id_only`.

        With a cache the tokens follow `cache.current_seq_len`, which moves on; set it back to rewind. Long
        inputs are computed in chunks of `config.max_input_len`. `preprocess_only` fills the cache and returns
        None. With `return_last_state` it returns (logits, the state entering the final norm) of the last
        chunk. An `abort_event` that is set ends the call between chunks and returns None. `input_mask` hides
        keys (as made by `tokenizer.padding_mask`), `position_offsets` shifts each row's positions,
        `positions` replaces them. `loras` change every row. `indexed_embeddings` replace the embeddings of
        their ids; images get positions as if the cache held text, so later calls for the same tokens pass
        `positions`. A list of caches has one for each row.
        """
        if cache is not None and not isinstance(cache, CacheBase):
            return self._forward_per_row(
                input_ids,
                cache,
                input_mask,
                position_offsets,
                positions,
                preprocess_only=preprocess_only,
                last_id_only=last_id_only,
                loras=loras,
                return_last_state=return_last_state,
                abort_event=abort_event,
                cpu_logits=cpu_logits,
                indexed_embeddings=indexed_embeddings,
            )
        loaded = self._require_loaded()
        config, decoder = loaded.config, loaded.decoder
        if cache is not None:
            self._check_cache_shapes(cache)
        request = check_forward_inputs(
            config,
            input_ids,
            cache,
            input_mask,
            position_offsets,
            positions,
            loaded.device,
            active_loras(decoder, loras),
            indexed_embeddings,
        )
        requested = requested_outputs(config, request, preprocess_only, last_id_only)
        layers: Sequence[LayerKVCache] = cache.layers if cache is not None else [NoCache()] * len(decoder.blocks)
        width = cache.pages_per_row if cache is not None else 1
        pages = torch.arange(request.rows * width, device=loaded.device).view(request.rows, width)
        collected: list[Tensor] = []
        for start, stop in chunk_ranges(config, request, cache is not None):
            if abort_event is not None and abort_event.is_set():
                return None
            before_last = requested == "last" and stop < request.tokens
            slots = None if cache is None else cache.next_state_slots(request.rows, stop - start, loaded.device)
            batch = request.chunk_batch(start, stop, pages, slots, "none" if before_last else requested)
            logits, state = decoder.forward(batch, layers)
            if cache is not None:
                cache.current_seq_len += stop - start
                cache.last_writer = None
            if logits is not None:
                collected.append(logits.cpu() if cpu_logits else logits)
        if preprocess_only:
            return None
        all_logits = collected[0] if len(collected) == 1 else torch.cat(collected, 1)
        return (all_logits, state) if return_last_state else all_logits

    def _forward_per_row(
        self,
        ids: Tensor,
        caches: Sequence[CacheBase],
        input_mask: Tensor | None,
        position_offsets: Tensor | None,
        positions: Tensor | None,
        **options: Any,
    ) -> Any:
        """`forward` with a cache for each row: one row after the other, then concatenated."""
        if not isinstance(caches, list | tuple) or not all(isinstance(one, CacheBase) for one in caches):
            raise InputError(f"cache must be a cache or a list of caches, found {type(caches).__name__}.")
        if not isinstance(ids, Tensor) or ids.dim() != 2 or len(caches) != len(ids) or len(ids) == 0:
            found = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
            raise InputError(f"A list of {len(caches)} caches needs as many rows of input_ids, found {found}.")
        if len(set(map(id, caches))) < len(caches):
            raise InputError("A list of caches has one for each row; one of them is in it twice.")
        for cache in caches:
            check_cache_room(cache, 1, ids.shape[1])  # check all rows before any is computed
        outputs = [
            self.forward(
                ids[i : i + 1],
                cache,
                input_mask=None if input_mask is None else input_mask[i : i + 1],
                position_offsets=None if position_offsets is None else position_offsets[i : i + 1],
                positions=None if positions is None else positions[..., i : i + 1, :],
                **options,
            )
            for i, cache in enumerate(caches)
        ]
        if any(output is None for output in outputs):
            return None
        if isinstance(outputs[0], tuple):
            return tuple(torch.cat(column) for column in zip(*outputs, strict=True))
        return torch.cat(outputs)

    def _check_cache_shapes(self, cache: CacheBase) -> None:
        """Raise for a cache with other layer shapes, since kernels write by the model's own."""
        if cache.model is not self and cache.layer_shapes != (own := tuple(self.cache_shapes)):
            raise InputError(
                f"This cache was made for another model: it has {_describe_shapes(cache.layer_shapes)}, "
                f"this model {_describe_shapes(own)}. Make one with {type(cache).__name__}(model)."
            )

    def _require_loaded(self) -> LoadedModel:
        if self._loaded is None:
            raise NotLoaded("The model has no weights in memory: call model.load() first.")
        return self._loaded


def _describe_shapes(shapes: Sequence[LayerShape]) -> str:
    """The layers' shapes, for an error message."""
    heads, sizes = ({getattr(shape, name) for shape in shapes} for name in ("kv_heads", "head_dim"))
    described = ["/".join(map(str, sorted(found))) for found in (heads, sizes)]
    return f"{len(shapes)} layers with {described[0]} heads of {described[1]}"


def _run_load(
    load_gen: Callable[..., Iterator[Any]],
    callback: ProgressCallback | None,
    callback_gen: ProgressGenerator | None,
    progress: bool,
) -> None:
    """Run a load to its end; `progress` draws a bar on standard error."""
    if not progress:
        deque(load_gen(callback=callback, callback_gen=callback_gen), maxlen=0)
        return
    if callback is not None:
        raise InputError("Give a callback or progress=True, not both.")
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("Loading", total=None)

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        deque(load_gen(callback=update, callback_gen=callback_gen), maxlen=0)


def _stored_bytes(path: Path) -> int:
    """Bytes of a model's weight files; 0 if they cannot be read."""
    files = [path] if path.suffix == ".gguf" else path.glob("*.safetensors")
    try:
        return sum(file.stat().st_size for file in files)
    except OSError:
        return 0


class LegacyModule:
    """A module as exllamav2 lists it: the embedding, a layer or the head. It computes nothing."""

    def __init__(self, key: str, name: str, device_idx: int | None) -> None:
        self.key = key
        self.name = name
        self._device_idx = device_idx

    @property
    def device_idx(self) -> int | None:
        """The number of its GPU; -1: a CPU; None: not loaded."""
        return self._device_idx

    @device_idx.setter
    def device_idx(self, value: int | None) -> None:
        if value != self._device_idx:
            warnings.warn(
                f"{self.key} stays where it is: parts go to devices as model.load(gpu_split) or "
                "model.load_autosplit(cache) say.",
                UserWarning,
                stacklevel=2,
            )

    def reload(self) -> None:
        """Do nothing: its weights are on their device."""

    def __repr__(self) -> str:
        """Its key and device."""
        return f"{type(self).__name__}({self.key!r}, device_idx={self._device_idx})"
