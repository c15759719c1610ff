"""Real processes, over gloo: the same greedy tokens as one process for every format, cache and feature.

Each team does everything it is wanted for before it is let go: processes are dear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from exlm import Cache, InputError, Model, Unsupported
from exlm.parallel.shard import heads, ranges
from tests.lora import peft_folders as making
from tests.parallel.teams import (
    CODED,
    GREEDY,
    IDS,
    KINDS,
    PROMPTS,
    adapted,
    alone,
    asked,
    generator,
    killed,
    session,
    team,
)
from tests.parallel.zygote import Zygote

FORMATS = {"dense": "tiny-lm", "exl2": "tiny-lm-exl2-6.0bpw", "gptq": "tiny-lm-gptq-g128-act"}
Check = Callable[[Model, Model, Sequence[Path]], None]

ROUNDING = 5e-5
"""Between logits, of 16 at most, where ranks share layers: sums are added in another order."""
CODES = 1e-3
"""The same behind a coded cache: what lies between two codes may become the other one."""
DIGITS = 4e-3
"""The same where a processor multiplies codes: x has 16 bits within a group, and ranks cut groups."""


@pytest.fixture(scope="module", autouse=True)
def _zygote() -> Iterator[None]:
    """Ranks are forked: most of the time that a process takes to start is torch's."""
    with Zygote() as zygote, pytest.MonkeyPatch.context() as patch:
        patch.setattr("exlm.model.team.start", zygote.start)
        yield


