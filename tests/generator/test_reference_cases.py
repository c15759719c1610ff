"""What the reference's generators said on the 4.0 bpw model, case by case.

Shapes are binding. Texts must agree up to a near-tie: the reference adds in half precision and answers one
prompt in two ways itself, so where we part, the two tokens' logits must be within `TIE`. What differs:

- T42: the reference reads `<|im_start|>` in a prompt as a special token whatever `encode_special_tokens`
  says. Here it is text unless asked for; these prompts ask for it, so that the texts can be compared.
- `top_k_tokens` with probability 0 are the lowest ids there and any here.
- Times are not in the file. `serial` counts from the first job of a generator, so it is compared relatively.
- `base` and `stream_ex` are the two old generators, whose texts, ids and chunks a job gives as well; the base
  generator decodes its prompt again, without special tokens.
- The stop string of `job_stream` is not in the file; " a" and a trailing " " were held, " S" was not.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from exlm import Cache, Config, Generator, Job, Model, Settings, Tokenizer, convert_model

TIE = 0.02
SPECIAL = "<|im_start|>"
GENERATE = (
    "greedy", "completion_only", "token_healing", "encode_special", "stop_string", "stop_newline", "banned",
    "min_new",
)  # fmt: skip
KINDS = {**dict.fromkeys(GENERATE, 5), "job_stream": 3, "base": 5, "stream_ex": 3}
EVERY = [(kind, number) for kind, count in KINDS.items() for number in range(count)]


class ReferenceRun:
    """The model, a generator on it, and the cases; each kind is run once, as one batch."""

    def __init__(self, cases: list[dict[str, Any]], folder: Path) -> None:
        config = Config(folder)
        self.cases = cases
        self.model = Model(config)
        self.model.load()
        self.tokenizer = Tokenizer(config)
        self._done: dict[str, list[Any]] = {}

    def generator(self) -> Generator:
        return Generator(self.model, Cache(self.model, max_seq_len=8192), self.tokenizer)

    def cases_of(self, kind: str) -> list[dict[str, Any]]:
        return [case for case in self.cases if case["kind"] == kind]

    def generated(self, kind: str, number: int) -> tuple[str, dict[str, Any]]:
        """What `generate` answers to the prompts of a kind, and the last results."""
        if kind not in self._done:
            options = {name: value for name, value in self.cases_of(kind)[0]["args"].items() if name != "prompt"}
            prompts = [case["args"]["prompt"] for case in self.cases_of(kind)]
            answers: dict[int, Any] = {}
            for special in (False, True):
                places = [i for i, prompt in enumerate(prompts) if (SPECIAL in prompt) == special]
                texts, results = self.generator().generate(
                    [prompts[i] for i in places],
                    **{**options, "encode_special_tokens": special or kind == "encode_special"},
                    gen_settings=Settings.greedy(),
                    return_last_results=True,
                )
                answers.update(zip(places, zip(texts, results, strict=True), strict=True))
            self._done[kind] = [answers[i] for i in range(len(prompts))]
        found: tuple[str, dict[str, Any]] = self._done[kind][number]
        return found

    def streamed(self, kind: str, number: int, new: int, **options: Any) -> list[dict[str, Any]]:
        """Every result of the job for a kind's prompt."""
        if kind not in self._done:
            machine, results = self.generator(), []
            prompts = [case["prompt"] for case in self.cases_of(kind)]
            encoded = [self.tokenizer.encode(p, encode_special_tokens=True) for p in prompts]
            machine.enqueue([Job(ids, new, gen_settings=Settings.greedy(), **options) for ids in encoded])
            while machine.num_remaining_jobs():
                results += machine.iterate()
            self._done[kind] = [[dict(r) for r in results if r["serial"] == n] for n in range(len(prompts))]
        found: list[dict[str, Any]] = self._done[kind][number]
        return found

    def check_tokens_agree(self, job: Job, prompt: int, want: str) -> None:
        """The job's text is this one, or parts from it where two tokens are about equally likely."""
        ids = job.sequences[0].ids
        codec = self.tokenizer.codec
        shown = ""
        for end in range(prompt + 1, len(ids) + 1):
            before, shown = shown, codec.decode(ids[prompt:end], continues=True)
            if not want.startswith(shown):
                break
        else:
            return
        if shown.startswith(want):
            return
        logits = self.model.forward(torch.tensor([ids[: end - 1]]), last_id_only=True)[0, -1]
        pieces = codec.vocab.pieces()
        rest = want[len(before) :]
        rivals = [n for n, piece in enumerate(pieces) if piece and rest.startswith(piece)]
        gap = float(logits[ids[end - 1]] - max(logits[n] for n in rivals))
        assert gap < TIE, f"{shown!r} parts from {want!r} without a tie: {gap}"


