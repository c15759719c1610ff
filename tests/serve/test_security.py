"""Keys, limits and hostile requests: refused quickly, each with its own status, without harm to others."""

from __future__ import annotations

import base64
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from exlm.serve import ApiKeys, Limits, Options
from exlm.serve.middleware import Caller
from tests.serve.running_server import RunningServer, preloaded, running_server, slow_decode

KEY, OTHER, ADMIN = "sk-alice", "sk-bob", "sk-root"
BOUNDS = Limits(body=20_000, headers=4_000, choices=4, tokens=64, answer=16, requests=8, grammar=2_000, grammars=2)
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(chatty: Path) -> Iterator[RunningServer]:
    options = Options(api_keys=ApiKeys([KEY, OTHER], [ADMIN]), limits=BOUNDS)
    with running_server(preloaded(chatty), options) as running:
        yield running


def works(server: RunningServer) -> None:
    status, reply = server.post("/v1/completions", KEY, prompt="a", max_tokens=2)
    assert status == 200, reply


ROUTES = [
    ("GET", "/v1/models"), ("GET", "/v1/models/tiny"), ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/embeddings"), ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/health/ready"),
    ("GET", "/metrics"), ("GET", "/v1/internal/state"), ("POST", "/v1/admin/models/load"),
    ("GET", "/openapi.json"),
    ("POST", "/v1/admin/models/unload"), ("GET", "/docs"), ("GET", "/"), ("GET", "/no/such/route"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_needs_a_key(server: RunningServer, method: str, path: str) -> None:
    for key in (None, "", "sk-alic", "sk-alice2", "SK-ALICE", "é"):
        headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
        status, reply, sent = server.ask(method, path, b"{" if method == "POST" else None, **headers)  # type: ignore[arg-type]
        assert status == 401
        assert reply["error"]["type"] == "authentication_error"
        assert "www-authenticate" in sent


def test_liveness_needs_none(server: RunningServer) -> None:
    assert server.ask("GET", "/health/live")[:2] == (200, {"status": "alive"})


def test_probes_may_send_head(server: RunningServer) -> None:
    line = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    with closing(line):
        for path, status in (
            ("/health/live", 200),
            ("/health/ready", 200),
            ("/v1/models", 200),
            ("/no", 404),
        ):
            line.request("HEAD", path, headers={"X-API-Key": KEY})
            reply = line.getresponse()
            assert (reply.status, reply.read()) == (status, b"")
            assert int(reply.headers["Content-Length"]) > 0
        line.request("HEAD", "/v1/models")
        assert line.getresponse().status == 401


def test_a_key_may_be_sent_in_three_ways(server: RunningServer) -> None:
    basic = base64.b64encode(f"user:{KEY}".encode()).decode()
    for headers in (
        {"Authorization": f"bearer {KEY}"},
        {"Authorization": f"Basic {basic}"},
        {"X-API-Key": KEY},
    ):
        assert server.ask("GET", "/v1/models", **headers)[0] == 200
    assert server.ask("GET", "/v1/models", Authorization="Basic !!!")[0] == 401


def test_keys_have_salts_and_admin_rights() -> None:
    ring = ApiKeys([KEY, OTHER], [ADMIN])
    callers = [ring.authenticate({b"x-api-key": key.encode()}) for key in (KEY, OTHER, ADMIN)]
    assert [caller.admin for caller in callers if caller] == [False, False, True]
    assert len({caller.salt for caller in callers if caller}) == 3
    assert ApiKeys().authenticate({}) == Caller()
    assert ApiKeys([KEY]).authenticate({b"x-api-key": KEY.encode()}) != callers[0]  # another server has another secret


def test_admin_routes_need_an_admin(server: RunningServer) -> None:
    for path in ("/v1/admin/models/load", "/v1/admin/models/unload"):
        assert server.post(path, KEY, model="tiny")[0] == 403
    assert server.post("/v1/admin/models/load", ADMIN, model="../../etc/passwd")[0] == 404
    assert server.post("/v1/admin/models/load", ADMIN, model="tiny")[0] == 200


def test_the_state_is_shown_to_admins_only(server: RunningServer) -> None:
    for key in (KEY, OTHER):
        status, reply, _ = server.ask("GET", "/v1/internal/state", None, key)
        assert (status, "models" in reply) == (403, False)
        assert "admin key" in reply["error"]["message"]
    assert server.ask("GET", "/v1/internal/state", None, ADMIN)[1]["models"][0]["name"] == "tiny"


COSTLY = "start: R0\n" + "".join(f"R{n}: R{n + 1} R{n + 1}\n" for n in range(30)) + 'R30: "x"'
LOST = {"$ref": "#/nowhere"}
DEEP = b"[" * 5_000 + b"]" * 5_000
HOSTILE: list[tuple[int, Any]] = [
    (413, b"x" * 30_000),
    (400, b"{"),
    (422, b""),
    (400, b'{"prompt": "\\ud800"}'),
    (400, b'{"prompt": NaN}'),
    (400, b'{"prompt": "a", "seed": ' + b"9" * 9_000 + b"}"),
    (400, b'{"prompt": "a", "logit_bias": ' + DEEP + b"}"),
    (400, {"prompt": "a", "best_of": 2}),
    (400, {"prompt": "a", "model_path": "/etc/passwd"}),
    (400, {"prompt": "word" * 4_000}),
    (404, {"prompt": "a", "model": "/etc/passwd"}),
    (404, {"prompt": "a", "model": "../tiny"}),
    (404, {"prompt": "a", "lora": "/etc/passwd"}),
    (422, {"prompt": []}),
    (422, {"prompt": ""} | {"add_bos": False}),
    (422, {"prompt": [10_000_000]}),
    (422, {"prompt": [-1]}),
    (422, {"prompt": "a", "n": 100}),
    (422, {"prompt": ["a"] * 5}),
    (422, {"prompt": "a", "max_tokens": 65}),
    (422, {"prompt": "a", "max_tokens": 0}),
    (422, {"prompt": "a", "max_tokens": -2}),
    (422, {"prompt": "a", "max_tokens": 4, "min_tokens": 5}),
    (422, b'{"prompt": "a", "temperature": 1e999}'),
    (422, {"prompt": "a", "top_p": 1e308}),
    (422, {"prompt": "a", "logit_bias": {"x": 1}}),
    (422, {"prompt": "a", "logit_bias": {"99999": 1}}),
    (422, {"prompt": "a", "stop_token_ids": [99999]}),
    (422, {"prompt": "a", "regex": "("}),
    (422, {"prompt": "a", "regex": "a" * 3_000}),
    (422, {"prompt": "a", "grammar": COSTLY}),
    (422, {"prompt": "a", "grammar": "start: nowhere"}),
    (422, {"prompt": "a", "regex": "a", "grammar": "b"}),
    (422, {"prompt": "a", "regex": "a", "banned_strings": ["b"]}),
    (422, {"prompt": "a", "speculative": True}),
    (422, {"prompt": "a", "cfg_scale": 2.0}),
    (422, b'{"prompt": "a", "stream_options": {"include_usage": true}}'),
    (422, {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": LOST}}}),
    (422, {"prompt": "a", "frequency_penalty": 1, "token_frequency_penalty": 1}),
    (422, {"prompt": "a", "dry_sequence_breakers": ["no single token"]}),
]  # fmt: skip


@pytest.mark.parametrize(("status", "body"), HOSTILE, ids=[str(i) for i in range(len(HOSTILE))])
def test_a_hostile_completion_is_refused(server: RunningServer, status: int, body: Any) -> None:
    began = time.monotonic()
    found, reply, _ = server.ask("POST", "/v1/completions", body, KEY)
    assert (found, reply["error"]["message"] != "") == (status, True), reply
    assert time.monotonic() - began < 10
    if isinstance(body, dict):
        assert server.ask("POST", "/v1/completions", {**body, "stream": True}, KEY)[0] == status


CHATS: list[tuple[int, dict[str, Any]]] = [
    (400, {"functions": []}),
    (400, {"messages": [{"role": "user", "content": "a", "secret": 1}]}),
    (422, {"messages": []}),
    (422, {"messages": [{"role": "root", "content": "a"}]}),
    (400, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
    (422, {"tool_choice": "required"}),
    (422, {"top_logprobs": 3}),
    (422, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}),
    (422, {"chat_template_kwargs": {"tokenize": True}}),
    (422, {"tools": [{"type": "function", "function": {"name": "no spaces"}}]}),
    (422, {"tools": [{"type": "function", "function": {"name": "f"}}], "regex": "a"}),
    (
        422,
        {
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": {"type": "function", "function": {"name": "g"}},
        },
    ),
]


@pytest.mark.parametrize(("status", "fields"), CHATS, ids=[str(i) for i in range(len(CHATS))])
def test_a_hostile_chat_is_refused(server: RunningServer, status: int, fields: dict[str, Any]) -> None:
    found, reply = server.post("/v1/chat/completions", KEY, **{"messages": HELLO, **fields})
    assert found == status, reply


def test_an_unknown_field_is_named(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "a", "secret": 1}], "colour": 1, "size": 2}
    reply = server.post("/v1/chat/completions", KEY, **body)[1]
    for name in ("colour", "size", "messages.0.secret"):
        assert repr(name) in reply["error"]["message"]


def test_errors_name_fields_as_the_request_does(server: RunningServer) -> None:
    asked = {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}
    error = server.post("/v1/completions", KEY, **asked)[1]["error"]
    assert error["param"] == "response_format.json_schema.schema"
    assert server.ask("POST", "/v1/completions", b"[]", KEY)[1]["error"]["param"] is None
    choice = {"type": "function", "function": {"name": "f", "mode": "auto"}}
    error = server.post("/v1/chat/completions", KEY, messages=HELLO, tool_choice=choice)[1]["error"]
    assert error["param"] == "tool_choice.function.mode"


def test_ids_outside_the_vocabulary_are_refused(server: RunningServer) -> None:
    status, reply = server.post("/detokenize", KEY, tokens=[60, 99_999])
    assert (status, reply["error"]["param"]) == (422, "tokens")
    assert "99999 is outside the vocabulary" in reply["error"]["message"]


def test_only_json_is_accepted(server: RunningServer) -> None:
    assert server.ask("POST", "/v1/completions", b"{}", KEY, **{"Content-Type": "text/plain"})[0] == 415


def test_large_headers_are_refused(server: RunningServer) -> None:
    assert server.ask("GET", "/v1/models", None, KEY, Extra="x" * 5_000)[0] == 431
    works(server)


def test_a_body_without_a_length_is_counted(server: RunningServer) -> None:
    line = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    line.request("POST", "/v1/completions", iter([b"x" * 10_000] * 5), headers, encode_chunked=True)
    assert line.getresponse().status == 413
    line.close()


@contextmanager
def standing(server: RunningServer) -> Iterator[Callable[[str, int], None]]:
    """Block the engine for the length of the block; yields a function that sends requests with a key."""
    going, threads = threading.Event(), []

    def occupy(key: str, count: int) -> None:
        arguments = ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 4}, key)
        asking = [threading.Thread(target=server.ask, args=arguments) for _ in range(count)]
        before = inside(server)
        for thread in asking:
            thread.start()
        threads.extend(asking)
        server.wait(lambda: inside(server) == before + count)

    with slow_decode(server, going.wait):
        try:
            yield occupy
        finally:
            going.set()
            for thread in threads:
                thread.join()


