"""The loop: jobs in, results out. Everything here decides without torch; the model is behind a small door.

`sequence` holds ids and how far the cache has got; `pages` says which page of the cache belongs to whom;
`scheduler` says what runs next; `output` what may be seen; `draft` guesses ahead. `loop` turns their answers
into actions, `generator` is what users hold.
"""

from .async_generator import AsyncGenerator, AsyncJob
from .generator import Generator
from .job import Job
from .results import PrefillResult, Result, StartedResult, StreamingResult

__all__ = [
    "AsyncGenerator",
    "AsyncJob",
    "Generator",
    "Job",
    "PrefillResult",
    "Result",
    "StartedResult",
    "StreamingResult",
]
