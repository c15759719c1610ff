"""Warm-up: it needs no layers, leaves no state, and may fail."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from exlm import Config, Model
from exlm.model.decoder import Decoder
from exlm.model.loader import Warmup, run_one_token
from exlm.nn.block import no_transfer
from tests import tiny

CPU = torch.device("cpu")


@pytest.fixture
def decoder(tmp_path: Path) -> Decoder:
    model = Model(Config(tiny.make(tmp_path)))
    model.load()
    assert model._loaded is not None
    return model._loaded.decoder


def test_one_token_is_the_most_likely_next(decoder: Decoder) -> None:
    embedding_and_head = Decoder(decoder.embedding, [], decoder.head, [no_transfer])
    x = decoder.embedding.lookup(torch.zeros(1, 1, dtype=torch.int64))
    assert run_one_token(embedding_and_head, CPU) == int(
        decoder.head.linear.kernel(decoder.head.norm(x, None)[1]).argmax()
    )


def test_warmup_ends_with_loading(decoder: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), Warmup() as warmup:
        warmup.start(decoder, CPU)
    assert warmup._thread is not None
    assert not warmup._thread.is_alive()
    assert caplog.text == ""


def test_warmup_errors_are_ignored(decoder: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no kernels today")

    decoder.head.norm = broken
    with caplog.at_level(logging.DEBUG), Warmup() as warmup:
        warmup.start(decoder, CPU)
    assert "no kernels today" in caplog.text


def test_a_cpu_needs_no_warmup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(Warmup, "start", fail)
    Model(Config(tiny.make(tmp_path))).load()
