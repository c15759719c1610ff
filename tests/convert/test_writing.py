"""Writing converted models: side files, atomicity, bounded memory."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from exlm import CheckpointError, Config, InputError, convert_model
from exlm.formats import exl2
from tests import tiny
from tests.convert.conversion_helpers import assert_same, read_tensors, reference_logits
from tests.model.random_quantized import random_exl2, replace_matrices


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    source = tiny.make(tmp_path / "old")
    with pytest.raises(InputError, match=r"safetensors, dense, exl2, gptq, gptq-v2; found 'gguf'"):
        convert_model(source, tmp_path / "new", "gguf")
    with pytest.raises(InputError, match="shard_bytes"):
        convert_model(source, tmp_path / "new", shard_bytes=0)
    with pytest.raises(InputError, match="read from"):
        convert_model(source, source, overwrite=True)
    with pytest.raises(InputError, match="read from"):
        convert_model(source, tmp_path, overwrite=True)


def test_a_full_disk_is_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny.make(tmp_path / "old")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**20))
    with pytest.raises(CheckpointError, match=r"takes about \d+ MiB, and the disk has 1 MiB free"):
        convert_model(source, tmp_path / "new")
    assert os.listdir(tmp_path) == ["old"]


def test_only_what_is_needed_is_copied(tmp_path: Path) -> None:
    source = tiny.make_chat_folder(tmp_path / "old")
    kept = [
        "generation_config.json",
        "chat_template.jinja",
        "special_tokens_map.json",
        "tokenizer.model.v3",
        "LICENSE",
    ]
    left = [
        "modeling_x.py",
        "pytorch_model.bin",
        "model.safetensors.index.json",
        "tokenizer.bin",
        ".hidden.json",
    ]
    for name in (*kept, *left):
        (source / name).write_text("{}")
    (source / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("x")
    (source / "additional_chat_templates" / "tools.py").write_text("x")
    target = convert_model(source, tmp_path / "new")
    found = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert found == {
        *kept,
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "additional_chat_templates/tools.jinja",
    }
    assert len({(target / name).stat().st_mode for name in ("config.json", "model.safetensors")}) == 1


def test_shards_are_as_large_as_asked(tmp_path: Path) -> None:
    source = tiny.make(tmp_path / "old", hidden_size=64, num_hidden_layers=4)
    calls: list[tuple[int, int]] = []
    target = convert_model(source, tmp_path / "new", shard_bytes=100_000, progress=lambda *call: calls.append(call))
    files = sorted(target.glob("model-*-of-*.safetensors"))
    assert len(files) > 3
    assert all(path.stat().st_size < 110_000 for path in files)
    assert (target / "model.safetensors.index.json").is_file()
    count = len(read_tensors(source))
    assert calls == [(n, count) for n in range(count + 1)]
    assert_same(source, target)


def test_a_model_that_is_there_is_replaced_if_asked(tmp_path: Path) -> None:
    source = tiny.make(tmp_path / "old")
    target = convert_model(source, tmp_path / "new", shard_bytes=5000)
    (target / "note.txt").write_text("")
    with pytest.raises(InputError, match=r"is not empty \(config\.json, .*ask to overwrite"):
        convert_model(source, target)
    convert_model(source, target, overwrite=True)
    assert sorted(os.listdir(target)) == ["config.json", "model.safetensors"]
    assert_same(source, target)


def test_only_a_model_folder_is_replaced(tmp_path: Path) -> None:
    source, target = tiny.make(tmp_path / "old"), tmp_path / "new"
    target.mkdir()
    (tmp_path / "link").symlink_to(target)
    assert convert_model(source, tmp_path / "link") == tmp_path / "link"  # an empty one is as good as none
    assert (tmp_path / "link").is_symlink()
    assert_same(source, target)
    for precious in (target / "photos", target / "config.json"):
        if precious.exists():
            precious.rename(target / "note.txt")
        else:
            precious.mkdir()
        with pytest.raises(InputError, match="only those are overwritten"):
            convert_model(source, target, overwrite=True)
        shutil.rmtree(target / "photos", ignore_errors=True)
    with pytest.raises(InputError, match="is a file"):
        convert_model(source, target / "note.txt", overwrite=True)
    assert (target / "note.txt").is_file()


def test_disk_errors_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny.make_chat_folder(tmp_path / "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(CheckpointError, match=r"new: the folder could not be written \(.*No space left"):
        convert_model(source, tmp_path / "new")
    assert os.listdir(tmp_path) == ["old"]


@pytest.mark.parametrize("at", [0, 5, -1])
def test_an_interrupt_leaves_nothing(tmp_path: Path, at: int) -> None:
    source = tiny.make(tmp_path / "old")
    before = tiny.make(tmp_path / "there", vocab_size=70)

    def stop(done: int, total: int) -> None:
        if done == at % (total + 1):
            raise KeyboardInterrupt

    for target in (tmp_path / "deep" / "new", before):
        with pytest.raises(KeyboardInterrupt):
            convert_model(source, target, shard_bytes=5000, overwrite=True, progress=stop)
    assert sorted(os.listdir(tmp_path)) == ["old", "there"]
    assert Config(before).vocab_size == 70
    reference_logits(before)


SLOW = """
import sys, time
from exlm import convert_model
def wait(done, total):
    if done == 8:
        print('half', flush=True)
        time.sleep(60)
