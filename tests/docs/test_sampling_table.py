"""The table of values at the end of docs/sampling.md is the one of `exlm.sampler_chain`."""

from __future__ import annotations

from exlm import Settings
from exlm.sampler_chain import STEPS, UNBOUNDED, Bounds, StepSetting
from tests.conftest import ROOT

HEADING = "## All values"


def bounds_text(bounds: Bounds) -> str:
    if bounds == UNBOUNDED:
        return "any"
    low, high = (f"{end:g}" if end is not None and abs(end) < 1e6 else end for end in (bounds.minimum, bounds.maximum))
    if bounds.exclusive:
        return f"> {low}" if high is None else f"> {low}, ≤ {high}"
    if low is None or high is None:
        return f"≥ {low}" if high is None else f"≤ {high}"
    return f"{low} to {high}"


def row(step: str, setting: StepSetting) -> str:
    default = getattr(Settings, setting.name)
    neutral = "" if setting.neutral is None else f"{setting.neutral:g}"
    if setting.type is bool:
        neutral, valid, api = "False" if setting.neutral is not None else "", "True, False", "true, false"
    elif setting.type is frozenset:
        valid, api = "ids or None", "up to 256 ids and strings"
    else:
        valid, api = bounds_text(setting.bounds), bounds_text(setting.api)
        valid = f"{valid}, or None" if setting.optional else valid
        if setting.active_bounds != UNBOUNDED:
            valid = f"{bounds_text(setting.active_bounds)} while the step is active"
    return f"| {step} | `{setting.name}` | {default} | {neutral} | {valid} | {api} |"


def table() -> str:
    head = "| step | setting | default | neutral | values | HTTP API |\n|---|---|---|---|---|---|\n"
    return head + "\n".join(row(step.name, setting) for step in STEPS for setting in step.settings) + "\n"


def test_the_page_prints_the_table() -> None:
    page = (ROOT / "docs/sampling.md").read_text(encoding="utf-8")
    section = page.split(HEADING, 1)[1].split("\n## ", 1)[0]
    printed = section[section.index("| step |") :]
    assert printed.strip() == table().strip()
