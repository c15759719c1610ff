"""Results as users receive them from `iterate()`: typed dicts, and the tensors in them.

All tensor code of this package is here: the logits that the sampler gets, and what it returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NotRequired, TypeAlias, TypedDict

import torch
from torch import Tensor

from ..errors import ExlmError
from ..sampling import Sampler, SamplerOutput
from .output import Rewind, Stop, StopReason
from .token_sequence import TokenSequence

if TYPE_CHECKING:
    from .job import Job


class StartedResult(TypedDict):
    """A job was admitted."""

    job: Job
    stage: Literal["started"]
    eos: bool
    serial: int
    identifier: NotRequired[object]


class PrefillResult(TypedDict):
    """Progress of a prompt: tokens were computed, copied or found in the cache."""

    job: Job
    stage: Literal["prefill"]
    eos: bool
    serial: int
    identifier: NotRequired[object]
    curr_progress: int
    max_progress: int


class StreamingResult(TypedDict):
    """One sampled token; `text` and the tensors are present only if something is emitted."""

    job: Job
    stage: Literal["streaming"]
    eos: bool
    serial: int
    identifier: NotRequired[object]
    text: NotRequired[str]
    token_ids: NotRequired[Tensor]
    token_probs: NotRequired[Tensor]
    top_k_tokens: NotRequired[Tensor]
    top_k_probs: NotRequired[Tensor]
    logits: NotRequired[Tensor]
    suppressed_text: NotRequired[str]
    suppressed_tokens: NotRequired[Tensor]
    eos_reason: NotRequired[StopReason | Literal["error"]]
    eos_triggering_token_id: NotRequired[int]
    eos_triggering_token_str: NotRequired[str]
    eos_triggering_string: NotRequired[str]
    full_completion: NotRequired[str]
    new_tokens: NotRequired[int]
    prompt_tokens: NotRequired[int]
    time_enqueued: NotRequired[float]
    time_prefill: NotRequired[float]
    time_generate: NotRequired[float]
    cached_pages: NotRequired[int]
    cached_tokens: NotRequired[int]
    accepted_draft_tokens: NotRequired[int]
    rejected_draft_tokens: NotRequired[int]
    held: NotRequired[dict[str, Any]]
    error: NotRequired[Exception]


class CommonFields(TypedDict):
    """The fields of every result of a job besides `job` and `stage`; `eos` is True only in the last one."""

    eos: bool
    serial: int
    identifier: NotRequired[object]


Result = StartedResult | PrefillResult | StreamingResult
ResultQueue: TypeAlias = "deque[Result]"
"""Results of jobs that one call reads, oldest first."""


class SampledToken(NamedTuple):
    """A sampled token with the details that its job asked for."""

    token: int
    prob: float | None = None
    top_tokens: Sequence[int] | None = None
    top_probs: Sequence[float] | None = None
    logits: Tensor | None = None


class LegacyTokenIds:
    """A copy of ids as exllamav2 scripts read them from a job: `job.sequences[0].input_ids.torch()`."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = torch.tensor([ids], dtype=torch.long)

    def __len__(self) -> int:
        return self._ids.shape[1]

    def torch(self) -> Tensor:
        """All ids, (1, n)."""
        return self._ids

    def torch_slice(self, a: int | None, b: int | None) -> Tensor:
        """The ids `a:b`, (1, n)."""
        return self._ids[:, a:b]

    def slice(self, a: int | None, b: int | None) -> Tensor:
        """A copy of the ids `a:b`, (1, n)."""
        return self._ids[:, a:b].clone()


class JobTokenSequence(TokenSequence):
    """A job's sequence, whose ids exllamav2 scripts read as tensors."""

    def __init__(self, ids: list[int], max_length: int) -> None:
        super().__init__(ids, max_length=max_length)
        self._prompt_length = len(ids)

    @property
    def input_ids(self) -> LegacyTokenIds:
        """The prompt, without a token that token healing samples again."""
        return LegacyTokenIds(self.ids[: self._prompt_length])

    @property
    def sequence_ids(self) -> LegacyTokenIds:
        """The prompt and what was sampled so far."""
        return LegacyTokenIds(self.ids)


def started_result(job: Job) -> StartedResult:
    """The first result of a job."""
    return {"job": job, "stage": "started", **job.common_fields}


def prefill_result(job: Job) -> PrefillResult:
    """How many tokens of the prompt are computed; for a pair, of both prompts."""
    return {
        "job": job,
        "stage": "prefill",
        **job.common_fields,
        "curr_progress": sum(sequence.num_computed_tokens for sequence in job.sequences),
        "max_progress": sum(len(sequence) - 1 for sequence in job.sequences),
    }


def streaming_result(job: Job, text: str = "", emitted: Sequence[SampledToken] = ()) -> StreamingResult:
    """A sampled token, with the text and tokens that it releases."""
    result: StreamingResult = {"job": job, "stage": "streaming", **job.common_fields}  # type: ignore[typeddict-item]
    if text:
        result["text"] = text
    if emitted:
        result.update(token_tensors(emitted))  # type: ignore[typeddict-item]
    return result


def rewind_result(job: Job, action: Rewind) -> StreamingResult:
    """A banned string was rewound."""
    result = streaming_result(job)
    result["suppressed_text"] = action.suppressed_text
    result["suppressed_tokens"] = torch.tensor([action.suppressed_tokens])
    return result


