"""Clients that send or read single bytes: disconnected in time, without harm to others."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exlm.serve import ApiKeys, Limits, Options
from tests.serve.running_server import RunningServer, listening, preloaded, running_server

KEY = "sk-slow"
BOUNDS = Limits(header_seconds=0.5, body_seconds=0.5, read_seconds=0.5)
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nAuthorization: Bearer sk-slow\r\n"
)
PATIENT = 20.0


@pytest.fixture(scope="module")
def server(chatty: Path) -> Iterator[RunningServer]:
    with running_server(preloaded(chatty), Options(api_keys=ApiKeys([KEY]), limits=BOUNDS)) as running:
        yield running


@contextlib.contextmanager
def connected(server: RunningServer) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENT) as line:
        yield line
    assert server.post("/v1/completions", KEY, prompt="a", max_tokens=2)[0] == 200


def trickled(line: socket.socket, first: bytes, drop: bytes) -> bytes:
    """Send bytes, then one every 50 ms; returns all that the server sends until it closes."""
    line.sendall(first)
    line.settimeout(0.05)
    answer, began = b"", time.monotonic()
    while time.monotonic() - began < PATIENT:
        try:
            if not (part := line.recv(4096)):
                return answer
            answer += part
        except TimeoutError:
            line.sendall(drop)
        except ConnectionError:
            return answer
    raise AssertionError(f"the server still listens, and said {answer!r}")


def test_slow_headers(server: RunningServer) -> None:
    began = time.monotonic()
    with connected(server) as line:
        answer = trickled(line, b"GET /health/live HTTP/1.1\r\nX-Long: ", b"x")
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert "headers" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert time.monotonic() - began < 10


def test_a_silent_client(server: RunningServer) -> None:
    with connected(server) as line:
        assert line.recv(100) == b""


def test_slow_headers_of_a_second_request(server: RunningServer) -> None:
    with connected(server) as line:
        answer = trickled(line, b"GET /health/live HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\nX: ", b"x")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"HTTP/1.1 408" in answer


def test_a_slow_body(server: RunningServer) -> None:
    with connected(server) as line:
        answer = trickled(line, HEAD + b"Content-Length: 4000\r\n\r\n{", b" ")
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"connection: close" in answer.lower()


def test_a_slow_body_in_chunks(server: RunningServer) -> None:
    with connected(server) as line:
        answer = trickled(line, HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", b"1\r\n \r\n")
    assert answer.startswith(b"HTTP/1.1 408")


def test_a_slow_body_that_was_refused_at_once(server: RunningServer) -> None:
    with connected(server) as line:
        answer = trickled(line, HEAD.replace(b"slow", b"fast") + b"Content-Length: 4000\r\n\r\n{", b" ")
    assert answer.startswith(b"HTTP/1.1 401")


def test_a_body_that_is_too_large_gets_an_error_object(server: RunningServer) -> None:
    """A client that still sends when it is refused must be able to read the error."""
    with connected(server) as line:
        line.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % (64 << 20))
        for _ in range(16):
            line.sendall(b"x" * (1 << 20))
        assert line.recv(100).startswith(b"HTTP/1.1 413")
        assert trickled(line, b"", b"x").endswith(b"}")


@pytest.mark.parametrize(("key", "status"), [(b"slow", 413), (b"fast", 401)])
def test_connection_close_waits_for_the_body(server: RunningServer, key: bytes, status: int) -> None:
    """If it were closed before, the client would get a reset instead of the error."""
    with connected(server) as line:
        head = HEAD.replace(b"slow", key) + b"Connection: close\r\nContent-Length: %d\r\n\r\n"
        line.sendall(head % (5 << 20))
        for _ in range(20):
            time.sleep(0.002)
            line.sendall(b"x" * (1 << 18))
        answer = b""
        while part := line.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert answer.endswith(b"}")


def test_a_slow_answer_is_not_a_slow_client(server: RunningServer) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 900, "min_tokens": 900, "stream": True}).encode()
    began = time.monotonic()
    with connected(server) as line:
        line.sendall(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        answer = b""
        while part := line.recv(65536):
            answer += part
    assert time.monotonic() - began > BOUNDS.header_seconds
    assert b"data: [DONE]" in answer


def test_an_unread_response() -> None:
    """The response is larger than all buffers between server and client."""
    gone = threading.Event()

    async def large(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(32):
            await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            continue
        gone.set()

    with (
        listening(large, BOUNDS) as (port, _),
        socket.create_connection(("127.0.0.1", port), timeout=PATIENT) as line,
    ):
        line.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert line.recv(8) == b"HTTP/1.1"
        assert gone.wait(PATIENT)
