"""Sets every number of every family's config.json or GGUF metadata to hostile values, one at a time.

It runs in a process of its own (`python -m tests.families.hostile config`) under a memory limit, and each
case has a few seconds: a number that sizes a loop or an allocation shows as MemoryError or `CaseTimeout`. It
prints one line for each outcome that is neither a spec nor a typed error.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors.torch import save_file

from exlm import Config, ExlmError, Model, spec
from exlm.checkpoint.gguf_checkpoint import gguf_conversion
from exlm.families import FAMILIES, ConfigReader, build_spec
from exlm.families.gguf import config_from_metadata
from exlm.kernels.reference import frequencies
from exlm.spec.model import matrices
from tests.checkpoint.gguf_models import VARIANTS, metadata
from tests.families import gguf_hybrid_pairs
from tests.models.zoo_cases import CASES, Case
from tests.models.zoo_recipes import GEMMA, LLAMA, RECIPES, deep_merge

MEMORY = 2 << 30
"""Bytes that a case may add to the process."""

SECONDS = 5

HUGE = 10**9
HOSTILE: list[Any] = [HUGE, 2**31, 2**63, 10**400, 1e308, 1e-320, float("nan"), -1, 0, True, "3", [], {}]

CUSTOM: dict[str, dict[str, Any]] = {
    "GemmoeForCausalLM": {**GEMMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "IndexForCausalLM": LLAMA,
    "InternLM2ForCausalLM": {**LLAMA, "bias": False},
    "MiniCPMForCausalLM": {**LLAMA, "scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 40},
    "OrionForCausalLM": LLAMA,
    "YiForCausalLM": LLAMA,
}
"""The numbers of families that transformers does not know."""

ROPE_VARIANTS = (
    "llama-linear",
    "llama-dynamic",
    "llama-yarn-mscale",
    "llama-llama3",
    "phi3-longrope",
    "qwen3-moe-mixed",
    "qwen2-window",
)
"""Cases tested in addition to the first of each family, for keys that only these have."""

ROPE = (
    *("rope_theta", "partial_rotary_factor", "mrope_section", "rope_type", "type", "factor", "truncate"),
    *("original_max_position_embeddings", "attention_factor", "mscale", "mscale_all_dim", "beta_fast"),
    *("beta_slow", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor"),
)

GGUF_ROPE: dict[str, Any] = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.attn_factor": 1.0,
}

MAX_ROTARY_DIM = 1 << 17
"""Frequencies are computed only up to this rotary dimension: no weights have a larger one."""


class CaseTimeout(Exception):
    """A case took too long."""


def config_of(case: Case) -> dict[str, Any]:
    """The config.json of a model of the zoo, in the newer spelling."""
    overrides = {key: value for key, value in case.overrides.items() if key != "layout"}
    recipe = RECIPES.get(case.architecture)
    if recipe is None:
        numbers = deep_merge(CUSTOM[case.architecture], overrides)
    elif recipe.sub_config:
        numbers = deep_merge(recipe.numbers, {recipe.sub_config: overrides})
    else:
        numbers = deep_merge(recipe.numbers, overrides)
    return {"architectures": [case.architecture], **numbers}


def cases() -> list[Case]:
    """The first case of each family, and those with keys of their own."""
    first: dict[str, Case] = {}
    for case in CASES:
        first.setdefault(case.architecture, case)
    assert set(first) == set(FAMILIES)
    return [*first.values(), *(case for case in CASES if case.id in ROPE_VARIANTS)]


Keys = tuple[str, ...]


def paths(table: Mapping[str, Any], at: Keys = ()) -> Iterator[Keys]:
    """Every key of a nested table."""
    for key, value in table.items():
        yield (*at, key)
        if isinstance(value, Mapping):
            yield from paths(value, (*at, key))


def with_value(table: Mapping[str, Any], path: Keys, value: Any) -> dict[str, Any]:
    """The table with another value at a path; missing inner tables are created."""
    if len(path) == 1:
        return {**table, path[0]: value}
    inner = table.get(path[0])
    return {**table, path[0]: with_value(inner if isinstance(inner, Mapping) else {}, path[1:], value)}


def looked_up_keys(config: Mapping[str, Any]) -> set[Keys]:
    """The keys a family looks up, whether the file has them or not."""
    found: set[Keys] = set(paths(config))
    original_find = ConfigReader.find

    def find(self: ConfigReader, *keys: str) -> tuple[str, Any]:
        found.update(tuple(key.split(".")) for key in keys)
        return original_find(self, *keys)

    ConfigReader.find = find  # type: ignore[method-assign]
    try:
        build_spec(ConfigReader(config))
    finally:
        ConfigReader.find = original_find  # type: ignore[method-assign]
    if config.get("rope_parameters", {}).keys() - ROPE[:1] - {"rope_type"}:  # it names a scaling method
        found |= {(table, key) for table in ("rope_parameters", "rope_scaling") for key in ROPE}
    if "text_config" in config:
        inner = {("text_config", *path) for path in found if path[0] not in config}
        found = {path for path in found if path[0] in config} | inner
    return found


def use_spec(model: spec.Model) -> None:
    """Do what loading does with a spec before it opens any weights."""
    assert sum(1 for _ in matrices(model)) < 4 * 10**6
    for rope in {attn.rope for attn in model.attentions}:
        if rope is not None and rope.dim < MAX_ROTARY_DIM:
            frequencies(rope, model.max_positions)


Attempt = tuple[str, Callable[[], object]]


def configs() -> Iterator[Attempt]:
    """Every key of every family's config.json with every hostile value."""
    for case in cases():
        config = config_of(case)
        use_spec(build_spec(ConfigReader(config)))
        for path in sorted(looked_up_keys(config)):
            for value in HOSTILE:
                mutant = with_value(config, path, value)
                yield (
                    f"{case.id} {path} = {value!r:.30}",
                    lambda c=mutant: use_spec(build_spec(ConfigReader(c))),
                )
        for path in sorted(looked_up_keys(config)):  # sizes that agree with each other
            if path[-1].endswith("heads") or path[-1] == "n_head":
                pair = with_value(with_value(config, path, 10**9), (*path[:-1], "num_key_value_heads"), 10**9)
                pair = with_value(pair, (*path[:-1], "head_dim"), 8)
                yield (
                    f"{case.id} {path} and key/value heads",
                    lambda c=pair: use_spec(build_spec(ConfigReader(c))),
                )


