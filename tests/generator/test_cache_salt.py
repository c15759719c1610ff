"""Cache salts: jobs share cached pages only if their ids and all parts of their cache keys are equal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from exlm.generator.engine import EngineCore
from exlm.generator.token_sequence import build_salt
from tests.generator.test_engine import make_engine, make_job, run, streaming_results

PROMPT = [2 + i % 26 for i in range(300)]
KEYS = st.dictionaries(st.text(max_size=3), st.binary(max_size=4), max_size=3)


def cached(engine: EngineCore, salt: str | bytes = "") -> int:
    """How many tokens of the prompt a job finds in the cache."""
    count = streaming_results(run(engine, make_job(PROMPT, 2, salt=salt)))[-1]["cached_tokens"]
    assert isinstance(count, int)
    return count


def test_different_salts_do_not_share() -> None:
    engine = make_engine()
    assert [cached(engine, salt) for salt in ("ann", "bob", "", "ann", "bob", "")] == [0] * 3 + [299] * 3
    assert cached(engine, b"ann") == 299


def test_the_engine_key_is_part_of_the_salt() -> None:
    """A cache key part for adapters: when it changes, earlier pages are no longer found."""
    engine = make_engine()
    assert [cached(engine), cached(engine)] == [0, 299]
    engine.cache_key_parts["adapters"] = b"french"
    assert [cached(engine), cached(engine, "ann"), cached(engine)] == [0, 0, 299]
    engine.cache_key_parts["adapters"] = b""
    assert cached(engine) == 299


def test_a_job_key_may_change_until_enqueue() -> None:
    engine = make_engine()
    assert cached(engine) == 0
    first = make_job(PROMPT, 2)
    first.cache_key_parts["pictures"] = b"a cat"
    assert streaming_results(run(engine, first))[-1]["cached_tokens"] == 0
    second = make_job(PROMPT, 2)
    second.cache_key_parts["pictures"] = b"a cat"
    assert streaming_results(run(engine, second))[-1]["cached_tokens"] == 299


@given(KEYS, KEYS)
def test_different_keys_are_different_salts(first: dict[str, bytes], second: dict[str, bytes]) -> None:
    nonempty = [{name: value for name, value in key.items() if value} for key in (first, second)]
    assert (build_salt(first) == build_salt(second)) == (nonempty[0] == nonempty[1])
    assert (build_salt(first) == b"") == (not nonempty[0])
