"""A cache whose tokens were moved by hand: a generator does not go on as if they were where it left them."""

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
    """The tokens of an empty cache over those that are there."""
    Cache(cache.model, max_seq_len=512).copy_states(cache, 0, 512, 0, 512, 0, 1, 0, 1)


MOVES: list[Callable[[Cache], None]] = [Cache.roll_left, Cache.allocate, copied]


@pytest.mark.parametrize("move", MOVES)
def test_between_two_requests_the_prompt_is_read_again(
    components: tuple[Model, Tokenizer], move: Callable[[Cache], None]
) -> None:
    """It was found in the cache, where something else was by then."""
    cache = Cache(components[0], max_seq_len=512)
    machine = Generator(components[0], cache, components[1])
    expected = machine.generate(PROMPT, NEW, gen_settings=Settings.greedy())
    move(cache)
    text, last = machine.generate(PROMPT, NEW, gen_settings=Settings.greedy(), return_last_results=True)
    assert text == expected
    assert last["cached_tokens"] == 0


@pytest.mark.parametrize("move", MOVES)
def test_during_a_request_it_fails(components: tuple[Model, Tokenizer], move: Callable[[Cache], None]) -> None:
    cache = Cache(components[0], max_seq_len=512)
    machine = Generator(components[0], cache, components[1])
    machine.enqueue(Job(components[1].encode(PROMPT), NEW, gen_settings=Settings.greedy()))
    machine.iterate()
    move(cache)
    (last,) = machine.iterate()
    assert last["eos"]
    with pytest.raises(InputError, match="Another caller has written to the cache"):
        raise last["error"]  # type: ignore[typeddict-item]
