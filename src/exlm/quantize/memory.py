"""How much memory a job takes at most, known before it begins: the largest of its steps.

Counted from shapes alone, for a processor; on a GPU most of it lies there instead. The terms follow the steps
of `pipeline`, `calibrate` and `evaluate` and change when they do.
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import spec
from ..spec.weight_roles import Matrix, matrices
from . import calibrate, evaluate, measure
from .kinds import kinds_count
from .measurement import quantised

FLOAT = 4
AT_ONCE = 4096
"""Tokens that go through a layer together."""

PROGRAM = 450 * 2**20
"""Python, torch, the tokenizer, and what the C library does not give back at once."""

SOLVING = 9
"""Tensors of a matrix's shape being rounded: target, codes, losses, scales, gradient, and passing ones."""

SETTLING = 5
"""More of them where the gradients of the outputs are known together."""


@dataclass(frozen=True)
class Shapes:
    """What the sizes of a job depend on."""

    model: spec.Model
    rows: int
    length: int

    def most(self, writes: bool) -> int:
        """Bytes at most; with `writes` the whole model is loaded to write its own text."""
        steps = [self.answering(), self.measuring(), self.quantising(), self.rounding_head(), self.judging()]
        return PROGRAM + max(*steps, self.writing() if writes else 0)

    @property
    def together(self) -> int:
        """Tokens of one pass."""
        return max(AT_ONCE, self.length)

    @property
    def stream(self) -> int:
        """The states of all rows."""
        return FLOAT * self.rows * self.length * self.model.hidden

    @property
    def head(self) -> int:
        """The last matrix."""
        return FLOAT * self.model.vocab * self.model.hidden

    def layers(self) -> list[list[Matrix]]:
        """The matrices of every layer."""
        found: list[list[Matrix]] = [[] for _ in self.model.layers]
        for m in quantised(self.model):
            found[int(m.role.split(".")[1])].append(m)
        return found

    def writing(self) -> int:
        """The model in floats, keys and values of all pieces, logits of one token of each."""
        whole = sum(FLOAT * m.in_features * m.out_features for m in matrices(self.model))
        table = 0 if self.model.head.tied else self.head
        heads = sum(_kept_heads(layer.attn) for layer in self.model.layers)
        kept = FLOAT * calibrate.BATCH * min(calibrate.PIECE, self.length) * heads
        return whole + table + kept + 4 * FLOAT * calibrate.BATCH * self.model.vocab

    @property
    def kinds(self) -> int:
        """Of the head's columns."""
        return kinds_count(self.model.hidden, self.model.vocab)

    def answering(self) -> int:
        """The head, the logits of some tokens with their gradients, states and slopes of all, and kinds."""
        mattering = self.kinds * (2 * self.model.vocab + 2 * self.rows * self.length)
        logits = 6 * measure.TOGETHER * self.model.vocab
        return self.head + FLOAT * (logits + mattering) + 3 * self.stream

    def measuring(self) -> int:
        """A layer, what passes through it there and back, what is heard, one matrix at several widths."""
        return 4 * self.stream + max(
            FLOAT * (sum(map(_size, layer)) + sum(map(_heard, layer)))
            + FLOAT * max(5 * len(measure.MEASURED) * _size(m) + 5 * m.in_features**2 for m in layer)
            + self._passing(layer, 3)
            for layer in self.layers()
        )

    def quantising(self) -> int:
        """A layer three times over, covariances, one matrix being solved, both streams and their copies."""
        return 6 * self.stream + max(
            FLOAT * 3 * sum(map(_size, layer))
            + FLOAT * max(_solving(m) + 10 * m.in_features**2 for m in layer)
            + self._passing(layer, 2)
            for layer in self.layers()
        )

    def rounding_head(self) -> int:
        """The last matrix being solved, and its kinds' covariances."""
        kinds = self.kinds * (2 * self.model.hidden**2 + self.model.vocab + self.rows * self.length)
        return (SOLVING + 2) * self.head + 3 * self.stream + FLOAT * kinds

    def judging(self) -> int:
        """Both heads, the logits of some tokens of both, and states."""
        tokens = min(evaluate.AT_ONCE, self.length)
        return 4 * self.head + 7 * FLOAT * tokens * self.model.vocab

    def _passing(self, layer: list[Matrix], times: int) -> int:
        """What a layer computes from one pass's tokens."""
        scores = self.length * max(one.attn.heads for one in self.model.layers)
        return FLOAT * times * self.together * (scores + sum(m.in_features + m.out_features for m in layer))


def _size(m: Matrix) -> int:
    return m.in_features * m.out_features


def _solving(m: Matrix) -> int:
    """Numbers held while a matrix is rounded, but for those of its inputs."""
    if m.out_features > measure.WIDEST:
        return SOLVING * _size(m)
    return (SOLVING + SETTLING) * _size(m) + 5 * m.out_features**2


def _heard(m: Matrix) -> int:
    """Numbers the covariances of both sides have."""
    return m.in_features**2 + (m.out_features**2 if m.out_features <= measure.WIDEST else m.out_features)


def _kept_heads(attn: spec.Attention) -> int:
    """Numbers of a token's keys and values."""
    return 2 * attn.kv_heads * attn.head_dim
