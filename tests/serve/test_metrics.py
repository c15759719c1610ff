"""The Prometheus metrics add up to what was answered, and to work for cut answers."""

from __future__ import annotations

import http.client
import json
import re
import time

from tests.serve.running_server import RunningServer, slow_decode


def numbers(server: RunningServer) -> dict[str, float]:
    """Token counts by kind, and the count of cut answers."""
    text = server.ask("GET", "/metrics")[1]
    found = re.findall(r'^exlm_tokens_total\{kind="(\w+)",model="tiny"\} (\S+)$', text, re.MULTILINE)
    found += re.findall(r"^exlm_(cut)_answers_total (\S+)$", text, re.MULTILINE)
    return {"prompt": 0.0, "cached": 0.0, "generated": 0.0} | {name: float(count) for name, count in found}


def test_token_counters_agree_with_usage(server: RunningServer) -> None:
    before = numbers(server)
    usage = server.post("/v1/completions", prompt=["ab" * 40, "c"], n=2, max_tokens=5)[1]["usage"]
    now = numbers(server)
    assert now["prompt"] - before["prompt"] == usage["prompt_tokens"]
    assert now["cached"] - before["cached"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert now["generated"] - before["generated"] == usage["completion_tokens"]
    assert now["cut"] == before["cut"]


def test_cut_answers_are_counted(server: RunningServer) -> None:
    inner = server.engine.models["tiny"].generator.generator
    before = numbers(server)
    with slow_decode(server, lambda: time.sleep(0.02)):
        line = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        body = json.dumps({"prompt": [1] * 30, "max_tokens": 400, "min_tokens": 400, "stream": True})
        line.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        server.wait(lambda: any(job.new_tokens >= 3 for job in inner.active_jobs))
        line.close()
        server.wait(lambda: numbers(server)["cut"] == before["cut"] + 1)
    now = numbers(server)
    assert now["prompt"] - before["prompt"] == 30
    assert 3 <= now["generated"] - before["generated"] < 400
