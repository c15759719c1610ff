"""How much memory a job takes at most, known before it begins: the largest of its steps.

Counted from shapes alone, for a processor; on a GPU most of it lies there instead. The terms follow the steps
of `pipeline`, `calibrate` and `evaluate` and change when they do.
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import spec
from ..spec.weight_roles import Matrix, matrices
from . import calibration as calibrate
from . import evaluate
from . import sensitivity as measure
from .measurement import quantized_matrices
from .vocab_clusters import cluster_count

FLOAT_BYTES = 4
PASS_TOKENS = 4096
"""Tokens that go through a layer together."""

BASE_BYTES = 450 * 2**20
"""Python, torch, the tokenizer, and what the C library does not give back at once."""

SOLVER_TENSORS = 9
"""Tensors of a matrix's shape being rounded: target, codes, losses, scales, gradient, and passing ones."""

TWO_SIDED_TENSORS = 5
"""More of them where the gradients of the outputs are known together."""


@dataclass(frozen=True)
class PeakMemory:
    """What the sizes of a job depend on."""

    model: spec.Model
    rows: int
    length: int

    def peak_bytes(self, samples_text: bool) -> int:
        """Bytes at most; with `writes` the whole model is loaded to write its own text."""
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
        """Tokens of one pass."""
        return max(PASS_TOKENS, self.length)

    @property
    def hidden_states(self) -> int:
        """The states of all rows."""
        return FLOAT_BYTES * self.rows * self.length * self.model.hidden

    @property
    def head(self) -> int:
        """The last matrix."""
        return FLOAT_BYTES * self.model.vocab * self.model.hidden

    def layers(self) -> list[list[Matrix]]:
        """The matrices of every layer."""
        found: list[list[Matrix]] = [[] for _ in self.model.layers]
        for m in quantized_matrices(self.model):
            found[int(m.role.split(".")[1])].append(m)
        return found

    def sampling(self) -> int:
        """The model in floats, keys and values of all pieces, logits of one token of each."""
        whole = sum(FLOAT_BYTES * m.in_features * m.out_features for m in matrices(self.model))
        table = 0 if self.model.head.tied else self.head
        heads = sum(_kv_numbers(layer.attn) for layer in self.model.layers)
        kept = FLOAT_BYTES * calibrate.SAMPLE_BATCH * min(calibrate.SAMPLE_LENGTH, self.length) * heads
        return whole + table + kept + 4 * FLOAT_BYTES * calibrate.SAMPLE_BATCH * self.model.vocab

    @property
    def clusters(self) -> int:
        """Of the head's columns."""
        return cluster_count(self.model.hidden, self.model.vocab)

    def head_backward(self) -> int:
        """The head, the logits of some tokens with their gradients, states and slopes of all, and kinds."""
        mattering = self.clusters * (2 * self.model.vocab + 2 * self.rows * self.length)
        logits = 6 * measure.LOGIT_TOKENS * self.model.vocab
        return self.head + FLOAT_BYTES * (logits + mattering) + 3 * self.hidden_states

    def layer_backward(self) -> int:
        """A layer, what passes through it there and back, what is heard, one matrix at several widths."""
        return 4 * self.hidden_states + max(
            FLOAT_BYTES * (sum(map(_num_weights, layer)) + sum(map(_fisher_numbers, layer)))
            + FLOAT_BYTES
            * max(5 * len(measure.MEASURED_BITS) * _num_weights(m) + 5 * m.in_features**2 for m in layer)
            + self._activations(layer, 3)
            for layer in self.layers()
        )

    def layer_solving(self) -> int:
        """A layer three times over, covariances, one matrix being solved, both streams and their copies."""
        return 6 * self.hidden_states + max(
            FLOAT_BYTES * 3 * sum(map(_num_weights, layer))
            + FLOAT_BYTES * max(_solver_numbers(m) + 10 * m.in_features**2 for m in layer)
            + self._activations(layer, 2)
            for layer in self.layers()
        )

    def head_solving(self) -> int:
        """The last matrix being solved, and its kinds' covariances."""
        kinds = self.clusters * (2 * self.model.hidden**2 + self.model.vocab + self.rows * self.length)
        return (SOLVER_TENSORS + 2) * self.head + 3 * self.hidden_states + FLOAT_BYTES * kinds

    def evaluating(self) -> int:
        """Both heads, the logits of some tokens of both, and states."""
        tokens = min(evaluate.LOGIT_TOKENS, self.length)
        return 4 * self.head + 7 * FLOAT_BYTES * tokens * self.model.vocab

    def _activations(self, layer: list[Matrix], times: int) -> int:
        """What a layer computes from one pass's tokens."""
        scores = self.length * max(one.attn.heads for one in self.model.layers)
        return (
            FLOAT_BYTES
            * times
            * self.pass_tokens
            * (scores + sum(m.in_features + m.out_features for m in layer))
        )


def _num_weights(m: Matrix) -> int:
    return m.in_features * m.out_features


def _solver_numbers(m: Matrix) -> int:
    """Numbers held while a matrix is rounded, but for those of its inputs."""
    if m.out_features > measure.MAX_FULL_OUTPUTS:
        return SOLVER_TENSORS * _num_weights(m)
    return (SOLVER_TENSORS + TWO_SIDED_TENSORS) * _num_weights(m) + 5 * m.out_features**2


def _fisher_numbers(m: Matrix) -> int:
    """Numbers the covariances of both sides have."""
    return m.in_features**2 + (
        m.out_features**2 if m.out_features <= measure.MAX_FULL_OUTPUTS else m.out_features
    )


def _kv_numbers(attn: spec.Attention) -> int:
    """Numbers of a token's keys and values."""
    return 2 * attn.kv_heads * attn.head_dim