convert_model(sys.argv[1], sys.argv[2], shard_bytes=5000, progress=wait)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="kills a process")
def test_a_killed_conversion_leaves_no_half_model(tmp_path: Path) -> None:
    source = tiny.make(tmp_path / "old")
    run = [sys.executable, "-c", SLOW, str(source), str(tmp_path / "new")]
    with subprocess.Popen(run, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "half\n"
        running = convert_model(source, tmp_path / "new", overwrite=True)  # does not disturb the other
        shutil.rmtree(running)
        assert len(os.listdir(tmp_path)) == 2
        child.send_signal(signal.SIGKILL)
    assert not (tmp_path / "new").exists()
    assert len(os.listdir(tmp_path)) == 2  # the temporary folder could not be removed
    assert_same(source, convert_model(source, tmp_path / "new"))
    assert sorted(os.listdir(tmp_path)) == ["new", "old"]


@pytest.mark.skipif(sys.platform != "linux", reason="sends a signal")
def test_the_command_cleans_up_when_terminated(tmp_path: Path) -> None:
    source = tiny.make(tmp_path / "old", hidden_size=512, intermediate_size=2048, num_hidden_layers=16)
    run = [
        sys.executable,
        "-m",
        "exlm.cli",
        "convert",
        str(source),
        str(tmp_path / "new"),
        "--shard-size",
        "1",
    ]
    with subprocess.Popen(run, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as child:
        while len(os.listdir(tmp_path)) == 1 and child.poll() is None:
            time.sleep(0.01)
        child.terminate()
    if not (tmp_path / "new").exists():  # else it was faster
        assert child.returncode == 143
        assert os.listdir(tmp_path) == ["old"]


PEAK = """
import re, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from exlm import convert_model
def memory(line):
    return int(re.search(line + r':\\s*(\\d+) kB', Path('/proc/self/status').read_text())[1]) * 1024
before = memory('VmRSS')
convert_model(sys.argv[1], sys.argv[2], sys.argv[3], shard_bytes=16 * 2**20)
print(memory('VmHWM') - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("to", ["safetensors", "dense"])
def test_memory_is_that_of_a_shard(tmp_path: Path, to: str) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 3584, "vocab_size": 4096, "num_hidden_layers": 4}
    source = tiny.make(tmp_path / "old", torch.float16, **sizes, num_attention_heads=8, num_key_value_heads=2)
    if to == "dense":
        replace_matrices(source, None, exl2.write, random_exl2, r"_proj\.weight|lm_head")
    run = [sys.executable, "-c", PEAK, str(source), str(tmp_path / "new"), to]
    done = subprocess.run(run, capture_output=True, text=True, check=True, timeout=300)
    size = sum(path.stat().st_size for path in (tmp_path / "new").glob("*.safetensors"))
    assert size > 120e6
    assert int(done.stdout) < 90e6
