"""The small door between the generator and the model: pages in, logits out.

A `Runner` turns sequences (their ids and pages) into batches and runs them. It decides nothing: what to run
next is the scheduler's business, what a row of logits becomes the sampler's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..cache import PAGE, CacheBase
from ..errors import NotLoaded
from ..kernels.backend import KeyValues
from ..nn import Batch
from ..nn.batch import Outputs
from .decoder import Decoder
from .extras import Extras
from .graphs import Graphs

PLAIN = Extras()


class Gone:
    """What stands in a decoder's place when its model has been unloaded."""

    def forward(self, batch: Batch, layers: Sequence[KeyValues]) -> tuple[Tensor | None, Tensor]:
        """Say so."""
        raise NotLoaded(
            "The model was unloaded, and this generator went with it: load the model, make a new one."
        )


class Paged(Protocol):
    """What a runner must know of a sequence."""

    @property
    def ids(self) -> Sequence[int]:
        """Every token so far."""
        ...

    @property
    def pages(self) -> Sequence[int]:
        """The page numbers that hold its keys and values, in order."""
        ...

    @property
    def extras(self) -> Extras | None:
        """What it brings besides its ids."""
        ...


class Runner:
    """A loaded decoder over a paged cache."""

    def __init__(
        self,
        decoder: Decoder,
        cache: CacheBase,
        device: torch.device,
        planes: bool = False,
        recorded: int = 0,
    ) -> None:
        """`planes`: positions may have three. `recorded`: tokens up to which decode passes are recorded."""
        self.decoder: Decoder | Gone = decoder
        self.cache = cache
        self.device = device
        self.planes = planes
        # What runs knows the decoder, not this runner: a circle would keep the weights when all let go of it.
        self.graphs = Graphs(partial(all_logits, decoder, cache), device, recorded) if recorded else None

    def retire(self) -> None:
        """Let go of the decoder: a generator that somebody still holds must not keep the weights."""
        self.decoder, self.graphs = Gone(), None

    def copy_pages(self, copies: Iterable[tuple[int, int, int]]) -> None:
        """Duplicate the leading tokens of pages: (source, target, tokens)."""
        self.cache.copy(copies)

    @torch.no_grad()
    def prefill(self, sequence: Paged, start: int, stop: int) -> None:
        """Compute keys and values of ids `start` to `stop`; everything before is in the pages already."""
        self._run([sequence], [sequence.ids[start:stop]], [start], "none")

    @torch.no_grad()
    def decode(
        self, sequences: Sequence[Paged], past: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> list[Tensor] | Tensor:
        """Feed each sequence its tokens behind `past`; for each, logits (tokens, vocabulary) in float32.

        Rows that feed the same number of tokens run as one batch. If all do, the answer is one tensor, which
        the next call may write over.
        """
        lengths: dict[int, list[int]] = {}
        for row, fed in enumerate(tokens):
            lengths.setdefault(len(fed), []).append(row)
        if len(lengths) == 1:
            return self._decoded(sequences, tokens, past)
        out: dict[int, Tensor] = {}
        for rows in lengths.values():
            part = self._decoded(
                [sequences[r] for r in rows], [tokens[r] for r in rows], [past[r] for r in rows]
            )
            out.update(zip(rows, part if self.graphs is None else part.clone(), strict=True))
        return [out[row] for row in range(len(sequences))]

    @torch.no_grad()
    def decode_next(self, sequences: Sequence[Paged], past: Sequence[int], tokens: Tensor) -> Tensor | None:
        """Launch `decode` of one token each, (sequences,) on the device and not yet known to the host.

        None where passes are not recorded: nothing would be gained. What it says of a negative token means
        nothing. The answer may be written over by the next call, and writes over the last one.
        """
        return self._recorded(sequences, tokens, past)

    def _decoded(
        self, sequences: Sequence[Paged], fed: Sequence[Sequence[int]], past: Sequence[int]
    ) -> Tensor:
        """Logits (rows, tokens, vocabulary) of rows that feed equally many tokens."""
        logits = self._recorded(sequences, fed, past)
        if logits is None:
            logits = self._run(sequences, fed, past, "all")
        assert logits is not None
        return logits

    def _recorded(
        self, sequences: Sequence[Paged], fed: Sequence[Sequence[int]] | Tensor, past: Sequence[int]
    ) -> Tensor | None:
        """The same from a recording; None if there can be none."""
        if self.graphs is None or any([sequence.extras for sequence in sequences]):
            return None
        self.cache.last_writer = self
        return self.graphs.decode(fed, past, [sequence.pages for sequence in sequences])

    def _run(
        self, sequences: Sequence[Paged], fed: Sequence[Sequence[int]], past: Sequence[int], outputs: Outputs
    ) -> Tensor | None:
        self.cache.last_writer = self
        count = len(fed[0])
        longest = max(past) + count
        width = -(-longest // PAGE)
        table = [[*sequence.pages[:width], *[0] * (width - len(sequence.pages))] for sequence in sequences]
        before = np.array(past, np.int64)
        given = np.array(fed, np.int64), before[:, None] + np.arange(count), before, np.array(table, np.int64)
        ids, positions, starts, pages = sent(given, self.device)
        batch = Batch(
            ids=ids,
            positions=positions,
            past=starts,
            pages=pages,
            longest=longest,
            even=len(set(past)) == 1,
            outputs=outputs,
        )
        extras = [sequence.extras for sequence in sequences]
        if any(extras):
            batch = self._dressed(batch, [one or PLAIN for one in extras], fed, past)
        return self.decoder.forward(batch, self.cache.layers)[0]

    def _dressed(
        self, batch: Batch, extras: Sequence[Extras], fed: Sequence[Sequence[int]], past: Sequence[int]
    ) -> Batch:
        """The batch with what its rows bring besides their ids."""
        positions = batch.positions
        if self.planes and any(one.planes is not None for one in extras):
            rows = [one.positions(at, at + len(row)) for one, at, row in zip(extras, past, fed, strict=True)]
            positions = torch.stack(rows, 1).to(self.device)
        spans = (span for row, one in enumerate(extras) for span in one.spans(row, fed[row]))
        return replace(
            batch,
            positions=positions,
            adapters=tuple(one.adapters for one in extras) if any(one.adapters for one in extras) else (),
            spans=tuple(replace(span, vectors=span.vectors.to(self.device)) for span in spans),
        )


def all_logits(decoder: Decoder, cache: CacheBase, batch: Batch) -> Tensor:
    """All logits of a batch."""
    logits, _ = decoder.forward(batch, cache.layers)
    assert logits is not None
    return logits


def sent(arrays: Sequence[NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """Whole numbers on a device, in one copy that waits for nothing that the device still does."""
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    sizes = [-(-array.size // 2) * 2 for array in arrays]  # each begins at a multiple of 16 bytes
    whole = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    for part, array in zip(whole.split_with_sizes(sizes), arrays, strict=True):
        part.numpy()[: array.size] = array.ravel()
    there = whole.to(device, non_blocking=True).split_with_sizes(sizes)
    return [part[: array.size].view(array.shape) for part, array in zip(there, arrays, strict=True)]
