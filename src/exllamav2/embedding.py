"""For `from exllamav2.embedding import …`; the module class is not public."""

from exlm import EMBEDDING_INDEX

__all__ = ["EMBEDDING_INDEX"]
