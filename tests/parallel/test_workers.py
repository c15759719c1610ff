"""Workers connect to rank 0 with the right token, others are refused, and waiting ends."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest
import torch.distributed as dist

from exlm import WorkerLost
from exlm.parallel import workers
from exlm.parallel.comm import Message


def rank_infos(size: int) -> list[workers.RankInfo]:
    store = dist.HashStore()
    return [workers.RankInfo(store, rank, size) for rank in range(size)]


def test_ranks_connect_and_wrong_tokens_are_refused() -> None:
    ranks = rank_infos(3)
    channels = {}

    def connect(rank: int) -> None:
        channels[rank] = workers.connect_to_driver(ranks[rank])

    def connect_with_a_wrong_token() -> None:
        while not ranks[0].store.check(["driver_address"]):
            time.sleep(0.01)
        host, port, _ = json.loads(ranks[0].store.get("driver_address"))
        with socket.create_connection((host, port)) as connection:
            connection.sendall(b"x" * 40)
            assert connection.recv(1) == b""

    threads = [threading.Thread(target=connect_with_a_wrong_token)]
    threads += [threading.Thread(target=connect, args=(rank,)) for rank in (2, 1)]
    threads[0].start()
    accepting = threading.Thread(target=lambda: channels.update({0: workers.accept_workers(ranks[0])}))  # type: ignore[dict-item]
    accepting.start()
    threads[0].join()
    for thread in threads[1:]:
        thread.start()
    for thread in [*threads[1:], accepting]:
        thread.join()
    for rank, channel in enumerate(channels[0], 1):  # type: ignore[arg-type]
        channel.send(Message("hello", {"rank": rank}))
        assert channels[rank].receive().values == {"rank": rank}
        channel.close()
        channels[rank].close()


def test_a_rank_that_never_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "CONNECT_TIMEOUT", 0.2)
    with pytest.raises(WorkerLost, match=r"Ranks \[1\] did not connect"):
        workers.accept_workers(rank_infos(2)[0])
