"""Texts, vocabularies and folders that the tests of `exlm.tokenizer` share."""

from __future__ import annotations

import importlib.util
import json
import random
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "In 1995 there were 1024 of them; now there are 65536 more.",
    "def main(argv):\n    return 0\n\n\nif __name__ == '__main__':\n    main([])\n",
    "Größe, naïve café, señor, Ελληνικά, русский текст, 你好世界, こんにちは, 한국어, مرحبا",
    "emoji 🦙🦙 👩‍👩‍👧 🇫🇷 and arrows → ⇒ ∀x∈y",
]

ALPHABETS = [
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "0123456789",
    " \t\n\r\u00a0\u2003\u3000",
    " ",
    ".,;:!?'\"()[]{}<>|/\\@#$%^&*-_=+~`",
    "äöüßéèêñçøåłžÆŒ",
    "αβγδεζηθабвгдежшщъыьэюя",
    "你好世界中文字符漢字語言模型日本語かなカナ한국어",
    "🦙😀🎉👍🏽👩🚀🇫🇷\u200d\ufe0f",
    "e\u0301a\u0308o\u0302\u0327\u036f",
    "".join(map(chr, range(0x20))) + "\x7f\x80\x85\u2028\ufeff\ufffd",
    "مرحباשלוםनमस्ते",
]

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "he",
    "was",
    "function",
    "return",
    "import",
    "self",
    "user",
    "assistant",
    "Hello",
    "world",
    "<s>",
    "</s>",
    "<unk>",
]


def random_texts(count: int, seed: int = 7) -> list[str]:
    """Strings of many scripts, spaces, digits and oddities; the same ones each time."""
    source = random.Random(seed)
    return [_random_text(source) for _ in range(count)]


def _random_text(source: random.Random) -> str:
    parts = []
    for _ in range(source.randrange(1, 8)):
        kind = source.random()
        if kind < 0.3:
            parts.append(" ".join(source.choices(WORDS, k=source.randrange(1, 5))))
        elif kind < 0.9:
            parts.append("".join(source.choices(source.choice(ALPHABETS), k=source.randrange(1, 9))))
        else:
            letters = (chr(source.randrange(0x110000)) for _ in range(source.randrange(1, 5)))
            parts.append("".join(letter for letter in letters if not "\ud800" <= letter <= "\udfff"))
    return "".join(parts)


def sentencepiece_models() -> list[Path]:
    """The SentencePiece models inside mistral-common; the test is skipped where that is not installed."""
    found = importlib.util.find_spec("mistral_common")
    if found is None or found.origin is None:
        pytest.skip("needs the vocabularies inside mistral-common: pip install mistral-common")
    files = sorted(path for path in (Path(found.origin).parent / "data").iterdir() if ".model.v" in path.name)
    assert files
    return files


def mistral_v1_model() -> Path:
    """The plainest of them: 32,000 pieces, byte fallback, no control symbols but BOS and EOS."""
    return next(path for path in sentencepiece_models() if path.name == "tokenizer.model.v1")


@lru_cache
def byte_level_json() -> str:
    """A small byte-level BPE tokenizer.json with three special tokens and one ordinary added one."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    library.train_from_iterator(CORPUS * 4, trainer)
    library.add_tokens([tokenizers.AddedToken("<tool_call>", normalized=False)])
    return str(library.to_str())


@lru_cache
def metaspace_json() -> str:
    """A tokenizer.json with byte fallback, converted from the v1 SentencePiece vocabulary."""
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(mistral_v1_model()))
    numbers = list(range(model.get_piece_size()))
    vocab = {piece: number for number, piece in enumerate(model.id_to_piece(numbers))}
    special = [n for n in numbers if model.is_control(n) or model.is_unknown(n)]
    skip = {model.id_to_piece(n) for n in numbers if n in special or model.is_byte(n)}
    merges: list[tuple[float, int, int, list[str]]] = []
    for piece in vocab.keys() - skip:
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                merges.append((-model.get_score(vocab[piece]), vocab[left], vocab[right], [left, right]))
    added = [
        {
            "id": n,
            "content": model.id_to_piece(n),
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for n in special
    ]
    state = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": "\u2581",
            "prepend_scheme": "first",
            "split": False,
        },
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [pair for *_, pair in sorted(merges)],
        },
    }
    return json.dumps(state)


def write_folder(path: Path, **files: object) -> Path:
    """A model folder: the keyword `tokenizer_config` becomes tokenizer_config.json, and so on."""
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / f"{name}.json").write_text(text, encoding="utf-8")
    return path


def fake_config(path: Path, **values: Any) -> Any:
    """What a tokenizer asks of a model's config, with nothing in it unless given."""
    defaults: dict[str, Any] = {
        "bos_token_id": None,
        "eos_token_id": None,
        "eos_token_ids": [],
        "pad_token_id": None,
        "vocab_size": 0,
    }
    return SimpleNamespace(model_dir=str(path), **(defaults | values))
