"""The modules of a model, as old programs count them for progress bars."""

from __future__ import annotations

from pathlib import Path

import pytest

from exlm import Config, Model, Unsupported
from tests.checkpoint import gguf_models


@pytest.fixture
def model(fixtures_dir: Path) -> Model:
    return Model(Config(str(fixtures_dir / "tiny-lm")))


def test_modules_are_as_many_as_loading_reports(model: Model) -> None:
    total = len(model.modules)
    seen: list[tuple[int, int]] = []
    model.load(callback=lambda done, of: seen.append((done, of)))
    assert seen == [(done, total) for done in range(total + 1)]
    assert len(model.modules) == len(model.get_modules()) == total == model.config.num_hidden_layers + 2


def test_each_has_a_key_and_a_device(model: Model) -> None:
    assert {module.device_idx for module in model.modules} == {None}
    model.load()
    assert [module.key for module in model.modules] == list(model.modules_dict)
    first, second, *_, last = model.modules
    assert (first.key, second.key, last.key) == ("model.embed_tokens", "model.layers.0", "lm_head")
    assert first.device_idx == last.device_idx
    assert repr(last).startswith("LegacyModule('lm_head', device_idx=")
    first.device_idx = second.device_idx  # asking for the present state is allowed
    first.reload()
    with pytest.warns(UserWarning, match=r"model\.embed_tokens stays where it is"):
        first.device_idx = 7
    model.unload()
    assert model.modules[0].device_idx is None


def test_modules_are_read_only(model: Model) -> None:
    with pytest.raises(Unsupported, match="Layers cannot be exchanged"):
        model.modules = model.modules[:1]


@pytest.mark.parametrize(
    ("name", "quantised"),
    [
        ("tiny-lm", False),
        ("tiny-lm-exl2-4.0bpw", True),
        ("tiny-lm-gptq-g128-sym", True),
        ("tiny-lm-awq-g128", True),
        ("tiny-lm-gguf-q4_0", True),
    ],
)
def test_whether_a_model_is_quantised(fixtures_dir: Path, name: str, quantised: bool) -> None:
    model = Model(Config(fixtures_dir / name))
    assert model.is_quant() is quantised
    model.load()
    assert model.is_quant() is quantised
    model.unload()
    assert model.is_quant() is quantised


def test_a_loaded_model_knows_it_without_its_files(tmp_path: Path) -> None:
    gguf_models.write_model(tmp_path / "floats.gguf", "llama")
    gguf_models.write_model(tmp_path / "codes.gguf", "llama", kind="Q8_0")
    models = [Model(Config(tmp_path / f"{name}.gguf")) for name in ("floats", "codes")]
    for model in models:
        model.load()
        Path(model.config.model_dir or "").unlink()
    assert [model.is_quant() for model in models] == [False, True]
