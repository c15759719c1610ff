"""A tiny random Llama folder, written without transformers: for tests of everything but the families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tensors(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random weights for a Llama config, in the spelling its files use."""
    hidden, width, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head = config.get("head_dim", hidden // heads)
    q, kv = heads * head, config["num_key_value_heads"] * head
    generator = torch.Generator().manual_seed(7)

    def rand(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    out = {"model.embed_tokens.weight": rand(config["vocab_size"], hidden) * 4}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        out |= {
            at + "input_layernorm.weight": (rand(hidden) * 0.5 + 1),
            at + "post_attention_layernorm.weight": (rand(hidden) * 0.5 + 1),
            at + "self_attn.q_proj.weight": rand(q, hidden),
            at + "self_attn.k_proj.weight": rand(kv, hidden),
            at + "self_attn.v_proj.weight": rand(kv, hidden),
            at + "self_attn.o_proj.weight": rand(hidden, q),
            at + "mlp.gate_proj.weight": rand(width, hidden),
            at + "mlp.up_proj.weight": rand(width, hidden),
            at + "mlp.down_proj.weight": rand(hidden, width),
        }
    out["model.norm.weight"] = rand(hidden) * 0.5 + 1
    out["lm_head.weight"] = rand(config["vocab_size"], hidden)
    return out


def make(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A model folder: config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors(config, dtype), folder / "model.safetensors")
    return folder


def make_chat_folder(folder: Path, **changes: Any) -> Path:
    """A model folder with a byte-level tokenizer and a chat template beside the weights."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    specials = ["<pad>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in specials])
    make(folder, vocab_size=len(vocab), **changes)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    words = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    return folder
