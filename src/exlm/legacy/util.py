"""Functions and classes of exllamav2 that scripts use in their own code; exlm itself uses none of them.

A growing tensor, a timer, GPU memory reports, hooks around layers and after sampling, the interface of
`tokenizer.tokenizer_model`, and token ids read from a dataset. Without a GPU the reports are empty.
"""

from __future__ import annotations

import gc
import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise as pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from ..errors import InputError, NotLoaded
from ..kvcache import Cache, CacheBase
from ..model import Model
from ..sampling import PostSamplingResult
from ..tokenizer import Tokenizer

if TYPE_CHECKING:
    from rich.progress import Progress

HiddenStatesHook = Callable[[Tensor], Tensor]
INITIAL_CAPACITY = 256
MIB = 2**20

BROADCAST_KV, BROADCAST_ID, BROADCAST_VC, BROADCAST_RS, BROADCAST_Q = range(5)
"""Constants of `exllamav2.tensor_p`: how a tensor is split over devices."""

global_streams: dict[int, Any] = {}
"""CUDA streams that the library created, by device: none, exlm uses torch's current streams."""


class SeqTensor:
    """A tensor that grows along `seq_dim`; the first `len(self)` entries of its storage are in use.

    It starts empty: the size of `shape` along `seq_dim` is ignored. An append beyond the capacity at
    least doubles it and copies the entries.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        seq_dim: int,
        device: torch.device | str | int = "cpu",
        init_cap: int = -1,
    ) -> None:
        if not -len(shape) <= seq_dim < len(shape):
            raise InputError(f"seq_dim {seq_dim} is not a dimension of the shape {tuple(shape)}.")
        self.seq_dim = seq_dim % len(shape)
        capacity = list(shape)
        capacity[self.seq_dim] = INITIAL_CAPACITY if init_cap < 0 else init_cap
        self._storage = torch.empty(capacity, dtype=dtype, device=device)
        self._used = 0

    @classmethod
    def from_tensor(cls, tensor: Tensor, seq_dim: int) -> Self:
        """A `SeqTensor` with a copy of a tensor."""
        out = cls(tensor.shape, tensor.dtype, seq_dim, tensor.device, tensor.shape[seq_dim])
        out.append(tensor)
        return out

    def __len__(self) -> int:
        return self._used

    def __bool__(self) -> bool:
        return self._used > 0

    @property
    def capacity(self) -> int:
        """The number of entries that fit without growing."""
        return self._storage.shape[self.seq_dim]

    def torch(self) -> Tensor:
        """A view of everything in use."""
        return self.torch_slice(None, None)

    def torch_slice(self, a: int | None, b: int | None) -> Tensor:
        """A view of entries a to b; negative ones count from the end, as in Python."""
        start, stop, _ = slice(a, b).indices(self._used)
        return self._storage.narrow(self.seq_dim, start, max(0, stop - start))

    def slice(self, a: int | None, b: int | None) -> Tensor:
        """A copy of entries a to b."""
        return self.torch_slice(a, b).clone()

    def append(self, new: Tensor | SeqTensor | None) -> None:
        """Append a copy of these entries; None appends nothing."""
        if new is None:
            return
        added = new.torch() if isinstance(new, SeqTensor) else new
        self._check(added)
        count = added.shape[self.seq_dim]
        self._reserve(self._used + count)
        self._storage.narrow(self.seq_dim, self._used, count).copy_(added)
        self._used += count

    def truncate(self, new_len: int) -> None:
        """Keep only the first entries."""
        if not 0 <= new_len <= self._used:
            raise InputError(f"Cannot truncate {self._used} entries to {new_len}.")
        self._used = new_len

    def clear(self) -> None:
        """Drop all entries and keep the capacity."""
        self._used = 0

    def set(self, new: Tensor | SeqTensor | None = None) -> None:
        """Replace all entries by a copy of these."""
        kept = new.torch().clone() if isinstance(new, SeqTensor) else new
        self.clear()
        self.append(kept)

    def clone(self, drop: int | None = None) -> SeqTensor:
        """A copy without the last `drop` entries."""
        kept = self._used - (drop or 0)
        if not 0 <= kept <= self._used:
            raise InputError(f"Cannot drop {drop} of {self._used} entries.")
        return SeqTensor.from_tensor(self.torch_slice(0, kept), self.seq_dim)

    def _reserve(self, needed: int) -> None:
        if needed <= self.capacity:
            return
        size = list(self._storage.shape)
        size[self.seq_dim] = max(needed, 2 * self.capacity)
        wider = self._storage.new_empty(size)
        wider.narrow(self.seq_dim, 0, self._used).copy_(self.torch())
        self._storage = wider

    def _check(self, added: Tensor) -> None:
        expected, found = list(self._storage.shape), list(added.shape)
        if len(found) == len(expected):
            expected[self.seq_dim] = found[self.seq_dim]
        if found != expected or added.dtype != self._storage.dtype:
            raise InputError(
                f"Expected {self._storage.dtype} of shape {tuple(expected)}, free only along dimension "
                f"{self.seq_dim}; found {added.dtype} of shape {tuple(found)}."
            )


class Timer:
    """Times a block: `with Timer() as t: …`, then `t.interval` in seconds."""

    start_time: float = 0.0
    end_time: float = 0.0
    interval: float = 0.0

    def __enter__(self) -> Self:
        self.start_time = time.perf_counter()
        return self

    def __exit__(self, *raised: object) -> None:
        self.end_time = time.perf_counter()
        self.interval = self.end_time - self.start_time


def get_basic_progress() -> Progress:
    """A progress bar of rich: `with get_basic_progress() as bar: task = bar.add_task("Jobs", total=9)`."""
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    text = TextColumn("{task.description}")
    return Progress(text, BarColumn(None), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())


def set_device_streams() -> None:
    """Do nothing: exlm uses torch's current streams."""


