"""One model in several processes, as rank 0 sees it: who takes part, and one decoder of all their parts."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from ..config import Config, FrozenConfig
from ..errors import DoesNotFit, Unsupported
from ..parallel import Group, Leader, Order
from ..parallel.launch import Seat, accept, call, launched, meeting, start
from .budget import FIT_SPLIT, check_split, measure, split, use
from .devices import Slot
from .follower import serve
from .led import Led, Mirrored
from .loading import Loaded, Yielding, load_steps, opened
from .placement import Space, size
from .progress import Callback
from .staging import staged
from .ways import WAYS, Way


def team_steps(
    way: str,
    config: Config,
    slots: Sequence[Slot],
    gpu_split: Sequence[float] | None,
    callback: Callback,
    callback_gen: Yielding | None,
) -> Generator[Any, None, Loaded]:
    """Load a part of the model in each of several processes, started here unless torchrun did.

    Under torchrun every rank calls this, and only rank 0 returns: the others serve it, then end the process.
    """
    frozen = config.freeze()
    if (seat := launched()) is not None:
        return (yield from _beside(WAYS[way], frozen, seat, slots, callback, callback_gen))
    seats, spaces = taken(slots, gpu_split)
    WAYS[way].check(frozen, len(seats))
    if len({seat.device.type for seat in seats}) > 1:
        names = ", ".join(seat.name for seat in seats)
        raise Unsupported(f"Ranks must be all on GPUs or all on CPUs, found {names}: change config.device.")
    if spaces:
        _fits(frozen, slots, spaces)
    if len(seats) == 1:
        modules = [seats[0]] * (len(frozen.spec.layers) + 2)
        source = staged(opened(frozen), modules)
        alone = yield from load_steps(frozen, source, modules, callback, callback_gen)
        return replace(alone, ranks=1)
    with _started(way, config, seats) as (leader, store):
        loaded = yield from WAYS[way].load(frozen, 0, len(seats), seats[0], callback, callback_gen)
        return _met(WAYS[way], frozen, loaded, leader, store, len(seats), local=True)


def taken(slots: Sequence[Slot], gpu_split: Sequence[float] | None) -> tuple[list[Slot], list[Space]]:
    """One device for each rank, and how much of each may be used; no such limits where there is no split.

    The devices are all there are, or those that a split gives more than nothing. Where there is only the CPU,
    a split makes that many ranks of it.
    """
    if not gpu_split:
        return list(slots), []
    check_split(gpu_split)
    if len(slots) == 1 and slots[0].device.type == "cpu":
        slots = [slots[0]] * len(gpu_split)
    spaces = split(slots, gpu_split)
    ranks = [(slot, space) for slot, gb, space in zip(slots, gpu_split, spaces, strict=False) if gb]
    return [slot for slot, _ in ranks], [space for _, space in ranks]


@contextmanager
def _started(way: str, config: Config, seats: Sequence[Slot]) -> Iterator[tuple[Leader, Store]]:
    """Every other rank's process, at work on its share; none is left if the block fails."""
    count = len(seats)
    wishes = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    for name in ("device", "dtype"):  # perhaps torch's own objects, whose names say the same
        wishes[name] = None if wishes[name] is None else str(wishes[name])
    with tempfile.TemporaryDirectory(prefix="exlm-") as folder:
        place = str(Path(folder) / "ranks")
        task = {
            "way": way,
            "config": wishes,
            "size": count,
            "store": place,
            "threads": max(1, torch.get_num_threads() // count),
        }
        tasks = [{**task, "rank": r, "device": str(seats[r].device)} for r in range(1, count)]
        leader = Leader(*start("exlm.model.follower", tasks))
        try:
            yield leader, meeting(place, count)
        except BaseException as error:
            leader.failed(f"loading failed on rank 0 with {type(error).__name__}")
            raise


def _beside(
    way: Way,
    frozen: FrozenConfig,
    seat: Seat,
    slots: Sequence[Slot],
    callback: Callback,
    callback_gen: Yielding | None,
) -> Generator[Any, None, Loaded]:
    """The same among processes that torchrun started."""
    way.check(frozen, seat.size)
    own = slots[dist.get_node_local_rank(0) % len(slots)]
    if seat.rank:
        channel = call(seat)
        serve(channel, way, frozen, seat.rank, seat.size, own, seat.store, local=False)
        channel.close()
        sys.exit(0)
    if seat.store.check(["line"]):
        raise Unsupported(
            "torchrun's processes follow one model: load others with model.load(), or start without torchrun."
        )
    leader = Leader(accept(seat))
    try:
        loaded = yield from way.load(frozen, 0, seat.size, own, callback, callback_gen)
        return _met(way, frozen, loaded, leader, seat.store, seat.size, local=False)
    except BaseException:
        leader.close()
        raise


def _met(
    way: Way, frozen: FrozenConfig, share: Loaded, leader: Leader, store: Store, count: int, *, local: bool
) -> Loaded:
    """Rank 0's share made the head of the whole, once every rank has loaded its own."""
    leader.answers()
    leader.tell(Order("meet"))
    group = leader.meet(lambda: Group(store, 0, count, share.devices[0], local))
    mirror = Mirrored(leader)
    held = partial(way.held, frozen, size=count)
    decoder = Led(way.connect(share, frozen, group), mirror, held, group.device)
    return replace(share, decoder=decoder, ranks=count, leader=leader, mirror=mirror, whole=frozen.spec)


def _fits(frozen: FrozenConfig, slots: Sequence[Slot], spaces: Sequence[Space]) -> None:
    """Refuse a split whose numbers are below what a rank's share takes."""
    parts = measure(frozen, opened(frozen), use(frozen, slots), [0] * len(frozen.spec.layers))
    share = sum(part.weights + part.shared for part in parts[1:]) // len(spaces)
    for rank, space in enumerate(spaces):
        need = share + (parts[0].weights if rank == 0 else 0)
        if need > space.free:
            raise DoesNotFit(
                f"Rank {rank}'s share of the weights takes {size(need)}, but gpu_split gives {space.name} "
                f"{size(space.free)}. {FIT_SPLIT}"
            )
