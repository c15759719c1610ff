"""What may come next: filters that constrain an answer, and the stack that joins those of a job."""

from .bits import Words
from .filter import Filter, MaskFilter
from .grammar import GrammarFilter, JsonSchemaFilter, RegexFilter
from .prefix import PrefixFilter
from .select import SelectFilter
from .stack import Allowed, FilterStack

__all__ = [
    "Allowed",
    "Filter",
    "FilterStack",
    "GrammarFilter",
    "JsonSchemaFilter",
    "MaskFilter",
    "PrefixFilter",
    "RegexFilter",
    "SelectFilter",
    "Words",
]