def inside(server: RunningServer) -> int:
    return int(server.ask("GET", "/v1/internal/state", None, ADMIN)[1]["requests"]["inside"])


def test_a_full_server_answers_429(chatty: Path) -> None:
    with running_server(preloaded(chatty), Options(api_keys=ApiKeys([], [ADMIN]), limits=BOUNDS)) as server:
        with standing(server) as occupy:
            occupy(ADMIN, BOUNDS.requests)
            for path, body in (("/v1/completions", {"prompt": "a"}), ("/tokenize", {"text": "a"})):
                status, reply, headers = server.ask("POST", path, body, ADMIN)
                assert (status, reply["error"]["code"]) == (429, "queue_full")
                assert headers["retry-after"].isdigit()
        assert server.post("/v1/completions", ADMIN, prompt="a", max_tokens=2)[0] == 200


def test_one_key_cannot_take_every_slot(server: RunningServer) -> None:
    with standing(server) as occupy:
        occupy(KEY, 4)
        status, reply, headers = server.ask("POST", "/v1/completions", {"prompt": "a"}, KEY)
        assert (status, reply["error"]["code"]) == (429, "key_queue_full")
        assert "4 requests of this key are under way, and 4 places are left" in reply["error"]["message"]
        assert headers["retry-after"].isdigit()
        occupy(OTHER, 2)
        assert server.post("/v1/completions", OTHER, prompt="a")[0] == 429
        assert server.post("/tokenize", ADMIN, text="a")[0] == 200
    works(server)


