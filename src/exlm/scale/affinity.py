"""Which replica should have a request: the one that read most of its prompt before, if it is not too busy.

Pure: a request is the hashes of its prompt's blocks, a replica is a name with a load. What a replica's cache
really holds is not known here; it is guessed from where earlier requests went, and a wrong guess costs time
only.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

BLOCK_CHARS = 128
"""Characters of a prompt's text that are hashed together."""
MAX_BLOCKS = 512
"""Blocks of one prompt that are looked at: what comes later cannot decide where it goes."""


def prompt_blocks(body: bytes, tenant: str = "") -> tuple[bytes, ...]:
    """A request's prompt as hashes, each of all the text up to the end of its block; empty if it has none.

    Prompts that begin alike have the same first hashes. Those of different tenants, models or adapters have
    none in common, since no pages are.
    """
    try:
        asked = json.loads(body)
    except ValueError:
        return ()
    if not isinstance(asked, dict):
        return ()
    text = _text(asked)
    if not text:
        return ()
    start = json.dumps([tenant, asked.get("model"), asked.get("lora")])
    chain = hashlib.blake2b(start.encode("utf-8", "replace"), digest_size=8)
    found = []
    for place in range(0, min(len(text), BLOCK_CHARS * MAX_BLOCKS), BLOCK_CHARS):
        chain.update(text[place : place + BLOCK_CHARS].encode("utf-8", "replace"))
        found.append(chain.digest())
    return tuple(found)


def _text(asked: Mapping[str, Any]) -> str:
    """What the model is going to read, in its order; a chat template puts tools first."""
    if "messages" in asked:
        return "".join(json.dumps(asked[name]) for name in ("tools", "messages") if asked.get(name))
    prompt = asked.get("prompt")
    first = prompt[0] if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else prompt
    return first if isinstance(first, str) else json.dumps(first) if first else ""


class PrefixAffinity:
    """Remembers which replica was sent which prompts, the latest first to mind and the oldest forgotten."""

    def __init__(self, slack: int = 8, max_blocks: int = 200_000) -> None:
        """A replica may have `slack` requests more than the least busy one before others are preferred.

        `most` blocks are remembered.
        """
        self.slack, self.max_blocks = slack, max_blocks
        self._holders: OrderedDict[bytes, set[str]] = OrderedDict()

    def __len__(self) -> int:
        """How many blocks are remembered."""
        return len(self._holders)

    def rank(self, blocks: Sequence[bytes], loads: Mapping[str, int]) -> list[str]:
        """All replicas, best first.

        A prompt that nobody knows goes to the least busy; among equals its hash decides, so that several
        routers that know nothing of each other agree.
        """
        depths = self._depths(blocks, loads)
        bearable = min(loads.values(), default=0) + self.slack
        first = blocks[0] if blocks else b""
        return sorted(
            loads,
            key=lambda name: (
                loads[name] > bearable,
                -depths.get(name, 0) if loads[name] <= bearable else 0,
                loads[name],
                hashlib.blake2b(first + name.encode(), digest_size=8).digest(),
            ),
        )

    def record(self, blocks: Iterable[bytes], replica: str) -> None:
        """A prompt went to a replica."""
        for block in blocks:
            self._holders.setdefault(block, set()).add(replica)
            self._holders.move_to_end(block)
        while len(self._holders) > self.max_blocks:
            self._holders.popitem(last=False)

    def keep(self, alive: Collection[str]) -> None:
        """Forget what replicas that are gone have read."""
        for block, holders in list(self._holders.items()):
            holders.intersection_update(alive)
            if not holders:
                del self._holders[block]

    def _depths(self, blocks: Sequence[bytes], names: Collection[str]) -> dict[str, int]:
        """By replica, how many of the first blocks it has read."""
        depths: dict[str, int] = {}
        for depth, block in enumerate(blocks, 1):
            here = [name for name in self._holders.get(block, ()) if name in names]
            if not here:
                break
            depths |= dict.fromkeys(here, depth)
        return depths
