"""Model.forward: the same logits for every way to call it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exlm import Cache, CacheFP16, CacheTooSmall, Config, InputError, Model, NotLoaded
from tests import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    model = Model(Config(tiny.make(tmp_path_factory.mktemp("tiny"))))
    model.load()
    return model


def ids(rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(3, 64, (rows, tokens))


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, atol=2e-5, rtol=1e-4)


def test_shape_and_precision(model: Model) -> None:
    logits = model.forward(ids(3, 11))
    assert logits.shape == (3, 11, 64)
    assert logits.dtype is torch.float32
    assert not logits.requires_grad


def test_the_last_token_only(model: Model) -> None:
    x = ids(2, 9)
    assert close(model.forward(x, last_id_only=True), model.forward(x)[:, -1:])


def test_preprocess_only_fills_the_cache_and_returns_none(model: Model) -> None:
    x, cache = ids(1, 40), Cache(model, max_seq_len=64)
    assert model.forward(x[:, :-1], cache, preprocess_only=True) is None
    assert cache.current_seq_len == 39
    assert close(model.forward(x[:, -1:], cache), model.forward(x)[:, -1:])


def test_preprocess_only_skips_the_last_mlp(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last layer's keys and values are needed."""
    blocks = model._require_loaded().decoder.blocks
    computed: list[int] = []
    for place, block in enumerate(blocks):
        plain = block.mlp.forward

        def counted(*given: Any, place: int = place, plain: Any = plain) -> torch.Tensor:
            computed.append(place)
            return plain(*given)

        monkeypatch.setattr(block.mlp, "forward", counted)
    x = ids(1, 100)
    model.forward(x, Cache(model, max_seq_len=256), preprocess_only=True)
    assert computed == [*range(len(blocks) - 1)]
    model.forward(x, Cache(model, max_seq_len=256), last_id_only=True)
    assert computed[len(blocks) - 1 :] == [*range(len(blocks))]


def test_a_cache_for_each_row(model: Model) -> None:
    texts = [ids(1, size) for size in (5, 17, 9)]
    caches = [Cache(model, max_seq_len=64 + 8 * size) for size in range(3)]
    for text, cache in zip(texts, caches, strict=True):
        model.forward(text[:, :-2], cache, preprocess_only=True)
    inputs = torch.cat([text[:, -2:] for text in texts])
    logits, state = model.forward(inputs, caches, return_last_state=True)
    assert close(logits, torch.cat([model.forward(text)[:, -2:] for text in texts]))
    assert state.shape[:2] == (3, 2)
    assert [cache.current_seq_len for cache in caches] == [5, 17, 9]
    for cache in caches:
        cache.current_seq_len -= 2
    offsets = torch.tensor([[0], [-1], [3]])
    moved = model.forward(inputs, caches, position_offsets=offsets, last_id_only=True)
    assert close(moved[:1], logits[:1, -1:])
    assert not close(moved[1:], logits[1:, -1:])
    assert model.forward(inputs, caches, preprocess_only=True) is None


def test_caches_that_are_not_one_for_each_row(model: Model) -> None:
    one, small = Cache(model, max_seq_len=64), Cache(model, max_seq_len=4)
    for caches, why in [
        ([one], "A list of 1 caches needs as many rows"),
        ([one, one], "in it twice"),
        ([one, None], "a list of caches, found list"),
        ("cache", "a list of caches, found str"),
        ([one, small], "Total sequence length exceeds"),
    ]:
        wrong: Any = caches
        with pytest.raises(InputError, match=why):
            model.forward(ids(2, 8), wrong)
    assert one.current_seq_len == 0


def test_rewinding(model: Model) -> None:
    x, cache = ids(1, 30), Cache(model, max_seq_len=64)
    first = model.forward(x, cache)
    cache.current_seq_len = 10
    assert close(model.forward(x[:, 10:], cache), first[:, 10:])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 3), st.integers(0, 999))
def test_any_chunking_gives_the_same_logits(model: Model, cuts: list[int], rows: int, seed: int) -> None:
    torch.manual_seed(seed)
    x = ids(rows, sum(cuts))
    cache = Cache(model, batch_size=rows, max_seq_len=sum(cuts))
    parts = [model.forward(piece, cache) for piece in x.split(cuts, 1)]
    assert close(torch.cat(parts, 1), model.forward(x))


def test_cache_fp16_stores_sixteen_bits(model: Model) -> None:
    assert model.cache_dtype is Cache(model, max_seq_len=64).key_states[0].dtype is torch.float32
    cache = CacheFP16(model, max_seq_len=64)
    assert cache.dtype is cache.value_states[0].dtype is cache.clone().dtype is torch.float16
    assert CacheFP16(model, max_seq_len=64, dtype="bfloat16").dtype is torch.bfloat16
    x = ids(1, 40)
    whole = model.forward(x)
    cut = torch.cat([model.forward(piece, cache) for piece in x.split(9, 1)], 1)
    at_once = model.forward(x, CacheFP16(model, max_seq_len=64))
    assert close(cut, at_once)  # attention reads tokens as stored
    assert 0 < float((cut - whole).norm() / whole.norm()) < 1e-3


