"""A LoRA gives the logits of a merged model for the rows that use it, and changes no other row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exlm import LLM, Cache, Config, InputError, Lora, Model, NotLoaded
from exlm.formats import exl2, gptq
from exlm.lora.adapter import LoraExperts, LoraLinear
from exlm.model.inputs import SequenceExtras
from exlm.nn import LoraRef
from tests import tiny
from tests.lora import peft_folders as peft
from tests.model.random_quantized import random_exl2, random_gptq, replace_matrices
from tests.models import zoo

FAMILIES = [
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Phi3ForCausalLM",
    "Gemma2ForCausalLM",
    "MixtralForCausalLM",
    "GPT2LMHeadModel",
    "InternLM2ForCausalLM",
    "Qwen3MoeForCausalLM",
    "DbrxForCausalLM",
    "CohereForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
]
VOCAB = 100


def load(folder: Path) -> Model:
    model = Model(Config(folder))
    model.load()
    return model


def max_error(got: Tensor, want: Tensor) -> float:
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())


def embedding_of(folder: Path) -> tuple[str, int, int]:
    tensors = peft.load_file(folder / "model.safetensors")
    key = next(key for key in tensors if "embed_tokens" in key or "wte" in key or "tok_embeddings" in key)
    return key.removesuffix(".weight"), *tensors[key].shape


@pytest.mark.parametrize("architecture", FAMILIES)
def test_an_adapter_equals_merging(architecture: str, tmp_path: Path) -> None:
    folder = zoo.build(architecture, tmp_path / "model").folder
    transposed = architecture == "GPT2LMHeadModel"
    shapes = peft.matrix_shapes(folder, transposed=transposed)
    assert len(shapes) >= 4
    # In an untied model, adapting the embedding must not change the head.
    untied = "lm_head" in shapes
    first = peft.write_adapter(tmp_path / "a", shapes, embedding=embedding_of(folder) if untied else None)
    second = peft.write_adapter(tmp_path / "b", dict(list(shapes.items())[::2]), seed=1, r=2)
    ids = torch.randint(0, VOCAB, (2, 40))
    model = load(folder)
    plain = model.forward(ids)

    def merged(name: str, *adapters: tuple[peft.Adapter, float]) -> Tensor:
        merged_folder = peft.merge_into_model(folder, tmp_path / name, *adapters, transposed=transposed)
        return load(merged_folder).forward(ids)

    want, both = merged("one", (first, 1.0)), merged("both", (first, 0.5), (second, -0.7))
    one, two = Lora.from_directory(model, first.folder), Lora.from_directory(model, second.folder, -0.7)
    assert max_error(plain, want) > 1e-2
    assert torch.equal(model.forward(ids), plain)
    assert max_error(model.forward(ids, loras=one), want) < 1e-5
    assert max_error(model.forward(ids, loras=[(one, 0.5), two]), both) < 1e-5
    cache = Cache(model, batch_size=2, max_seq_len=64)
    parts = [model.forward(piece, cache, loras=[one]) for piece in ids.split(7, 1)]
    assert max_error(torch.cat(parts, 1), want) < 1e-5
    one.unload()
    two.unload()
    assert torch.equal(model.forward(ids), plain)


def test_tied_heads_can_be_adapted_alone(tmp_path: Path) -> None:
    folder = zoo.build("Gemma2ForCausalLM", tmp_path / "model").folder
    name, rows, width = embedding_of(folder)
    head = peft.write_adapter(tmp_path / "head", {"lm_head": (width, rows)})
    table = peft.write_adapter(tmp_path / "table", {}, embedding=(name, rows, width))
    both = peft.merge_into_model(folder, tmp_path / "merged", (head, 1.0))
    # The merged folder has a head of its own now, so changing its embedding does not change the head.
    both = peft.merge_into_model(both, tmp_path / "both", (table, 1.0))
    ids = torch.randint(0, VOCAB, (1, 30))
    model = load(folder)
    loras = [Lora.from_directory(model, adapter.folder) for adapter in (head, table)]
    assert max_error(model.forward(ids, loras=loras), load(both).forward(ids)) < 1e-5


def runner_logits(model: Model, rows: list[Tensor], active: list[tuple[LoraRef, ...]]) -> list[Tensor]:
    """The logits of all rows in one batch, each with its own adapters, from the generator's runner."""

    class Row:
        def __init__(self, ids: list[int], page: int, extras: SequenceExtras) -> None:
            self.ids, self.pages, self.extras = ids, [page], extras

    sequences = [
        Row(ids.tolist(), page, SequenceExtras(adapters))
        for page, (ids, adapters) in enumerate(zip(rows, active, strict=True))
    ]
    cache = Cache(model, max_seq_len=256 * len(rows))
    fed = [row.ids for row in sequences]
    return list(model.runner(cache).decode(sequences, [0] * len(rows), fed))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Phi3ForCausalLM", "MixtralForCausalLM"])
