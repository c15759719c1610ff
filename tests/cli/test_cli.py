"""The command line, run end to end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

from exlm import CACHES, LLM, Config, InputError, Model, ModelNotFound, Tokenizer, Unsupported
from exlm.cli.__main__ import app
from exlm.cli.generate import _is_model
from tests import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_chat_folder(tmp_path_factory.mktemp("model"))


def run(*arguments: str, input: str | None = None) -> str:
    done = CliRunner(env={"COLUMNS": "160"}).invoke(app, arguments, input=input)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def greedy(folder: Path, ids: torch.Tensor, count: int) -> list[int]:
    """The oracle: the same answer without a cache, one full forward pass for each token."""
    model = Model(Config(folder))
    model.load()
    out: list[int] = []
    for _ in range(count):
        token = int(model.forward(torch.cat((ids, torch.tensor([out], dtype=torch.int64)), 1))[0, -1].argmax())
        if token == 2:
            break
        out.append(token)
    return out


def test_info(folder: Path) -> None:
    text = run("info", str(folder))
    for expected in (
        "LlamaForCausalLM",
        "2 of width 32",
        "259",
        "512 tokens",
        "dense float32",
        "reference",
        "mlp.down",
    ):
        assert expected in text
    assert text.count("attn.q") == 1  # equal layers share a line
    assert run("info", str(folder), "--layers").count("attn.q") == 2


def test_info_says_what_mixers_keep(fixtures_dir: Path, folder: Path) -> None:
    text = run("info", str(fixtures_dir / "tiny-qwen3_5"), "--spec")
    for expected in (
        r"mixers +3 × delta net, 1 × attention",
        r"state +201\.0 KiB for each sequence",  # 3 · (4 · 64 · 64 · 4 + 3 · 512 · 2) bytes
        r"heads +4 for queries, 2 for keys and values",
        r"512 bytes of cache each",  # of one layer of four
        r"layers 0 to 2:",
        r"mixer: DeltaNet",
        r"value_heads: 4",
    ):
        assert re.search(expected, text), expected
    assert "mixers" not in run("info", str(folder))


def test_info_spec(folder: Path) -> None:
    text = run("info", str(folder), "--spec")
    assert "layers 0 to 1:" in text
    assert "kv_heads: 2" in text


def test_generate_continues_a_prompt(folder: Path) -> None:
    tokenizer = Tokenizer(Config(folder))
    ids = tokenizer.encode("Hello", add_bos=True)
    expected = tokenizer.decode(torch.tensor(greedy(folder, ids, 12)))
    assert run("generate", str(folder), "Hello", "--raw", "-n", "12", "-q") == expected + "\n"
    assert run("generate", str(folder), "-", "--raw", "-n", "12", "-q", input="Hello") == expected + "\n"


def test_generate_goes_through_the_chat_template(folder: Path) -> None:
    tokenizer = Tokenizer(Config(folder))
    prompt = "<s>system: Be brief.\n<s>user: Hi\nassistant:"
    ids = tokenizer.encode(prompt, encode_special_tokens=True)
    expected = tokenizer.decode(torch.tensor(greedy(folder, ids, 5)))
    assert run("generate", str(folder), "Hi", "--system", "Be brief.", "-n", "5", "-q") == expected + "\n"


def test_the_same_seed_gives_the_same_text(folder: Path) -> None:
    texts = [run("generate", str(folder), "Hi", "-n", "20", "-t", "1.5", "--seed", s, "-q") for s in "001"]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_every_option_has_a_long_name(folder: Path) -> None:
    short = run("generate", str(folder), "Hi", "-n", "9", "-t", "1.5", "-q")
    assert run("generate", str(folder), "Hi", "-n", "9", "--temperature", "1.5", "--quiet") == short
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        for one in command.params:
            has_long_name = one.param_type_name == "argument" or any(word[:2] == "--" for word in one.opts)
            assert has_long_name, (name, one.name)


def test_quiet_hides_progress_and_statistics(folder: Path) -> None:
    done = CliRunner().invoke(app, ["generate", str(folder), "Hi", "-n", "3"])
    assert "Loading" in done.stderr
    assert "Loading" not in done.stdout  # standard output has the answer only
    assert "tokens/s" in done.stderr


def test_a_prompt_longer_than_the_context_is_an_error(folder: Path) -> None:
    with pytest.raises(InputError, match="shorten the prompt"):
        run("generate", str(folder), "x" * 600)
    with pytest.raises(InputError, match="max-new-tokens"):
        run("generate", str(folder), "x", "-n", "0")
    with pytest.raises(InputError, match="temperature"):
        run("generate", str(folder), "x", "-t", "nan")
    with pytest.raises(InputError, match="chat template"):
        run("generate", str(folder), "x", "--raw", "--system", "y")
    with pytest.raises(InputError, match="quote the prompt"):
        run("generate", str(folder), "x", "y")
    with pytest.raises(ModelNotFound):
        run("info", str(folder / "nowhere"))


def test_generate_with_a_model_and_no_prompt_is_an_error(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")
    for model in (folder, file, tmp_path):
        with pytest.raises(InputError, match="is a model, and there is no prompt"):
            run("generate", str(model))
    assert not _is_model(str(folder / "nowhere"))
    assert not _is_model("Why is the sky blue? " * 1000)


def test_convert_rewrites_a_model(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "new"
    done = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["convert", str(folder), str(target), "--shard-size", "1"])
    assert done.exit_code == 0, done.output
    assert f"{target}: 4 files, " in done.stdout
    assert "Converting" in done.stderr
    expected = run("generate", str(folder), "Hi", "-n", "8", "-q")
    assert run("generate", str(target), "Hi", "-n", "8", "-q") == expected
    with pytest.raises(InputError, match="overwrite"):
        run("convert", str(folder), str(target), "-q")
    assert run("convert", str(folder), str(target), "--to", "dense", "--overwrite", "-q") == ""
    with pytest.raises(Unsupported, match=r"layers\.0\.attn\.q is stored as dense"):
        run("convert", str(folder), str(tmp_path / "other"), "--to", "exl2")


def test_errors_are_one_line_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "exlm.cli", "info", str(tmp_path / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("ModelNotFound: There is no")
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full disk to write to")
def test_a_full_disk_is_reported_in_one_line(folder: Path) -> None:
    command = [sys.executable, "-m", "exlm.cli", "generate", str(folder), "Hi", "-n", "3", "-q"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("OSError: [Errno 28] No space left")
    assert "Traceback" not in done.stderr


def test_characters_the_terminal_cannot_show_are_replaced(folder: Path) -> None:
    command = [sys.executable, "-m", "exlm.cli", "info", str(folder)]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "latin-1"}, timeout=120)
    assert done.returncode == 0, done.stderr
    assert b"0?1" in done.stdout  # the dash between the first and the last layer


def test_version() -> None:
    text = run("--version")
    assert text.startswith("exlm 0.")
    command = [sys.executable, "-m", "exlm", "--version"]  # `exlm` need not be on the PATH
    assert subprocess.run(command, capture_output=True, text=True, timeout=120).stdout == text


def test_the_readme_example(folder: Path) -> None:
    code = (Path(__file__).parents[2] / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert len(code.strip().splitlines()) <= 12
    names: dict[str, object] = {}
    exec(compile(code.replace("/path/to/model", str(folder)), "README.md", "exec"), names)
    assert isinstance(names["llm"], LLM)


COMMANDS = (
    "generate",
    "chat",
    "serve",
    "batch",
    "bench",
    "tune",
    "info",
    "plan",
    "quantize",
    "eval",
    "convert",
    "cache",
)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_does_not_import_torch(command: str) -> None:
    """Importing torch takes one to two seconds, and help texts do not need it."""
    code = (
        "import sys\n"
        f"sys.argv = ['exlm', *{[command] if command else []!r}, '--help']\n"
        "from exlm.cli import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as done:\n"
        "    assert not done.code, done.code\n"
        "assert 'torch' not in sys.modules, 'imported torch'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_every_command_is_in_the_help_test() -> None:
    names = {one.name or one.callback.__name__ for one in app.registered_commands if one.callback}
    assert names == set(COMMANDS)


def test_plan_names_every_cache_type() -> None:
    text = run("plan", "--help")
    assert all(name in text for name in CACHES)
