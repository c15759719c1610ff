"""Quantised models with recurrent mixers, latent and gated attention, shared experts and layers of one half."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from exlm import Cache, Config, Model, evaluate_model, quantize_model, spec, validate_exl2
from exlm.checkpoint import SafetensorsCheckpoint, SafetensorsFolder
from exlm.families import FAMILIES
from exlm.kernels.interface import DeltaNetParams, Mamba2Params
from exlm.kernels.reference import ReferenceBackend
from exlm.quantize.allocation import quantized_matrices
from exlm.quantize.layer_loader import CalibrationBackend, KVBuffer, layer_loader, make_batch
from exlm.quantize.layer_solver import input_groups
from exlm.quantize.step_store import StepStore
from exlm.spec.model import matrices
from tests import mixers
from tests.quantize.job_options import SMALL

CPU = torch.device("cpu")
TEXT = "Nine ships left the harbour; seven came back before the storm. " * 40


@pytest.fixture(scope="module", autouse=True)
def every_mixer_family() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, mixers.ARCHITECTURE, lambda _: mixers.MODEL)
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixers.make_folder(tmp_path_factory.mktemp("source") / "mixers")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def uninterrupted(source: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("uninterrupted") / "model"
    quantize_model(source, target, 8.3, head_bits=8, calibration=text, **SMALL)
    return target


def logits(path: Path) -> Tensor:
    model = Model(Config(path))
    model.load()
    return model.forward(torch.arange(60, 100)[None])


def error(exact: Tensor, other: Tensor) -> float:
    """The median of the tokens' relative errors: where rounding chooses another expert, a token's is large."""
    return float(((exact - other).norm(dim=-1) / exact.norm(dim=-1)).median())


def test_every_kind_of_matrix_is_quantised(source: Path, uninterrupted: Path) -> None:
    assert validate_exl2(uninterrupted) == []
    assert error(logits(source), logits(uninterrupted)) < 0.05
    frozen = Config(uninterrupted).freeze()
    stored = SafetensorsCheckpoint(uninterrupted, frozen.spec.names, frozen.quantization)
    floats = {m.role.split(".", 2)[2] for m in matrices(frozen.spec) if stored.describe(m.role)[0] == "dense float16"}
    assert floats == {"delta.b", "mlp.router", "mlp.shared_gate"}


def test_parameters_of_recurrences_keep_their_precision(source: Path, uninterrupted: Path) -> None:
    before, after = SafetensorsFolder(source), SafetensorsFolder(uninterrupted)
    kept = [key for key in mixers.parameters() if "norm" not in key and "embed" not in key]
    assert len(kept) == 3 + 2 + 2 * 5 + 1 + 1
    for key in kept:
        assert torch.equal(before.load(key), after.load(key))
    assert after.dtype("model.layers.0.delta.norm.weight") is torch.float16


def test_matrices_known_only_as_fused_get_keys_of_their_own(uninterrupted: Path) -> None:
    keys = SafetensorsFolder(uninterrupted).tensors
    at = "model.layers.1.self_attn.kv_b_proj"
    assert f"{at}.k_up.q_weight" in keys
    assert f"{at}.v_up.q_weight" in keys
    assert f"{at}.weight" not in keys


def test_gptq(source: Path, text: Path, tmp_path: Path) -> None:
    quantize_model(source, tmp_path / "out", method="gptq", group_size=32, calibration=text, **SMALL)
    assert 0 < error(logits(source), logits(tmp_path / "out")) < 0.4


def test_another_source_is_quantised_alike(source: Path, text: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """A source whose fused matrices are stored alone: a model at 8 bits, quantised again."""
    quantize_model(uninterrupted, tmp_path / "again", 8.3, head_bits=8, calibration=text, **SMALL)
    assert validate_exl2(tmp_path / "again") == []
    assert error(logits(source), logits(tmp_path / "again")) < 0.1


def test_kills_give_the_same_bytes(
    source: Path, text: Path, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, save = tmp_path / uninterrupted.name, StepStore.save
    kills = 0

    class Killed(BaseException):
        pass

    def save_or_kill(self: StepStore, name: str, tensors: Any) -> None:
        nonlocal kills
        when = random.random()
        if when > 0.15:
            save(self, name, tensors)
        if when < 0.3:
            kills += 1
            raise Killed

    monkeypatch.setattr(StepStore, "save", save_or_kill)
    random.seed(5)
    for _ in range(200):
        try:
            quantize_model(source, target, 8.3, head_bits=8, calibration=text, **SMALL)
            break
        except Killed:
            assert not target.exists()
    assert kills > 5
    for path in sorted(uninterrupted.iterdir()):
        assert path.read_bytes() == (target / path.name).read_bytes(), path.name


def test_the_report_covers_recurrent_models(source: Path, text: Path, tmp_path: Path) -> None:
    quality = quantize_model(source, tmp_path / "out", 6.0, calibration=text, **(SMALL | {"report": True}))
    assert quality is not None
    assert quality.kl is not None
    assert 0 < quality.kl < 0.2
    assert quality.layer_errors is not None
    assert len(quality.layer_errors) == len(mixers.LAYERS)
    assert quality.speed is not None
    assert quality.speed["generation"] > 0


def test_buffers_with_states_equal_one_forward_pass(source: Path) -> None:
    frozen = Config(source).freeze()
    loader = layer_loader(frozen, SafetensorsCheckpoint(source, frozen.spec.names), 24, CPU)
    decoder = list(loader.build())[-1]
    ids, buffers = torch.randint(3, 250, (2, 12)), KVBuffer.for_layers(frozen.spec, 2, 12, CPU)
    parts = [
        decoder.forward(make_batch(ids[:, a:b], a, turn), buffers)[0]
        for turn, (a, b) in enumerate(((0, 5), (5, 6), (6, 7), (7, 12)))
    ]
    one_pass = decoder.forward(make_batch(ids), KVBuffer.for_layers(frozen.spec, 2, 12, CPU))[0]
    torch.testing.assert_close(torch.cat([p for p in parts if p is not None], 1), one_pass)


@pytest.mark.parametrize("kind", ["delta", "mamba"])
def test_segments_have_the_gradients_of_the_whole(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def kernel(backend: ReferenceBackend) -> Any:
        if kind == "delta":
            return backend.delta_net(mixers.DELTA, delta)
        return backend.mamba2(mixers.MAMBA, mamba)

    delta_channels, mamba_channels = mixers.DELTA.state.conv[1], mixers.MAMBA.conv_channels
    delta = DeltaNetParams(rand(delta_channels, 4), rand(4), rand(mixers.DELTA.decay_width), rand(16))
    mamba = Mamba2Params(rand(mamba_channels, 4), rand(mamba_channels), rand(8), rand(8), rand(8), rand(64))
    widths = [delta_channels, 64, mixers.DELTA.decay_width, 4] if kind == "delta" else [64 + mamba_channels + 8]
    inputs = [rand(2, 75, width) for width in widths]
    weight = rand(2, 75, 64)
    results = []
    for backend in (ReferenceBackend(CPU, torch.float32), CalibrationBackend(CPU, torch.float32)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        output = kernel(backend)(*leaves, None, make_batch(torch.zeros(2, 75, dtype=torch.long)))
        torch.autograd.backward(output, weight)
        results.append((output, [leaf.grad for leaf in leaves]))
    torch.testing.assert_close(results[0][0], results[1][0])
    for whole, segmented in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(segmented, whole, rtol=1e-4, atol=1e-5)


def test_matrices_with_one_input_are_solved_together() -> None:
    def groups(layer: int) -> list[set[str]]:
        roles = [m.role for m in quantized_matrices(mixers.MODEL) if m.role.startswith(f"layers.{layer}.")]
        return [{role.split(".", 2)[2] for role in group} for group in input_groups(roles)]

    assert groups(0)[:4] == [
        {"delta.q", "delta.k", "delta.v", "delta.z_down", "delta.a_down"},
        {"delta.z_up"},
        {"delta.a_up"},
        {"delta.o"},
    ]
    latent = groups(1)
    assert latent[:4] == [{"attn.q_down", "attn.kv_down"}, {"attn.q_up"}, {"attn.k_up", "attn.v_up"}, {"attn.o"}]
    assert {"mlp.shared.up"} in latent
    assert {f"mlp.experts.{e}.up" for e in range(4)} in latent
    assert groups(6)[0] == {"attn.q", "attn.k", "attn.v", "attn.gate"}


def test_decays_for_each_channel_are_no_small_matrix() -> None:
    for decay, floats in (("head", {"delta.a", "delta.b"}), ("channel", {"delta.b"})):
        mixer = spec.DeltaNet(2, 4, 32, 16, 4, 1e-6, decay=decay)  # type: ignore[arg-type]
        model = spec.Model("X", 8, 64, (spec.Layer(mixer, None, mixers.NORM, None),), mixers.NORM, 64)
        every = {m.role for m in mixer.matrices(64)}
        assert every - {m.role.split(".", 2)[2] for m in quantized_matrices(model)} == floats


def test_qwen3_5_at_four_bits(fixtures_dir: Path, tmp_path: Path) -> None:
    source, target = fixtures_dir / "tiny-qwen3_5", tmp_path / "out"
    quantize_model(source, target, 4.0, rows=8, length=128, report=False)
    assert validate_exl2(target) == []
    ids = load_file(fixtures_dir / "reference" / "heldout_ids.safetensors")["ids"][:4096].view(8, 512)
    found = evaluate_model(target, source, ids=ids)
    assert found.against_perplexity == pytest.approx(66.314, abs=0.01)
    assert found.perplexity == pytest.approx(66.314, rel=0.03)
    assert found.bits <= 4.0
    model = Model(Config(target))
    model.load()
    cache, generated = Cache(model, max_seq_len=256), [ids[0, :16].tolist()]
    for _ in range(48):
        last = model.forward(torch.tensor([generated[-1]]), cache, last_id_only=True)[0, -1]
        generated.append([int(last.argmax())])
    greedy = [token for tokens in generated for token in tokens]
    whole = model.forward(torch.tensor([greedy[:-1]]))[0, 15:].argmax(-1)
    assert whole.tolist() == greedy[16:]
