"""Public names of version 0.1 are still importable."""

from __future__ import annotations

from typing import Any

import pytest

from exlm import batch, scale, serve


@pytest.mark.parametrize("package", [serve, batch, scale], ids=lambda package: package.__name__)
def test_names_of_0_1_are_the_new_ones(package: Any) -> None:
    assert package.NAMES_OF_0_1
    for old, new in package.NAMES_OF_0_1.items():
        assert getattr(package, old) is getattr(package, new)
        assert new in package.__all__
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = package.Nothing
