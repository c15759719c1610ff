"""`make demo`: answers a question with the default model, which is downloaded the first time.

Usage: python scripts/demo.py [QUESTION]. Runs `exlm generate`.
"""

from __future__ import annotations

import sys

from exlm import ExlmError
from exlm.cli.__main__ import app
from exlm.hub import find_model

QUESTION = "What is the capital of France?"


def main(words: list[str]) -> None:
    """Find the model and stream its answer."""
    question = " ".join(words) or QUESTION
    print(f"exlm: a small language model on this machine answers: {question}", flush=True)
    try:
        model = find_model(progress=True)
        app(["generate", "--", str(model), question], prog_name="exlm")
    except ExlmError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1:])
