"""What may come next: filters that constrain an answer, and the stack that joins those of a job."""

from .bitmask import Bitmask
from .filter import Filter, MaskFilter
from .grammar import GrammarFilter, JsonSchemaFilter, RegexFilter
from .literals import PrefixFilter, SelectFilter
from .stack import AllowedTokens, FilterStack, FilterThreadPool

__all__ = [
    "AllowedTokens",
    "Bitmask",
    "Filter",
    "FilterStack",
    "FilterThreadPool",
    "GrammarFilter",
    "JsonSchemaFilter",
    "MaskFilter",
    "PrefixFilter",
    "RegexFilter",
    "SelectFilter",
]
