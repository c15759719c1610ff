"""The cache users hold: geometry first, tensors when the devices are known.

A contiguous cache is a paged one whose table is the identity: row `b` owns the pages from b · width on. So a
plain `Model.forward(ids, cache)` and a generator that deals pages out share one attention path. How a layer's
numbers are stored is left to the subclasses.
"""

from __future__ import annotations

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from ..errors import InputError, NotLoaded, Unsupported
from .layer import PAGE_SIZE, CacheLayer, LayerShape


class CacheReplicator(Protocol):
    """Who repeats what is done to a cache in the processes that keep its other heads."""

    def replicate_allocation(self, cache: CacheBase) -> None:
        """It has tensors now."""
        ...

    def replicate_clone(self, cache: CacheBase, twin: CacheBase) -> None:
        """The twin is a copy of it."""
        ...

    def replicate_call(
        self, cache: CacheBase, method: str, *values: object, target: CacheBase | None = None
    ) -> None:
        """This method was called, with these values."""
        ...


class CacheOwner(Protocol):
    """What a cache must know of a model."""

    @property
    def cache_shapes(self) -> Sequence[LayerShape]:
        """One for each layer."""
        ...

    @property
    def cache_devices(self) -> Sequence[torch.device] | None:
        """Where each layer is; None while the model is not loaded."""
        ...

    @property
    def cache_dtype(self) -> torch.dtype:
        """The precision keys and values arrive in."""
        ...

    @property
    def cache_max_seq_len(self) -> int:
        """The configured sequence length."""
        ...

    @property
    def cache_replicator(self) -> CacheReplicator | None:
        """Who must be told what is done to a cache; None: nobody."""
        ...


class LayerViews(list[Tensor]):
    """Views of what each layer stores, (batch, tokens, …). A tensor assigned to one is copied into it.

    It may have fewer tokens than the layer has room for, as one that was saved before.
    """

    @torch.no_grad()
    def __setitem__(self, index: Any, value: Any) -> None:
        """Store a tensor in place of what the layer holds; or several, for a slice."""
        if isinstance(index, slice):
            for one, tensor in zip(range(*index.indices(len(self))), value, strict=True):
                self[one] = tensor
            return
        view = self[index]
        fits = isinstance(value, Tensor) and value.dim() == view.dim() and value.shape[1] <= view.shape[1]
        if not fits or (value.shape[0], *value.shape[2:]) != (view.shape[0], *view.shape[2:]):
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InputError(
                f"Layer {index} of this cache stores {tuple(view.shape)}, or fewer tokens; found {found}."
            )
        view[:, : value.shape[1]].copy_(value)


