"""MMEmbedding: ids, aliases, sizes, grids, and invalid arguments."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from exlm import EMBEDDING_INDEX, InputError, MMEmbedding
from exlm.multimodal import embedding_spans

MODEL: Any = SimpleNamespace(config=SimpleNamespace(hidden_size=8))


def test_attributes() -> None:
    vectors = torch.randn(5, 8, dtype=torch.float16)
    one, two = (
        MMEmbedding(MODEL, vectors, pre_tokens=1, post_tokens=2),
        MMEmbedding(MODEL, vectors[None], "<pic>"),
    )
    assert one.length == two.length == 5
    assert EMBEDDING_INDEX == 10**9 <= one.first_index == two.first_index - 5
    assert one.get_ids() == list(range(one.first_index, one.first_index + 5))
    assert one.get_ids_tensor().tolist() == [one.get_ids()]
    assert one.get_vision_token_range() == (one.first_index + 1, one.first_index + 3)
    assert one.get_size_in_bytes() == 80
    assert one.text_alias == f"<$EMB_{one.first_index}$>"
    assert two.text_alias == "<pic>"
    assert (one.thw_grid, one.metadata, one.model) == (None, {}, MODEL)


def test_the_vectors_are_copied() -> None:
    vectors = torch.zeros(2, 8)
    one = MMEmbedding(MODEL, vectors)
    vectors += 1
    assert not one.embeddings.any()


def test_ids_are_unique_across_threads() -> None:
    made: list[MMEmbedding] = []
    threads = [
        threading.Thread(target=lambda: made.extend(MMEmbedding(MODEL, torch.ones(3, 8)) for _ in range(200)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({number for one in made for number in one.get_ids()}) == 4 * 200 * 3


@pytest.mark.parametrize(
    ("vectors", "match"),
    [
        (torch.zeros(3, 7), r"doesn't match.*\(length, 8\), found \(3, 7\)"),
        (torch.zeros(8), "found \\(8,\\)"),
        (torch.zeros(0, 8), "found \\(0, 8\\)"),
        (torch.zeros(2, 3, 8), "found \\(2, 3, 8\\)"),
        (torch.zeros(3, 8, dtype=torch.long), "floats, found torch.int64"),
        (torch.full((1, 8), float("nan")), "NaN"),
        ([[0.0] * 8], "found list"),
    ],
)
def test_wrong_vectors(vectors: Any, match: str) -> None:
    with pytest.raises(InputError, match=match):
        MMEmbedding(MODEL, vectors)


def test_grids() -> None:
    assert MMEmbedding(MODEL, torch.zeros(6, 8), thw_grid=(1, 2, 3)).grid == (1, 2, 3)
    assert MMEmbedding(MODEL, torch.zeros(8, 8), thw_grid=[1, 4, 6], pre_tokens=1, post_tokens=1).grid == (
        1,
        2,
        3,
    )
    for grid in ((1, 2, 4), (2, 3), (6, 1, 0), (1, 5, 5), (1, 2**62, 2**62), (10**30, 1, 1)):
        with pytest.raises(InputError, match="thw_grid"):
            MMEmbedding(MODEL, torch.zeros(6, 8), thw_grid=grid)
    for sides in ((3, 3), (-1, 0), (6, 0)):
        with pytest.raises(InputError, match="leave none"):
            MMEmbedding(MODEL, torch.zeros(6, 8), pre_tokens=sides[0], post_tokens=sides[1])
    with pytest.raises(InputError, match="text_alias"):
        MMEmbedding(MODEL, torch.zeros(6, 8), "")


def test_grids_in_the_types_that_image_processors_return() -> None:
    batched = torch.tensor([[1, 2, 3]])  # of one image
    for grid in (batched[0], tuple(batched[0]), batched[0].numpy()):
        assert MMEmbedding(MODEL, torch.zeros(6, 8), thw_grid=grid).grid == (1, 2, 3)
    for wrong in (batched, 6, (1, None, 6), (1.0, 2.5, 3.0)):
        with pytest.raises(InputError, match="thw_grid must be three sizes"):
            MMEmbedding(MODEL, torch.zeros(6, 8), thw_grid=wrong)  # type: ignore[arg-type]


def test_wrong_text_counts_and_aliases() -> None:
    side: Any = "1"
    with pytest.raises(InputError, match="post_tokens must be a whole number, found '1'"):
        MMEmbedding(MODEL, torch.zeros(6, 8), post_tokens=side)
    alias: Any = 5
    with pytest.raises(InputError, match="text_alias must be a text, found 5"):
        MMEmbedding(MODEL, torch.zeros(6, 8), alias)


def test_spans_among_ids() -> None:
    one, two = MMEmbedding(MODEL, torch.randn(3, 8)), MMEmbedding(MODEL, torch.randn(2, 8))
    a, b = one.first_index, two.first_index
    ids = [5, a, a + 1, a + 2, a, 7, a + 2, b, b + 1, a + 1, a + 1]
    found = [(run.start, run.offset, run.length, run.embedding) for run in embedding_spans(ids, [one, two])]
    assert found == [
        (1, 0, 3, one), (4, 0, 1, one), (6, 2, 1, one), (7, 0, 2, two), (9, 1, 1, one), (10, 1, 1, one),
    ]  # fmt: skip
    rows = torch.full((len(ids), 8), float("nan"))
    for run in embedding_spans(ids, [one, two]):
        rows[run.start : run.start + run.length] = run.vectors
    want = {number: vector for e in (one, two) for number, vector in zip(e.get_ids(), e.embeddings, strict=True)}
    for number, vector in zip(ids, rows, strict=True):
        assert bool(vector.isnan().all()) if number < 10**9 else torch.equal(vector, want[number])
    with pytest.raises(InputError, match=rf"Id {b} stands for.*given: {a} to {a + 2}"):
        list(embedding_spans([1, b], [one]))
