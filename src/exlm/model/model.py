"""`Model`, the public class: load, forward, unload."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..config import FrozenConfig
from ..errors import InputError, NotLoaded
from ..kernels.dispatch import BackendList
from ..kernels.interface import Backend, LayerKVCache
from ..kvcache import CacheBase, CacheReplicator, LayerShape, NoCache
from ..lora import ModelHandle, active_loras, resolve_loras
from ..multimodal import MMEmbedding
from ..nn.batch import Outputs
from ..spec.model import matrices
from .decoder import Decoder
from .inputs import (
    EMBED_HERE,
    ForwardRequest,
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
from .instance import kv_shapes, model_dtype
from .loader import LoadableModel
from .model_runner import PagedModelRunner

ATTENTION_MATRIX = re.compile(r"layers\.\d+\.attn\.[qkvo]")


class Model(LoadableModel):
    """A language model: make it with `Model(config)`, `load()` it, then call `forward(ids, cache)`."""

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
            return self._loaded.module_backends[0].dtype
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
        frozen, decoder, backends = self._require_loaded()
        assert self._loaded is not None
        return ModelHandle(decoder, self._loaded.full_spec or frozen.spec, self._loaded.device_of, backends.dtype)

    def make_extras(self, ids: Sequence[int], loras: Any = None, embeddings: Any = None) -> SequenceExtras:
        """Check a prompt's ids, LoRAs and embeddings; returns what it has besides its ids.

        `loras`: a LoRA or a list of them, each maybe in a pair with its scale; `embeddings`:
        the `MMEmbedding` objects whose ids are in the prompt.
        """
        frozen, decoder, _ = self._require_loaded()
        mm_embeddings = check_embeddings(embeddings, frozen.spec.hidden)
        check_ids(ids, mm_embeddings, frozen.spec.vocab)
        return SequenceExtras(
            active_loras(decoder, loras),
            mm_embeddings,
            tuple(lora for lora, _ in resolve_loras(decoder, loras)),
            prompt_mrope_positions(frozen.spec, ids, mm_embeddings),
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
        frozen, decoder, backends = self._require_loaded()
        assert self._loaded is not None
        self._check_cache_shapes(cache)
        mrope = uses_mrope(frozen.spec)
        runner = PagedModelRunner(decoder, cache, backends.device, mrope, self._loaded.max_graph_tokens)
        self._runners.add(runner)
        return runner

    @property
    def backends(self) -> Sequence[Backend]:
        """The backends of the first module, fastest first."""
        return self._require_loaded()[2].backends

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
            return _forward_per_row_caches(
                self.forward,
                *(input_ids, cache, input_mask, position_offsets, positions),
                preprocess_only=preprocess_only,
                last_id_only=last_id_only,
                loras=loras,
                return_last_state=return_last_state,
                abort_event=abort_event,
                cpu_logits=cpu_logits,
                indexed_embeddings=indexed_embeddings,
            )
        frozen, decoder, backends = self._require_loaded()
        if cache is not None:
            self._check_cache_shapes(cache)
        request = check_forward_inputs(
            *(frozen, input_ids, cache, input_mask, position_offsets, positions),
            *(backends.device, active_loras(decoder, loras), indexed_embeddings),
        )
        requested = requested_outputs(frozen, request, preprocess_only, last_id_only)
        collected: list[Tensor] = []
        state: Tensor | None = None
        for logits, state in self._forward_chunks(request, cache, requested, abort_event):
            if state is None:
                return None
            if logits is not None:
                collected.append(logits.cpu() if cpu_logits else logits)
        if preprocess_only:
            return None
        all_logits = collected[0] if len(collected) == 1 else torch.cat(collected, 1)
        return (all_logits, state) if return_last_state else all_logits

    def _forward_chunks(
        self, request: ForwardRequest, cache: CacheBase | None, requested: Outputs, abort: threading.Event | None
    ) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """Logits and last state of each chunk; (None, None) ends an aborted call."""
        frozen, decoder, backends = self._require_loaded()
        layers: Sequence[LayerKVCache] = cache.layers if cache is not None else [NoCache()] * len(decoder.blocks)
        width = cache.pages_per_row if cache is not None else 1
        pages = torch.arange(request.rows * width, device=backends.device).view(request.rows, width)
        for start, stop in chunk_ranges(frozen, request, cache is not None):
            if abort is not None and abort.is_set():
                yield None, None
                return
            before_last = requested == "last" and stop < request.tokens
            output = decoder.forward(
                request.chunk_batch(start, stop, pages, "none" if before_last else requested), layers
            )
            if cache is not None:
                cache.current_seq_len += stop - start
                cache.last_writer = None
            yield output

    def _check_cache_shapes(self, cache: CacheBase) -> None:
        """Raise for a cache with other layer shapes, since kernels write by the model's own."""
        if cache.model is not self and cache.layer_shapes != (own := tuple(self.cache_shapes)):
            raise InputError(
                f"This cache was made for another model: it has {_describe_shapes(cache.layer_shapes)}, "
                f"this model {_describe_shapes(own)}. Make one with {type(cache).__name__}(model)."
            )

    def _require_loaded(self) -> tuple[FrozenConfig, Decoder, BackendList]:
        if self._loaded is None:
            raise NotLoaded("The model has no weights in memory: call model.load() first.")
        return self._loaded.config, self._loaded.decoder, self._loaded.module_backends[0]


def _forward_per_row_caches(
    forward: Callable[..., Any],
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
        forward(
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


def _describe_shapes(shapes: Sequence[LayerShape]) -> str:
    """The layers' shapes, for an error message."""
    heads, sizes = ({getattr(shape, name) for shape in shapes} for name in ("kv_heads", "head_dim"))
    described = ["/".join(map(str, sorted(found))) for found in (heads, sizes)]
    return f"{len(shapes)} layers with {described[0]} heads of {described[1]}"
