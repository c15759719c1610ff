"""A look inside, as JSON: pages of the cache, queue and batch of every loaded model. No text of anybody's."""

from __future__ import annotations

from collections import Counter
from typing import Any

from exlm import Job

from .engine import Engine, LoadedModel
from .limits import ConcurrencyLimiter


def engine_state(engine: Engine, gate: ConcurrencyLimiter) -> dict[str, Any]:
    """Everything at this moment."""
    return {
        "models": [_model(hosted) for hosted in engine.models.values()],
        "requests": {"inside": gate.in_flight, "most": gate.limit},
    }


def _model(hosted: LoadedModel) -> dict[str, Any]:
    inner = hosted.generator.generator
    active, pending = inner.active_jobs, inner.pending_jobs
    users = Counter(page for job in active for sequence in job.sequences for page in {*sequence.pages})
    return {
        "name": hosted.info.name,
        "max_model_len": hosted.info.max_seq_len,
        "max_batch_size": inner.max_batch_size,
        "pages": {
            "size": inner.page_size,
            "total": inner.max_pages,
            "free": inner.pages.num_free_pages,
            "rows": [inner.pages.num_valid_rows(place) for place in range(inner.max_pages)],
            "users": [users[place] for place in range(inner.max_pages)],
        },
        "batch": [_job(job) for job in active],
        "queue": [_job(job) for job in pending],
    }


def _job(job: Job) -> dict[str, Any]:
    return {
        "job": job.serial_number,
        "prompt_tokens": job.prompt_tokens,
        "cached_tokens": job.cached_tokens,
        "read_tokens": sum(sequence.num_computed_tokens for sequence in job.sequences),
        "new_tokens": job.new_tokens,
        "max_new_tokens": job.max_new_tokens,
        "pages": sorted({page for sequence in job.sequences for page in sequence.pages if page >= 0}),
        "queue_seconds": round(job.metrics.queue_seconds, 3),
        "seconds": round(
            job.metrics.queue_seconds + job.metrics.prefill_seconds + job.metrics.generate_seconds, 3
        ),
    }
