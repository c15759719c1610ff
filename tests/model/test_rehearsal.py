"""A token through a model that is not whole: it needs no layers, leaves nothing behind, and may fail."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from exlm import Config, Model
from exlm.model import loading
from exlm.model.decoder import Decoder
from exlm.model.rehearsal import Rehearsal, one_token
from exlm.nn.hop import stay
from tests import tiny

CPU = torch.device("cpu")


@pytest.fixture
def decoder(tmp_path: Path) -> Decoder:
    model = Model(Config(tiny.make(tmp_path)))
    model.load()
    assert model._loaded is not None
    return model._loaded.decoder


def test_the_likeliest_token_behind_the_first(decoder: Decoder) -> None:
    ends = Decoder(decoder.embedding, [], decoder.head, [stay])
    x = decoder.embedding.lookup(torch.zeros(1, 1, dtype=torch.int64))
    assert one_token(ends, CPU) == int(decoder.head.linear.kernel(decoder.head.norm(x, None)[1]).argmax())


def test_it_is_over_when_loading_is(decoder: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), Rehearsal() as rehearsal:
        rehearsal.begin(decoder, CPU)
    assert rehearsal._thread is not None
    assert not rehearsal._thread.is_alive()
    assert caplog.text == ""


def test_failing_is_left_to_those_who_want_an_answer(
    decoder: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no kernels today")

    decoder.head.norm = broken
    with caplog.at_level(logging.DEBUG), Rehearsal() as rehearsal:
        rehearsal.begin(decoder, CPU)
    assert "no kernels today" in caplog.text


def test_a_processor_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(loading.Rehearsal, "begin", begin)
    Model(Config(tiny.make(tmp_path))).load()
