"""Predicts the peak memory of a quantisation from the model's shapes.

The terms follow the steps of `pipeline`, `calibration` and `evaluate` and must change with them; a test
compares them with what a job really takes. Counted for a CPU; on a GPU most of it is the GPU's memory.
"""

from __future__ import annotations

import math

from .. import spec
from ..spec.model import Matrix, matrices
from . import calibration, evaluate, pipeline, sensitivity
from .allocation import quantized_matrices
from .layer_loader import SEGMENT_TOKENS
from .layer_solver import cluster_count

FLOAT_BYTES = 4
BASE_BYTES = 450 * 2**20
"""Python, torch, the tokenizer, and what malloc keeps of freed memory."""

SOLVER_TENSORS = 9
"""Tensors of the shape of the matrix being solved: target, codes, losses, scales, gradient, temporaries."""

TWO_SIDED_TENSORS = 5
"""More of them where the output Hessian is known."""

STATE_TENSORS = 8
"""Recurrent states of one token that exist together: the present one, its gradient, temporaries."""

TOKEN_STATES = 5
"""Recurrent states for each token of a segment: those that autograd keeps, and what malloc wastes between them."""


def peak_bytes(model: spec.Model, rows: int, length: int, *, samples_text: bool) -> int:
    """The peak of a job on `rows` of `length` tokens; `samples_text`: the model is loaded whole to sample text."""
    tokens, vocab = rows * length, model.vocab
    head, states = model.hidden * vocab, tokens * model.hidden  # floats in the head, and in all rows' hidden states
    clusters = cluster_count(model.hidden, vocab)
    pass_rows = max(1, pipeline.PASS_TOKENS // length)
    layers: list[list[Matrix]] = [[] for _ in model.layers]
    for m in quantized_matrices(model):
        layers[int(m.role.split(".")[1])].append(m)
    scores = length * max((attn.heads for attn in model.attentions), default=1)
    floats = [
        # `head_grad`: the head, logits of some tokens and their gradients, states and gradients
        head + 6 * sensitivity.LOGIT_TOKENS * vocab + clusters * (2 * vocab + 2 * tokens) + 3 * states,
        # `solve_head`: the head being solved, and the Hessians of its clusters
        (SOLVER_TENSORS + 2) * head + 3 * states + clusters * (2 * model.hidden**2 + vocab + tokens),
        # `evaluate_model`: the heads of both models, some tokens' logits of both, and states
        4 * head + 7 * min(evaluate.LOGIT_TOKENS, length) * vocab,
    ]
    for layer, shape in zip(layers, (layer.state for layer in model.layers), strict=True):
        state = pass_rows * _state_floats(shape)
        kept_states = -(-length // SEGMENT_TOKENS) + TOKEN_STATES * SEGMENT_TOKENS
        weights = sum(map(_weights, layer))
        activations = max(pipeline.PASS_TOKENS, length) * (scores + sum(m.in_features + m.out_features for m in layer))
        measured = max(5 * len(sensitivity.MEASURED_BITS) * _weights(m) + 5 * m.in_features**2 for m in layer)
        solved = max(_solver_floats(m) + 10 * m.in_features**2 for m in layer)
        floats += [
            # `vjp` and `measure_matrix`: a layer, activations, Fisher sums, a matrix at several widths
            4 * states
            + weights
            + sum(map(_fisher_floats, layer))
            + measured
            + 3 * activations
            + (kept_states + STATE_TENSORS) * state,
            # `solve_layer`: a layer three times, Hessians, a matrix being solved, hidden states twice
            6 * states + 3 * weights + solved + 2 * activations + STATE_TENSORS * state,
        ]
    if samples_text:
        # `sample_rows`: the whole model, the KV buffers and the recurrent states of a batch, its logits
        kv = min(calibration.SAMPLE_LENGTH, length) * sum(
            2 * attn.kv_heads * attn.head_dim for attn in model.attentions
        )
        embedding = 0 if model.head.tied else head
        recurrent = [_state_floats(layer.state) for layer in model.layers]
        per_row = kv + 4 * vocab + 2 * sum(recurrent) + STATE_TENSORS * max(recurrent, default=0)
        floats.append(sum(map(_weights, matrices(model))) + embedding + calibration.SAMPLE_BATCH * per_row)
    return BASE_BYTES + FLOAT_BYTES * max(floats)


def _state_floats(shape: spec.StateShape | None) -> int:
    """Floats of one sequence's recurrent state in a layer."""
    return 0 if shape is None else sum(math.prod(sizes) for sizes in (shape.conv, shape.matrix) if sizes)


def _weights(m: Matrix) -> int:
    return m.in_features * m.out_features


def _solver_floats(m: Matrix) -> int:
    """Floats in memory while a matrix is solved, without those of its input side."""
    if m.out_features > sensitivity.MAX_FULL_OUTPUTS:
        return SOLVER_TENSORS * _weights(m)
    return (SOLVER_TENSORS + TWO_SIDED_TENSORS) * _weights(m) + 5 * m.out_features**2


def _fisher_floats(m: Matrix) -> int:
    """Floats in a matrix's `FisherStats`."""
    full = m.out_features <= sensitivity.MAX_FULL_OUTPUTS
    return m.in_features**2 + (m.out_features**2 if full else m.out_features)
