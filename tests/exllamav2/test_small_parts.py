"""Timer, Intervention, helpers for devices, and placeholders."""

from __future__ import annotations

import importlib
import time
from typing import Any

import pytest
import torch

import exllamav2
from exllamav2.attn import ExLlamaV2Attention, assert_paged_attn
from exllamav2.compat import safe_move_tensor
from exllamav2.model import _torch_device
from exllamav2.server import ExLlamaV2WebSocketServer
from exllamav2.tokenizer import ExLlamaV2TokenizerBase, ExLlamaV2TokenizerHF, ExLlamaV2TokenizerSPM
from exlm import Unsupported


def test_a_timer_times_a_block_that_raises() -> None:
    with exllamav2.Timer() as timer:
        time.sleep(0.01)
    assert 0.01 <= timer.interval == timer.end_time - timer.start_time < 1
    with pytest.raises(KeyError), timer:
        raise KeyError
    assert 0 <= timer.interval < 0.01


class Double:
    """A layer that doubles its input."""

    name = "double"

    def forward(self, x: torch.Tensor, batch: str, *, kv: str) -> torch.Tensor:
        """Twice the states; the other arguments must arrive."""
        assert (batch, kv) == ("batch", "kv")
        return x * 2


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (None, None, 6),
        (lambda x: x + 1, None, 8),
        (None, lambda x: x + 1, 7),
        (lambda x: x + 1, lambda x: x + 1, 9),
    ],
)
def test_an_intervention_runs_around_a_layer(before: Any, after: Any, expected: int) -> None:
    made = exllamav2.Intervention(Double(), pre_forward=before, post_forward=after)
    assert made.forward(torch.tensor([3]), "batch", kv="kv").tolist() == [expected]
    assert made.name == "double"
    with pytest.raises(AttributeError):
        _ = made.no_such_thing
    with pytest.raises(AttributeError):
        _ = exllamav2.Intervention.__new__(exllamav2.Intervention).name


def test_importing_the_converter_names_its_successor() -> None:
    with pytest.raises(ImportError, match=r"`exlm quantize`, or with exlm\.quantize_model"):
        importlib.import_module("exllamav2.conversion.convert_exl2")


@pytest.mark.parametrize(
    ("made", "remedy"),
    [
        (exllamav2.ExLlamaV2VisionTower, "ExLlamaV2MMEmbedding"),
        (exllamav2.ExLlamaV2MultimodalProjector, "ExLlamaV2MMEmbedding"),
        (ExLlamaV2WebSocketServer, r"`exlm serve` .* ExLlamaV2DynamicGeneratorAsync"),
        (ExLlamaV2Attention, "model.forward"),
        (ExLlamaV2Attention.Params, "model.forward"),
        (ExLlamaV2Attention.PagedParams, "ExLlamaV2DynamicGenerator"),
        (ExLlamaV2TokenizerHF, "tokenizer_model"),
        (ExLlamaV2TokenizerSPM, "tokenizer_model"),
    ],
)
def test_a_placeholder_class_names_the_remedy(made: Any, remedy: str) -> None:
    with pytest.raises(Unsupported, match=remedy):
        made("model", base=None, tokenizer=None)
    with pytest.raises(RuntimeError):  # the type that scripts for exllamav2 catch
        made()


def test_the_progress_bar_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with exllamav2.util.get_basic_progress() as bar:
        task = bar.add_task("[red]Sample", total=4, name="Creating jobs")
        bar.update(task, advance=4)
    assert bar.finished
    assert "100%" in capsys.readouterr().out


def test_gpu_reports_work_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    held = torch.zeros(3, 77)
    exllamav2.util.cuda_sync_active()
    assert len(exllamav2.util.get_all_gpu_memory()) == torch.cuda.device_count()
    exllamav2.util.print_vram_usage()
    exllamav2.util.list_live_tensors()
    printed = capsys.readouterr().out
    assert "Peak memory: " in printed
    assert f"1 : {tuple(held.shape)}, torch.float32, cpu" in printed


def test_tensors_are_moved() -> None:
    one = torch.zeros(2)
    assert safe_move_tensor(one, "cpu") is one
    both = safe_move_tensor((one, [one]), _torch_device(-1), non_blocking=True)
    assert type(both) is tuple
    assert both[1][0] is one
    assert _torch_device(1) == "cuda:1"


def test_assert_paged_attn_passes() -> None:
    assert assert_paged_attn() is None


def test_tokenizer_model_has_the_methods_of_the_base_class(tokenizer: exllamav2.ExLlamaV2Tokenizer) -> None:
    assert isinstance(tokenizer.tokenizer_model, ExLlamaV2TokenizerBase)
    assert tokenizer.tokenizer is tokenizer.tokenizer_model
