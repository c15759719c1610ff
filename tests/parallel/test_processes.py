"""Ranks as processes over gloo: the same greedy tokens as one process, for every format, cache and feature.

Each set of workers runs all its checks before it is stopped, since starting processes is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from exlm import Cache, InputError, Model, Unsupported
from exlm.parallel.shard import aligned_ranges, heads_of_rank
from tests.lora import peft_folders as peft
from tests.parallel.fork_server import ForkServer
from tests.parallel.process_models import (
    CACHE_CLASSES,
    FIRST_QUANTIZED,
    GREEDY,
    IDS,
    PROMPTS,
    forward_outputs,
    kill_worker,
    make_generator,
    parallel_model,
    run_session,
    run_with_adapters,
    single_process_model,
)

FORMATS = {"dense": "tiny-lm", "exl2": "tiny-lm-exl2-6.0bpw", "gptq": "tiny-lm-gptq-g128-act"}
Check = Callable[[Model, Model, Sequence[Path]], None]

ROUNDING_TOLERANCE = 5e-5
"""Largest difference of logits (at most 16) in tensor parallel, which adds in another order."""
QUANTIZED_CACHE_TOLERANCE = 1e-3
"""The same with a quantised cache: a number between two codes may take the other one."""
INT_DOT_TOLERANCE = 4e-3
"""The same with integer products on the CPU: activations have 16 bits a group, and ranks cut groups."""


@pytest.fixture(scope="module", autouse=True)
def _fork_server() -> Iterator[None]:
    """Fork ranks: importing torch takes most of a process's start."""
    with ForkServer() as fork_server, pytest.MonkeyPatch.context() as patch:
        patch.setattr("exlm.model.multiprocess.start_workers", fork_server.start)
        yield


