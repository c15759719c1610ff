"""Tile configurations of GEMMs: the fastest on this device if `exlm tune` has measured it, else on an H200.

A configuration decides the order of summation, so outputs may differ in their last bits between two of them; on one
device with one file they never do. `bench/tuning.py` does the measuring. The file calls them plans.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from weakref import WeakSet

from ...errors import CheckpointError
from ...version import __version__
from ..artifact_cache import ArtifactFolder, UntrustedFolder
from .gemm_m16 import GemmM16, RmsNorm, TileConfig
from .module_cache import ModuleCache
from .weight_tile import MmaWeight

Config = tuple[int, ...]
"""A `TileConfig` as numbers: warp tiles, warps, stages."""

_WARP_TILES = (1, 2, 3, 4, 5, 6, 8)
_WARPS = (2, 3, 4, 5, 6, 8, 10, 12, 16)
_STAGES = (2, 3, 4)

_MAX_FILE_BYTES = 1 << 20  # a model has some ten shapes, each a line or so
_REMEDY = "default configurations are used; delete it, or run `exlm tune` again"


@dataclass
class GemmShape:
    """GEMMs of one shape, which have one configuration."""

    name: str
    gemms: Sequence[GemmM16]

    @property
    def config(self) -> Config:
        return astuple(self.gemms[0].config)

    def neighbors(self) -> list[Config]:
        """Configurations that differ in one step of one number, and fit."""
        found = []
        warp_tiles = [even for even in _WARP_TILES if even % 2 == 0] if self.gemms[0].variant.act else _WARP_TILES
        for i, choices in enumerate((warp_tiles, _WARPS, _STAGES)):
            now = self.config[i]
            below = [value for value in choices if value < now][-1:]
            above = [value for value in choices if value > now][:1]
            found += [(*self.config[:i], value, *self.config[i + 1 :]) for value in below + above]
        return [config for config in found if astuple(self.gemms[0].fit(TileConfig(*config))) == config]

    def apply(self, config: Config) -> None:
        for gemm in self.gemms:
            gemm.config = gemm.fit(TileConfig(*config))


class TuneCache:
    """The tuned configurations of one device, and the GEMMs that use them."""

    def __init__(self, modules: ModuleCache, file: Path | None = None) -> None:
        """`file` holds what was measured; its real name has a checksum. It need not exist."""
        self.modules = modules
        self.file = file
        self._known = {} if file is None else _read(file)
        self._gemms: WeakSet[GemmM16] = WeakSet()

    def gemm(
        self, weights: Sequence[MmaWeight], norm: RmsNorm | None = None, act: str | None = None, fp32_out: bool = False
    ) -> GemmM16:
        """A GEMM with the configuration of its shape."""
        tuned = self._known.get(shape_name(weights, act))
        config = default_config(weights, act, self.modules.num_sms) if tuned is None else TileConfig(*tuned)
        gemm = GemmM16(self.modules, weights, norm, act, config, fp32_out)
        self._gemms.add(gemm)
        return gemm

    def shapes_used(self, run: Callable[[], object]) -> list[GemmShape]:
        """The shapes of the GEMMs that `run` launches, the largest first."""
        before = {id(gemm): gemm.launches for gemm in self._gemms}
        run()
        shapes: dict[str, list[GemmM16]] = {}
        for gemm in self._gemms:
            if gemm.launches > before.get(id(gemm), 0):
                act = "act" if gemm.variant.act else None
                shapes.setdefault(shape_name(gemm.weights, act), []).append(gemm)
        sizes = {name: sum(w.nbytes for gemm in gemms for w in gemm.weights) for name, gemms in shapes.items()}
        return [GemmShape(name, shapes[name]) for name in sorted(shapes, key=lambda name: (-sizes[name], name))]

    def save(self, shapes: Sequence[GemmShape]) -> Path | None:
        """Store their configurations for GEMMs to come; None if there is no file."""
        if self.file is None:
            return None
        self._known = _read(self.file) | {shape.name: shape.config for shape in shapes}
        return _write(self.file, self._known)


def tuned_file(folder: Path, device: str) -> Path:
    """The file of a device of this name; the real name has a checksum at its end."""
    return folder / f"plans-{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def shape_name(weights: Sequence[MmaWeight], act: str | None) -> str:
    """All that decides which configuration is fastest, in words; the key in the file."""
    parts = []
    for weight in weights:
        layout = weight.layout
        groups = f"{layout.bits} bits in {16 * layout.group_ksteps}s"
        fine = f" and {16 * layout.fine_ksteps}s" if weight.fine.k_tiles else ""
        tables = f", {layout.num_tables} tables" if layout.num_tables > 1 else ""
        parts.append(f"{weight.k_tiles} x {weight.n_tiles} of {groups}{fine}{tables}")
    return (" * " if act else " + ").join(parts)


def default_config(weights: Sequence[MmaWeight], act: str | None = None, num_sms: int = 132) -> TileConfig:
    """The fastest for weights of this shape on an H200 (`benchmarks.matrices`).

    All thread blocks should be resident at once, on as many SMs as there are.
    """
    n_tiles = sum(weight.n_tiles for weight in weights)
    if act:  # a thread block has half of its tiles from each weight
        return TileConfig(4, 5, 2) if n_tiles <= 4 * 3 * num_sms else TileConfig(4, 4, 2)
    tiles_per_sm = -(-n_tiles // num_sms)
    if tiles_per_sm <= 4:  # few outputs: many warps share the inputs
        return TileConfig(tiles_per_sm, 12 if weights[0].k_tiles <= 48 else 16, 2)
    return TileConfig(3, 8, 2) if n_tiles <= 3 * 2 * num_sms else TileConfig(4, 4, 3)


def _read(file: Path) -> dict[str, Config]:
    """The configurations in the newest intact file; none, with a warning, if it cannot be read."""
    folder = ArtifactFolder(file.parent, _REMEDY)
    found = next(folder.find(file.name, _warn), None) or folder.find_unverified(file.name, _warn)
    if found is None:
        return {}
    try:
        return _parse(found.data)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        _warn(f"{found.path} cannot be read ({type(error).__name__}: {error}): {_REMEDY}.")
        return {}


def _parse(data: bytes) -> dict[str, Config]:
    """The valid configurations of this version; an error if the data is not what `_write` writes."""
    if len(data) > _MAX_FILE_BYTES:
        raise ValueError(f"it has {len(data)} bytes, more than {_MAX_FILE_BYTES}")
    stored = json.loads(data.decode())
    if stored["exlm"] != __version__:
        return {}
    choices = (_WARP_TILES, _WARPS, _STAGES)
    return {
        shape: tuple(config)
        for shape, config in stored["plans"].items()
        if len(config) == len(choices)
        and all(type(value) is int for value in config)
        and all(value in known for value, known in zip(config, choices, strict=True))
    }


def _write(file: Path, configs: dict[str, Config]) -> Path:
    """The file that was written; `CheckpointError` if that fails."""
    text = json.dumps({"exlm": __version__, "plans": configs}, indent=1)
    try:
        return ArtifactFolder(file.parent).put(file.name, text.encode(), only=True)
    except UntrustedFolder as refused:
        raise CheckpointError(f"The tuned configurations could not be kept: {refused.strerror}") from refused
    except OSError as error:
        raise CheckpointError(
            f"{file} could not be written ({error}). Make room on the disk, or set EXLM_CACHE to a folder "
            "that can be written."
        ) from error


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)
