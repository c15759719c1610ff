"""Families with gated delta nets beside attention: Qwen3-Next, Qwen 3.5, OLMo-Hybrid and Kimi Linear."""

from __future__ import annotations

from dataclasses import replace

from .. import spec
from ..spec.tensor_names import LAYER_PREFIX, KeyRename, TensorLocation, TensorNames, interleaved_rows
from .common import (
    LANGUAGE_MODEL_PREFIXES,
    Locations,
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
    stacked_experts,
)
from .config_reader import ConfigReader
from .qwen import EXPERT_LOCATIONS
from .rope import rope

LAYER_KINDS = {
    "linear_attention": "linear_attention",
    "full_attention": "full_attention",
    "attention": "full_attention",
}

SHARED_EXPERT_LOCATIONS = {
    **{
        f"mlp__shared__{part}": TensorLocation(f"{LAYER_PREFIX}mlp.shared_expert.{part}_proj")
        for part in ("gate", "up")
    },
    "mlp__shared__down": TensorLocation(LAYER_PREFIX + "mlp.shared_expert.down_proj"),
    "mlp__shared_gate": TensorLocation(LAYER_PREFIX + "mlp.shared_expert_gate"),
}


def qwen3_next(c: ConfigReader) -> spec.Model:
    """Qwen 3.5, but its files fuse a delta net's projections key head by key head; with or without experts."""
    depth = c.num_layers()
    dense_layers = layer_numbers(c, "mlp_only_layers", depth)
    step = c.size("decoder_sparse_step", default=1)
    has_experts = c.integer("num_experts", default=512) != 0
    experts = qwen_experts(c, renormalize=c.flag("norm_topk_prob", default=True)) if has_experts else None
    mlps = [mlp(c) if experts is None or i in dense_layers or (i + 1) % step else experts for i in range(depth)]
    model = qwen_hybrid(c, mlps)
    delta = next((layer.mixer for layer in model.layers if isinstance(layer.mixer, spec.DeltaNet)), None)
    fused = {} if delta is None else interleaved_delta_locations(delta)
    return replace(model, names=model.names.with_locations(**fused))


def qwen3_5(c: ConfigReader) -> spec.Model:
    """Gated delta nets, and gated attention in every fourth layer; norms are stored less one."""
    return qwen_hybrid(c, [mlp(c)] * c.num_layers())


def qwen3_5_moe(c: ConfigReader) -> spec.Model:
    """Qwen 3.5 with experts and a gated shared expert in every layer."""
    return qwen_hybrid(c, [qwen_experts(c, renormalize=True)] * c.num_layers())


def qwen_hybrid(c: ConfigReader, mlps: list[spec.Mlp | spec.Moe]) -> spec.Model:
    """A decoder of gated delta nets and gated attention, with these MLPs."""
    c = c.with_defaults(head_dim=256)
    n = norm(c, offset=1.0)
    head_dim = c.size("head_dim")
    rotary = rope(c, head_dim, rotary_fraction=0.25)
    rotary = replace(rotary, mrope_interleaved=bool(rotary.mrope_sections))
    attn = attention(c, qk_norm=spec.QkNorm(n), gated=True, head_dim=head_dim, rope=rotary)
    delta = delta_net(c)
    mixers = [attn if kind == "full_attention" else delta for kind in hybrid_layer_types(c)]
    locations: Locations = {**gated_query(attn), **delta_net_locations(delta)}
    experts = next((one for one in mlps if isinstance(one, spec.Moe)), None)
    if experts is not None:
        locations |= stacked_experts(EXPERT_LOCATIONS, experts.width, c.size("hidden_size"))
        locations |= SHARED_EXPERT_LOCATIONS
    names = TensorNames(key_renames=LANGUAGE_MODEL_PREFIXES).with_locations(**locations)
    layers = [spec.Layer(mixer, one, n, n) for mixer, one in zip(mixers, mlps, strict=True)]
    return decoder(c, layers, final_norm=n, names=names)


def qwen_experts(c: ConfigReader, *, renormalize: bool) -> spec.Moe:
    """Experts, and one that every token runs through, with a gate of its own."""
    shared = mlp(c, width=c.size("shared_expert_intermediate_size"))
    width = c.size("moe_intermediate_size")
    return moe(c, width=width, renormalize=renormalize, shared=shared, shared_gated=True)


def delta_net(c: ConfigReader) -> spec.DeltaNet:
    """The gated delta net that the `linear_` keys describe."""
    required_value(c, "hidden_act", "silu")  # also the activation after the convolution
    key_heads, value_heads = c.size("linear_num_key_heads"), c.size("linear_num_value_heads")
    if value_heads % key_heads:
        raise c.inconsistent(f"{value_heads} value heads cannot share {key_heads} key heads evenly")
    delta = spec.DeltaNet(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=c.size("linear_key_head_dim"),
        value_dim=c.size("linear_value_head_dim"),
        conv_kernel=c.size("linear_conv_kernel_dim", default=4),
        norm_eps=norm(c).eps,
    )
    return limited_state(c, delta)


