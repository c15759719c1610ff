"""exlm runs quantised language models locally: a folder of weights in, text out.

Every public name is here, and comes from `door`, which is opened when the first of them is asked for: torch
takes seconds to import, in which a program may have something else to do.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from .version import __version__ as __version__

if TYPE_CHECKING:
    from .door import *  # noqa: F403
    from .door import __all__ as __all__
else:

    def __getattr__(name: str) -> object:
        """A part of the package, or a public name; with the first of those come all."""
        if find_spec(f"{__name__}.{name}") is not None:
            return import_module(f".{name}", __name__)
        door = import_module(".door", __name__)
        globals().update({one: getattr(door, one) for one in door.__all__}, __all__=door.__all__)
        if name in globals():
            return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        """What completion should offer."""
        return sorted({*globals(), *import_module(".door", __name__).__all__})
