"""Disconnecting clients, loading and unloading, a stuck engine, signals."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from exlm.serve import ApiKeys, Engine, ModelSpec, Options
from exlm.serve.engine import Activity
from exlm.serve.monitoring import STALLED_EXIT_STATUS, Watchdog
from tests.conftest import ROOT
from tests.lora import peft_folders as making
from tests.serve.running_server import RunningServer, load_tiny, preloaded, running_server, slow_decode

LONG = {"prompt": "a", "max_tokens": 400, "min_tokens": 400, "temperature": 0}
SHORT = {**LONG, "prompt": "a" * 250, "max_tokens": 40, "min_tokens": 40}


def idle(server: RunningServer) -> bool:
    hosted = server.engine.models["tiny"]
    return hosted.generator.generator.num_remaining_jobs() == 0 and hosted.activity.pending_jobs == 0


@pytest.mark.parametrize("stream", [True, False])
def test_jobs_of_a_disconnected_client_end_within_a_step(server: RunningServer, stream: bool) -> None:
    inner = server.engine.models["tiny"].generator.generator
    with slow_decode(server, lambda: time.sleep(0.05)):
        line = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        body = json.dumps({**LONG, "stream": stream})
        line.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        server.wait(lambda: any(job.new_tokens >= 3 for job in inner.active_jobs))
        (job,) = inner.active_jobs
        line.close()
        had = job.new_tokens
        server.wait(lambda: idle(server))
    assert job.new_tokens <= had + 2  # the current step, and one that may have started meanwhile
    assert server.post("/v1/completions", prompt="a", max_tokens=2)[0] == 200


def test_the_watchdog_reports_a_stuck_engine(chatty: Path) -> None:
    barked: list[str] = []
    held = threading.Event()
    with running_server(preloaded(chatty), Options(ready_seconds=1.0)) as server:
        assert server.ask("GET", "/health/ready")[0] == 200
        watchdog = Watchdog(server.engine, 1.0, barked.append)
        watchdog.start()
        with slow_decode(server, held.wait):
            assert server.ask("GET", "/health/ready")[0] == 503
            assert server.ask("GET", "/health/live")[0] == 200  # the process itself responds
            server.wait(lambda: bool(barked))
            held.set()
        watchdog.stop()
        server.wait(lambda: idle(server))
        assert server.ask("GET", "/health/ready")[0] == 200
    assert "gave no result" in barked[0]
    assert "a job of 1 tokens was queued" in barked[0]
    assert "held.wait" in barked[0] or "slow" in barked[0]  # the stack of its thread


def test_the_watchdog_ignores_a_working_engine(server: RunningServer) -> None:
    barked: list[str] = []
    watchdog = Watchdog(server.engine, 3.0, barked.append)  # a busy machine may stall for a second
    watchdog.start()
    with slow_decode(server, lambda: time.sleep(0.15)):
        server.post("/v1/completions", prompt="a", max_tokens=24, min_tokens=24)
    time.sleep(3.3)  # an idle engine is not stuck either
    watchdog.stop()
    assert barked == []


def test_activity_stalls_only_while_jobs_are_pending() -> None:
    now = [0.0]
    pulse = Activity(lambda: now[0])
    now[0] = 100
    assert pulse.stalled_seconds == 0
    pulse.job_queued("one")
    now[0] = 103
    assert pulse.stalled_seconds == 3
    pulse.on_result({"stage": "started", "serial": 1})
    assert pulse.stalled_seconds == 0
    now[0] = 104
    pulse.job_queued("two")
    assert pulse.stalled_seconds == 1
    pulse.job_ended("one")
    pulse.job_ended("two")
    now[0] = 200
    assert pulse.stalled_seconds == 0


def test_the_server_is_ready_while_it_generates(server: RunningServer) -> None:
    with slow_decode(server, lambda: time.sleep(0.01)):
        asking = threading.Thread(target=lambda: server.post("/v1/completions", **SHORT))
        asking.start()
        for _ in range(3):
            assert server.ask("GET", "/health/ready")[0] == 200
        asking.join()


def test_readiness_probes_evict_no_cached_prompt(server: RunningServer) -> None:
    prompt = "the quick brown fox " * 20
    server.post("/v1/completions", prompt=prompt, max_tokens=1)
    for _ in range(40):
        assert server.ask("GET", "/health/ready")[0] == 200
    usage = server.post("/v1/completions", prompt=prompt, max_tokens=1)[1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


def test_models_are_loaded_and_unloaded_by_name(chatty: Path, tmp_path: Path) -> None:
    shapes = making.matrix_shapes(chatty)
    adapter = making.write_adapter(tmp_path / "lora", shapes, size=3.0)
    listings = [
        ModelSpec("tiny", str(chatty), loras={"loud": str(adapter.folder)}),
        ModelSpec("other", str(chatty), draft="ngram"),
        ModelSpec("owner/lost", str(tmp_path / "nowhere")),
    ]
    engine = Engine(listings, load_tiny)
    engine.preload("tiny")
    with running_server(engine, Options(api_keys=ApiKeys(admin_keys=["k"]))) as server:
        asked: dict[str, Any] = {"prompt": "abc", "max_tokens": 8, "temperature": 0}

        def text(**more: Any) -> Any:
            status, reply = server.post("/v1/completions", "k", **{**asked, **more})
            assert status == 200, reply
            return reply["choices"][0]["text"], reply["usage"]["completion_tokens_details"]

        plain = text()
        assert text(lora="loud") != plain
        assert text(lora={"loud": 0.0})[0] == plain[0]
        assert text() == plain
        assert server.post("/v1/completions", "k", model="other", **asked)[0] == 503
        assert server.post("/v1/admin/models/load", "k", model="owner/lost")[0] == 503
        assert server.post("/v1/admin/models/load", "k", model="other")[1]["loaded"] is True
        assert text(model="other")[0] == plain[0]
        assert text(model="other", speculative=True)[0] == plain[0]
        assert sum(text(model="other", prompt="abcabcabc")[1].values()) > 0
        assert sum(text(model="other", prompt="abcabcabc", speculative=False)[1].values()) == 0
        assert server.post("/v1/completions", "k", model="other", lora="loud", **asked)[0] == 404
        cards = server.ask("GET", "/v1/models", None, "k")[1]["data"]
        assert [(card["id"], card["loaded"]) for card in cards] == [
            ("tiny", True),
            ("other", True),
            ("owner/lost", False),
        ]
        for path in ("/v1/models/owner/lost", "/v1/models/owner%2Flost"):
            assert server.ask("GET", path, None, "k")[1] == cards[2]
        assert cards[0]["loras"] == ["loud"]
        assert server.post("/v1/admin/models/unload", "k", model="other")[1]["loaded"] is False
        assert server.post("/v1/completions", "k", model="other", **asked)[0] == 503
        assert text() == plain


@contextmanager
def unloading(server: RunningServer, **body: Any) -> Iterator[dict[str, Any]]:
    """Send a request and unload the model after a few tokens; returns both outcomes.

    In the block neither gets any further.
    """
    found: dict[str, Any] = {}
    going = threading.Event()
    going.set()

    def before() -> None:
        going.wait()
        time.sleep(0.02)

    def ask() -> None:
        found["answer"] = server.ask("POST", "/v1/completions", body, "k")

    def unload() -> None:
        found["unloaded"] = server.post("/v1/admin/models/unload", "k", model="tiny")

    hosted = server.engine.models["tiny"]
    threads = [threading.Thread(target=ask), threading.Thread(target=unload)]
    with slow_decode(server, before):
        threads[0].start()
        server.wait(lambda: hosted.activity.tokens > 3)
        going.clear()
        threads[1].start()
        try:
            server.wait(lambda: hosted.draining)
            yield found
        finally:
            going.set()
            for thread in threads:
                thread.join()
    assert found["unloaded"][0] == 200
    assert found["unloaded"][1]["loaded"] is False


@pytest.mark.parametrize("stream", [True, False])
def test_unloading_waits_for_requests_in_flight(chatty: Path, stream: bool) -> None:
    with running_server(preloaded(chatty), Options(api_keys=ApiKeys(admin_keys=["k"]))) as server:
        with unloading(server, **SHORT, stream=stream) as found:
            late = server.post("/v1/completions", "k", **SHORT)
            assert (late[0], late[1]["error"]["code"]) == (503, "model_not_loaded")
            assert server.post("/v1/completions", "k", **SHORT, model="tiny")[0] == 503
            assert server.ask("GET", "/v1/internal/state", None, "k")[1]["models"] != []
        status, reply, _ = found["answer"]
        assert status == 200
        if stream:
            assert reply.endswith("data: [DONE]\n\n")
        else:
            assert reply["usage"]["completion_tokens"] == SHORT["max_tokens"]
        assert server.ask("GET", "/v1/internal/state", None, "k")[1]["models"] == []


@pytest.mark.parametrize("stream", [True, False])
def test_unloading_waits_no_longer_than_the_limit(chatty: Path, stream: bool) -> None:
    options = Options(api_keys=ApiKeys(admin_keys=["k"]))
    with running_server(preloaded(chatty, drain_seconds=0.2), options) as server:
        with unloading(server, **LONG, stream=stream) as found:
            pass
        status, reply, _ = found["answer"]
        if stream:
            assert status == 200
            reply = json.loads(reply.removesuffix("\n\n").rpartition("data: ")[2])
        else:
            assert status == 503
        assert reply["error"]["code"] == "model_unloaded"
        assert server.ask("GET", "/health/ready", None, "k")[0] == 503
        assert server.post("/v1/admin/models/load", "k", model="tiny")[0] == 200
        assert server.post("/v1/completions", "k", prompt="a", max_tokens=2)[0] == 200


def test_the_state_shows_pages_queue_and_batch(server: RunningServer) -> None:
    server.wait(lambda: idle(server))
    with slow_decode(server, lambda: time.sleep(0.02)):
        asking = threading.Thread(target=lambda: server.post("/v1/completions", **SHORT))
        asking.start()
        server.wait(lambda: server.engine.models["tiny"].generator.generator.active_jobs != [])
        (model,) = server.ask("GET", "/v1/internal/state")[1]["models"]
        (job,) = model["batch"]
        assert len(job["pages"]) == 2
        assert model["queue"] == []
        assert model["pages"]["free"] == model["pages"]["total"] - 2
        assert [model["pages"]["users"][page] for page in job["pages"]] == [1, 1]
        assert len(model["pages"]["rows"]) == model["pages"]["total"]
        asking.join()
    numbers = server.ask("GET", "/metrics")[1]
    assert 'exlm_tokens_total{kind="generated",model="tiny"}' in numbers
    assert 'exlm_jobs{model="tiny",state="running"} 0.0' in numbers


def test_a_web_folder_is_served(chatty: Path, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<h1>Chat</h1>")
    (tmp_path / "chat.js").write_text("1")
    with running_server(preloaded(chatty), Options(web=tmp_path)) as server:
        status, text, headers = server.ask("GET", "/")
        assert (status, text) == (200, "<h1>Chat</h1>")
        assert headers["content-type"].startswith("text/html")
        assert server.ask("GET", "/chat.js")[1] == "1"
        assert server.ask("GET", "/../house.py")[0] == 404
        assert server.ask("GET", "/v1/models")[0] == 200


@contextmanager
def child(folder: Path, mode: str, reports: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server in its own process, and its port."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.serve.child", str(folder), mode, str(reports)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def test_a_signal_drains(chatty: Path, tmp_path: Path) -> None:
    """Requests that finish in time are answered whole; the others end with an error."""
    with child(chatty, "slow", tmp_path) as (process, port), ExitStack() as stack:
        replies = []
        for count in (20, 1000):
            body = json.dumps({**LONG, "max_tokens": count, "min_tokens": count, "stream": True})
            line = stack.enter_context(closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)))
            line.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            replies.append(stack.enter_context(line.getresponse()))
        firsts = [reply.read(10) for reply in replies]
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        whole, cut = [(first + reply.read()).decode() for first, reply in zip(firsts, replies, strict=True)]
        assert whole.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"length"' in whole
        assert '"code":"model_unloaded"' in cut.rpartition("data: ")[2]
        assert process.wait(20) == 0


def test_a_second_signal_ends_at_once_without_output(chatty: Path, tmp_path: Path) -> None:
    with child(chatty, "slow", tmp_path) as (process, port):
        body = json.dumps({**LONG, "max_tokens": 1000, "min_tokens": 1000, "stream": True})
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as line:
            line.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            reply = line.getresponse()
            reply.read(10)
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
            with pytest.raises((http.client.HTTPException, OSError)):  # cut off: after 4 s it would have got an error
                reply.read()
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_a_stuck_process_exits(chatty: Path, tmp_path: Path) -> None:
    with child(chatty, "stuck", tmp_path) as (process, port):
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as line:
            line.request("POST", "/v1/completions", json.dumps(LONG), {"Content-Type": "application/json"})
            with pytest.raises((http.client.HTTPException, OSError)):
                line.getresponse()
        assert process.wait(20) == STALLED_EXIT_STATUS
    (report,) = tmp_path.glob("exlm-stuck-*.txt")
    text = report.read_text()
    assert "tiny has 1 jobs and gave no result" in text
    assert "job 0 started" in text


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="stops a process as a shell does")
def test_a_process_that_was_suspended_continues(chatty: Path, tmp_path: Path) -> None:
    with child(chatty, "watched", tmp_path) as (process, port):
        body = json.dumps({**LONG, "max_tokens": 60, "min_tokens": 60, "stream": True})
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as line:
            line.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            reply = line.getresponse()
            text = reply.read(10)
            for _ in range(2):
                process.send_signal(signal.SIGSTOP)
                time.sleep(2.5)  # the server counts as stuck after 1 s
                process.send_signal(signal.SIGCONT)
                time.sleep(0.1)
            text += reply.read()
        assert text.endswith(b"data: [DONE]\n\n")
        assert process.poll() is None
