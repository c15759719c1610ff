"""Measures how many requests per second `exlm serve` answers: MODEL DEVICE FILE.

Starts the server of the checkout in whose folder it runs and sends streamed chats from several clients at
once, each sending its next request when the last one is answered; writes the rates to FILE. Uses only the
standard library. The measurement fails if an answer does not have as many tokens as were asked for.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
START_TIMEOUT, READ_TIMEOUT = 180.0, 60.0  # seconds
TOKENS = 32
WARMUP_REQUESTS = 8  # of each client
CASES = ((1, 60), (8, 30))
"""(concurrent clients, timed requests of each)"""


def main(model: str, device: str, file: Path) -> None:
    """Start the server, measure, stop it."""
    port = _free_port()
    command = [sys.executable, "-m", "exlm", "serve", model, "--name", "chat", "--device", device]
    server = subprocess.Popen([*command, "--host", HOST, "--port", str(port), "--quiet"], stdin=subprocess.DEVNULL)
    try:
        _wait(server, port)
        found: list[dict[str, Any]] = []
        for clients, requests in CASES:
            _rate(port, clients, WARMUP_REQUESTS)
            found.append({"clients": clients, "tokens": TOKENS, "rate": _rate(port, clients, requests)})
        file.write_text(json.dumps(found))
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


def _wait(server: subprocess.Popen[bytes], port: int) -> None:
    """Wait until the server lists its model."""
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"exlm serve ended with status {server.returncode} before it answered.")
        connection = http.client.HTTPConnection(HOST, port, timeout=READ_TIMEOUT)
        try:
            connection.request("GET", "/v1/models")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.05)
    raise SystemExit(f"exlm serve did not answer within {START_TIMEOUT:g} seconds.")


def _rate(port: int, clients: int, requests: int) -> float:
    """Requests per second with so many clients, each of which sends so many."""
    failed: list[str] = []

    def run_client(client: int) -> None:
        connection = http.client.HTTPConnection(HOST, port, timeout=READ_TIMEOUT)
        try:
            for number in range(requests):
                _send_chat(connection, f"Client {client} asks question {number}: what is the next word?")
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            failed.append(f"{type(error).__name__}: {error}")
        finally:
            connection.close()

    threads = [threading.Thread(target=run_client, args=(client,)) for client in range(clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    if failed:
        raise SystemExit(f"{len(failed)} of {clients} clients failed; the first: {failed[0]}")
    return clients * requests / seconds


def _send_chat(connection: http.client.HTTPConnection, text: str) -> None:
    """Send one streamed chat and read the answer to its end."""
    body = {
        "model": "chat",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    events = [event.removeprefix("data: ") for event in reply.read().decode().split("\n\n") if event]
    if reply.status != 200 or events[-1] != "[DONE]":
        raise ValueError(f"status {reply.status}, {events[-1][:400]}")
    tokens = json.loads(events[-2])["usage"]["completion_tokens"]
    if tokens != TOKENS:
        raise ValueError(f"an answer has {tokens} tokens instead of {TOKENS}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
