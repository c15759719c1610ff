"""An interrupt, such as Ctrl-C, may end a round between any two lines; nothing later notices."""

from __future__ import annotations

from exlm.generator.engine import EngineCore
from exlm.generator.page_table import PageTable
from tests.generator.test_engine import TOKENIZER, alphabet, job, run, streaming_results, tokens
from tests.generator.toy_model import VOCAB, ToyRunner
from tests.interrupts import interrupted

BOOKKEEPING_FILES = {"scheduler.py", "page_table.py", "token_sequence.py"}


def loop(pages: int = 16, size: int = 4) -> EngineCore:
    """Jobs of a few letters take several pages."""
    return EngineCore(ToyRunner(alphabet, pages, size), PageTable(pages, size), TOKENIZER, VOCAB, max_batch_size=3)


def test_an_interrupted_round_leaves_nothing_behind() -> None:
    """At each line of two rounds in turn, and of what ends them; the runner would notice wrong keys."""
    text = tokens("abcdefghijklmnopqrstuvwxyz")
    expected = {new: run(loop(), job(text[:10], new))[-1][0]["full_completion"] for new in (2, 6)}
    whole, after = False, 0
    while not whole:
        machine = loop()
        run(machine, job(text[:9]), job(text[3:14]))  # there is something to find and to give up
        jobs = [job(text[:14]), job(text[:10]), job(text[:10], new=2)]
        try:
            with interrupted(after, BOOKKEEPING_FILES):
                for one in jobs:
                    machine.enqueue(one)
                machine.step()
                machine.step()
                machine.clear()
                machine.page_table.clear_prefix_cache()
                whole = True
        except KeyboardInterrupt:
            after += 1
        for one in jobs:
            machine.cancel(one)
        assert not machine.busy
        again = [job(text[:14]), job(text[:10]), job(text[:10], new=2)]
        ends = {result["job"]: result for result in streaming_results(run(machine, *again)) if result["eos"]}
        assert len(ends) == 3
        assert [ends[one]["full_completion"] for one in again[1:]] == [expected[6], expected[2]]
        assert machine.page_table.num_free_pages == machine.page_table.num_pages
    assert after > 100
