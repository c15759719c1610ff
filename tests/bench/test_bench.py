"""`exlm bench` and `exlm info --system`, run end to end."""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from exlm import BadFile, InputError, MissingExtra
from exlm.bench import comparison, report
from exlm.bench.benchmark import BenchmarkConfig, measure_int8_peak, measure_roofline
from exlm.bench.benchmark import run as run_benchmark
from exlm.bench.gguf_mix import Mix, write_mix
from exlm.bench.report import BenchmarkRow, Comparison, EngineResult, MixResult, Report, bound
from exlm.bench.shapes import SHAPES
from exlm.bench.synthetic import CYCLE_LENGTH
from exlm.bench.timing import prompt_ids, tokens_needed
from exlm.cli.__main__ import app
from exlm.cli.bench_mixes import mix_table, print_builds
from exlm.kernels.cpu.compile import sets_here
from tests import tiny

SHORT = ("--device", "cpu", "--tokens", "4", "--prompt", "16", "--context", "8")


def run(*arguments: str) -> str:
    done = CliRunner(env={"COLUMNS": "160"}).invoke(app, arguments)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_tiny_shape_is_measured_end_to_end(tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    options = ("--batch", "1,3", "--cache", "fp16,q4", "--draft", "ngram", "--json", str(file))
    text = run("bench", "--shape", "tiny", *SHORT, *options)
    for words in ("tiny", "exl2 4.10 bit", "prompt", "decode", "ngram", "fp16", "q4", "of copy", "loaded in"):
        assert words in text
    found = json.loads(file.read_text())
    rows = [(row["work"], row["cache"], row["context"], row["batch"]) for row in found["rows"]]
    assert rows == [("prompt", "fp16", 16, 1)] + [
        (work, cache, 8, batch) for cache in ("fp16", "q4") for batch in (1, 3) for work in ("decode", "ngram")
    ]
    for row in found["rows"]:
        assert row["rate"] > 0
        assert row["read"] > 0
        assert row["bandwidth"] == pytest.approx(row["read"] / row["step"] / found["bandwidth"])
        assert 0 <= row["idle"] < 1
        assert row["bound"] in ("memory", "compute", "host")
    assert found["bits"] == pytest.approx(4.1, abs=0.1)
    assert found["memory"] > 0
    assert found["system"]["torch"].startswith(torch.__version__)


@pytest.mark.parametrize("form", ["gptq", "gguf", "dense"])
def test_every_format_is_measured(form: str) -> None:
    text = run("bench", "--shape", "tiny", "--format", form, "--batch", "1", *SHORT)
    assert form in text


def test_a_model_in_files_is_measured(tmp_path: Path) -> None:
    folder = tiny.make_chat_folder(tmp_path)
    text = run("bench", str(folder), "--batch", "2", *SHORT)
    assert tmp_path.name in text
    assert "dense float32" in text


def test_default_contexts_fit_the_model(tmp_path: Path) -> None:
    folder = str(tiny.make_chat_folder(tmp_path / "model", max_position_embeddings=24))
    for words, options in (
        ("--context 25 is more than this model has: 24 tokens", ("--context", "8,25", "--prompt", "8")),
        ("--prompt 25 is more than this model has: 24 tokens", ("--context", "8", "--prompt", "25")),
    ):
        with pytest.raises(InputError, match=words):
            run("bench", folder, "--device", "cpu", "--batch", "1", "--tokens", "4", *options)
    file = tmp_path / "numbers.json"
    run("bench", folder, "--device", "cpu", "--batch", "1", "--tokens", "4", "--json", str(file))
    assert [row["context"] for row in json.loads(file.read_text())["rows"]] == [24, 24]


def test_invalid_options_are_refused(tmp_path: Path) -> None:
    for words, options in (
        ("--shape must be", ("--shape", "huge")),
        ("--cache must be", ("--shape", "tiny", "--cache", "q5")),
        ("--batch must be", ("--shape", "tiny", "--batch", "many")),
        ("--draft must be", ("--draft", "model")),
        ("not both", (str(tiny.make(tmp_path)), "--shape", "tiny")),
        ("at least 1", ("--shape", "tiny", "--batch", "0")),
        ("--json .* cannot be written", ("/nowhere/model", "--json", str(tmp_path / "no" / "x.json"))),
        ("--plot .* cannot be written", ("/nowhere/model", "--plot", str(tmp_path))),
        ("--peer must be", ("/nowhere/model", "--peers", "--peer", "llama.cpp")),
    ):
        with pytest.raises(InputError, match=words):
            run("bench", "--device", "cpu", *options)
    for option in ("--prompt", "--tokens"):
        assert CliRunner().invoke(app, ["bench", "--shape", "tiny", option, "0"]).exit_code == 2
    with pytest.raises(InputError, match=r"\.gguf"):
        comparison.compare(tmp_path, 1)


def fake_peer(folder: Path, line: str) -> str:
    """An interpreter that runs no engine and reports round numbers, and this line of instruction sets."""
    values = {"first": 0.5, "prompt": 100.0, "decode": 50.0, "peak": 10.0}
    result = {"values": values, "build": {"package": "llama.cpp 1", "instruction_sets": line}}
    program = folder / "python"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nengine, model, threads, vocab, started, output = sys.argv[2:]\n"
        f"assert (engine, vocab) == ('llama.cpp', '512') and model.endswith('.gguf')\n"
        f"open(output, 'w').write({json.dumps(result)!r})\n"
    )
    program.chmod(0o755)
    return str(program)