def test_rows_with_different_adapters_in_one_batch(architecture: str, tmp_path: Path) -> None:
    folder = zoo.build(architecture, tmp_path / "model").folder
    shapes = peft.matrix_shapes(folder)
    first = peft.write_adapter(tmp_path / "a", shapes)
    second = peft.write_adapter(tmp_path / "b", dict(list(shapes.items())[1::3]), seed=1, r=3)
    model = load(folder)
    one, two = (Lora.from_directory(model, adapter.folder) for adapter in (first, second))
    sets: list[Any] = [None, one, two, [one, (two, 0.25)], None, one]
    merged = [
        load(peft.merge_into_model(folder, tmp_path / str(n), *adapters))
        for n, adapters in enumerate(
            [[], [(first, 1.0)], [(second, 1.0)], [(first, 1.0), (second, 0.25)], [], [(first, 1.0)]]
        )
    ]
    rows = [torch.randint(0, VOCAB, (20,)) for _ in sets]
    active = [model.make_extras([], loras).adapters for loras in sets]
    got = runner_logits(model, rows, active)
    for row, logits, merged_model in zip(rows, got, merged, strict=True):
        assert max_error(logits, merged_model.forward(row[None])[0]) < 1e-5
    for n in range(len(rows)):
        (alone,) = runner_logits(model, rows[n : n + 1], active[n : n + 1])
        assert max_error(alone, got[n]) < 1e-5


def test_a_row_does_not_depend_on_its_batch(tmp_path: Path) -> None:
    """The low-rank product is the same bit for bit; only the base kernel may depend on the batch."""
    model = load(tiny.make(tmp_path / "model"))
    adapter = peft.write_adapter(tmp_path / "a", {"model.layers.0.mlp.up_proj": (32, 48)})
    lora = Lora.from_directory(model, adapter.folder)
    linear: Any = model._require_loaded().decoder.blocks[0].mlp.up  # type: ignore[attr-defined]
    assert isinstance(linear, LoraLinear)
    x, on = torch.randn(9, 3, 32), (LoraRef(lora.number, 1.0),)

    class Batch:
        def __init__(self, adapters: Any) -> None:
            self.adapters = adapters

    linear.inner.kernel = lambda x: torch.zeros(*x.shape[:-1], 48)
    whole = linear.forward(x, Batch((on,) * 9))
    some = linear.forward(x, Batch(((), on, (), on, on, (), (), (), on)))
    for row in range(9):
        alone = linear.forward(x[row : row + 1], Batch((on,)))[0]
        assert torch.equal(alone, whole[row])
        assert torch.equal(some[row], alone if row in (1, 3, 4, 8) else torch.zeros(3, 48))


