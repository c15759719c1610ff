"""Recurrent states of sequences: what each pass reads and writes, checkpoints, and what is dropped first."""

from __future__ import annotations

from collections import Counter

import pytest

from exlm import CacheTooSmall, InputError
from exlm.generator.page_table import PageTable
from exlm.generator.state_table import StateTable
from exlm.generator.token_sequence import TokenSequence

SIZE = 4


def make_table(slots: int = 12, interval: int = 2 * SIZE, pages: int = 64) -> tuple[PageTable, StateTable]:
    states = StateTable(slots, SIZE, interval)
    return PageTable(pages, SIZE, states), states


def make_sequence(prompt: int, new: int = 0, first: int = 0) -> TokenSequence:
    return TokenSequence([first, *range(1, prompt)], max_length=prompt + new)


def prefill(table: PageTable, sequence: TokenSequence, chunk: int = 1000) -> list[tuple[int, int]]:
    """Allocate a sequence and compute its prompt in chunks; (start, end) of each."""
    table.allocate([sequence])
    chunks = []
    while not sequence.prefill_done:
        start, end = sequence.num_computed_tokens, min(sequence.num_computed_tokens + chunk, len(sequence) - 1)
        table.plan_prefill_states(sequence, start, end)
        chunks.append((start, end))
        table.mark_computed(sequence, end)
    assert table.states is not None
    assert table.states.violations() == []
    return chunks


def decode(table: PageTable, sequence: TokenSequence, count: int, *, final: bool = True) -> None:
    for token in range(count):
        table.plan_decode_states(sequence, sequence.num_computed_tokens, 1)
        table.mark_computed(sequence, len(sequence.ids))
        sequence.ids.append(token)
        if final:
            table.mark_final(sequence, len(sequence.ids))


def test_a_prompt_starts_from_zeros_and_continues_its_own_state() -> None:
    table, _ = make_table(interval=0)
    sequence = make_sequence(11)
    table.allocate([sequence])
    table.plan_prefill_states(sequence, 0, 6)
    assert sequence.state_source == -1
    ((token, slot),) = sequence.state_targets
    assert token == 5
    table.mark_computed(sequence, 6)
    table.plan_prefill_states(sequence, 6, 10)
    assert sequence.state_source == slot
    assert sequence.state_targets[0][0] == 3
    assert sequence.state_targets[0][1] != slot


def test_checkpoints_stand_at_each_interval_and_at_the_last_page_of_the_prompt() -> None:
    table, states = make_table()
    first = make_sequence(22)
    prefill(table, first)
    assert states.num_checkpoints == 3  # after 8, 16 and 20 tokens
    for length, found in ((22, 20), (20, 16), (18, 16), (16, 8), (10, 8), (8, 0)):
        again = make_sequence(length, first=0)
        assert prefill(table, again)[0][0] == found, length
        assert again.cached_tokens == found
        table.release(again)


def test_a_prefix_that_differs_is_reused_up_to_the_checkpoint_before() -> None:
    table, _ = make_table(interval=SIZE)
    prefill(table, make_sequence(30))
    other = make_sequence(30)
    other.ids[18] = 99
    assert prefill(table, other)[0][0] == 16


def test_no_interval_means_no_reuse() -> None:
    table, states = make_table(interval=0)
    prefill(table, make_sequence(30))
    assert states.num_checkpoints == 0
    assert prefill(table, make_sequence(30))[0][0] == 0


def test_generated_text_has_one_checkpoint_beyond_those_of_the_interval() -> None:
    table, states = make_table(slots=20)
    sequence = make_sequence(6, new=40)
    prefill(table, sequence)
    decode(table, sequence, 30)  # 35 tokens are computed; pages up to 32 are published
    positions = {8, 16, 24, 32, 4}  # intervals, and the last page of the prompt
    assert states.num_checkpoints == len(positions)
    decode(table, sequence, 3)
    assert states.num_checkpoints == len(positions) + 1  # and the newest page: 36
    table.release(sequence)
    following = TokenSequence([*sequence.ids, 7, 8, 9])
    assert prefill(table, following)[0][0] == 36


def test_an_evicted_page_takes_its_checkpoint_along() -> None:
    table, states = make_table(pages=8)
    first = make_sequence(17)
    prefill(table, first)
    table.release(first)
    assert states.num_checkpoints == 2
    other = make_sequence(30, first=5)
    prefill(table, other)
    assert all(page_hash in table._by_hash for page_hash in states.checkpoint_hashes)
    table.release(other)
    table.clear_prefix_cache()
    assert states.num_checkpoints == 0
    assert states.violations() == []


def test_the_least_recently_used_checkpoint_goes_first() -> None:
    table, states = make_table(slots=4, interval=SIZE * 100)
    for first in range(3):
        sequence = make_sequence(9, first=first)
        prefill(table, sequence)
        table.release(sequence)
    prefill(table, again := make_sequence(9, first=0))  # used again, so 1 is the oldest now
    assert again.cached_tokens == 8
    table.release(again)
    for first in (3, 4):
        sequence = make_sequence(9, first=first)
        prefill(table, sequence)
        table.release(sequence)
    prefill(table, again := make_sequence(9, first=1))
    assert again.cached_tokens == 0
    assert states.violations() == []


