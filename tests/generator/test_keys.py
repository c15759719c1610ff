"""What besides ids makes pages differ: jobs share what the cache holds only if all of it is equal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from exlm.generator.loop import Loop
from exlm.generator.sequence import salted
from tests.generator.test_loop import job, loop, run, streams

PROMPT = [2 + i % 26 for i in range(300)]
KEYS = st.dictionaries(st.text(max_size=3), st.binary(max_size=4), max_size=3)


def cached(machine: Loop, salt: str | bytes = "") -> int:
    """How much of the prompt a job finds."""
    found = streams(run(machine, job(PROMPT, 2, salt=salt)))[-1]["cached_tokens"]
    assert isinstance(found, int)
    return found


def test_tenants_do_not_share() -> None:
    machine = loop()
    assert [cached(machine, salt) for salt in ("ann", "bob", "", "ann", "bob", "")] == [0] * 3 + [299] * 3
    assert cached(machine, b"ann") == 299


def test_what_a_whole_generator_shares_is_part_of_it() -> None:
    """The place for adapters: whoever sets them says so here, and old pages are not found any more."""
    machine = loop()
    assert [cached(machine), cached(machine)] == [0, 299]
    machine.key["adapters"] = b"french"
    assert [cached(machine), cached(machine, "ann"), cached(machine)] == [0, 0, 299]
    machine.key["adapters"] = b""
    assert cached(machine) == 299


def test_a_jobs_own_key_may_grow_until_it_is_enqueued() -> None:
    machine = loop()
    assert cached(machine) == 0
    one = job(PROMPT, 2)
    one.key["pictures"] = b"a cat"
    assert streams(run(machine, one))[-1]["cached_tokens"] == 0
    two = job(PROMPT, 2)
    two.key["pictures"] = b"a cat"
    assert streams(run(machine, two))[-1]["cached_tokens"] == 299


@given(KEYS, KEYS)
def test_different_keys_are_different_salts(one: dict[str, bytes], two: dict[str, bytes]) -> None:
    meant = [{name: value for name, value in key.items() if value} for key in (one, two)]
    assert (salted(one) == salted(two)) == (meant[0] == meant[1])
    assert (salted(one) == b"") == (not meant[0])
