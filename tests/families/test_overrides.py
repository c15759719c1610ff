"""The user's changes on a model's description."""

from __future__ import annotations

from dataclasses import replace

import pytest

from exlm import spec
from exlm.errors import InputError
from exlm.families.overrides import Overrides, apply_overrides, primary_rope
from tests.families.test_config_reader import llama


def ropes(model: spec.Model) -> set[spec.Rope | None]:
    return {layer.mixer.rope for layer in model.layers}


def test_no_overrides_change_nothing() -> None:
    assert apply_overrides(llama(), Overrides(max_seq_len=2048)) == llama()


def test_alpha_scale_and_base_reach_every_layer() -> None:
    (rope,) = ropes(apply_overrides(llama(), Overrides(2048, scale_pos_emb=2.0, scale_alpha=3.0, rope_theta=5e5)))
    assert rope is not None
    assert (rope.linear_factor, rope.ntk_alpha, rope.theta) == (2.0, 3.0, 5e5)


def test_scale_pos_emb_replaces_the_linear_factor_of_the_file() -> None:
    model = llama(rope_scaling={"type": "linear", "factor": 4.0})
    (rope,) = ropes(apply_overrides(model, Overrides(2048, scale_pos_emb=4.0)))
    assert rope is not None
    assert rope.scaling is None
    assert rope.linear_factor == 4.0


def test_yarn_on_demand() -> None:
    (rope,) = ropes(apply_overrides(llama(), Overrides(8192, yarn_factor=4.0)))
    assert rope is not None
    assert isinstance(rope.scaling, spec.YarnScaling)
    assert (rope.scaling.factor, rope.scaling.original_max_positions) == (4.0, 2048)
    assert rope.scaling.attention_factor == pytest.approx(1.1386, abs=1e-4)


def test_only_the_rope_of_full_attention_is_scaled() -> None:
    model = llama()
    local_rope = spec.Rope(theta=1.0, dim=8)
    first = replace(model.layers[0], mixer=replace(model.layers[0].mixer, window=16, rope=local_rope))
    model = replace(model, layers=(first, *model.layers[1:]))
    assert primary_rope(model) == model.layers[1].mixer.rope
    changed = apply_overrides(model, Overrides(2048, scale_alpha=2.0))
    assert changed.layers[0].mixer.rope == local_rope
    assert changed.layers[1].mixer.rope != model.layers[1].mixer.rope


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (Overrides(2048, scale_pos_emb=0.0), "scale_pos_emb"),
        (Overrides(2048, scale_alpha=-1.0), "scale_alpha_value"),
        (Overrides(2048, yarn_factor=0.5), "yarn_rope_factor"),
        (
            Overrides(2048, yarn_factor=10**400),
            "yarn_rope_factor must be at least 1 and below 1e9, found 10+",
        ),
        (Overrides(2048, yarn_factor=float("inf")), "yarn_rope_factor"),
        (Overrides(2048, yarn_factor=4.0, yarn_original=-1), "a length from 1 to 2147483647, found -1"),
        (Overrides(2048, yarn_factor=4.0, yarn_original=10**400), "a length from 1 to 2147483647"),
        (Overrides(2048, rope_theta=10**400), "rotary_embedding_base must be a number above 0"),
        (Overrides(2048, scale_alpha=10**400), "scale_alpha_value"),
    ],
)
def test_invalid_overrides_are_refused(overrides: Overrides, message: str) -> None:
    with pytest.raises(InputError, match=message):
        apply_overrides(llama(), overrides)


def test_learned_positions_cannot_be_stretched() -> None:
    model = replace(llama(), embed=spec.Embed(learned_positions=1024))
    with pytest.raises(InputError, match="1024 learned positions"):
        apply_overrides(model, Overrides(2048))


def test_experts_for_each_token() -> None:
    moe = spec.Moe(width=8, experts=4, active=2)
    model = replace(llama(), layers=tuple(replace(layer, mlp=moe) for layer in llama().layers))
    changed = apply_overrides(model, Overrides(2048, active_experts=3))
    assert {layer.mlp.active for layer in changed.layers if isinstance(layer.mlp, spec.Moe)} == {3}
    with pytest.raises(InputError, match="must be 1 to 4"):
        apply_overrides(model, Overrides(2048, active_experts=5))
