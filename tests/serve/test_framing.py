"""Request smuggling: requests with ambiguous length are refused, and nothing hidden in them is answered."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from exlm.serve import ApiKeys, Limits, Options
from tests.serve.running_server import RunningServer, preloaded, running_server

KEY = b"sk-frame"
HEAD = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nAuthorization: Bearer " + KEY + b"\r\n"
BODY = b'{"text":"a"}'
CHUNKED = b"c\r\n" + BODY + b"\r\n0\r\n\r\n"
SECOND = b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer " + KEY + b"\r\n\r\n"
"""The request that an attacker smuggles in a body."""


@pytest.fixture(scope="module")
def server(chatty: Path) -> Iterator[RunningServer]:
    options = Options(api_keys=ApiKeys([KEY.decode()]), limits=Limits(header_seconds=2.0, body_seconds=2.0))
    with running_server(preloaded(chatty), options) as running:
        yield running


def answered(server: RunningServer, sent: bytes) -> bytes:
    """All bytes that the server sends until it closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as line:
        line.sendall(sent)
        told = b""
        try:
            while part := line.recv(65536):
                told += part
        except ConnectionResetError:
            return told
        return told


def test_requests_with_clear_framing_are_answered(server: RunningServer) -> None:
    for sent in (
        HEAD + b"Content-Length: 12\r\nConnection: close\r\n\r\n" + BODY,
        HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + CHUNKED,
        HEAD + b"Content-Length: 12\r\nContent-Length: 12\r\nConnection: close\r\n\r\n" + BODY,
        HEAD + b"Transfer-Encoding:\r\n chunked\r\nConnection: close\r\n\r\n" + CHUNKED,
        HEAD + b"Content-Length: 12\r\n\r\n" + BODY + SECOND.replace(b"Host: a", b"Host: a\r\nConnection: close"),
    ):
        told = answered(server, sent)
        assert told.startswith(b"HTTP/1.1 200 OK\r\n"), told
        assert told.count(b"HTTP/1.1 200 OK") == 1 + (SECOND[:10] in sent)


UNCLEAR = {
    "both": HEAD + b"Content-Length: 12\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKED + SECOND,
    "both, the other way round": HEAD
    + b"Transfer-Encoding: chunked\r\nContent-Length: 17\r\n\r\n" + CHUNKED + SECOND,
    "both, one of them folded": HEAD
    + b"Content-Length: 12\r\nTransfer-Encoding:\r\n chunked\r\n\r\n" + CHUNKED + SECOND,
    "both, of nothing": HEAD + b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SECOND,
    "both, and the connection is to close": HEAD
    + b"Connection: close\r\nContent-Length: 500\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKED + SECOND,
    "chunks in HTTP/1.0": HEAD.replace(b"1.1", b"1.0")
    + b"Connection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKED + SECOND,
    "two lengths": HEAD + b"Content-Length: 12\r\nContent-Length: 13\r\n\r\n" + BODY + SECOND,
    "two lengths in one": HEAD + b"Content-Length: 12, 13\r\n\r\n" + BODY + SECOND,
    "a length with a sign": HEAD + b"Content-Length: +12\r\n\r\n" + BODY + SECOND,
    "a negative length": HEAD + b"Content-Length: -12\r\n\r\n" + BODY + SECOND,
    "a length in hexadecimal": HEAD + b"Content-Length: 0xc\r\n\r\n" + BODY + SECOND,
    "a length in two words": HEAD + b"Content-Length: 1 2\r\n\r\n" + BODY + SECOND,
    "a length with a space before the colon": HEAD + b"Content-Length : 12\r\n\r\n" + BODY + SECOND,
    "chunks with a space before the colon": HEAD + b"Transfer-Encoding : chunked\r\n\r\n" + CHUNKED + SECOND,
    "chunks twice": HEAD
    + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKED + SECOND,
    "chunks of something": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKED + SECOND,
    "chunks and something": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n" + CHUNKED + SECOND,
    "no chunks": HEAD + b"Transfer-Encoding: identity\r\n\r\n" + BODY + SECOND,
    "nearly chunks": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKED + SECOND,
    "chunks behind a control character": HEAD
    + b"Transfer-Encoding: \x0bchunked\r\n\r\n" + CHUNKED + SECOND,
    "a null in a header": HEAD + b"X: a\x00b\r\nContent-Length: 12\r\n\r\n" + BODY + SECOND,
    "a carriage return in a header": HEAD + b"X: a\rContent-Length: 0\r\n\r\n" + BODY + SECOND,
    "a folded first header": HEAD.replace(b"Host", b" Host", 1)
    + b"Content-Length: 12\r\n\r\n" + BODY + SECOND,
    "two hosts": HEAD + b"Host: b\r\nContent-Length: 12\r\n\r\n" + BODY + SECOND,
    "a chunk whose size has a sign": HEAD
    + b"Transfer-Encoding: chunked\r\n\r\n+c\r\n" + BODY + b"\r\n0\r\n\r\n" + SECOND,
    "a chunk whose size is too long": HEAD
    + b"Transfer-Encoding: chunked\r\n\r\n" + b"0" * 30 + b"c\r\n" + BODY + b"\r\n0\r\n\r\n" + SECOND,
    "a chunk that is longer than its size": HEAD
    + b"Transfer-Encoding: chunked\r\n\r\n2\r\n" + BODY + b"\r\n0\r\n\r\n" + SECOND,
}  # fmt: skip


@pytest.mark.parametrize("name", UNCLEAR)
def test_ambiguous_framing_is_refused_and_the_connection_closed(server: RunningServer, name: str) -> None:
    told = answered(server, UNCLEAR[name])
    head, _, body = told.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n"), told
    assert b"connection: close" in head.lower()
    assert len(re.findall(rb"HTTP/1\.1 \d{3} ", told)) == 1
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_the_error_says_what_is_ambiguous(server: RunningServer) -> None:
    told = json.loads(answered(server, UNCLEAR["both"]).partition(b"\r\n\r\n")[2])["error"]
    assert told["code"] == "ambiguous_length"
    assert "Content-Length or Transfer-Encoding, not both" in told["message"]


def test_chunks_of_a_byte_are_refused_in_time(server: RunningServer) -> None:
    """A chunk of one byte costs as much as one of thousands, and a body could have four million."""
    whole = HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    told = answered(server, whole + b"1\r\n \r\n" * 100_000)
    assert told.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"too many small chunks" in told
    spaces = b"40\r\n" + b" " * 64 + b"\r\n"
    assert answered(server, whole + spaces * 1000 + CHUNKED).startswith(b"HTTP/1.1 200 OK\r\n")
    spaces = b"400\r\n" + b" " * 1024 + b"\r\n"
    assert answered(server, whole + spaces * 3000 + CHUNKED).startswith(b"HTTP/1.1 200 OK\r\n")
