"""The generators of exllamav2, and scripts that call `Model.forward`, on a trained model with recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from exlm import Cache, CacheBase, CacheQ8, Config, Generator, InputError, Model, Settings, Tokenizer, Unsupported
from exlm.legacy import BaseGenerator, StreamingGenerator

GREEDY = Settings.greedy()
NEW = 24
Hybrid = tuple[Model, Tokenizer]


@pytest.fixture(scope="module")
def hybrid(fixtures_dir: Path) -> Hybrid:
    """Three gated delta nets and an attention layer."""
    config = Config(fixtures_dir / "tiny-qwen3_5")
    config.device, config.dtype = "cpu", "float32"
    model = Model(config)
    model.load()
    return model, Tokenizer(config)


@pytest.fixture(scope="module")
def text(fixtures_dir: Path) -> Tensor:
    """Ids (1, n) of a text that the model was not trained on."""
    (ids,) = load_file(fixtures_dir / "reference" / "heldout_ids.safetensors").values()
    return ids.flatten()[None, :1200]


@pytest.fixture(scope="module")
def prompt(hybrid: Hybrid, text: Tensor) -> str:
    decoded: str = hybrid[1].decode(text[0, :50])
    return decoded


def greedy_ids(model: Model, prompt: Tensor, new: int = NEW) -> list[int]:
    """Greedy ids by `Model.forward` alone."""
    cache, out = Cache(model), []
    ids = prompt
    for _ in range(new):
        ids = model.forward(ids, cache, last_id_only=True)[:, -1].argmax(-1, keepdim=True)
        out.append(int(ids))
    return out


def streamed(generator: StreamingGenerator, prompt: Tensor, new: int = NEW, **options: Any) -> Iterator[dict[str, Any]]:
    """The chunks of a stream of `new` tokens."""
    generator.set_stop_conditions([])
    generator.begin_stream_ex(prompt, GREEDY, max_new_tokens=new, **options)
    while True:
        chunk: Any = generator.stream_ex()
        yield chunk
        if chunk["eos"]:
            return


def stream_ids(generator: StreamingGenerator, prompt: Tensor, new: int = NEW, **options: Any) -> list[int]:
    return [i for chunk in streamed(generator, prompt, new, **options) for i in chunk["chunk_token_ids"][0].tolist()]


@pytest.mark.parametrize("kind", [Cache, CacheQ8])
def test_a_stream_is_what_forward_computes(hybrid: Hybrid, text: Tensor, kind: type[CacheBase]) -> None:
    model, tokenizer = hybrid
    generator = StreamingGenerator(model, kind(model), tokenizer)
    wanted = greedy_ids(model, text[:, :300])
    assert stream_ids(generator, text[:, :300]) == wanted
    assert stream_ids(generator, text[:, :300]) == wanted  # from the checkpoint behind the first page
    assert stream_ids(generator, text[:, 40:70]) == greedy_ids(model, text[:, 40:70])


def test_a_streams_prefix_is_reused_up_to_a_checkpoint(hybrid: Hybrid, text: Tensor) -> None:
    model, tokenizer = hybrid
    generator = StreamingGenerator(model, Cache(model), tokenizer)
    stream_ids(generator, text[:, :600])
    longer = text[:, :900]
    generator.begin_stream_ex(longer, GREEDY)
    job = generator._job
    assert job is not None
    assert job.sequences[0].cached_tokens == 512
    assert stream_ids(generator, longer) == greedy_ids(model, longer)


def test_banned_strings_rewind_the_state(hybrid: Hybrid, text: Tensor) -> None:
    model, tokenizer = hybrid
    said = tokenizer.decode(torch.tensor(greedy_ids(model, text[:, :60])))
    words = [word for word in said.split() if len(word) > 3]
    banned = words[len(words) // 2]
    chunks = list(streamed(StreamingGenerator(model, Cache(model), tokenizer), text[:, :60], banned_strings=[banned]))
    found = "".join(chunk["chunk"] for chunk in chunks)
    assert banned not in found
    assert found[: said.index(banned)] == said[: said.index(banned)]
    alone = Generator(model, Cache(model), tokenizer)
    wanted = alone.generate(
        tokenizer.decode(text[0, :60]),
        NEW,
        gen_settings=GREEDY,
        completion_only=True,
        banned_strings=[banned],
        stop_conditions=[],
    )
    assert found == wanted


def test_token_healing(hybrid: Hybrid, text: Tensor) -> None:
    model, tokenizer = hybrid
    ids = text[:, :60]
    wanted = Generator(model, Cache(model), tokenizer).generate(
        tokenizer.decode(ids[0]), NEW, gen_settings=GREEDY, token_healing=True, stop_conditions=[]
    )
    generator = StreamingGenerator(model, Cache(model), tokenizer)
    found = "".join(chunk["chunk"] for chunk in streamed(generator, ids, token_healing=True))
    assert wanted.endswith(found)
    assert len(found) > NEW


def test_generate_simple_one_and_many(hybrid: Hybrid, text: Tensor, prompt: str) -> None:
    model, tokenizer = hybrid
    generator = BaseGenerator(model, Cache(model, batch_size=3, max_seq_len=512), tokenizer)
    prompts = [prompt, tokenizer.decode(text[0, 100:109]), tokenizer.decode(text[0, 200:290])]
    many = generator.generate_simple(prompts, GREEDY, NEW, stop_token=None, completion_only=True)
    for one, completion in zip(prompts, many, strict=True):
        assert generator.generate_simple(one, GREEDY, NEW, stop_token=None, completion_only=True) == completion
        assert completion == tokenizer.decode(torch.tensor(greedy_ids(model, tokenizer.encode(one))))


def test_guidance_runs_two_rows(hybrid: Hybrid, prompt: str) -> None:
    model, tokenizer = hybrid
    settings = Settings.greedy(cfg_scale=1.5)
    both, offsets = tokenizer.encode([prompt, prompt[:20]], return_offsets=True)
    mask = tokenizer.padding_mask(both)
    texts = []
    for rows in (both, both[:1].repeat(2, 1)):  # the same prompt twice: guidance changes nothing
        generator = StreamingGenerator(model, Cache(model), tokenizer)
        generator.set_stop_conditions([])
        padding = {"input_mask": mask, "position_offsets": offsets} if rows is both else {}
        generator.begin_stream_ex(rows, settings, max_new_tokens=8, **padding)
        texts.append([int(generator.stream_ex()["chunk_token_ids"]) for _ in range(8)])
    assert texts[1] == greedy_ids(model, both[:1], 8)
    assert texts[0] != texts[1]


def test_speculation_of_the_streaming_generator_is_refused(hybrid: Hybrid, text: Tensor, model: Model) -> None:
    recurrent, tokenizer = hybrid
    with pytest.raises(Unsupported, match=r"recurrent state.*use_ngram_draft"):
        StreamingGenerator(recurrent, Cache(recurrent), tokenizer, draft_model=model)
    with pytest.raises(Unsupported, match=r"recurrent state.*use_ngram_draft"):
        StreamingGenerator(model, Cache(model), tokenizer, draft_model=recurrent)
    generator = StreamingGenerator(recurrent, Cache(recurrent), tokenizer)
    generator.speculative_ngram = True
    with pytest.raises(Unsupported, match=r"recurrent state.*use_ngram_draft"):
        generator.begin_stream_ex(text[:, :9], GREEDY)
    generator.speculative_ngram = False
    assert stream_ids(generator, text[:, :9]) == greedy_ids(recurrent, text[:, :9])


def test_forward_and_generators_share_a_cache_in_turn(hybrid: Hybrid, text: Tensor, prompt: str) -> None:
    model, tokenizer = hybrid
    cache = Cache(model, batch_size=2, max_seq_len=512)
    streaming, base = StreamingGenerator(model, cache, tokenizer), BaseGenerator(model, cache, tokenizer)
    wanted, logits = greedy_ids(model, text[:, :300]), model.forward(text[:, :20], Cache(model))
    for _ in range(2):
        cache.reset()
        assert torch.allclose(model.forward(text[:, :20].expand(2, -1), cache), logits, atol=1e-4)
        assert stream_ids(streaming, text[:, :300]) == wanted
        said = base.generate_simple(prompt, GREEDY, NEW, stop_token=None, completion_only=True)
        assert said == tokenizer.decode(torch.tensor(greedy_ids(model, tokenizer.encode(prompt))))


def test_a_stream_whose_states_were_lost_is_refused(hybrid: Hybrid, text: Tensor) -> None:
    model, tokenizer = hybrid
    cache = Cache(model, max_seq_len=512)
    generator = StreamingGenerator(model, cache, tokenizer)
    generator.begin_stream_ex(text[:, :30], GREEDY)
    generator.stream_ex()
    Generator(model, cache, tokenizer, max_batch_size=1).generate("Once", 3, gen_settings=GREEDY)
    with pytest.raises(InputError, match="Another caller has written to the cache"):
        generator.stream_ex()
    assert stream_ids(generator, text[:, :30]) == greedy_ids(model, text[:, :30])


def test_the_last_call_of_forward_can_be_taken_back(hybrid: Hybrid, text: Tensor) -> None:
    model, _ = hybrid
    cache = Cache(model)
    model.forward(text[:, :20], cache)
    wanted = model.forward(text[:, 20:21], cache)
    for _ in range(3):
        cache.current_seq_len = 20
        assert torch.equal(model.forward(text[:, 20:21], cache), wanted)
    model.forward(text[:, 21:23], cache)
    cache.current_seq_len = 20
    with pytest.raises(InputError, match=r"cannot go back to 20 tokens.*21 and 23 tokens.*cache.reset"):
        model.forward(text[:, 20:21], cache)
    cache.reset()
    assert torch.equal(model.forward(text[:, :20], cache)[:, -1:], model.forward(text[:, :20], Cache(model))[:, -1:])


def test_rows_padded_on_the_left_are_the_rows_alone(hybrid: Hybrid, text: Tensor) -> None:
    model, tokenizer = hybrid
    rows = [text[0, :31].tolist(), text[0, 100:109].tolist(), text[0, 200:201].tolist()]
    longest = max(map(len, rows))
    ids = torch.tensor([[tokenizer.pad_token_id] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[False] * (longest - len(row)) + [True] * len(row) for row in rows])
    offsets = torch.tensor([[len(row) - longest] for row in rows])
    cache = Cache(model, batch_size=len(rows))
    logits = model.forward(ids, cache, input_mask=mask, last_id_only=True, position_offsets=offsets)
    wanted = [greedy_ids(model, torch.tensor([row]), 8) for row in rows]
    found: list[list[int]] = [[] for _ in rows]
    for _ in range(8):
        new = logits[:, -1].argmax(-1, keepdim=True)
        for row, one in zip(found, new.flatten().tolist(), strict=True):
            row.append(one)
        mask = torch.cat((mask, torch.ones(len(rows), 1, dtype=torch.bool)), 1)
        logits = model.forward(new, cache, input_mask=mask, position_offsets=offsets)
    assert found == wanted


def test_what_moves_single_tokens_is_refused(hybrid: Hybrid, text: Tensor) -> None:
    model, _ = hybrid
    cache = Cache(model, max_seq_len=256)
    model.forward(text[:, :9], cache)
    with pytest.raises(Unsupported, match=r"roll_left.*recurrent state.*cache\.clone"):
        cache.roll_left()
    with pytest.raises(Unsupported, match=r"copy_states.*recurrent state.*cache\.clone"):
        cache.copy_states(Cache(model, max_seq_len=256), 0, 9, 0, 9, 0, 1, 0, 1)
    with pytest.raises(Unsupported, match=r"copy_states.*recurrent state.*cache\.clone"):
        Cache(model, max_seq_len=256, copy_from=cache)
    clone = cache.clone()
    assert torch.equal(model.forward(text[:, 9:12], clone), model.forward(text[:, 9:12], cache))