def ggufs() -> Iterator[Attempt]:
    """Every key of every GGUF architecture's metadata with every hostile value."""

    def read(table: dict[str, Any]) -> None:
        use_spec(build_spec(ConfigReader(config_from_metadata(table, "x.gguf", tensors=["blk.0.attn_q.bias"]))))
        gguf_conversion(table, "x.gguf")

    tables = {variant: metadata(variant) for variant in VARIANTS}
    tables |= {name: gguf_hybrid_pairs.metadata(name) for name in gguf_hybrid_pairs.PAIRS}
    for variant, table in tables.items():
        arch = table["general.architecture"]
        recorder = RecordingDict(table | {f"{arch}.{key}": value for key, value in GGUF_ROPE.items()})
        read(recorder)
        for key in sorted(recorder.looked_up | set(recorder)):
            for value in [*HOSTILE, 2**64 - 1, [2**63] * 4, [True] * 2, ["a"] * 3]:
                yield f"{variant} {key} = {value!r:.30}", lambda t={**recorder, key: value}: read(t)


class RecordingDict(dict[str, Any]):
    """A dict that records which keys were looked up."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.looked_up: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.looked_up.add(key)
        return super().get(key, default)


def loads() -> Iterator[Attempt]:
    """Every family with hostile sizes, loaded from files that hold none of its weights."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_file({"nothing": torch.zeros(1)}, folder / "model.safetensors")
        for case in cases():
            config, seen = config_of(case), {build_spec(ConfigReader(config_of(case)))}
            for path in sorted(looked_up_keys(config)):
                try:
                    model = build_spec(ConfigReader(mutant := with_value(config, path, HUGE)))
                except ExlmError:
                    continue
                if model not in seen:
                    seen.add(model)
                    (folder / "config.json").write_text(json.dumps(mutant))
                    yield f"{case.id} {path} = {HUGE}", lambda: Model(Config(folder)).load()


def run_cases(attempts: Iterator[Attempt]) -> int:
    """Run each case and print those that end in anything but a spec or a typed error; their number."""
    memory_before = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (memory_before + MEMORY, resource.RLIM_INFINITY))
    signal.signal(signal.SIGALRM, _raise_timeout)
    count = 0
    for label, attempt in attempts:
        count += 1
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            attempt()
        except ExlmError:
            pass
        except (Exception, MemoryError) as error:
            print(f"{label}: {type(error).__name__} {str(error)[:100]}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return count


def _raise_timeout(signum: int, frame: FrameType | None) -> None:
    raise CaseTimeout


if __name__ == "__main__":
    print(run_cases({"config": configs, "gguf": ggufs, "load": loads}[sys.argv[1]]()), "cases")
