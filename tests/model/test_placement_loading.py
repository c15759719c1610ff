"""Models on several hypothetical devices: the same logits wherever the modules are."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from exlm import (
    Cache,
    CacheBase,
    CacheFP8,
    CacheQ4,
    Config,
    Generator,
    InputError,
    Lora,
    Model,
    Settings,
    Tokenizer,
    Unsupported,
)
from exlm.bench.shapes import SHAPES
from exlm.bench.synthetic import SyntheticCheckpoint, synthetic_format, write_model_folder
from exlm.errors import DoesNotFit
from exlm.generator.state_table import SLOTS_PER_SEQUENCE
from exlm.model.devices import DeviceInfo, list_devices
from exlm.model.multiprocess import rank_devices
from exlm.model.placement import (
    STATES_PER_SEQUENCE,
    ComputeProfile,
    DeviceBudget,
    compute_profile,
    estimate_modules,
)
from exlm.nn.block import DeviceTransfer
from exlm.spec.model import matrices
from tests import tiny
from tests.lora import peft_folders as peft

CPU = torch.device("cpu")
IDS = torch.arange(3, 40)[None]


def fake_devices(*free: int) -> Callable[[str | None], list[DeviceInfo]]:
    return lambda requested: [DeviceInfo(f"fake {i}", CPU, count) for i, count in enumerate(free)]


def loaded(folder: Path) -> Model:
    model = Model(Config(folder))
    model.load()
    return model


def module_bytes(model: Model, cache: CacheBase) -> list[int]:
    """Bytes of each module with its cache and workspace."""
    frozen = model.config.freeze()
    modules = estimate_modules(
        frozen,
        frozen.open_checkpoint(),
        compute_profile(frozen, [DeviceInfo("", CPU, 0)], cache.max_seq_len),
        cache.layer_bytes(),
    )
    return [module.weights + module.cache for module in modules] + [max(module.workspace for module in modules)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("split"), num_hidden_layers=5)


@pytest.mark.parametrize("kind", [Cache, CacheFP8])
@pytest.mark.parametrize("devices", [1, 2, 3, 5])
def test_a_model_over_several_devices_is_the_same_model(folder: Path, kind: type[CacheBase], devices: int) -> None:
    model = Model(Config(folder))
    cache = kind(model, max_seq_len=256, lazy=True)
    *modules, workspace = module_bytes(model, cache)
    share = sum(modules) // devices + max(modules) + workspace
    model.list_devices = fake_devices(*[share] * devices)
    model.load_autosplit(cache, reserve_vram=0)
    used = len(set(model.placement))
    assert used == (devices if devices < 5 else used) >= min(devices, 3)
    transfers = model._require_loaded().decoder.transfers
    assert sum(isinstance(transfer, DeviceTransfer) for transfer in transfers) == used - 1
    alone = loaded(folder)
    reference = kind(alone, max_seq_len=256)
    for ids in (IDS, IDS[:, :1]):
        assert torch.equal(model.forward(ids, cache), alone.forward(ids, reference))
    assert ("on fake 0:" in model.explain()) == (used > 1)


def test_devices_are_filled_one_after_the_other(folder: Path) -> None:
    model = Model(Config(folder))
    cache = Cache(model, max_seq_len=256, lazy=True)
    *modules, workspace = module_bytes(model, cache)
    model.list_devices = fake_devices(sum(modules[:3]) + workspace + 100, 1 << 40)
    model.load_autosplit(cache, reserve_vram=[100])
    assert model.placement == ["fake 0"] * 3 + ["fake 1"] * 4
    model.list_devices = fake_devices(sum(modules[:3]) + workspace + 99, 1 << 40)
    other = Cache(model, max_seq_len=256, lazy=True)
    model.load_autosplit(other, reserve_vram=[100, 0])
    assert model.placement == ["fake 0"] * 2 + ["fake 1"] * 5


def test_what_does_not_fit_is_refused_before_anything_is_read(folder: Path) -> None:
    model = Model(Config(folder))
    model.list_devices = fake_devices(1 << 20, 1 << 20)
    cache = Cache(model, max_seq_len=1 << 20, lazy=True)
    with pytest.raises(DoesNotFit, match=r"max_seq_len.*CacheQ4.*reserve_vram"):
        model.load_autosplit(cache, callback=lambda i, n: pytest.fail("nothing must be loaded"))
    assert not model.loaded
    assert not cache.allocated


def test_gpu_split_has_gb_of_weights(folder: Path) -> None:
    model = Model(Config(folder))
    model.list_devices = fake_devices(0, 0, 0)  # free memory does not matter: the user decides
    frozen = model.config.freeze()
    modules = estimate_modules(
        frozen, frozen.open_checkpoint(), compute_profile(frozen, [DeviceInfo("", CPU, 0)]), [0] * 5
    )
    first = sum(module.weights for module in modules[:4]) / (1 << 30)
    model.load([first, 1])
    assert model.placement == ["fake 0"] * 4 + ["fake 1"] * 3
    assert torch.equal(model.forward(IDS), loaded(folder).forward(IDS))
    model.load([0, 1])
    assert set(model.placement) == {"fake 1"}
    with pytest.raises(DoesNotFit, match=r"Raise the numbers of gpu_split"):
        model.load([0.00001, 0.00001])
    with pytest.raises(InputError, match="GB for each device"):
        model.load([-1, 2])
    model.load([0, first, 1, 24])  # there is no fourth device
    assert model.placement == ["fake 1"] * 4 + ["fake 2"] * 3
    with pytest.raises(DoesNotFit, match=r"usable are fake 0 0\.0 MB, fake 1 0\.0 MB, fake 2"):
        model.load([0, 0, 0.00001, 24])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"context": 0}, "context must be a whole number of at least 1"),
        ({"context": 8.5}, "context must be"),
        ({"users": 0}, "users must be"),
        ({"memory": []}, r"memory is a list with GB for each GPU, as in \[24, 24\]"),
        ({"memory": 24}, "memory is a list"),
        ({"memory": ["24"]}, "memory is a list"),
        ({"memory": [24, float("inf")]}, "memory is a list"),
        ({"memory": [1e300]}, "memory is a list"),
        ({"reserve_vram": -5e8}, "reserve_vram is a number of bytes that are left free, 0 or more"),
        ({"reserve_vram": [0, -1]}, "reserve_vram is"),
        ({"reserve_vram": float("nan")}, "reserve_vram is"),
        ({"reserve_vram": [float("inf")]}, "reserve_vram is"),
        ({"reserve_vram": "1"}, "reserve_vram is a number of bytes"),
        ({"reserve_vram": ["1"]}, "reserve_vram is"),
    ],
)
def test_a_plan_without_tokens_is_refused(folder: Path, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Model(Config(folder)).plan(**{"context": 256, **wrong})
    model = Model(Config(folder))
    assert model.plan(256, memory=[1], reserve_vram=5e8) == model.plan(256, memory=[1], reserve_vram=[500000000])
    assert not model.plan(10**30, users=10**30, memory=[1]).fits


def test_devices_by_name(folder: Path) -> None:
    assert [info.device for info in list_devices("cpu, cpu")] == [CPU, CPU]
    assert list_devices(None)[0].free > 1 << 20
    config = Config(folder)
    config.device = "cpu,cpu"
    model = Model(config)
    model.load()
    assert set(model.placement) == {"cpu"}
    assert torch.equal(model.forward(IDS), loaded(folder).forward(IDS))
    config.device = "cpu,toaster"
    with pytest.raises(InputError, match="'toaster' is not a device"):
        model.load()


def test_a_tied_head_gets_its_own_table_elsewhere(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path, tie_word_embeddings=True)
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    model, frozen = Model(Config(folder)), Config(folder).freeze()
    model.list_devices = fake_devices(0, 0)
    modules = estimate_modules(
        frozen, frozen.open_checkpoint(), compute_profile(frozen, [DeviceInfo("", CPU, 0)]), [0, 0]
    )
    assert modules[-1].shared == 64 * 32 * 4
    exact = sum(module.weights for module in modules)  # on one device the shared table counts once
    model.load([exact / (1 << 30)])
    model.load([sum(module.weights for module in modules[:-1]) / (1 << 30), 1])
    assert model.placement == ["fake 0"] * 3 + ["fake 1"]
    assert torch.equal(model.forward(IDS), loaded(folder).forward(IDS))


@pytest.mark.parametrize("name", ["tiny-lm", "tiny-lm-exl2-4.0bpw", "tiny-lm-gptq-g128-act", "gptqmodel-w4-g32-v2"])
def test_the_estimate_is_what_loading_takes(fixtures_dir: Path, name: str) -> None:
    frozen = Config(fixtures_dir / name).freeze()
    source, hidden, vocab = frozen.open_checkpoint(), frozen.spec.hidden, frozen.spec.vocab
    modules = estimate_modules(
        frozen, source, compute_profile(frozen, [DeviceInfo("", CPU, 0)]), [0] * len(frozen.spec.layers)
    )
    loaded_bytes: dict[str, int] = {}
    for role, wide, high, bias in matrices(frozen.spec):
        weight = source.weight(role, wide, high, bias=bias, dtype=torch.float32, device=CPU)
        loaded_bytes[role[:8]] = loaded_bytes.get(role[:8], 0) + weight.nbytes
    loaded_bytes["embedding"] = source.weight("embed", hidden, vocab, bias=False, dtype=None, device=CPU).nbytes
    for module in modules:
        assert loaded_bytes[module.name] * 0.98 <= module.weights <= loaded_bytes[module.name] * 1.1


def live_tensor_bytes() -> int:
    """Bytes of all live tensors."""
    gc.collect()
    seen = {o.untyped_storage().data_ptr(): o for o in gc.get_objects() if type(o) is torch.Tensor}
    return sum(o.untyped_storage().nbytes() for o in seen.values() if o.device == CPU)


def test_ranks_use_present_devices(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    gpus = [DeviceInfo(f"cuda:{i}", torch.device("cuda", i), 0) for i in range(2)]
    assert rank_devices(gpus[:1], [16, 24]) == (gpus[:1], [DeviceBudget("cuda:0", 16 << 30)])
    assert rank_devices(gpus, [0, 24, 0, 8]) == (gpus[1:], [DeviceBudget("cuda:1", 24 << 30)])
    ignored = [line.rpartition(": ")[2].partition(" is ignored")[0] for line in caplog.messages]
    assert ignored == ["[24]", "[0, 8]"]
    with pytest.raises(InputError, match=r"\[0, 0, 8\] gives nothing to the devices .* \(cuda:0, cuda:1\)"):
        rank_devices(gpus, [0, 0, 8])
    model = Model(Config(folder))
    model.list_devices = fake_devices(0, 0)
    caplog.clear()
    model.load_tp([1, 0, 24])
    assert len(caplog.messages) == 1
    assert (model.tp_context, set(model.placement)) == (1, {"fake 0"})


def test_a_generator_over_two_devices(fixtures_dir: Path) -> None:
    folder = fixtures_dir / "tiny-lm-exl2-4.0bpw"
    texts = []
    for split in (None, [0.001, 1]):
        model = Model(Config(folder))
        model.list_devices = fake_devices(0, 0)
        model.load(split)
        generator = Generator(model, CacheQ4(model, max_seq_len=512), Tokenizer(model.config))
        texts.append(generator.generate("Once upon a time", 30, gen_settings=Settings.greedy()))
        assert len(set(model.placement)) == (1 if split is None else 2)
    assert texts[0] == texts[1]


def test_twenty_loads_leave_nothing_behind(folder: Path) -> None:
    model = Model(Config(folder))
    model.list_devices = fake_devices(1 << 40, 1 << 40)

    def round_trip() -> None:
        cache = Cache(model, max_seq_len=512, lazy=True)
        model.load_autosplit(cache)
        model.forward(IDS, cache)
        model.unload()

    round_trip()
    before = live_tensor_bytes()
    for _ in range(20):
        round_trip()
    assert live_tensor_bytes() == before


@pytest.fixture(scope="module")
def adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA of all matrices, including the embedding."""
    table = ("model.embed_tokens", 64, 32)
    return peft.write_adapter(tmp_path_factory.mktemp("lora"), peft.matrix_shapes(folder), embedding=table).folder


