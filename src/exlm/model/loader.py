"""`LoadableModel`, the half of `Model` that loads, unloads, plans and describes it.

A model is loaded completely or not at all: on one device, on several, or in several processes.
"""

from __future__ import annotations

import gc
import logging
import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import WeightSource
from ..config import Config, FrozenConfig
from ..env import refuse_removed_variables
from ..errors import InputError, NotLoaded, Unsupported
from ..formats.host_buffers import release_pool
from ..kvcache import PAGE_SIZE, Cache, CacheBase
from ..memory import memory_errors
from .devices import DeviceInfo, hypothetical_devices, list_devices, start_openmp
from .instance import (
    LoadProgress,
    LoadSteps,
    ModelInstance,
    ProgressCallback,
    ProgressGenerator,
    kv_shapes,
    load_modules,
    no_progress,
    open_checkpoint,
)
from .model_runner import PagedModelRunner
from .multiprocess import load_parallel
from .placement import (
    CACHE_REMEDY,
    SPLIT_REMEDY,
    Budget,
    CacheOwnerInfo,
    ModuleMemory,
    compute_profile,
    device_capacities,
    estimate_budget,
    estimate_modules,
    format_bytes,
    place_modules,
    split_capacities,
)
from .summary import Summary, summarize

log = logging.getLogger(__name__)

OUT_OF_MEMORY_REMEDY = (
    "Free memory, raise the limit of this process (ulimit -v, or that of its container), or load a smaller "
    "model, one of fewer bits, or fewer tokens (config.max_seq_len)."
)

STORED_LAYER = re.compile(r"(?:model\.layers|blk)\.(\d{1,6})\.")


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


