"""Families with Mamba 2 mixers: Nemotron-H, Granite 4 (GraniteMoeHybrid), Falcon-H1 and Bamba."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .. import spec
from ..spec.tensor_names import LAYER_PREFIX, KeyRename, TensorLocation, TensorNames
from .common import (
    Locations,
    activation,
    attention,
    decoder,
    expert_groups,
    layer_kinds,
    layer_numbers,
    limited_state,
    mlp,
    moe,
    norm,
    required_value,
)
from .config_reader import MAX_LAYERS, ConfigReader
from .rope import rope

NEMOTRON_KINDS = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
}
"""Names in `layers_block_type`, and the letters of `hybrid_override_pattern` that mean the same."""

MAMBA_KINDS = {
    "linear_attention": "mamba",
    "mamba": "mamba",
    "full_attention": "attention",
    "attention": "attention",
}


def nemotron_h(c: ConfigReader) -> spec.Model:
    """Layers that are a Mamba 2 mixer, attention without positions, an MLP or experts, each alone."""
    kinds = nemotron_layer_kinds(c)
    n = norm(c, "layer_norm_epsilon")
    mixers: dict[str, spec.Mixer] = {}
    mlps: dict[str, spec.Mlp | spec.Moe] = {}
    if "M" in kinds:
        mixers["M"] = nemotron_mamba(c, n)
    if "*" in kinds:
        head_dim = c.size("head_dim", "attention_head_dim", default=128)
        mixers["*"] = attention(c, head_dim=head_dim, rope=None, qkv_bias=False, out_bias=False)
    if "-" in kinds:
        mlps["-"] = nemotron_mlp(c, c.size("intermediate_size"))
    if "E" in kinds:
        mlps["E"] = nemotron_experts(c)
    layers = [
        spec.Layer(mixers.get(kind), mlps.get(kind), n if kind in mixers else None, n if kind in mlps else None)
        for kind in kinds
    ]
    names = TensorNames(key_renames=(KeyRename("backbone.", "model.", prefix_only=True),))
    return decoder(c, layers, final_norm=n, names=names.with_locations(**nemotron_locations(mlps.get("E"), c)))


def nemotron_layer_kinds(c: ConfigReader) -> str:
    """A letter for each layer: M (Mamba 2), * (attention), - (MLP), E (experts)."""
    pattern: str | None = c.text("hybrid_override_pattern", default=None)
    if pattern is not None and (not 0 < len(pattern) <= MAX_LAYERS or set(pattern) - set(NEMOTRON_KINDS.values())):
        raise c.invalid_value("hybrid_override_pattern", f"1 to {MAX_LAYERS} letters M, *, - and E", pattern)
    key, named = c.find("layers_block_type", "layer_types")
    stored = pattern if named is None else named
    if stored is None:
        raise c.invalid_value(key, "a list of the layers' kinds, or hybrid_override_pattern", None)
    if not isinstance(stored, list | str) or not 0 < len(stored) <= MAX_LAYERS:
        raise c.invalid_value(key, f"a list of 1 to {MAX_LAYERS} layers' kinds", stored)
    depth = c.num_layers() if c.get("num_hidden_layers") is not None else len(stored)
    kinds = layer_kinds(c, depth, NEMOTRON_KINDS, "layers_block_type", "layer_types")
    letters = "".join(stored if kinds is None else kinds)
    if len(letters) != depth:
        raise c.inconsistent(f"hybrid_override_pattern has {len(letters)} letters and the model {depth} layers")
    if pattern is not None and pattern != letters:
        raise c.inconsistent(f"hybrid_override_pattern says {pattern} and {key} means {letters}")
    return letters


def nemotron_mamba(c: ConfigReader, n: spec.Norm) -> spec.Mamba2:
    """Its mixer: normalised in groups, and with a least time step."""
    required_value(c, "mamba_hidden_act", "silu")
    groups = c.size("n_groups", "mamba_n_groups")
    least = c.real("time_step_min", "mamba_dt_min", default=0.001)
    return checked_mamba2(
        c,
        heads=c.size("mamba_num_heads"),
        head_dim=c.size("mamba_head_dim"),
        groups=groups,
        state_dim=c.size("ssm_state_size"),
        conv_kernel=c.size("conv_kernel", "mamba_d_conv"),
        norm=n,
        norm_groups=groups,
        conv_bias=c.flag("use_conv_bias", "mamba_conv_bias", default=True),
        bias=c.flag("use_bias", default=False),
        out_bias=c.flag("use_bias", default=False),
        dt_limits=(least, math.inf),
    )


def nemotron_mlp(c: ConfigReader, width: int) -> spec.Mlp:
    """Its MLP without a gate."""
    return mlp(c, width=width, act=activation(c, "mlp_hidden_act", default="relu2"), gated=False)


def nemotron_experts(c: ConfigReader) -> spec.Moe:
    """Experts without gates, scored by a sigmoid, selected with a bias and in groups, and a shared one."""
    width, active = c.size("moe_intermediate_size"), c.size("num_experts_per_tok")
    experts = c.size("n_routed_experts", "num_local_experts")
    latent = None if c.get("moe_latent_size") is None else c.size("moe_latent_size")
    return moe(
        c,
        width=width,
        experts=experts,
        active=active,
        act=activation(c, "mlp_hidden_act", default="relu2"),
        renormalize=c.flag("norm_topk_prob", default=True),
        gated=False,
        routing="sigmoid",
        selection_bias=True,
        weight_scale=c.positive("routed_scaling_factor", default=1.0),
        shared=nemotron_mlp(c, c.size("moe_shared_expert_intermediate_size", default=width)),
        latent=latent,
        latent_bias=latent is not None and c.flag("mlp_bias", default=False),
        **expert_groups(c, experts, active),
    )


def nemotron_locations(experts: spec.Mlp | spec.Moe | None, c: ConfigReader) -> Locations:
    """Locations of all parts of a layer, which are all called `mixer`."""
    prefix = LAYER_PREFIX + "mixer."
    found: Locations = {
        "embed": TensorLocation("model.embeddings"),
        "final_norm": TensorLocation("model.norm_f"),
        "attn_norm": TensorLocation(LAYER_PREFIX + "norm"),
        "mlp_norm": TensorLocation(LAYER_PREFIX + "norm"),
        **{f"attn__{part}": TensorLocation(f"{prefix}{part}_proj") for part in "qkvo"},
        **mamba_locations(prefix),
        "mlp__up": TensorLocation(prefix + "up_proj"),
        "mlp__down": TensorLocation(prefix + "down_proj"),
    }
    if isinstance(experts, spec.Moe):
        rows = {"up": experts.width, "down": experts.latent or c.size("hidden_size")}
        for part, count in rows.items():
            found[f"mlp__experts__{part}"] = (
                TensorLocation(f"{prefix}experts.{{e}}.{part}_proj"),
                TensorLocation(f"{prefix}experts.{part}_proj", rows_per_expert=count, without_suffix=True),
            )
            found[f"mlp__shared__{part}"] = TensorLocation(f"{prefix}shared_experts.{part}_proj")
        found["mlp__router"] = TensorLocation(prefix + "gate")
        found["mlp__selection_bias"] = TensorLocation(prefix + "gate.e_score_correction_bias", without_suffix=True)
        found["mlp__latent_down"] = TensorLocation(prefix + "fc1_latent_proj")
        found["mlp__latent_up"] = TensorLocation(prefix + "fc2_latent_proj")
    return found


def granite_moe_hybrid(c: ConfigReader) -> spec.Model:
    """Granite's multipliers, Mamba 2 or attention in each layer, and experts beside a shared MLP, or that MLP alone."""
    n, depth = norm(c), c.num_layers()
    positions = c.text("position_embedding_type", default="nope")
    if positions not in ("nope", "rope"):
        raise c.invalid_value("position_embedding_type", "nope, rope or null", positions)
    scale = c.positive("attention_multiplier", default=1.0)
    attn = attention(c, scale=scale, **({} if positions == "rope" else {"rope": None}))
    kinds = layer_kinds(c, depth, MAMBA_KINDS, "layer_types", "layers_block_type") or ["mamba"] * depth
    mixers: dict[str, spec.Mixer] = {"attention": attn}
    if "mamba" in kinds:
        mixers["mamba"] = bamba_mamba(c, n)
    shared = mlp(c, width=c.size("shared_intermediate_size"), bias=False)
    feed_forward: spec.Mlp | spec.Moe = shared
    if c.integer("num_local_experts", default=0) != 0:
        feed_forward = moe(c, shared=shared)
    residual = c.real("residual_multiplier", default=1.0)
    layers = [spec.Layer(mixers[kind], feed_forward, n, n, residual_scale=residual) for kind in kinds]
    names = TensorNames().with_locations(
        **mamba_locations(LAYER_PREFIX + "mamba."), **granite_locations(shared.width, feed_forward, c)
    )
    return decoder(c, layers, names=names)


