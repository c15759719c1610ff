"""How a model gets into memory and out of it: whole or not at all, on one device, several, or many processes.

What it can be asked once it is there is `Model`'s business.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from ..cache import PAGE, Cache, CacheBase
from ..checkpoint import Source
from ..config import Config, FrozenConfig
from ..errors import InputError, NotLoaded, Unsupported
from ..formats.room import give_back
from ..memory import memory_errors
from .address_space import REMEDY, start_openmp
from .budget import FIT_CACHE, FIT_SPLIT, Budget, Planned, budget, measure, spaces, split, use
from .devices import Slot, imagined, inventory
from .loading import Loaded, Yielding, load_steps, opened, shapes, stored_bytes, tell_depth
from .modules import ListedModule, listed
from .placement import Part, place, size
from .progress import Callback, bar, silent
from .runner import Runner
from .staging import staged
from .summary import Summary, summarize
from .team import team_steps


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
        self.inventory: Callable[[str | None], list[Slot]] = inventory
        """How it looks at the machine: the devices that a wish (`config.device`) stands for."""
        self.source: Callable[[FrozenConfig], Source] = opened
        """Where its weights come from: the files of the configuration, unless something else is put here."""
        self._loaded: Loaded | None = None
        self._runners: weakref.WeakSet[Runner] = weakref.WeakSet()  # who computes with what is loaded

    def load(
        self,
        gpu_split: Sequence[float] | None = None,
        lazy: bool = False,
        stats: bool = False,
        callback: Callback | None = None,
        callback_gen: Yielding | None = None,
        progress: bool = False,
    ) -> None:
        """Read the weights and bind their kernels.

        `gpu_split` has GB of weights for each device, which are filled in order; without it everything goes
        to the first device, or, if `config.device` names several, to each as much as it has room for.
        Numbers for devices that are not here are ignored with a warning in the log.
        `callback(i, n)` is called before module i of n and once with (n, n); `progress=True` shows a bar. If
        anything fails, nothing stays behind. `lazy` and `stats` are accepted for old scripts.
        """
        self._watch(
            lambda told: self.load_gen(gpu_split, lazy, stats, told, callback_gen), callback, progress
        )

    def load_gen(
        self,
        gpu_split: Sequence[float] | None = None,
        lazy: bool = False,
        stats: bool = False,
        callback: Callback | None = None,
        callback_gen: Yielding | None = None,
    ) -> Iterator[Any]:
        """`load` as a generator: what `callback_gen(i, n)` yields is passed on; run it to its end."""
        yield from self._load(
            lambda tell: self._placed(self._split(gpu_split), tell, callback_gen), callback, callback_gen
        )

    def load_autosplit(
        self,
        cache: CacheBase,
        reserve_vram: int | Sequence[int] | None = None,
        last_id_only: bool = False,
        callback: Callback | None = None,
        callback_gen: Yielding | None = None,
        progress: bool = False,
    ) -> None:
        """Load the model and allocate a lazy cache beside it, layer for layer.

        Each device is filled, but for `reserve_vram` bytes (one number for all, or a list; 192 MB on the
        first and 64 MB on the others if left out), before the next one is begun. The CPU counts if
        `config.device` names it. Numbers for devices that are not here are ignored with a warning.
        """
        self._watch(
            lambda told: self.load_autosplit_gen(cache, reserve_vram, last_id_only, told, callback_gen),
            callback,
            progress,
        )

    def load_autosplit_gen(
        self,
        cache: CacheBase,
        reserve_vram: int | Sequence[int] | None = None,
        last_id_only: bool = False,
        callback: Callback | None = None,
        callback_gen: Yielding | None = None,
    ) -> Iterator[Any]:
        """`load_autosplit` as a generator: run it to its end."""
        self._check_lazy(cache)

        def slots() -> list[Slot]:
            frozen, found = self._machine()
            kind = use(frozen, found, cache.num_pages * PAGE)
            parts = measure(frozen, self.source(frozen), kind, cache.sizes())
            return [found[at] for at in place(parts, spaces(found, reserve_vram), FIT_CACHE)]

        try:
            yield from self._load(
                lambda tell: self._placed(slots(), tell, callback_gen), callback, callback_gen, cache.allocate
            )
        except BaseException:
            cache.release()
            raise

    def load_tp(
        self,
        gpu_split: Sequence[float] | None = None,
        callback: Callback | None = None,
        callback_gen: Yielding | None = None,
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
        self._watch(lambda told: self.load_tp_gen(gpu_split, told, callback_gen), callback, progress)

    def load_tp_gen(
        self,
        gpu_split: Sequence[float] | None = None,
        callback: Callback | None = None,
        callback_gen: Yielding | None = None,
        expect_cache_tokens: int = 0,
        expect_cache_base: type[CacheBase] | None = None,
    ) -> Iterator[Any]:
        """`load_tp` as a generator: run it to its end."""
        yield from self._load(
            lambda tell: team_steps(
                "tensors", self.config, self._machine()[1], gpu_split, tell, callback_gen
            ),
            callback,
            callback_gen,
        )

    def load_pipeline(
        self,
        gpu_split: Sequence[float] | None = None,
        callback: Callback | None = None,
        callback_gen: Yielding | None = None,
        progress: bool = False,
    ) -> None:
        """Give each of several processes a run of layers: for models that are larger than one machine.

        Ranks are chosen as by `load_tp`. On one machine `load_autosplit` does the same in one process.
        """
        self._watch(lambda told: self.load_pipeline_gen(gpu_split, told, callback_gen), callback, progress)

    def load_pipeline_gen(
        self,
        gpu_split: Sequence[float] | None = None,
        callback: Callback | None = None,
        callback_gen: Yielding | None = None,
    ) -> Iterator[Any]:
        """`load_pipeline` as a generator: run it to its end."""
        yield from self._load(
            lambda tell: team_steps(
                "pipeline", self.config, self._machine()[1], gpu_split, tell, callback_gen
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
            runner.retire()
        self._runners.clear()
        if loaded.leader is not None:
            loaded.leader.close()
        used = loaded.devices
        del loaded
        give_back()
        if any(device.type == "cuda" for device in used):
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
        frozen, slots = self._machine() if memory is None else (self.config.freeze(), imagined(memory))
        source, kind = self.source(frozen), use(frozen, slots, imagined=memory is not None)
        pages = cache(Planned(shapes(frozen.spec), kind.dtype), max_seq_len=PAGE, lazy=True).sizes()

        def measured(tokens: int) -> list[Part]:
            count = -(-tokens // PAGE) * users
            held = [count * page for page in pages]
            return measure(
                replace(frozen, max_seq_len=tokens), source, replace(kind, cached=count * PAGE), held
            )

        return budget(measured, spaces(slots, reserve_vram), context)

    def summary(self) -> Summary:
        """What the folder holds, from its headers; the model need not be loaded."""
        frozen = self.config.freeze()
        return summarize(frozen, self.source(frozen))

    def explain(self) -> str:
        """Which backend runs each part, and why."""
        if self._loaded is None:
            raise NotLoaded("Kernels are chosen while loading: call model.load() first.")
        return self._loaded.explain()

    @property
    def tp_context(self) -> int | None:
        """Among how many ranks `load_tp` or `load_pipeline` divided it; None if neither did."""
        return None if self._loaded is None else self._loaded.ranks or None

    @property
    def placement(self) -> list[str]:
        """The device of each module: the embedding, every layer, the head; empty before loading."""
        return [] if self._loaded is None else [slot.name for slot in self._loaded.slots]

    @property
    def modules(self) -> list[ListedModule]:
        """The parts that loading reports, for old programs: to be counted and looked at, not exchanged."""
        loaded = self._loaded
        devices = [_number(slot.device) for slot in loaded.slots] if loaded is not None else None
        depth = len(self.config.spec.layers) if devices is None else len(devices) - 2
        return listed(depth, devices)

    @modules.setter
    def modules(self, wanted: object) -> None:
        raise Unsupported(
            "Layers cannot be exchanged in a loaded model, since several of them may be one call. Write the "
            "layers that you want into a model folder and load that."
        )

    @property
    def modules_dict(self) -> dict[str, ListedModule]:
        """The same by their keys."""
        return {module.key: module for module in self.modules}

    def get_modules(self) -> list[ListedModule]:
        """The same as `modules`."""
        return self.modules

    def _machine(self) -> tuple[FrozenConfig, list[Slot]]:
        """What is to be loaded, and where it may go."""
        frozen = self.config.freeze()
        return frozen, self.inventory(frozen.device)

    def _split(self, gpu_split: Sequence[float] | None) -> list[Slot]:
        """The device of each module when there is no cache to think of."""
        frozen, slots = self._machine()
        depth = len(frozen.spec.layers)
        if not gpu_split and (frozen.device is None or len(slots) == 1):
            return [slots[0]] * (depth + 2)
        parts = measure(frozen, self.source(frozen), use(frozen, slots), [0] * depth)
        if not gpu_split:
            return [slots[at] for at in place(parts, spaces(slots, None), FIT_CACHE)]
        weights = [replace(part, workspace=0) for part in parts]
        return [slots[at] for at in place(weights, split(slots, gpu_split), FIT_SPLIT)]

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

    def _placed(
        self, slots: Sequence[Slot], tell: Callback, callback_gen: Yielding | None
    ) -> Generator[Any, None, Loaded]:
        """Everything in this process, each module on its device."""
        frozen = self.config.freeze()
        source = self.source(frozen)
        tell_depth(frozen, source)
        return load_steps(frozen, staged(source, slots), slots, tell, callback_gen)

    def _load(
        self,
        steps: Callable[[Callback], Generator[Any, None, Loaded]],
        callback: Callback | None,
        callback_gen: Yielding | None,
        finish: Callable[[], object] = lambda: None,
    ) -> Iterator[Any]:
        """Take the steps, then `finish`; all of it or nothing."""
        self.unload()
        tell = callback or silent
        try:
            with memory_errors(self._described, REMEDY):
                start_openmp(self._described())
                self._loaded = yield from steps(tell)
                self.loaded = True
                finish()
            total = len(self._loaded.slots)
            tell(total, total)
            if callback_gen is not None:
                yield from callback_gen(total, total)
        except BaseException:
            self.unload()
            raise

    def _described(self) -> str:
        """What is loaded, in the words of an error."""
        path = self.config.model_dir or "the model"
        stored = stored_bytes(Path(path))
        return f"{path}: the model could not be loaded" + (f" ({size(stored)} of weights)" if stored else "")

    def _watch(
        self, steps: Callable[[Callback | None], Iterator[Any]], callback: Callback | None, progress: bool
    ) -> None:
        """Take every step of a loader, telling the callback or a bar."""
        if progress and callback is not None:
            raise InputError("Give a callback or progress=True, not both.")
        if not progress:
            self._drain(steps(callback))
            return
        with bar("Loading") as shown:
            self._drain(steps(shown))

    @staticmethod
    def _drain(steps: Iterator[Any]) -> None:
        for _ in steps:
            pass


def _number(device: torch.device) -> int:
    """A GPU's number; -1 for a processor."""
    return -1 if device.type == "cpu" else device.index or 0
