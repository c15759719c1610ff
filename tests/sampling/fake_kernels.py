"""Fake kernels: they parse the words that were uploaded for each row, and update the lists on the device."""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exlm.kernels.sampling_layout import HEADER_OFFSETS, HEADER_WORDS
from exlm.sampling.gpu_buffers import OutputAllocator, OutputBuffer
from exlm.sampling.gpu_kernels import KernelOutput, SamplingLaunchKey


@dataclass
class ReceivedRow:
    """What the kernels received for one row."""

    batch_index: int
    seed: tuple[int, int, int]
    mu: float
    params: tuple[float, ...]
    penalized: dict[int, int]
    decaying: dict[int, tuple[float, float]]
    blocked: list[int]
    history: list[int]
    breaker_ids: set[int]
    bias: list[float] | None
    allowed: set[int] | None
    xtc_exempt: set[int]


class FakeKernels:
    """Takes the place of `SamplingKernels`. `received` has every row, `returned_mus` the target returned for each."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.received: list[ReceivedRow] = []
        self.returned_mus: list[float] = []
        self.raises = False
        self._next_mu = 1000.0

    def draw(
        self, x: Tensor, table: Tensor, words: Tensor, key: SamplingLaunchKey, output: OutputBuffer
    ) -> KernelOutput:
        """Record the rows, and draw token 0; no two targets that it returns are equal."""
        if self.raises:
            raise MemoryError
        words_sent = words.numpy()
        for row in range(key.num_rows):
            self.received.append(
                self._parse_row(
                    words_sent[row * HEADER_WORDS :][:HEADER_WORDS],
                    words_sent,
                    tuple(table[row].tolist()),
                    key,
                )
            )
            batch_index = self.received[-1].batch_index
            output.tokens[batch_index], output.host_copy[batch_index], output.probs[batch_index] = 0, 0, 1.0
        mus = torch.arange(key.num_rows, dtype=torch.float64) + self._next_mu
        self._next_mu += key.num_rows
        self.returned_mus += mus.tolist()
        return KernelOutput(mus)

    def greedy(self, x: Tensor, output: OutputBuffer) -> None:
        """Draw token 0 for every row, without parsing anything."""
        output.tokens[:], output.host_copy[:], output.probs[:] = 0, 0, 1.0

    def next_output(self, count: int) -> OutputBuffer:
        """An output with a failure in every row."""
        output = OutputAllocator(count, torch.device("cpu"), None).next()
        output.tokens[:], output.host_copy[:] = -1, -1
        return output

    def record_done(self) -> None:
        """No event is recorded."""

    def _parse_row(
        self, header: Any, words_sent: Any, params: tuple[float, ...], key: SamplingLaunchKey
    ) -> ReceivedRow:
        def words(name: str, count: int) -> list[int]:
            return [int(word) for word in header[HEADER_OFFSETS[name] : HEADER_OFFSETS[name] + count]]

        (batch_index,), (seed, position, rewind_count) = words("batch_index", 1), words("seed", 3)
        mu = float(header[HEADER_OFFSETS["initial_mu"] : HEADER_OFFSETS["initial_mu"] + 1].view(np.float64)[0])
        if address := words("mu", 1)[0]:
            mu = float(array_at(address, ctypes.c_double, 1)[0])
        start, count = words("decaying", 2)
        parts = words_sent[start : start + 3 * count].reshape(3, count)
        decaying = zip(parts[0].tolist(), *parts[1:].view(np.float64).tolist(), strict=True)
        start_blocked, num_blocked = words("blocked", 2)
        (bias,), (exempt,), (breakers,), (mask,) = (
            words(name, 1) for name in ("bias", "xtc_exempt", "dry_breakers", "allowed")
        )
        received = ReceivedRow(
            batch_index,
            (seed, position, rewind_count),
            mu,
            params,
            self._token_counts(words("token_counts", 4), words("new_counts", 2), words_sent),
            {token: (token_count, strength) for token, token_count, strength in decaying},
            words_sent[start_blocked : start_blocked + num_blocked].tolist(),
            self._history(*words("history", 3)),
            self._tokens(breakers),
            array_at(bias, ctypes.c_float, self.width).tolist() if bias else None,
            {i for i in range(self.width) if int(words_sent[mask + i // 64]) >> i % 64 & 1} if mask else None,
            self._tokens(exempt),
        )
        edits = (
            received.penalized,
            received.decaying,
            received.blocked,
            received.history,
            received.bias,
            mask,
        )
        assert key.edits_logits or not any(edits)
        assert key.uses_dry or not received.history
        return received

    def _tokens(self, mask: int) -> set[int]:
        """The tokens of a mask of booleans."""
        return set(np.flatnonzero(array_at(mask, ctypes.c_bool, self.width)).tolist()) if mask else set()

    def _history(self, address: int, count: int, last: int) -> list[int]:
        """A text, after what the kernels do with it."""
        if not address or not count:
            return []
        ids = array_at(address, ctypes.c_int32, count)
        ids[-1] = last if 0 <= last < self.width else -1
        return list(map(int, ids))

    def _token_counts(self, header: list[int], new_counts: list[int], words_sent: Any) -> dict[int, int]:
        """The penalized tokens, after what the kernels do with the list."""
        address, size, entered, left = header
        start, count = new_counts
        if not address:
            return {}
        pairs = array_at(address, ctypes.c_int32, 2 * size).reshape(size, 2)
        if count:
            pairs[:count] = words_sent[start : start + 2 * count].reshape(count, 2)
        for token, change in ((entered, 1), (left, -1)):
            if 0 <= token < self.width:
                found = np.flatnonzero(pairs[:, 0] == token)
                if len(found):
                    pairs[found[0], 1] += change
                else:
                    assert pairs[-1, 0] == -1, "an entry is taken that is not free"
                    pairs[-1] = token, change
        used = pairs[pairs[:, 0] >= 0]
        assert max(Counter(used[:, 0].tolist()).values(), default=1) == 1
        assert (used[:, 1] >= 0).all()
        return {token: token_count for token, token_count in used.tolist() if token_count > 0}


def array_at(address: int, kind: Any, count: int) -> Any:
    """Numbers at an address."""
    return np.ctypeslib.as_array((kind * count).from_address(address))