def granite_locations(shared: int, feed_forward: spec.Mlp | spec.Moe, c: ConfigReader) -> Locations:
    """Locations of the shared MLP, alone or beside experts; gate and up are one matrix."""
    fused = LAYER_PREFIX + "shared_mlp.input_linear"
    parts = {
        "gate": TensorLocation(fused, rows=((0, shared),)),
        "up": TensorLocation(fused, rows=((shared, 2 * shared),)),
        "down": TensorLocation(LAYER_PREFIX + "shared_mlp.output_linear"),
    }
    if not isinstance(feed_forward, spec.Moe):
        return {f"mlp__{part}": location for part, location in parts.items()}
    prefix, width, hidden = LAYER_PREFIX + "block_sparse_moe.", feed_forward.width, c.size("hidden_size")

    def stacked(part: str, *key_and_rows: tuple[str, int, bool]) -> tuple[TensorLocation, ...]:
        cut = {"gate": ((0, width),), "up": ((width, 2 * width),), "down": ()}[part]
        return tuple(
            TensorLocation(prefix + key, rows=cut, rows_per_expert=rows, without_suffix=bare)
            for key, rows, bare in key_and_rows
        )

    gate_up = ("input_linear", 2 * width, False), ("experts.gate_up_proj", 2 * width, True)
    down = ("output_linear", hidden, False), ("experts.down_proj", hidden, True)
    return {
        **{f"mlp__shared__{part}": location for part, location in parts.items()},
        "mlp__router": (TensorLocation(prefix + "router.layer"), TensorLocation(prefix + "router")),
        "mlp__experts__gate": stacked("gate", *gate_up),
        "mlp__experts__up": stacked("up", *gate_up),
        "mlp__experts__down": stacked("down", *down),
    }


