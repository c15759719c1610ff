"""By which plan each product runs: what was quickest on this device if that was measured, else on an H200.

A plan decides in which order a row's sums are added, so answers may differ in their last bits from one plan
to another; on one device with one file they never do. How plans are compared is decided elsewhere.
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
from .gemm import GemmM16, RmsNorm, TileConfig
from .module_cache import ModuleCache
from .repack import MmaWeight

Setting = tuple[int, ...]

_TILES = (1, 2, 3, 4, 5, 6, 8)
_WARPS = (2, 3, 4, 5, 6, 8, 10, 12, 16)
_STAGES = (2, 3, 4)

_MAX_FILE_BYTES = 1 << 20  # a model has some ten kinds of products, each a line or so
_REMEDY = "usual plans are used; delete it, or run `exlm tune` again"


@dataclass
class GemmShape:
    """Products of one shape, which run by one plan."""

    name: str
    products: Sequence[GemmM16]

    @property
    def config(self) -> Setting:
        """Tiles, warps and stages."""
        return astuple(self.products[0].plan)

    def neighbors(self) -> list[Setting]:
        """Settings that are one step away."""
        found = []
        paced = [even for even in _TILES if even % 2 == 0] if self.products[0].form.act else _TILES
        for place, known in enumerate((paced, _WARPS, _STAGES)):
            now = self.config[place]
            below = [value for value in known if value < now][-1:]
            above = [value for value in known if value > now][:1]
            found += [(*self.config[:place], value, *self.config[place + 1 :]) for value in below + above]
        return [one for one in found if astuple(self.products[0].fitted(TileConfig(*one))) == one]

    def apply(self, config: Setting) -> None:
        """Let all of them run so from now on."""
        for product in self.products:
            product.plan = product.fitted(TileConfig(*config))


class TuneCache:
    """The plans of one device."""

    def __init__(self, modules: ModuleCache, file: Path | None = None) -> None:
        """`file` holds what was measured, behind a checksum in its name; there need not be one."""
        self.modules = modules
        self.file = file
        self._known = {} if file is None else _read(file)
        self._made: WeakSet[GemmM16] = WeakSet()

    def product(
        self, matrices: Sequence[MmaWeight], norm: RmsNorm | None = None, act: str | None = None, full: bool = False
    ) -> GemmM16:
        """Matrices that are multiplied together, by their plan."""
        setting = self._known.get(shape_name(matrices, act))
        plan = default_config(matrices, act, self.modules.num_sms) if setting is None else TileConfig(*setting)
        made = GemmM16(self.modules, matrices, norm, act, plan, full)
        self._made.add(made)
        return made

    def used(self, run: Callable[[], object]) -> list[GemmShape]:
        """The kinds of products that something uses, the largest first."""
        before = {id(one): one.launches for one in self._made}
        run()
        kinds: dict[str, list[GemmM16]] = {}
        for one in self._made:
            if one.launches > before.get(id(one), 0):
                act = "act" if one.form.act else None
                kinds.setdefault(shape_name(one.matrices, act), []).append(one)
        sizes = {name: sum(m.nbytes for one in found for m in one.matrices) for name, found in kinds.items()}
        return [GemmShape(name, kinds[name]) for name in sorted(kinds, key=lambda name: (-sizes[name], name))]

    def keep(self, kinds: Sequence[GemmShape]) -> Path | None:
        """Write down how these are set, for products to come; None if there is no file."""
        if self.file is None:
            return None
        self._known = _read(self.file) | {kind.name: kind.config for kind in kinds}
        return _write(self.file, self._known)


def tuned_file(folder: Path, device: str) -> Path:
    """Where the plans of a device of this name are, but for the checksum that ends the file's name."""
    return folder / f"plans-{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def shape_name(matrices: Sequence[MmaWeight], act: str | None) -> str:
    """What decides which plan is quickest, in words."""
    parts = []
    for one in matrices:
        layout = one.layout
        groups = f"{layout.bits} bits in {16 * layout.steps}s"
        fine = f" and {16 * layout.fine}s" if one.fine.stored else ""
        tables = f", {layout.tables} tables" if layout.tables > 1 else ""
        parts.append(f"{one.stored} x {one.tiles} of {groups}{fine}{tables}")
    return (" * " if act else " + ").join(parts)


def default_config(matrices: Sequence[MmaWeight], act: str | None = None, num_sms: int = 132) -> TileConfig:
    """What was quickest for matrices of this shape on an H200 (`benchmarks.matrices`).

    All thread blocks should run at once, on as many multiprocessors as there are.
    """
    tiles = sum(one.tiles for one in matrices)
    if act:  # a thread block has half of its tiles from each matrix
        return TileConfig(4, 5, 2) if tiles <= 4 * 3 * num_sms else TileConfig(4, 4, 2)
    each = -(-tiles // num_sms)
    if each <= 4:  # few outputs: many warps share the inputs
        return TileConfig(each, 12 if matrices[0].stored <= 48 else 16, 2)
    return TileConfig(3, 8, 2) if tiles <= 3 * 2 * num_sms else TileConfig(4, 4, 3)


def _read(file: Path) -> dict[str, Setting]:
    """The plans in the newest intact file; none, with a warning, if it cannot be read."""
    folder = ArtifactFolder(file.parent, _REMEDY)
    found = next(folder.find(file.name, _warn), None) or folder.find_unverified(file.name, _warn)
    if found is None:
        return {}
    try:
        return _plans(found.data)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        _warn(f"{found.path} cannot be read ({type(error).__name__}: {error}): {_REMEDY}.")
        return {}


def _plans(data: bytes) -> dict[str, Setting]:
    """Those of this version that a product can have; an error if it is not what `_write` writes."""
    if len(data) > _MAX_FILE_BYTES:
        raise ValueError(f"it has {len(data)} bytes, more than {_MAX_FILE_BYTES}")
    kept = json.loads(data.decode())
    if kept["exlm"] != __version__:
        return {}
    usual = (_TILES, _WARPS, _STAGES)
    return {
        kind: tuple(setting)
        for kind, setting in kept["plans"].items()
        if len(setting) == len(usual)
        and all(type(value) is int for value in setting)
        and all(value in known for value, known in zip(setting, usual, strict=True))
    }


def _write(file: Path, plans: dict[str, Setting]) -> Path:
    """The file that has them now; `CheckpointError` if that cannot be done."""
    text = json.dumps({"exlm": __version__, "plans": plans}, indent=1)
    try:
        return ArtifactFolder(file.parent).put(file.name, text.encode(), only=True)
    except UntrustedFolder as refused:
        raise CheckpointError(f"The plans could not be kept: {refused.strerror}") from refused
    except OSError as error:
        raise CheckpointError(
            f"{file} could not be written ({error}). Make room on the disk, or set EXLM_CACHE to a folder "
            "that can be written."
        ) from error


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)