@pytest.fixture(scope="module")
def adapters(fixtures_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two LoRAs of every matrix."""
    shapes, table = peft.matrix_shapes(fixtures_dir / "tiny-lm"), ("model.embed_tokens", 2048, 256)
    folder = tmp_path_factory.mktemp("adapters")
    made = [peft.write_adapter(folder / str(n), shapes, embedding=table, seed=n, size=0.5) for n in range(2)]
    return [adapter.folder for adapter in made]


def max_difference(one: Tensor, two: Tensor) -> float:
    """Largest absolute difference."""
    return float((one - two).abs().max())


def check_same_outputs(model: Model, single: Model, adapters: Sequence[Path]) -> None:
    for index, (got, want) in enumerate(zip(forward_outputs(model), forward_outputs(single), strict=True)):
        assert max_difference(got, want) < (
            ROUNDING_TOLERANCE if index < FIRST_QUANTIZED else QUANTIZED_CACHE_TOLERANCE
        )


def check_same_adapters(
    model: Model, single: Model, adapters: Sequence[Path], bound: float = ROUNDING_TOLERANCE
) -> None:
    """LoRAs on every matrix; rows of one batch use one, the other, both or none."""
    (texts, logits), (want_texts, want) = (run_with_adapters(one, adapters) for one in (model, single))
    assert texts == want_texts
    assert len(set(texts)) == 4
    for one, two in zip(logits, want, strict=True):
        assert max_difference(one, two) <= bound


def check_worker_caches_are_released(model: Model, single: Model, adapters: Sequence[Path]) -> None:
    replicator = model.cache_replicator
    assert replicator is not None
    for _ in range(3):
        cache = Cache(model, max_seq_len=512)
        model.forward(IDS, cache)
        del cache
    assert len(replicator._dropped) == 1  # type: ignore[attr-defined]  # the other ids were sent with later messages
    model.forward(IDS)
    assert not replicator._dropped  # type: ignore[attr-defined]


def check_refusals_break_nothing(model: Model, single: Model, adapters: Sequence[Path]) -> None:
    class UnknownCache(Cache):
        """A cache class that workers do not know."""

    with pytest.raises(Unsupported, match="cannot make a UnknownCache"):
        UnknownCache(model, max_seq_len=256)
    old = Cache(model, max_seq_len=256)
    old._layers = [layer.clone() for layer in old.layers]  # as if made for another load
    with pytest.raises(InputError, match="make a new one"):
        model.forward(IDS, old)
    with pytest.raises(InputError, match="exceed the model's configured length"):
        model.forward(torch.zeros(1, 4000, dtype=torch.int64))
    assert model._loaded is not None
    with pytest.raises(TypeError, match="cannot receive"):
        model._loaded.decoder.replace("head", lambda head: head)
    assert model.forward(IDS).shape == (1, 40, 2048)


def check_a_killed_rank_is_reported(model: Model, single: Model, adapters: Sequence[Path]) -> None:
    kill_worker(model, -1, adapters[0])


EXTRA_CHECKS: dict[tuple[str, int], list[Check]] = {  # further checks for some numbers of ranks
    ("dense", 2): [check_same_outputs, check_worker_caches_are_released, check_refusals_break_nothing],
    ("dense", 4): [check_same_outputs, check_same_adapters, check_a_killed_rank_is_reported],
    ("exl2", 2): [partial(check_same_adapters, bound=INT_DOT_TOLERANCE)],
    ("exl2", 4): [check_a_killed_rank_is_reported],
    ("gptq", 2): [check_a_killed_rank_is_reported],
    ("gptq", 4): [],
}


@pytest.mark.parametrize(("form", "ranks"), EXTRA_CHECKS)
def test_tensor_parallel_equals_one_process(fixtures_dir: Path, adapters: list[Path], form: str, ranks: int) -> None:
    """With every cache: batches, cancelling, page copies and a draft model; then n-gram drafts."""
    folder = fixtures_dir / FORMATS[form]
    single, draft = single_process_model(folder), single_process_model(fixtures_dir / "tiny-lm-exl2-4.0bpw")
    with parallel_model(folder, ranks) as model:
        check_shards(model, single, ranks)
        for kind in CACHE_CLASSES:
            texts = []
            for one in (model, single):
                draft_options = {"draft_model": draft, "draft_cache": kind(draft, max_seq_len=1280)}
                texts.append(run_session(one, kind, **draft_options))
            assert texts[0] == texts[1], kind.__name__
        plain, ngram_draft, model_draft = (
            make_generator(model, **options).generate(PROMPTS[0], 10, gen_settings=GREEDY)
            for options in (
                {},
                {"use_ngram_draft": True},
                {"draft_model": model, "draft_cache": Cache(model, max_seq_len=1280)},
            )
        )
        assert (
            plain == ngram_draft == model_draft == make_generator(single).generate(PROMPTS[0], 10, gen_settings=GREEDY)
        )
        for check in EXTRA_CHECKS[form, ranks]:
            check(model, single, adapters)


def check_shards(model: Model, single: Model, ranks: int) -> None:
    """Two kv heads: two of four ranks replicate one. The head is cut by vocabulary, a cache by heads."""
    spec, loaded = single.config.spec, model._loaded
    assert loaded is not None
    heads = [heads_of_rank(spec.layers[0].mixer, rank, ranks) for rank in range(ranks)]
    assert [one.kv for one in heads] == ([(0, 1)] * (ranks // 2) + [(1, 2)] * (ranks // 2))
    assert [shape.kv_heads for shape in loaded.layer_shapes] == [1] * 4
    head = loaded.decoder.head.linear
    own_outputs = head.inner.out_features  # type: ignore[attr-defined]
    assert (own_outputs, head.out_features) == (aligned_ranges(spec.vocab, ranks)[0][1], spec.vocab)
    assert model.tp_context == ranks
    for kind in CACHE_CLASSES:
        shared, one = kind(model, max_seq_len=512), kind(single, max_seq_len=512)
        assert sum(shared.footprint()) * 2 == sum(one.footprint())


@pytest.mark.parametrize(("form", "ranks", "victim"), [("exl2", 2, 1), ("dense", 3, 1)])
def test_pipeline_parallel_equals_one_process(
    fixtures_dir: Path, adapters: list[Path], form: str, ranks: int, victim: int
) -> None:
    """Bit for bit: every rank runs its layers as one process would."""
    folder = fixtures_dir / FORMATS[form]
    single = single_process_model(folder)
    with parallel_model(folder, ranks, "load_pipeline") as model:
        assert all(map(torch.equal, forward_outputs(model), forward_outputs(single)))
        for kind in CACHE_CLASSES[::2]:
            assert run_session(model, kind, use_ngram_draft=True) == run_session(single, kind, use_ngram_draft=True)
        check_same_adapters(model, single, adapters, bound=0)
        kill_worker(model, victim - 1, adapters[0])
