"""The model users hold: a description that can be loaded, asked and unloaded."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..cache import CacheBase, LayerShape, Passing
from ..checkpoint import open_source
from ..config import Config, FrozenConfig
from ..errors import InputError, NotLoaded, Unsupported
from ..kernels.backend import KeyValues
from ..kernels.select import Chain, choose
from ..nn.batch import Outputs
from .build import Builder
from .decoder import Decoder
from .devices import guard, pick_device, pick_dtype
from .inputs import Request, check, chunks
from .progress import Callback, bar, silent
from .runner import Runner
from .summary import Summary, summarize

log = logging.getLogger(__name__)

Yielding = Callable[[int, int], Iterator[Any]]


class Model:
    """A language model: `Model(config)`, `load()`, then `forward(ids, cache)`."""

    def __init__(self, config: Config, lazy_load: bool = False) -> None:
        self.config = config
        self.loaded = False
        self._frozen: FrozenConfig | None = None
        self._decoder: Decoder | None = None
        self._chain: Chain | None = None

    # Loading

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

        `callback(i, n)` is called before module i of n and once with (n, n); `progress=True` shows a bar.
        If anything fails, nothing stays behind. `lazy` and `stats` are accepted for old scripts.
        """
        if progress and callback is not None:
            raise InputError("Give a callback or progress=True, not both.")
        if progress:
            with bar("Loading") as shown:
                self._drain(self.load_gen(gpu_split, callback=shown, callback_gen=callback_gen))
            return
        self._drain(self.load_gen(gpu_split, callback=callback, callback_gen=callback_gen))

    def load_gen(
        self,
        gpu_split: Sequence[float] | None = None,
        lazy: bool = False,
        stats: bool = False,
        callback: Callback | None = None,
        callback_gen: Yielding | None = None,
    ) -> Iterator[Any]:
        """`load` as a generator: what `callback_gen(i, n)` yields is passed on; run it to its end."""
        if gpu_split is not None and len(gpu_split) > 1:
            raise Unsupported(
                f"gpu_split names {len(gpu_split)} devices; this version places a model on one. "
                "Leave gpu_split out, or set config.device."
            )
        self.unload()
        try:
            yield from self._load(callback or silent, callback_gen)
        except BaseException:
            self.unload()
            raise

    def load_autosplit(
        self,
        cache: CacheBase,
        reserve_vram: int | Sequence[int] | None = None,
        last_id_only: bool = False,
        callback: Callback | None = None,
        callback_gen: Yielding | None = None,
        progress: bool = False,
    ) -> None:
        """Load the model and allocate a lazy cache beside it."""
        if cache.allocated:
            raise InputError(
                "load_autosplit needs a cache made with lazy=True: it allocates the cache itself."
            )
        self.load(callback=callback, callback_gen=callback_gen, progress=progress)
        try:
            cache.allocate()
        except BaseException:
            self.unload()
            raise

    def unload(self) -> None:
        """Let go of every weight; the model can be loaded again."""
        self.loaded = False
        self._decoder = self._chain = self._frozen = None

    def summary(self) -> Summary:
        """What the folder holds, from its headers; the model need not be loaded."""
        return summarize(self.config.freeze())

    def explain(self) -> str:
        """Which backend runs each part, and why."""
        if self._chain is None:
            raise NotLoaded("Kernels are chosen while loading: call model.load() first.")
        return self._chain.explain()

    # What a cache asks

    @property
    def cache_shapes(self) -> list[LayerShape]:
        """What each layer stores for a token."""
        return [LayerShape(layer.attn.kv_heads, layer.attn.head_dim) for layer in self.config.spec.layers]

    @property
    def cache_devices(self) -> list[torch.device] | None:
        """Where each layer is; None before loading."""
        return None if self._chain is None else [self._chain.device] * len(self.config.spec.layers)

    @property
    def cache_dtype(self) -> torch.dtype:
        """The precision keys and values are computed in."""
        if self._chain is None:
            raise NotLoaded("The precision is chosen while loading: call model.load() first.")
        return self._chain.dtype

    @property
    def cache_length(self) -> int:
        """The configured sequence length."""
        return self.config.max_seq_len

    def runner(self, cache: CacheBase) -> Runner:
        """The door a generator uses: sequences in pages of this cache."""
        _, decoder, chain = self._ready()
        return Runner(decoder, cache, chain.device)

    # Asking

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        cache: CacheBase | None = None,
        input_mask: Tensor | None = None,
        preprocess_only: bool = False,
        last_id_only: bool = False,
        return_last_state: bool = False,
        position_offsets: Tensor | None = None,
        abort_event: threading.Event | None = None,
        cpu_logits: bool = False,
        positions: Tensor | None = None,
    ) -> Any:
        """Logits for token ids: (rows, tokens, vocabulary) in float32, tokens = 1 with `last_id_only`.

        With a cache the tokens follow `cache.current_seq_len`, which moves on; set it back to rewind. Long
        inputs are computed in chunks of `config.max_input_len`. `preprocess_only` fills the cache and returns
        None. With `return_last_state` the answer is (logits, the state entering the final norm) of the last
        chunk. An `abort_event` that is set ends the call between chunks and returns None. `input_mask` hides
        keys (as made by `tokenizer.padding_mask`), `position_offsets` shifts each row's positions,
        `positions` replaces them.
        """
        frozen, _, chain = self._ready()
        request = check(frozen, input_ids, cache, input_mask, position_offsets, positions, chain.device)
        wanted: Outputs = "none" if preprocess_only else "last" if last_id_only else "all"
        if wanted == "all" and frozen.max_output_len is not None and request.tokens > frozen.max_output_len:
            raise InputError(
                f"seq_len {request.tokens} exceeds max_output_len {frozen.max_output_len}: ask for the last "
                "token only (last_id_only=True), or raise config.max_output_len."
            )
        collected: list[Tensor] = []
        state: Tensor | None = None
        for logits, state in self._steps(request, cache, wanted, abort_event):
            if state is None:
                return None
            if logits is not None:
                collected.append(logits.cpu() if cpu_logits else logits)
        if preprocess_only:
            return None
        answer = collected[0] if len(collected) == 1 else torch.cat(collected, 1)
        return (answer, state) if return_last_state else answer

    def _steps(
        self, request: Request, cache: CacheBase | None, wanted: Outputs, abort: threading.Event | None
    ) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """Each chunk's logits and last state; (None, None) ends an aborted call."""
        frozen, decoder, chain = self._ready()
        layers: Sequence[KeyValues] = cache.layers if cache is not None else [Passing()] * len(decoder.blocks)
        width = cache.width if cache is not None else 1
        pages = torch.arange(request.rows * width, device=chain.device).view(request.rows, width)
        for start, stop in chunks(frozen, request, cache is not None):
            if abort is not None and abort.is_set():
                yield None, None
                return
            early = wanted == "last" and stop < request.tokens
            answer = decoder.forward(request.batch(start, stop, pages, "none" if early else wanted), layers)
            if cache is not None:
                cache.current_seq_len += stop - start
            yield answer

    def _load(self, callback: Callback, callback_gen: Yielding | None) -> Iterator[Any]:
        frozen = self.config.freeze()
        device = pick_device(frozen.device)
        dtype = pick_dtype(frozen.dtype, frozen.stored_dtype, device)
        guard(device, dtype)
        chain = choose(device, dtype)
        checkpoint = open_source(frozen.path, frozen.spec.names, frozen.quantization)
        builder = Builder(frozen.spec, checkpoint, chain, frozen.max_seq_len)
        total, steps, decoder = len(builder), builder.build(), None
        for i in range(total):
            callback(i, total)
            if callback_gen is not None:
                yield from callback_gen(i, total)
            with torch.no_grad():
                decoder = next(steps)
        self._frozen, self._decoder, self._chain, self.loaded = frozen, decoder, chain, True
        callback(total, total)
        if callback_gen is not None:
            yield from callback_gen(total, total)

    def _ready(self) -> tuple[FrozenConfig, Decoder, Chain]:
        if self._frozen is None or self._decoder is None or self._chain is None:
            raise NotLoaded("The model has no weights in memory: call model.load() first.")
        return self._frozen, self._decoder, self._chain

    @staticmethod
    def _drain(steps: Iterator[Any]) -> None:
        for _ in steps:
            pass