def test_an_engine_that_a_signal_ends_is_left_out(tmp_path: Path) -> None:
    program, model = tmp_path / "python", tmp_path / "model.gguf"
    program.write_text("#!/bin/sh\necho loading >&2\nkill -ILL $$\n")
    program.chmod(0o755)
    write_mix(model, Mix("q8_0", SHAPES["tiny"]))
    found, skipped = comparison.compare(model, 1, 1, {"llama.cpp": str(program)}, only=("llama.cpp",))
    assert (found, skipped) == ([], ["llama.cpp: ended by SIGILL; loading"])


def test_mixes_beside_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exlm.bench.llama_builds._cpuinfo", lambda: "flags : avx2 avx512f avx512_vnni\n")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file, peer = tmp_path / "numbers.json", fake_peer(tmp_path, "CPU : AVX2 = 1 | FMA = 1 |")
    arguments = ("--peers", "--peer", f"llama.cpp={peer}", "--mix", "Q4_K_M,iq4_xs", "--threads", "1", "--turns", "2")
    text = run("bench", "--device", "cpu", "--shape", "tiny", "--format", "gguf", *arguments, "--json", str(file))
    for words in (
        "llama.cpp 1",
        "CPU : AVX2 = 1 | FMA = 1 |",
        "lacks AVX512, AVX512_VNNI",
        'CMAKE_ARGS="-DGGML_NATIVE=ON" pip install',
        "--no-binary llama-cpp-python",
        "q4_k_m: 4.92 bits per weight (13 Q4_K, 3 Q6_K)",
        "iq4_xs: 4.46 bits per weight",
        "of int8",
        "of read",
        "0.5, then 0.5",
        "exlm / llama.cpp",
    ):
        assert words in text
    found = json.loads(file.read_text())
    assert (found["model"], found["device"], found["turns"]) == ("tiny", "CPU", 2)
    assert [(one["mix"], one["threads"]) for one in found["mixes"]] == [("q4_k_m", 1), ("iq4_xs", 1)]
    first = found["mixes"][0]
    assert [one["engine"] for one in first["peers"]] == ["exlm", "llama.cpp"]
    assert first["peers"][1]["build"]["instruction_sets"] == "CPU : AVX2 = 1 | FMA = 1 |"
    for peer_result in first["peers"]:
        values, shares = peer_result["values"], first["shares"][peer_result["engine"]]
        assert {"first", "prompt", "decode", "peak"} <= set(values)
        assert len(values["decode"]) == 2
        rate = statistics.median(values["decode"])
        assert shares["decode"] == pytest.approx(rate * first["bytes_per_token"] / first["bandwidth"])
        if first["int8_peak"] is not None:
            rate = statistics.median(values["prompt"])
            assert shares["prompt"] == pytest.approx(2 * rate * first["prompt_products"] / first["int8_peak"])
    assert sorted(one.name for one in tmp_path.iterdir()) == ["numbers.json", "python"]  # the models are deleted


def test_a_build_for_this_processor_gets_no_advice(capsys: pytest.CaptureFixture[str]) -> None:
    line = "CPU : AVX2 = 1 | AVX512 = 1 | AVX512_VNNI = 1 | AVX_VNNI = 1 | DOTPROD = 1 | MATMUL_INT8 = 1 |"
    engine = EngineResult("llama.cpp", {}, {"package": "llama-cpp-python 1", "instruction_sets": line})
    print_builds(Console(width=200), [EngineResult("exlm", {}), engine], {})
    assert capsys.readouterr().out == f"llama.cpp: llama-cpp-python 1, built for: {line}\n"