def test_costly_grammars_do_not_delay_other_requests(server: RunningServer) -> None:
    statuses: list[int] = []

    def ask(i: int) -> None:
        grammar = COSTLY.replace('"x"', f'"x{i}"')
        statuses.append(server.post("/v1/completions", OTHER, prompt="a", grammar=grammar)[0])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    works(server)
    took = time.monotonic() - began
    for thread in threads:
        thread.join()
    assert {*statuses} <= {422, 429}
    assert 422 in statuses
    assert took < 5


def test_internal_errors_reveal_nothing(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hosted = server.engine.models["tiny"]

    def broken(*_: Any) -> Any:
        raise RuntimeError("secret at /home/operator")

    with monkeypatch.context() as patch:
        patch.setattr(hosted.generator.generator._engine.runner, "decode", broken)
        status, reply = server.post("/v1/completions", KEY, prompt="a")
        events = server.ask("POST", "/v1/completions", {"prompt": "a", "stream": True}, KEY)
    assert status == 500
    assert "secret" not in json.dumps(reply)
    assert events[0] == 500
    works(server)


def test_a_local_server_answers_to_local_names(chatty: Path) -> None:
    with running_server(preloaded(chatty), Options(hosts=frozenset(("localhost", "::1", "127.0.0.1")))) as server:
        for name in ("localhost", f"127.0.0.1:{server.port}", "[::1]:80", "LOCALHOST:1"):
            assert server.ask("GET", "/v1/models", Host=name)[0] == 200
        for name in ("evil.example", "localhost.evil.example:5000", ""):
            status, reply, _ = server.ask("GET", "/v1/models", Host=name)
            assert status == 403
            assert "not to" in reply["error"]["message"]
            assert "--api-key" in reply["error"]["message"]
