"""Where the documents have code, and how a block of it is executed."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

Code = Callable[[int, str], str]

BLOCKS = {
    0: {
        "Signature": "Import",
        "Import": "I/O Contract",
        "Simple Generation": "Generation with Sampling Settings",
        "Generation with Sampling Settings": "Batched Generation",
        "Batched Generation": "Generation with Stop Conditions",
        "Generation with Stop Conditions": "Related Pages",
    },
    1: {
        "Signature": "Import",
        "Import": "I/O Contract",
        "Basic Usage": "Batched Generation",
        "Batched Generation": "Generation with LoRA and Abort",
        "Generation with LoRA and Abort": "Key Methods",
    },
    2: {
        "Autoregressive Generation": "Token Healing",
        "Token Healing": "Classifier-Free Guidance",
    },
    3: {
        "Signature": "Import",
        "Import": "I/O Contract",
        "set_stop_conditions": "begin_stream_ex / stream_ex",
        "Basic Initialization": "With Speculative Decoding",
        "With Speculative Decoding": "Complete Streaming Chat Loop",
        "Complete Streaming Chat Loop": "Related Pages",
    },
    4: {},
}
"""Of each document the headings above its code, and what stands below it."""

CODE = re.compile(r"(from \S+ import|import|def|class|for|while|if) |print\(|\w+ = |\w+\.\w+\(|    \S")


def run(code: str, names: dict[str, Any], **paths: Path) -> dict[str, Any]:
    """Execute a block; what it defined is added to the names, and what it printed, as `printed`."""
    for name, path in paths.items():
        code = code.replace(f'"/path/to/{name}"', repr(str(path)))
    assert "/path/to" not in code
    with redirect_stdout(io.StringIO()) as shown:
        exec(compile(code, "<seed>", "exec"), names)
    return names | {"printed": shown.getvalue()}