class LoadableModel:
    """A model that can be loaded, unloaded and described; `Model` adds the forward pass."""

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
        self.open_checkpoint: Callable[[FrozenConfig], WeightSource] = open_checkpoint
        """Opens the weights; may be replaced to read them from somewhere else."""
        self._loaded: ModelInstance | None = None
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
        with _callback_or_bar(callback, progress) as report:
            for _ in self.load_gen(gpu_split, lazy, stats, report, callback_gen):
                pass

    def load_gen(
        self,
        gpu_split: Sequence[float] | None = None,
        lazy: bool = False,
        stats: bool = False,
        callback: ProgressCallback | None = None,
        callback_gen: ProgressGenerator | None = None,
    ) -> Iterator[Any]:
        """`load` as a generator: it yields what `callback_gen(i, n)` yields; run it to its end."""
        progress = LoadProgress(callback or no_progress, callback_gen)
        yield from self._load(self._load_split(gpu_split, progress), progress)

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
        with _callback_or_bar(callback, progress) as report:
            for _ in self.load_autosplit_gen(cache, reserve_vram, last_id_only, report, callback_gen):
                pass

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
        progress = LoadProgress(callback or no_progress, callback_gen)
        yield from self._load(self._load_with_cache(cache, reserve_vram, progress), progress, cache)

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
        with _callback_or_bar(callback, progress) as report:
            for _ in self.load_tp_gen(gpu_split, report, callback_gen):
                pass

    def load_tp_gen(
        self,
        gpu_split: Sequence[float] | None = None,
        callback: ProgressCallback | None = None,
        callback_gen: ProgressGenerator | None = None,
        expect_cache_tokens: int = 0,
        expect_cache_base: type[CacheBase] | None = None,
    ) -> Iterator[Any]:
        """`load_tp` as a generator: run it to its end."""
        progress = LoadProgress(callback or no_progress, callback_gen)
        yield from self._load(self._load_ranks("tensor", gpu_split, progress), progress)

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
        with _callback_or_bar(callback, progress) as report:
            for _ in self.load_pipeline_gen(gpu_split, report, callback_gen):
                pass

    def load_pipeline_gen(
        self,
        gpu_split: Sequence[float] | None = None,
        callback: ProgressCallback | None = None,
        callback_gen: ProgressGenerator | None = None,
    ) -> Iterator[Any]:
        """`load_pipeline` as a generator: run it to its end."""
        progress = LoadProgress(callback or no_progress, callback_gen)
        yield from self._load(self._load_ranks("pipeline", gpu_split, progress), progress)

    def _load(self, steps: LoadSteps, progress: LoadProgress, lazy_cache: CacheBase | None = None) -> Iterator[Any]:
        """Unload, run `steps`, allocate the cache; undo everything if one fails."""
        refuse_removed_variables()
        self.unload()
        try:
            with memory_errors(self._failure_message, OUT_OF_MEMORY_REMEDY):
                start_openmp(self._failure_message())
                self._loaded = yield from steps
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
        num_layers = len(config.spec.layers)
        if not gpu_split and (config.device is None or len(devices) == 1):
            placement = [0] * (num_layers + 2)
        else:
            profile = compute_profile(config, devices)
            modules = estimate_modules(config, self.open_checkpoint(config), profile, [0] * num_layers)
            if gpu_split:
                weights = [replace(module, workspace=0) for module in modules]
                placement = place_modules(weights, split_capacities(devices, gpu_split), SPLIT_REMEDY)
            else:
                placement = place_modules(modules, device_capacities(devices, None), CACHE_REMEDY)
        return (yield from self._load_placed(config, [devices[i] for i in placement], progress))

    def _load_with_cache(
        self, cache: CacheBase, reserve_vram: int | Sequence[int] | None, progress: LoadProgress
    ) -> LoadSteps:
        """Load in this process, leaving room for each layer's pages on the layer's device."""
        config, devices = self._config_and_devices()
        profile = compute_profile(config, devices, cache.num_pages * PAGE_SIZE)
        modules = estimate_modules(config, self.open_checkpoint(config), profile, cache.layer_bytes())
        placement = place_modules(modules, device_capacities(devices, reserve_vram), CACHE_REMEDY)
        return (yield from self._load_placed(config, [devices[i] for i in placement], progress))

    def _load_placed(
        self, config: FrozenConfig, module_devices: Sequence[DeviceInfo], progress: LoadProgress
    ) -> LoadSteps:
        """Load in this process, each module on its device."""
        source = self.open_checkpoint(config)
        _warn_about_unused_layers(config, source)
        return (yield from load_modules(config, source, module_devices, progress))

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
        devices = loaded.devices
        del loaded
        release_pool()
        if any(device.type == "cuda" for device in devices):
            gc.collect()
            torch.cuda.empty_cache()

    def plan(
        self,
        context: int,
        users: int = 1,
        cache: type[CacheBase] = Cache,
        memory: Sequence[float] | None = None,
        reserve_vram: int | Sequence[int] | None = None,
    ) -> Budget:
        """The memory that the model and a cache of this size would need on each device; loads nothing.

        `memory`: GB of each of some hypothetical GPUs, instead of this machine's devices.
        """
        for name, count in (("context", context), ("users", users)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise InputError(f"{name} must be a whole number of at least 1, found {count!r}.")
        if memory is None:
            config, devices = self._config_and_devices()
        else:
            config, devices = self.config.freeze(), hypothetical_devices(memory)
        source = self.open_checkpoint(config)
        profile = compute_profile(config, devices, hypothetical=memory is not None)
        owner = CacheOwnerInfo(kv_shapes(config.spec), profile.dtype)
        page_bytes = cache(owner, max_seq_len=PAGE_SIZE, lazy=True).layer_bytes()

        def estimate_at(tokens: int) -> list[ModuleMemory]:
            num_pages = -(-tokens // PAGE_SIZE) * users
            return estimate_modules(
                replace(config, max_seq_len=tokens),
                source,
                replace(profile, num_cached_tokens=num_pages * PAGE_SIZE),
                [num_pages * layer_bytes for layer_bytes in page_bytes],
            )

        return estimate_budget(estimate_at, device_capacities(devices, reserve_vram), context)

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
        if self._loaded is None:
            return _list_legacy_modules(len(self.config.spec.layers), None)
        devices = [_device_index(info.device) for info in self._loaded.module_devices]
        return _list_legacy_modules(len(devices) - 2, devices)

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


@contextmanager
def _callback_or_bar(callback: ProgressCallback | None, progress: bool) -> Iterator[ProgressCallback | None]:
    """The callback itself, or one that draws a progress bar on standard error."""
    if not progress:
        yield callback
        return
    if callback is not None:
        raise InputError("Give a callback or progress=True, not both.")
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("Loading", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _warn_about_unused_layers(config: FrozenConfig, source: WeightSource) -> None:
    """Warn if the files have more layers than config.json: it may belong to another model."""
    num_layers = len(config.spec.layers)
    matches = map(STORED_LAYER.match, map(config.spec.names.to_llama_key, source.unused()))
    num_stored = max((int(match[1]) + 1 for match in matches if match is not None), default=0)
    if num_stored > num_layers:
        log.warning(
            "%s describes %d layers, and the files hold %d: the last %d are left out. If that is wrong, "
            "take config.json from the model's own page.",
            *(config.path, num_layers, num_stored, num_stored - num_layers),
        )


def _stored_bytes(path: Path) -> int:
    """Bytes of a model's weight files; 0 if they cannot be read."""
    files = [path] if path.suffix == ".gguf" else path.glob("*.safetensors")
    try:
        return sum(file.stat().st_size for file in files)
    except OSError:
        return 0


def _device_index(device: torch.device) -> int:
    """A GPU's number; -1 for a CPU."""
    return -1 if device.type == "cpu" else device.index or 0


def _list_legacy_modules(layers: int, devices: list[int] | None) -> list[LegacyModule]:
    """The embedding, all layers and the head."""
    keys = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(layers)), "lm_head"]
    names = ["Embedding", *["Layer"] * layers, "Head"]
    device_ids: list[int | None] = [None] * len(keys) if devices is None else [*devices]
    return [LegacyModule(*module) for module in zip(keys, names, device_ids, strict=True)]
