"""Products of up to 64 rows, by the kernel that is for so many of them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .gemm import GemmM16
from .gemm_m64 import GemmM64
from .lanes import MAX_M16


class GemmDispatch:
    """A product for up to MOST rows: ALIKE of them at a time, or with `wide` more of them at once."""

    def __init__(self, product: GemmM16, wide: bool) -> None:
        self.answers = product.answers
        self.product = product
        self._wide = GemmM64(product) if wide and not product.form.apart else None

    def at(self, rows: int) -> GemmM16 | GemmM64 | None:
        """What multiplies so many rows at once, if anything does."""
        return self.product if rows <= MAX_M16 else self._wide

    def __call__(self, x: Tensor, out: Sequence[Tensor], residual: Tensor | None = None) -> None:
        """Fill `out`, the product's `answers`, with x (rows, inputs) @ each matrix + residual."""
        if (read_source := self.at(len(x))) is not None:
            return read_source(x, out, residual)
        for start in range(0, len(x), MAX_M16):
            part = slice(start, start + MAX_M16)
            rest = None if residual is None else residual.reshape(len(x), -1)[part]
            self.product(x[part], [one[part] for one in out], rest)
