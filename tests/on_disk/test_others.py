"""What else 0.1.0 leaves on disk is read: plans, conversations, the default model, results of benchmarks."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

import exlm
from benchmarks.comparison.probes import read_bench, read_load
from exlm import convert_model, find_model, validate_exl2
from tests.on_disk.states import DATA, MTIME, PATIENCE, environment, typed

PLANS = DATA / "kernels" / "plans-nvidia-h200.json"
STORE = Path(exlm.__file__).parent / "serve" / "web" / "store.js"


def planned(file: Path, folder: Path) -> list[tuple[int, ...]]:
    """The plans that products get from a file: four of one matrix each, and one of two matrices under SiLU.

    The only function here that uses names from inside the package: there are no plans without a GPU else.
    """
    from dataclasses import astuple

    from exlm.kernels.cuda.tuning import TuneCache, tuned_file
    from exlm.kernels.cuda.weight_tile import unify_groups
    from tests.kernels.cuda.emulator import EmulatedModuleCache
    from tests.kernels.cuda.random_weights import weight
    from tests.kernels.cuda.repack_oracle import repack

    assert tuned_file(file.parent, "NVIDIA H200") == file
    tuned = TuneCache(EmulatedModuleCache(folder), file)  # type: ignore[arg-type]
    alone = [tuned.gemm([repack(weight(kind))]) for kind in ("4 bits", "6 and 4 bits", "minimums", "zero points")]
    pair = tuned.gemm(unify_groups([repack(weight("4 bits"))] * 2), None, "silu")
    return [astuple(product.config) for product in (*alone, pair)]


def test_plans_are_used_by_the_version_that_made_them(tmp_path: Path) -> None:
    """Another version takes its usual ones, and does not complain."""
    kept, none = tmp_path / "kept" / PLANS.name, tmp_path / "none" / PLANS.name
    for file in (kept, none):
        file.parent.mkdir()
    usual = planned(none, tmp_path)
    found = json.loads(PLANS.read_text())
    assert len(found["plans"]) == 4
    for version, used in ((exlm.__version__, True), ("0.0.9", False)):
        kept.write_text(json.dumps({**found, "exlm": version}))
        tuned = planned(kept, tmp_path)
        expected = [(1, 3, 4), (2, 5, 3), (3, 4, 2), usual[3], (2, 6, 3)]
        assert tuned == (expected if used else usual)
    assert all(one != other for one, other in zip(usual[:3], expected[:3], strict=True))


def test_the_default_model_is_found_without_reading_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty file as large and as old as the one that was checked stands for it."""
    monkeypatch.setenv("EXLM_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    shutil.copytree(DATA / "models", tmp_path / "models")
    (stamp,) = (tmp_path / "models").rglob("*.checked")
    file = stamp.with_name(stamp.name.removesuffix(".checked"))
    with file.open("wb") as sparse:
        sparse.truncate(int(stamp.read_text().split()[3]))
    os.utime(file, (MTIME, MTIME))
    assert find_model() == file
    assert file.relative_to(tmp_path).as_posix() == ("models/SmolLM2-135M-Instruct/SmolLM2-135M-Instruct.Q4_1.gguf")


def chat(model: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "exlm", "chat", str(model), "--quiet", "-n", "3", "-t", "0"],
        input="".join(f"{line}\n" for line in lines),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_a_saved_conversation_is_taken_up_again(unpacked: Path, tmp_path: Path) -> None:
    before, again = json.loads((DATA / "chat.json").read_text()), tmp_path / "again.json"
    ended = chat(unpacked / "source", f"/load {DATA / 'chat.json'}", f"/save {again}", "Go on.", f"/save {again}2")
    assert ended.returncode == 0, ended.stderr
    now = json.loads(again.read_text())
    assert now["messages"] == before["messages"]
    assert {name: now["settings"].get(name) for name in before["settings"]} == before["settings"]
    asked = {"temperature": 0.25, "top_k": 40, "min_p": 0.05, "mirostat": True, "seed": 5}
    assert {name: before["settings"][name] for name in asked} == asked
    *said, question, answer = json.loads(Path(f"{again}2").read_text())["messages"]
    assert said == before["messages"]
    assert question == {"role": "user", "content": "Go on."}
    assert answer["role"] == "assistant"


def test_a_saved_conversation_is_overwritten_by_another(unpacked: Path, tmp_path: Path) -> None:
    file = Path(shutil.copy(DATA / "chat.json", tmp_path))
    ended = chat(unpacked / "source", "Hi", f"/save {file}")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(file.read_text())["messages"][0] == {"role": "user", "content": "Hi"}


def test_what_was_typed_is_remembered_on_a_terminal(unpacked: Path, tmp_path: Path) -> None:
    pytest.importorskip("readline")
    history = Path(shutil.copy(DATA / "chat-history.jsonl", tmp_path))
    before = [json.loads(line) for line in history.read_text().splitlines()]
    assert before == ["/set max_new_tokens 3", "Two\nlines", "/set seed 5", "/quit"]
    control_p = "\x10"  # the line before, as in every line editor
    assert typed(["chat", str(unpacked / "source")], [2 * control_p, "/quit"], tmp_path) == 0
    after = [json.loads(line) for line in history.read_text().splitlines()]
    assert after == [*before, "/set seed 5", "/quit"]


READ = """
const [text, storage, exported] = process.argv.slice(1);
class Box {
  getItem(key) { return Object.hasOwn(this, key) ? this[key] : null; }
  setItem(key, value) { this[key] = value; }
}
const { Store } = await import("data:text/javascript," + encodeURIComponent(text));
const empty = new Store(new Box()), imported = empty.imported(exported);
const kept = new Store(Object.assign(new Box(), JSON.parse(storage)));
console.log(JSON.stringify({
  imported, chats: empty.list(), kept: kept.list(), settings: kept.settings(), unreadable: kept.unreadable,
}));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_conversations_of_the_web_chat_are_read() -> None:
    """Those in a browser's storage, and those in a file that it exported."""
    texts = [(DATA / name).read_text() for name in ("web-storage.json", "web-chats.json")]
    said = subprocess.run(
        ["node", "--input-type=module", "--eval", READ, STORE.read_text(encoding="utf-8"), *texts],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    found = json.loads(said.stdout)
    (expected,) = json.loads(texts[1])["chats"]
    assert found["imported"] == [1, 1]
    assert found["chats"] == found["kept"] == [expected]
    assert [message["text"] for message in expected["messages"]] == ["Hi\nthere", "Hello.", ""]
    assert found["settings"] == {"temperature": 0.5, "system": "Be brief.", "model": "tiny"}
    assert found["unreadable"] == 0


def test_results_of_a_benchmark_are_read() -> None:
    """By `benchmarks.compare`, which holds versions against each other."""
    rates = {row.name: value for row, value in read_bench(DATA / "bench.json", "tiny", 0.05, 0.05).items()}
    expected = {"tiny, prompt of 128"}
    for cache in ("fp16", "q4"):
        expected |= {f"tiny, decode, {batch} x 32, {cache} cache" for batch in (1, 4)}
    assert rates.keys() == expected
    report: dict[str, Any] = json.loads((DATA / "bench.json").read_text())
    assert {*rates.values()} == {row["rate"] for row in report["rows"]}
    assert [*read_load(DATA / "bench.json", "tiny").values()] == [report["load"], report["first"]]


def test_what_a_killed_process_left_of_a_new_folder_is_removed(unpacked: Path, tmp_path: Path) -> None:
    """By the next one that makes the same folder; others are left alone."""
    left, other = (tmp_path / f".{name}.partial-{uuid.uuid4().hex[:12]}" for name in ("model", "other"))
    for folder in (left, other):
        folder.mkdir()
        (folder / "model-00001.safetensors").write_bytes(b"half")
    convert_model(unpacked / "models" / "exl2", tmp_path / "model", "safetensors")
    assert validate_exl2(tmp_path / "model") == []
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["model", other.name])


def test_the_data_is_small_and_says_who_made_it(facts: dict[str, Any]) -> None:
    sizes = [path.stat().st_size for path in DATA.rglob("*") if path.is_file()]
    assert sum(sizes) < 1_500_000
    assert facts["exlm"] == DATA.name
    assert re.fullmatch(r"\d+\.\d+\.\d+", DATA.name)