def hybrid_layer_types(c: ConfigReader) -> list[str]:
    """The mixer of each layer: `layer_types`, or attention in every `full_attention_interval`-th layer."""
    depth = c.num_layers()
    if (kinds := layer_kinds(c, depth, LAYER_KINDS, "layer_types")) is not None:
        return kinds
    every = c.size("full_attention_interval", default=4)
    return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(depth)]


def gated_query(attn: spec.Attention) -> dict[str, TensorLocation]:
    """Locations of q and of the output gate, stored head by head in one matrix."""
    rows = interleaved_rows({"q": attn.head_dim, "gate": attn.head_dim}, attn.heads)
    key = LAYER_PREFIX + "self_attn.q_proj"
    return {f"attn__{part}": TensorLocation(key, rows=spans) for part, spans in rows.items()}


def delta_net_locations(delta: spec.DeltaNet) -> dict[str, TensorLocation]:
    """Locations of a Qwen 3.5 delta net's tensors."""
    prefix, k, v = LAYER_PREFIX + "linear_attn.", delta.key_width, delta.value_width
    rows = {"q": (0, k), "k": (k, 2 * k), "v": (2 * k, 2 * k + v)}
    fused = {f"delta__{part}": TensorLocation(prefix + "in_proj_qkv", rows=(span,)) for part, span in rows.items()}
    return {
        **fused,
        **{f"delta__{part}": TensorLocation(f"{prefix}in_proj_{part}") for part in "zba"},
        "delta__o": TensorLocation(prefix + "out_proj"),
        "delta__conv": TensorLocation(prefix + "conv1d"),
        **{f"delta__{part}_conv": TensorLocation(f"{prefix}{part}_conv1d") for part in "qkv"},
        "delta__norm": TensorLocation(prefix + "norm"),
        "delta__a_log": TensorLocation(prefix + "A_log", without_suffix=True),
        "delta__dt_bias": TensorLocation(prefix + "dt_bias", without_suffix=True),
    }


def interleaved_delta_locations(delta: spec.DeltaNet) -> dict[str, TensorLocation]:
    """Qwen3-Next's two fused matrices: for each key head its q, k, v and z, and its b and a."""
    share = delta.value_heads // delta.key_heads
    values = share * delta.value_dim
    widths = {
        "in_proj_qkvz": {"q": delta.key_dim, "k": delta.key_dim, "v": values, "z": values},
        "in_proj_ba": {"b": share, "a": share},
    }
    return {
        f"delta__{part}": TensorLocation(f"{LAYER_PREFIX}linear_attn.{key}", rows=spans)
        for key, parts in widths.items()
        for part, spans in interleaved_rows(parts, delta.key_heads).items()
    }


OLMO_DELTA_NORM_EPS = 1e-5
"""OLMo-Hybrid's config.json has no key for it."""


