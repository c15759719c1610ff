"""The parts of a model as old programs count them: to size a progress bar, or to ask where one is."""

from __future__ import annotations

import warnings


class LegacyModule:
    """One of the parts that loading reports: the embedding, a layer, the head. It computes nothing itself."""

    def __init__(self, key: str, name: str, device_idx: int | None) -> None:
        self.key = key
        self.name = name
        self._device_idx = device_idx

    @property
    def device_idx(self) -> int | None:
        """The number of the GPU it is on; -1: a processor; None: it is not loaded."""
        return self._device_idx

    @device_idx.setter
    def device_idx(self, wanted: int | None) -> None:
        if wanted != self._device_idx:
            warnings.warn(
                f"{self.key} stays where it is: parts go to devices as model.load(gpu_split) or "
                "model.load_autosplit(cache) say.",
                UserWarning,
                stacklevel=2,
            )

    def reload(self) -> None:
        """Nothing: its numbers are there, and where they belong."""

    def __repr__(self) -> str:
        """Its key and where it is."""
        return f"{type(self).__name__}({self.key!r}, device_idx={self._device_idx})"


def list_legacy_modules(layers: int, devices: list[int] | None) -> list[LegacyModule]:
    """The embedding, every layer and the head, in the order in which they are loaded."""
    keys = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(layers)), "lm_head"]
    names = ["Embedding", *["Layer"] * layers, "Head"]
    places: list[int | None] = [None] * len(keys) if devices is None else [*devices]
    return [LegacyModule(*each) for each in zip(keys, names, places, strict=True)]
