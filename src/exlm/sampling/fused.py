"""Fused: a batch picked by two kernels on a GPU, fed by one copy. What a row needs is packed; nothing waits.

`pipeline.py` says what is right and takes the rows that have no lane here, and all rows where Triton is
missing. Penalised tokens, mirostat's targets and biases stay on the device between steps.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, MutableMapping, Sequence
from functools import lru_cache
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .lanes import AT, HEAD, PLACES, TILES, Lane, table_of
from .pick import Picked, best
from .plan import Plan
from .rows import Row
from .vocabulary import Vocabulary

TILE = 16384  # columns loaded at a time: what it takes to keep a multiprocessor's memory busy
PART = 4096  # candidates looked at a time
WARPS = 16

Member = tuple[int, Row, Plan]
"""A row, what its settings amount to, and before them the place of its logits in the batch."""


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return find_spec("triton") is not None


def serves(device: torch.device) -> bool:
    """Whether there are kernels for a device."""
    return device.type == "cuda" and _has_triton()


class Parcel:
    """What a launch must know of its rows: heads, lists and numbers, to be sent together."""

    def __init__(
        self, members: Sequence[Member], vocabulary: Vocabulary, width: int, device: torch.device
    ) -> None:
        """Pack rows, each with the place of its logits."""
        self._vocabulary, self._width, self._device = vocabulary, width, device
        self._heads = heads = np.zeros((len(members), HEAD), np.int64)
        self._numbers = [0.0] * len(members)
        self._lists: list[int] = []
        self._lists_start = heads.size
        self._put: dict[str, tuple[list[int], list[int]]] = {name: ([], []) for name in PLACES}
        self._kept: list[Tensor] = []
        self._bias: tuple[Tensor | None, Tensor] = (None, torch.empty(0))
        self.edited = False
        draws: list[int] = []
        for i, (_, row, plan) in enumerate(members):
            history = row.history
            position = len(row.state.history if history is None else history)
            draws += row.state.draw(position)
            if plan.steps or plan.mirostat:
                self._remember(i, row, plan, position)
            if plan.penalties is not None or plan.dry is not None:
                self._read_text(i, row, plan)
            if row.settings.token_bias is not None or row.allowed is not None or row.blocked:
                self._restrict(i, row)
        heads[:, AT["place"]] = [place for place, _, _ in members]
        heads[:, AT["draw"] : AT["draw"] + PLACES["draw"]] = np.array(draws, np.int64).reshape(
            len(members), -1
        )
        for name, (owners, words) in self._put.items():  # a word at a time would be slow
            if owners:
                part = slice(AT[name], AT[name] + PLACES[name])
                heads[owners, part] = np.array(words, np.int64).reshape(len(owners), -1)

    def send(self) -> tuple[Tensor, Tensor]:
        """Everything on the device, in one copy: the words, and behind them the numbers."""
        before = self._lists_start
        words = before + len(self._lists)
        words += words % 2  # kernels are compiled for aligned addresses
        packed = torch.empty(
            words + len(self._numbers), dtype=torch.int64, pin_memory=self._device.type == "cuda"
        )
        there = packed.numpy()
        there[:before] = self._heads.ravel()
        there[before : before + len(self._lists)] = self._lists
        there[words:].view(np.float64)[:] = self._numbers
        sent = packed.to(self._device, non_blocking=True)
        return sent, sent[words:].view(torch.float64)

    def _remember(self, i: int, row: Row, plan: Plan, position: int) -> None:
        """Where mirostat's target and the tokens that XTC spares are."""
        if plan.mirostat:
            self._numbers[i] = row.state.first_target(plan.numbers.tau)
            self._say("target", i, (self._address_of_target(row.state.last_target(position)),))
        if "xtc" in plan.steps:
            ids = self._vocabulary.unexcluded if plan.xtc_ignored is None else plan.xtc_ignored
            if ids:
                mask = self._vocabulary.mask(ids, self._width, self._device)
                self._say("spared", i, (mask.data_ptr(),))

    def _read_text(self, i: int, row: Row, plan: Plan) -> None:
        """Penalties and DRY."""
        self.edited = True
        state, lists = row.state, self._lists
        if row.history is not None:
            state.follow(row.history)
        if plan.penalties is not None:
            start = self._lists_start + len(lists)
            listed = state.penalty_list(plan.penalties, self._device, lists)
            if listed is not None:
                self._say("listed", i, (*listed, start))
            else:
                terms = state.penalty_terms(plan.penalties)
                self._say("fading", i, (*self._list(terms.ids), len(self._numbers)))
                self._numbers += terms.counts
                self._numbers += terms.strengths or (1.0,) * len(terms.ids)
        if plan.dry is not None:
            breakers = self._vocabulary.breakers if plan.dry.breakers is None else plan.dry.breakers
            costs = state.repeats(plan.dry, breakers, self._width)
            if costs:
                self._say("dry", i, (*self._list(costs), len(self._numbers)))
                self._numbers += costs.values()

    def _restrict(self, i: int, row: Row) -> None:
        """Blocked tokens, bias, allowed tokens."""
        self.edited = True
        bias = row.settings.token_bias
        if row.blocked:
            blocked = [token for token in row.blocked if 0 <= token < self._width]
            self._say("blocked", i, self._list(blocked))
        if bias is not None:
            self._say("bias", i, (self._there(bias).data_ptr(),))
        if row.allowed is not None:
            start, _ = self._list(bits(row.allowed, self._width))
            self._say("allowed", i, (start,))

    def _say(self, name: str, i: int, words: tuple[int, ...]) -> None:
        """Words for a row's head."""
        owners, said = self._put[name]
        owners.append(i)
        said += words

    def _list(self, values: Collection[int]) -> tuple[int, int]:
        start = self._lists_start + len(self._lists)
        self._lists += values
        return start, len(values)

    def _address_of_target(self, found: tuple[Tensor, int] | None) -> int:
        if found is None:
            return 0
        targets, place = found
        if targets.device != self._device:
            targets = targets.to(self._device, non_blocking=True)
            self._kept.append(targets)
        return targets.data_ptr() + place * targets.element_size()

    def _there(self, bias: Tensor) -> Tensor:
        """A bias on the device, sent again only if it was changed."""
        if bias is self._bias[0]:
            return self._bias[1]
        version = -1 if bias.is_inference() else bias._version
        known = _biases.get(bias)
        if known is None or version < 0 or known[0] != version or known[1].device != self._device:
            known = (version, bias.detach().to(self._device, torch.float32).contiguous())
            _biases[bias] = known
        self._bias = (bias, known[1])
        return known[1]