def olmo_hybrid(c: ConfigReader) -> spec.Model:
    """Delta nets with norms before, and in every fourth layer OLMo 2's attention with norms after."""
    heads, depth = c.size("num_attention_heads"), c.num_layers()
    c = c.with_defaults(linear_num_key_heads=heads, linear_num_value_heads=heads)
    key_dim = c.size("linear_key_head_dim", default=3 * c.size("hidden_size") // (4 * c.size("linear_num_key_heads")))
    c = c.with_defaults(linear_key_head_dim=key_dim, linear_value_head_dim=2 * key_dim)
    beta_scale = 2.0 if c.flag("linear_allow_neg_eigval", default=True) else 1.0
    delta = replace(delta_net(c), norm_eps=OLMO_DELTA_NORM_EPS, beta_scale=beta_scale)
    n = norm(c)
    has_rope = c.get("rope_theta", "rope_parameters.rope_theta") is not None
    attn = attention(c, qk_norm=spec.QkNorm(n, scope="all"), **({} if has_rope else {"rope": None}))
    kinds = layer_kinds(c, depth, LAYER_KINDS, "layer_types")
    if kinds is None:
        attended = set(range(3, depth, 4)) or {depth - 1}
        kinds = ["full_attention" if i in attended else "linear_attention" for i in range(depth)]
    recurrent = spec.Layer(delta, mlp(c, bias=False), n, n)
    attending = spec.Layer(attn, mlp(c, bias=False), None, None, attn_post=n, mlp_post=n)
    prefix = LAYER_PREFIX + "linear_attn."
    names = TensorNames(
        key_renames=(
            KeyRename(".attention_layer_norm.", ".input_layernorm."),
            KeyRename(".feedforward_layer_norm.", ".post_attention_layernorm."),
        )
    ).with_locations(
        attn_post=TensorLocation(LAYER_PREFIX + "post_attention_layernorm"),
        mlp_post=TensorLocation(LAYER_PREFIX + "post_feedforward_layernorm"),
        **{f"delta__{part}": TensorLocation(f"{prefix}{part}_proj") for part in "qkvabo"},
        **{f"delta__{part}_conv": TensorLocation(f"{prefix}{part}_conv1d") for part in "qkv"},
        delta__z=TensorLocation(prefix + "g_proj"),
        delta__conv=TensorLocation(prefix + "conv1d"),
        delta__norm=TensorLocation(prefix + "o_norm"),
        delta__a_log=TensorLocation(prefix + "A_log", without_suffix=True),
        delta__dt_bias=TensorLocation(prefix + "dt_bias", without_suffix=True),
    )
    return decoder(c, [attending if kind == "full_attention" else recurrent for kind in kinds], names=names)


KIMI_LATENT_NORM_EPS = 1e-6
"""Of the norms of Kimi's latents, whatever `rms_norm_eps` is."""


def kimi_linear(c: ConfigReader) -> spec.Model:
    """Kimi delta attention, and latent attention without positions; experts after the first dense layers."""
    c = c.with_defaults(rms_norm_eps=1e-5)
    n, depth = norm(c), c.num_layers()
    delta, attn = kimi_delta_attention(c), kimi_latent_attention(c)
    kinds = kimi_layer_kinds(c, depth)
    experts = kimi_experts(c)
    mlps = [mlp(c, bias=False) if dense else experts for dense in kimi_dense_layers(c, depth)]
    layers = [
        spec.Layer(attn if kind == "full_attention" else delta, one, n, n)
        for kind, one in zip(kinds, mlps, strict=True)
    ]
    names = TensorNames(key_renames=(KeyRename(".block_sparse_moe.", ".mlp."),)).with_locations(
        **kimi_locations(attn), **kimi_expert_locations(experts.width, c.size("hidden_size"))
    )
    return decoder(c, layers, names=names)


def kimi_delta_attention(c: ConfigReader) -> spec.DeltaNet:
    """The delta net that `linear_attn_config` describes, or transformers' flat keys."""
    required_value(c, "hidden_act", "silu")  # also the activation after the convolution
    heads = c.size("linear_attn_config.num_heads", "linear_num_heads")
    dim = c.size("linear_attn_config.head_dim", "linear_head_dim")
    delta = spec.DeltaNet(
        key_heads=heads,
        value_heads=heads,
        key_dim=dim,
        value_dim=dim,
        conv_kernel=c.size("linear_attn_config.short_conv_kernel_size", "linear_conv_kernel_dim", default=4),
        norm_eps=norm(c).eps,
        decay="channel",
        gate_act="sigmoid",
        gate_rank=dim,
    )
    return limited_state(c, delta)


def kimi_latent_attention(c: ConfigReader) -> spec.LatentAttention:
    """MLA without rotary positions."""
    if c.flag("attention_bias", default=False):
        raise c.invalid_value("attention_bias", "false with latent attention", True)
    required_value(c, "mla_use_nope", True)
    heads = c.size("num_attention_heads")
    if c.size("num_key_value_heads", default=heads) != heads:
        raise c.invalid_value("num_key_value_heads", f"{heads}, one for each head", c.get("num_key_value_heads"))
    nope, shared = c.size("qk_nope_head_dim"), c.size("qk_rope_head_dim")
    value_dim = c.size("v_head_dim")
    if value_dim > nope + shared:
        raise c.inconsistent(f"values of {value_dim} dimensions do not fit in the cache of keys of {nope + shared}")
    return spec.LatentAttention(
        heads=heads,
        nope_dim=nope,
        rope_dim=shared,
        value_dim=value_dim,
        kv_rank=c.size("kv_lora_rank"),
        q_rank=None if c.get("q_lora_rank") is None else c.size("q_lora_rank"),
        rope=None,
        scale=(nope + shared) ** -0.5,
        norm_eps=KIMI_LATENT_NORM_EPS,
    )


def kimi_layer_kinds(c: ConfigReader, depth: int) -> list[str]:
    """The mixer of each layer: `layer_types`, the two lists of `linear_attn_config`, or attention in every fourth."""
    if (kinds := layer_kinds(c, depth, LAYER_KINDS, "layer_types")) is not None:
        return kinds
    attended = layer_numbers(c, "linear_attn_config.full_attn_layers", depth, first=1)
    recurrent = layer_numbers(c, "linear_attn_config.kda_layers", depth, first=1)
    if not attended and not recurrent:
        attended = set(range(4, depth, 4))
    elif attended & recurrent or len(attended | recurrent) != depth:
        raise c.inconsistent(
            f"linear_attn_config names {len(attended)} layers with full attention and {len(recurrent)} without, "
            f"{len(attended & recurrent)} of them twice; the model has {depth}"
        )
    return ["full_attention" if i in attended else "linear_attention" for i in range(depth)]


def kimi_dense_layers(c: ConfigReader, depth: int) -> list[bool]:
    """Whether each layer has an MLP instead of experts."""
    kinds = layer_kinds(c, depth, {"dense": "dense", "sparse": "sparse"}, "mlp_layer_types")
    if kinds is not None:
        return [kind == "dense" for kind in kinds]
    first: int = c.integer("first_k_dense_replace", default=1)
    return [i < first for i in range(depth)]


def kimi_experts(c: ConfigReader) -> spec.Moe:
    """Experts scored by a sigmoid, selected with a bias and in groups, and a shared one."""
    required_value(c, "moe_router_activation_func", "sigmoid")
    required_value(c, "moe_layer_freq", 1)
    width = c.size("moe_intermediate_size")
    shared = c.size("num_shared_experts", "n_shared_experts", default=1)
    experts = c.size("num_local_experts", "num_experts", "n_routed_experts")
    active = c.size("num_experts_per_tok", "num_experts_per_token")
    return moe(
        c,
        width=width,
        experts=experts,
        active=active,
        renormalize=c.flag("norm_topk_prob", "moe_renormalize", default=True),
        routing="sigmoid",
        selection_bias=True,
        weight_scale=c.positive("routed_scaling_factor", default=1.0),
        shared=mlp(c, width=width * shared, bias=False),
        **expert_groups(c, experts, active),
    )


def kimi_locations(attn: spec.LatentAttention) -> Locations:
    """Locations of both kinds of attention: published files have some names that transformers changes."""
    prefix = LAYER_PREFIX + "self_attn."
    forget = prefix + "forget_gate."
    kv_b = interleaved_rows({"k": attn.nope_dim, "v": attn.value_dim}, attn.heads)
    return {
        "attn__q_down": TensorLocation(prefix + "q_a_proj"),
        "attn__q_latent_norm": TensorLocation(prefix + "q_a_layernorm"),
        "attn__q_up": TensorLocation(prefix + "q_b_proj"),
        "attn__kv_down": TensorLocation(prefix + "kv_a_proj_with_mqa"),
        "attn__kv_latent_norm": TensorLocation(prefix + "kv_a_layernorm"),
        **{f"attn__{part}_up": TensorLocation(prefix + "kv_b_proj", rows=spans) for part, spans in kv_b.items()},
        **{f"delta__{part}": TensorLocation(f"{prefix}{part}_proj") for part in "qkvbo"},
        **{f"delta__{part}_conv": TensorLocation(f"{prefix}{part}_conv1d") for part in "qkv"},
        "delta__conv": TensorLocation(prefix + "conv1d"),
        "delta__norm": TensorLocation(prefix + "o_norm"),
        "delta__z_down": TensorLocation(prefix + "g_a_proj"),
        "delta__z_up": TensorLocation(prefix + "g_b_proj"),
        "delta__a_down": (TensorLocation(prefix + "f_a_proj"), TensorLocation(forget + "f_a_proj")),
        "delta__a_up": (TensorLocation(prefix + "f_b_proj"), TensorLocation(forget + "f_b_proj")),
        "delta__a_log": tuple(TensorLocation(at + "A_log", without_suffix=True) for at in (prefix, forget)),
        "delta__dt_bias": tuple(TensorLocation(at + "dt_bias", without_suffix=True) for at in (prefix, forget)),
    }


def kimi_expert_locations(width: int, hidden: int) -> Locations:
    """Locations of router, experts and shared expert."""
    prefix = LAYER_PREFIX + "mlp."
    separate = {
        "mlp__router": TensorLocation(prefix + "gate"),
        "mlp__experts__gate": TensorLocation(prefix + "experts.{e}.w1"),
        "mlp__experts__up": TensorLocation(prefix + "experts.{e}.w3"),
        "mlp__experts__down": TensorLocation(prefix + "experts.{e}.w2"),
    }
    return {
        **stacked_experts(separate, width, hidden),
        "mlp__selection_bias": TensorLocation(prefix + "gate.e_score_correction_bias", without_suffix=True),
        **{
            f"mlp__shared__{part}": TensorLocation(f"{prefix}shared_experts.{part}_proj")
            for part in ("gate", "up", "down")
        },
    }
