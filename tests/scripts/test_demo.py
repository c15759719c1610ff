"""scripts/demo.py: finds the default model and runs `exlm generate`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from exlm import ModelNotFound

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "demo.py"


@pytest.fixture
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.mark.parametrize(
    ("words", "question"), [([], "What is the capital of France?"), (["--why", "not?"], "--why not?")]
)
def test_the_question_is_passed_to_exlm_generate(
    demo: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    question: str,
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(demo, "find_model", lambda progress: Path("x.gguf"))
    monkeypatch.setattr(demo, "app", lambda arguments, **names: ran.append(arguments))
    demo.main(words)
    assert ran == [["generate", "--", "x.gguf", question]]
    assert question in capsys.readouterr().out


def test_an_error_is_one_message(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_model(**options: Any) -> Path:
        raise ModelNotFound("no network.")

    monkeypatch.setattr(demo, "find_model", find_model)
    with pytest.raises(SystemExit) as caught:
        demo.main([])
    assert caught.value.code == "ModelNotFound: no network."
