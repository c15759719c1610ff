"""For `from exllamav2.conversion.tokenize import …`."""

from exlm.legacy.converter import get_standard_calibration, get_tokens, tokenize

__all__ = ["get_standard_calibration", "get_tokens", "tokenize"]
