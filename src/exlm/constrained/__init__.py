"""Constrained decoding: filters decide which tokens may come next, and a stack joins the filters of a job.

A stack takes the tokens of a job as they are sampled and gives, for each step, a packed bitmask of the
allowed tokens, the tokens that end the generation, and the token that is forced where there is no choice. It
knows the tokenizer and no model; applying the mask is the sampler's task. `generator`, `llm` and the public
package import it.
"""

from .filter import Filter, MaskFilter
from .grammar import GrammarFilter, JsonSchemaFilter, RegexFilter
from .literals import PrefixFilter, SelectFilter
from .stack import AllowedTokens, FilterStack, FilterThreadPool
from .token_sets import Bitmask

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
