"""The tensors that the files of a named shape hold, layer by layer.

Matrices are what tools quantise one by one; floats they leave alone. A stored matrix may hold several of the model's,
as `in_proj_qkv` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from exlm.bench.shapes import (
    GraniteHybrid,
    Lfm2,
    Mamba,
    Mixtral,
    NemotronH,
    Qwen3Moe,
    Qwen3Next,
    Qwen35,
    Qwen35Moe,
    Shape,
)
from exlm.bench.synthetic import Values

MLP_NAMES = "down_proj", "gate_proj", "up_proj"
EXPERT_NAMES = "w2", "w1", "w3"


class StoredMatrix(NamedTuple):
    """A matrix; its name within the layer has no suffix."""

    name: str
    inputs: int
    outputs: int


class StoredFloats(NamedTuple):
    """A tensor that no tool quantises; its name within the layer has its suffix."""

    name: str
    shape: tuple[int, ...]
    values: Values = "one"


class OtherNames(NamedTuple):
    """The names of the embedding and the final norm, and the prefix of a layer's tensors."""

    embed: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    layer: str = "model.layers.{}."


def other_names(shape: Shape) -> OtherNames:
    match shape:
        case NemotronH():
            return OtherNames("backbone.embeddings.weight", "backbone.norm_f.weight", "backbone.layers.{}.")
        case Lfm2():
            return OtherNames(final_norm="model.embedding_norm.weight")
    return OtherNames()


def norm_values(shape: Shape) -> Values:
    """What the weights of norms are like: near zero where they are stored less one."""
    return "zero" if isinstance(shape, Qwen35) else "one"


def matrices(shape: Shape, layer: int = 0) -> Iterator[StoredMatrix]:
    """The matrices of a layer that tools quantise, as files order them."""
    match shape:
        case NemotronH():  # a layer is one part, which is always called `mixer`
            match shape.pattern[layer]:
                case "M":
                    yield from _mamba_matrices(shape.mamba, "mixer.", shape.hidden)
                case "*":
                    yield from (
                        one._replace(name=one.name.replace("self_attn.", "mixer.")) for one in _attention(shape)
                    )
                case "-":
                    yield StoredMatrix("mixer.down_proj", shape.mlp, shape.hidden)
                    yield StoredMatrix("mixer.up_proj", shape.hidden, shape.mlp)
        case GraniteHybrid():
            yield StoredMatrix("shared_mlp.input_linear", shape.hidden, 2 * shape.shared)
            yield StoredMatrix("shared_mlp.output_linear", shape.shared, shape.hidden)
            if layer in shape.attended:
                yield from _attention(shape)
            else:
                yield from _mamba_matrices(shape.mamba, "mamba.", shape.hidden)
        case Lfm2():
            yield from _gated_mlp(shape, "feed_forward.", shape.mlp, EXPERT_NAMES)
            if layer in shape.attended:
                yield from (one._replace(name=one.name.replace("o_proj", "out_proj")) for one in _attention(shape))
            else:
                yield StoredMatrix("conv.in_proj", shape.hidden, 3 * shape.hidden)
                yield StoredMatrix("conv.out_proj", shape.hidden, shape.hidden)
        case Qwen35():
            if isinstance(shape, Qwen35Moe):
                for e in range(shape.experts):
                    yield from _gated_mlp(shape, f"mlp.experts.{e}.", shape.mlp)
                yield from _gated_mlp(shape, "mlp.shared_expert.", shape.shared)
            else:
                yield from _gated_mlp(shape, "mlp.", shape.mlp)
            if shape.layer_types[layer] == "full_attention":
                for one in _attention(shape):  # the queries' matrix holds their gate, too
                    yield one._replace(outputs=2 * one.outputs) if one.name == "self_attn.q_proj" else one
            else:
                yield from _delta_net_matrices(shape)
        case Mixtral():
            experts, names = ("mlp", MLP_NAMES) if isinstance(shape, Qwen3Moe) else ("block_sparse_moe", EXPERT_NAMES)
            for e in range(shape.experts):
                yield from _gated_mlp(shape, f"{experts}.experts.{e}.", shape.mlp, names)
            yield from _attention(shape)
        case _:
            yield from _gated_mlp(shape, "mlp.", shape.mlp)
            yield from _attention(shape)


