"""Options of streams: banned tokens, returned details, seeds, limits, aborts, CFG, adapters, embeddings."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from exlm import (
    EMBEDDING_INDEX,
    Cache,
    Generator,
    InputError,
    Lora,
    MMEmbedding,
    Model,
    NotLoaded,
    PostSamplingResult,
    Settings,
    Tokenizer,
)
from exlm.legacy import StreamingGenerator
from tests.generator.scripted import ID, alphabet, ids
from tests.legacy.scripted import (
    begin_stream,
    chunk_text,
    make_streaming_generator,
    passes,
    scripted,
    take_chunks,
)
from tests.lora import peft_folders as making

GREEDY = Settings.greedy()
ABC = ids("abc")


def test_ban_tokens_apply_to_one_call(toy: Tokenizer) -> None:
    generator = make_streaming_generator(toy, lambda prefix: [prefix[-1] + 1, ID["q"]])
    begin_stream(generator, ABC)
    banned = [ID["d"]]
    assert generator.stream_ex(ban_tokens=banned)["chunk"] == "q"
    assert banned == [ID["d"]]  # T56
    assert generator.stream_ex()["chunk"] == "r"


def test_ban_tokens_accept_any_integers_and_refuse_the_rest(toy: Tokenizer) -> None:
    generator = make_streaming_generator(toy, lambda prefix: [prefix[-1] + 1, ID["q"]])
    begin_stream(generator, ABC)
    for wrong in ([None], ["d"], ID["d"], "d"):  # what single_id knows nothing of is None
        with pytest.raises(InputError, match="ban_tokens must be a list of token ids, found"):
            generator.stream_ex(ban_tokens=wrong)  # type: ignore[arg-type]
    assert generator.stream_ex(ban_tokens=torch.tensor([ID["d"], ID["e"]]))["chunk"] == "q"  # type: ignore[arg-type]
    assert generator.stream_ex(ban_tokens=np.array([ID["r"]]))["chunk"] != "r"  # type: ignore[arg-type]


def test_token_healing_none_is_off(toy: Tokenizer) -> None:
    generator = make_streaming_generator(toy)
    begin_stream(generator, ABC, token_healing=None)
    assert chunk_text(take_chunks(generator, 3)) == "def"


def test_probabilities_top_tokens_and_logits(toy: Tokenizer) -> None:
    generator = make_streaming_generator(toy)
    generator.set_stop_conditions(["ez"])
    begin_stream(generator, ABC, return_probabilities=True, return_top_tokens=3, return_logits=True)
    first, held, both = take_chunks(generator, 3)
    assert first["probs"].tolist() == [[1.0]]
    assert first["top_tokens"].shape == first["top_probs"].shape == (1, 1, 3)
    assert int(first["top_tokens"][0, 0, 0]) == ID["d"]
    assert first["logits"].shape == (1, 1, 36)
    assert int(first["logits"].argmax()) == ID["d"]
    assert held["chunk_token_ids"].shape == held["probs"].shape == (1, 0)
    assert held["top_tokens"].shape == held["top_probs"].shape == (1, 0, 3)
    assert held["logits"].shape == (1, 0, 36)
    assert both["chunk_token_ids"].tolist() == [[ID["e"], ID["f"]]]
    assert both["logits"].shape == (1, 2, 36)


def test_begin_stream_and_stream(toy: Tokenizer) -> None:
    generator = make_streaming_generator(toy)
    generator.begin_stream(ABC, GREEDY, False, None, None, None, None, return_probabilities=True)
    chunk, eos, tokens, probs = generator.stream()
    assert (chunk, eos, tokens.tolist(), probs.tolist()) == ("d", False, [[5]], [[1.0]])
    generator.begin_stream(ABC, GREEDY, return_logits=True)
    assert generator.stream()[3].shape == (1, 36)  # without the row that stream_ex has
    generator.begin_stream(ABC, GREEDY)
    assert len(generator.stream()) == 3
    begin_stream(generator, ABC, return_top_tokens=1)
    with pytest.raises(InputError, match="stream_ex"):
        generator.stream()


def test_returned_details_may_change_while_a_stream_runs(toy: Tokenizer) -> None:
    generator = make_streaming_generator(toy)
    generator.return_logits = True  # a stream begins as its call says
    generator.begin_stream(ABC, GREEDY)
    assert len(generator.stream()) == 3
    generator.return_logits = True
    chunk, _, tokens, logits = generator.stream()
    assert (chunk, int(logits[0].argmax())) == ("e", int(tokens[0, 0]))
    generator.return_logits, generator.return_probabilities = False, True
    assert generator.stream()[3].tolist() == [[1.0]]
    generator.return_top_tokens = 2
    assert generator.stream_ex()["top_tokens"].shape == (1, 1, 2)
    with pytest.warns(UserWarning, match=r"stream\(\) has no argument 'zzz'"), pytest.raises(InputError):
        generator.stream(zzz=1)


def test_unknown_arguments_are_ignored_with_a_warning(toy: Tokenizer) -> None:
    generator = make_streaming_generator(toy)
    calls: dict[str, Callable[..., Any]] = {
        "begin_stream": partial(generator.begin_stream, ABC, GREEDY),
        "begin_stream_ex": partial(generator.begin_stream_ex, ABC, GREEDY),
        "stream_ex": generator.stream_ex,
    }
    for name, call in calls.items():
        with pytest.warns(UserWarning, match="has no argument") as seen:
            call(unknown=1)
        (warning,) = seen
        assert str(warning.message).startswith(f"{name}() has no argument 'unknown'")
        assert warning.filename == __file__
    assert generator.stream_ex()["chunk"] == "e"
    with pytest.warns(UserWarning, match="Did you mean 'return_logits'"):
        generator.begin_stream(ABC, GREEDY, return_logit=True)
    with pytest.raises(InputError, match=r"begin_stream_ex\(\) takes no num_tokens: use max_new_tokens"):
        generator.begin_stream_ex(ABC, GREEDY, num_tokens=3)


def test_special_tokens_are_decoded_on_request(toy: Tokenizer) -> None:
    generator = make_streaming_generator(toy, scripted(5, 1, 6))
    begin_stream(generator, ABC)
    assert chunk_text(take_chunks(generator, 3)) == "de"
    begin_stream(generator, ABC, decode_special_tokens=True)
    assert chunk_text(take_chunks(generator, 3)) == "d<s>e"


def test_settings_are_read_at_every_token(toy: Tokenizer) -> None:
    generator = make_streaming_generator(toy, lambda prefix: [ID["a"], ID["b"]])
    settings = Settings.greedy()
    begin_stream(generator, ABC, settings)
    assert generator.settings is settings
    assert generator.stream_ex()["chunk"] == "a"
    settings.disallow_tokens(toy, [ID["a"]])
    assert generator.stream_ex()["chunk"] == "b"


def test_hooks(toy: Tokenizer) -> None:
    def hook(result: PostSamplingResult) -> None:
        if result.token == ID["e"]:
            result.sampled_token = ID["x"]

    generator = make_streaming_generator(toy)
    begin_stream(generator, ABC, Settings.greedy(post_sampling_hooks=[hook]))
    assert chunk_text(take_chunks(generator, 3)) == "dxy"


def test_seeds(model: Model, tokenizer: Tokenizer) -> None:
    generator = StreamingGenerator(model, Cache(model, max_seq_len=300), tokenizer)
    settings, prompt = Settings(temperature=1.3, top_k=0, top_p=0.95), tokenizer.encode("The history")

    def said(**options: Any) -> str:
        begin_stream(generator, prompt, settings, **options)
        return chunk_text(take_chunks(generator, 16))

    assert said(seed=3) == said(seed=3) != said(seed=4)
    texts = []
    for _ in range(2):
        random.seed(11)
        texts.append(said())
    assert texts[0] == texts[1] != said()


def test_a_full_cache_ends_the_stream(toy: Tokenizer) -> None:
    """The last token that fits has eos false; the call after it has eos true."""
    generator = make_streaming_generator(toy, length=40)
    begin_stream(generator, ABC)
    assert not generator.full()
    chunks = take_chunks(generator, 37)
    assert not any(chunk["eos"] for chunk in chunks)
    assert generator.full()
    last = generator.stream_ex()
    assert (last["chunk"], last["eos"], last["chunk_token_ids"].shape) == ("", True, (1, 0))
    begin_stream(generator, ids("a" * 39))
    chunks = [(len(chunk["chunk"]), chunk["eos"]) for chunk in take_chunks(generator)]
    assert chunks == [(1, False), (0, True)]
    with pytest.raises(InputError, match="40 tokens leaves no room"):
        begin_stream(generator, ids("a" * 40))
    begin_stream(generator, ABC, max_new_tokens=1000)
    assert len(take_chunks(generator)) == 37 + 1
    begin_stream(generator, ABC, max_new_tokens=37)
    assert len(take_chunks(generator)) == 37


def test_a_chat_that_outgrows_the_cache_continues(toy: Tokenizer) -> None:
    """Chat loops of exllamav2 call `full()` after each token, and then continue with a shortened prompt."""
    generator = make_streaming_generator(toy, length=40)
    begin_stream(generator, ABC)
    said = ""
    while len(said) < 100:
        chunk = generator.stream_ex()
        said += chunk["chunk"]
        if generator.full():
            begin_stream(generator, generator.sequence_ids[:, -10:])
        if chunk["eos"]:
            break
    letters = "abcdefghijklmnopqrstuvwxyz"
    assert said == (letters * 5)[3:103]


@pytest.mark.parametrize("count", [1, 2, 7, 20])
def test_max_new_tokens_are_delivered_exactly(toy: Tokenizer, count: int) -> None:
    generator = make_streaming_generator(toy)
    begin_stream(generator, ABC, max_new_tokens=count)
    assert chunk_text(take_chunks(generator)) == "defghijklmnopqrstuvwxyz"[:count]


def test_an_abort_during_prefill(toy: Tokenizer) -> None:
    event = threading.Event()
    generator = make_streaming_generator(toy, length=2048)
    generator.model.config.max_input_len = 256
    read = generator._runner.prefill

    def prefill(*arguments: Any) -> None:
        event.set()
        read(*arguments)

    generator._runner.prefill = prefill  # type: ignore[method-assign]
    prompt = ids("abcd" * 200)
    begin_stream(generator, prompt, abort_event=event)
    assert passes(generator) == [("prefill", 1, 256)]
    assert generator.sequence_ids is not None
    assert generator.sequence_ids.shape == (1, 256)
    assert generator.cache.current_seq_len == 256
    assert generator.stream_ex()["eos"]
    del generator._runner.prefill  # type: ignore[method-assign]
    begin_stream(generator, prompt)
    assert sum(count for _, _, count in passes(generator)) == 799 - 256
    assert chunk_text(take_chunks(generator, 2)) == "ef"


def test_an_abort_between_tokens(toy: Tokenizer) -> None:
    event = threading.Event()
    generator = make_streaming_generator(toy)
    begin_stream(generator, ABC, abort_event=event)
    assert chunk_text(take_chunks(generator, 2)) == "de"
    event.set()
    assert generator.stream_ex()["eos"]
    assert generator.stream_ex()["eos"]
    begin_stream(generator, ABC)
    assert chunk_text(take_chunks(generator, 2)) == "de"


def test_cfg_with_a_padded_pair(model: Model, tokenizer: Tokenizer) -> None:
    pair = ["The history of the city", "In the"]
    padded, offsets = tokenizer.encode(pair, return_offsets=True)
    settings = Settings.greedy(cfg_scale=1.7)
    generator = StreamingGenerator(model, Cache(model, batch_size=2, max_seq_len=300), tokenizer)
    begin_stream(
        generator,
        padded,
        settings,
        input_mask=tokenizer.padding_mask(padded),
        position_offsets=offsets,
    )
    said = chunk_text(take_chunks(generator, 12))
    whole = Generator(model, Cache(model, max_seq_len=2048), tokenizer)
    one: Any = tuple(pair)
    assert said == whole.generate(one, 12, gen_settings=settings, completion_only=True)
    assert generator.sequence_ids is not None
    assert generator.sequence_ids.shape == (2, padded.shape[1] + 12)
    again = torch.cat((tokenizer.encode(pair[0]), tokenizer.encode(pair[0])))
    with pytest.raises(InputError, match="CFG scale"):
        begin_stream(generator, again)
    with pytest.raises(InputError, match="cfg_scale"):
        begin_stream(generator, tokenizer.encode(pair[0]), settings)
    with pytest.raises(InputError, match="does not support batch size"):
        begin_stream(generator, again.repeat(2, 1), settings)


def test_cfg_reuses_a_prefix_of_both_prompts(toy: Tokenizer) -> None:
    """A changed second prompt is prefilled, not only a changed first one."""
    generator = make_streaming_generator(toy, alphabet, batch=2)
    settings = Settings.greedy(cfg_scale=1.5)
    begin_stream(generator, torch.cat((ids("abcdefg"), ids("hijklmn"))), settings)
    passes(generator)
    begin_stream(generator, torch.cat((ids("abcdefg"), ids("hizzzzz"))), settings)
    assert passes(generator) == [("prefill", 1, 4)]
    take_chunks(generator, 1)
    assert passes(generator) == [("decode", 2, 1)]


def test_cfg_halves_the_maximum_length(toy: Tokenizer) -> None:
    generator = make_streaming_generator(toy, length=512)
    begin_stream(generator, torch.cat((ids("abc"), ids("xyz"))), Settings.greedy(cfg_scale=1.0))
    assert len(take_chunks(generator, 256 - 3)) == 256 - 3
    assert generator.full()
    assert generator.stream_ex()["eos"]


def test_adapters(model: Model, tokenizer: Tokenizer, tmp_path: Path, fixtures_dir: Path) -> None:
    made = making.write_adapter(tmp_path / "lora", making.matrix_shapes(fixtures_dir / "tiny-lm"), size=2.0)
    generator = StreamingGenerator(model, Cache(model, max_seq_len=300), tokenizer)
    prompt = tokenizer.encode("The history of the city")
    said = []
    lora = Lora.from_directory(model, made.folder)
    try:
        for loras in (None, lora, [lora], None):
            begin_stream(generator, prompt, loras=loras)
            said.append(chunk_text(take_chunks(generator, 12)))
        adapted = generator.generate_simple("The history of the city", GREEDY, 12, loras=lora)
        begin_stream(generator, prompt, loras=lora)
    finally:
        lora.unload()
    with pytest.raises(NotLoaded):
        generator.stream_ex()
    assert said[0] == said[3] != said[1] == said[2]
    assert adapted == "The history of the city" + said[1]


def test_embeddings(model: Model, tokenizer: Tokenizer) -> None:
    torch.manual_seed(3)
    vectors = torch.randn(1, 4, model.config.hidden_size)
    before, after = tokenizer.encode("The city"), tokenizer.encode("is old")
    generator = StreamingGenerator(model, Cache(model, max_seq_len=300), tokenizer)
    old = torch.arange(EMBEDDING_INDEX, EMBEDDING_INDEX + 4)[None]
    begin_stream(generator, torch.cat((before, old, after), 1), input_embeddings=vectors)
    said = chunk_text(take_chunks(generator, 8))
    one = MMEmbedding(model, vectors)
    begin_stream(generator, torch.cat((before, one.get_ids_tensor(), after), 1), input_embeddings=[one])
    assert chunk_text(take_chunks(generator, 8)) == said
    whole = generator.generate_simple(
        "The city{{EMBED_HERE}}is old", GREEDY, 8, input_embeddings=vectors, completion_only=True
    )
    assert whole == said
    with pytest.raises(InputError, match="must hold 1000000000 to 1000000003"):
        begin_stream(generator, torch.cat((before, after), 1), input_embeddings=vectors)
    with pytest.raises(InputError):
        begin_stream(generator, old)
    with pytest.raises(InputError, match="begin_stream_ex"):
        generator.stream_ex()
    drafted = StreamingGenerator(model, generator.cache, tokenizer, draft_model=model)
    with pytest.raises(InputError, match="Can not use input embeddings with draft model"):
        begin_stream(drafted, before, input_embeddings=vectors)


def test_masks_that_hide_more_than_padding(toy: Tokenizer) -> None:
    generator = make_streaming_generator(toy)
    hidden = torch.zeros(1, 3)
    hidden[0, 1] = -torch.inf
    with pytest.raises(InputError, match="only padding"):
        begin_stream(generator, ABC, input_mask=hidden)
    with pytest.raises(InputError, match="position_offsets"):
        begin_stream(generator, ABC, position_offsets=torch.tensor([2]))
    seen = torch.tensor([[False, True, True]])
    begin_stream(generator, ABC, input_mask=seen, position_offsets=torch.tensor([-1]))
    assert generator.sequence_ids is not None
    assert generator.sequence_ids.tolist() == [[3, 4]]


def test_a_stream_that_fails_can_begin_again(toy: Tokenizer) -> None:
    def broken(result: PostSamplingResult) -> None:
        raise KeyError("hook")

    generator = make_streaming_generator(toy)
    begin_stream(generator, ABC, Settings.greedy(post_sampling_hooks=[broken]))
    with pytest.raises(InputError, match="hook"):
        generator.stream_ex()
    begin_stream(generator, ABC)
    assert chunk_text(take_chunks(generator, 2)) == "de"
