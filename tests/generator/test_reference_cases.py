"""The outputs of the reference's generators on the 4.0 bpw model, case by case.

Shapes are binding. Texts must agree up to a near-tie: the reference adds in half precision and answers one
prompt in two ways itself, so where the texts differ, the two tokens' logits must be within `TIE`. Differences:

- The reference reads `<|im_start|>` in a prompt as a special token whatever `encode_special_tokens`
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
CASES = [(kind, number) for kind, count in KINDS.items() for number in range(count)]


class ReferenceRun:
    """The model and the cases; the cases of each kind run once, as one batch."""

    def __init__(self, cases: list[dict[str, Any]], folder: Path) -> None:
        config = Config(folder)
        self.cases = cases
        self.model = Model(config)
        self.model.load()
        self.tokenizer = Tokenizer(config)
        self._results: dict[str, list[Any]] = {}

    def generator(self) -> Generator:
        return Generator(self.model, Cache(self.model, max_seq_len=8192), self.tokenizer)

    def cases_of(self, kind: str) -> list[dict[str, Any]]:
        return [case for case in self.cases if case["kind"] == kind]

    def generated(self, kind: str, number: int) -> tuple[str, dict[str, Any]]:
        """The text and last result of `generate` for one prompt of a kind."""
        if kind not in self._results:
            options = {name: value for name, value in self.cases_of(kind)[0]["args"].items() if name != "prompt"}
            prompts = [case["args"]["prompt"] for case in self.cases_of(kind)]
            outputs: dict[int, Any] = {}
            for special in (False, True):
                indices = [i for i, prompt in enumerate(prompts) if (SPECIAL in prompt) == special]
                texts, results = self.generator().generate(
                    [prompts[i] for i in indices],
                    **{**options, "encode_special_tokens": special or kind == "encode_special"},
                    gen_settings=Settings.greedy(),
                    return_last_results=True,
                )
                outputs.update(zip(indices, zip(texts, results, strict=True), strict=True))
            self._results[kind] = [outputs[i] for i in range(len(prompts))]
        result: tuple[str, dict[str, Any]] = self._results[kind][number]
        return result

    def streamed(self, kind: str, number: int, new: int, **options: Any) -> list[dict[str, Any]]:
        """Every result of the job for a kind's prompt."""
        if kind not in self._results:
            generator, results = self.generator(), []
            prompts = [case["prompt"] for case in self.cases_of(kind)]
            encoded = [self.tokenizer.encode(p, encode_special_tokens=True) for p in prompts]
            generator.enqueue([Job(ids, new, gen_settings=Settings.greedy(), **options) for ids in encoded])
            while generator.num_remaining_jobs():
                results += generator.iterate()
            self._results[kind] = [[dict(r) for r in results if r["serial"] == n] for n in range(len(prompts))]
        result: list[dict[str, Any]] = self._results[kind][number]
        return result

    def check_tokens_agree(self, job: Job, prompt: int, expected: str) -> None:
        """Check that the job's text is the expected one or differs from it at two about equally likely tokens."""
        ids = job.sequences[0].ids
        codec = self.tokenizer.codec
        shown = ""
        for end in range(prompt + 1, len(ids) + 1):
            before, shown = shown, codec.decode(ids[prompt:end], continues=True)
            if not expected.startswith(shown):
                break
        else:
            return
        if shown.startswith(expected):
            return
        logits = self.model.forward(torch.tensor([ids[: end - 1]]), last_id_only=True)[0, -1]
        pieces = codec.vocab.pieces()
        remaining = expected[len(before) :]
        candidates = [n for n, piece in enumerate(pieces) if piece and remaining.startswith(piece)]
        gap = float(logits[ids[end - 1]] - max(logits[n] for n in candidates))
        assert gap < TIE, f"{shown!r} parts from {expected!r} without a tie: {gap}"


@pytest.fixture(scope="module")
def reference(fixtures_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> ReferenceRun:
    """The 4.0 bpw model with dequantized weights; test_determinism.py covers the quantized one."""
    dense = convert_model(fixtures_dir / "tiny-lm-exl2-4.0bpw", tmp_path_factory.mktemp("cases") / "dense", "dense")
    return ReferenceRun(json.loads((fixtures_dir / "reference" / "generator_cases.json").read_text()), dense)


def test_the_case_file_is_complete(reference: ReferenceRun) -> None:
    assert Counter(case["kind"] for case in reference.cases) == KINDS


@pytest.mark.parametrize(("kind", "number"), CASES)
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
        decoded_prompt = reference.tokenizer.decode(prompt)
        assert case["output"].startswith(decoded_prompt)
        reference.check_tokens_agree(job, len(prompt), case["output"][len(decoded_prompt) :])


def check_generated(reference: ReferenceRun, case: dict[str, Any], text: str, last: dict[str, Any]) -> None:
    """Check prompt and completion, and that no stop string or banned string occurs."""
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
    expected = case["output"].removeprefix("" if options.get("completion_only") else prompt)
    if completion != expected:
        reference.check_tokens_agree(job, last["prompt_tokens"], expected)


def check_results(expected: list[dict[str, Any]], results: list[dict[str, Any]]) -> None:
    times = {"time_enqueued", "time_prefill", "time_generate"}
    assert [x["stage"] for x in results] == [x["stage"] for x in expected]
    for result, reference in zip(results, expected, strict=True):
        assert set(result) - {"job"} == set(reference) | (times if reference["eos"] else set())
        assert result["serial"] == reference["serial"] - 40
        for key in reference.keys() - {"serial", "top_k_tokens"}:
            value = result[key]
            if isinstance(value, torch.Tensor):
                value = pytest.approx(value.flatten().tolist())
            assert reference[key] == value, key
        if "token_ids" in reference:
            assert result["top_k_tokens"].shape == (1, len(reference["token_ids"]), 3)
            assert result["top_k_tokens"][0, :, 0].tolist() == reference["token_ids"]


def check_chunks(reference: ReferenceRun, expected: list[dict[str, Any]], all_results: list[dict[str, Any]]) -> None:
    """Check that each token has a result with the chunk's text and ids, as far as the texts agree."""
    results = [result for result in all_results if result["stage"] == "streaming"]
    assert len(results) == len(expected)
    assert [result["text"] for result in results if "text" in result]
    for result, reference_chunk in zip(results, expected, strict=True):
        if result["token_ids"][0].tolist() != reference_chunk["chunk_token_ids"]:
            break
        assert result["text"] == reference_chunk["chunk"]
    reference.check_tokens_agree(
        all_results[0]["job"], results[-1]["prompt_tokens"], "".join(result["chunk"] for result in expected)
    )
