"""For `from exllamav2.conversion.tokenize import …`."""

from exlm.legacy.placeholders import get_standard_calibration, tokenize
from exlm.legacy.tokenization import get_tokens

__all__ = ["get_standard_calibration", "get_tokens", "tokenize"]
