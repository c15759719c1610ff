"""Random weights for tiny models whose outputs can be compared; not an initialiser to train from.

Every number depends only on the seed and the parameter's name, so variants of a family share what
they have in common, and their logits can be compared. Norms are near their neutral value, biases
are never zero, and tokens decide a router's choice with a wide margin: two correct
implementations never pick different experts.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor, nn

SPREAD = 0.2
"""Spread of norms and biases around transformers' initial values."""

QUERY_GAIN = 1.2
CONVOLUTION_GAIN = 2.0
RECURRENT_OUTPUT_GAIN = 0.8
"""With these two, norms of small outputs of delta nets do not magnify the last bits of sums."""

EMBEDDING = 0.5
POSITION = 0.3
ROUTING_STRENGTH = 3.0
"""How strongly an embedding selects its token's experts."""

TIME_CONSTANTS = {"A_log": -2.0, "dt_bias": -1.0}
"""Means of parameters of recurrences, for states that remember hundreds of tokens in some heads and few in others."""

SELECTION_BIAS = ("e_score_correction_bias", "expert_bias")

LARGE_GAIN = (*("lm_head", "o_proj", "out_proj", "down_proj", "c_proj", ".w2", "output_linear", "fc2_latent_proj"),)
"""Matrices that add to the residual stream, and the head: too small, and a tied model repeats its input."""

INTO_RESIDUAL = (
    *("o_proj.weight", "out_proj.weight", "down_proj.weight", ".w2.weight"),
    *("output_linear.weight", "fc2_latent_proj.weight"),
)
STACKED_INTO_RESIDUAL = ("experts.down_proj", "mlp.w2")
ROUTING_DAMPING = 0.05
ROUTERS = (
    *(".mlp.gate.weight", ".block_sparse_moe.gate.weight", ".router.layer.weight"),
    *(".block_sparse_moe.router.weight", ".mixer.gate.weight", ".feed_forward.gate.weight"),
)


def randomize_weights(model: nn.Module, seed: int, *, embedding: float = EMBEDDING, active: int = 0) -> None:
    """Fill all parameters; `active`: experts of a token, if the model has any."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith(SELECTION_BIAS):  # the first expert of a layer is selected more often
                buffer.copy_(_noise(f"{seed}:{name}", buffer) * 0.1 + 0.5 * torch.eye(len(buffer))[0])
        for name, parameter in model.named_parameters():
            noise = _noise(f"{seed}:{name}", parameter)
            if name.endswith(tuple(TIME_CONSTANTS)):
                parameter.copy_(noise * 0.7 + TIME_CONSTANTS[name.rpartition(".")[2]])
            elif id(parameter) in tables:
                parameter.copy_(noise * (POSITION if "wpe" in name else embedding))
            elif parameter.ndim < 2 or "norm" in name.rsplit(".", 2)[-2]:
                parameter.add_(noise * SPREAD)
            else:
                parameter.copy_(noise * _gain(name) / math.sqrt(_inputs(model, name, parameter)))
        if active:
            _make_routing_decisive(model, seed, embedding, active)


def _noise(label: str, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(label.encode()))
    return torch.randn(like.shape, generator=generator)


def _gain(name: str) -> float:
    if any(part in name for part in ("q_proj", "k_proj", "qkv", "c_attn")):
        return QUERY_GAIN
    if "conv1d" in name:
        return CONVOLUTION_GAIN
    if "linear_attn.o" in name:
        return RECURRENT_OUTPUT_GAIN
    return 1.6 if any(part in name for part in LARGE_GAIN) else 1.0


def _inputs(model: nn.Module, name: str, parameter: Tensor) -> int:
    """The number of inputs; Conv1D has it first, stacked experts last."""
    owner = model.get_submodule(name.rpartition(".")[0])
    if type(owner).__name__ == "Conv1D":
        return parameter.shape[0]
    return parameter.shape[-1] if parameter.ndim == 3 else math.prod(parameter.shape[1:])


def _make_routing_decisive(model: nn.Module, seed: int, embedding: float, active: int) -> None:
    """Write each token's experts into its embedding, which nothing may change, for the routers to read."""
    parameters = dict(model.named_parameters())
    routers = [parameter for name, parameter in parameters.items() if name.endswith(ROUTERS)]
    if not routers:
        return
    experts = routers[0].shape[0]
    table = next(m.weight for m in model.modules() if isinstance(m, nn.Embedding))
    taste = _noise(f"{seed}:taste", table[:, :experts])
    wanted = torch.zeros_like(taste).scatter_(1, taste.topk(active, dim=1).indices, 1.0)
    table[:, :experts] = ROUTING_STRENGTH * embedding * (2 * wanted - 1 + 0.1 * taste)
    for name, parameter in parameters.items():
        if name.endswith(INTO_RESIDUAL):
            parameter[:experts] *= ROUTING_DAMPING
        elif name.endswith(STACKED_INTO_RESIDUAL):
            parameter[:, :experts] *= ROUTING_DAMPING
    for router in routers:
        router.mul_(0.1)
        router[:, :experts] += 1.5 * torch.eye(experts)
