"""How byte-level vocabularies cut a text into words before merging, by the names GGUF files give it.

A GGUF file has the vocabulary and its merges but only a name for the rest of its tokenizer.json. Each entry
here is what the model's own tokenizer.json says. A name that is not here is an error for the caller: a
wrong guess changes ids quietly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WHITESPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEADING_SYMBOL = r"[^\r\n\p{L}\p{N}]?"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+"

GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{_SYMBOLS}|\s+(?!\S)|\s+"
CL100K = rf"{_CONTRACTIONS}|{_LEADING_SYMBOL}\p{{L}}+|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n]*|{_WHITESPACE}"
QWEN2 = rf"{_CONTRACTIONS}|{_LEADING_SYMBOL}\p{{L}}+|\p{{N}}|{_SYMBOLS}[\r\n]*|{_WHITESPACE}"
TEKKEN = (  # it splits camelCase
    rf"{_LEADING_SYMBOL}{_UPPER}*{_LOWER}+|{_LEADING_SYMBOL}{_UPPER}+{_LOWER}*|"
    rf"\p{{N}}|{_SYMBOLS}[\r\n/]*|{_WHITESPACE}"
)
O200K = (
    rf"{_LEADING_SYMBOL}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEADING_SYMBOL}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|"
    rf"\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n/]*|{_WHITESPACE}"
)
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_WHITESPACE}"
)


@dataclass(frozen=True)
class PreTokenizer:
    """The parts of a tokenizer.json that stand before its merges."""

    patterns: tuple[str, ...]  # each cuts the pieces of the one before
    individual_digits: bool = False  # first of all, every digit stands alone
    nfc: bool = False  # text is brought into Unicode's form C
    ignore_merges: bool = False  # a word that is in the vocabulary is not put together from merges

    def normalizer(self) -> dict[str, Any] | None:
        """As tokenizer.json writes it."""
        return {"type": "NFC"} if self.nfc else None

    def pre_tokenizer(self) -> dict[str, Any]:
        """As tokenizer.json writes it."""
        steps: list[dict[str, Any]] = []
        if self.individual_digits:
            steps.append({"type": "Digits", "individual_digits": True})
        for pattern in self.patterns:
            steps.append(
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            )
        steps.append(
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        )
        return {"type": "Sequence", "pretokenizers": steps}


_LLAMA3 = PreTokenizer((CL100K,), ignore_merges=True)
_CODE = PreTokenizer((GPT2,), individual_digits=True)
_QWEN = PreTokenizer((QWEN2,), nfc=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "command-r": PreTokenizer((GPT2,), individual_digits=True, nfc=True),
    "dbrx": PreTokenizer((CL100K,)),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
    ),
    "deepseek-r1-qwen": _QWEN,
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", DEEPSEEK3)),
    # llama.cpp's own, for files that say no more.
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((GPT2,)),
    "gpt-4o": PreTokenizer((O200K,)),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "phi-2": PreTokenizer((GPT2,)),
    "qwen2": _QWEN,
    "refact": _CODE,
    "smaug-bpe": PreTokenizer((CL100K,)),
    "smollm": _CODE,
    "starcoder": _CODE,
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True),
}
"""By the value of `tokenizer.ggml.pre`."""
