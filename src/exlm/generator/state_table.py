"""The state table: which slots hold the recurrent states of which sequences, and checkpoints for the prefix cache.

Keys and values of a prefix can be reused up to any page; a recurrent state only where it was kept. A state is one slot
of every recurrent layer's cache. A sequence has states by position, the number of tokens they have seen: the one that
the next pass continues, the ones to which a rewind may return, and the ones that a pass in flight will write. A pass
never overwrites the state that it reads, so a pass that is dropped (async scheduling, a rejected draft) costs nothing.

A checkpoint is a state at a page border that outlives its sequence. Its key is the hash of the page that ends there:
the prefix cache finds both with one key. References to slots are counted, so a checkpoint and the sequences that start
from it share a slot without a copy. Like the page table it holds integers and bytes only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from ..errors import CacheTooSmall, InputError
from .token_sequence import NO_STATES, TokenSequence

SLOTS_PER_SEQUENCE = 3
"""Slots that every running sequence can count on: a state to rewind to, the current one, the next one."""


class StateTable:
    """Owns every state slot of one cache."""

    def __init__(self, num_slots: int, page_size: int, checkpoint_interval: int) -> None:
        """`checkpoint_interval`: tokens from one checkpoint of a prompt to the next, whole pages; 0: no checkpoints."""
        if num_slots < SLOTS_PER_SEQUENCE:
            raise InputError(f"A sequence needs {SLOTS_PER_SEQUENCE} state slots, found {num_slots} in all.")
        if checkpoint_interval < 0 or checkpoint_interval % page_size:
            raise InputError(
                f"state_checkpoint_interval must be 0 or a multiple of the {page_size} tokens of a page, "
                f"found {checkpoint_interval}."
            )
        self.num_slots, self.page_size, self.checkpoint_interval = num_slots, page_size, checkpoint_interval
        self.reset()

    def reset(self) -> None:
        """Forget all states and checkpoints."""
        self._free = [*range(self.num_slots)][::-1]
        self._references = [0] * self.num_slots
        self._checkpoints: OrderedDict[bytes, int] = OrderedDict()  # slots by page hash, least recently used first
        self._sequences: dict[int, TokenSequence] = {}  # with states

    @property
    def num_checkpoints(self) -> int:
        """How many checkpoints there are."""
        return len(self._checkpoints)

    @property
    def checkpoint_hashes(self) -> list[bytes]:
        """The hashes of the pages with a checkpoint at their end, least recently used first."""
        return [*self._checkpoints]

    def num_spare_slots(self, num_sequences: int) -> int:
        """Slots left when each of so many sequences has its guaranteed ones: for the states after draft tokens."""
        return max(0, self.num_slots - SLOTS_PER_SEQUENCE * num_sequences)

    def has_checkpoint(self, page_hash: bytes) -> bool:
        """Whether the state at the end of this page is kept."""
        return page_hash in self._checkpoints

    def restore(self, sequence: TokenSequence, page_hash: bytes, position: int) -> None:
        """Let a sequence continue from the checkpoint at the end of a page, which is `position`."""
        self._checkpoints.move_to_end(page_hash)
        self._drop(sequence, list(sequence.states))
        self._keep(sequence, position, self._checkpoints[page_hash])

    def plan_decode(self, sequence: TokenSequence, past: int, count: int, *, is_final: bool = False) -> None:
        """Set a sequence's `state_source` and `state_targets` for a pass of `count` tokens after the first `past`.

        The state after each of them is stored. `is_final`: tokens before `past` cannot be rewound, whatever
        `num_final_tokens` says. A pass that was dropped is planned again with the same slots.
        """
        end = past + count
        if is_final:
            self._drop(sequence, [p for p in sequence.states if p < past and not self._awaits_publication(sequence, p)])
        self._drop(sequence, [p for p in sequence.states if p > end])
        self._plan(sequence, past, range(past + 1, end + 1))

    def plan_prefill(self, sequence: TokenSequence, start: int, end: int) -> None:
        """Set `state_source` and `state_targets` for a chunk of a prompt.

        The states at its end and at the lasting checkpoints within are stored; a checkpoint is left out where its slot
        would be taken from a running sequence.
        """
        self._drop(sequence, [p for p in sequence.states if p > start])
        first = start // self.page_size * self.page_size + self.page_size
        borders = range(first, end, self.page_size) if self.checkpoint_interval else ()
        lasting = [p for p in borders if self._is_lasting_checkpoint(sequence, p)]
        self._plan(sequence, start, [end])
        for position in lasting:
            if self._free or self._evict_checkpoint():
                self._keep(sequence, position, self._free.pop())
                sequence.state_targets = (*sequence.state_targets, (position - start - 1, sequence.states[position]))

    def forget_unneeded(self, sequence: TokenSequence) -> None:
        """Drop the states that no pass, rewind or checkpoint needs any more."""
        if len(sequence.states) > 1:
            floor = self.rewind_floor(sequence, sequence.num_computed_tokens)
            unneeded = [p for p in sequence.states if p < floor and not self._awaits_publication(sequence, p)]
            self._drop(sequence, unneeded)

    def rewind_floor(self, sequence: TokenSequence, current: int) -> int:
        """The position to which the longest rewind returns, for a sequence that continues from `current`.

        That rewind leaves the final ids and feeds the last of them again. It starts from the state right before that
        id, or from the last one before where that was evicted. The state at the floor itself is never evicted.
        """
        longest = min(current, sequence.num_final_tokens - 1)
        return max((p for p in sequence.states if p <= longest), default=0)

    def checkpoint(self, sequence: TokenSequence, page_index: int) -> None:
        """Keep the state at the end of a page that has just been published, if it is there and wanted.

        In generated text only the newest full page has a checkpoint (a rolling one) besides those of the interval: a
        chat continues there. A checkpoint that another sequence made is never replaced.
        """
        position, page_hash = (page_index + 1) * self.page_size, sequence.page_hashes[page_index]
        slot = sequence.states.get(position)
        if slot is None or not self.checkpoint_interval:
            return
        is_new = page_hash not in self._checkpoints
        if is_new:
            self._checkpoints[page_hash] = slot
            self._references[slot] += 1
        else:
            self._checkpoints.move_to_end(page_hash)
        if sequence.rolling_checkpoint is not None:
            self.drop_checkpoint(sequence.rolling_checkpoint)
        is_rolling = is_new and not self._is_lasting_checkpoint(sequence, position)
        sequence.rolling_checkpoint = page_hash if is_rolling else None

    def drop_checkpoint(self, page_hash: bytes) -> None:
        """Forget a checkpoint, if there is one: its page was evicted."""
        slot = self._checkpoints.pop(page_hash, None)
        if slot is not None:
            self._release(slot)

    def rewind(self, sequence: TokenSequence, position: int) -> int:
        """Return to the last state at or before `position`; its position."""
        found = max((p for p in sequence.states if p <= position), default=0)
        self._drop(sequence, [p for p in sequence.states if p > found])
        return found

    def release(self, sequence: TokenSequence) -> None:
        """Drop a sequence's states; checkpoints stay."""
        self._drop(sequence, list(sequence.states))
        sequence.state_source, sequence.state_targets, sequence.rolling_checkpoint = -1, (), None

    def violations(self) -> list[str]:
        """Broken invariants, one line each."""
        found = []
        uses = [0] * self.num_slots
        for sequence in self._sequences.values():
            for slot in sequence.states.values():
                uses[slot] += 1
        for slot in self._checkpoints.values():
            uses[slot] += 1
        for slot, (counted, used) in enumerate(zip(self._references, uses, strict=True)):
            if counted != used:
                found.append(f"state slot {slot}: {counted} references, {used} users")
        unused = [slot for slot, used in enumerate(uses) if not used]
        if sorted(self._free) != unused:
            found.append(f"free state slots are {sorted(self._free)}, unused are {unused}")
        return found

    def _plan(self, sequence: TokenSequence, past: int, positions: Sequence[int]) -> None:
        for position in positions:
            if position not in sequence.states:  # it is there if a dropped pass was to store it
                if not self._free:
                    self._evict(sequence, past)
                self._keep(sequence, position, self._free.pop())
        sequence.state_source = sequence.states[past] if past else -1
        sequence.state_targets = [(position - past - 1, sequence.states[position]) for position in positions]

    def _is_lasting_checkpoint(self, sequence: TokenSequence, position: int) -> bool:
        """Whether a checkpoint at this page border outlasts the next: one of the interval, or the prompt's last."""
        return position % self.checkpoint_interval == 0 or position == sequence.last_prompt_border

    def _awaits_publication(self, sequence: TokenSequence, position: int) -> bool:
        """Whether a state is at the end of a page that is not published yet; publication will make it a checkpoint."""
        pages, offset = divmod(position, self.page_size)
        return not offset and bool(self.checkpoint_interval) and pages > sequence.num_published_pages

    def _evict_checkpoint(self) -> bool:
        """Free the slot of the least recently used checkpoint that no sequence uses; whether there is one."""
        page_hash = next((h for h, slot in self._checkpoints.items() if self._references[slot] == 1), None)
        if page_hash is not None:
            self.drop_checkpoint(page_hash)
        return page_hash is not None

    def _evict(self, sequence: TokenSequence, past: int) -> None:
        """Free a slot: of a checkpoint, or of a state from which a rewind can also start at an earlier one."""
        if self._evict_checkpoint():
            return
        for other, position in self._evictable_states(sequence, past):
            slot = other.states[position]
            self._drop(other, [position])
            if self._references[slot]:  # a checkpoint too
                for page_hash in [h for h, checkpoint in self._checkpoints.items() if checkpoint == slot]:
                    self.drop_checkpoint(page_hash)
            if self._free:
                return
        raise CacheTooSmall(
            f"All {self.num_slots} recurrent states are in use by {len(self._sequences)} sequences. Lower "
            "max_batch_size or num_draft_tokens, or give the generator more state_cache_bytes."
        )

    def _evictable_states(self, sequence: TokenSequence, past: int) -> Iterator[tuple[TokenSequence, int]]:
        """(sequence, position) of each state that is not the current one, nor at the rewind floor, nor planned."""
        for other in [*self._sequences.values()]:
            current = past if other is sequence else other.num_computed_tokens
            floor = self.rewind_floor(other, current)
            for position in sorted(other.states):
                if position < current and position != floor:
                    yield other, position

    def _keep(self, sequence: TokenSequence, position: int, slot: int) -> None:
        if sequence.states is NO_STATES:
            sequence.states = {}
        sequence.states[position] = slot
        self._references[slot] += 1
        self._sequences[id(sequence)] = sequence

    def _drop(self, sequence: TokenSequence, positions: Iterable[int]) -> None:
        for position in positions:
            self._release(sequence.states.pop(position))
        if not sequence.states:
            self._sequences.pop(id(sequence), None)

    def _release(self, slot: int) -> None:
        self._references[slot] -= 1
        if not self._references[slot]:
            self._free.append(slot)