def floats(shape: Shape, layer: int = 0) -> Iterator[StoredFloats]:
    """The other tensors of a layer."""
    hidden = shape.hidden
    match shape:
        case NemotronH():
            yield StoredFloats("norm.weight", (hidden,))
            if shape.pattern[layer] == "M":
                yield from _mamba_floats(shape.mamba, "mixer.")
        case GraniteHybrid():
            yield from _layer_norms(shape)
            prefix = "block_sparse_moe."  # files stack the experts in tensors that stay floats
            yield StoredFloats(prefix + "input_linear.weight", (shape.experts, 2 * shape.mlp, hidden), "matrix")
            yield StoredFloats(prefix + "output_linear.weight", (shape.experts, hidden, shape.mlp), "matrix")
            yield StoredFloats(prefix + "router.layer.weight", (shape.experts, hidden), "matrix")
            if layer not in shape.attended:
                yield from _mamba_floats(shape.mamba, "mamba.")
        case Lfm2():
            yield StoredFloats("operator_norm.weight", (hidden,))
            yield StoredFloats("ffn_norm.weight", (hidden,))
            if layer in shape.attended:
                yield from _qk_norms(shape, "q_layernorm", "k_layernorm")
            else:
                yield StoredFloats("conv.conv.weight", (hidden, 1, shape.conv), "conv")
        case Qwen35():
            if isinstance(shape, Qwen35Moe):
                yield StoredFloats("mlp.gate.weight", (shape.experts, hidden), "matrix")
                yield StoredFloats("mlp.shared_expert_gate.weight", (1, hidden), "matrix")
            yield from _layer_norms(shape)
            if shape.layer_types[layer] == "full_attention":
                yield from _qk_norms(shape)
            else:
                yield from _delta_net_floats(shape)
        case Qwen3Moe():
            yield StoredFloats("mlp.gate.weight", (shape.experts, hidden), "matrix")
            yield from _layer_norms(shape)
            yield from _qk_norms(shape)
        case Mixtral():
            yield StoredFloats("block_sparse_moe.gate.weight", (shape.experts, hidden), "matrix")
            yield from _layer_norms(shape)
        case _:
            yield from _layer_norms(shape)


def _gated_mlp(
    shape: Shape, prefix: str, width: int, names: tuple[str, str, str] = MLP_NAMES
) -> Iterator[StoredMatrix]:
    down, gate, up = names
    yield StoredMatrix(prefix + down, width, shape.hidden)
    yield StoredMatrix(prefix + gate, shape.hidden, width)
    yield StoredMatrix(prefix + up, shape.hidden, width)


def _attention(shape: Shape) -> Iterator[StoredMatrix]:
    hidden, wide, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield StoredMatrix("self_attn.k_proj", hidden, kv)
    yield StoredMatrix("self_attn.o_proj", wide, hidden)
    yield StoredMatrix("self_attn.q_proj", hidden, wide)
    yield StoredMatrix("self_attn.v_proj", hidden, kv)


def _layer_norms(shape: Shape) -> Iterator[StoredFloats]:
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield StoredFloats(f"{name}.weight", (shape.hidden,), norm_values(shape))


def _qk_norms(shape: Shape, *names: str) -> Iterator[StoredFloats]:
    for name in names or ("q_norm", "k_norm"):
        yield StoredFloats(f"self_attn.{name}.weight", (shape.head_dim,), norm_values(shape))


def _delta_net_widths(shape: Qwen35) -> tuple[int, int]:
    """The widths of q, k and v together, and of v, z and the output."""
    value_width = shape.value_heads * shape.state_dim
    return 2 * shape.key_heads * shape.state_dim + value_width, value_width


def _delta_net_matrices(shape: Qwen35) -> Iterator[StoredMatrix]:
    qkv, values = _delta_net_widths(shape)
    if isinstance(shape, Qwen3Next):  # for each key head its q, k, v and z
        yield StoredMatrix("linear_attn.in_proj_qkvz", shape.hidden, qkv + values)
    else:
        yield StoredMatrix("linear_attn.in_proj_qkv", shape.hidden, qkv)
        yield StoredMatrix("linear_attn.in_proj_z", shape.hidden, values)
    yield StoredMatrix("linear_attn.out_proj", values, shape.hidden)


def _delta_net_floats(shape: Qwen35) -> Iterator[StoredFloats]:
    prefix, heads = "linear_attn.", shape.value_heads
    yield StoredFloats(prefix + "conv1d.weight", (_delta_net_widths(shape)[0], 1, shape.conv), "conv")
    yield StoredFloats(prefix + "A_log", (heads,), "a_log")
    yield StoredFloats(prefix + "dt_bias", (heads,), "dt_bias")
    yield StoredFloats(prefix + "norm.weight", (shape.state_dim,))
    if isinstance(shape, Qwen3Next):  # for each key head its b and a
        yield StoredFloats(prefix + "in_proj_ba.weight", (2 * heads, shape.hidden), "matrix")
    else:
        yield StoredFloats(prefix + "in_proj_a.weight", (heads, shape.hidden), "matrix")
        yield StoredFloats(prefix + "in_proj_b.weight", (heads, shape.hidden), "matrix")


def _mamba_channels(mamba: Mamba) -> int:
    """The width of x, B and C together."""
    return mamba.width + 2 * mamba.groups * mamba.state


def _mamba_matrices(mamba: Mamba, prefix: str, hidden: int) -> Iterator[StoredMatrix]:
    yield StoredMatrix(prefix + "in_proj", hidden, mamba.width + _mamba_channels(mamba) + mamba.heads)
    yield StoredMatrix(prefix + "out_proj", mamba.width, hidden)


def _mamba_floats(mamba: Mamba, prefix: str) -> Iterator[StoredFloats]:
    channels = _mamba_channels(mamba)
    yield StoredFloats(prefix + "A_log", (mamba.heads,), "a_log")
    yield StoredFloats(prefix + "D", (mamba.heads,))
    yield StoredFloats(prefix + "dt_bias", (mamba.heads,), "dt_bias")
    yield StoredFloats(prefix + "conv1d.weight", (channels, 1, mamba.conv), "conv")
    yield StoredFloats(prefix + "conv1d.bias", (channels,), "zero")
    yield StoredFloats(prefix + "norm.weight", (mamba.width,))
