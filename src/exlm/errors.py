"""The errors that exlm raises on purpose. Each message has the fact, the number and the remedy.

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
    │   ├── TokenizerNotFound  there are none
    │   ├── BadText            a text with a lone surrogate, half a character (an InputError too)
    │   └── ChatTemplateError  a chat template failed, ran too long or used a forbidden feature
    ├── InputError             a call's arguments cannot be served
    │   ├── BadLogits          no token can be sampled: all excluded, NaN or infinite
    │   ├── CacheTooSmall      a sequence does not fit the KV cache
    │   ├── DoesNotFit         the devices, or the process, have too little memory for the model and its cache
    │   └── QueueFull          too many jobs are waiting
    ├── NotLoaded              the model has no weights yet
    ├── WorkerLost             a process that held a part of the model is gone
    ├── KernelError            a kernel does not compile, or the driver refuses it
    ├── MissingExtra           an optional package is not installed
    └── Unsupported            no backend can run this layer; the message lists why

Where exllamav2 raised a built-in type for the same mistake, the error here inherits from it, so that an old
script's `except ValueError` keeps working.
"""

from __future__ import annotations

import difflib
import reprlib
import warnings
from collections.abc import Collection

MIN_SIMILARITY = 0.75
"""Least similarity (difflib) of an unknown name to a known one to be taken for a misspelling of it."""


class ExlmError(Exception):
    """The base of every error exlm raises on purpose."""


class ConfigError(ExlmError, ValueError, AssertionError):
    """config.json, or an override of it, does not describe a model."""


class UnknownArchitecture(ConfigError):
    """The architecture is unknown; it is never guessed."""


class ModelNotFound(ExlmError, FileNotFoundError, AssertionError):
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
    """A file that could run code when opened, such as a pickle; it is not opened."""


class TokenizerError(ExlmError, ValueError, AssertionError):
    """The tokenizer files are missing or malformed, or a call on the tokenizer makes no sense."""


class TokenizerNotFound(TokenizerError, FileNotFoundError):
    """There is no tokenizer beside the model."""


class ChatTemplateError(TokenizerError):
    """A chat template failed, ran too long, or used a forbidden feature."""


class InputError(ExlmError, ValueError, AssertionError):
    """The arguments of a call cannot be served as given."""


class BadText(TokenizerError, InputError):
    """A text cannot be encoded: it has a lone surrogate, as a text that was cut inside a character."""


class BadLogits(InputError):
    """No token can be sampled from a row of logits: all are excluded, or it holds NaN or infinity."""


class CacheTooSmall(InputError):
    """The sequence does not fit the cache."""


class DoesNotFit(InputError, RuntimeError):
    """The devices, or the process, have too little memory for the model and its cache."""


class QueueFull(InputError):
    """As many jobs wait as are allowed to; finish some first."""


class NotLoaded(ExlmError, RuntimeError):
    """The model has no weights in memory yet (or no longer)."""


class WorkerLost(ExlmError, RuntimeError):
    """A process that held a part of the model is gone, and the model with it: load it again."""


class KernelError(ExlmError, RuntimeError):
    """A kernel could not be compiled for this device, or the driver refused to start it."""


class MissingExtra(ExlmError, ImportError):
    """An optional package is needed for this and is not installed."""


class Unsupported(ExlmError, RuntimeError):
    """No backend can run this layer on this device."""


def shown(value: object) -> str:
    """A value from a file as text for a message: escaped, and cut to 80 characters, also if it is nested deeply."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 80
    said = short.repr(value)
    return said if len(said) <= 80 else said[:77] + "..."


def report_unknown_attribute(what: str, name: str, known: Collection[str], ignored: Collection[str] = ()) -> None:
    """Report an assigned attribute that nothing reads, at the line that assigns it.

    A name similar to a known one is a misspelling: AttributeError. Any other name, and those of `ignored`, is
    an attribute of the caller's own, which old programs put on exlm's objects: UserWarning.
    """
    close_matches = difflib.get_close_matches(name, known, 1, MIN_SIMILARITY)
    hint = f" Did you mean {close_matches[0]!r}?" if close_matches else ""
    if close_matches and name not in ignored:
        raise AttributeError(f"{what} {name!r}.{hint}")
    warnings.warn(f"{what} {name!r}: it is kept, and nothing reads it.{hint}", UserWarning, stacklevel=3)