def stop_result(
    job: Job, action: Stop, emitted: Sequence[SampledToken], held: Sequence[SampledToken]
) -> StreamingResult:
    """The last result of a job."""
    result = streaming_result(job, action.text, emitted)
    result["eos"] = True
    result["eos_reason"] = action.reason
    if action.reason == "stop_token":
        assert isinstance(action.trigger, int)
        result["eos_triggering_token_id"] = action.trigger
        result["eos_triggering_token_str"] = job.piece(action.trigger)
    elif action.reason == "stop_string":
        result["eos_triggering_string"] = str(action.trigger)
    held_fields: dict[str, Any] = {"text": action.held_text} if action.held_text else {}
    held_fields.update(token_tensors(held))
    if held_fields:
        result["held"] = held_fields
    return _add_final_fields(job, result)


def error_result(job: Job, error: Exception) -> StreamingResult:
    """The last result of a job that failed."""
    result = streaming_result(job)
    result["eos"] = True
    result["eos_reason"] = "error"
    result["error"] = error
    return _add_final_fields(job, result)


def add_draft_counts(job: Job, result: StreamingResult) -> None:
    """Add the accepted and rejected draft tokens to the last result of a job."""
    result["accepted_draft_tokens"] = job.accepted_draft_tokens
    result["rejected_draft_tokens"] = job.rejected_draft_tokens


def token_tensors(sampled: Sequence[SampledToken]) -> dict[str, Tensor]:
    """The (1, n) tensors that the job requested; {} without tokens."""
    if not sampled:
        return {}
    out = {"token_ids": torch.tensor([[s.token for s in sampled]])}
    if sampled[0].prob is not None:
        out["token_probs"] = torch.tensor([[s.prob for s in sampled]])
    if sampled[0].top_tokens is not None:
        out["top_k_tokens"] = torch.tensor([[list(s.top_tokens or ()) for s in sampled]])
        out["top_k_probs"] = torch.tensor([[list(s.top_probs or ()) for s in sampled]])
    if sampled[0].logits is not None:
        out["logits"] = torch.stack([s.logits for s in sampled if s.logits is not None])[None].float().cpu()
    return out


def logits_of_jobs(logits: Any, jobs: Sequence[Job], position: int) -> Tensor:
    """The logits of some jobs of a batch at one position of the pass; a pair's two rows are adjacent.

    `logits` is (sequences, tokens, vocabulary), or a list of (tokens, vocabulary) where sequences had
    different numbers of tokens.
    """
    if isinstance(logits, Tensor) and logits.shape[0] == len(jobs):
        return logits[:, position]
    batch_rows = [job.batch_row + i for job in jobs for i in range(len(job.sequences))]
    return torch.stack([logits[row][position] for row in batch_rows])


def mask_tensor(mask: Any) -> Tensor | None:
    """A filter's packed bits as a tensor for the sampler."""
    return None if mask is None else torch.from_numpy(mask)


def sample_all_positions(
    sampler: Sampler, logits: Any, jobs: Sequence[Job], drafts: Sequence[Sequence[int]]
) -> dict[int, list[tuple[int, Tensor]]] | None:
    """Each job's token at every position of a pass, with its id tensor, by `id(job)`.

    None if a token may depend on those before it, or if sampling fails: sampling position by position then
    finds the job that failed.
    """
    try:
        if not all([job.is_stateless_greedy for job in jobs]):
            return None
        requests = [
            job.sampling_request for job, draft in zip(jobs, drafts, strict=True) for _ in range(len(draft) + 1)
        ]
        is_one_tensor = isinstance(logits, Tensor) and logits.shape[0] == len(jobs)
        flat_logits = logits.flatten(0, 1) if is_one_tensor else torch.cat([logits[job.batch_row] for job in jobs])
        tokens = sampler.sample_batch(flat_logits, requests).tokens
    except ExlmError:
        return None
    if min(tokens) < 0:
        return None
    pairs = iter(zip(tokens, token_id_tensors(tokens), strict=True))
    return {id(job): [*islice(pairs, len(draft) + 1)] for job, draft in zip(jobs, drafts, strict=True)}


def sampled_tokens(output: SamplerOutput, jobs: Sequence[Job], logits: Tensor) -> list[SampledToken]:
    """The sampled token of each job with the details it requested; only requested tensors are fetched."""
    probs = output.probs.tolist() if any(job.sampling_request.return_probs for job in jobs) else None
    top_tokens = output.top_tokens.tolist() if output.top_tokens is not None else None
    top_probs = output.top_probs.tolist() if output.top_probs is not None else None
    out = []
    row = 0
    for i, (token, job) in enumerate(zip(output.tokens, jobs, strict=True)):
        k = job.sampling_request.num_top_tokens
        out.append(
            SampledToken(
                token,
                prob=probs[i] if probs is not None and job.sampling_request.return_probs else None,
                top_tokens=top_tokens[i][:k] if k and top_tokens is not None else None,
                top_probs=top_probs[i][:k] if k and top_probs is not None else None,
                logits=logits[row].clone() if job.return_logits or job.hooks else None,
            )
        )
        row += len(job.sequences)
    return out


def token_id_tensors(tokens: list[int], host_tokens: Tensor | None = None) -> Sequence[Tensor]:
    """Each token as a (1, 1) tensor; `host_tokens` are the same tokens as a tensor, if there is one."""
    ids = torch.tensor(tokens) if host_tokens is None else host_tokens
    return (ids.view(1, 1),) if len(tokens) == 1 else ids.view(-1, 1, 1).unbind()


def _add_final_fields(job: Job, result: StreamingResult) -> StreamingResult:
    result["full_completion"] = job.full_completion
    result["new_tokens"] = job.new_tokens
    result["prompt_tokens"] = job.prompt_tokens
    result["time_enqueued"] = job.metrics.queue_seconds
    result["time_prefill"] = job.metrics.prefill_seconds
    result["time_generate"] = job.metrics.generate_seconds
    result["cached_pages"] = job.cached_pages
    result["cached_tokens"] = job.cached_tokens
    return result
