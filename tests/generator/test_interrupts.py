"""An interrupt such as Ctrl-C between any two lines of a step leaves the engine consistent."""

from __future__ import annotations

from exlm.generator.engine import EngineCore
from exlm.generator.page_table import PageTable
from tests.generator.test_engine import TOKENIZER, alphabet, make_job, run, streaming_results, tokens
from tests.generator.toy_model import VOCAB, ToyRunner
from tests.interrupts import interrupted

BOOKKEEPING_FILES = {"scheduler.py", "page_table.py", "token_sequence.py"}


def make_engine(pages: int = 16, size: int = 4) -> EngineCore:
    """An engine with small pages, so that jobs of a few letters take several."""
    return EngineCore(ToyRunner(alphabet, pages, size), PageTable(pages, size), TOKENIZER, VOCAB, max_batch_size=3)


def test_an_interrupted_round_leaves_nothing_behind() -> None:
    """Interrupt each line of two steps and of their clean-up in turn; the runner detects wrong keys."""
    text = tokens("abcdefghijklmnopqrstuvwxyz")
    expected = {new: run(make_engine(), make_job(text[:10], new))[-1][0]["full_completion"] for new in (2, 6)}
    completed, after = False, 0
    while not completed:
        engine = make_engine()
        run(engine, make_job(text[:9]), make_job(text[3:14]))  # there is something to find and to give up
        jobs = [make_job(text[:14]), make_job(text[:10]), make_job(text[:10], new=2)]
        try:
            with interrupted(after, BOOKKEEPING_FILES):
                for job in jobs:
                    engine.enqueue(job)
                engine.step()
                engine.step()
                engine.clear()
                engine.page_table.clear_prefix_cache()
                completed = True
        except KeyboardInterrupt:
            after += 1
        for job in jobs:
            engine.cancel(job)
        assert not engine.busy
        later_jobs = [make_job(text[:14]), make_job(text[:10]), make_job(text[:10], new=2)]
        last = {result["job"]: result for result in streaming_results(run(engine, *later_jobs)) if result["eos"]}
        assert len(last) == 3
        assert [last[job]["full_completion"] for job in later_jobs[1:]] == [expected[6], expected[2]]
        assert engine.page_table.num_free_pages == engine.page_table.num_pages
    assert after > 100
