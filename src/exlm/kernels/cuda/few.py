"""Products of up to 64 rows, by the kernel that is for so many of them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .lanes import ALIKE
from .linear import Product
from .wide import WideProduct


class Few:
    """A product for up to MOST rows: ALIKE of them at a time, or with `wide` more of them at once."""

    def __init__(self, product: Product, wide: bool) -> None:
        self.answers = product.answers
        self.product = product
        self._wide = WideProduct(product) if wide and not product.form.apart else None

    def at(self, rows: int) -> Product | WideProduct | None:
        """What multiplies so many rows at once, if anything does."""
        return self.product if rows <= ALIKE else self._wide

    def __call__(self, x: Tensor, out: Sequence[Tensor], residual: Tensor | None = None) -> None:
        """Fill `out`, the product's `answers`, with x (rows, inputs) @ each matrix + residual."""
        if (whole := self.at(len(x))) is not None:
            return whole(x, out, residual)
        for start in range(0, len(x), ALIKE):
            part = slice(start, start + ALIKE)
            rest = None if residual is None else residual.reshape(len(x), -1)[part]
            self.product(x[part], [one[part] for one in out], rest)
