"""The short way in: `LLM` finds a model, loads it and answers, with the parts of the other rooms."""

from .answers import Completion, Stream
from .llm import LLM

__all__ = ["LLM", "Completion", "Stream"]
