"""M-RoPE positions against a token-by-token definition, and against transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exlm import Cache, Config, MMEmbedding, Model
from exlm.multimodal import mrope_positions
from tests.models import zoo

MODEL: Any = SimpleNamespace(config=SimpleNamespace(hidden_size=2))

# tokens of text before, frames, rows, columns, text tokens of the embedding on each side of the image
Piece = tuple[int, int, int, int, int]


def expected_positions(pieces: list[Piece]) -> list[list[int]]:
    """Each token's positions, by the definition."""
    out, free = [], 0
    for text, frames, rows, columns, side in pieces:
        for _ in range(text + side):
            out.append([free] * 3)
            free += 1
        base = free
        for t in range(frames):
            for h in range(rows):
                for w in range(columns):
                    out.append([base + t, base + h, base + w])
                    free = max(free, base + max(t, h, w) + 1)
        for _ in range(side):
            out.append([free] * 3)
            free += 1
    return out


sizes = st.integers(1, 4)


@given(st.lists(st.tuples(st.integers(0, 5), sizes, sizes, sizes, st.integers(0, 2)), max_size=5), st.booleans())
def test_positions_match_the_definition(pieces: list[Piece], merged: bool) -> None:
    ids, embeddings = [], []
    for text, frames, rows, columns, side in pieces:
        grid = (frames, rows * (2 if merged else 1), columns * (2 if merged else 1))
        count = frames * rows * columns + 2 * side
        one = MMEmbedding(MODEL, torch.zeros(count, 2), thw_grid=grid, pre_tokens=side, post_tokens=side)
        ids += [7] * text + one.get_ids()
        embeddings.append(one)
    assert mrope_positions(ids, embeddings).T.tolist() == expected_positions(pieces)


def test_an_embedding_without_a_grid_has_positions_like_text() -> None:
    one = MMEmbedding(MODEL, torch.zeros(4, 2))
    assert mrope_positions([3, *one.get_ids(), 4], [one], start=10).tolist() == [list(range(10, 16))] * 3


@pytest.mark.parametrize("chunk", [100, 9])
def test_logits_are_those_of_transformers(chunk: int, tmp_path: Path) -> None:
    oracle = zoo.build("Qwen2VLForConditionalGeneration", tmp_path / "model")
    config = Config(oracle.folder)
    config.max_input_len = chunk
    model = Model(config)
    model.load()
    pieces: list[Piece] = [(3, 1, 2, 4, 1), (2, 2, 3, 2, 0)]
    tokens = torch.randint(0, 100, (2, len(expected_positions(pieces)) + 4))
    ids, embeddings, at = tokens.clone(), [], 0
    table = model._require_loaded().decoder.embedding.lookup
    for text, frames, rows, columns, side in pieces:
        at += text
        count = frames * rows * columns + 2 * side
        for row in range(2):
            vectors = table(tokens[row : row + 1, at : at + count])[0]
            grid = (frames, 2 * rows, 2 * columns)
            one = MMEmbedding(model, vectors, thw_grid=grid, pre_tokens=side, post_tokens=side)
            ids[row, at : at + count] = one.get_ids_tensor()[0]
            embeddings.append(one)
        at += count
    expected = expected_positions(pieces)
    after = max(map(max, expected)) + 1
    positions = torch.tensor([*expected, *([after + i] * 3 for i in range(4))]).T[:, None].expand(3, 2, -1)
    want = oracle.logits_mrope(tokens, positions)
    got = model.forward(ids, Cache(model, batch_size=2, max_seq_len=64), indexed_embeddings=embeddings)
    assert float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max()) < 1e-5
    extras = model.make_extras(ids[0].tolist(), None, embeddings)
    assert torch.equal(extras.mrope_slice(5, 40)[:, : ids.shape[1] - 5], positions[:, 0, 5:])
    assert extras.mrope_slice(40, 42).tolist() == [[40 + after + 4 - ids.shape[1], 41 + after + 4 - ids.shape[1]]] * 3
