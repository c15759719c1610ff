"""A model's memory after its last reference goes, after unloading, and after a failure."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from exlm import LLM, Cache, CacheBase, Config, Generator, InputError, Model, Settings, Tokenizer
from exlm.model.cuda_graphs import MAX_GRAPH_TOKENS
from exlm.model.model_runner import PagedModelRunner
from tests import tiny


@pytest.fixture
def gc_disabled() -> Iterator[None]:
    """Without the garbage collector, memory in reference cycles is not freed."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def weak_references(model: Model, cache: CacheBase) -> list[weakref.ref[object]]:
    """Weak references to what takes memory."""
    return [weakref.ref(one) for one in (model, cache, model._require_loaded().decoder, cache.all_tensors()[0])]


@pytest.mark.usefixtures("gc_disabled")
def test_memory_is_freed_with_the_last_reference(tmp_path: Path) -> None:
    """After `del llm`, loading another model must not need memory for both."""
    llm = LLM(tiny.make_chat_folder(tmp_path / "m"))
    llm.generate(["a", "b"], max_new_tokens=3)
    watched = weak_references(llm.model, llm.cache)
    del llm
    assert [one() for one in watched] == [None] * 4


@pytest.mark.usefixtures("gc_disabled")
def test_memory_is_freed_with_cuda_graphs(tmp_path: Path) -> None:
    config = Config(tiny.make_chat_folder(tmp_path / "m"))
    model = Model(config)
    model.load()
    cache = Cache(model, max_seq_len=256)
    generator = Generator(model, cache, Tokenizer(config))
    generator._engine.runner = PagedModelRunner(
        model._require_loaded().decoder, cache, torch.device("cpu"), max_graph_tokens=MAX_GRAPH_TOKENS
    )
    generator.generate("a", max_new_tokens=3, gen_settings=Settings.greedy())
    watched = weak_references(model, cache)
    del model, cache, generator
    assert [one() for one in watched] == [None] * 4


@pytest.mark.parametrize("wrong", ["/some/model", Path("/some/model"), None, {}])
def test_a_non_config_is_refused(wrong: Any) -> None:
    hint = "/some/model" if wrong else "/path/to/model"
    with pytest.raises(InputError, match=rf"found {type(wrong).__name__}: write Model\(Config\('{hint}'\)\)"):
        Model(wrong)


def test_an_interrupted_autosplit_leaves_the_cache_as_it_was(tmp_path: Path) -> None:
    """The last callback is called after the cache was allocated."""

    def stop(done: int, total: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    model = Model(Config(tiny.make(tmp_path)))
    cache = Cache(model, lazy=True)
    with pytest.raises(KeyboardInterrupt):
        model.load_autosplit(cache, callback=stop)
    assert not model.loaded
    assert not cache.allocated
    steps = model.load_autosplit_gen(cache, callback_gen=lambda done, total: iter([(done, total)]))
    while next(steps) != (4, 4):
        pass
    assert cache.allocated
    del steps  # closed before its end
    assert not cache.allocated
    model.load_autosplit(cache)
    assert model.forward(torch.arange(5)[None], cache).shape == (1, 5, 64)


def test_autosplit_refuses_caches_that_it_cannot_allocate(tmp_path: Path) -> None:
    """Before it reads anything."""
    model, other = (Model(Config(tiny.make(tmp_path))) for _ in range(2))
    with pytest.raises(InputError, match=r"found None: give it Cache\(model, lazy=True\)"):
        model.load_autosplit(None)  # type: ignore[arg-type]
    cache = Cache(other, lazy=True)
    with pytest.raises(InputError, match=r"made for another model.*Cache\(model, lazy=True\) of this one"):
        model.load_autosplit(cache)
    other.load_autosplit(cache)
    other.unload()
    with pytest.raises(InputError, match=r"no tensors yet.* Call cache\.release\(\)"):
        other.load_autosplit(cache)
    cache.release()
    other.load_autosplit(cache)
    assert other.forward(torch.arange(5)[None], cache).shape == (1, 5, 64)
