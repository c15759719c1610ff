"""Makes `data/`: what this version of exlm leaves on disk and later versions must read.

    PYTHONPATH=src python -m tests.on_disk.make tests/on_disk/data/0.1.0

The data in the repository was made once, by the version that its folder is named after. Later versions only
read it; to add what a later version leaves, make another folder. Work that is stopped half way is a process
that ends itself the moment a file of a given name is in its place, as if it had been killed.

`quantize.tar.xz` holds the source model (`source`), the calibration text, unfinished jobs (`jobs`), finished
models and a measurement. In `job.json` the place where all that lay is written as @FOLDER@.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from exlm import Config, Model, __version__, quantize_model
from tests import tiny
from tests.conftest import ROOT
from tests.on_disk.states import (
    FEW,
    FOLDER,
    JOBS,
    MTIME,
    PROMPT,
    SENTENCE,
    SIZE,
    digest,
    environment,
    machine,
    set_times,
    typed,
)

TARGET = "model"

STOPPING = """
import os, runpy, sys
events = {events!r}
replace, fsync = os.replace, os.fsync

def reached(event):
    if events and event == events[0]:
        events.pop(0)
        if not events:
            os._exit(9)

def replacing(source, target, **more):
    reached("before " + os.path.basename(target))
    replace(source, target, **more)
    reached("behind " + os.path.basename(target))

def syncing(handle):
    fsync(handle)
    reached("synced " + os.path.basename(os.readlink(f"/proc/self/fd/{{handle}}")))

os.replace, os.fsync = replacing, syncing
sys.argv = ["exlm", *sys.argv[1:]]
runpy.run_module("exlm", run_name="__main__", alter_sys=True)
"""
"""A command of exlm that ends itself once these things have happened to files, in this order."""


def stopped(events: Sequence[str], arguments: Sequence[str], folder: Path) -> None:
    """Run a command in a folder until it ends itself."""
    program = STOPPING.format(events=list(events))
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 9, (arguments, done.returncode, done.stderr)


def make_quantize(data: Path, scratch: Path) -> dict[str, Any]:
    """The source, unfinished jobs, finished models, a measurement; what is known of them."""
    place = scratch / "quantize"
    source = tiny.make_chat_folder(place / "source", dtype=torch.float16, **SIZE)
    (place / "text.txt").write_text(SENTENCE * 40)
    set_times(place)
    options = {"calibration": place / "text.txt", **FEW}
    kept = place / "measurement.json"
    facts: dict[str, Any] = {"weights": {}, "logits": {}}
    for name, more in {
        "exl2": {"bits": 5.0, "save_measurement": kept},
        "gptq": {"method": "gptq", "group_size": 32},
    }.items():
        folder = place / "models" / name
        quantize_model(source, folder, **options, **more)
        facts["weights"][name] = digest(folder)
        facts["logits"][name] = [round(float(x), 6) for x in logits(folder)]
    for name, job in JOBS.items():
        target = place / "jobs" / name / TARGET
        target.parent.mkdir(parents=True)
        arguments = ["quantize", str(source), str(target), *job.arguments(place), "--quiet"]
        stopped(job.events, arguments, place)
        (hidden,) = target.parent.iterdir()
        said = hidden / "job.json"
        said.write_text(said.read_text().replace(str(place), FOLDER))
    set_times(place)
    with tarfile.open(data / "quantize.tar.xz", "w:xz", preset=9) as archive:
        for path in sorted(place.rglob("*")):
            archive.add(path, path.relative_to(place), recursive=False, filter=anonymous)
    return facts


def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without the names of those who made it."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def logits(folder: Path) -> torch.Tensor:
    """Logits of a model for a fixed prompt."""
    config = Config(folder)
    config.device = "cpu"
    model = Model(config)
    model.load()
    return model.forward(torch.tensor([PROMPT]))[0, -1, :16].float()


def make_batches(data: Path, scratch: Path) -> None:
    """Batches stopped half way, before the output has its name, and before the journal is removed.

    The rows that are done were answered by a model that later runs do not have under that name: a row that is
    run again has another answer.
    """
    place = scratch / "batch"
    tiny.make_chat_folder(place / "model", intermediate_size=48, max_position_embeddings=512)
    for name, events in {
        "half": ["synced out.jsonl.journal"] * 4,
        "complete": ["before out.jsonl"],
        "written": ["behind out.jsonl"],
    }.items():
        shutil.copy(data / "batch" / "in.jsonl", place / "in.jsonl")
        arguments = ["batch", "in.jsonl", "out.jsonl", "--model", "model", "--device", "cpu"]
        stopped(events, [*arguments, "--max-batch-size", "2", "--quiet"], place)
        (data / "batch" / name).mkdir()
        for path in place.glob("out.jsonl*"):
            shutil.move(path, data / "batch" / name)
    torn = data / "batch" / "half" / "out.jsonl.journal"
    complete = (data / "batch" / "complete" / torn.name).read_bytes()
    record = complete.splitlines(keepends=True)[len(torn.read_bytes().splitlines())]
    torn.write_bytes(torn.read_bytes() + record[: len(record) // 2])  # the write that the end came in


def make_plans(data: Path, scratch: Path) -> None:
    """What `exlm tune` keeps for a GPU, written by its own writer."""
    from exlm.kernels.cuda.tuning import GemmShape, TuneCache, shape_name, tuned_file
    from exlm.kernels.cuda.weight_tile import unify_groups
    from tests.kernels.cuda.emulator import EmulatedModuleCache
    from tests.kernels.cuda.random_weights import weight
    from tests.kernels.cuda.repack_oracle import repack

    file = tuned_file(scratch / "plans" / "kernels", "NVIDIA H200")
    tuned = TuneCache(EmulatedModuleCache(scratch), file)  # type: ignore[arg-type]
    kinds = []
    for name, setting in {"4 bits": (1, 3, 4), "6 and 4 bits": (2, 5, 3), "minimums": (3, 4, 2)}.items():
        product = tuned.gemm([repack(weight(name))])
        kinds.append(GemmShape(shape_name(product.weights, None), [product]))
        kinds[-1].apply(setting)
    pair = tuned.gemm(unify_groups([repack(weight("4 bits"))] * 2), None, "silu")
    kinds.append(GemmShape(shape_name(pair.weights, "silu"), [pair]))
    kinds[-1].apply((2, 6, 3))
    assert tuned.save(kinds) == file
    shutil.copytree(file.parent, data / "kernels")


def make_default_model(data: Path, scratch: Path) -> None:
    """The stamp beside the default model that says its content was checked."""
    from exlm.hub.default_model import SMOLLM2, _model_file, _stamp_file, _stamp_text

    file = _model_file(SMOLLM2, scratch / "models")
    file.parent.mkdir(parents=True)
    with file.open("wb") as sparse:
        sparse.truncate(SMOLLM2.file_size)
    os.utime(file, (MTIME, MTIME))
    stamp = data / _stamp_file(file).relative_to(scratch)
    stamp.parent.mkdir(parents=True)
    stamp.write_text(_stamp_text(SMOLLM2, file.stat()), encoding="ascii")


SAVED = """/system Be brief.
/set max_new_tokens 7
/set seed 5
/set temperature 0.25
/set top_k 40
/set min_p 0.05
/set mirostat on
/set token_repetition_penalty 1.05
/set dry_sequence_breakers ["\\n", 29]
Hi
What is "a"?
/save {file}
"""

TYPED = ("/set max_new_tokens 3", "Two\\", "lines", "/set seed 5", "/quit")


def make_chat(data: Path, scratch: Path) -> None:
    """A conversation that was saved, and what was typed on a terminal."""
    model = tiny.make_chat_folder(scratch / "chat", max_position_embeddings=512)
    command = [sys.executable, "-m", "exlm", "chat", str(model)]
    subprocess.run(
        [*command, "--quiet"],
        input=SAVED.format(file=data / "chat.json"),
        env=environment(),
        check=True,
        text=True,
        stdout=subprocess.DEVNULL,
    )
    assert typed(["chat", str(model)], TYPED, scratch / "cache") == 0
    shutil.copy(scratch / "cache" / "chat-history.jsonl", data)


KEEPING = """
const text = process.argv[1], box = Object.create({
  getItem: (key) => box[key] ?? null,
  setItem: (key, value) => void (box[key] = value),
});
const { Store, newChat, addMessage } = await import("data:text/javascript," + encodeURIComponent(text));
const store = new Store(box), chat = newChat("Be brief.");
addMessage(chat, { role: "user", text: "Hi\\nthere", parent: -1, thought: "", error: "", facts: [] });
addMessage(chat, { role: "assistant", text: "Hello.", parent: 0, thought: "A greeting.", error: "",
  facts: ["2 tokens"] });
