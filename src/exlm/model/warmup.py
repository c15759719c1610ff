"""Warm-up while layers are loading: one token through embedding, head and sampler.

On a GPU, libraries are loaded and kernels compiled at first use. Embedding and head are loaded first, so one
token through them and the sampler does most of that before a user waits for it. Errors are only logged here:
they occur again on real use.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from threading import Thread
from types import TracebackType
from typing import Self

import torch

from ..nn import Batch
from ..nn.block import no_transfer
from ..sampling import Sampler, SamplerState, SamplingRequest, Settings
from .decoder import Decoder

log = logging.getLogger(__name__)


class Warmup:
    """Runs one token in a thread; leaving the block waits for it."""

    def __init__(self) -> None:
        self._thread: Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._thread.join()

    def start(self, decoder: Decoder, device: torch.device) -> None:
        """Start with the decoder's embedding and head; on a GPU in the caller's current stream."""
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        embedding_and_head = Decoder(decoder.embedding, [], decoder.head, [no_transfer])
        self._thread = Thread(
            target=_run_ignoring_errors, args=(embedding_and_head, device, stream), name="exlm-warmup"
        )
        self._thread.start()


def _run_ignoring_errors(decoder: Decoder, device: torch.device, stream: torch.cuda.Stream | None) -> None:
    try:
        with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
            run_one_token(decoder, device)
    except Exception:  # occurs again, and is reported, on real use
        log.debug("The warm-up failed.", exc_info=True)


def run_one_token(decoder: Decoder, device: torch.device) -> int:
    """The greedy token after token 0, for a model without layers."""
    zeros = torch.zeros(1, 1, dtype=torch.int64, device=device)
    batch = Batch(zeros, zeros, zeros[0], zeros.int(), max_kv_len=1, uniform=True, outputs="last")
    logits, _ = decoder.forward(batch, [])
    assert logits is not None  # outputs="last"
    sampler = Sampler(vocab_size=logits.shape[-1])
    output = sampler.sample_batch(logits[:, -1], [SamplingRequest(Settings.greedy(), SamplerState())])
    return output.tokens[0]
