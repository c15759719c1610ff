"""exlm runs quantised language models locally: a folder of weights in, text out.

This is the front door: every public name, and nothing else.
"""

from .cache import Cache, CacheBase
from .config import Config
from .errors import (
    BadFile,
    BadTensor,
    CacheTooSmall,
    ChatTemplateError,
    CheckpointError,
    ConfigError,
    ExlmError,
    InputError,
    MissingExtra,
    MissingTensor,
    ModelNotFound,
    NotLoaded,
    TokenizerError,
    UnknownArchitecture,
    UnsafeFile,
    Unsupported,
)
from .hub import find_model
from .model import MatrixSummary, Model, Summary
from .tokenizer import Tokenizer
from .version import __version__

__all__ = [
    "BadFile",
    "BadTensor",
    "Cache",
    "CacheBase",
    "CacheTooSmall",
    "ChatTemplateError",
    "CheckpointError",
    "Config",
    "ConfigError",
    "ExlmError",
    "InputError",
    "MatrixSummary",
    "MissingExtra",
    "MissingTensor",
    "Model",
    "ModelNotFound",
    "NotLoaded",
    "Summary",
    "Tokenizer",
    "TokenizerError",
    "UnknownArchitecture",
    "UnsafeFile",
    "Unsupported",
    "__version__",
    "find_model",
]
