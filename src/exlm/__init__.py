"""exlm runs quantised language models locally: a folder of weights in, text out.

This is the front door: every public name, and nothing else.
"""

from .cache import Cache, CacheBase, CacheFP8, CacheQ4, CacheQ6, CacheQ8
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
from .filters import Filter, GrammarFilter, JsonSchemaFilter, PrefixFilter, RegexFilter, SelectFilter
from .generator import (
    AsyncGenerator,
    AsyncJob,
    Generator,
    Job,
    PrefillResult,
    StartedResult,
    StreamingResult,
)
from .hub import find_model
from .model import MatrixSummary, Model, Summary
from .model.convert import convert_model
from .sampling import Sampler, Settings
from .tokenizer import Tokenizer
from .version import __version__

__all__ = [
    "AsyncGenerator",
    "AsyncJob",
    "BadFile",
    "BadTensor",
    "Cache",
    "CacheBase",
    "CacheFP8",
    "CacheQ4",
    "CacheQ6",
    "CacheQ8",
    "CacheTooSmall",
    "ChatTemplateError",
    "CheckpointError",
    "Config",
    "ConfigError",
    "ExlmError",
    "Filter",
    "Generator",
    "GrammarFilter",
    "InputError",
    "Job",
    "JsonSchemaFilter",
    "MatrixSummary",
    "MissingExtra",
    "MissingTensor",
    "Model",
    "ModelNotFound",
    "NotLoaded",
    "PrefillResult",
    "PrefixFilter",
    "RegexFilter",
    "Sampler",
    "SelectFilter",
    "Settings",
    "StartedResult",
    "StreamingResult",
    "Summary",
    "Tokenizer",
    "TokenizerError",
    "UnknownArchitecture",
    "UnsafeFile",
    "Unsupported",
    "__version__",
    "convert_model",
    "find_model",
]
