"""Hooks and filters that use the generator which is running them: they may enqueue and cancel, not run it."""

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
def machine(components: tuple[Model, Tokenizer]) -> Generator:
    return Generator(components[0], Cache(components[0], max_seq_len=2048), components[1])


def finish(machine: Generator) -> list[Any]:
    told: list[Any] = []
    while machine.num_remaining_jobs():
        told += machine.iterate()
    assert machine.pages.num_free_pages == machine.pages.num_pages
    check_invariants(machine.pages, [])
    return told


def make_job(machine: Generator, hook: Callable[[int], None] | None = None, **options: Any) -> Job:
    """A job; the hook is told how many tokens it has."""
    count = 0

    def call(_: Any) -> None:
        nonlocal count
        count += 1
        if hook is not None:
            hook(count)

    settings = Settings.greedy(post_sampling_hooks=[call] if hook else [])
    return Job(machine.tokenizer.encode("abc"), NEW, gen_settings=settings, **options)


@pytest.mark.parametrize("at", [1, 3, NEW])
def test_a_hook_may_cancel_its_own_job(machine: Generator, at: int) -> None:
    """With the job's last token it broke the round, for all jobs; no result is given any more."""
    job = make_job(machine, lambda count: machine.cancel(job) if count == at else None)
    other = make_job(machine)
    machine.enqueue([job, other])
    told = finish(machine)
    assert sum(result["job"] is job and result["stage"] == "streaming" for result in told) == at - 1
    assert [(result["job"], result["eos_reason"]) for result in told if result["eos"]] == [(other, "max_new_tokens")]
    assert other.full_completion == machine.generate("abc", NEW, gen_settings=Settings.greedy(), completion_only=True)


@pytest.mark.parametrize("at", [1, NEW])
@pytest.mark.parametrize("first", [False, True])
def test_a_hook_may_clear_the_queue(machine: Generator, at: int, first: bool) -> None:
    """Who had its last token before it in the same round has ended."""
    job, other = (
        make_job(machine, lambda count: machine.clear_queue() if count == at else None),
        make_job(machine),
    )
    machine.enqueue([job, other] if first else [other, job])
    ended = [result["job"] for result in finish(machine) if result["eos"]]
    assert ended == ([other] if at == NEW and not first else [])


def test_a_filter_may_cancel_its_own_job(machine: Generator) -> None:
    class Fuse(Filter):
        fed = 0

        def begin(self, prefix_str: Any) -> None:
            pass

        def feed(self, token: Any) -> None:
            self.fed += 1
            if self.fed == NEW:
                machine.cancel(job)

        def next(self) -> Any:
            return None, set()

    job = make_job(machine, filters=[Fuse(None, machine.tokenizer)])
    machine.enqueue(job)
    assert not [result for result in finish(machine) if result["eos"]]


def test_a_hook_may_enqueue(machine: Generator) -> None:
    others = [make_job(machine) for _ in range(NEW)]

    def hook(count: int) -> None:
        machine.enqueue(others[count - 1])

    job = make_job(machine, hook)
    machine.enqueue(job)
    ends = [result["job"] for result in finish(machine) if result["eos"]]
    assert ends == [job, *others]


@pytest.mark.parametrize("run", ["generate", "iterate"])
def test_a_hook_that_steps_its_own_generator_is_refused(machine: Generator, run: str) -> None:
    """It ran rounds within rounds until Python's stack was full."""

    def hook(_: int) -> None:
        if run == "iterate":
            machine.iterate()
        else:
            machine.generate("xyz", 2)

    job, other = make_job(machine, hook), make_job(machine)
    machine.enqueue([job, other])
    ends = {result["job"]: result for result in finish(machine) if result["eos"]}
    assert isinstance(ends[job]["error"], InputError)
    assert "asks the generator that waits for it" in str(ends[job]["error"])
    assert ends[other]["eos_reason"] == "max_new_tokens"
