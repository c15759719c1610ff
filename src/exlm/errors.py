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
    │   ├── TokenizerNotFound  there are none
    │   ├── BadText            a text that no file could hold: half of a character (an InputError too)
    │   └── ChatTemplateError  a chat template failed, ran too long or reached for what it may not
    ├── InputError             a call's arguments cannot be served
    │   ├── BadLogits          there is no token to choose: all excluded, not numbers, or infinite
    │   ├── CacheTooSmall
    │   ├── DoesNotFit         the devices, or the process, have too little memory for the model and its cache
    │   └── QueueFull
    ├── NotLoaded              the model has no weights yet
    ├── WorkerLost             a process that held a part of the model is gone
    ├── KernelError            a kernel does not compile, or the driver refuses it
    ├── MissingExtra           an optional package is not installed
    └── Unsupported            no backend can run this layer; the message lists why

Where the old library raised a built-in type for the same mistake, ours inherits it, so that an old
script's `except ValueError` keeps working.
"""

from __future__ import annotations

import difflib
import reprlib
import warnings
from collections.abc import Collection

MIN_SIMILARITY = 0.75
"""How much a name must have in common with another to be meant for it; `stop_tokens` is no slip of any."""


class ExlmError(Exception):
    """The base of every error exlm raises on purpose."""


class ConfigError(ExlmError, ValueError, AssertionError):
    """config.json, or an override of it, does not describe a model."""


class UnknownArchitecture(ConfigError):
    """The architecture is not one we know; it is never guessed."""


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
    """A file that could run code when opened; we do not open it."""


class TokenizerError(ExlmError, ValueError, AssertionError):
    """The tokenizer files are missing or malformed, or a call on the tokenizer makes no sense."""


class TokenizerNotFound(TokenizerError, FileNotFoundError):
    """There is no tokenizer beside the model."""


class ChatTemplateError(TokenizerError):
    """A chat template failed, ran too long, or reached for what it may not touch."""


class InputError(ExlmError, ValueError, AssertionError):
    """The arguments of a call cannot be served as given."""


class BadText(TokenizerError, InputError):
    """A text cannot be encoded: it has half of a character, as a text that was cut in the middle of one."""


class BadLogits(InputError):
    """A row of logits leaves no token to choose: all are excluded, or it holds NaN or infinity."""


class CacheTooSmall(InputError):
    """The sequence does not fit the cache."""


class DoesNotFit(InputError, RuntimeError):
    """The devices, or the process, have too little memory for the model and its cache."""


class QueueFull(InputError):
    """As many jobs wait as may wait; finish some first."""


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
    """A value from a file, fit for a message: escaped, short, and however deep it is nested."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 80
    said = short.repr(value)
    return said if len(said) <= 80 else said[:77] + "..."


def report_unknown_attribute(
    what: str, name: str, known: Collection[str], ignored: Collection[str] = ()
) -> None:
    """Speak up for an attribute that was assigned and that nobody reads, where it was assigned.

    One that looks like a known name is a slip of the pen, and an AttributeError. Any other is a note of the
    caller's own, as old programs leave them on our objects: a UserWarning, and so for `harmless` names.
    """
    close_matches = difflib.get_close_matches(name, known, 1, MIN_SIMILARITY)
    hint = f" Did you mean {close_matches[0]!r}?" if close_matches else ""
    if close_matches and name not in ignored:
        raise AttributeError(f"{what} {name!r}.{hint}")
    warnings.warn(f"{what} {name!r}: it is kept, and nothing reads it.{hint}", UserWarning, stacklevel=3)