@pytest.fixture(scope="module")
def adapters(fixtures_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two adapters of every matrix there is."""
    shapes, table = making.matrix_shapes(fixtures_dir / "tiny-lm"), ("model.embed_tokens", 2048, 256)
    folder = tmp_path_factory.mktemp("adapters")
    made = [
        making.write_adapter(folder / str(n), shapes, embedding=table, seed=n, size=0.5) for n in range(2)
    ]
    return [adapter.folder for adapter in made]


def apart(one: Tensor, two: Tensor) -> float:
    """How much two tensors differ, where they differ most."""
    return float((one - two).abs().max())


def same_answers(model: Model, whole: Model, adapters: Sequence[Path]) -> None:
    for place, (got, want) in enumerate(zip(asked(model), asked(whole), strict=True)):
        assert apart(got, want) < (ROUNDING if place < CODED else CODES)


def same_adapters(model: Model, whole: Model, adapters: Sequence[Path], bound: float = ROUNDING) -> None:
    """Every matrix is adapted, and rows of one batch use one, the other, both or none."""
    (texts, logits), (want_texts, want) = (adapted(one, adapters) for one in (model, whole))
    assert texts == want_texts
    assert len(set(texts)) == 4
    for one, two in zip(logits, want, strict=True):
        assert apart(one, two) <= bound


def caches_are_given_back(model: Model, whole: Model, adapters: Sequence[Path]) -> None:
    mirror = model.cache_mirror
    assert mirror is not None
    for _ in range(3):
        cache = Cache(model, max_seq_len=512)
        model.forward(IDS, cache)
        del cache
    assert len(mirror._dropped) == 1  # type: ignore[attr-defined]  # the others were told with the next order
    model.forward(IDS)
    assert not mirror._dropped  # type: ignore[attr-defined]


def a_refusal_breaks_nothing(model: Model, whole: Model, adapters: Sequence[Path]) -> None:
    class Own(Cache):
        """A cache nobody else knows."""

    with pytest.raises(Unsupported, match="cannot make a Own"):
        Own(model, max_seq_len=256)
    old = Cache(model, max_seq_len=256)
    old._layers = [layer.clone() for layer in old.layers]  # as if made for another load
    with pytest.raises(InputError, match="make a new one"):
        model.forward(IDS, old)
    with pytest.raises(InputError, match="exceed the model's configured length"):
        model.forward(torch.zeros(1, 4000, dtype=torch.int64))
    assert model._loaded is not None
    with pytest.raises(TypeError, match="cannot be handed"):
        model._loaded.decoder.replace("head", lambda head: head)
    assert model.forward(IDS).shape == (1, 40, 2048)


def the_last_rank_is_killed(model: Model, whole: Model, adapters: Sequence[Path]) -> None:
    killed(model, -1, adapters[0])


MORE: dict[tuple[str, int], list[Check]] = {  # what a team of some ranks is also asked
    ("dense", 2): [same_answers, caches_are_given_back, a_refusal_breaks_nothing],
    ("dense", 4): [same_answers, same_adapters, the_last_rank_is_killed],
    ("exl2", 2): [partial(same_adapters, bound=DIGITS)],
    ("exl2", 4): [the_last_rank_is_killed],
    ("gptq", 2): [the_last_rank_is_killed],
    ("gptq", 4): [],
}


@pytest.mark.parametrize(("form", "ranks"), MORE)
def test_a_team_says_what_one_process_says(
    fixtures_dir: Path, adapters: list[Path], form: str, ranks: int
) -> None:
    """In every cache: batches, cancelling, page copies and a draft model; then guesses from the text."""
    folder = fixtures_dir / FORMATS[form]
    whole, draft = alone(folder), alone(fixtures_dir / "tiny-lm-exl2-4.0bpw")
    with team(folder, ranks) as model:
        shared_as_it_should_be(model, whole, ranks)
        for kind in KINDS:
            texts = []
            for one in (model, whole):
                drafting = {"draft_model": draft, "draft_cache": kind(draft, max_seq_len=1280)}
                texts.append(session(one, kind, **drafting))
            assert texts[0] == texts[1], kind.__name__
        plain, guessed, led = (
            generator(model, **options).generate(PROMPTS[0], 10, gen_settings=GREEDY)
            for options in (
                {},
                {"use_ngram_draft": True},
                {"draft_model": model, "draft_cache": Cache(model, max_seq_len=1280)},
            )
        )
        assert plain == guessed == led == generator(whole).generate(PROMPTS[0], 10, gen_settings=GREEDY)
        for check in MORE[form, ranks]:
            check(model, whole, adapters)


def shared_as_it_should_be(model: Model, whole: Model, ranks: int) -> None:
    """Two key/value heads: of four ranks two have the same. The head is cut by words, a cache by heads."""
    spec, loaded = whole.config.spec, model._loaded
    assert loaded is not None
    shares = [heads(spec.layers[0].attn, rank, ranks) for rank in range(ranks)]
    assert [share.kv for share in shares] == ([(0, 1)] * (ranks // 2) + [(1, 2)] * (ranks // 2))
    assert [shape.kv_heads for shape in loaded.shapes] == [1] * 4
    joined = loaded.decoder.head.linear
    own = joined.inner.out_features  # type: ignore[attr-defined]
    assert (own, joined.out_features) == (ranges(spec.vocab, ranks)[0][1], spec.vocab)
    assert model.tp_context == ranks
    for kind in KINDS:
        shared, one = kind(model, max_seq_len=512), kind(whole, max_seq_len=512)
        assert sum(shared.footprint()) * 2 == sum(one.footprint())


@pytest.mark.parametrize(("form", "ranks", "victim"), [("exl2", 2, 1), ("dense", 3, 1)])
def test_a_pipeline_says_what_one_process_says(
    fixtures_dir: Path, adapters: list[Path], form: str, ranks: int, victim: int
) -> None:
    """To the bit: every rank does with its layers what one process does with them."""
    folder = fixtures_dir / FORMATS[form]
    whole = alone(folder)
    with team(folder, ranks, "load_pipeline") as model:
        assert all(map(torch.equal, asked(model), asked(whole)))
        for kind in KINDS[::2]:
            assert session(model, kind, use_ngram_draft=True) == session(whole, kind, use_ngram_draft=True)
        same_adapters(model, whole, adapters, bound=0)
        killed(model, victim - 1, adapters[0])