def test_a_rewind_returns_to_the_exact_state_while_slots_suffice() -> None:
    table, _ = make_table()
    sequence = make_sequence(6, new=20)
    prefill(table, sequence)
    decode(table, sequence, 5, final=False)
    slot = sequence.states[8]
    table.rewind(sequence, 9)
    assert sequence.num_computed_tokens == 8
    assert sequence.states[8] == slot
    assert max(sequence.states) == 8


def test_a_rewind_without_slots_returns_to_the_last_final_token() -> None:
    table, _ = make_table(slots=3, interval=0)
    sequence = make_sequence(6, new=20)
    prefill(table, sequence)
    decode(table, sequence, 7, final=False)
    table.rewind(sequence, 9)
    assert sequence.num_computed_tokens == 5
    assert not sequence.prefill_done
    table.plan_prefill_states(sequence, 5, 8)
    table.mark_computed(sequence, 8)
    assert sequence.prefill_done


def test_a_dropped_pass_is_planned_again_from_the_same_state() -> None:
    table, _ = make_table()
    sequence = make_sequence(6, new=20)
    prefill(table, sequence)
    table.plan_decode_states(sequence, 5, 1)
    first = sequence.state_source, sequence.state_targets
    table.plan_decode_states(sequence, 5, 1)
    assert (sequence.state_source, sequence.state_targets) == first


def test_the_states_after_rejected_drafts_are_dropped() -> None:
    table, states = make_table()
    sequence = make_sequence(6, new=20)
    prefill(table, sequence)
    table.plan_decode_states(sequence, 5, 4)
    assert [token for token, _ in sequence.state_targets] == [0, 1, 2, 3]
    table.mark_computed(sequence, 6)
    sequence.ids.append(1)
    table.mark_final(sequence, 7)
    table.plan_decode_states(sequence, 6, 1)
    assert sorted(sequence.states) == [6, 7]
    assert states.violations() == []


def test_two_sequences_never_write_to_one_slot() -> None:
    table, _ = make_table(slots=6)
    sequences = [make_sequence(9, new=9), make_sequence(9, new=9)]
    prefill(table, sequences[0])
    prefill(table, sequences[1])
    for _ in range(8):
        for sequence in sequences:
            table.plan_decode_states(sequence, sequence.num_computed_tokens, 1)
        targets = [slot for sequence in sequences for _, slot in sequence.state_targets]
        sources = [sequence.state_source for sequence in sequences]
        assert len({*targets}) == 2
        assert not {*targets} & {*sources}
        for sequence in sequences:
            table.mark_computed(sequence, len(sequence.ids))
            sequence.ids.append(1)
            table.mark_final(sequence, len(sequence.ids))


def test_more_sequences_than_slots_is_an_error() -> None:
    table, _ = make_table(slots=3, interval=0)
    for first in range(3):
        prefill(table, make_sequence(6, new=4, first=first))
    with pytest.raises(CacheTooSmall, match="All 3 recurrent states are in use by 3 sequences"):
        prefill(table, make_sequence(6, first=3))


@pytest.mark.parametrize(("slots", "interval"), [(2, 0), (3, 6), (3, -4)])
def test_impossible_tables_are_refused(slots: int, interval: int) -> None:
    with pytest.raises(InputError, match=r"needs 3 state slots, found 2|multiple of the 4 tokens of a page"):
        StateTable(slots, SIZE, interval)


@pytest.mark.parametrize("final", [8, 10])
def test_a_rewind_without_slots_computes_final_tokens_again(final: int) -> None:
    table, _ = make_table(slots=3, interval=0)
    sequence = make_sequence(6, new=20)
    prefill(table, sequence)
    decode(table, sequence, 7, final=False)  # the states after 6 to 10 tokens are evicted, the one after 5 is left
    table.mark_final(sequence, final)
    assert sequence.num_published_pages == 1  # a published page is never computed again
    table.rewind(sequence, 11)
    assert sequence.num_computed_tokens == 5
    assert table.violations(Counter(sequence.pages)) == []
    table.plan_prefill_states(sequence, 5, 10)
    table.mark_computed(sequence, 10)
    table.mark_final(sequence, 11)
    assert sequence.num_published_pages == 2
    assert table.violations(Counter(sequence.pages)) == []


def test_a_sequence_replaces_only_the_checkpoints_that_it_made() -> None:
    table, states = make_table(slots=20, interval=100 * SIZE)
    chat = [*range(5), *range(4)]  # a prompt that ends where the other sequence generates on
    prefill(table, TokenSequence(chat))
    prefill(table, sequence := make_sequence(5, new=20))
    decode(table, sequence, 9)
    assert states.num_checkpoints == 3  # after 4 and 8 tokens for the prompts, after 12 behind generated text
    assert prefill(table, TokenSequence([*chat, 70]))[0][0] == 8
