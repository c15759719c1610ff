"""Prefix routing: prompts with a common prefix stay together, and no replica is overloaded."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exlm.scale import PrefixAffinity, prompt_blocks
from exlm.scale.affinity import BLOCK_CHARS

NAMES = ("a", "b", "c")


def body(**fields: Any) -> dict[str, Any]:
    return fields


def completion(text: str, **more: Any) -> tuple[bytes, ...]:
    return prompt_blocks(body(prompt=text, **more))


@given(st.text(max_size=5 * BLOCK_CHARS), st.text(max_size=2 * BLOCK_CHARS), st.text(max_size=2 * BLOCK_CHARS))
def test_prompts_share_the_blocks_of_their_common_prefix(start: str, one: str, other: str) -> None:
    first, second = completion(start + one), completion(start + other)
    alike = sum(a == b for a, b in zip(first, second, strict=False))
    assert alike >= len(start) // BLOCK_CHARS
    assert first[:alike] == second[:alike]
    assert (first == second) == (start + one == start + other)


def test_nothing_is_shared_between_tenants_models_and_adapters() -> None:
    text = "x" * BLOCK_CHARS
    found = {
        prompt_blocks(body(prompt=text), "one"),
        prompt_blocks(body(prompt=text), "two"),
        completion(text, model="other"),
        completion(text, lora="other"),
    }
    assert len(found) == 4


def test_a_longer_conversation_keeps_the_first_blocks() -> None:
    turns = [{"role": "user", "content": "long " * 100}]
    before = prompt_blocks(body(messages=turns))
    after = prompt_blocks(body(messages=[*turns, {"role": "assistant", "content": "yes"}]))
    assert after[: len(before) - 1] == before[:-1]
    tool = prompt_blocks(body(messages=turns, tools=[{"type": "function"}]))
    assert not {*tool} & {*before}


@pytest.mark.parametrize("request_body", [None, "no object", [], {}, body(prompt=""), body(messages=[]), 1.5])
def test_a_request_without_a_prompt_has_no_blocks(request_body: Any) -> None:
    assert prompt_blocks(request_body) == ()


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2], [3]], ["text", "more"], "text"])
def test_every_kind_of_prompt_has_blocks(prompt: Any) -> None:
    assert prompt_blocks(body(prompt=prompt))


def test_the_replica_with_the_longest_match_wins() -> None:
    table = PrefixAffinity()
    short, long = completion("x" * BLOCK_CHARS), completion("x" * BLOCK_CHARS + "y" * BLOCK_CHARS)
    table.record(short, "a")
    table.record(long, "b")
    idle = dict.fromkeys(NAMES, 0)
    assert table.rank(long, idle)[0] == "b"
    table.retain({"a", "c"})
    assert table.rank(long, {"a": 0, "c": 0})[0] == "a"


def test_a_busy_replica_is_passed_over() -> None:
    table = PrefixAffinity(slack=4)
    blocks = completion("hello")
    table.record(blocks, "a")
    assert table.rank(blocks, {"a": 4, "b": 0})[0] == "a"
    assert table.rank(blocks, {"a": 5, "b": 0})[0] == "b"
    assert table.rank(blocks, {"a": 5, "b": 1})[0] == "a"


def test_routers_with_empty_tables_agree_and_spread_load() -> None:
    idle = dict.fromkeys(NAMES, 0)
    prompts = [completion(f"prompt {number}") for number in range(300)]
    chosen = [PrefixAffinity().rank(one, idle)[0] for one in prompts]
    assert chosen == [PrefixAffinity().rank(one, dict(reversed(idle.items())))[0] for one in prompts]
    assert all(60 < chosen.count(name) < 140 for name in NAMES)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=60), st.integers(0, 4))
def test_loads_stay_within_the_slack_and_the_table_within_its_size(steps: list[tuple[int, int]], slack: int) -> None:
    table, loads = PrefixAffinity(slack, max_blocks=10), dict.fromkeys(NAMES, 0)
    for topic, ending in steps:
        blocks = completion(f"{topic}" * 2 * BLOCK_CHARS + f"{ending}")
        ranked = table.rank(blocks, loads)
        assert sorted(ranked) == sorted(NAMES)
        table.record(blocks, ranked[0])
        loads[ranked[0]] += 1
        assert max(loads.values()) - min(loads.values()) <= slack + 1
        assert len(table) <= 10