addMessage(chat, { role: "assistant", text: "", parent: 0, thought: "", error: "stopped", facts: [] });
store.save(chat);
store.saveSettings({ temperature: 0.5, system: "Be brief.", model: "tiny" });
console.log(JSON.stringify({ storage: { ...box }, exported: store.exported() }));
"""


def make_web_chats(data: Path) -> None:
    """What the web chat keeps in a browser, and the file it exports conversations to."""
    script = (ROOT / "src" / "exlm" / "serve" / "web" / "store.js").read_text(encoding="utf-8")
    command = ["node", "--input-type=module", "--eval", KEEPING, script]
    said = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    (data / "web-storage.json").write_text(json.dumps(said["storage"], indent=1) + "\n")
    (data / "web-chats.json").write_text(said["exported"])


def make_bench(data: Path) -> None:
    """What `exlm bench --json` writes."""
    asked = ["bench", "--shape", "tiny", "--device", "cpu", "--cache", "fp16,q4", "--tokens", "4"]
    command = [sys.executable, "-m", "exlm", *asked, "--json", str(data / "bench.json")]
    subprocess.run(command, env=environment(), check=True, stdout=subprocess.DEVNULL)


def main(data: Path) -> None:
    """Make everything."""
    torch.set_num_threads(1)
    data.mkdir(parents=True)
    (data / "batch").mkdir()
    shutil.copy(Path(__file__).with_name("requests.jsonl"), data / "batch" / "in.jsonl")
    with tempfile.TemporaryDirectory(prefix="exlm-on-disk-") as folder:
        scratch = Path(folder)
        facts = make_quantize(data, scratch)
        make_batches(data, scratch)
        make_plans(data, scratch)
        make_default_model(data, scratch)
        make_chat(data, scratch)
        make_web_chats(data)
        make_bench(data)
    facts |= {"exlm": __version__, "machine": machine()}
    (data / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
    for path in sorted(data.rglob("*")):
        if path.is_file():
            print(f"{path.stat().st_size:9,} {path.relative_to(data)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
