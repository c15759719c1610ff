"""Every item of the checklist has a test that bears its number."""

from __future__ import annotations

import re
from pathlib import Path

ITEMS = 126


def test_no_item_is_left_out() -> None:
    texts = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py")]
    found = {int(number) for text in texts for number in re.findall(r"def test_item_(\d{3})_", text)}
    assert found == set(range(1, ITEMS + 1))
