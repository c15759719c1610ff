"""Programs that fail to load, that die, or that torchrun starts leave no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from exlm import Unsupported, WorkerLost
from exlm.errors import DoesNotFit
from exlm.parallel.workers import start_workers
from tests import tiny
from tests.conftest import ROOT
from tests.parallel.process_models import is_alive, unloaded_model


def test_loading_that_fails_leaves_no_process(tmp_path: Path) -> None:
    model = unloaded_model(tiny.make(tmp_path))

    def stop(i: int, n: int) -> None:
        if i == 2:
            raise KeyboardInterrupt

    before = set(children())
    with pytest.raises(KeyboardInterrupt):
        model.load_tp([1, 1], callback=stop)
    assert set(children()) == before
    with pytest.raises(Unsupported, match="too few to share among 5 ranks"):
        model.load_tp([1] * 5)
    with pytest.raises(Unsupported, match="use fewer ranks"):
        model.load_pipeline([1] * 5)
    with pytest.raises(DoesNotFit, match=r"gpu_split gives cpu 0\.0 MB"):
        model.load_tp([1e-5, 1e-5])
    assert not model.loaded


def test_a_rank_that_cannot_start_reports_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = unloaded_model(tiny.make(tmp_path))
    with pytest.raises(WorkerLost, match=r"rank 1 failed: ModelNotFound: Can't find .*config\.json"):
        model.load_tp([1, 1], callback=lambda i, n: (tmp_path / "config.json").unlink(missing_ok=True))
    assert capfd.readouterr().err == ""


def test_processes_end_if_another_cannot_be_started() -> None:
    before = set(children())
    with pytest.raises(TypeError, match="not JSON serializable"):
        start_workers("exlm.model.multiprocess", [{"rank": 1}, {"rank": object()}])
    assert set(children()) == before


def test_torch_dtypes_and_devices_reach_the_workers(tmp_path: Path) -> None:
    model = unloaded_model(tiny.make(tmp_path))
    model.config.device, model.config.dtype = torch.device("cpu"), torch.float32  # type: ignore[assignment]
    model.load_tp([1, 1])
    assert model.forward(torch.arange(5)[None]).shape == (1, 5, 64)
    model.unload()


FORKING = """
import os, sys, torch
torch.set_num_threads(1)
from exlm import Config, Model, WorkerLost
config = Config(sys.argv[1])
config.device = "cpu"
model = Model(config)
model.load_tp([1, 1])
ids = torch.arange(5)[None]
before = model.forward(ids)
child = os.fork()
if child == 0:
    try:
        model.forward(ids)
    except WorkerLost as error:
        sys.exit(7 if f"process {os.getppid()}, of which this one is a fork" in str(error) else str(error))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert torch.equal(model.forward(ids), before)
"""


def test_a_fork_leaves_the_workers_alone(tmp_path: Path) -> None:
    """The fork exits normally, so its finalizers and exit handlers run."""
    line = [sys.executable, "-c", FORKING, str(tiny.make(tmp_path))]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


SCRIPT = """
import os, signal, sys, torch
torch.set_num_threads(1)
from exllamav2 import ExLlamaV2, ExLlamaV2Cache_Q8, ExLlamaV2Cache_TP, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2Sampler
config = ExLlamaV2Config(sys.argv[1])
config.device = "cpu"
model = ExLlamaV2(config)
model.load_tp(*eval(sys.argv[2]))
cache = ExLlamaV2Cache_TP(model, base=ExLlamaV2Cache_Q8, max_seq_len=512)
generator = ExLlamaV2DynamicGenerator(model, cache, ExLlamaV2Tokenizer(config))
text = generator.generate("Once upon a time", 8, gen_settings=ExLlamaV2Sampler.Settings.greedy())
print(repr(text), *[p.pid for p in model._loaded.driver.processes], sep="\\n", flush=True)
if sys.argv[3:]:
    os.kill(os.getpid(), signal.SIGKILL)
"""
EXPECTED = repr("Once upon a time, there was a little girl named")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def test_workers_end_with_a_killed_script(fixtures_dir: Path, tmp_path: Path) -> None:
    """Without `if __name__ == "__main__"`; killed, so that no exit handler runs."""
    (tmp_path / "script.py").write_text(SCRIPT)
    line = [sys.executable, str(tmp_path / "script.py"), str(fixtures_dir / "tiny-lm"), "[[1, 1]]", "die"]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    text, pid = done.stdout.splitlines()
    assert text.startswith(EXPECTED[:20])
    for _ in range(100):
        if not is_alive(int(pid)):
            return
        time.sleep(0.1)
    pytest.fail("a worker outlived its driver")


def test_torchrun(fixtures_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    line += [str(tmp_path / "script.py"), str(fixtures_dir / "tiny-lm"), "[]"]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(EXPECTED[:20])
