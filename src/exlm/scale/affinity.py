"""Prefix-aware routing: prefer the replica that has prefilled most of a prompt, unless it is too busy.

It does not use Ray: a request is the hashes of its prompt's blocks, a replica is a name with a load. What a
replica's prefix cache holds is inferred from where earlier requests were sent; where that is wrong, a prompt
is prefilled again, which costs only time.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

BLOCK_CHARS = 128
"""Characters of a prompt's text in one hashed block."""
MAX_BLOCKS = 512
"""Only these first blocks of a prompt are hashed."""
CHAT_FIELDS = ("system", "instructions", "tools", "messages", "input")
"""The fields of a chat's prompt, in OpenAI's form or in that of another dialect."""


def prompt_blocks(request: Any, tenant: str = "") -> tuple[bytes, ...]:
    """Hashes of a request's prompt, each of all text up to the end of its block; empty without a prompt.

    Prompts with a common prefix have the same first hashes. Prompts of different tenants, models or adapters
    have none in common, because they share no cache pages.
    """
    if not isinstance(request, dict):
        return ()
    text = _prompt_text(request)
    if not text:
        return ()
    start = json.dumps([tenant, request.get("model"), request.get("lora")])
    chain = hashlib.blake2b(start.encode("utf-8", "replace"), digest_size=8)
    hashes = []
    for begin in range(0, min(len(text), BLOCK_CHARS * MAX_BLOCKS), BLOCK_CHARS):
        chain.update(text[begin : begin + BLOCK_CHARS].encode("utf-8", "replace"))
        hashes.append(chain.digest())
    return tuple(hashes)


def _prompt_text(request: Mapping[str, Any]) -> str:
    """The prompt's text in the order of the rendered prompt: chat templates put tools first."""
    if "prompt" not in request or "messages" in request:
        return "".join(json.dumps(request[name]) for name in CHAT_FIELDS if request.get(name))
    prompt = request["prompt"]
    first = prompt[0] if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else prompt
    return first if isinstance(first, str) else json.dumps(first) if first else ""


class PrefixAffinity:
    """An LRU table of prompt blocks and the replicas they were sent to."""

    def __init__(self, slack: int = 8, max_blocks: int = 200_000) -> None:
        """A replica is preferred until it has `slack` requests more than the least busy one."""
        self.slack, self.max_blocks = slack, max_blocks
        self._holders: OrderedDict[bytes, set[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def rank(self, blocks: Sequence[bytes], loads: Mapping[str, int]) -> list[str]:
        """All replicas, best first.

        A prompt that is not in the table goes to the least busy replica. Ties are broken by a hash of the
        prompt, so that several routers with separate tables agree.
        """
        lengths = self._prefix_lengths(blocks, loads)
        max_load = min(loads.values(), default=0) + self.slack
        first = blocks[0] if blocks else b""

        def sort_key(name: str) -> tuple[bool, int, int, bytes]:
            is_busy = loads[name] > max_load
            tie_break = hashlib.blake2b(first + name.encode(), digest_size=8).digest()
            return is_busy, 0 if is_busy else -lengths.get(name, 0), loads[name], tie_break

        return sorted(loads, key=sort_key)

    def record(self, blocks: Iterable[bytes], replica: str) -> None:
        for block in blocks:
            self._holders.setdefault(block, set()).add(replica)
            self._holders.move_to_end(block)
        while len(self._holders) > self.max_blocks:
            self._holders.popitem(last=False)

    def retain(self, alive: Collection[str]) -> None:
        for block, holders in list(self._holders.items()):
            holders.intersection_update(alive)
            if not holders:
                del self._holders[block]

    def _prefix_lengths(self, blocks: Sequence[bytes], names: Collection[str]) -> dict[str, int]:
        """For each replica, how many of the first blocks were sent to it."""
        lengths: dict[str, int] = {}
        for length, block in enumerate(blocks, 1):
            holders = self._holders.get(block, set()) & set(names)
            if not holders:
                break
            lengths |= dict.fromkeys(holders, length)
        return lengths
