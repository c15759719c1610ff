"""What a user receives from `iterate()`: plain dicts, typed.

Inside the house verdicts are dataclasses; this is the only translator, and the only file of this room that
makes tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NotRequired, TypedDict, TypeVar

import torch
from torch import Tensor

from ..errors import ExlmError
from ..sampling import Picks, Sampler
from .sequence import Sequence as Tokens
from .verdicts import Reason, Rewind, Stop

if TYPE_CHECKING:
    from .job import Job


class StartedResult(TypedDict):
    """A job has its pages and begins."""

    job: Job
    stage: Literal["started"]
    eos: bool
    serial: int
    identifier: NotRequired[object]


class PrefillResult(TypedDict):
    """A part of a prompt was computed, copied or found in the cache."""

    job: Job
    stage: Literal["prefill"]
    eos: bool
    serial: int
    identifier: NotRequired[object]
    curr_progress: int
    max_progress: int


class StreamingResult(TypedDict):
    """One sampled token; `text` and the tensors are there only if something is shown."""

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
    eos_reason: NotRequired[Reason | Literal["error"]]
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


class Label(TypedDict):
    """What is the same in all streaming results of a job; made once."""

    stage: Literal["streaming"]
    eos: bool
    serial: int
    identifier: NotRequired[object]


Result = StartedResult | PrefillResult | StreamingResult
R = TypeVar("R", StartedResult, PrefillResult, Label)


class Sampled(NamedTuple):
    """What is kept of a token until its fate is known."""

    token: int
    prob: float | None = None
    top_tokens: Sequence[int] | None = None
    top_probs: Sequence[float] | None = None
    logits: Tensor | None = None


class Ids:
    """Ids as old scripts ask a job for them: `job.sequences[0].input_ids.torch()`. A copy, to look at."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = torch.tensor([ids], dtype=torch.long)

    def __len__(self) -> int:
        """How many there are."""
        return self._ids.shape[1]

    def torch(self) -> Tensor:
        """All of them, (1, n)."""
        return self._ids

    def torch_slice(self, a: int | None, b: int | None) -> Tensor:
        """Those from `a` to before `b`, (1, n)."""
        return self._ids[:, a:b]

    def slice(self, a: int | None, b: int | None) -> Tensor:
        """The same as a copy."""
        return self._ids[:, a:b].clone()


class JobSequence(Tokens):
    """A sequence of a job, which tells its ids as tensors too."""

    def __init__(self, ids: list[int], limit: int) -> None:
        super().__init__(ids, limit=limit)
        self._prompt = len(ids)

    @property
    def input_ids(self) -> Ids:
        """The prompt, without a token that is sampled anew."""
        return Ids(self.ids[: self._prompt])

    @property
    def sequence_ids(self) -> Ids:
        """The prompt and what was sampled so far."""
        return Ids(self.ids)


def started(job: Job) -> StartedResult:
    """The first result of a job."""
    result: StartedResult = {"job": job, "stage": "started", "eos": False, "serial": job.serial_number}
    return _named(job, result)


def prefilled(job: Job, done: int, total: int) -> PrefillResult:
    """How far the prompt is."""
    result: PrefillResult = {
        "job": job,
        "stage": "prefill",
        "eos": False,
        "serial": job.serial_number,
        "curr_progress": done,
        "max_progress": total,
    }
    return _named(job, result)


def labelled(job: Job) -> Label:
    """What every streaming result of a job says besides whose it is."""
    label: Label = {"stage": "streaming", "eos": False, "serial": job.serial_number}
    return _named(job, label)


def flowed(job: Job, text: str, slip: Tensor) -> StreamingResult:
    """A sampled token that is shown at once, its id given as a (1, 1) tensor."""
    result = _opened(job, text)
    result["token_ids"] = slip
    return result


def streamed(job: Job, text: str = "", shown: Sequence[Sampled] = ()) -> StreamingResult:
    """A sampled token and what it lets be seen, perhaps nothing."""
    result = _opened(job, text)
    result.update(tensors(shown))  # type: ignore[typeddict-item]
    return result


