"""What besides ids makes pages differ: jobs share what the cache holds only if all of it is equal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from exlm.generator.engine import EngineCore
from exlm.generator.token_sequence import build_salt
from tests.generator.test_engine import job, make_engine, run, streaming_results

PROMPT = [2 + i % 26 for i in range(300)]
KEYS = st.dictionaries(st.text(max_size=3), st.binary(max_size=4), max_size=3)


def cached(machine: EngineCore, salt: str | bytes = "") -> int:
    """How much of the prompt a job finds."""
    found = streaming_results(run(machine, job(PROMPT, 2, salt=salt)))[-1]["cached_tokens"]
    assert isinstance(found, int)
    return found


def test_different_salts_do_not_share() -> None:
    machine = make_engine()
    assert [cached(machine, salt) for salt in ("ann", "bob", "", "ann", "bob", "")] == [0] * 3 + [299] * 3
    assert cached(machine, b"ann") == 299


def test_the_engine_key_is_part_of_the_salt() -> None:
    """A cache key part for adapters: when it changes, earlier pages are no longer found."""
    machine = make_engine()
    assert [cached(machine), cached(machine)] == [0, 299]
    machine.cache_key_parts["adapters"] = b"french"
    assert [cached(machine), cached(machine, "ann"), cached(machine)] == [0, 0, 299]
    machine.cache_key_parts["adapters"] = b""
    assert cached(machine) == 299


def test_a_job_key_may_change_until_enqueue() -> None:
    machine = make_engine()
    assert cached(machine) == 0
    one = job(PROMPT, 2)
    one.cache_key_parts["pictures"] = b"a cat"
    assert streaming_results(run(machine, one))[-1]["cached_tokens"] == 0
    two = job(PROMPT, 2)
    two.cache_key_parts["pictures"] = b"a cat"
    assert streaming_results(run(machine, two))[-1]["cached_tokens"] == 299


@given(KEYS, KEYS)
def test_different_keys_are_different_salts(one: dict[str, bytes], two: dict[str, bytes]) -> None:
    meant = [{name: value for name, value in key.items() if value} for key in (one, two)]
    assert (build_salt(one) == build_salt(two)) == (meant[0] == meant[1])
    assert (build_salt(one) == b"") == (not meant[0])
