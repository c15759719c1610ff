"""Sizes and options of small jobs: a tiny model, few rows of text."""

from __future__ import annotations

from typing import Any

TINY_SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
SMALL: dict[str, Any] = {"rows": 6, "length": 64, "report": False}
