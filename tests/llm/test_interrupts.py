"""Ctrl-C while an answer is made: the LLM answers the next call as if nothing had been."""

from __future__ import annotations

from pathlib import Path

from exlm import LLM, Settings
from tests import tiny
from tests.interrupts import interrupted

GREEDY = Settings.greedy()


def test_an_interrupted_call_releases_the_lock(tmp_path: Path) -> None:
    with LLM(tiny.make_chat_folder(tmp_path / "m"), max_seq_len=256) as llm:
        expected = llm.generate("abc", settings=GREEDY, max_new_tokens=3).token_ids
        whole, after = False, 0
        while not whole:
            try:
                with interrupted(after, {"llm.py", "generator.py"}, at="call"):
                    llm.generate("abc", settings=GREEDY, max_new_tokens=3)
                    "".join(llm.stream("abcd", settings=GREEDY, max_new_tokens=2))
                    whole = True
            except KeyboardInterrupt:
                after += 1
            assert llm.generate("abc", settings=GREEDY, max_new_tokens=3).token_ids == expected
            assert llm.generator.num_remaining_jobs() == 0
        assert after > 10
