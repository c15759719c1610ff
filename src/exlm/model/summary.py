"""A model's size, formats and backends, from its files' headers and the smallest matrix of each format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from .. import spec
from ..checkpoint import WeightSource
from ..config import FrozenConfig
from ..errors import Unsupported
from ..kernels.dispatch import BackendList, backends_for
from ..spec.model import Matrix, matrices
from .devices import pick_device, pick_dtype

TIED_FORM = "tied to the embedding"

MIXER_NAMES: Mapping[type, str] = {
    spec.Attention: "attention",
    spec.LatentAttention: "latent attention",
    spec.DeltaNet: "delta net",
    spec.Mamba2: "Mamba 2",
    spec.ShortConv: "short convolution",
    spec.ParallelMixers: "attention beside Mamba 2",
    type(None): "MLP alone",
}
"""What `exlm info` calls each kind of mixer."""


@dataclass(frozen=True)
class MatrixSummary:
    """One matrix: its format and the backend that would run it."""

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
    """Size, formats and backends of a model."""

    spec: spec.Model
    device: str
    dtype: str
    matrices: tuple[MatrixSummary, ...]
    file_bytes: int
    files: tuple[str, ...]

    @property
    def parameters(self) -> int:
        """Weights of all matrices and the embedding; a tied head counts once."""
        tied = any(m.role == "head" and m.form == TIED_FORM for m in self.matrices)
        total = sum(m.in_features * m.out_features for m in self.matrices)
        return total + (0 if tied else self.spec.vocab * self.spec.hidden)

    @property
    def mixers(self) -> dict[str, int]:
        """How many layers have each kind of mixer."""
        return dict(Counter(MIXER_NAMES[type(layer.mixer)] for layer in self.spec.layers))

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's recurrent states, with convolution inputs in 16 bits."""
        return sum(layer.state.nbytes(2) for layer in self.spec.layers if layer.state is not None)

    @property
    def cache_bytes(self) -> int:
        """KV cache bytes per token at 16 bits."""
        return sum(4 * attn.kv_heads * attn.head_dim for attn in self.spec.attentions)


def summarize(config: FrozenConfig, source: WeightSource) -> Summary:
    """Read the headers of a model's files and summarise them; keeps nothing in memory."""
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, config.stored_dtype, device)
    described: dict[Matrix, tuple[str, int]] = {}
    for matrix in matrices(config.spec):
        tied = matrix.role == "head" and config.spec.head.tied and not source.has("head")
        described[matrix] = (TIED_FORM, 0) if tied else source.describe(matrix.role)
    backends = _backend_by_form(described, source, backends_for(device, dtype, config.cpu_activation_bits))
    return Summary(
        spec=config.spec,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        matrices=tuple(
            MatrixSummary(matrix.role, matrix.in_features, matrix.out_features, form, nbytes, backends[form])
            for matrix, (form, nbytes) in described.items()
        ),
        file_bytes=source.files.total_bytes,
        files=tuple(path.name for path in source.files.paths),
    )


def _backend_by_form(
    described: Mapping[Matrix, tuple[str, int]], source: WeightSource, backends: BackendList
) -> dict[str, str]:
    """The backend of each stored format, found by binding the smallest matrix of that format."""
    smallest: dict[str, Matrix] = {}
    for matrix in sorted(described, key=lambda one: one.in_features * one.out_features):
        smallest.setdefault(described[matrix][0], matrix)
    return {form: _backend_of(form, matrix, source, backends) for form, matrix in smallest.items()}


def _backend_of(form: str, matrix: Matrix, source: WeightSource, backends: BackendList) -> str:
    role, in_features, out_features, bias = matrix
    weight = source.weight(
        "embed" if form == TIED_FORM else role,
        in_features,
        out_features,
        bias=bias,
        dtype=backends.dtype,
        device=backends.device,
    )
    try:
        backends.bind(role, form, lambda backend: backend.linear(weight))
    except Unsupported:
        return "none"
    return backends.records[-1].backend
