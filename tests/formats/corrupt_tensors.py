"""Ways to spoil the tensors of a matrix: each takes them and some chance, and changes them in place."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from torch import Tensor

from tests.formats.oracles import Tensors

Corruption = Callable[[Tensors, Random], None]


def replace_tensor(name: str, change: Callable[[Tensor], Tensor]) -> Corruption:
    """One tensor replaced by what becomes of it."""

    def lie(tensors: Tensors, _: Random) -> None:
        tensors[name] = change(tensors[name])

    return lie


def drop_tensor(name: str) -> Corruption:
    """One tensor left out."""

    def lie(tensors: Tensors, _: Random) -> None:
        del tensors[name]

    return lie


def replace_number(name: str, where: Callable[[Random], int], value: Callable[[Random], float]) -> Corruption:
    """One number replaced."""

    def lie(tensors: Tensors, random: Random) -> None:
        tensor = tensors[name].clone()
        tensor.view(-1)[where(random)] = value(random)
        tensors[name] = tensor

    return lie
