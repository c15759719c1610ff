"""A generator notices when a caller moves or overwrites the tokens of its cache."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from exlm import Cache, Config, Generator, InputError, Job, Model, Settings, Tokenizer
from tests import tiny

PROMPT, NEW = "hello world, this is a text", 20


@pytest.fixture(scope="module")
def components(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Tokenizer]:
    config = Config(tiny.make_chat_folder(tmp_path_factory.mktemp("overwritten") / "m"))
    model = Model(config)
    model.load()
    return model, Tokenizer(config)


def copied(cache: Cache) -> None:
    """Overwrite the cache's tokens with those of an empty cache."""
    Cache(cache.model, max_seq_len=512).copy_states(cache, 0, 512, 0, 512, 0, 1, 0, 1)


MOVES: list[Callable[[Cache], None]] = [Cache.roll_left, Cache.allocate, copied]


@pytest.mark.parametrize("move", MOVES)
def test_between_two_requests_the_prompt_is_read_again(
    components: tuple[Model, Tokenizer], move: Callable[[Cache], None]
) -> None:
    """Regression: the prompt was reused from a cache that had been overwritten."""
    cache = Cache(components[0], max_seq_len=512)
    generator = Generator(components[0], cache, components[1])
    expected = generator.generate(PROMPT, NEW, gen_settings=Settings.greedy())
    move(cache)
    text, last = generator.generate(PROMPT, NEW, gen_settings=Settings.greedy(), return_last_results=True)
    assert text == expected
    assert last["cached_tokens"] == 0


@pytest.mark.parametrize("move", MOVES)
def test_during_a_request_it_fails(components: tuple[Model, Tokenizer], move: Callable[[Cache], None]) -> None:
    cache = Cache(components[0], max_seq_len=512)
    generator = Generator(components[0], cache, components[1])
    generator.enqueue(Job(components[1].encode(PROMPT), NEW, gen_settings=Settings.greedy()))
    generator.iterate()
    move(cache)
    (last,) = generator.iterate()
    assert last["eos"]
    with pytest.raises(InputError, match="Another caller has written to the cache"):
        raise last["error"]  # type: ignore[typeddict-item]
