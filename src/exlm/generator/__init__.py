"""Continuous batching: runs any number of jobs over one paged KV cache and gives their results.

`engine` has the step; it carries out what `scheduler`, `page_table`, `speculative` and `output` decide.
`generator` and `async_generator` have the public classes, which take a model, its cache and `Job`s; the engine
sees the model as a `ModelRunner`. llm, legacy, bench and the public package import this package.
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