def falcon_h1(c: ConfigReader) -> spec.Model:
    """Attention and Mamba 2 side by side in every layer, with multipliers on nearly every part."""
    n = norm(c, "rms_norm_eps")
    attn = attention(c)
    attn = replace(attn, scale=attn.scale * c.real("key_multiplier", default=1.0))
    gate_scale, out_scale = multipliers(c, "mlp_multipliers", 2)
    scales = multipliers(c, "ssm_multipliers", 5)
    has_norm = c.flag("mamba_rms_norm", default=False)
    mamba = bamba_mamba(
        c,
        n if has_norm else None,
        norm_groups=c.size("mamba_n_groups", default=1),
        norm_before_gate=c.flag("mamba_norm_before_gate", default=True),
        out_bias=c.flag("projectors_bias", default=False),
        in_scale=c.real("ssm_in_multiplier", default=1.0),
        part_scales=scales,
    )
    mixers = spec.ParallelMixers(
        attn,
        mamba,
        attention_in_scale=c.real("attention_in_multiplier", default=1.0),
        attention_out_scale=c.real("attention_out_multiplier", default=1.0),
        recurrent_out_scale=c.real("ssm_out_multiplier", default=1.0),
    )
    layer = spec.Layer(mixers, mlp(c, gate_scale=gate_scale, out_scale=out_scale), n, n)
    model = decoder(c, [layer] * c.num_layers(), final_norm=n, names=bamba_names())
    return replace(model, head=replace(model.head, scale=c.real("lm_head_multiplier", default=1.0)))


def multipliers(c: ConfigReader, key: str, count: int) -> tuple[Any, ...]:
    """A list of numbers; ones if it is absent."""
    found = c.get(key)
    if found is None:
        return (1.0,) * count
    finite = isinstance(found, list) and all(type(x) in (int, float) and abs(x) < 1e38 for x in found)
    if not finite or len(found) != count:
        raise c.invalid_value(key, f"a list of {count} finite numbers", found)
    return tuple(float(x) for x in found)


def bamba(c: ConfigReader) -> spec.Model:
    """Mamba 2, and in the layers of `attn_layer_indices` attention with RoPE on half of each head."""
    n, depth = norm(c, "rms_norm_eps"), c.num_layers()
    attn = attention(c)
    attn = replace(attn, rope=rope(c, attn.head_dim, rotary_fraction=0.5))
    attended = layer_numbers(c, "attn_layer_indices", depth)
    mamba = bamba_mamba(c, n)
    layers = [spec.Layer(attn if i in attended else mamba, mlp(c), n, n) for i in range(depth)]
    return decoder(c, layers, final_norm=n, names=bamba_names())