def test_an_adapter_over_several_devices(folder: Path, adapter: Path) -> None:
    outputs = []
    for devices in (1, 3):
        model = Model(Config(folder))
        cache = Cache(model, max_seq_len=256, lazy=True)
        *modules, workspace = module_bytes(model, cache)
        model.list_devices = fake_devices(*[sum(modules) // devices + max(modules) + workspace] * devices)
        model.load_autosplit(cache, reserve_vram=0)
        assert len(set(model.placement)) == devices
        plain = model.forward(IDS)
        lora = Lora.from_directory(model, adapter)
        outputs.append(model.forward(IDS, cache, loras=(lora, 0.7)))
        assert not torch.allclose(outputs[-1], plain, atol=0.1)
        lora.unload()
        assert torch.equal(model.forward(IDS), plain)
    assert torch.equal(*outputs)


def test_an_adapter_goes_where_its_layer_is(folder: Path) -> None:
    model = loaded(folder)
    assert model._loaded is not None
    devices = [torch.device("cuda", i) for i in range(7)]
    module_backends: Any = tuple(SimpleNamespace(device=device) for device in devices)
    device_of = replace(model._loaded, module_backends=module_backends).device_of
    roles = ["embed", *(f"layers.{i}.attn.q" for i in range(5)), "head"]
    assert [device_of(role) for role in roles] == devices


@pytest.mark.gpu
def test_an_adapter_on_a_gpu_and_the_cpu(folder: Path, adapter: Path) -> None:
    outputs = []
    for device, split in (("cuda:0,cpu", [0.00004, 1]), ("cpu", None)):
        config = Config(folder)
        config.device, config.dtype = device, "float32"
        model = Model(config)
        model.load(split)
        assert ",".join(dict.fromkeys(model.placement)) == device
        outputs.append(model.forward(IDS, loras=Lora.from_directory(model, adapter)).cpu())
    assert torch.allclose(*outputs, atol=1e-3)


def test_memory_that_is_free_is_read_from_the_system() -> None:
    text = Path("/proc/meminfo").read_text()
    found = re.search(r"MemAvailable:\s*(\d+)", text)
    assert found is not None
    assert abs(list_devices("cpu")[0].free / 1024 - int(found[1])) < 2e6


def test_prompts_on_a_gpu_need_room_for_matrices_in_full(fixtures_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = Config(fixtures_dir / "tiny-lm-exl2-4.0bpw").freeze()
    source, num_layers, layer = frozen.open_checkpoint(), len(frozen.spec.layers), frozen.spec.layers[0]
    hidden, attn, width = frozen.spec.hidden, layer.attention, layer.mlp.width
    gpu = ComputeProfile(torch.float16, uses_reference=False)
    merged = estimate_modules(frozen, source, gpu, [0] * num_layers)
    largest_merged = 2 * hidden * max(2 * width, (attn.heads + 2 * attn.kv_heads) * attn.head_dim)
    monkeypatch.setattr("exlm.model.placement.MAX_DEQUANT_BYTES", 1)  # no GEMM of several matrices
    separate = estimate_modules(frozen, source, gpu, [0] * num_layers)
    largest = 2 * hidden * max(width, attn.heads * attn.head_dim)
    more = {one.workspace - other.workspace for one, other in zip(merged[1:-1], separate[1:-1], strict=True)}
    assert more == {largest_merged - largest}
    assert merged[-1] == separate[-1]  # the head computes few rows


def test_recurrent_states_are_part_of_the_cache(fixtures_dir: Path) -> None:
    model = Model(Config(fixtures_dir / "tiny-qwen3_5"))
    few, many = (model.plan(512, users, memory=[1]) for users in (1, 5))
    pages = 2 * 256 * 2 * 2 * 64 * 2  # two pages of one attention layer in float16
    state = 3 * (4 * 64 * 64 * 4 + 3 * 512 * 2)  # three delta nets
    assert STATES_PER_SEQUENCE == SLOTS_PER_SEQUENCE
    for users, plan in ((1, few), (5, many)):
        assert plan.state_bytes == plan.devices[0].states == users * STATES_PER_SEQUENCE * state
        assert plan.devices[0].cache == users * (pages + STATES_PER_SEQUENCE * state)
    assert few.devices[0].workspace == many.devices[0].workspace
    on_cpu = [model.plan(512, users).devices[0].workspace for users in (1, 5)]
    assert on_cpu[1] - on_cpu[0] >= 4 * 3 * 4 * 64 * 64 * 4  # plain torch has a few states of each row in memory
    assert Model(Config(fixtures_dir / "tiny-lm")).plan(512, memory=[1]).state_bytes == 0


def test_a_delta_nets_projections_are_dequantised_together(tmp_path: Path) -> None:
    shape = replace(
        SHAPES["qwen3.5-27b"], hidden=128, layers=4, mlp=32, heads=4, kv_heads=2, vocab=320, head=32, state_dim=64
    )
    frozen = Config(write_model_folder(tmp_path, shape, 64)).freeze()
    gpu = ComputeProfile(torch.float16, uses_reference=False)
    by_format = [
        estimate_modules(frozen, SyntheticCheckpoint(frozen.spec, synthetic_format(form)), gpu, [0] * 4)[1].workspace
        for form in ("exl2", "dense")
    ]
    qkv = 128 * (2 * 16 * 64 + 48 * 64)
    assert by_format[0] - by_format[1] == 2 * qkv


@pytest.mark.parametrize("method", ["load_pipeline", "load_tp"])
def test_other_processes_keep_no_states(fixtures_dir: Path, method: str) -> None:
    config = Config(fixtures_dir / "tiny-qwen3_5")
    config.device = "cpu"
    model = Model(config)
    with pytest.raises(Unsupported, match=r"recurrent.*load_autosplit"):
        getattr(model, method)([1, 1])
    assert not model.loaded


def test_a_lazy_cache_makes_room_for_its_states(fixtures_dir: Path) -> None:
    model = Model(Config(fixtures_dir / "tiny-qwen3_5"))
    model.list_devices = fake_devices(128 << 20)
    cache = Cache(model, batch_size=500, max_seq_len=1, lazy=True)
    with pytest.raises(DoesNotFit, match=r"One sequence's recurrent state takes 0\.2 MB.*fewer sequences"):
        model.load_autosplit(cache, reserve_vram=0)
    model.load_autosplit(Cache(model, batch_size=2, max_seq_len=1, lazy=True), reserve_vram=0)
    assert model.loaded


@pytest.mark.parametrize("rows", [1, 16])
def test_the_workspace_of_a_recurrence_is_enough(
    fixtures_dir: Path, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXLM_CPU", "0")  # plain torch, which takes the most
    model = Model(Config(fixtures_dir / "tiny-qwen3_5"))
    model.config.max_input_len = 512
    model.load()
    frozen, cache = model.config.freeze(), Cache(model, batch_size=rows, max_seq_len=512)
    profile = replace(compute_profile(frozen, list_devices("cpu"), cache.num_pages * 256), sequences=rows)
    modules = estimate_modules(frozen, frozen.open_checkpoint(), profile, cache.layer_bytes())
    ids = torch.arange(512 // rows).expand(rows, -1)
    cache.layers  # noqa: B018  # allocated before memory is watched
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as watched:
        model.forward(ids, cache, preprocess_only=True)
    in_use = peak = 0
    events: Any = watched.profiler
    for event in sorted(events.kineto_results.events(), key=lambda one: one.start_ns()):
        if event.name() == "[memory]":
            in_use += event.nbytes()
            peak = max(peak, in_use)
    assert peak <= max(module.workspace for module in modules) <= 8 * peak