def rewound(job: Job, verdict: Rewind) -> StreamingResult:
    """A banned string was taken back."""
    result = streamed(job)
    result["suppressed_text"] = verdict.suppressed_text
    result["suppressed_tokens"] = torch.tensor([verdict.suppressed_tokens])
    return result


def stopped(job: Job, verdict: Stop, shown: Sequence[Sampled], held: Sequence[Sampled]) -> StreamingResult:
    """The last result of a job."""
    result = streamed(job, verdict.text, shown)
    result["eos"] = True
    result["eos_reason"] = verdict.reason
    if verdict.reason == "stop_token":
        assert isinstance(verdict.trigger, int)
        result["eos_triggering_token_id"] = verdict.trigger
        result["eos_triggering_token_str"] = job.piece(verdict.trigger)
    elif verdict.reason == "stop_string":
        result["eos_triggering_string"] = str(verdict.trigger)
    kept: dict[str, Any] = {"text": verdict.held_text} if verdict.held_text else {}
    kept.update(tensors(held))
    if kept:
        result["held"] = kept
    return _closed(job, result)


def failed(job: Job, error: Exception) -> StreamingResult:
    """The last result of a job that cannot go on; the others do."""
    result = streamed(job)
    result["eos"] = True
    result["eos_reason"] = "error"
    result["error"] = error
    return _closed(job, result)


def count_guesses(job: Job, result: StreamingResult) -> None:
    """Tell how many guesses were right and how many were not, in the last result of a job."""
    result["accepted_draft_tokens"] = job.accepted_draft_tokens
    result["rejected_draft_tokens"] = job.rejected_draft_tokens


def tensors(sampled: Sequence[Sampled]) -> dict[str, Tensor]:
    """(1, n) tensors of what was asked for; nothing for no tokens."""
    if not sampled:
        return {}
    out = {"token_ids": torch.tensor([[one.token for one in sampled]])}
    if sampled[0].prob is not None:
        out["token_probs"] = torch.tensor([[one.prob for one in sampled]])
    if sampled[0].top_tokens is not None:
        out["top_k_tokens"] = torch.tensor([[list(one.top_tokens or ()) for one in sampled]])
        out["top_k_probs"] = torch.tensor([[list(one.top_probs or ()) for one in sampled]])
    if sampled[0].logits is not None:
        out["logits"] = (
            torch.stack([one.logits for one in sampled if one.logits is not None])[None].float().cpu()
        )
    return out


def rows(logits: Any, jobs: Sequence[Job], position: int) -> Tensor:
    """Of a batch's logits, those of some of its jobs at one of the positions that were fed.

    A pair's two halves are next to each other. `logits` is (sequences, tokens, vocabulary), or a list of
    (tokens, vocabulary) where sequences were fed differently.
    """
    if isinstance(logits, Tensor) and logits.shape[0] == len(jobs):
        return logits[:, position]
    places = [job.place + half for job in jobs for half in range(len(job.sequences))]
    return torch.stack([logits[place][position] for place in places])


def words(mask: Any) -> Tensor | None:
    """A filter's packed bits as the sampler takes them."""
    return None if mask is None else torch.from_numpy(mask)


Fetched = tuple[list[int], Sequence[Tensor]]
"""Picked tokens on the host: as numbers, and each as the (1, 1) tensor that users get."""


def fetched(picks: Picks) -> Fetched:
    """What was picked; waits for the device."""
    tokens = picks.tolist()
    return tokens, _slips(torch.tensor(tokens))


def at_once(
    sampler: Sampler, logits: Any, jobs: Sequence[Job], guesses: Sequence[Sequence[int]]
) -> dict[int, list[tuple[int, Tensor]]] | None:
    """Each job's token at every position of a pass, with its slip; None if it may depend on those before it.

    None as well if anything fails: position after position it comes out whose failure it is, if anybody's.
    """
    try:
        if not all([job.unswayed for job in jobs]):
            return None
        rows = [job.row for job, guess in zip(jobs, guesses, strict=True) for _ in range(len(guess) + 1)]
        whole = isinstance(logits, Tensor) and logits.shape[0] == len(jobs)
        every = logits.flatten(0, 1) if whole else torch.cat([logits[job.place] for job in jobs])
        tokens, slips = fetched(sampler.sample_batch(every, rows))
    except ExlmError:
        return None
    if min(tokens) < 0:
        return None
    told = iter(zip(tokens, slips, strict=True))
    return {id(job): [*islice(told, len(guess) + 1)] for job, guess in zip(jobs, guesses, strict=True)}


