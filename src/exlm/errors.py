"""Everything exlm raises on purpose. Each message says what, how much, and what to try.

    ExlmError
    ├── ConfigError            config.json (or an override) does not describe a model
    │   └── UnknownArchitecture
    ├── ModelNotFound          the path is not a model
    ├── CheckpointError        the weights cannot be read
    │   ├── BadFile            a file is truncated, malformed or points outside the folder
    │   ├── MissingTensor      a tensor the model needs is in none of the files
    │   ├── BadTensor          a tensor has the wrong shape, type or contents
    │   └── UnsafeFile         a pickle: never opened
    ├── TokenizerError         the tokenizer files are missing or malformed
    │   └── ChatTemplateError  a chat template failed, ran too long or reached for what it may not
    ├── InputError             a call's arguments cannot be served
    │   └── CacheTooSmall
    ├── NotLoaded              the model has no weights yet
    ├── MissingExtra           an optional package is not installed
    └── Unsupported            no backend can run this layer; the message lists why

Where the old library raised a built-in type for the same mistake, ours inherits it, so that an old
script's `except ValueError` keeps working.
"""

from __future__ import annotations


class ExlmError(Exception):
    """The base of every error exlm raises on purpose."""


class ConfigError(ExlmError, ValueError):
    """config.json, or an override of it, does not describe a model."""


class UnknownArchitecture(ConfigError):
    """The architecture is not one we know; it is never guessed."""


class ModelNotFound(ExlmError, FileNotFoundError):
    """The path is not a model folder."""


class CheckpointError(ExlmError, ValueError):
    """The weights cannot be read."""


class BadFile(CheckpointError):
    """A weight file is truncated, malformed, or an index points outside the folder."""


class MissingTensor(CheckpointError):
    """A tensor the model needs is in none of the files."""


class BadTensor(CheckpointError):
    """A tensor has the wrong shape, type or contents."""


class UnsafeFile(CheckpointError):
    """A file that could run code when opened; we do not open it."""


class TokenizerError(ExlmError, ValueError):
    """The tokenizer files are missing or malformed, or a call on the tokenizer makes no sense."""


class ChatTemplateError(TokenizerError):
    """A chat template failed, ran too long, or reached for what it may not touch."""


class InputError(ExlmError, ValueError):
    """The arguments of a call cannot be served as given."""


class CacheTooSmall(InputError):
    """The sequence does not fit the cache."""


class NotLoaded(ExlmError, RuntimeError):
    """The model has no weights in memory yet (or no longer)."""


class MissingExtra(ExlmError, ImportError):
    """An optional package is needed for this and is not installed."""


class Unsupported(ExlmError, RuntimeError):
    """No backend can run this layer on this device."""
