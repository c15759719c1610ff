"""Corruptions of a matrix's tensors: each takes the tensors and a Random, and changes them in place."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from torch import Tensor

from tests.formats.oracles import Tensors

Corruption = Callable[[Tensors, Random], None]


def replace_tensor(name: str, change: Callable[[Tensor], Tensor]) -> Corruption:
    """Replace one tensor by `change` of it."""

    def corrupt(tensors: Tensors, _: Random) -> None:
        tensors[name] = change(tensors[name])

    return corrupt


def drop_tensor(name: str) -> Corruption:
    """Leave out one tensor."""

    def corrupt(tensors: Tensors, _: Random) -> None:
        del tensors[name]

    return corrupt


def replace_number(name: str, where: Callable[[Random], int], value: Callable[[Random], float]) -> Corruption:
    """Replace one number."""

    def corrupt(tensors: Tensors, random: Random) -> None:
        tensor = tensors[name].clone()
        tensor.view(-1)[where(random)] = value(random)
        tensors[name] = tensor

    return corrupt