def test_a_processor_without_byte_products_has_no_share_of_their_peak() -> None:
    engines = tuple(EngineResult(name, {"first": [1.0], "prompt": [9.0], "decode": [4.0]}) for name in ("exlm", "x"))
    result = MixResult("q8_0", {"Q8_0": 3}, 8.5, 10, 5, 7, 2, 40.0, None, engines)
    assert (result.decode_share(engines[0]), result.prompt_share(engines[0])) == (0.5, None)
    console = Console(width=160)
    with console.capture() as captured:
        console.print(mix_table([result]))
    text = captured.get()
    for words in ("–", "int8 peak not measured", "1.00 ×", "50%"):
        assert words in text


def test_several_numbers_of_threads(tmp_path: Path) -> None:
    before, file = torch.get_num_threads(), tmp_path / "numbers.json"
    try:
        text = run("bench", "--shape", "tiny", "--batch", "1", *SHORT, "--threads", "1,2", "--json", str(file))
    finally:
        torch.set_num_threads(before)
    assert "tok/s by number of threads" in text
    found = json.loads(file.read_text())
    assert (found["threads"], [one["threads"] for one in found["curve"]]) == (1, [1, 2])
    assert {**found["curve"][0], "curve": 0} == {**found, "curve": 0}
    assert found["curve"][1]["first"] is None  # the process began before the first measurement


def test_options_that_do_not_combine_with_mixes_are_refused() -> None:
    gguf = ("--shape", "tiny", "--format", "gguf")
    for words, options in (
        ("--mix must be of", (*gguf, "--mix", "q4")),
        ("add --format gguf", ("--shape", "tiny", "--mix", "q4_0")),
        ("add --format gguf", ("--shape", "tiny", "--peers")),
        ("name a --shape and no model", ("/nowhere/model", "--mix", "q4_0")),
        ("--shape must be", ("--shape", "huge", "--format", "gguf", "--mix", "q4_0")),
        ("dense Llama shapes", ("--shape", "tiny-moe", "--format", "gguf", "--mix", "q4_0")),
        ("--bits, --batch and --mix do not combine", (*gguf, "--mix", "q4_0", "--bits", "4.5", "--batch", "2")),
        ("--threads must be", (*gguf, "--mix", "q4_0", "--threads", "1,x")),
        ("--threads must be at least 1", (*gguf, "--threads", "0")),
    ):
        with pytest.raises(InputError, match=words):
            run("bench", "--device", "cpu", *options)


def test_without_matplotlib_a_plot_names_the_extra(tmp_path: Path) -> None:
    from exlm.bench import save_plot

    rows = (
        BenchmarkRow("decode", "fp32", 8, 1, 10.0, 0.1, 100, 0.5, 0.1, 0.1, "memory"),
        BenchmarkRow("decode", "q4", 8, 1),
    )
    result = Report("tiny", "exl2", 1, 1, 4.1, "CPU", ("cpu",), 1, 0.1, None, 1, 1.0, 1.0, rows)
    target = tmp_path / "plot.png"
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(MissingExtra, match=r"exlm\[bench\]"):
            save_plot(result, target)
    else:
        save_plot(result, target)
        assert target.read_bytes().startswith(b"\x89PNG")


def test_results_of_a_run_are_drawn_beside_other_engines(tmp_path: Path) -> None:
    rows = (BenchmarkRow("decode", "fp32", 8, 1, 10.0, 0.1, 100, 0.5, 0.1, 0.1, "memory"),)
    peers = (EngineResult("exlm", {"decode": [30.0, 10.0, 20.0]}), EngineResult("other engine", {"decode": [5.0]}))
    report = Report("tiny", "exl2", 1, 1, 4.1, "CPU", ("cpu",), 1, 0.1, None, 1, 1.0, 1.0, rows, {"cpu": "x"}, peers)
    results, target = tmp_path / "results.json", tmp_path / "plot.svg"
    results.write_text(json.dumps(report.json()))
    assert Comparison.from_json(results) == ("tiny", "CPU", peers)
    run("bench", "--from", str(results), "--plot", str(target), "--dark")
    drawn = target.read_text()
    assert all(text in drawn for text in (">tiny, CPU", ">exlm<", ">other engine<", ">20<", ">5<"))
    with pytest.raises(InputError, match="--plot"):
        run("bench", "--from", str(results))
    for wrong in ("{", "[]", '{"model": 1}'):
        results.write_text(wrong)
        with pytest.raises(BadFile, match=r"results\.json holds no comparison by"):
            run("bench", "--from", str(results), "--plot", str(target))


def test_missing_matplotlib_is_reported_before_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exlm.bench.report.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"exlm\[bench\]"):
        run("bench", "/nowhere/model", "--plot", str(tmp_path / "plot.png"))


