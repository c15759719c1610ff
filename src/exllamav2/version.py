"""For `from exllamav2.version import …`; the number is exlm's own."""

from exlm import __version__

__all__ = ["__version__"]