class Tray:
    """Where tokens are put for the host, which waits for them and not for what the device does afterwards."""

    def __init__(self) -> None:
        self._host = torch.empty(0, dtype=torch.int64)
        self._there: Any = None  # an event
        self._saved: tuple[Tensor, Tensor] | None = None  # logits, and a copy of them

    def put(self, picks: Picks, logits: Tensor) -> None:
        """Send tokens on their way, unless the device has, before anything may write over their logits."""
        tokens = picks.tokens
        self._saved = None if picks.again is None else (logits, logits.clone())
        if tokens.is_cuda and picks.told is None:
            cuda: Any = torch.cuda  # its events have no types
            if len(self._host) < len(tokens):
                self._host = torch.empty(len(tokens), dtype=torch.int64, pin_memory=True)
                self._there = cuda.Event()
            self._host[: len(tokens)].copy_(tokens, non_blocking=True)
            self._there.record(cuda.current_stream(tokens.device))

    def get(self, picks: Picks) -> tuple[Fetched, bool]:
        """The tokens that were put here, and whether they are those that the device had.

        They are not if some had to be picked once more, from logits that are then again what they were.
        """
        host = picks.tokens
        if picks.told is not None:
            host = torch.tensor(picks.told.tolist())
        elif host.is_cuda:
            self._there.synchronize()
            host = self._host[: len(host)].clone()
        tokens: list[int] = host.tolist()
        if self._saved is None or min(tokens) >= 0:
            return (tokens, _slips(host)), True
        logits, copy = self._saved
        logits.copy_(copy)
        return fetched(picks), False


def unpacked(picks: Picks, tokens: Sequence[int], jobs: Sequence[Job], logits: Tensor) -> list[Sampled]:
    """What was picked for each job, with what it wants to know; only what somebody wanted is fetched."""
    probs = picks.probs.tolist() if any(job.row.want_probs for job in jobs) else None
    tops = picks.top_tokens.tolist() if picks.top_tokens is not None else None
    shares = picks.top_probs.tolist() if picks.top_probs is not None else None
    out = []
    place = 0
    for i, (token, job) in enumerate(zip(tokens, jobs, strict=True)):
        k = job.row.want_top
        out.append(
            Sampled(
                token,
                prob=probs[i] if probs is not None and job.row.want_probs else None,
                top_tokens=tops[i][:k] if k and tops is not None else None,
                top_probs=shares[i][:k] if k and shares is not None else None,
                logits=logits[place].clone() if job.return_logits or job.hooks else None,
            )
        )
        place += len(job.sequences)
    return out


def _slips(host: Tensor) -> Sequence[Tensor]:
    return (host.view(1, 1),) if len(host) == 1 else host.view(-1, 1, 1).unbind()


def _opened(job: Job, text: str) -> StreamingResult:
    result: StreamingResult = {"job": job, **job.label}  # type: ignore[typeddict-item]
    if text:
        result["text"] = text
    return result


def _closed(job: Job, result: StreamingResult) -> StreamingResult:
    result["full_completion"] = job.full_completion
    result["new_tokens"] = job.new_tokens
    result["prompt_tokens"] = job.prompt_tokens
    result["time_enqueued"] = job.times.enqueued
    result["time_prefill"] = job.times.prefill
    result["time_generate"] = job.times.generate
    result["cached_pages"] = job.cached_pages
    result["cached_tokens"] = job.cached_tokens
    return result


def _named(job: Job, result: R) -> R:
    if job.identifier is not None:
        result["identifier"] = job.identifier
    return result
