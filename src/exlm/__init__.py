"""exlm runs quantised language models locally: a folder of weights in, text out.

Every public name is here. A name is imported when it is first used, so that `import exlm` and
`from exlm import InputError` do not import torch.
"""

from typing import TYPE_CHECKING

from .lazy import lazy_exports
from .version import __version__ as __version__

if TYPE_CHECKING:
    from .config import Config
    from .constrained import Filter, GrammarFilter, JsonSchemaFilter, PrefixFilter, RegexFilter, SelectFilter
    from .convert.api import convert_model
    from .errors import (
        BadFile,
        BadLogits,
        BadTensor,
        BadText,
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
        TokenizerNotFound,
        UnknownArchitecture,
        UnsafeFile,
        Unsupported,
        WorkerLost,
    )
    from .generator import AsyncGenerator, AsyncJob, Generator, Job, PrefillResult, StartedResult, StreamingResult
    from .hub import find_model
    from .kvcache import CACHES, Cache, CacheBase, CacheFP8, CacheFP16, CacheQ4, CacheQ6, CacheQ8
    from .legacy.sampler import Sampler
    from .llm import LLM, Completion, Stream
    from .lora import Lora
    from .model import MatrixSummary, Model, Summary
    from .multimodal import EMBEDDING_INDEX, MMEmbedding
    from .quantize import Quality, evaluate_model, quantize_model, validate_exl2, write_report
    from .sampling import PostSamplingResult, Settings
    from .tokenizer import Tokenizer

# The same names as above, by submodule; tests/contract/test_public_names.py compares the two.
_EXPORTS = {
    "lora": ("Lora",),
    "kvcache": ("CACHES", "Cache", "CacheBase", "CacheFP8", "CacheFP16", "CacheQ4", "CacheQ6", "CacheQ8"),
    "config": ("Config",),
    "errors": (
        "BadFile",
        "BadLogits",
        "BadTensor",
        "BadText",
        "CacheTooSmall",
        "ChatTemplateError",
        "CheckpointError",
        "ConfigError",
        "DoesNotFit",
        "ExlmError",
        "InputError",
        "KernelError",
        "MissingExtra",
        "MissingTensor",
        "ModelNotFound",
        "NotLoaded",
        "QueueFull",
        "TokenizerError",
        "TokenizerNotFound",
        "UnknownArchitecture",
        "UnsafeFile",
        "Unsupported",
        "WorkerLost",
    ),
    "constrained": ("Filter", "GrammarFilter", "JsonSchemaFilter", "PrefixFilter", "RegexFilter", "SelectFilter"),
    "generator": (
        "AsyncGenerator",
        "AsyncJob",
        "Generator",
        "Job",
        "PrefillResult",
        "StartedResult",
        "StreamingResult",
    ),
    "hub": ("find_model",),
    "llm": ("LLM", "Completion", "Stream"),
    "model": ("MatrixSummary", "Model", "Summary"),
    "convert.api": ("convert_model",),
    "quantize": ("Quality", "evaluate_model", "quantize_model", "validate_exl2", "write_report"),
    "sampling": ("PostSamplingResult", "Settings"),
    "legacy.sampler": ("Sampler",),
    "tokenizer": ("Tokenizer",),
    "multimodal": ("EMBEDDING_INDEX", "MMEmbedding"),
}

__all__ = [
    "CACHES",
    "EMBEDDING_INDEX",
    "LLM",
    "AsyncGenerator",
    "AsyncJob",
    "BadFile",
    "BadLogits",
    "BadTensor",
    "BadText",
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
    "TokenizerNotFound",
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

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, globals(), _EXPORTS)
