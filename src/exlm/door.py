"""The front door: every public name, and nothing else. `exlm` itself opens it when one is asked for."""

from .adapters import Lora
from .cache import Cache, CacheBase, CacheFP8, CacheFP16, CacheQ4, CacheQ6, CacheQ8
from .config import Config
from .errors import (
    BadFile,
    BadLogits,
    BadTensor,
    CacheTooSmall,
    ChatTemplateError,
    CheckpointError,
    ConfigError,
    DoesNotFit,
    ExlmError,
    InputError,
    KernelError,
    MissingExtra,
    MissingTensor,
    ModelNotFound,
    NotLoaded,
    QueueFull,
    TokenizerError,
    UnknownArchitecture,
    UnsafeFile,
    Unsupported,
    WorkerLost,
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
from .llm import LLM, Completion, Stream
from .model import MatrixSummary, Model, Summary
from .model.convert import convert_model
from .quantize import Quality, evaluate_model, quantize_model, validate_exl2, write_report
from .sampling import PostSamplingResult, Sampler, Settings
from .tokenizer import Tokenizer
from .version import __version__
from .vision import EMBEDDING_INDEX, MMEmbedding

__all__ = [
    "EMBEDDING_INDEX",
    "LLM",
    "AsyncGenerator",
    "AsyncJob",
    "BadFile",
    "BadLogits",
    "BadTensor",
    "Cache",
    "CacheBase",
    "CacheFP8",
    "CacheFP16",
    "CacheQ4",
    "CacheQ6",
    "CacheQ8",
    "CacheTooSmall",
    "ChatTemplateError",
    "CheckpointError",
    "Completion",
    "Config",
    "ConfigError",
    "DoesNotFit",
    "ExlmError",
    "Filter",
    "Generator",
    "GrammarFilter",
    "InputError",
    "Job",
    "JsonSchemaFilter",
    "KernelError",
    "Lora",
    "MMEmbedding",
    "MatrixSummary",
    "MissingExtra",
    "MissingTensor",
    "Model",
    "ModelNotFound",
    "NotLoaded",
    "PostSamplingResult",
    "PrefillResult",
    "PrefixFilter",
    "Quality",
    "QueueFull",
    "RegexFilter",
    "Sampler",
    "SelectFilter",
    "Settings",
    "StartedResult",
    "Stream",
    "StreamingResult",
    "Summary",
    "Tokenizer",
    "TokenizerError",
    "UnknownArchitecture",
    "UnsafeFile",
    "Unsupported",
    "WorkerLost",
    "__version__",
    "convert_model",
    "evaluate_model",
    "find_model",
    "quantize_model",
    "validate_exl2",
    "write_report",
]
