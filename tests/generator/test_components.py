"""Invalid combinations of a generator's model, cache and tokenizer are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from exlm import Cache, Config, Generator, InputError, Job, Model, Tokenizer
from exlm.legacy import StreamingGenerator
from tests import tiny


@pytest.fixture(scope="module")
def components(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Tokenizer]:
    config = Config(tiny.make_chat_folder(tmp_path_factory.mktemp("parts") / "m"))
    model = Model(config)
    model.load()
    return model, Tokenizer(config)


def test_a_draft_model_in_the_models_own_cache_is_refused(components: Any) -> None:
    """Regression: the draft overwrote the model's keys and values, which changed the text."""
    model, tokenizer = components
    cache = Cache(model, max_seq_len=512)
    with pytest.raises(InputError, match="draft_cache is the model's own cache"):
        Generator(model, cache, tokenizer, draft_model=model, draft_cache=cache)
    with pytest.raises(InputError, match="draft_cache is the model's own cache"):
        StreamingGenerator(model, cache, tokenizer, model, cache)


def test_swapped_components_are_refused(components: Any) -> None:
    model, tokenizer = components
    cache = Cache(model, max_seq_len=512)
    with pytest.raises(InputError, match="cache must be a Cache, found Tokenizer"):
        Generator(model, tokenizer, cache)
    with pytest.raises(InputError, match="model must be a Model, found Config"):
        Generator(model.config, cache, tokenizer)


def test_stop_conditions_may_be_an_array() -> None:
    """Regression: an array was tested for truth, which torch refuses."""
    ids = torch.tensor([[1, 2]])
    for array in (torch.tensor([3, 4]), torch.tensor([3, 4]).numpy(), torch.tensor([3, 3, 4]).tolist()):
        assert Job(ids, 5, stop_conditions=array).stop_tokens == {3, 4}
    with pytest.raises(InputError, match="stop_conditions must be a list"):
        Job(ids, 5, stop_conditions=torch.tensor(3))  # type: ignore[arg-type]
