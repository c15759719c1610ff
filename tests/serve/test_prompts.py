"""Prompts that are too long are refused before all of them is tokenised, and no other prompt is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from exlm import Tokenizer
from exlm.serve import APIError, CompletionRequest, Limits, ModelInfo, to_generation_request
from exlm.serve.generation import SLICE_CHARS, exceeds_token_count

ROOM = 2048
LONG = 40 * SLICE_CHARS


def byte_level() -> tokenizers.Tokenizer:
    """A token for each byte, and one for 128 spaces."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    runs = ["Ġ" * (2**i) for i in range(1, 8)]
    vocab = {piece: i for i, piece in enumerate(["</s>", *letters, *runs])}
    merges = [("Ġ" * (2**i), "Ġ" * (2**i)) for i in range(7)]
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def collapsing() -> tokenizers.Tokenizer:
    """The same, where any whitespace counts as one space."""
    made = byte_level()
    made.normalizer = normalizers.Replace(tokenizers.Regex(r"\s+"), " ")
    return made


def by_words() -> tokenizers.Tokenizer:
    """A token for each of two words, and one for any run of other letters."""
    made = tokenizers.Tokenizer(models.WordLevel({"</s>": 0, "<unk>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def read(made: tokenizers.Tokenizer, folder: Path) -> Tokenizer:
    made.add_special_tokens([AddedToken("</s>", special=True)])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "add_bos_token": False}))
    config = SimpleNamespace(
        model_dir=str(folder),
        bos_token_id=None,
        eos_token_id=0,
        eos_token_ids=[0],
        pad_token_id=None,
        vocab_size=300,
    )
    return Tokenizer(config)


class Counting:
    """A tokenizer that counts the characters it encodes."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner, self.characters = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def _counted(self, text: str, ids: Any) -> Any:
        self.characters += len(text)
        return ids

    def encode(self, text: str, **options: Any) -> Any:
        return self._counted(text, self.inner.encode(text, **options))

    def encode_special(self, text: str) -> Any:
        return self._counted(text, self.inner.encode_special(text))

    def encode_unspecial(self, text: str) -> Any:
        return self._counted(text, self.inner.encode_unspecial(text))


def host_of(tokenizer: Any) -> ModelInfo:
    return ModelInfo(name="tiny", tokenizer=tokenizer, max_seq_len=ROOM, vocab_size=300)


FITTING: list[tuple[Callable[[], tokenizers.Tokenizer], str]] = [
    (byte_level, " " * (128 * (ROOM - 48))),
    (collapsing, " \n" * LONG + "end"),
    (collapsing, ("a" + " " * SLICE_CHARS) * 40),
    (by_words, "x" * LONG),
    (by_words, " " * LONG + "a b a"),
]


@pytest.mark.parametrize(("make", "text"), FITTING, ids=[str(i) for i in range(len(FITTING))])
@pytest.mark.parametrize("special", [False, True])
def test_a_long_text_of_few_tokens_is_accepted(
    tmp_path: Path, make: Callable[[], tokenizers.Tokenizer], text: str, special: bool
) -> None:
    tokenizer = read(make(), tmp_path)
    assert len(text) > 100_000
    request = CompletionRequest(prompt=text, encode_special_tokens=special, max_tokens=1)
    order = to_generation_request(request, host_of(tokenizer), Limits())
    (ids,) = order.job_arguments[0]["input_ids"]
    assert ids.tolist() == tokenizer.encode(text, encode_special_tokens=special).tolist()


@pytest.mark.parametrize("make", [byte_level, collapsing, by_words])
@pytest.mark.parametrize("tokens", [ROOM - 1, ROOM, ROOM + 1])
def test_at_the_edge_the_exact_count_decides(
    tmp_path: Path, make: Callable[[], tokenizers.Tokenizer], tokens: int
) -> None:
    """The text is far longer than a slice, so that it was counted in slices first."""
    padding = " " * 128
    text = ("a" + padding) * (tokens // 2) if make is not by_words else ("a" + padding) * tokens
    tokenizer = read(make(), tmp_path)
    while (count := tokenizer.num_tokens(text)) < tokens:
        text = "a " + text if make is by_words else "a" + text
    assert (count, len(text) > 2 * SLICE_CHARS) == (tokens, True)
    request = CompletionRequest(prompt=text, max_tokens=1)
    if tokens < ROOM:
        assert to_generation_request(request, host_of(tokenizer), Limits()).job_arguments
        return
    with pytest.raises(APIError, match=f"has {tokens} tokens and the context {ROOM}") as found:
        to_generation_request(request, host_of(tokenizer), Limits())
    assert (found.value.status, found.value.code) == (400, "context_length_exceeded")


TOO_LONG: list[tuple[Callable[[], tokenizers.Tokenizer], str]] = [
    (byte_level, "a" * LONG),
    (byte_level, "ab " * LONG),
    (byte_level, "語" * LONG),
    (collapsing, "a " * LONG),
    (by_words, "a b " * LONG),
]


@pytest.mark.parametrize(("make", "text"), TOO_LONG, ids=[str(i) for i in range(len(TOO_LONG))])
@pytest.mark.parametrize("field", ["prompt", "prompts", "negative_prompt"])
def test_a_text_that_is_too_long_is_refused_after_a_few_slices(
    tmp_path: Path, make: Callable[[], tokenizers.Tokenizer], text: str, field: str
) -> None:
    tokenizer = Counting(read(make(), tmp_path))
    asked: dict[str, Any] = {"prompt": {"prompt": text, "prompts": ["a", text]}.get(field, "a")}
    if field == "negative_prompt":
        asked |= {"negative_prompt": text, "cfg_scale": 2.0}
    with pytest.raises(APIError, match=f"more tokens than the context, which has {ROOM}") as found:
        to_generation_request(CompletionRequest(**asked, n=4), host_of(tokenizer), Limits())
    assert (found.value.status, found.value.code) == (400, "context_length_exceeded")
    assert tokenizer.characters <= 2 * SLICE_CHARS


def test_special_text_counts_as_it_is_encoded(tmp_path: Path) -> None:
    tokenizer = read(byte_level(), tmp_path)
    text = "</s>" * ROOM * 4
    assert not exceeds_token_count(text, tokenizer, 4 * ROOM, special=True)
    assert exceeds_token_count(text, tokenizer, 4 * ROOM // 2, special=False)


@pytest.mark.parametrize(
    ("prompt", "count"),
    [([5] * ROOM, ROOM), ([[5], [5] * 1_000_000], 1_000_000), ([299_999] * ROOM, ROOM)],
    ids=["one", "of several", "of no token"],
)
def test_token_ids_are_counted_before_tensors_are_made(tmp_path: Path, prompt: Any, count: int) -> None:
    host = host_of(read(byte_level(), tmp_path))
    with pytest.raises(APIError, match=f"has {count} tokens and the context {ROOM}"):
        to_generation_request(CompletionRequest(prompt=prompt), host, Limits())


def test_prompts_are_counted_before_they_are_tokenised(tmp_path: Path) -> None:
    tokenizer = Counting(read(byte_level(), tmp_path))
    with pytest.raises(APIError, match="asks for 1024 texts; at most 16"):
        to_generation_request(CompletionRequest(prompt=["a" * 1000] * 1024), host_of(tokenizer), Limits())
    assert tokenizer.characters == 0
