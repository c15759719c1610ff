"""What a model folder holds, from its descriptions and headers alone: nothing is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from .. import spec
from ..checkpoint import open_source
from ..config import FrozenConfig
from ..kernels.select import choose
from ..spec.roles import matrices
from .devices import pick_device, pick_dtype

TIED = "tied to the embedding"


@dataclass(frozen=True)
class MatrixSummary:
    """One matrix: how it is stored and who would multiply with it."""

    role: str
    in_features: int
    out_features: int
    form: str
    nbytes: int
    backend: str

    @property
    def bits(self) -> float:
        """Stored bits for each weight."""
        return 8 * self.nbytes / (self.in_features * self.out_features)


@dataclass(frozen=True)
class Summary:
    """A model at a glance."""

    spec: spec.Model
    device: str
    dtype: str
    matrices: tuple[MatrixSummary, ...]
    file_bytes: int
    files: tuple[str, ...]

    @property
    def parameters(self) -> int:
        """Numbers in all matrices and the embedding; a tied head counts once."""
        tied = any(m.role == "head" and m.form == TIED for m in self.matrices)
        total = sum(m.in_features * m.out_features for m in self.matrices)
        return total + (0 if tied else self.spec.vocab * self.spec.hidden)

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values for each token in sixteen bits."""
        return sum(4 * layer.attn.kv_heads * layer.attn.head_dim for layer in self.spec.layers)


def summarize(config: FrozenConfig) -> Summary:
    """Read the headers of a model's files and say what is in them."""
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, config.stored_dtype, device)
    backend = choose(device, dtype).backends[0].name
    checkpoint = open_source(config.path, config.spec.names, config.quantization)
    found = []
    for role, width_in, width_out, _ in matrices(config.spec):
        tied = role == "head" and config.spec.head.tied and not checkpoint.has("head")
        form, nbytes = (TIED, 0) if tied else checkpoint.describe(role)
        found.append(MatrixSummary(role, width_in, width_out, form, nbytes, backend))
    return Summary(
        spec=config.spec,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        matrices=tuple(found),
        file_bytes=checkpoint.files.total_bytes,
        files=tuple(path.name for path in checkpoint.files.paths),
    )
