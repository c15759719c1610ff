"""Messages arrive as they were sent, and a closed channel raises EOFError."""

from __future__ import annotations

import socket
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exlm.parallel.comm import Channel, Message

VALUES = st.dictionaries(
    st.text(max_size=8), st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8)
)
SHAPES = st.lists(st.integers(0, 4), min_size=1, max_size=3)
TYPES = st.sampled_from([torch.int64, torch.int32, torch.bool, torch.float32])


@given(VALUES, st.dictionaries(st.text(max_size=5), st.tuples(SHAPES, TYPES), max_size=4))
def test_a_message_arrives(values: dict[str, object], layouts: dict[str, tuple[list[int], torch.dtype]]) -> None:
    tensors = {name: torch.randint(0, 2, shape).to(dtype) for name, (shape, dtype) in layouts.items()}
    sender, receiver = socket.socketpair()
    with sender, receiver:
        for _ in range(2):
            Channel(sender).send(Message("do", values, tensors))
            received = Channel(receiver).receive()
            assert (received.action, received.values) == ("do", values)
            assert received.tensors.keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert received.tensors[name].dtype is tensor.dtype
                assert torch.equal(received.tensors[name], tensor)


def test_a_closed_connection() -> None:
    sender, receiver = socket.socketpair()
    with receiver:
        Channel(sender).send(Message("last"))
        Channel(sender).close()
        assert Channel(receiver).receive().action == "last"
        with pytest.raises(EOFError, match="closed"):
            Channel(receiver).receive()
    sender, receiver = socket.socketpair()
    with sender, receiver:
        sender.sendall(struct.pack("<Q", 1 << 60))
        with pytest.raises(EOFError, match="not a message"):
            Channel(receiver).receive()
