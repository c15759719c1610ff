"""Tiny random models of every family: a folder on disk, and the transformers model as oracle.

`build` writes a folder as the family publishes it and keeps the transformers model:
exlm reads the folder and must agree with `Oracle.logits`. The oracle runs in float32,
without a cache and with eager attention, so that windows, softcaps and masks are transformers' own.
Everything is generated from a seed in well under a second.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from .zoo_cases import CASES, Case
from .zoo_custom import CUSTOM
from .zoo_recipes import TEXT_VOCAB, VOCAB, Config, Tensors, UnsavedModel, from_recipe
from .zoo_spelling import old_spelling
from .zoo_weights import randomize_weights

__all__ = [
    "CASES",
    "TEXT_VOCAB",
    "VOCAB",
    "Case",
    "Oracle",
    "build",
    "legacy_config",
    "reload_oracle",
    "rewrite_config",
]

Spelling = Literal["old", "new"]
Layout = Literal["published", "native", "bare", "stray"]

WEIGHTS = "model.safetensors"
CONFIG = "config.json"


@dataclass
class Oracle:
    """A model folder and its transformers model."""

    architecture: str
    folder: Path
    model: Any
    modern: Config  # config.json with the new keys, whatever the folder has

    def logits(self, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) of ids (B, T), without state between calls; positions from 0 unless given."""
        return self._forward(ids, position_ids)

    def logits_mrope(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits of ids (B, T) at positions (3, B, T): time, height, width. Only for Qwen's vision models."""
        if positions.shape != (3, *ids.shape):
            raise ValueError(f"positions must have shape {(3, *ids.shape)}, found {tuple(positions.shape)}")
        if not any(name in self.architecture for name in ("Qwen2VL", "Qwen2_5_VL", "Qwen3_5")):
            raise ValueError(f"{self.architecture} does not turn in three planes")
        return self._forward(ids, positions)

    def config(self) -> Config:
        """The present config.json."""
        result: Config = json.loads((self.folder / CONFIG).read_text())
        return result

    def _forward(self, ids: Tensor, positions: Tensor | None) -> Tensor:
        _reset_rope_cache(self.model)
        # An explicit mask, or transformers takes jumps in the positions for several packed sequences.
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
        if positions is not None:
            inputs["position_ids"] = positions
        with torch.no_grad(), silence_transformers():
            result: Tensor = self.model(**inputs).logits
        return result


def build(
    architecture: str,
    folder: Path,
    *,
    seed: int = 0,
    spelling: Spelling | None = None,
    layout: Layout = "published",
    **overrides: Any,
) -> Oracle:
    """Write a tiny random model of this architecture into `folder` and return its oracle.

    `overrides` are new config.json keys over the zoo's small numbers; nested tables
    merge. `spelling` chooses the keys of config.json: by default those of transformers 5, or, for
    families that it does not have, the old ones. `layout` chooses the tensors' names: as published; as
    transformers has them in memory (`native`); GPT-2 without its prefix (`bare`); Llama with the leftovers of
    its first files (`stray`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    custom = architecture in CUSTOM
    with silence_transformers():
        draft = CUSTOM[architecture](overrides) if custom else from_recipe(architecture, overrides)
        randomize_weights(draft.model, seed, embedding=draft.embedding, active=draft.active)
        draft.model.save_pretrained(folder, save_original_format=layout != "native")
    (folder / "generation_config.json").unlink(missing_ok=True)
    _rename_tensors(draft, folder, layout)
    config: Config = json.loads((folder / CONFIG).read_text())
    if draft.rewrite_config:
        config = draft.rewrite_config(config)
    config["architectures"] = [architecture]
    oracle = Oracle(architecture, folder, draft.model, config)
    rewrite_config(oracle, spelling or ("old" if custom else "new"))
    return oracle


def rewrite_config(oracle: Oracle, spelling: Spelling) -> Config:
    """Rewrite the folder's config.json with the given keys and return it; the model stays the same."""
    config = oracle.modern if spelling == "new" else old_spelling(oracle.modern)
    (oracle.folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return config


def reload_oracle(oracle: Oracle) -> Oracle:
    """The oracle of the present folder, with transformers' defaults for absent keys."""
    library = importlib.import_module("transformers")
    with silence_transformers():
        kind = getattr(library, oracle.architecture)
        model = kind.from_pretrained(oracle.folder, attn_implementation="eager", dtype=torch.float32)
    return Oracle(oracle.architecture, oracle.folder, model.eval(), oracle.config())


def legacy_config(oracle: Oracle) -> Config:
    """Rewrite the folder's config.json with the keys from before transformers 5, and return it."""
    return rewrite_config(oracle, "old")


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Silence transformers' log lines, progress bars and warnings for the block."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging = importlib.import_module("transformers.utils.logging")
        level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity(logging.CRITICAL)
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(level)
            if bars:
                logging.enable_progress_bar()


def _rename_tensors(draft: UnsavedModel, folder: Path, layout: Layout) -> None:
    safetensors = importlib.import_module("safetensors.torch")
    tensors: Tensors = safetensors.load_file(folder / WEIGHTS)
    if draft.rename_tensors and layout != "native":
        tensors = draft.rename_tensors(tensors)
    if layout == "bare":
        tensors = _without_prefix(tensors, draft.model.config)
    if layout == "stray":
        frequencies = draft.model.model.rotary_emb.inv_freq
        for layer in range(draft.model.config.num_hidden_layers):
            tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = frequencies.clone()
    contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
    safetensors.save_file(contiguous, folder / WEIGHTS, metadata={"format": "pt"})


def _without_prefix(tensors: Tensors, config: Any) -> Tensors:
    """GPT-2's first file: no prefix, and each layer's causal mask under a name that looks like a bias."""
    result = {key.removeprefix("transformer."): tensor for key, tensor in tensors.items()}
    mask = torch.ones(config.n_positions, config.n_positions).tril()[None, None]
    result.update({f"h.{layer}.attn.bias": mask.clone() for layer in range(config.n_layer)})
    return result


def _reset_rope_cache(model: Any) -> None:
    """Reset dynamic RoPE scaling after an earlier, longer sequence."""
    for module in model.modules():
        if hasattr(module, "original_inv_freq") and hasattr(module, "original_max_seq_len"):
            module.inv_freq = module.original_inv_freq.clone()
            module.max_seq_len_cached = module.original_max_seq_len