def test_every_batch_at_the_first_context_and_every_context_with_the_first_batch() -> None:
    config = BenchmarkConfig(shape="tiny", batches=(1, 8), contexts=(512, 8000), caches=("fp16", "q8"))
    found = [(row.cache, row.context, row.batch) for row in config.planned_rows()[1:]]
    assert found == [(cache, *rest) for cache in ("fp16", "q8") for rest in ((512, 1), (512, 8), (8000, 1))]
    assert config.longest_sequence > 8000


def test_a_cache_that_does_not_fit_is_reported_and_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exlm.bench.benchmark.free_bytes", lambda device: 2**30)
    assert run("bench", "--shape", "tiny", *SHORT).count("does not fit") == 3


def test_bound() -> None:
    assert bound(0.7, 0.2, 0.1, True) == "memory"
    assert bound(0.3, 0.6, 0.1, True) == "compute"
    assert bound(0.3, 0.2, 0.7, True) == "host"
    assert bound(0.3, 0.2, 0.1, True) == "launch"
    assert bound(0.3, 0.2, 0.1, False) == "compute"
    assert report.BOUND_SHARE < 0.5


def test_prompt_ids() -> None:
    a, b = prompt_ids(0, 64, 512), prompt_ids(1, 64, 512)
    assert not torch.equal(a, b)
    again, other = (prompt_ids(row, 64, 512, repetitive=True) for row in (0, 1))
    assert torch.equal(again[:, 1 : 1 + CYCLE_LENGTH], again[:, 1 + CYCLE_LENGTH : 1 + 2 * CYCLE_LENGTH])
    assert torch.equal(again[:, 1:], other[:, 1:])
    assert int(again[0, 0]) != int(other[0, 0])
    for ids in (a, b, again, prompt_ids(5, 32, 64), prompt_ids(5, 32, 64, repetitive=True)):
        assert int(ids.min()) >= 0
        assert int(ids.max()) < (512 if ids.shape[1] == 64 else 64)
    assert tokens_needed(2, 250, 10) == 1024


@pytest.mark.parametrize("form", ["exl2", "gptq", "gguf", "dense"])
def test_ngram_drafts_are_accepted_on_repetitive_text(form: str) -> None:
    """A repetitive model cycles through tokens, so that every draft is accepted in full."""
    config = BenchmarkConfig(shape="tiny", format=form, device="cpu", contexts=(40,), prompt=16, tokens=40, ngram=True)
    _, plain, drafted = run_benchmark(config).rows
    assert (plain.work, plain.tokens_per_row_step) == ("decode", 1)
    assert (drafted.work, drafted.tokens_per_row_step) == ("ngram", 8)


@pytest.mark.gpu
def test_ngram_drafts_are_accepted_on_a_gpu() -> None:
    config = BenchmarkConfig(
        shape="tiny", device="cuda", batches=(1, 3), contexts=(120,), prompt=16, tokens=160, ngram=True
    )
    rows = run_benchmark(config).rows[1:]
    assert [row.work for row in rows] == ["decode", "ngram"] * 2
    assert all(row.tokens_per_row_step > 7 for row in rows[1::2])  # after 40 tokens, more than two cycles


def test_the_peak_of_byte_products() -> None:
    found = measure_int8_peak(1)
    assert found is None or 1e9 < found < 1e14
    if sets_here()[0] in ("avx512", "dotprod"):
        assert found is not None


def test_roofline() -> None:
    found = measure_roofline(torch.device("cpu"), torch.float32)
    assert 1e8 < found.bandwidth < 1e13
    assert 1e8 < found.flops < 1e16


def test_info_system() -> None:
    text = run("info", "--system")
    for words in ("Python", "torch", "processor", "cores", "memory", "GPU", "instruction sets", "AMX"):
        assert words in text
    found = json.loads(run("info", "--system", "--json"))
    assert "reference" in found["kernels on cpu"]
    assert found["CPU library"]
    assert Path(found["cache folder"]).name == "exlm"
    with pytest.raises(InputError, match="takes no model"):
        run("info", "somewhere", "--system")


def test_a_broken_amx_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from exlm import env
    from exlm.env import OnednnIsaCap

    for guard, words in (
        (OnednnIsaCap("flag_only", True), "limited to older instructions"),
        (OnednnIsaCap("flag_only", False), "set already"),
        (OnednnIsaCap("usable", False), "usable"),
        (OnednnIsaCap("none", False), "not announced"),
    ):
        monkeypatch.setattr(env, "cap_onednn_isa", lambda guard=guard: guard)
        assert words in json.loads(run("info", "--system", "--json"))["AMX"]