class CacheBase(ABC):
    """Keys and values of `batch_size` rows of up to `max_seq_len` tokens, of one precision or another.

    Made before the model is loaded it gets its tensors when the model has its own: from `load_autosplit`, or,
    unless `lazy`, when it is first used. `num_key_value_heads` and `fixed_device` are accepted for old
    scripts: the model decides both, and a wish that contradicts it is an error.
    """

    has_scales: ClassVar[bool] = False
    """Whether numbers are stored with scales beside them."""

    group_size: ClassVar[int] = 1
    """Numbers of a head that are stored together: head_dim must be a multiple."""

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
        """Pages of one row."""
        return -(-self.max_seq_len // PAGE_SIZE)

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return self.pages_per_row * self.batch_size

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the model."""
        return len(self.layer_shapes)

    @property
    def num_key_value_heads(self) -> int | list[int]:
        """Heads a layer stores for a token; a list, one for each layer, where layers differ."""
        return _one_or_list([shape.kv_heads for shape in self.layer_shapes])

    @property
    def head_dim(self) -> int | list[int]:
        """Numbers in a head; a list, one for each layer, where layers differ."""
        return _one_or_list([shape.head_dim for shape in self.layer_shapes])

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The type of the stored numbers."""

    def identity_page_table(self, rows: int, device: torch.device) -> Tensor:
        """(rows, width) the identity: row b owns its own stretch of pages."""
        return torch.arange(rows * self.pages_per_row, device=device).view(rows, self.pages_per_row)

    # Tensors

    @property
    def allocated(self) -> bool:
        """Whether the tensors exist."""
        return self._layers is not None

    @property
    def layers(self) -> list[CacheLayer]:
        """One for each layer of the model."""
        if self._layers is None and not self._lazy:
            self.allocate()  # it was made before the model was loaded
        if self._layers is None:
            raise NotLoaded(
                "This cache was made with lazy=True and has no tensors yet: pass it to "
                "model.load_autosplit(cache), or call cache.allocate() after model.load()."
            )
        return self._layers

    def allocate(self) -> None:
        """Make the tensors, each beside its layer's weights."""
        devices = self._layer_devices()
        self.last_writer = None  # what was in it is gone
        self.layer_shapes = tuple(self.model.cache_shapes)  # a process may have got fewer heads since
        with torch.inference_mode(False):  # tensors born in that mode could not be written to outside it
            self._layers = [
                self._make_layer(shape, device)
                for shape, device in zip(self.layer_shapes, devices, strict=True)
            ]
        if (mirror := self.model.cache_replicator) is not None:
            mirror.replicate_allocation(self)

    def release(self) -> None:
        """Let go of the tensors and what they hold; `allocate` makes new ones."""
        self._layers = self._last_writer = None
        self.current_seq_len = 0

    def update_cache_tensors(self) -> None:
        """Follow the model's layers to where they are now; a lazy cache gets its tensors."""
        if self._layers is None:
            self.allocate()
            return
        for layer, device in zip(self._layers, self._layer_devices(), strict=True):
            layer.move(device)

    def touch_device(self, device: int | str | torch.device) -> None:
        """Nothing but a check of the name: there is no scratch copy to prepare. Kept for old scripts."""
        _parse_device(device)

    def all_tensors(self) -> list[Tensor]:
        """Every tensor that holds state."""
        return [tensor for layer in self.layers for tensor in layer.tensors]

    def layer_bytes(self) -> list[int]:
        """Bytes of each layer, also before the tensors exist."""
        layers = [self._make_layer(shape, torch.device("meta")) for shape in self.layer_shapes]
        return [sum(tensor.nbytes for tensor in layer.tensors) for layer in layers]

    def footprint(self) -> list[int]:
        """Bytes on each device, in the order the devices appear."""
        sums: dict[torch.device, int] = {}
        for tensor in self.all_tensors():
            sums[tensor.device] = sums.get(tensor.device, 0) + tensor.nbytes
        return list(sums.values())

    @property
    def key_states(self) -> LayerViews:
        """For each layer a view of what is stored, (batch, capacity in whole pages, kv_heads, …).

        A tensor that is assigned to one of them is copied into it.
        """
        return LayerViews(_as_rows(layer.keys[0], self.batch_size) for layer in self.layers)

    @property
    def value_states(self) -> LayerViews:
        """Like `key_states`."""
        return LayerViews(_as_rows(layer.values[0], self.batch_size) for layer in self.layers)

    @property
    def key_scales(self) -> LayerViews:
        """For each layer a view, (batch, capacity, kv_heads, head_dim / 32); empty without scales."""
        return LayerViews(
            _as_rows(scales, self.batch_size) for layer in self.layers for scales in layer.keys[1:]
        )

    @property
    def value_scales(self) -> LayerViews:
        """Like `key_scales`."""
        return LayerViews(
            _as_rows(scales, self.batch_size) for layer in self.layers for scales in layer.values[1:]
        )

    # Moving tokens

    @property
    def last_writer(self) -> object:
        """Which runner wrote to its pages last; None if rows were written in order or moved, or none were.

        It is not held: runners hold their cache, and a circle would keep it in memory, and the weights.
        """
        return None if self._last_writer is None else (self._last_writer() or self._last_writer)

    @last_writer.setter
    def last_writer(self, runner: object) -> None:
        self._last_writer = None if runner is None else weakref.ref(runner)

    def reset(self) -> None:
        """Forget the sequence; the tensors stay."""
        self.current_seq_len = 0

    def roll_left(self) -> None:
        """Drop the first token of every row: the others move up, and the sequence is one shorter."""
        for tensor in self.all_tensors():
            rows = _as_rows(tensor, self.batch_size)
            rows.copy_(rows.roll(-1, 1))
        self.last_writer = None
        self._replicate_call("roll_left")
        self.current_seq_len = max(0, self.current_seq_len - 1)

    def clone(self) -> Self:
        """A deep copy, of the same class; of a lazy cache without tensors, another one."""
        twin = copy.copy(self)
        twin._layers = None if self._layers is None else [layer.clone() for layer in self._layers]
        if self.allocated and (mirror := self.model.cache_replicator) is not None:
            mirror.replicate_clone(self, twin)
        return twin

    def copy(self, orders: Iterable[tuple[int, int, int]]) -> None:
        """Duplicate the leading tokens of pages in every layer: (source, target, tokens), one by one."""
        copies = list(orders)
        for source, target, tokens in copies:
            if not (
                0 <= source < self.num_pages and 0 <= target < self.num_pages and 0 <= tokens <= PAGE_SIZE
            ):
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
        """Copy the tokens of one row, as stored, to one or more rows of another cache (or of this one)."""
        self._check_copy(target, from_column, from_columns, to_column, to_columns, from_row, from_rows)
        if to_row < 0 or to_rows < 1 or to_row + to_rows > target.batch_size:
            raise InputError(
                f"Rows {to_row} to {to_row + to_rows} are not in a cache of {target.batch_size}."
            )
        for source, target_tensor in zip(self.all_tensors(), target.all_tensors(), strict=True):
            tokens = _as_rows(source, self.batch_size)[
                from_row, from_column : from_column + from_columns
            ].clone()
            _as_rows(target_tensor, target.batch_size)[
                to_row : to_row + to_rows, to_column : to_column + to_columns
            ] = tokens
        target.last_writer = None
        columns = from_column, from_columns, to_column, to_columns
        self._replicate_call("copy_states", *columns, from_row, from_rows, to_row, to_rows, target=target)

    def _replicate_call(self, method: str, *values: object, target: CacheBase | None = None) -> None:
        if (mirror := self.model.cache_replicator) is not None:
            mirror.replicate_call(self, method, *values, target=target)

    def _check_copy(
        self,
        target: Self,
        from_column: int,
        from_columns: int,
        to_column: int,
        to_columns: int,
        row: int,
        rows: int,
    ) -> None:
        if type(target) is not type(self) or target.layer_shapes != self.layer_shapes:
            raise InputError(
                f"A {type(self).__name__} gives its tokens only to a cache of the same kind and of the same "
                f"model, found a {type(target).__name__}."
            )
        if rows != 1 or not 0 <= row < self.batch_size:
            raise InputError(
                f"copy_states reads one row that exists, found from_row={row}, from_rows={rows}."
            )
        if from_columns != to_columns or from_columns < 0 or from_column < 0 or to_column < 0:
            raise InputError(
                f"copy_states needs equal ranges, found {from_columns} and {to_columns} columns."
            )
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
    return (a.type, a.index or 0) == (b.type, b.index or 0)


def _one_or_list(numbers: list[int]) -> int | list[int]:
    return numbers[0] if len(set(numbers)) == 1 else numbers


def _as_rows(tensor: Tensor, batch: int) -> Tensor:
    """Pages as contiguous rows: (batch, tokens, …)."""
    return tensor.view(batch, -1, *tensor.shape[2:])
