"""How a model gets into memory and out of it: whole or not at all, on one device, several, or many processes.

What it can be asked once it is there is `Model`'s business.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import Source
from ..config import Config, FrozenConfig
from ..env import refuse_removed_variables
from ..errors import InputError, NotLoaded, Unsupported
from ..formats.room import give_back
from ..kvcache import PAGE_SIZE, Cache, CacheBase
from ..memory import memory_errors
from .devices import DeviceInfo, hypothetical_devices, list_devices, start_openmp
from .instance import (
    ModelInstance,
    ProgressCallback,
    ProgressGenerator,
    kv_shapes,
    load_steps,
    no_progress,
    open_checkpoint,
    stored_bytes,
    warn_about_unused_layers,
)
from .memory import (
    CACHE_REMEDY,
    SPLIT_REMEDY,
    Budget,
    CacheOwnerInfo,
    compute_profile,
    device_capacities,
    estimate_budget,
    estimate_modules,
    split_capacities,
)
from .model_runner import PagedModelRunner
from .parallel_driver import load_parallel_steps
from .placement import ModuleMemory, format_bytes, place_modules
from .summary import LegacyModule, Summary, list_legacy_modules, summarize

REMEDY = (
    "Free memory, raise the limit of this process (ulimit -v, or that of its container), or load a smaller "
)
REMEDY += "model, one of fewer bits, or fewer tokens (config.max_seq_len)."


class Loader:
    """A model that can be loaded, unloaded and described."""

    def __init__(self, config: Config, lazy_load: bool = False) -> None:
        if not isinstance(config, Config):
            wanted = (
                f"Config({str(config)!r})"
                if isinstance(config, str | PathLike)
                else "Config('/path/to/model')"
            )
            raise InputError(
                f"A model is made of a Config, found {type(config).__name__}: write Model({wanted}), or give "
                "the path to LLM."
            )
        self.config = config
        self.loaded = False
        self.list_devices: Callable[[str | None], list[DeviceInfo]] = list_devices
        """How it looks at the machine: the devices that a wish (`config.device`) stands for."""
        self.open_checkpoint: Callable[[FrozenConfig], Source] = open_checkpoint
        """Where its weights come from: the files of the configuration, unless something else is put here."""
        self._loaded: ModelInstance | None = None
        self._runners: weakref.WeakSet[PagedModelRunner] = (
            weakref.WeakSet()
        )  # who computes with what is loaded

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
        anything fails, nothing stays behind. `lazy` and `stats` are accepted for old scripts.
        """
        self._run_with_progress(
            lambda told: self.load_gen(gpu_split, lazy, stats, told, callback_gen), callback, progress
        )

    def load_gen(
        self,
        gpu_split: Sequence[float] | None = None,
        lazy: bool = False,
        stats: bool = False,
        callback: ProgressCallback | None = None,
        callback_gen: ProgressGenerator | None = None,
    ) -> Iterator[Any]:
        """`load` as a generator: what `callback_gen(i, n)` yields is passed on; run it to its end."""
        yield from self._load_or_unload(
            lambda tell: self._load_on_devices(self._module_devices(gpu_split), tell, callback_gen),
            callback,
            callback_gen,
        )

    def load_autosplit(
        self,
        cache: CacheBase,
        reserve_vram: int | Sequence[int] | None = None,
        last_id_only: bool = False,
        callback: ProgressCallback | None = None,
        callback_gen: ProgressGenerator | None = None,
        progress: bool = False,
    ) -> None:
        """Load the model and allocate a lazy cache beside it, layer for layer.

        Each device is filled, but for `reserve_vram` bytes (one number for all, or a list; 192 MB on the
        first and 64 MB on the others if left out), before the next one is begun. The CPU counts if
        `config.device` names it. Numbers for devices that are not here are ignored with a warning.
        """
        self._run_with_progress(
            lambda told: self.load_autosplit_gen(cache, reserve_vram, last_id_only, told, callback_gen),
            callback,
            progress,
        )

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

        def module_devices() -> list[DeviceInfo]:
            frozen, found = self._config_and_devices()
            kind = compute_profile(frozen, found, cache.num_pages * PAGE_SIZE)
            parts = estimate_modules(frozen, self.open_checkpoint(frozen), kind, cache.layer_bytes())
            return [
                found[at] for at in place_modules(parts, device_capacities(found, reserve_vram), CACHE_REMEDY)
            ]

        try:
            yield from self._load_or_unload(
                lambda tell: self._load_on_devices(module_devices(), tell, callback_gen),
                callback,
                callback_gen,
                cache.allocate,
            )
        except BaseException:
            cache.release()
            raise

    def load_tp(
        self,
        gpu_split: Sequence[float] | None = None,
        callback: ProgressCallback | None = None,
        callback_gen: ProgressGenerator | None = None,
        progress: bool = False,
        expect_cache_tokens: int = 0,
        expect_cache_base: type[CacheBase] | None = None,
    ) -> None:
        """Share every layer among several devices, each in a process of its own.

        One rank for each device that `gpu_split` gives more than 0 GB of weights; all of them without it.
        Numbers for devices that are not here are ignored with a warning.
        On a machine with CPUs only it makes that many processes. Any cache made afterwards is shared in the
        same way. `expect_cache_tokens` and `expect_cache_base` are accepted for old scripts: shares are
        equal, so nothing depends on them. Under torchrun, only rank 0 returns from this call.
        """
        self._run_with_progress(
            lambda told: self.load_tp_gen(gpu_split, told, callback_gen), callback, progress
        )

    def load_tp_gen(
        self,
        gpu_split: Sequence[float] | None = None,
        callback: ProgressCallback | None = None,
        callback_gen: ProgressGenerator | None = None,
        expect_cache_tokens: int = 0,
        expect_cache_base: type[CacheBase] | None = None,
    ) -> Iterator[Any]:
        """`load_tp` as a generator: run it to its end."""
        yield from self._load_or_unload(
            lambda tell: load_parallel_steps(
                "tensors", self.config, self._config_and_devices()[1], gpu_split, tell, callback_gen
            ),
            callback,
            callback_gen,
        )

    def load_pipeline(
        self,
        gpu_split: Sequence[float] | None = None,
        callback: ProgressCallback | None = None,
        callback_gen: ProgressGenerator | None = None,
        progress: bool = False,
    ) -> None:
        """Give each of several processes a run of layers: for models that are larger than one machine.

        Ranks are chosen as by `load_tp`. On one machine `load_autosplit` does the same in one process.
        """
        self._run_with_progress(
            lambda told: self.load_pipeline_gen(gpu_split, told, callback_gen), callback, progress
        )

    def load_pipeline_gen(
        self,
        gpu_split: Sequence[float] | None = None,
        callback: ProgressCallback | None = None,
        callback_gen: ProgressGenerator | None = None,
    ) -> Iterator[Any]:
        """`load_pipeline` as a generator: run it to its end."""
        yield from self._load_or_unload(
            lambda tell: load_parallel_steps(
                "pipeline", self.config, self._config_and_devices()[1], gpu_split, tell, callback_gen
            ),
            callback,
            callback_gen,
        )

    def unload(self) -> None:
        """Let go of every weight; the model can be loaded again. Its generators cannot go on."""
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
        give_back()
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
        """What the model and a cache for so many contexts would need on each device; nothing is loaded.

        `memory` has GB for each of some GPUs to be thought of instead of this machine's devices.
        """
        for name, count in (("context", context), ("users", users)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise InputError(f"{name} must be a whole number of at least 1, found {count!r}.")
        frozen, device_infos = (
            self._config_and_devices()
            if memory is None
            else (self.config.freeze(), hypothetical_devices(memory))
        )
        source, profile = (
            self.open_checkpoint(frozen),
            compute_profile(frozen, device_infos, hypothetical=memory is not None),
        )
        page_bytes = cache(
            CacheOwnerInfo(kv_shapes(frozen.spec), profile.dtype), max_seq_len=PAGE_SIZE, lazy=True
        ).layer_bytes()

        def estimate_at(tokens: int) -> list[ModuleMemory]:
            count = -(-tokens // PAGE_SIZE) * users
            held = [count * page for page in page_bytes]
            return estimate_modules(
                replace(frozen, max_seq_len=tokens),
                source,
                replace(profile, num_cached_tokens=count * PAGE_SIZE),
                held,
            )

        return estimate_budget(estimate_at, device_capacities(device_infos, reserve_vram), context)

    def summary(self) -> Summary:
        """What the folder holds, from its headers; the model need not be loaded."""
        frozen = self.config.freeze()
        return summarize(frozen, self.open_checkpoint(frozen))

    def explain(self) -> str:
        """Which backend runs each part, and why."""
        if self._loaded is None:
            raise NotLoaded("Kernels are chosen while loading: call model.load() first.")
        return self._loaded.explain()

    @property
    def tp_context(self) -> int | None:
        """Among how many ranks `load_tp` or `load_pipeline` divided it; None if neither did."""
        return None if self._loaded is None else self._loaded.num_ranks or None

    @property
    def placement(self) -> list[str]:
        """The device of each module: the embedding, every layer, the head; empty before loading."""
        return (
            [] if self._loaded is None else [device_info.name for device_info in self._loaded.module_devices]
        )

    @property
    def modules(self) -> list[LegacyModule]:
        """The parts that loading reports, for old programs: to be counted and looked at, not exchanged."""
        loaded = self._loaded
        devices = (
            [_device_index(device_info.device) for device_info in loaded.module_devices]
            if loaded is not None
            else None
        )
        depth = len(self.config.spec.layers) if devices is None else len(devices) - 2
        return list_legacy_modules(depth, devices)

    @modules.setter
    def modules(self, wanted: object) -> None:
        raise Unsupported(
            "Layers cannot be exchanged in a loaded model, since several of them may be one call. Write the "
            "layers that you want into a model folder and load that."
        )

    @property
    def modules_dict(self) -> dict[str, LegacyModule]:
        """The same by their keys."""
        return {module.key: module for module in self.modules}

    def get_modules(self) -> list[LegacyModule]:
        """The same as `modules`."""
        return self.modules

    def _config_and_devices(self) -> tuple[FrozenConfig, list[DeviceInfo]]:
        """What is to be loaded, and where it may go."""
        frozen = self.config.freeze()
        return frozen, self.list_devices(frozen.device)

    def _module_devices(self, gpu_split: Sequence[float] | None) -> list[DeviceInfo]:
        """The device of each module when there is no cache to think of."""
        frozen, device_infos = self._config_and_devices()
        depth = len(frozen.spec.layers)
        if not gpu_split and (frozen.device is None or len(device_infos) == 1):
            return [device_infos[0]] * (depth + 2)
        parts = estimate_modules(
            frozen, self.open_checkpoint(frozen), compute_profile(frozen, device_infos), [0] * depth
        )
        if not gpu_split:
            return [
                device_infos[at]
                for at in place_modules(parts, device_capacities(device_infos, None), CACHE_REMEDY)
            ]
        weights = [replace(part, workspace=0) for part in parts]
        return [
            device_infos[at]
            for at in place_modules(weights, split_capacities(device_infos, gpu_split), SPLIT_REMEDY)
        ]

    def _check_lazy(self, cache: CacheBase) -> None:
        """Refuse a cache that cannot be allocated beside this model."""
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

    def _load_on_devices(
        self,
        device_infos: Sequence[DeviceInfo],
        report: ProgressCallback,
        callback_gen: ProgressGenerator | None,
    ) -> Generator[Any, None, ModelInstance]:
        """Everything in this process, each module on its device."""
        frozen = self.config.freeze()
        source = self.open_checkpoint(frozen)
        warn_about_unused_layers(frozen, source)
        return load_steps(frozen, source, device_infos, report, callback_gen)

    def _load_or_unload(
        self,
        steps: Callable[[ProgressCallback], Generator[Any, None, ModelInstance]],
        callback: ProgressCallback | None,
        callback_gen: ProgressGenerator | None,
        finish: Callable[[], object] = lambda: None,
    ) -> Iterator[Any]:
        """Take the steps, then `finish`; all of it or nothing."""
        refuse_removed_variables()
        self.unload()
        report = callback or no_progress
        try:
            with memory_errors(self._described, REMEDY):
                start_openmp(self._described())
                self._loaded = yield from steps(report)
                self.loaded = True
                finish()
            total = len(self._loaded.module_devices)
            report(total, total)
            if callback_gen is not None:
                yield from callback_gen(total, total)
        except BaseException:
            self.unload()
            raise

    def _described(self) -> str:
        """What is loaded, in the words of an error."""
        path = self.config.model_dir or "the model"
        stored = stored_bytes(Path(path))
        return f"{path}: the model could not be loaded" + (
            f" ({format_bytes(stored)} of weights)" if stored else ""
        )

    def _run_with_progress(
        self,
        steps: Callable[[ProgressCallback | None], Iterator[Any]],
        callback: ProgressCallback | None,
        progress: bool,
    ) -> None:
        """Take every step of a loader, telling the callback or a bar."""
        if progress and callback is not None:
            raise InputError("Give a callback or progress=True, not both.")
        if not progress:
            self._run_to_end(steps(callback))
            return
        with progress_bar("Loading") as progress_callback:
            self._run_to_end(steps(progress_callback))

    @staticmethod
    def _run_to_end(steps: Iterator[Any]) -> None:
        for _ in steps:
            pass


def _device_index(device: torch.device) -> int:
    """A GPU's number; -1 for a processor."""
    return -1 if device.type == "cpu" else device.index or 0


@contextmanager
def progress_bar(title: str) -> Iterator[ProgressCallback]:
    """A progress bar on standard error that lives as long as the block, fed with (done, total)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
