"""GGUF files as folders of safetensors: tensors, description and tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from exlm import Config, Unsupported, convert_model
from exlm.convert.side_files import MODEL_TYPES
from tests.checkpoint import gguf_hybrids, gguf_models
from tests.checkpoint.gguf_bytes import write_gguf as write_gguf
from tests.convert.conversion_helpers import (
    assert_same,
    assert_tokenizers,
    read_config,
    read_tensors,
    reference_logits,
)
from tests.models import zoo


@pytest.mark.parametrize("variant", gguf_models.VARIANTS)
def test_gguf_floats_become_a_folder(tmp_path: Path, variant: str) -> None:
    gguf_models.write_model(tmp_path / "m.gguf", variant)
    for to in ("safetensors", "dense"):
        target = convert_model(tmp_path / "m.gguf", tmp_path / to, to)
        assert_same(tmp_path / "m.gguf", target)
        one, two = Config(tmp_path / "m.gguf").spec, Config(target).spec
        assert (one.layers, one.names, one.final_norm, one.embed) == (
            two.layers,
            two.names,
            two.final_norm,
            two.embed,
        )


@pytest.mark.parametrize("name", gguf_hybrids.CASES)
def test_hybrids_in_gguf_become_a_folder(tmp_path: Path, name: str) -> None:
    """Biases of convolutions, decays and skip factors included."""
    arch, architecture, overrides = gguf_hybrids.CASES[name]
    source = gguf_hybrids.write(zoo.build(architecture, tmp_path / "old", **overrides), tmp_path / "m.gguf", arch)
    assert_same(source, convert_model(source, tmp_path / "new"))


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float16, "F16"), (torch.bfloat16, "BF16")])
def test_gguf_floats_keep_their_precision(tmp_path: Path, dtype: torch.dtype, kind: str) -> None:
    source = make_gguf(tmp_path / "m.gguf", "llama", kind)
    target = convert_model(source, tmp_path / "new")
    assert_same(source, target)
    stored = read_tensors(target)
    assert stored["model.layers.0.mlp.up_proj.weight"].dtype == dtype
    assert stored["model.embed_tokens.weight"].dtype == dtype
    assert stored["model.norm.weight"].dtype == torch.float32


def make_gguf(
    path: Path, variant: str, kind: str, more: dict[str, Any] | None = None, leave_out: tuple[str, ...] = ()
) -> Path:
    """A tiny model with its matrices in any type and anything else in its metadata."""
    model, (arch, _) = gguf_models.model_spec(variant), gguf_models.VARIANTS[variant]
    arrays, kinds = {}, {}
    for name, tensor in gguf_models.converted_tensors(model, arch, gguf_models.random_tensors(model)).items():
        if name in leave_out:
            continue
        array = np.ascontiguousarray(tensor.numpy())
        if tensor.dim() == 2:
            kinds[name] = gguf.GGMLQuantizationType[kind]
            array = gguf.quants.quantize(array, kinds[name])
        arrays[name] = array
    values = {**gguf_models.metadata(variant), **(more or {})}
    del values["general.architecture"]
    return write_gguf(path, arch, arrays, values, kinds)


@pytest.mark.parametrize("variant", ["llama", "gemma2", "phi3"])
@pytest.mark.parametrize("tied", [False, True])
def test_gguf_blocks_become_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, tied: bool) -> None:
    monkeypatch.setenv("EXLM_CPU", "0")  # weights are compared, not the kernels' activations of sixteen bits
    source = make_gguf(tmp_path / "m.gguf", variant, "Q8_0", leave_out=("output.weight",) if tied else ())
    target = convert_model(source, tmp_path / "new", "dense")
    assert_same(source, target, forms={"dense float32"} | ({"tied to the embedding"} if tied else set()))
    assert read_config(target)["tie_word_embeddings"] is tied
    assert all(tensor.dtype == torch.float32 for tensor in read_tensors(target).values())


@pytest.mark.parametrize("to", ["safetensors", "exl2", "gptq", "gptq-v2"])
def test_gguf_blocks_have_no_other_form(tmp_path: Path, to: str) -> None:
    source = make_gguf(tmp_path / "m.gguf", "llama", "Q8_0")
    with pytest.raises(Unsupported, match=f'embed is stored as gguf Q8_0 and cannot become {to}: .*"dense"'):
        convert_model(source, tmp_path / "new", to)
    assert not (tmp_path / "new").exists()


def test_gguf_types_that_are_only_read_rounded_are_refused(tmp_path: Path) -> None:
    source = make_gguf(tmp_path / "m.gguf", "llama", "F16")
    tensors = {t.name: t for t in gguf.GGUFReader(source).tensors}
    raw_rows = np.zeros((64, 17 * 2), dtype=np.uint8)  # 64 inputs of MXFP4
    arrays = {n: raw_rows if n == "blk.1.attn_v.weight" else t.data for n, t in tensors.items()}
    arrays["blk.1.attn_v.weight"] = raw_rows[:32]
    kinds = {n: t.tensor_type for n, t in tensors.items()}
    kinds["blk.1.attn_v.weight"] = gguf.GGMLQuantizationType.MXFP4
    values = {k: v for k, v in gguf_models.metadata("llama").items() if k != "general.architecture"}
    write_gguf(tmp_path / "x.gguf", "llama", arrays, values, kinds)
    with pytest.raises(Unsupported, match=r"layers\.1\.attn\.v is stored as gguf MXFP4.*rounds to float16"):
        convert_model(tmp_path / "x.gguf", tmp_path / "new", "dense")


def test_gguf_tensors_without_a_role_would_be_lost(tmp_path: Path) -> None:
    model = gguf_models.model_spec("llama")
    tensors = gguf_models.converted_tensors(model, "llama", gguf_models.random_tensors(model))
    arrays = {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in tensors.items()}
    values = {k: v for k, v in gguf_models.metadata("llama").items() if k != "general.architecture"}
    write_gguf(tmp_path / "x.gguf", "llama", {**arrays, "blk.0.extra.weight": arrays["output_norm.weight"]}, values)
    with pytest.raises(Unsupported, match=r"'blk\.0\.extra\.weight'.*would be lost"):
        convert_model(tmp_path / "x.gguf", tmp_path / "new")


def test_architectures_without_a_model_type_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf_models.write_model(tmp_path / "m.gguf", "llama")
    monkeypatch.delitem(MODEL_TYPES, "LlamaForCausalLM")
    with pytest.raises(Unsupported, match=r"m\.gguf: .*LlamaForCausalLM.* no model_type"):
        convert_model(tmp_path / "m.gguf", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_rotary_factors_of_gguf_go_into_the_config(tmp_path: Path) -> None:
    model = gguf_models.model_spec("llama")
    tensors = gguf_models.converted_tensors(model, "llama", gguf_models.random_tensors(model))
    arrays = {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in tensors.items()}
    arrays["rope_freqs.weight"] = np.linspace(1, 7.3, 8, dtype=np.float32)
    values = {k: v for k, v in gguf_models.metadata("llama").items() if k != "general.architecture"}
    source = write_gguf(tmp_path / "m.gguf", "llama", arrays, values)
    target = convert_model(source, tmp_path / "new")
    assert_same(source, target)
    assert Config(source).spec.layers == Config(target).spec.layers


TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def byte_level(**more: Any) -> dict[str, Any]:
    tokens = [*sorted(gguf_alphabet()), "he", "ll", "hell", "<s>", "</s>"]
    kinds = [1] * (len(tokens) - 2) + [3, 3]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["h e", "l l", "he ll"],
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": TEMPLATE,
        **more,
    }


def gguf_alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return list(pre_tokenizers.ByteLevel.alphabet())


def pieces() -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", "<|end|>", *(f"<0x{n:02X}>" for n in range(256))]
    tokens += ["▁", "h", "e", "l", "o", "he", "ll", "▁he", "▁hell", "hell"]
    special = [2, 3, 3, 3, *[6] * 256]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": special + [1] * (len(tokens) - len(special)),
        "tokenizer.ggml.scores": [0.0] * len(special) + [-float(n) for n in range(len(tokens) - len(special))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }


@pytest.mark.parametrize(("variant", "words"), [("llama", byte_level()), ("llama", pieces()), ("phi3", pieces())])
def test_the_tokenizer_inside_gguf_becomes_files(tmp_path: Path, variant: str, words: dict[str, Any]) -> None:
    vocab = len(words["tokenizer.ggml.tokens"])
    model, (arch, _) = gguf_models.model_spec(variant), gguf_models.VARIANTS[variant]
    tensors = gguf_models.converted_tensors(model, arch, gguf_models.random_tensors(model))
    for name in ("token_embd.weight", "output.weight"):
        tensors[name] = torch.randn(vocab, 64)
    arrays = {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in tensors.items()}
    values = {k: v for k, v in gguf_models.metadata(variant).items() if k != "general.architecture"} | words
    source = write_gguf(tmp_path / "m.gguf", arch, arrays, values)
    target = convert_model(source, tmp_path / "new")
    assert_same(source, target)
    tokenizer = assert_tokenizers(source, target, "<s>hello hell 12 ü<|end|>  he</s>\n")
    assert tokenizer.chat_templates.choose().source == TEMPLATE
    assert Config(target).eos_token_ids == Config(source).eos_token_ids
    names = {path.name for path in target.iterdir()}
    own = "tokenizer.json" if words["tokenizer.ggml.model"] == "gpt2" else "tokenizer.model"
    assert names == {"config.json", "model.safetensors", "tokenizer_config.json", own}


def test_another_library_reads_what_came_from_gguf(tmp_path: Path) -> None:
    import transformers

    source = make_gguf(tmp_path / "m.gguf", "qwen3", "F32")
    target = convert_model(source, tmp_path / "new")
    with zoo.silence_transformers():
        oracle = transformers.AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager")
    ids = torch.randint(3, 60, (2, 40), generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), zoo.silence_transformers():
        want = oracle(ids).logits
    torch.testing.assert_close(reference_logits(target), want, rtol=1e-4, atol=1e-4)
