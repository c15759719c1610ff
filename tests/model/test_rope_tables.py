"""RoPE tables of a length that only a file claims: refused before allocation, with the setting to change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exlm import Config, DoesNotFit, Model
from exlm.model.devices import DeviceInfo
from exlm.model.placement import ROPE_TABLE_DIVISOR, UNCHECKED_ROPE_BYTES, check_rope_tables
from tests import tiny

CPU = torch.device("cpu")
HEAD_DIM = 8  # of a head of the tiny model


def test_a_length_of_a_billion_is_refused_and_a_shorter_one_loads(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path, max_position_embeddings=10**9)
    model = Model(Config(folder))
    model.list_devices = lambda requested: [DeviceInfo("cpu", CPU, 1 << 34)]
    assert model.config.max_seq_len == 10**9
    with pytest.raises(DoesNotFit, match=r"config\.max_seq_len is 1,000,000,000, .* take 59\.60 GB on cpu") as raised:
        model.load()
    assert str(folder) in str(raised.value)
    assert not model.loaded
    model.config.max_seq_len = 1024
    model.load()
    assert model.forward(torch.tensor([[3, 4]])).shape == (1, 2, 64)


def test_the_suggested_length_fits(tmp_path: Path) -> None:
    config = Config(tiny.make(tmp_path))
    config.max_seq_len = 10**9
    devices = [DeviceInfo("small", CPU, ROPE_TABLE_DIVISOR * 2 * UNCHECKED_ROPE_BYTES)] * 4
    longest = 2 * UNCHECKED_ROPE_BYTES // (2 * 4 * HEAD_DIM)
    with pytest.raises(DoesNotFit, match=rf"with at most {longest:,} the tables leave room"):
        check_rope_tables(config.freeze(), devices)
    config.max_seq_len = longest
    check_rope_tables(config.freeze(), devices)
    config.max_seq_len = longest + 1
    with pytest.raises(DoesNotFit):
        check_rope_tables(config.freeze(), devices)


def test_small_tables_are_made_on_full_devices_too(tmp_path: Path) -> None:
    config = Config(tiny.make(tmp_path))
    check_rope_tables(config.freeze(), [DeviceInfo("full", CPU, 0)] * 4)


def test_each_device_has_the_tables_of_its_own_layers(tmp_path: Path) -> None:
    config = Config(tiny.make(tmp_path))
    config.max_seq_len = UNCHECKED_ROPE_BYTES  # 64 bytes for each position while tables are made
    full, empty = DeviceInfo("full", CPU, 0), DeviceInfo("empty", CPU, 1 << 60)
    check_rope_tables(config.freeze(), [full, empty, empty, full])
    with pytest.raises(DoesNotFit, match="on full"):
        check_rope_tables(config.freeze(), [empty, empty, full, empty])


def test_a_model_without_rope_needs_no_tables(tmp_path: Path) -> None:
    config = Config(tiny.make(tmp_path, architectures=["SmolLM3ForCausalLM"], no_rope_layers=[0, 0]))
    config.max_seq_len = 10**9
    check_rope_tables(config.freeze(), [DeviceInfo("full", CPU, 0)] * 4)