@pytest.mark.parametrize(("write", "make"), [(exl2.write, random_exl2), (gptq.write, random_gptq)])
def test_quantised_matrices(write: Any, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The merged model has the weights that formats define, rounded to float16.
    monkeypatch.setenv("EXLM_CPU", "0")
    folder = tiny.make(tmp_path / "model", hidden_size=64, intermediate_size=128)
    shapes = peft.matrix_shapes(folder)
    replace_matrices(folder, tmp_path / "dense", write, make, r"_proj|lm_head")
    adapter = peft.write_adapter(tmp_path / "a", shapes, embedding=("model.embed_tokens", 64, 64))
    model = load(folder)
    lora = Lora.from_directory(model, adapter.folder)
    merged = load(peft.merge_into_model(tmp_path / "dense", tmp_path / "merged", (adapter, 1.0)))
    ids = torch.randint(3, 60, (2, 40))
    assert max_error(model.forward(ids, loras=lora), merged.forward(ids)) < 1e-5
    assert max_error(model.forward(ids), merged.forward(ids)) > 1e-2


def test_adapters_can_be_loaded_and_unloaded(tmp_path: Path) -> None:
    model = load(zoo.build("MixtralForCausalLM", tmp_path / "model").folder)
    decoder = model._require_loaded().decoder
    mlp: Any = decoder.blocks[0].mlp
    kinds = {type(decoder.head.linear), type(mlp.experts), type(decoder.blocks[0].mixer.o)}
    shapes = peft.matrix_shapes(tmp_path / "model")
    one = Lora.from_directory(model, peft.write_adapter(tmp_path / "a", shapes).folder)
    two = Lora.from_directory(model, peft.write_adapter(tmp_path / "b", shapes, seed=1).folder)
    assert isinstance(mlp.experts, LoraExperts)
    assert isinstance(mlp.router, LoraLinear)
    ids = torch.randint(0, VOCAB, (1, 12))
    second = model.forward(ids, loras=two)
    one.unload()
    one.unload()
    assert torch.equal(model.forward(ids, loras=two), second)
    with pytest.raises(NotLoaded, match="not installed"):
        model.forward(ids, loras=one)
    two.unload()
    assert {type(decoder.head.linear), type(mlp.experts), type(decoder.blocks[0].mixer.o)} == kinds


def test_an_adapter_is_unloaded_with_its_model(tmp_path: Path) -> None:
    model = load(tiny.make(tmp_path / "model"))
    folder = peft.write_adapter(tmp_path / "a", {"model.layers.0.mlp.up_proj": (32, 48)}).folder
    lora = Lora.from_directory(model, folder)
    model.load()
    with pytest.raises(NotLoaded, match="not installed in this model"):
        model.forward(torch.tensor([[3, 4]]), loras=lora)
    lora.unload()
    model.unload()
    with pytest.raises(NotLoaded, match=r"model\.load"):
        Lora.from_directory(model, folder)


@pytest.mark.parametrize("wrong", ["a", 3, [None], ["a"], [("a", 1.0)]])
def test_wrong_adapters_are_refused(wrong: Any, tmp_path: Path) -> None:
    model = load(tiny.make(tmp_path / "model"))
    with pytest.raises(InputError, match="must be adapters"):
        model.forward(torch.tensor([[3, 4]]), loras=wrong)


def test_a_folder_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    model = load(tiny.make(tmp_path / "model"))
    peft.write_adapter(tmp_path / "a", {"model.layers.0.mlp.up_proj": (32, 48)})
    assert Lora.from_directory(model, "~/a").loaded
    assert Lora(model, "~/a/adapter_config.json", "~/a/adapter_model.safetensors").loaded


def test_an_llm_instead_of_a_model_is_refused(tmp_path: Path) -> None:
    folder = peft.write_adapter(tmp_path / "a", {"model.layers.0.mlp.up_proj": (32, 48)}).folder
    with LLM(tiny.make_chat_folder(tmp_path / "model")) as llm:
        wrong: Any = llm
        with pytest.raises(InputError, match=r"a Model, found LLM: of an LLM, into llm\.model"):
            Lora.from_directory(wrong, folder)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), "1", None, True])
def test_strengths_are_finite_numbers(wrong: Any, tmp_path: Path) -> None:
    model = load(tiny.make(tmp_path / "model"))
    folder = peft.write_adapter(tmp_path / "a", {"model.layers.0.mlp.up_proj": (32, 48)}).folder
    with pytest.raises(InputError, match="finite number"):
        Lora.from_directory(model, folder, wrong)
