"""`CacheBase`, the public cache, and `CacheLayer`, what it stores of one layer.

`CacheBase` has the geometry, makes the tensors once devices are known, and moves tokens. A `CacheLayer` has one
layer's pages in any format, and its recurrent states; `dense` and `quantized` implement it. The generator's page table
decides which page belongs to which sequence.

A contiguous cache is a paged one with an identity page table: the pages of row i start at page
i · pages_per_row. So `Model.forward(ids, cache)` and a generator with a page table share one attention path.
"""

from __future__ import annotations

import copy
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from ..errors import DoesNotFit, InputError, NotLoaded, Unsupported
from ..kernels.interface import AttnMetadata, KVPages, RecurrentState, StateSlots
from ..memory import anonymous_map, ran_out
from ..spec import StateShape

PAGE_SIZE = 256
"""Tokens in a page."""


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps: KV heads (0 without attention) of `head_dim`, and a recurrent state."""

    kv_heads: int
    head_dim: int
    state: StateShape | None = None


def empty_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Pages of zeros, which take memory as `lazy_zeros` do."""
    return lazy_zeros(
        shape,
        dtype,
        device,
        f"{shape[0] * shape[1]:,} tokens do not fit this memory: the keys of one layer take "
        f"{math.prod(shape) * dtype.itemsize:,} bytes. Ask for fewer tokens (max_seq_len, batch_size) or fewer bits "
        "(CacheQ8, CacheQ4).",
    )


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, problem: str) -> Tensor:
    """Zeros. On a CPU they take no memory until they are written to: few caches are ever full.

    `problem` is the message of the error if they do not fit.
    """
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype, device=device)
    try:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.frombuffer(anonymous_map(size), dtype=dtype).view(shape)
    except (OSError, OverflowError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not ran_out(error):
            raise
        raise DoesNotFit(problem) from error


class CacheLayer(ABC):
    """What a cache stores of one layer: keys and values in pages, (pages, page size, kv_heads, …).

    What is stored for a token depends on that token alone, so tokens and pages may be copied as they are.
    """

    def __init__(self, kv_pages: KVPages) -> None:
        self.kv_pages = kv_pages
        self.state: RecurrentState | None = None
        """The recurrent states of the layer, one in each slot; they do not move with pages."""

    def allocate_state(self, shape: StateShape, slots: int, conv_dtype: torch.dtype) -> None:
        """Make room for that many recurrent states; what the slots hold is undefined until it is written."""
        problem = (
            f"{slots:,} recurrent states do not fit this memory: those of one layer take "
            f"{slots * shape.nbytes(conv_dtype.itemsize):,} bytes. Ask for fewer: a smaller batch_size of the cache, "
            "or a smaller max_batch_size or state_cache_bytes of the generator."
        )
        conv = lazy_zeros((slots, *shape.conv), conv_dtype, self.device, problem)
        matrix = None
        if shape.matrix is not None:
            matrix = lazy_zeros((slots, *shape.matrix), torch.float32, self.device, problem)
        self.state = RecurrentState(conv, matrix)

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.kv_pages.page_size

    @property
    def keys(self) -> tuple[Tensor, ...]:
        """The stored keys, then their scales if they have any."""
        return self.kv_pages.keys

    @property
    def values(self) -> tuple[Tensor, ...]:
        """The stored values, then their scales if they have any."""
        return self.kv_pages.values

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the pages."""
        return self.keys + self.values

    @property
    def state_tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the recurrent states."""
        return () if self.state is None else tuple(tensor for tensor in self.state if tensor is not None)

    @property
    def device(self) -> torch.device:
        """The pages' device."""
        return self.keys[0].device

    @abstractmethod
    def update(self, k: Tensor, v: Tensor, metadata: AttnMetadata) -> tuple[Tensor, Tensor]:
        """Append the new heads to each row's past; return all heads up to max_kv_len.

        Heads are (rows, tokens, kv_heads, head_dim). Past the end of a shorter row they are undefined.
        """

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first tokens of a page to another."""
        if source != target:
            for tensor in self.tensors:
                tensor[target, :tokens] = tensor[source, :tokens]

    def roll_left(self, rows: int) -> None:
        """Drop the first token of each row; the pages of a row are consecutive."""
        for tensor in self.tensors:
            tokens = as_rows(tensor, rows)
            tokens.copy_(tokens.roll(-1, 1))

    def move(self, device: torch.device) -> None:
        """Move the pages to a device."""
        self._replace(lambda tensor: tensor.to(device))

    def clone(self) -> Self:
        """A copy with tensors of its own."""
        clone = copy.copy(self)
        clone._replace(Tensor.clone)
        return clone

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        pages = self.kv_pages
        keys, values = tuple(map(change, pages.keys)), tuple(map(change, pages.values))
        self.kv_pages = KVPages(pages.page_size, keys, values, pages.dtypes)
        if self.state is not None:
            conv, matrix = self.state
            self.state = RecurrentState(change(conv), None if matrix is None else change(matrix))


def as_rows(tensor: Tensor, rows: int) -> Tensor:
    """A view of the pages as contiguous rows, (rows, tokens, …)."""
    return tensor.view(rows, -1, *tensor.shape[2:])


def new_token_positions(metadata: AttnMetadata, tokens: int) -> Tensor:
    """(rows, tokens) the index of each new token in its row."""
    return metadata.past_lens[:, None] + torch.arange(tokens, device=metadata.past_lens.device)


def slot_mapping(metadata: AttnMetadata, tokens: int, page_size: int) -> Tensor:
    """(rows · tokens,) the slot of each new token: its index in the flattened pages."""
    positions = new_token_positions(metadata, tokens)
    return (metadata.page_table.gather(1, positions // page_size).long() * page_size + positions % page_size).flatten()


class CacheReplicator(Protocol):
    """Repeats operations on a cache in other processes, which have its other heads or layers."""

    def replicate_allocation(self, cache: CacheBase) -> None:
        """The cache was allocated."""
        ...

    def replicate_clone(self, cache: CacheBase, clone: CacheBase) -> None:
        """`clone` was cloned from `cache`."""
        ...

    def replicate_call(self, cache: CacheBase, method: str, *values: object, target: CacheBase | None = None) -> None:
        """The method was called with these values."""
        ...


class CacheOwner(Protocol):
    """What a cache needs to know of a model."""

    @property
    def cache_shapes(self) -> Sequence[LayerShape]:
        """The shape of each layer."""
        ...

    @property
    def cache_devices(self) -> Sequence[torch.device] | None:
        """Each layer's device; None while the model is not loaded."""
        ...

    @property
    def cache_dtype(self) -> torch.dtype:
        """The precision of computed keys and values."""
        ...

    @property
    def cache_max_seq_len(self) -> int:
        """The configured sequence length."""
        ...

    @property
    def cache_replicator(self) -> CacheReplicator | None:
        """Repeats operations on caches in other processes; None without other processes."""
        ...


class LayerViews(list[Tensor]):
    """Views of what each layer stores, (batch, tokens, …). A tensor that is assigned to an item is copied into it.

    The tensor may have fewer tokens than the view: then it is copied to the first tokens.
    """

    @torch.no_grad()
    def __setitem__(self, index: Any, value: Any) -> None:
        """Copy a tensor into the layer's; or several, for a slice."""
        if isinstance(index, slice):
            for layer, tensor in zip(range(*index.indices(len(self))), value, strict=True):
                self[layer] = tensor
            return
        view = self[index]
        fits = isinstance(value, Tensor) and value.dim() == view.dim() and value.shape[1] <= view.shape[1]
        if not fits or (value.shape[0], *value.shape[2:]) != (view.shape[0], *view.shape[2:]):
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InputError(f"Layer {index} of this cache stores {tuple(view.shape)}, or fewer tokens; found {found}.")
        view[:, : value.shape[1]].copy_(value)


class CacheBase(ABC):
    """Keys and values of `batch_size` rows of up to `max_seq_len` tokens.

    A cache that is made before its model is loaded is allocated by `load_autosplit` or, unless it is `lazy`,
    when it is first used. `num_key_value_heads` and `fixed_device` are accepted for old
    scripts: the model decides both, and a contradicting value is an error.
    """

    page_size: ClassVar[int] = PAGE_SIZE
    """Tokens in a page."""

    has_scales: ClassVar[bool] = False
    """Whether stored numbers have scales."""

    group_size: ClassVar[int] = 1
    """head_dim must be a multiple of this."""

    def __init__(
        self,
        model: CacheOwner,
        batch_size: int = 1,
        max_seq_len: int = -1,
        copy_from: Self | None = None,
        lazy: bool = False,
        num_key_value_heads: int | None = None,
        fixed_device: int | str | torch.device | None = None,
    ) -> None:
        if lazy and copy_from is not None:
            raise InputError("A lazy cache has no tensors to copy into: use lazy=False with copy_from.")
        are_integers = isinstance(batch_size, Integral) and isinstance(max_seq_len, Integral)
        if not are_integers or batch_size < 1 or max_seq_len == 0 or max_seq_len < -1:
            raise InputError(
                f"A cache needs batch_size of at least 1 and max_seq_len of at least 1 (or -1: the model's "
                f"own), both whole numbers; found {batch_size!r} and {max_seq_len!r}."
            )
        self.model = model
        self.batch_size = batch_size
        self.max_seq_len = model.cache_max_seq_len if max_seq_len == -1 else max_seq_len
        self.layer_shapes = tuple(model.cache_shapes)
        self.current_seq_len = 0
        self._last_writer: weakref.ref[object] | None = None
        self._num_state_slots = 0
        self._state_lengths: list[int] = []
        """Tokens that the states in each half of the slots have seen, while `forward` uses the cache."""
        self._required_device = None if fixed_device is None else _parse_device(fixed_device)
        self._layers: list[CacheLayer] | None = None
        self._lazy = lazy
        self._check_shapes(num_key_value_heads)
        if not lazy and model.cache_devices is not None:
            self.allocate()
        if copy_from is not None:
            self._copy_from(copy_from)

    # Geometry

    @property
    def pages_per_row(self) -> int:
        """Pages of a row."""
        return -(-self.max_seq_len // PAGE_SIZE)

    @property
    def num_pages(self) -> int:
        """Pages of all rows."""
        return self.pages_per_row * self.batch_size

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the model."""
        return len(self.layer_shapes)

    @property
    def num_key_value_heads(self) -> int | list[int]:
        """KV heads of a layer; a list of each layer's, if layers differ."""
        return _one_or_list([shape.kv_heads for shape in self.layer_shapes])

    @property
    def head_dim(self) -> int | list[int]:
        """Elements of a head; a list of each layer's, if layers differ."""
        return _one_or_list([shape.head_dim for shape in self.layer_shapes])

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The type of the stored numbers."""

    def identity_page_table(self, rows: int, device: torch.device) -> Tensor:
        """(rows, pages_per_row) page table in which each row has consecutive pages of its own."""
        return torch.arange(rows * self.pages_per_row, device=device).view(rows, self.pages_per_row)

    # Tensors

    @property
    def allocated(self) -> bool:
        """Whether the tensors exist."""
        return self._layers is not None

    @property
    def layers(self) -> list[CacheLayer]:
        """The layers' pages, allocated if they are not yet."""
        if self._layers is None and not self._lazy:
            self.allocate()  # the cache was made before the model was loaded
        if self._layers is None:
            raise NotLoaded(
                "This cache was made with lazy=True and has no tensors yet: pass it to "
                "model.load_autosplit(cache), or call cache.allocate() after model.load()."
            )
        return self._layers

    def allocate(self) -> None:
        """Allocate the tensors, each on its layer's device."""
        devices = self._layer_devices()
        self.last_writer = None  # the new tensors are empty
        # A model that was loaded again may have another number of heads in this process.
        self.layer_shapes = tuple(self.model.cache_shapes)
        with torch.inference_mode(False):  # inference tensors could not be written to outside that mode
            self._layers = [
                self._make_layer(shape, device) for shape, device in zip(self.layer_shapes, devices, strict=True)
            ]
        self.allocate_states(2 * self.batch_size)
        if (replicator := self.model.cache_replicator) is not None:
            replicator.replicate_allocation(self)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's recurrent states in all layers; 0 for a model without recurrent layers."""
        return sum(shape.state.nbytes(self._conv_dtype.itemsize) for shape in self.layer_shapes if shape.state)

    @property
    def default_state_cache_bytes(self) -> int:
        """What a generator may take for recurrent states if it is not told.

        2 GiB on a CPU, where a slot takes memory once it is written to; a quarter of a GPU's free memory.
        """
        device = next((layer.device for layer in self.layers if layer.state is not None), torch.device("cpu"))
        return 2 << 30 if device.type == "cpu" else torch.cuda.mem_get_info(device)[0] // 4

    @property
    def num_state_slots(self) -> int:
        """How many recurrent states there is room for."""
        return self._num_state_slots

    def allocate_states(self, slots: int) -> None:
        """Make room for that many recurrent states in place of those that are there; nothing without such layers."""
        self._num_state_slots, self._state_lengths = slots, [0, 0]
        with torch.inference_mode(False):
            for shape, layer in zip(self.layer_shapes, self.layers, strict=True):
                if shape.state is not None:
                    layer.allocate_state(shape.state, slots, self._conv_dtype)

    @property
    def _conv_dtype(self) -> torch.dtype:
        """The precision of a convolution's last inputs: as they are computed."""
        return self.model.cache_dtype

    def next_state_slots(self, rows: int, tokens: int, device: torch.device) -> StateSlots | None:
        """Where `forward` finds and leaves the states of its rows when it appends tokens; None without states.

        Row i has slots i and batch_size + i and alternates between them, so that the last call can be taken back.
        """
        if not any(shape.state for shape in self.layer_shapes):
            return None
        past = self.current_seq_len
        if past and past not in self._state_lengths:
            raise InputError(
                f"This model keeps a recurrent state, which cannot go back to {past} tokens: the cache holds the "
                f"states after {' and '.join(str(n) for n in sorted(set(self._state_lengths)))} tokens. Start again "
                "with cache.reset(), or take back only what the last call of forward added."
            )
        if not past:
            self._state_lengths = [0, 0]  # of a sequence that ended
        source_half = self._state_lengths.index(past) if past else 1
        target_half = 1 - source_half
        self._state_lengths[target_half] = past + tokens
        row = torch.arange(rows, device=device)
        source = row + source_half * self.batch_size if past else torch.full_like(row, -1)
        targets = torch.full((rows, tokens), -1, device=device)
        targets[:, -1] = row + target_half * self.batch_size
        return StateSlots(source, targets)

    def release(self) -> None:
        """Free the tensors; `allocate` makes new ones."""
        self._layers = self._last_writer = None
        self.current_seq_len = 0

    def update_cache_tensors(self) -> None:
        """Move the tensors to the layers' present devices; allocate a lazy cache."""
        if self._layers is None:
            self.allocate()
            return
        for layer, device in zip(self._layers, self._layer_devices(), strict=True):
            layer.move(device)

    def touch_device(self, device: int | str | torch.device) -> None:
        """Check the name only: there is no scratch copy to prepare. Kept for old scripts."""
        _parse_device(device)

    def all_tensors(self) -> list[Tensor]:
        """All tensors with state."""
        return [tensor for layer in self.layers for tensor in layer.tensors + layer.state_tensors]

    def _page_tensors(self) -> list[Tensor]:
        return [tensor for layer in self.layers for tensor in layer.tensors]

    def layer_bytes(self) -> list[int]:
        """Bytes of each layer's pages, known before they are allocated."""
        layers = [self._make_layer(shape, torch.device("meta")) for shape in self.layer_shapes]
        pages = [sum(tensor.nbytes for tensor in layer.tensors) for layer in layers]
        rows = 2 * self.batch_size
        conv_bytes = self._conv_dtype.itemsize
        states = (rows * shape.state.nbytes(conv_bytes) if shape.state else 0 for shape in self.layer_shapes)
        return [page_bytes + state_bytes for page_bytes, state_bytes in zip(pages, states, strict=True)]

    def footprint(self) -> list[int]:
        """Bytes of the allocated tensors on each device, in the order of the layers' devices."""
        sums: dict[torch.device, int] = {}
        for tensor in self.all_tensors():
            sums[tensor.device] = sums.get(tensor.device, 0) + tensor.nbytes
        return list(sums.values())

    @property
    def key_states(self) -> LayerViews:
        """Views of each layer's stored keys, (batch, capacity in whole pages, kv_heads, …).

        An assigned tensor is copied.
        """
        return LayerViews(as_rows(layer.keys[0], self.batch_size) for layer in self.layers)

    @property
    def value_states(self) -> LayerViews:
        """Views of each layer's stored values, as `key_states`."""
        return LayerViews(as_rows(layer.values[0], self.batch_size) for layer in self.layers)

    @property
    def key_scales(self) -> LayerViews:
        """Views of each layer's key scales: (batch, capacity, kv_heads, head_dim / 32), or none."""
        return LayerViews(as_rows(scales, self.batch_size) for layer in self.layers for scales in layer.keys[1:])

    @property
    def value_scales(self) -> LayerViews:
        """Views of each layer's scales of values, as `key_scales`."""
        return LayerViews(as_rows(scales, self.batch_size) for layer in self.layers for scales in layer.values[1:])

    # Moving tokens

    @property
    def last_writer(self) -> object:
        """The runner that wrote to the pages last; None if `Model.forward` or a method of the cache wrote last.

        It is None, too, before the first write. If the runner no longer exists, this is its dead weak reference,
        which equals no runner. The cache refers to the runner weakly: the runner refers to the cache, and a
        cycle would keep both and the weights in memory.
        """
        return None if self._last_writer is None else (self._last_writer() or self._last_writer)

    @last_writer.setter
    def last_writer(self, runner: object) -> None:
        self._last_writer = None if runner is None else weakref.ref(runner)
        if runner is not None:
            self._state_lengths = [0, 0]  # the runner's states are in these slots now

    def reset(self) -> None:
        """Start a new sequence; keeps the tensors."""
        self.current_seq_len = 0

    def roll_left(self) -> None:
        """Drop the first token of every row; the others move up by one."""
        self._refuse_recurrent("roll_left")
        for layer in self.layers:
            layer.roll_left(self.batch_size)
        self.last_writer = None
        self._replicate_call("roll_left")
        self.current_seq_len = max(0, self.current_seq_len - 1)

    def clone(self) -> Self:
        """A deep copy; of a lazy cache that is not allocated, another such cache."""
        clone = copy.copy(self)
        clone._state_lengths = [*self._state_lengths]
        clone._layers = None if self._layers is None else [layer.clone() for layer in self._layers]
        if self.allocated and (replicator := self.model.cache_replicator) is not None:
            replicator.replicate_clone(self, clone)
        return clone

    def copy(self, copies: Iterable[tuple[int, int, int]]) -> None:
        """Copy the first tokens of pages in all layers: (source, target, tokens), in this order."""
        copies = list(copies)
        for source, target, tokens in copies:
            if not (0 <= source < self.num_pages and 0 <= target < self.num_pages and 0 <= tokens <= PAGE_SIZE):
                raise InputError(
                    f"Cannot copy {tokens} tokens of page {source} to page {target}: this cache has pages 0 "
                    f"to {self.num_pages - 1} of {PAGE_SIZE} tokens."
                )
        for layer in self.layers:
            for source, target, tokens in copies:
                layer.copy(source, target, tokens)
        if copies:
            self._replicate_call("copy", copies)

    def copy_states(
        self,
        target: Self,
        from_column: int,
        from_columns: int,
        to_column: int,
        to_columns: int,
        from_row: int,
        from_rows: int,
        to_row: int,
        to_rows: int,
    ) -> None:
        """Copy a row's tokens, as stored, to one or more rows of another cache or of this one."""
        self._refuse_recurrent("copy_states")
        self._check_copy(target, from_column, from_columns, to_column, to_columns, from_row, from_rows)
        if to_row < 0 or to_rows < 1 or to_row + to_rows > target.batch_size:
            raise InputError(f"Rows {to_row} to {to_row + to_rows} are not in a cache of {target.batch_size}.")
        for source, target_tensor in zip(self._page_tensors(), target._page_tensors(), strict=True):
            tokens = as_rows(source, self.batch_size)[from_row, from_column : from_column + from_columns].clone()
            as_rows(target_tensor, target.batch_size)[to_row : to_row + to_rows, to_column : to_column + to_columns] = (
                tokens
            )
        target.last_writer = None
        columns = from_column, from_columns, to_column, to_columns
        self._replicate_call("copy_states", *columns, from_row, from_rows, to_row, to_rows, target=target)

    def _refuse_recurrent(self, method: str) -> None:
        if any(shape.state for shape in self.layer_shapes):
            raise Unsupported(
                f"{method} moves single tokens of a cache, and a recurrent state has none: this model's layers keep "
                "one. cache.clone() copies the whole cache."
            )

    def _replicate_call(self, method: str, *values: object, target: CacheBase | None = None) -> None:
        if (replicator := self.model.cache_replicator) is not None:
            replicator.replicate_call(self, method, *values, target=target)

    def _check_copy(
        self, target: Self, from_column: int, from_columns: int, to_column: int, to_columns: int, row: int, rows: int
    ) -> None:
        if type(target) is not type(self) or target.layer_shapes != self.layer_shapes:
            raise InputError(
                f"A {type(self).__name__} gives its tokens only to a cache of the same kind and of the same "
                f"model, found a {type(target).__name__}."
            )
        if rows != 1 or not 0 <= row < self.batch_size:
            raise InputError(f"copy_states reads one row that exists, found from_row={row}, from_rows={rows}.")
        if from_columns != to_columns or from_columns < 0 or from_column < 0 or to_column < 0:
            raise InputError(f"copy_states needs equal ranges, found {from_columns} and {to_columns} columns.")
        if from_column + from_columns > self.max_seq_len or to_column + to_columns > target.max_seq_len:
            raise InputError(
                f"copy_states reaches column {max(from_column, to_column) + from_columns}, beyond "
                f"max_seq_len {self.max_seq_len} or {target.max_seq_len}."
            )

    def _copy_from(self, other: Self) -> None:
        rows, columns = min(self.batch_size, other.batch_size), min(self.max_seq_len, other.max_seq_len)
        for row in range(rows):
            other.copy_states(self, 0, columns, 0, columns, row, 1, row, 1)
        self.current_seq_len = min(other.current_seq_len, columns)

    def _layer_devices(self) -> Sequence[torch.device]:
        devices = self.model.cache_devices
        if devices is None:
            raise NotLoaded(
                "A cache is placed beside the model's layers, which are not loaded yet: call model.load() "
                "first, or make the cache with lazy=True and pass it to model.load_autosplit(cache)."
            )
        for index, device in enumerate(devices):
            if self._required_device is not None and not _same_device(self._required_device, device):
                raise InputError(
                    f"fixed_device is {self._required_device}, but layer {index} of the model is on "
                    f"{device}: leave the argument out. A cache goes where the layers are."
                )
        return devices

    def _check_shapes(self, kv_heads: int | None) -> None:
        for index, shape in enumerate(self.layer_shapes):
            if kv_heads not in (None, shape.kv_heads):
                raise InputError(
                    f"num_key_value_heads is {kv_heads}, but layer {index} of the model has "
                    f"{shape.kv_heads}: leave the argument out."
                )
            if shape.head_dim % self.group_size:
                raise Unsupported(
                    f"{type(self).__name__} stores heads in groups of {self.group_size} numbers, but "
                    f"head_dim is {shape.head_dim} in layer {index}. "
                    "Use CacheFP8 or Cache, which take any head_dim."
                )

    @abstractmethod
    def _make_layer(self, shape: LayerShape, device: torch.device) -> CacheLayer: ...


def _parse_device(requested: int | str | torch.device) -> torch.device:
    try:
        return torch.device("cuda", requested) if isinstance(requested, int) else torch.device(requested)
    except RuntimeError as error:
        raise InputError(f"{requested!r} is not a device: use 'cpu', 'cuda' or 'cuda:0'.") from error


def _same_device(a: torch.device, b: torch.device) -> bool:
    """Whether both are one device; "cuda" is "cuda:0"."""
    return (a.type, a.index or 0) == (b.type, b.index or 0)


def _one_or_list(numbers: list[int]) -> int | list[int]:
    return numbers[0] if len(set(numbers)) == 1 else numbers
