"""GGUF files of mixes: the tensor types that llama.cpp's quantiser chooses, and files that readers accept."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from exlm import Cache, Config, Generator, InputError, Model, Tokenizer, env
from exlm.bench import mix_comparison
from exlm.bench.gguf_mix import Mix, MixMatrix, random_blocks, write_mix
from exlm.bench.shapes import MIXES, SHAPES
from exlm.checkpoint.gguf_file import read_gguf_header
from exlm.formats import gguf as gguf_format
from exlm.kernels.packed_store import PACKED_FOLDER, PackedStore, write_all

LLAMA_8B, TINYLLAMA, LLAMA_70B = (SHAPES[name] for name in ("llama-3-8b", "tinyllama-1.1b", "llama-3-70b"))


def layers_of(mix: Mix, role: str, type_name: str) -> list[int]:
    """The layers whose matrix of this role has this type."""
    rows = [int(one.name.split(".")[1]) for one in mix.matrices() if f".{role}." in one.name]
    types = [one.type_name for one in mix.matrices() if f".{role}." in one.name]
    return [row for row, found in zip(rows, types, strict=True) if found == type_name]


def test_the_k_mixes_give_some_layers_more_bits() -> None:
    # Of 32 layers, those that llama.cpp's use_more_bits names: the published files of Llama-3-8B have Q6_K there.
    more = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    for name, default in (("q4_k_m", "Q4_K"), ("q5_k_m", "Q5_K")):
        mix = Mix(name, LLAMA_8B)
        assert layers_of(mix, "attn_v", "Q6_K") == layers_of(mix, "ffn_down", "Q6_K") == more
        assert layers_of(mix, "attn_q", default) == list(range(32))
        assert mix.types == {default: 1 + 32 * 7 - 2 * len(more), "Q6_K": 1 + 2 * len(more)}
    small = Mix("q3_k_m", LLAMA_8B)
    assert layers_of(small, "attn_v", "Q5_K") == layers_of(small, "ffn_down", "Q5_K") == [0, 1]
    assert layers_of(small, "attn_output", "Q4_K") == list(range(32))
    assert layers_of(small, "ffn_gate", "Q3_K") == list(range(32))
    codebook = Mix("iq4_xs", LLAMA_8B)
    assert layers_of(codebook, "attn_v", "Q5_K") == list(range(32))
    assert layers_of(codebook, "ffn_down", "Q5_K") == [0, 1, 2, 3]
    assert layers_of(Mix("iq4_xs", SHAPES["llama-2-7b"]), "attn_v", "Q5_K") == []  # one query head for each key head
    assert layers_of(Mix("q4_k_s", LLAMA_8B), "attn_v", "Q5_K") == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q6_k", "q8_0"])
def test_the_other_mixes_have_one_type_and_a_head_of_six_bits(name: str) -> None:
    types = [one.type_name for one in Mix(name, TINYLLAMA).matrices()]
    assert set(types[:-1]) == {MIXES[name]}
    assert types[-1] == ("Q8_0" if name == "q8_0" else "Q6_K")


def test_a_llama_of_80_layers_has_more_bits_for_values() -> None:
    assert Counter(one.type_name for one in Mix("q4_k_m", LLAMA_70B).matrices() if "attn_v" in one.name) == {
        "Q6_K": 40,
        "Q5_K": 40,
    }


def test_inputs_that_are_no_multiple_of_256_get_the_types_with_short_blocks() -> None:
    shape = SHAPES["smollm2-135m"]
    types = {name: set(Mix(name, shape).types) for name in ("q2_k", "q4_k_m", "q5_k_m", "q6_k", "iq4_xs")}
    assert types == {
        "q2_k": {"Q4_0", "Q3_K", "Q8_0"},  # 1,536 inputs of ffn_down are whole blocks; those of 576 are not
        "q4_k_m": {"Q5_0", "Q4_K", "Q6_K", "Q8_0"},
        "q5_k_m": {"Q5_1", "Q5_K", "Q6_K", "Q8_0"},
        "q6_k": {"Q8_0", "Q6_K"},
        "iq4_xs": {"IQ4_NL", "IQ4_XS", "Q5_K", "Q8_0"},
    }


@pytest.mark.parametrize(
    ("name", "bits"),
    [("q4_k_m", 4.85), ("q5_k_m", 5.68), ("q6_k", 6.56), ("q8_0", 8.5), ("q4_0", 4.62), ("q3_k_m", 3.98)],
)
def test_bits_per_weight(name: str, bits: float) -> None:
    """TinyLlama 1.1B as published: 4.85 bits in Q4_K_M, and so on."""
    assert Mix(name, TINYLLAMA).bits == pytest.approx(bits, abs=0.006)


def test_bytes_and_products_of_a_token() -> None:
    mix = Mix("q8_0", SHAPES["tiny"])
    layer = 256 * (256 + 128 + 128 + 256) + 3 * 256 * 512
    assert mix.prompt_products == 2 * layer
    assert mix.bytes_per_token == (2 * layer + 512 * 256) * 34 // 32


@pytest.mark.parametrize("type_name", sorted(gguf_format.BLOCK_LAYOUTS))
def test_random_blocks_have_the_deviation_of_trained_weights(type_name: str) -> None:
    matrix = MixMatrix("a", 2048, 96, type_name)
    raw = random_blocks(matrix)
    assert raw.numel() == matrix.nbytes
    assert torch.equal(raw, random_blocks(matrix))
    values = gguf_format.read(raw, type_name, 2048, 96, "a").dequantize().float()
    assert float(values.std()) == pytest.approx(2048**-0.5, rel=0.1)
    assert (
        abs(float(values.mean())) < 0.12 * 2048**-0.5
    )  # codes without a minimum have half a step more below zero than above


@pytest.mark.parametrize("name", sorted(MIXES))
def test_files_have_the_types_and_run(name: str, tmp_path: Path) -> None:
    mix, path = Mix(name, SHAPES["tiny"]), tmp_path / "model.gguf"
    write_mix(path, mix)
    header = read_gguf_header(path, path.read_bytes())
    stored = {one.name: header.tensors[one.name].dtype for one in mix.matrices()}
    assert stored == {one.name: one.type_name for one in mix.matrices()}
    matrices = [header.tensors[one.name] for one in mix.matrices()]
    weights = sum(one.shape[0] * one.shape[1] for one in matrices)
    assert 8 * sum(one.nbytes for one in matrices) / weights == pytest.approx(mix.bits)
    config = Config(path)
    config.device = "cpu"
    model = Model(config)
    model.load()
    tokenizer = Tokenizer(config)
    assert config.vocab_size == len(header.metadata["tokenizer.ggml.tokens"]) == 512
    text = Generator(model, Cache(model, max_seq_len=256), tokenizer).generate("a b", max_new_tokens=3)
    assert isinstance(text, str)
    model.unload()


def test_another_reader_finds_the_same(tmp_path: Path) -> None:
    other = pytest.importorskip("gguf")
    mix, path = Mix("q4_k_m", SHAPES["tiny"]), tmp_path / "model.gguf"
    write_mix(path, mix)
    reader = other.GGUFReader(path)
    found = {one.name: one for one in reader.tensors}
    assert [found[one.name].tensor_type.name for one in mix.matrices()] == [one.type_name for one in mix.matrices()]
    assert reader.fields["tokenizer.ggml.model"].contents() == "llama"
    assert reader.fields["llama.rope.freq_base"].contents() == 10000.0
    matrix = next(one for one in mix.matrices() if one.name == "blk.1.ffn_down.weight")
    assert (found[matrix.name].data == random_blocks(matrix).numpy()).all()
    assert (found["output_norm.weight"].data == 1).all()


def test_what_a_mix_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="--mix must be of"):
        Mix("q4", TINYLLAMA)
    with pytest.raises(InputError, match="dense Llama shapes"):
        Mix("q4_k_m", SHAPES["mixtral-8x7b"])


def test_packed_matrices_of_a_measured_file_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXLM_CACHE", str(tmp_path / "cache"))
    store = PackedStore(env.cache_folder() / PACKED_FOLDER, env.packed_cache_bytes())
    measured, other = tmp_path / "measured.gguf", tmp_path / "other.gguf"

    def fill(file: Any) -> object:
        write_all(file, memoryview(bytes(4096)))
        return {}

    for key, path in (("a" * 32, measured), ("b" * 32, other)):
        assert store.write(key, str(path), 4096, fill)
    mix_comparison._remove_packed_copies(measured)
    assert [entry.model for entry in store.entries()] == [str(other)]