_biases: MutableMapping[Tensor, tuple[int, Tensor]] = WeakTensorKeyDictionary()


def bits(allowed: Tensor | Collection[int], width: int) -> array[int]:
    """Allowed tokens as a mask of bits in words of 64, long enough for the vocabulary."""
    packed = np.zeros(-(-width // 64) * 8, np.uint8)
    if isinstance(allowed, Tensor) and allowed.dtype == torch.int32:
        known = allowed.contiguous().numpy().view(np.uint8)
    else:
        mask = np.zeros(width, bool)
        if isinstance(allowed, Tensor) and allowed.dtype == torch.bool:
            mask[: len(allowed)] = allowed.numpy()[:width]
        else:
            ids: Collection[int] = allowed.tolist() if isinstance(allowed, Tensor) else allowed
            mask[[token for token in ids if 0 <= token < width]] = True
        known = np.packbits(mask, bitorder="little")
    packed[: len(known)] = known[: len(packed)]
    return array("q", packed.tobytes())


def pick_largest(x: Tensor) -> Picked:
    """The largest logit of every row (rows, width)."""
    from .triton.pick import largest_kernel

    tokens = torch.empty(len(x), dtype=torch.int64, device=x.device)
    largest_kernel[(len(x),)](x, x.stride(0), tokens, x.shape[1], TILE, num_warps=WARPS)
    return Picked(tokens, torch.ones(len(x), device=x.device))


def pick_rows(
    x: Tensor, members: Sequence[Member], lane: Lane, vocabulary: Vocabulary, wanted: int
) -> Picked:
    """Pick a token for some rows of logits (rows, width), which are not changed; all in one lane."""
    from .triton.edit import edit_kernel
    from .triton.pick import pick_kernel

    count, width, device = len(members), x.shape[1], x.device
    plans = [plan for _, _, plan in members]
    parcel = Parcel(members, vocabulary, width, device)
    table = table_of(tuple(plans), device)
    words, numbers = parcel.send()
    options = {"num_warps": WARPS, "enable_fp_fusion": False}  # sums as the host rounds them
    if parcel.edited:
        y = torch.empty(count, width, device=device)
        edit_kernel[(count,)](x, x.stride(0), y, table, words, numbers, width, TILE, **options)
        x = y
    tile = TILE // 2 if lane.wide else TILE  # those passes need more registers
    sort, runs = lane.sort, max(64, 1 << (-(-width // 64) - 1).bit_length())
    room = sort + TILES + runs + tile // 128 + (sort + TILES + width * lane.wide + 1) // 2
    scratch = torch.empty(count * room, dtype=torch.int64, device=device)
    tokens = torch.empty(count, dtype=torch.int64, device=device)
    shares = torch.empty(count, device=device)
    moves = any([plan.mirostat for plan in plans])
    targets = torch.empty(count, dtype=torch.float64, device=device) if moves else numbers
    all_p = torch.zeros(count, sort, dtype=torch.float64, device=device) if wanted else numbers
    all_ids = torch.zeros(count, sort, dtype=torch.int64, device=device) if wanted else words
    pick_kernel[(count,)](
        x, x.stride(0), int(parcel.edited), table, words, numbers, scratch, room, tokens, shares, targets,
        all_p, all_ids, width, wanted, runs, sort, tile, PART, lane.wide, lane.shaped, wanted > 0, **options,
    )  # fmt: skip
    if moves:
        for place, (_, row, plan) in enumerate(members):
            if plan.mirostat:
                row.state.set_target(row.position, targets, place)
    picked = Picked(tokens, shares)
    if wanted:
        picked.top_tokens, picked.top_p = best(all_p, all_ids, wanted)
    return picked