def bamba_names() -> TensorNames:
    """The names that Falcon-H1 and Bamba share."""
    return TensorNames().with_locations(
        final_norm=TensorLocation("model.final_layernorm"),
        mlp_norm=TensorLocation(LAYER_PREFIX + "pre_ff_layernorm"),
        **{
            f"mlp__{part}": TensorLocation(f"{LAYER_PREFIX}feed_forward.{part}_proj") for part in ("gate", "up", "down")
        },
        **mamba_locations(LAYER_PREFIX + "mamba."),
    )


def bamba_mamba(c: ConfigReader, n: spec.Norm | None, **changes: Any) -> spec.Mamba2:
    """The mixer of Bamba, Granite 4 and Falcon-H1, whose keys begin with `mamba_`.

    Its width is `mamba_d_ssm`, or `mamba_expand` times the hidden size.
    """
    required_value(c, "hidden_act", "silu")  # also the activation after the convolution
    width = c.size("hidden_size") * c.size("mamba_expand", default=2)
    if c.get("mamba_d_ssm") is not None:
        width = c.size("mamba_d_ssm")
    heads = c.size("mamba_n_heads")
    if width % heads:
        raise c.inconsistent(f"a Mamba mixer of width {width} cannot be cut into {heads} equal heads")
    stated = c.get("mamba_d_head")
    head_dim = width // heads if stated in (None, "auto") else c.size("mamba_d_head")
    if head_dim * heads != width:
        raise c.inconsistent(f"{heads} Mamba heads of {head_dim} do not make the width {width}")
    bias = c.flag("mamba_proj_bias", default=False)
    fields: Mapping[str, Any] = {
        "heads": heads,
        "head_dim": head_dim,
        "groups": c.size("mamba_n_groups", default=1),
        "state_dim": c.size("mamba_d_state", default=256),
        "conv_kernel": c.size("mamba_d_conv", default=4),
        "norm": n,
        "conv_bias": c.flag("mamba_conv_bias", default=True),
        "bias": bias,
        "out_bias": bias,
        "dt_limits": time_step_limit(c),
    }
    return checked_mamba2(c, **{**fields, **changes})


def checked_mamba2(c: ConfigReader, **fields: Any) -> spec.Mamba2:
    """The mixer, if its sizes agree."""
    mixer = spec.Mamba2(**fields)
    if mixer.heads % mixer.groups:
        raise c.inconsistent(f"{mixer.heads} Mamba heads cannot share {mixer.groups} groups evenly")
    return limited_state(c, mixer)


def time_step_limit(c: ConfigReader) -> tuple[float, float]:
    """The least and the largest time step; the largest may be infinite."""
    found = c.get("time_step_limit")
    if found is None:
        return 0.0, math.inf
    ends = [as_float(x) for x in found] if isinstance(found, list) and len(found) == 2 else []
    low, high = ends or [math.nan, math.nan]
    if not 0 <= low < high or low == math.inf:
        raise c.invalid_value("time_step_limit", "two numbers, the first at least 0 and below the second", found)
    return low, high


def as_float(x: object) -> float:
    """A number, infinity also as transformers spells it in JSON; NaN for anything else."""
    if isinstance(x, Mapping) and x.get("__float__") == "Infinity":
        return math.inf
    if type(x) not in (int, float) or (type(x) is int and abs(x) > 1e38):
        return math.nan
    return float(x)  # type: ignore[arg-type]


def mamba_locations(prefix: str) -> dict[str, TensorLocation]:
    """Locations of a Mamba 2 mixer's tensors."""
    return {
        "mamba__in": TensorLocation(prefix + "in_proj"),
        "mamba__out": TensorLocation(prefix + "out_proj"),
        "mamba__conv": TensorLocation(prefix + "conv1d"),
        "mamba__norm": TensorLocation(prefix + "norm"),
        "mamba__a_log": TensorLocation(prefix + "A_log", without_suffix=True),
        "mamba__dt_bias": TensorLocation(prefix + "dt_bias", without_suffix=True),
        "mamba__d": TensorLocation(prefix + "D", without_suffix=True),
    }
