"""`apply_overrides`: a user's changes to a `spec.Model`: context length, RoPE scaling, active experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .. import spec
from ..errors import InputError, shown
from .config_reader import MAX_SIZE


@dataclass(frozen=True)
class Overrides:
    """The changes that a user may make before loading."""

    max_seq_len: int
    scale_pos_emb: float = 1.0
    scale_alpha: float = 1.0
    rope_theta: float | None = None
    yarn_factor: float | None = None
    yarn_original: int | None = None
    active_experts: int | None = None


def primary_rope(model: spec.Model) -> spec.Rope | None:
    """The RoPE of the first layer with full attention, else of the first layer that has one.

    Context extension changes only this one: a windowed layer (Gemma 3) attends no further than its window.
    """
    ropes = [attn.rope for attn in model.attentions if attn.rope is not None]
    full_attention = [attn.rope for attn in model.attentions if attn.rope is not None and attn.window is None]
    return next(iter(full_attention or ropes), None)


def apply_overrides(model: spec.Model, overrides: Overrides) -> spec.Model:
    """The model with the overrides applied; InputError if one is impossible."""
    if (limit := model.embed.learned_positions) and overrides.max_seq_len > limit:
        raise InputError(
            f"max_seq_len {overrides.max_seq_len} exceeds the {limit} learned positions of the model, "
            f"which cannot be stretched. Use at most {limit}."
        )
    old = primary_rope(model)
    new = None if old is None else _override_rope(old, model, overrides)
    if new is None and (overrides.scale_pos_emb != 1.0 or overrides.scale_alpha != 1.0 or overrides.yarn_factor):
        raise InputError(f"{model.architecture} has no rotary positions to scale.")

    def change(layer: spec.Layer) -> spec.Layer:
        if new is not None and layer.attention is not None and layer.attention.rope == old:
            layer = layer.with_attention(lambda attn: replace(attn, rope=new))
        if isinstance(layer.mlp, spec.Moe) and overrides.active_experts is not None:
            if not 1 <= overrides.active_experts <= layer.mlp.experts:
                raise InputError(
                    f"num_experts_per_token must be 1 to {layer.mlp.experts}, found {overrides.active_experts}."
                )
            layer = replace(layer, mlp=replace(layer.mlp, active=overrides.active_experts))
        return layer

    return replace(model, layers=tuple(change(layer) for layer in model.layers))


def _override_rope(rope: spec.Rope, model: spec.Model, overrides: Overrides) -> spec.Rope:
    theta = rope.theta if overrides.rope_theta is None else overrides.rope_theta
    for name, value, most in (
        ("scale_pos_emb", overrides.scale_pos_emb, 1e6),
        ("scale_alpha_value", overrides.scale_alpha, 1e6),
        ("rotary_embedding_base", theta, 1e38),
    ):
        if not isinstance(value, int | float) or not 0 < value < most:
            raise InputError(f"config.{name} must be a number above 0, found {shown(value)}.")
    scaling = rope.scaling
    if isinstance(scaling, spec.LinearScaling):
        scaling = None  # its factor is the initial value of scale_pos_emb
    if overrides.yarn_factor is not None:
        scaling = _yarn(scaling, model, overrides)
    return replace(
        rope,
        theta=theta,
        scaling=scaling,
        ntk_alpha=overrides.scale_alpha,
        linear_factor=float(overrides.scale_pos_emb),
    )


def _yarn(current: spec.RopeScaling | None, model: spec.Model, overrides: Overrides) -> spec.YarnScaling:
    factor = overrides.yarn_factor
    if not isinstance(factor, int | float) or not 1 <= factor < 1e9:
        raise InputError(f"config.yarn_rope_factor must be at least 1 and below 1e9, found {shown(factor)}.")
    known = current.original_max_positions if isinstance(current, spec.YarnScaling) else model.max_positions
    original = overrides.yarn_original or known
    if not isinstance(original, int | float) or not 1 <= original < MAX_SIZE:
        raise InputError(
            "config.yarn_rope_original_max_position_embeddings must be a length from 1 to "
            f"{MAX_SIZE - 1}, found {shown(original)}."
        )
    return spec.YarnScaling.with_defaults(float(factor), int(original))