def test_long_inputs_are_chunked(model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = Config(tiny.make(tmp_path))
    config.max_input_len, config.max_attention_size = 16, 900
    small = Model(config)
    small.load()
    x = ids(1, 100)
    steps: list[int] = []
    decoder = small._require_loaded().decoder
    whole = decoder.forward
    monkeypatch.setattr(decoder, "forward", lambda b, kv: steps.append(b.ids.shape[1]) or whole(b, kv))
    logits = small.forward(x, Cache(small, max_seq_len=128))
    assert close(logits, model.forward(x))
    past = 0
    for step in steps:
        assert step <= 16
        assert step == 1 or (past + step) * step <= 900
        past += step
    assert past == 100
    with pytest.raises(InputError, match=r"100 tokens.*at most 16"):
        small.forward(x)


def test_left_padded_rows_equal_single_rows(model: Model) -> None:
    rows = [ids(1, n) for n in (5, 17, 12)]
    width = 17
    padded = torch.cat([torch.cat((torch.full((1, width - r.shape[1]), -1), r), 1) for r in rows])
    mask = torch.where(padded < 0, float("-inf"), 0.0).half()
    offsets = torch.tensor([r.shape[1] - width for r in rows])
    logits = model.forward(padded, input_mask=mask, position_offsets=offsets)
    for row, alone in enumerate(rows):
        assert close(logits[row, width - alone.shape[1] :], model.forward(alone)[0])
    assert torch.isfinite(logits).all()


def test_left_padded_rows_decode_token_by_token(model: Model) -> None:
    rows, width = [ids(1, n) for n in (4, 9)], 9
    padded = torch.cat([torch.cat((torch.full((1, width - r.shape[1]), -1), r), 1) for r in rows])
    mask = torch.where(padded < 0, float("-inf"), 0.0).half()
    offsets = torch.tensor([[r.shape[1] - width] for r in rows])
    cache = Cache(model, batch_size=2, max_seq_len=32)
    model.forward(padded, cache, input_mask=mask, position_offsets=offsets, preprocess_only=True)
    new = ids(2, 6)
    steps = [model.forward(token, cache, input_mask=mask, position_offsets=offsets) for token in new.split(1, 1)]
    for row, alone in enumerate(rows):
        want = model.forward(torch.cat((alone, new[row : row + 1]), 1))[0, -6:]
        assert close(torch.cat(steps, 1)[row], want)


def test_a_mask_may_cover_future_tokens(model: Model) -> None:
    """Old loops prefill all but the last token of a padded batch with the mask of the whole."""
    rows, width = [ids(1, n) for n in (4, 9)], 9
    padded = torch.cat([torch.cat((torch.full((1, width - r.shape[1]), -1), r), 1) for r in rows])
    mask = torch.where(padded < 0, float("-inf"), 0.0).half()
    offsets = torch.tensor([r.shape[1] - width for r in rows])
    cache = Cache(model, batch_size=2, max_seq_len=32)
    options = {"input_mask": mask, "position_offsets": offsets}
    model.forward(padded[:, :-1], cache, preprocess_only=True, **options)
    logits = model.forward(padded[:, -1:], cache, **options)
    for row, alone in enumerate(rows):
        assert close(logits[row, -1], model.forward(alone)[0, -1])
    with pytest.raises(InputError, match=r"input_mask must be \(2, at most 32\)"):
        model.forward(padded[:, -1:], cache, input_mask=torch.zeros(2, 33))


def test_padding_that_cannot_be_seen_does_not_spread(model: Model) -> None:
    x = ids(1, 6)
    mask = torch.full((1, 6), float("-inf"))
    assert torch.isfinite(model.forward(x, input_mask=mask)).all()


def test_the_state_before_the_head(model: Model) -> None:
    logits, state = model.forward(ids(1, 7), return_last_state=True)
    assert state.shape == (1, 7, 32)
    head = model._require_loaded().decoder.head
    assert close(head.linear.kernel(head.norm(state, None)[1]), logits)


def test_abort_between_chunks(tmp_path: Path) -> None:
    config = Config(tiny.make(tmp_path))
    config.max_input_len = 8
    model = Model(config)
    model.load()
    stop = threading.Event()
    cache = Cache(model, max_seq_len=64)
    stop.set()
    assert model.forward(ids(1, 32), cache, abort_event=stop) is None
    assert cache.current_seq_len == 0


def test_logits_can_be_gathered_in_system_memory(model: Model) -> None:
    assert model.forward(ids(1, 5), cpu_logits=True).device.type == "cpu"


def test_logits_may_be_edited_in_place(model: Model) -> None:
    logits = model.forward(ids(1, 5))
    logits[0, 0, 0] = -1e9
    assert logits[0, 0].argmax() != 0


def test_max_output_len(tmp_path: Path) -> None:
    config = Config(tiny.make(tmp_path))
    config.max_output_len = 4
    model = Model(config)
    model.load()
    with pytest.raises(InputError, match="seq_len 5 exceeds max_output_len 4"):
        model.forward(ids(1, 5))
    assert model.forward(ids(1, 5), last_id_only=True).shape == (1, 1, 64)


def test_invalid_arguments_raise_explaining_errors(model: Model) -> None:
    cache = Cache(model, max_seq_len=32)
    with pytest.raises(CacheTooSmall, match=r"0 past and 33 new tokens, room for 32"):
        model.forward(ids(1, 33), cache)
    with pytest.raises(InputError, match="2 rows do not fit a cache of batch_size 1"):
        model.forward(ids(2, 3), cache)
    with pytest.raises(InputError, match=r"513 new tokens exceed the model's configured length of 512"):
        model.forward(ids(1, 513))
    with pytest.raises(InputError, match="Token id 64 is outside the vocabulary of 64"):
        model.forward(torch.tensor([[64]]))
    with pytest.raises(InputError, match="empty"):
        model.forward(torch.zeros(1, 0, dtype=torch.int64))
    with pytest.raises(InputError, match="integer tensor"):
        model.forward(torch.zeros(1, 3))
    with pytest.raises(InputError, match="integer tensor"):
        model.forward(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(InputError, match="input_mask must be"):
        model.forward(ids(1, 3), input_mask=torch.zeros(1, 4))
    with pytest.raises(InputError, match="position_offsets needs one number"):
        model.forward(ids(2, 3), position_offsets=torch.zeros(3))
    with pytest.raises(InputError, match="positions must be"):
        model.forward(ids(1, 3), positions=torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(InputError, match="positions must be from 0 to 511"):
        model.forward(ids(1, 1), positions=torch.tensor([[512]]))
    assert cache.current_seq_len == 0


def test_masks_and_positions_of_another_kind_are_refused(model: Model) -> None:
    x = ids(1, 3)
    hidden = torch.tensor([[0, 1, 1]])
    for mask in (hidden, [[0, 1, 1]]):
        with pytest.raises(InputError, match=r"input_mask must be a tensor of True and False.*mask\.bool\(\)"):
            model.forward(x, input_mask=mask)  # type: ignore[arg-type]
    added = torch.where(hidden > 0, 0.0, -torch.inf)
    assert torch.equal(model.forward(x, input_mask=hidden.bool()), model.forward(x, input_mask=added))
    for name in ("positions", "position_offsets"):
        with pytest.raises(InputError, match=f"{name} must be a tensor, found list"):
            model.forward(x, **{name: [[0, 1, 2]]})  # type: ignore[arg-type]
    moved = [model.forward(x, position_offsets=torch.tensor([2], dtype=dtype)) for dtype in (None, torch.half)]
    assert torch.equal(*moved)


def test_a_cache_of_another_model_is_refused(model: Model, tmp_path: Path) -> None:
    other = Model(Config(tiny.make(tmp_path / "other", num_hidden_layers=3, num_key_value_heads=4)))
    other.load()
    cache = Cache(other, max_seq_len=256)
    for use in (lambda: model.forward(ids(1, 3), cache), lambda: model.runner(cache)):
        with pytest.raises(InputError, match=r"it has 3 layers with 4 heads of 8, this model 2 .* 2 heads of 8"):
            use()
    other = Model(model.config)
    other.load()
    x = ids(1, 3)
    assert close(other.forward(x, Cache(model, max_seq_len=256)), model.forward(x))


def test_an_unloaded_model_raises(tmp_path: Path) -> None:
    model = Model(Config(tiny.make(tmp_path)))
    with pytest.raises(NotLoaded, match="load"):
        model.forward(ids(1, 1))
    with pytest.raises(NotLoaded):
        model.explain()


@pytest.mark.parametrize(("dtype", "limit"), [("float16", 5e-3), ("bfloat16", 4e-2)])
def test_sixteen_bits_on_a_cpu(model: Model, tmp_path: Path, dtype: str, limit: float) -> None:
    config = Config(tiny.make(tmp_path))
    config.dtype = dtype
    half = Model(config)
    half.load()
    x = ids(2, 50)
    want, got = model.forward(x), half.forward(x)
    assert float((got - want).norm() / want.norm()) < limit
    cache = Cache(half, batch_size=2, max_seq_len=64)
    assert cache.key_states[0].dtype is getattr(torch, dtype)
    parts = [half.forward(x[:, t : t + 5], cache) for t in range(0, 50, 5)]
    assert float((torch.cat(parts, 1) - want).norm() / want.norm()) < limit
