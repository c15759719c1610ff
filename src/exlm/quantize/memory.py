"""The peak memory of a job, predicted from shapes before it begins: the largest of its steps.

Counted for a CPU; on a GPU most of it is the GPU's. The terms follow the steps of `pipeline`, `calibration`
and `evaluate` and must change with them; a test compares the prediction with what a job really takes.
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import spec
from ..spec.weight_roles import Matrix, matrices
from . import calibration, evaluate, sensitivity
from .allocation import quantized_matrices
from .lm_head import cluster_count

FLOAT_BYTES = 4
PASS_TOKENS = 4096
"""Tokens that go through a layer together."""

BASE_BYTES = 450 * 2**20
"""Python, torch, the tokenizer, and what malloc keeps of freed memory."""

SOLVER_TENSORS = 9
"""Tensors of the shape of the matrix being solved: target, codes, losses, scales, gradient, temporaries."""

TWO_SIDED_TENSORS = 5
"""More of them where the output Hessian is known."""


@dataclass(frozen=True)
class PeakMemory:
    """The sizes that a job's memory depends on."""

    model: spec.Model
    rows: int
    length: int

    def peak_bytes(self, samples_text: bool) -> int:
        """The peak of the whole job; `samples_text` if the model is loaded whole to sample text."""
        steps = [
            self.head_backward(),
            self.layer_backward(),
            self.layer_solving(),
            self.head_solving(),
            self.evaluating(),
        ]
        return BASE_BYTES + max(*steps, self.sampling() if samples_text else 0)

    @property
    def pass_tokens(self) -> int:
        """Tokens of one forward pass."""
        return max(PASS_TOKENS, self.length)

    @property
    def hidden_states(self) -> int:
        """Bytes of the hidden states of all rows."""
        return FLOAT_BYTES * self.rows * self.length * self.model.hidden

    @property
    def head(self) -> int:
        """Bytes of the head in float32."""
        return FLOAT_BYTES * self.model.vocab * self.model.hidden

    @property
    def clusters(self) -> int:
        """Clusters of the head's columns."""
        return cluster_count(self.model.hidden, self.model.vocab)

    def layers(self) -> list[list[Matrix]]:
        """The matrices of every layer."""
        layers: list[list[Matrix]] = [[] for _ in self.model.layers]
        for m in quantized_matrices(self.model):
            layers[int(m.role.split(".")[1])].append(m)
        return layers

    def sampling(self) -> int:
        """`sample_rows`: the model in float32, the KV buffers of a batch, its logits."""
        weights = sum(FLOAT_BYTES * m.in_features * m.out_features for m in matrices(self.model))
        embedding = 0 if self.model.head.tied else self.head
        kv_numbers = sum(_kv_numbers(layer.attn) for layer in self.model.layers)
        length = min(calibration.SAMPLE_LENGTH, self.length)
        kv = FLOAT_BYTES * calibration.SAMPLE_BATCH * length * kv_numbers
        return weights + embedding + kv + 4 * FLOAT_BYTES * calibration.SAMPLE_BATCH * self.model.vocab

    def head_backward(self) -> int:
        """`head_grad`: the head, logits of some tokens and their gradients, states and gradients."""
        cluster_weights = self.clusters * (2 * self.model.vocab + 2 * self.rows * self.length)
        logits = 6 * sensitivity.LOGIT_TOKENS * self.model.vocab
        return self.head + FLOAT_BYTES * (logits + cluster_weights) + 3 * self.hidden_states

    def layer_backward(self) -> int:
        """`vjp` and `measure_profile`: a layer, activations, Fisher sums, a matrix at several widths."""
        return 4 * self.hidden_states + max(
            FLOAT_BYTES * (sum(map(_num_weights, layer)) + sum(map(_fisher_numbers, layer)))
            + FLOAT_BYTES
            * max(5 * len(sensitivity.MEASURED_BITS) * _num_weights(m) + 5 * m.in_features**2 for m in layer)
            + self._activations(layer, 3)
            for layer in self.layers()
        )

    def layer_solving(self) -> int:
        """`solve_layer`: a layer three times, Hessians, a matrix being solved, hidden states twice."""
        return 6 * self.hidden_states + max(
            FLOAT_BYTES * 3 * sum(map(_num_weights, layer))
            + FLOAT_BYTES * max(_solver_numbers(m) + 10 * m.in_features**2 for m in layer)
            + self._activations(layer, 2)
            for layer in self.layers()
        )

    def head_solving(self) -> int:
        """`solve_head`: the head being solved, and the Hessians of its clusters."""
        clusters = self.clusters * (2 * self.model.hidden**2 + self.model.vocab + self.rows * self.length)
        return (SOLVER_TENSORS + 2) * self.head + 3 * self.hidden_states + FLOAT_BYTES * clusters

    def evaluating(self) -> int:
        """`evaluate_model`: the heads of both models, some tokens' logits of both, and states."""
        tokens = min(evaluate.LOGIT_TOKENS, self.length)
        return 4 * self.head + 7 * FLOAT_BYTES * tokens * self.model.vocab

    def _activations(self, layer: list[Matrix], copies: int) -> int:
        """What a layer computes for the tokens of one pass."""
        scores = self.length * max(one.attn.heads for one in self.model.layers)
        numbers = scores + sum(m.in_features + m.out_features for m in layer)
        return FLOAT_BYTES * copies * self.pass_tokens * numbers


def _num_weights(m: Matrix) -> int:
    return m.in_features * m.out_features


def _solver_numbers(m: Matrix) -> int:
    """Numbers held while a matrix is solved, but for those of its input side."""
    if m.out_features > sensitivity.MAX_FULL_OUTPUTS:
        return SOLVER_TENSORS * _num_weights(m)
    return (SOLVER_TENSORS + TWO_SIDED_TENSORS) * _num_weights(m) + 5 * m.out_features**2


def _fisher_numbers(m: Matrix) -> int:
    """Numbers in a matrix's `FisherStats`."""
    full = m.out_features <= sensitivity.MAX_FULL_OUTPUTS
    return m.in_features**2 + (m.out_features**2 if full else m.out_features)


def _kv_numbers(attn: spec.Attention) -> int:
    """Numbers of one token's keys and values."""
    return 2 * attn.kv_heads * attn.head_dim