def get_device_stream(index: int) -> None:
    """None: exlm creates no streams of its own."""


def torch_device(idx: int) -> str:
    """The name of a device by its index; -1 is the CPU."""
    return "cpu" if idx == -1 else f"cuda:{idx}"


def safe_move_tensor(tensor: Any, device: int | str | torch.device, non_blocking: bool = False) -> Any:
    """A tensor, or each of a list or tuple of tensors, on a device."""
    if isinstance(tensor, Tensor):
        return tensor.to(device, non_blocking=non_blocking)
    return type(tensor)(safe_move_tensor(item, device, non_blocking) for item in tensor)


def cache_tp(model: Model, base: type[CacheBase] = Cache, batch_size: int = 1, max_seq_len: int = -1) -> CacheBase:
    """A cache of class `base` for a model loaded with `load_tp`: each rank keeps the heads it computes.

    In exlm every cache of a tensor-parallel model is one; the name `ExLlamaV2Cache_TP` stays for scripts.
    """
    if model.tp_context is None:
        raise NotLoaded("Cannot create TP cache unless model is loaded with load_tp(): call it first.")
    return base(model, batch_size, max_seq_len)


def cuda_sync_active() -> None:
    """Wait for every GPU that this process uses."""
    for index in range(torch.cuda.device_count()):
        if torch.cuda.memory_allocated(index):
            torch.cuda.synchronize(index)


def get_all_gpu_memory() -> dict[int, dict[str, int]]:
    """For each GPU its memory in MiB: `total`, `used` and `free`."""
    memory = {index: torch.cuda.mem_get_info(index) for index in range(torch.cuda.device_count())}
    return {
        index: {"total": total // MIB, "used": (total - free) // MIB, "free": free // MIB}
        for index, (free, total) in memory.items()
    }


def list_live_tensors() -> None:
    """Print how many tensors of each shape, type and device exist."""
    gc.collect()
    kinds = Counter(
        f"{tuple(item.shape)}, {item.dtype}, {item.device}"
        for item in gc.get_objects()
        if issubclass(type(item), Tensor)  # isinstance would call __class__ of proxy objects
    )
    _print_lines(f"{count} : {kind}" for kind, count in kinds.most_common())


def print_vram_usage() -> None:
    """Print how much memory of the first GPU this process holds, and reset the peak."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats(0)
    print_vram_usage_peak()


def print_vram_usage_peak() -> None:
    """Print the peak memory of the first GPU that this process has held since the last reset."""
    peak = torch.cuda.max_memory_allocated(0) if torch.cuda.is_available() else 0
    _print_lines([f"Peak memory: {peak / MIB:,.2f} MB"])


def _print_lines(lines: Iterable[str]) -> None:
    from rich.console import Console

    console = Console(markup=False, highlight=False, soft_wrap=True)
    for line in lines:
        console.print(line)


class HasForward(Protocol):
    """Any layer whose `forward` takes the hidden states first and returns them."""

    def forward(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """(rows, tokens, hidden) → the same shape."""
        ...


class Intervention:
    """A layer with `pre_forward` applied to its input and `post_forward` to its output.

    All other attributes are those of `inner`, the layer.
    """

    def __init__(
        self,
        inner: HasForward,
        pre_forward: HiddenStatesHook | None = None,
        post_forward: HiddenStatesHook | None = None,
    ) -> None:
        self.inner = inner
        self.pre_forward, self.post_forward = pre_forward or _unchanged, post_forward or _unchanged

    def forward(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """The layer's forward pass between the two hooks."""
        return self.post_forward(self.inner.forward(self.pre_forward(hidden_states), *arguments, **options))

    def __getattr__(self, name: str) -> Any:
        """The layer's own attribute."""
        if name == "inner":  # not assigned yet, as during a copy: the next line would recurse
            raise AttributeError(name)
        return getattr(self.inner, name)


class PostSamplingHook(ABC):
    """The base class of post-sampling hooks, which go into `settings.post_sampling_hooks`.

    Any callable works as well.
    """

    @abstractmethod
    def __call__(self, p: PostSamplingResult) -> None:
        """Called with each sampled token; may replace it by assigning `p.sampled_token`."""


@runtime_checkable
class Vocabulary(Protocol):
    """The methods of `tokenizer.tokenizer_model`, whichever tokenizer file it was read from."""

    def vocab_size(self) -> int:
        """One more than the highest id."""

    def id_to_piece(self, number: int) -> str:
        """The token as the vocabulary writes it."""

    def piece_to_id(self, piece: str) -> int | None:
        """The id of a token as the vocabulary writes it."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""

    def decode(self, ids: list[int]) -> str:
        """The text of ids."""


def get_tokens(num_rows: int, length: int, filename: str | os.PathLike[str], tokenizer: Tokenizer) -> Tensor:
    """The first (num_rows, length) token ids of a .parquet, .txt or .jsonl file, its documents joined."""
    from ..quantize.calibration import read_documents

    needed, ids, num_read = num_rows * length, [], 0
    if num_rows < 1 or length < 1:
        raise InputError(f"get_tokens reads at least 1 row of 1 token, found {num_rows} and {length}.")
    for text in read_documents(Path(filename)):
        ids.append(tokenizer.encode(text)[0])
        num_read += len(ids[-1])
        if num_read >= needed:
            return torch.cat(ids)[:needed].view(num_rows, length)
    raise InputError(
        f"{filename} has {num_read:,} tokens, and {num_rows} rows of {length} take {needed:,}: ask for fewer "
        "rows or give more text."
    )


def _unchanged(hidden_states: Tensor) -> Tensor:
    return hidden_states
