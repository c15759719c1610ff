"""Hooks and filters may enqueue and cancel jobs of the generator that runs them; they may not step it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from exlm import Cache, Config, Filter, Generator, InputError, Job, Model, Settings, Tokenizer
from tests import tiny
from tests.generator.page_table_oracle import check_invariants

NEW = 6


@pytest.fixture(scope="module")
def components(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Tokenizer]:
    config = Config(tiny.make_chat_folder(tmp_path_factory.mktemp("within") / "m"))
    model = Model(config)
    model.load()
    return model, Tokenizer(config)


@pytest.fixture
def generator(components: tuple[Model, Tokenizer]) -> Generator:
    return Generator(components[0], Cache(components[0], max_seq_len=2048), components[1])


def finish(generator: Generator) -> list[Any]:
    results: list[Any] = []
    while generator.num_remaining_jobs():
        results += generator.iterate()
    assert generator.pages.num_free_pages == generator.pages.num_pages
    check_invariants(generator.pages, [])
    return results


def make_job(generator: Generator, hook: Callable[[int], None] | None = None, **options: Any) -> Job:
    """A job whose hook is called with the number of its tokens."""
    count = 0

    def run_hook(_: Any) -> None:
        nonlocal count
        count += 1
        if hook is not None:
            hook(count)

    settings = Settings.greedy(post_sampling_hooks=[run_hook] if hook else [])
    return Job(generator.tokenizer.encode("abc"), NEW, gen_settings=settings, **options)


@pytest.mark.parametrize("token_count", [1, 3, NEW])
def test_a_hook_may_cancel_its_own_job(generator: Generator, token_count: int) -> None:
    """Regression: a cancellation with the job's last token failed the step of all jobs."""
    job = make_job(generator, lambda count: generator.cancel(job) if count == token_count else None)
    other = make_job(generator)
    generator.enqueue([job, other])
    results = finish(generator)
    assert sum(result["job"] is job and result["stage"] == "streaming" for result in results) == token_count - 1
    assert [(result["job"], result["eos_reason"]) for result in results if result["eos"]] == [(other, "max_new_tokens")]
    assert other.full_completion == generator.generate("abc", NEW, gen_settings=Settings.greedy(), completion_only=True)


@pytest.mark.parametrize("token_count", [1, NEW])
@pytest.mark.parametrize("first", [False, True])
def test_a_hook_may_clear_the_queue(generator: Generator, token_count: int, first: bool) -> None:
    """A job whose last token came earlier in the same step has ended."""
    job, other = (
        make_job(generator, lambda count: generator.clear_queue() if count == token_count else None),
        make_job(generator),
    )
    generator.enqueue([job, other] if first else [other, job])
    finished = [result["job"] for result in finish(generator) if result["eos"]]
    assert finished == ([other] if token_count == NEW and not first else [])


def test_a_filter_may_cancel_its_own_job(generator: Generator) -> None:
    class Fuse(Filter):
        num_tokens = 0

        def begin(self, prefix_str: Any) -> None:
            pass

        def feed(self, token: Any) -> None:
            self.num_tokens += 1
            if self.num_tokens == NEW:
                generator.cancel(job)

        def next(self) -> Any:
            return None, set()

    job = make_job(generator, filters=[Fuse(None, generator.tokenizer)])
    generator.enqueue(job)
    assert not [result for result in finish(generator) if result["eos"]]


def test_a_hook_may_enqueue(generator: Generator) -> None:
    others = [make_job(generator) for _ in range(NEW)]

    def hook(count: int) -> None:
        generator.enqueue(others[count - 1])

    job = make_job(generator, hook)
    generator.enqueue(job)
    finished = [result["job"] for result in finish(generator) if result["eos"]]
    assert finished == [job, *others]


@pytest.mark.parametrize("run", ["generate", "iterate"])
def test_a_hook_that_steps_its_own_generator_is_refused(generator: Generator, run: str) -> None:
    """Regression: steps were nested until Python's stack overflowed."""

    def hook(_: int) -> None:
        if run == "iterate":
            generator.iterate()
        else:
            generator.generate("xyz", 2)

    job, other = make_job(generator, hook), make_job(generator)
    generator.enqueue([job, other])
    last = {result["job"]: result for result in finish(generator) if result["eos"]}
    assert isinstance(last[job]["error"], InputError)
    assert "called the generator during its step" in str(last[job]["error"])
    assert last[other]["eos_reason"] == "max_new_tokens"
