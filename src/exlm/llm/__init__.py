"""The short way in: `LLM` finds a model, loads it and answers, with the parts of the other rooms."""

from .llm import LLM
from .outputs import Completion, Stream

__all__ = ["LLM", "Completion", "Stream"]