@pytest.fixture(scope="module")
def reference(fixtures_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> ReferenceRun:
    """The 4.0 bpw model's numbers, written out as floats; test_determinism.py shows that it says the same."""
    dense = convert_model(fixtures_dir / "tiny-lm-exl2-4.0bpw", tmp_path_factory.mktemp("cases") / "dense", "dense")
    return ReferenceRun(json.loads((fixtures_dir / "reference" / "generator_cases.json").read_text()), dense)


def test_the_case_file_is_complete(reference: ReferenceRun) -> None:
    assert Counter(case["kind"] for case in reference.cases) == KINDS


@pytest.mark.parametrize(("kind", "number"), EVERY)
def test_agrees_with_the_reference(reference: ReferenceRun, kind: str, number: int) -> None:
    case = reference.cases_of(kind)[number]
    if kind in GENERATE:
        check_generated(reference, case, *reference.generated(kind, number))
    elif kind == "job_stream":
        options = {"return_probs": True, "return_top_tokens": 3, "identifier": "x"}
        results = reference.streamed(kind, number, 24, stop_conditions=[" and"], **options)
        check_results(case["results"], results)
    elif kind == "stream_ex":
        check_chunks(reference, case["results"], reference.streamed(kind, number, 60))
    else:
        job = reference.streamed(kind, number, 48)[0]["job"]
        prompt = reference.tokenizer.encode(case["prompt"], encode_special_tokens=True)[0]
        said = reference.tokenizer.decode(prompt)
        assert case["output"].startswith(said)
        reference.check_tokens_agree(job, len(prompt), case["output"][len(said) :])


def check_generated(reference: ReferenceRun, case: dict[str, Any], text: str, last: dict[str, Any]) -> None:
    """Prompt and completion, or the completion; what must not be there is not."""
    options, prompt, job = case["args"], case["args"]["prompt"], last["job"]
    completion = text if options.get("completion_only") else text.removeprefix(prompt)
    assert completion == last["full_completion"]
    assert options.get("completion_only") or text.startswith(prompt)
    stops = [stop for stop in options.get("stop_conditions", ()) if isinstance(stop, str)]
    assert not [stop for stop in (*stops, *options.get("banned_strings", ())) if stop in completion]
    assert last["new_tokens"] == options["max_new_tokens"] or last["eos_reason"] in (
        "stop_string",
        "stop_token",
    )
    want = case["output"].removeprefix("" if options.get("completion_only") else prompt)
    if completion != want:
        reference.check_tokens_agree(job, last["prompt_tokens"], want)


def check_results(want: list[dict[str, Any]], got: list[dict[str, Any]]) -> None:
    times = {"time_enqueued", "time_prefill", "time_generate"}
    assert [result["stage"] for result in got] == [result["stage"] for result in want]
    for ours, theirs in zip(got, want, strict=True):
        assert set(ours) - {"job"} == set(theirs) | (times if theirs["eos"] else set())
        assert ours["serial"] == theirs["serial"] - 40
        for key in theirs.keys() - {"serial", "top_k_tokens"}:
            value = ours[key]
            if isinstance(value, torch.Tensor):
                value = pytest.approx(value.flatten().tolist())
            assert theirs[key] == value, key
        if "token_ids" in theirs:
            assert ours["top_k_tokens"].shape == (1, len(theirs["token_ids"]), 3)
            assert ours["top_k_tokens"][0, :, 0].tolist() == theirs["token_ids"]


def check_chunks(reference: ReferenceRun, want: list[dict[str, Any]], got: list[dict[str, Any]]) -> None:
    """One result for each token, with the chunk's text and ids, as far as the texts agree."""
    results = [result for result in got if result["stage"] == "streaming"]
    assert len(results) == len(want)
    assert [result["text"] for result in results if "text" in result]
    for ours, theirs in zip(results, want, strict=True):
        if ours["token_ids"][0].tolist() != theirs["chunk_token_ids"]:
            break
        assert ours["text"] == theirs["chunk"]
    reference.check_tokens_agree(
        got[0]["job"], results[-1]["prompt_tokens"], "".join(result["chunk"] for result in want)
    )
