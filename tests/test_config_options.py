"""The user's changes of a model: context length, RoPE scaling, active experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exlm import Config, spec
from exlm.errors import InputError
from tests.families.test_config_reader import llama


def ropes(model: spec.Model) -> set[spec.Rope | None]:
    return {layer.mixer.rope for layer in model.layers}


def apply(folder: Path, model: spec.Model, **options: object) -> spec.Model:
    """The model with these options of `Config`."""
    (folder / "config.json").write_text("{}")
    config = Config()
    config.model_dir, config._spec = str(folder), model
    for name, value in options.items():
        setattr(config, name, value)
    return config.freeze().spec


def test_no_options_change_nothing(tmp_path: Path) -> None:
    assert apply(tmp_path, llama()) == llama()


def test_alpha_scale_and_base_reach_every_layer(tmp_path: Path) -> None:
    (rope,) = ropes(apply(tmp_path, llama(), scale_pos_emb=2.0, scale_alpha_value=3.0, rotary_embedding_base=5e5))
    assert rope is not None
    assert (rope.linear_factor, rope.ntk_alpha, rope.theta) == (2.0, 3.0, 5e5)


def test_scale_pos_emb_replaces_the_linear_factor_of_the_file(tmp_path: Path) -> None:
    model = llama(rope_scaling={"type": "linear", "factor": 4.0})
    (rope,) = ropes(apply(tmp_path, model, scale_pos_emb=4.0))
    assert rope is not None
    assert rope.scaling is None
    assert rope.linear_factor == 4.0


def test_yarn_on_demand(tmp_path: Path) -> None:
    (rope,) = ropes(apply(tmp_path, llama(), max_seq_len=8192, yarn_rope_factor=4.0))
    assert rope is not None
    assert isinstance(rope.scaling, spec.YarnScaling)
    assert (rope.scaling.factor, rope.scaling.original_max_positions) == (4.0, 2048)
    assert rope.scaling.attention_factor == pytest.approx(1.1386, abs=1e-4)


def test_only_the_rope_of_full_attention_is_scaled(tmp_path: Path) -> None:
    model = llama()
    local_rope = spec.Rope(theta=1.0, dim=8)
    first = replace(model.layers[0], mixer=replace(model.layers[0].mixer, window=16, rope=local_rope))
    model = replace(model, layers=(first, *model.layers[1:]))
    assert model.primary_rope == model.layers[1].mixer.rope
    changed = apply(tmp_path, model, scale_alpha_value=2.0)
    assert changed.layers[0].mixer.rope == local_rope
    assert changed.layers[1].mixer.rope != model.layers[1].mixer.rope


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale_pos_emb": -1.0}, "scale_pos_emb"),
        ({"scale_alpha_value": -1.0}, "scale_alpha_value"),
        ({"yarn_rope_factor": 0.5}, "yarn_rope_factor"),
        (
            {"yarn_rope_factor": 10**400},
            "yarn_rope_factor must be at least 1 and below 1e9, found 10+",
        ),
        ({"yarn_rope_factor": float("inf")}, "yarn_rope_factor"),
        (
            {"yarn_rope_factor": 4.0, "yarn_rope_original_max_position_embeddings": -1},
            "a length from 1 to 2147483647, found -1",
        ),
        (
            {"yarn_rope_factor": 4.0, "yarn_rope_original_max_position_embeddings": 10**400},
            "a length from 1 to 2147483647",
        ),
        ({"rotary_embedding_base": 10**400}, "rotary_embedding_base must be a number above 0"),
        ({"scale_alpha_value": 10**400}, "scale_alpha_value"),
    ],
)
def test_invalid_options_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        apply(tmp_path, llama(), **options)


def test_learned_positions_cannot_be_stretched(tmp_path: Path) -> None:
    model = replace(llama(), embed=spec.Embed(learned_positions=1024))
    with pytest.raises(InputError, match="1024 learned positions"):
        apply(tmp_path, model)


def test_experts_for_each_token(tmp_path: Path) -> None:
    moe = spec.Moe(width=8, experts=4, active=2)
    model = replace(llama(), layers=tuple(replace(layer, mlp=moe) for layer in llama().layers))
    changed = apply(tmp_path, model, num_experts_per_token=3)
    assert {layer.mlp.active for layer in changed.layers if isinstance(layer.mlp, spec.Moe)} == {3}
    with pytest.raises(InputError, match="must be 1 to 4"):
        apply(tmp_path, model, num_experts_per_token=5)
