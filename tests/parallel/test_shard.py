"""Shards cover every head, column and token once, and their products add up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from exlm import Config, Model, Unsupported, spec
from exlm.formats import DenseWeight
from exlm.parallel.shard import (
    MatrixSlice,
    ShardedSource,
    aligned_ranges,
    check_shardable,
    heads_of_rank,
    shard_spec,
    slice_of_rank,
    slice_weight,
)
from exlm.spec.model import matrices
from tests import mixers, tiny
from tests.models import zoo
from tests.models.zoo_cases import CASES, Case
from tests.parallel.thread_ranks import CPU, load_shards, rank0_logits

FIXTURES = [
    "tiny-lm",
    "tiny-lm-exl2-2.5bpw",
    "tiny-lm-exl2-6.0bpw",
    "tiny-lm-gptq-g128-act",
    "tiny-lm-gptq-g128-sym",
]


CASE_IDS = frozenset(  # one family for each feature that sharding must handle
    [
        "llama-biased",
        "llama-tied",
        "index-norm-head",
        "granite-tied",
        "orion",
        "qwen2",
        "qwen3",
        "qwen3-moe-mixed",
        "mixtral-window",
        "gemma2",
        "gemma3",
        "gemmoe",
        "starcoder2",
        "cohere-qk-norm",
        "dbrx",
        "phi3",
        "glm4",
        "bigcode",
        "gpt2",
        "internlm2",
        "qwen2-vl-tied",
        "olmo2",
    ]
)
SHARDED_CASES = [case for case in CASES if case.id in CASE_IDS]


def attention(heads: int, kv_heads: int) -> spec.Attention:
    return spec.Attention(heads, kv_heads, 8, None, 1.0)


@given(st.integers(1, 400), st.integers(1, 9))
def test_ranges_cover_a_length_once(length: int, size: int) -> None:
    assume(length >= size)
    found = aligned_ranges(length, size)
    assert [i for start, stop in found for i in range(start, stop)] == list(range(length))
    sizes = [stop - start for start, stop in found]
    assert min(sizes) >= 1
    assert max(sizes[:-1], default=0) - min(sizes) <= 128


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 16))
def test_heads_keep_their_groups(kv_heads: int, group: int, size: int) -> None:
    attn = attention(kv_heads * group, kv_heads)
    assume(size <= attn.heads)
    found = [heads_of_rank(attn, rank, size) for rank in range(size)]
    assert [q for heads in found for q in range(*heads.q)] == list(range(attn.heads))
    for heads in found:
        count, own = heads.q[1] - heads.q[0], heads.kv[1] - heads.kv[0]
        assert count >= 1
        assert count % own == 0
        for local in range(count):  # the kv head that the attention kernel will take is the right one
            assert heads.kv[0] + local // (count // own) == (heads.q[0] + local) // group
    assert {kv for heads in found for kv in range(*heads.kv)} == set(range(kv_heads))


def test_too_many_ranks_are_refused(tmp_path: Path) -> None:
    model = Config(tiny.make(tmp_path)).spec
    check_shardable(model, 4)
    with pytest.raises(Unsupported, match=r"has 4 heads, too few to share among 5 ranks.*load_autosplit"):
        check_shardable(model, 5)
    layer = model.layers[0]
    for kind, allowed in (("rms", True), ("layer", False)):
        norm = spec.QkNorm(spec.Norm(kind), "all")  # type: ignore[arg-type]
        changed = replace(model, layers=(replace(layer, mixer=replace(layer.mixer, qk_norm=norm)),))
        if allowed:
            check_shardable(changed, 2)
        else:
            with pytest.raises(Unsupported, match=r"mean of all heads together.*load_autosplit"):
                check_shardable(changed, 2)


UNSHARDED = {
    "a recurrent mixer": (0, 2, 3, 4),
    "latent attention": (1,),
    "gated attention": (6,),
    "only a mixer or only an MLP": (5,),
}


@pytest.mark.parametrize(("what", "layers"), UNSHARDED.items())
def test_parts_without_a_rule_are_refused(what: str, layers: tuple[int, ...]) -> None:
    for i in layers:
        model = replace(mixers.MODEL, layers=mixers.LAYERS[i : i + 1])
        with pytest.raises(Unsupported, match=rf"Layer 0 has {what}, .*model\.load_autosplit\(cache\)"):
            check_shardable(model, 2)


def test_a_shared_expert_is_not_sharded() -> None:
    layer = spec.Layer(mixers.ATTENTION, mixers.GATED_MOE, mixers.NORM, mixers.NORM)
    with pytest.raises(Unsupported, match=r"has a shared expert, .*load_autosplit"):
        check_shardable(replace(mixers.MODEL, layers=(layer,)), 2)
    routed = replace(layer, mlp=replace(mixers.GATED_MOE, shared=None, shared_gated=False))
    check_shardable(replace(mixers.MODEL, layers=(routed,)), 2)


@pytest.mark.parametrize("method", ["load_tp", "load_pipeline"])
def test_recurrent_models_are_not_divided_among_processes(fixtures_dir: Path, method: str) -> None:
    config = Config(fixtures_dir / "tiny-qwen3_5")
    config.device = "cpu"
    model = Model(config)
    with pytest.raises(Unsupported, match=r"Layer 0 (has|keeps) a recurrent .*load_autosplit\(cache\)"):
        getattr(model, method)(gpu_split=[1, 1])
    assert not model.loaded


@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize("size", [2, 3])
def test_the_parts_of_a_matrix_add_up(fixtures_dir: Path, name: str, size: int) -> None:
    frozen = Config(fixtures_dir / name).freeze()
    source = frozen.open_checkpoint()
    for role, wide, high, bias in list(matrices(frozen.spec))[:7]:
        single = source.weight(role, wide, high, bias=bias, dtype=torch.float32, device=CPU).dequantize()
        parts = []
        for rank in range(size):
            sharded = ShardedSource(source, frozen.spec, rank, size)
            local = {m.role: m for m in matrices(shard_spec(frozen.spec, rank, size))}[role]
            piece = sharded.weight(
                role, local.in_features, local.out_features, bias=bias, dtype=torch.float32, device=CPU
            )
            assert (piece.in_features, piece.out_features) == (local.in_features, local.out_features)
            part = slice_of_rank(frozen.spec, role, rank, size)
            assert part is not None
            rows = slice(part.start, part.stop) if part.dim == 0 else slice(None)
            columns = slice(part.start, part.stop) if part.dim == 1 else slice(None)
            assert torch.equal(piece.dequantize(), single[rows, columns])
            parts.append(piece)
        if role.endswith(("attn.o", "mlp.down")):
            assert sum(piece.in_features for piece in parts) == wide


def test_a_part_owns_its_memory_and_one_rank_the_bias() -> None:
    weight = DenseWeight(torch.randn(8, 6), torch.randn(8))
    for part in (MatrixSlice(0, 2, 4), MatrixSlice(1, 2, 4)):
        piece = slice_weight(weight, part, keep_bias=False)
        assert isinstance(piece, DenseWeight)
        assert piece.data.untyped_storage().nbytes() == piece.data.nbytes
        assert (piece.bias is None) == (part.dim == 0)
    assert slice_weight(weight, MatrixSlice(0, 2, 4), keep_bias=True).bias is not None


@pytest.mark.parametrize("name", FIXTURES)
def test_every_format_gives_the_same_logits(fixtures_dir: Path, name: str) -> None:
    config = Config(fixtures_dir / name)
    single = Model(config)
    single.load()
    ids = torch.arange(10, 50).view(2, 20)
    want = single.forward(ids)
    for size in (2, 3, 4):  # 2 kv heads: three ranks get uneven shards, four replicate heads
        got = rank0_logits(load_shards(config.freeze(), size), ids)
        assert float((got - want).norm() / want.norm()) < 1e-4


@pytest.mark.parametrize("case", SHARDED_CASES, ids=lambda case: case.id)
def test_every_family_gives_the_same_logits(case: Case, tmp_path: Path) -> None:
    config = Config(zoo.build(case.architecture, tmp_path / "model", **case.overrides).folder)
    config.max_seq_len = 64
    frozen = config.freeze()
    single = Model(config)
    single.load()
    ids = torch.randint(0, 100, (1, 40))
    want = single.forward(ids)
    check_shardable(frozen.spec, 2)
    got = rank0_logits(load_shards(frozen, 2), ids)
    assert float((got - want).norm() / want.norm()) < 1e-5


@pytest.mark.parametrize("size", [2, 3, 5, 6])
def test_a_norm_over_all_heads_counts_each_head_once(size: int, tmp_path: Path) -> None:
    """Six query heads and two kv heads: from three ranks on, some replicate a kv head."""
    heads = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}
    config = Config(zoo.build("Olmo2ForCausalLM", tmp_path / "model", **heads).folder)
    single = Model(config)
    single.load()
    ids = torch.randint(0, 100, (2, 20))
    want = single.forward(ids)
    got = rank0_logits(load_shards(config.freeze(), size), ids)
    assert float((got - want).norm() / want.norm()) < 1e-5
