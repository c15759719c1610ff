"""Model files of random weights that both checkouts read: NAME TARGET.

They are written without exlm, so that they do not depend on a checkout: a 1.1B Llama as a Q4_K_M GGUF file,
which needs the packages gguf and numpy, and a small Llama folder with a chat template. Targets are written
atomically.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Halves = np.ndarray[Any, np.dtype[np.float16]]

SEED = 0

HIDDEN, LAYERS, MLP, HEADS, KV_HEADS, VOCAB = 2048, 22, 5632, 32, 4, 32000
"""TinyLlama's sizes."""

SPECIAL = ("<unk>", "<s>", "</s>")
UNKNOWN, CONTROL, NORMAL, BYTE = 2, 3, 1, 6
"""Kinds of tokens in GGUF."""

CHAT_VOCAB, CHAT_HIDDEN, CHAT_MLP, CHAT_LAYERS, CHAT_HEADS, CHAT_KV_HEADS = 512, 256, 512, 2, 4, 2
TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def write_gguf(target: Path) -> None:
    """Write a Llama of 1.1 billion weights, with the matrix types that llama.cpp uses for Q4_K_M."""
    import gguf

    kinds = gguf.GGMLQuantizationType
    random = np.random.default_rng(SEED)
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    tokens, token_kinds = gguf_vocabulary()
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(number) for number in range(VOCAB)])
    writer.add_token_types(token_kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, outputs, inputs, wide in gguf_matrices():
        make, kind = (q6_k, kinds.Q6_K) if wide else (q4_k, kinds.Q4_K)
        writer.add_tensor(name, make(outputs, inputs, random), raw_dtype=kind)
    for name in gguf_norms():
        writer.add_tensor(name, np.ones(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_matrices() -> Iterator[tuple[str, int, int, bool]]:
    """(name, outputs, inputs, whether it is Q6_K instead of Q4_K)."""
    kv = HIDDEN // HEADS * KV_HEADS
    yield "token_embd.weight", VOCAB, HIDDEN, False
    yield "output.weight", VOCAB, HIDDEN, True
    for layer in range(LAYERS):
        eighth = LAYERS // 8
        wide = layer < eighth or layer >= 7 * LAYERS // 8 or (layer - eighth) % 3 == 2
        at = f"blk.{layer}."
        yield at + "attn_q.weight", HIDDEN, HIDDEN, False
        yield at + "attn_k.weight", kv, HIDDEN, False
        yield at + "attn_v.weight", kv, HIDDEN, wide
        yield at + "attn_output.weight", HIDDEN, HIDDEN, False
        yield at + "ffn_gate.weight", MLP, HIDDEN, False
        yield at + "ffn_up.weight", MLP, HIDDEN, False
        yield at + "ffn_down.weight", HIDDEN, MLP, wide


def gguf_norms() -> Iterator[str]:
    """Names of the norms."""
    yield "output_norm.weight"
    for layer in range(LAYERS):
        yield f"blk.{layer}.attn_norm.weight"
        yield f"blk.{layer}.ffn_norm.weight"


def gguf_vocabulary() -> tuple[list[str], list[int]]:
    """A SentencePiece vocabulary: special tokens, bytes, and words."""
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    words = [f"\u2581w{number}" for number in range(VOCAB - len(tokens))]
    return tokens + words, kinds + [NORMAL] * len(words)


def q4_k(outputs: int, inputs: int, random: np.random.Generator) -> Bytes:
    """(outputs, bytes) random blocks of Q4_K: two float16 factors, 12 bytes of scales, 128 of codes."""
    blocks = random.integers(0, 256, (outputs, inputs // 256, 144), dtype=np.uint8)
    # Scales and minimums have six bits: 31.5 on average. Codes average 7.5, so the mean is about zero.
    scale = inputs**-0.5 / (31.5 * 4.6)
    blocks[..., 0:2] = _half(scale)
    blocks[..., 2:4] = _half(7.5 * scale)
    return blocks.reshape(outputs, -1)


def q6_k(outputs: int, inputs: int, random: np.random.Generator) -> Bytes:
    """(outputs, bytes) random blocks of Q6_K: 192 bytes of codes, 16 signed scales, one float16 factor."""
    blocks = random.integers(0, 256, (outputs, inputs // 256, 210), dtype=np.uint8)
    blocks[..., 208:210] = _half(inputs**-0.5 / (74 * 18.5))
    return blocks.reshape(outputs, -1)


def _half(value: float) -> Bytes:
    return np.frombuffer(np.float16(value).tobytes(), dtype=np.uint8)


def write_chat(target: Path) -> None:
    """Write a folder with config.json, float16 weights, a byte-level tokenizer and a chat template."""
    from safetensors.numpy import save_file

    target.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": CHAT_HIDDEN,
        "intermediate_size": CHAT_MLP,
        "num_hidden_layers": CHAT_LAYERS,
        "num_attention_heads": CHAT_HEADS,
        "num_key_value_heads": CHAT_KV_HEADS,
        "vocab_size": CHAT_VOCAB,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "float16",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (target / "config.json").write_text(json.dumps(config))
    _write_tokenizer(target)
    save_file(dict(chat_tensors()), target / "model.safetensors")


def chat_tensors() -> Iterator[tuple[str, Halves]]:
    """The weights; the head's row of the end token is zero, so an answer never ends before its limit."""
    random = np.random.default_rng(SEED)
    kv = CHAT_HIDDEN // CHAT_HEADS * CHAT_KV_HEADS

    def matrix(outputs: int, inputs: int) -> Halves:
        values: Halves = (random.standard_normal((outputs, inputs)) * inputs**-0.5).astype(np.float16)
        return values

    ones = np.ones(CHAT_HIDDEN, dtype=np.float16)
    head = matrix(CHAT_VOCAB, CHAT_HIDDEN)
    head[: len(SPECIAL)] = 0
    yield "lm_head.weight", head
    yield "model.embed_tokens.weight", matrix(CHAT_VOCAB, CHAT_HIDDEN)
    yield "model.norm.weight", ones
    for layer in range(CHAT_LAYERS):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", ones
        yield at + "post_attention_layernorm.weight", ones
        yield at + "self_attn.q_proj.weight", matrix(CHAT_HIDDEN, CHAT_HIDDEN)
        yield at + "self_attn.k_proj.weight", matrix(kv, CHAT_HIDDEN)
        yield at + "self_attn.v_proj.weight", matrix(kv, CHAT_HIDDEN)
        yield at + "self_attn.o_proj.weight", matrix(CHAT_HIDDEN, CHAT_HIDDEN)
        yield at + "mlp.gate_proj.weight", matrix(CHAT_MLP, CHAT_HIDDEN)
        yield at + "mlp.up_proj.weight", matrix(CHAT_MLP, CHAT_HIDDEN)
        yield at + "mlp.down_proj.weight", matrix(CHAT_HIDDEN, CHAT_MLP)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [f"\u0120w{number}" for number in range(CHAT_VOCAB - len(pieces))]
    tokenizer = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))


def main(name: str, target: Path) -> None:
    """Write beside the target, then rename."""
    target.parent.mkdir(parents=True, exist_ok=True)
    write = write_gguf if name.endswith(".gguf") else write_chat
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=target.parent) as temporary:
        write(Path(temporary) / target.name)
        os.rename(Path(temporary) / target.name, target)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
