"""What may come next: filters that constrain an answer, and the stack that joins those of a job."""

from .bitmask import Bitmask
from .filter import Filter, MaskFilter
from .grammar import GrammarFilter, JsonSchemaFilter, RegexFilter
from .prefix import PrefixFilter
from .select import SelectFilter
from .stack import AllowedTokens, FilterStack

__all__ = [
    "AllowedTokens",
    "Bitmask",
    "Filter",
    "FilterStack",
    "GrammarFilter",
    "JsonSchemaFilter",
    "MaskFilter",
    "PrefixFilter",
    "RegexFilter",
    "SelectFilter",
]
