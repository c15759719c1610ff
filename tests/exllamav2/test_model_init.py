"""`model_init`, the command line that exllamav2's scripts share."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from exllamav2 import ExLlamaV2Cache, model_init
from exlm import InputError


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    model_init.add_args(parser)
    return parser.parse_args(list(words))


def test_a_script_loads_a_model(folder: Path) -> None:
    args = parse("-m", str(folder))
    model_init.check_args(args)
    model, tokenizer = model_init.init(args, max_output_len=16, max_batch_size=2, max_input_len=512)
    assert model.loaded
    assert (model.config.max_output_len, model.config.max_batch_size, model.config.max_input_len) == (
        16,
        2,
        512,
    )
    ids = tokenizer.encode("Hello", add_bos=True)
    assert model.forward(ids, last_id_only=True).shape[:2] == (1, 1)


def test_options_become_config(folder: Path) -> None:
    words = (
        "-l 256 -rs 2.0 -ra 1.5 -nfa -nxf -nsdpa -ng -ept 2 -fst -ic -chunk 128",
        "--length 256 --rope_scale 2.0 --rope_alpha 1.5 --no_flash_attn --no_xformers --no_sdpa --no_graphs "
        "--experts_per_token 2 --fast_safetensors --ignore_compatibility --chunk_size 128",
    )
    for spelling in words:
        args = parse("-m", str(folder), *spelling.split())
        model, _ = model_init.init(args, skip_load=True)
        config = model.config
        assert not model.loaded
        assert (config.max_seq_len, config.scale_pos_emb, config.scale_alpha_value) == (256, 2.0, 1.5)
        assert config.no_flash_attn
        assert config.no_xformers
        assert config.no_sdpa
        assert config.no_graphs
        assert config.num_experts_per_token == 2
        assert (config.max_input_len, config.max_attention_size) == (128, 128**2)
        assert config.max_output_len is None
        model_init.post_init_load(model, args)
        assert model.loaded


def test_an_option_without_effect_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = parse("-m", str(folder), "-nsdpa")
    model_init.init(args, skip_load=True, quiet=True)
    assert not caplog.messages
    model_init.init(args, skip_load=True)
    assert "--no_sdpa has no effect" in caplog.text


def test_yarn_and_low_memory(folder: Path) -> None:
    model, _ = model_init.init(parse("-m", str(folder), "-ry", "4", "-l", "4096", "-lm"), skip_load=True)
    assert model.config.yarn_rope_factor == 4
    assert model.config.max_input_len == 1024


def test_auto_split_leaves_the_model_unloaded(folder: Path) -> None:
    args = parse("-m", str(folder), "-gs", "auto")
    with pytest.raises(InputError, match="Auto split not allowed"):
        model_init.init(args)
    model, _ = model_init.init(args, allow_auto_split=True, quiet=True, benchmark=True)
    assert not model.loaded
    cache = ExLlamaV2Cache(model, lazy=True)
    model.load_autosplit(cache)
    model.forward(torch.tensor([[1, 2, 3]]), cache)
    assert cache.current_seq_len == 3


def test_unsupported_options_are_errors(folder: Path) -> None:
    at = ("-m", str(folder))
    with pytest.raises(InputError, match="load_in_q4 is not supported: quantise"):
        model_init.init(parse(*at, "-lq4"), skip_load=True)
    with pytest.raises(InputError, match="as in 20,24; found '20;24'"):
        model_init.init(parse(*at, "-gs", "20;24"))
    with pytest.raises(InputError, match="max_input_len must be a whole number"):
        model_init.init(parse(*at, "-chunk", "0"))


def test_tensor_parallel_over_the_available_gpus(folder: Path) -> None:
    for words in (["-tp"], ["-tp", "-gs", "auto"]):
        model, _ = model_init.init(parse("-m", str(folder), *words))
        assert model.tp_context == max(1, torch.cuda.device_count())
        model.unload()


def test_a_split_over_one_device_loads(folder: Path) -> None:
    model, _ = model_init.init(parse("-m", str(folder), "-gs", "20.5"), benchmark=True)
    assert model.loaded


def test_a_split_ignores_numbers_beyond_the_available_gpus(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, _ = model_init.init(parse("-m", str(folder), "-gs", ",".join("8" * 9)))
    assert model.loaded
    count = max(1, torch.cuda.device_count())
    assert [line for line in caplog.messages if f"{[8.0] * (9 - count)} is ignored" in line] == caplog.messages
    assert len(caplog.messages) == 1


def test_missing_files_end_the_program(tmp_path: Path) -> None:
    for words, why in [
        ((), "No model directory specified"),
        (("-m", str(tmp_path / "none")), "Can't find model directory"),
        (("-m", str(tmp_path)), "Cannot find config.json"),
    ]:
        with pytest.raises(SystemExit, match=rf" ## Error: {why}"):
            model_init.check_args(parse(*words))
    for name, missing in [
        ("config.json", "tokenizer"),
        ("tokenizer.json", "safetensors"),
        ("model.safetensors", None),
    ]:
        (tmp_path / name).write_text(json.dumps({}))
        if missing is None:
            model_init.check_args(parse("-m", str(tmp_path)))
        else:
            with pytest.raises(SystemExit, match=missing):
                model_init.check_args(parse("-m", str(tmp_path)))
    alone = tmp_path / "alone" / "model.gguf"
    alone.parent.mkdir()
    alone.write_bytes(b"")
    model_init.check_args(parse("-m", str(alone)))
    model_init.check_args(parse("-m", str(alone.parent)))


def test_print_options(capsys: pytest.CaptureFixture[str]) -> None:
    model_init.print_options(parse("-m", "/models/[x]", "-l", "4096", "-ng"))
    assert capsys.readouterr().out == " -- Model: /models/[x]\n -- Options: length: 4096, no_graphs\n"
    model_init.print_options(parse("-m", "x"))
    assert capsys.readouterr().out.endswith("Options: none\n")
