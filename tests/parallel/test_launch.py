"""Workers connect to rank 0 with the right token, others are refused, and waiting ends."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest
import torch.distributed as dist

from exlm import WorkerLost
from exlm.parallel import launch
from exlm.parallel.comm import Message


def rank_infos(size: int) -> list[launch.RankInfo]:
    store = dist.HashStore()
    return [launch.RankInfo(store, rank, size) for rank in range(size)]


def test_ranks_connect_and_wrong_tokens_are_refused() -> None:
    ranks = rank_infos(3)
    lines = {}

    def caller(rank: int) -> None:
        lines[rank] = launch.connect_to_driver(ranks[rank])

    def stranger() -> None:
        while not ranks[0].store.check(["driver_address"]):
            time.sleep(0.01)
        host, port, _ = json.loads(ranks[0].store.get("driver_address"))
        with socket.create_connection((host, port)) as line:
            line.sendall(b"x" * 40)
            assert line.recv(1) == b""

    threads = [threading.Thread(target=stranger)]
    threads += [threading.Thread(target=caller, args=(rank,)) for rank in (2, 1)]
    threads[0].start()
    accepted = threading.Thread(target=lambda: lines.update({0: launch.accept_workers(ranks[0])}))  # type: ignore[dict-item]
    accepted.start()
    threads[0].join()
    for thread in threads[1:]:
        thread.start()
    for thread in [*threads[1:], accepted]:
        thread.join()
    for rank, channel in enumerate(lines[0], 1):  # type: ignore[arg-type]
        channel.send(Message("hello", {"rank": rank}))
        assert lines[rank].receive().values == {"rank": rank}
        channel.close()
        lines[rank].close()


def test_a_rank_that_never_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "CONNECT_TIMEOUT", 0.2)
    with pytest.raises(WorkerLost, match=r"Ranks \[1\] did not connect"):
        launch.accept_workers(rank_infos(2)[0])
