"""`exlm plan`, run end to end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from exlm import Cache, CacheQ4, Config, InputError, Model
from exlm.cli.__main__ import app
from tests import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("planned"), num_hidden_layers=4, head_dim=32)


def run(*arguments: str, code: int = 0) -> str:
    done = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["plan", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.stdout


def test_plan_prints_the_table_and_the_longest_context(folder: Path) -> None:
    text = run(str(folder), "--ctx", "32k", "--users", "4", "--gpu", "24,24", "--cache", "q4")
    for words in ("GPU 0", "GPU 1", "weights", "cache", "workspace", "4 × 32,768 tokens: fits"):
        assert words in text
    assert run(str(folder), "--device", "cpu").count("cpu") == 1


def test_a_plan_that_does_not_fit_says_what_would(folder: Path) -> None:
    text = run(str(folder), "--ctx", "32k", "--users", "4", "--gpu", "0.26", code=1)
    assert "does not fit" in text
    found = re.search(r"--ctx (\d+)", text)
    assert found is not None
    assert "4 × " in run(str(folder), "--ctx", found[1], "--users", "4", "--gpu", "0.26")
    more = str(int(found[1]) + 256)
    assert "does not fit" in run(str(folder), "--ctx", more, "--users", "4", "--gpu", "0.26", code=1)


def test_a_context_longer_than_the_models_is_reported(folder: Path) -> None:
    words = "The model itself is made for 512 tokens"
    assert words in run(str(folder), "--ctx", "32k", "--gpu", "24")
    assert words in run(str(folder), "--ctx", "32k", "--users", "400", "--gpu", "0.26", code=1)
    assert words in run(str(folder), "--gpu", "24")  # where the longest that fits is beyond it
    assert words not in run(str(folder), "--users", "4000", "--gpu", "1.2", code=1)


def test_invalid_options_are_named(folder: Path) -> None:
    for option, value in (
        ("--ctx", "many"),
        ("--gpu", "24,x"),
        ("--gpu", "24,nan"),
        ("--gpu", "inf"),
        ("--cache", "q5"),
    ):
        with pytest.raises(InputError, match=option):
            run(str(folder), option, value)


def test_recurrent_states_are_counted(fixtures_dir: Path) -> None:
    hybrid = fixtures_dir / "tiny-qwen3_5"
    text = run(str(hybrid), "--users", "4", "--gpu", "1")
    # In float16 a state of three delta nets is 3 · (4 · 64 · 64 · 4 + 3 · 512 · 2) bytes, and each user has three.
    assert "Recurrent states are 2.4 MiB of the cache: 603.0 KiB for each of 4, whatever the context." in text
    assert "Recurrent states are 4.7 MiB of the cache" in run(str(hybrid), "--users", "8", "--gpu", "1", "--ctx", "64")
    text = run(str(hybrid), "--users", "4000", "--gpu", "1", code=1)
    for words in (
        "The longest context that fits: 0 tokens for each of 4000",
        "cache 6.21 GB with 2.30 GB of recurrent states",
        "One sequence's recurrent state takes 0.2 MB, however long the sequence is: fewer sequences at once need less.",
    ):
        assert words in text


def test_a_model_without_states_says_nothing_of_them(folder: Path) -> None:
    assert "ecurrent" not in run(str(folder), "--gpu", "0.26", "--ctx", "512k", code=1)


def test_plans_are_monotone_and_load_nothing(folder: Path) -> None:
    model = Model(Config(folder))
    plain = model.plan(4096, memory=[1, 1])
    small = model.plan(4096, 1, CacheQ4, memory=[1, 1])
    assert plain.fits
    assert small.largest > 2 * plain.largest > 0
    assert plain.devices[0].cache == sum(Cache(Half(), max_seq_len=4096, lazy=True).layer_bytes())
    assert model.plan(4096, memory=[1], reserve_vram=1 << 29).largest < model.plan(4096, memory=[1]).largest
    assert not model.loaded


class Half:
    """The same model in sixteen bits, as a cache sees it."""

    cache_devices = None
    cache_max_seq_len = 512
    cache_replicator = None

    def __init__(self) -> None:
        import torch

        from exlm.kvcache import LayerShape

        self.cache_dtype, self.cache_shapes = torch.float16, [LayerShape(2, 32)] * 4
