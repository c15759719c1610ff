"""Description + files + backend → modules. Quirks end here, as constructor arguments or other modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import spec
from ..checkpoint import Source
from ..errors import Unsupported
from ..formats import DenseWeight, Weight
from ..formats.room import give_back, trim
from ..kernels import backend as b
from ..kernels.backend import HeadPair
from ..kernels.select import Chain, Choice
from ..nn import (
    Attention,
    Block,
    Clamped,
    Embedding,
    Expert,
    Experts,
    GatedMlp,
    Head,
    HeadNorm,
    Linear,
    ParallelBlock,
    PlainMlp,
    Projection,
    SparseMlp,
    WideNorm,
)
from ..nn.attention import Qkv, leave
from ..nn.block import BlockLike, MlpLike
from ..nn.fused import FusedBlock, FusedHead, Gated, stacked
from ..nn.hop import Crossing, Hop, stay
from ..spec.roles import Matrix, matrices
from .ahead import ReadAhead
from .decoder import Decoder
from .devices import current


def keep(x: Tensor) -> Tensor:
    """The norm that is not there."""
    return x


def add(x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
    """The addition whose norm is not there."""
    total = x if y is None else x + y
    return total, total


def gated(pair: b.Project, act: b.Gated) -> b.Project:
    """Two matrices, then the nonlinearity of one's answer times the other's."""
    return lambda x, residual: [act(*pair(x, residual))]


def scaled(inner: b.Norm, factor: float) -> b.Norm:
    """A norm whose answer is multiplied; the inner one itself when the factor is one."""
    return inner if factor == 1.0 else lambda x: inner(x) * factor


@dataclass
class Builder:
    """Builds a model's modules one by one, so that the loader can report progress and stop between them."""

    model: spec.Model
    checkpoint: Source
    chain: Chain
    max_seq_len: int
    chains: Sequence[Chain] = ()  # one for each module, where they differ; () has all of them on `chain`
    embeds: bool = True  # whether the embedding is to be built, or left to another process
    heads: bool = True  # the same of the head
    _rotations: dict[tuple[int, spec.Rope], b.Rotation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Know every matrix before reading any."""
        self._matrices: dict[str, Matrix] = {matrix.role: matrix for matrix in matrices(self.model)}
        self._table: Weight | None = None
        self._ahead: ReadAhead[Callable[[], Linear]] | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}  # those of the thread that builds

    def __len__(self) -> int:
        """Modules in all: the embedding, each layer, the head."""
        return len(self.model.layers) + 2

    def build(self) -> Iterator[Decoder]:
        """Yield the growing decoder after each module; the last one yielded is whole.

        The head is made with the embedding. It is the largest matrix, and may be in memory twice while it is
        bound: better when there is nothing else yet than on top of everything.
        """
        first = ["head"] if self.heads and not self.tied else []
        roles = first + [role for role in self._matrices if role != "head"]
        total = self.checkpoint.files.total_bytes
        devices = {chain.device for chain in (self.chain, *self.chains)}
        self._streams = {one: torch.cuda.current_stream(one) for one in devices if one.type == "cuda"}
        with ReadAhead(self.prepare, self.stored_bytes, roles, total) as self._ahead:
            embedding = self.embedding() if self.embeds else None
            with current(self.at("head").device):
                head = self.head() if self.heads else None
            self._table = None  # it is bound, perhaps in another form
            give_back()
            decoder = Decoder(embedding, [], head, [])  # type: ignore[arg-type]  # another process has it
            yield decoder
            for i, layer in enumerate(self.model.layers):
                decoder.blocks.append(self.block(i, layer))
                decoder.hops.append(self.hop(i))
                before, block = decoder.blocks[-2:][0], decoder.blocks[-1]
                if i and isinstance(before, FusedBlock) and isinstance(block, FusedBlock):
                    before.lead(block)
                trim()
                yield decoder
            decoder.hops.append(self.hop(len(self.model.layers)))
            if all(hop is stay for hop in decoder.hops):
                decoder.stack = stacked(decoder.blocks)
        self._ahead = None
        give_back()
        yield decoder

    def at(self, role: str) -> Chain:
        """The backends of the module a role belongs to."""
        if not self.chains:
            return self.chain
        match role.split("."):
            case ["embed"]:
                return self.chains[0]
            case ["layers", layer, *_]:
                return self.chains[int(layer) + 1]
        return self.chains[-1]

    def hop(self, i: int) -> Crossing:
        """What lies before block i, or before the head: a border, if the module before it is elsewhere.

        There is one before the first block too, if a pass could begin with another GPU than its own current.
        """
        chains = self.chains or [self.chain] * len(self)
        first, devices = chains[0].device, {chain.device for chain in chains}
        astray = i == 0 and first.type == "cuda" and (len(devices) > 1 or first.index != 0)
        return Hop(chains[i + 1].device) if astray or chains[i + 1] is not chains[i] else stay

    def embedding(self) -> Embedding:
        """The token table, and the position table where there is one."""
        m, chain = self.model, self.at("embed")
        weight = self.table()
        lookup = chain.bind("embed", weight.describe(), lambda backend: backend.embedding(weight))
        rows = m.embed.positions
        positions = None
        if rows:
            shape = (rows, m.hidden)
            positions = self.checkpoint.tensor("positions", shape, dtype=chain.dtype, device=chain.device)
        stream = torch.float32 if m.wide_residual else chain.dtype
        return Embedding(lookup, m.vocab, positions, m.embed.scale, stream)

    def table(self) -> Weight:
        """The embedding's matrix, read once: kept as stored, unless it is also the head and must multiply."""
        if self._table is None:
            m, chain = self.model, self.at("embed")
            dtype = chain.dtype if self.tied and self.at("head") is chain else None
            self._table = self.checkpoint.weight(
                "embed", m.hidden, m.vocab, bias=False, dtype=dtype, device=chain.device
            )
        return self._table

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding's matrix: so described, and no head of its own in the files."""
        return self.model.head.tied and not self.checkpoint.has("head")

    def head(self) -> Head:
        """The final norm and the wide matrix."""
        m = self.model
        linear = self.bound("head", self.unit(self.tied_weight())) if self.tied else self.linear("head")
        norm = self.add_norm("final_norm", m.final_norm, m.hidden)
        head = Head(norm, linear, m.head.scale, m.head.softcap)
        fused = self.at("head").fuse("head.block", "a few rows", lambda fuser: self.fused_head(head, fuser))
        return fused or head

    def fused_head(self, head: Head, fuser: b.Fuser) -> FusedHead:
        """The head for few rows; `Unsupported` if it is not of the common kind."""
        if self.model.wide_residual:
            raise Unsupported("a wider residual stream")
        norm = self.model.final_norm
        entry = b.Entry(norm, self.norm_tensors("final_norm", norm, self.model.hidden)[0])
        return FusedHead(head, fuser.project([head.linear.kernel], entry, None, full=True), fuser.most)

    def unit(self, weight: Weight) -> Weight:
        """The head's matrix with rows of length one, if the model wants them."""
        if not self.model.head.unit_rows or not isinstance(weight, DenseWeight):
            return weight
        return DenseWeight(F.normalize(weight.data.float(), dim=1).to(weight.data.dtype), weight.bias)

    def tied_weight(self) -> Weight:
        """The embedding's matrix as the head's: the same one, or a copy where the head is elsewhere."""
        m, chain = self.model, self.at("head")
        if chain is self.at("embed"):
            return self.table()
        return self.checkpoint.weight(
            "embed", m.hidden, m.vocab, bias=False, dtype=chain.dtype, device=chain.device
        )

    def block(self, i: int, layer: spec.Layer) -> BlockLike:
        """One decoder layer of either shape."""
        at, hidden, scale = f"layers.{i}.", self.model.hidden, layer.residual_scale
        attn, mlp = self.attention(at, layer.attn), self.mlp(at, layer.mlp)
        attn_norm = self.add_norm(at + "attn_norm", layer.attn_norm, hidden)
        if layer.parallel:
            return ParallelBlock(attn, mlp, attn_norm, scaled(keep, scale))
        block = Block(
            attn,
            mlp,
            attn_norm=attn_norm,
            mlp_norm=self.add_norm(at + "mlp_norm", layer.mlp_norm, hidden),
            attn_post=scaled(self.norm(at + "attn_post", layer.attn_post, hidden), scale),
            mlp_post=scaled(self.norm(at + "mlp_post", layer.mlp_post, hidden), scale),
        )
        fused = self.at(at).fuse(
            at + "block", "a few rows", lambda fuser: self.fused(at, layer, block, fuser)
        )
        return fused or block

    def fused(self, at: str, layer: spec.Layer, block: Block, fuser: b.Fuser) -> FusedBlock:
        """The layer for few rows; `Unsupported` if anything in it is not of the common kind."""
        mlp, qkv, (first, second) = block.mlp, block.attn.qkv, (layer.attn_norm, layer.mlp_norm)
        if self.model.wide_residual or layer.residual_scale != 1.0:
            raise Unsupported("a residual stream that is wider or scaled")
        if first is None or second is None or layer.attn_post or layer.mlp_post:
            raise Unsupported("norms in other places")
        if not isinstance(mlp, GatedMlp | SparseMlp) or not isinstance(qkv, Projection):
            raise Unsupported("another MLP, or clamped projections")

        def entry(role: str, norm: spec.Norm) -> b.Entry:
            return b.Entry(norm, self.norm_tensors(at + role, norm, self.model.hidden)[0])

        def project(
            *parts: Linear, behind: b.Entry | None = None, act: spec.Activation | None = None
        ) -> b.Project:
            return fuser.project([part.kernel for part in parts], behind, act)

        start, end = project(qkv.q, qkv.k, qkv.v, behind=entry("attn_norm", first)), project(block.attn.o)
        if not isinstance(mlp, GatedMlp) or isinstance(layer.mlp, spec.Moe):
            return FusedBlock(block, start, end, None, fuser.most)
        pair = partial(project, mlp.gate, mlp.up, behind=entry("mlp_norm", second))
        try:
            gate = pair(act=layer.mlp.act)
        except Unsupported:  # as two matrices, and what lies between them by itself
            gate = gated(pair(), mlp.act)
        return FusedBlock(block, start, end, Gated(gate, project(mlp.down)), fuser.most)

    def attention(self, at: str, attn: spec.Attention) -> Attention:
        """Projections, head norms, rotation and the attention kernel of one layer."""
        qkv: Qkv = Projection(*(self.linear(f"{at}attn.{part}") for part in "qkv"))
        if attn.clip is not None:
            qkv = Clamped(qkv, attn.clip)
        chain = self.at(at)
        rotate = self.rotation(chain, attn.rope)
        attend = chain.bind(at + "attn", _words(attn), lambda backend: backend.attention(attn, rotate))
        return Attention(attn.head_dim, qkv, self.head_norms(at, attn), attend, self.linear(at + "attn.o"))

    def head_norms(self, at: str, attn: spec.Attention) -> HeadPair:
        """How q and k are normalised, if at all."""
        if attn.qk_norm is None:
            return leave
        q, k = at + "attn.q_norm", at + "attn.k_norm"
        norm, d = attn.qk_norm.norm, attn.head_dim
        if attn.qk_norm.scope == "all":
            return WideNorm(self.norm(q, norm, attn.heads * d), self.norm(k, norm, attn.kv_heads * d))
        return HeadNorm(self.norm(q, norm, d, heads=attn.heads), self.norm(k, norm, d, heads=attn.kv_heads))

    def mlp(self, at: str, mlp: spec.Mlp | spec.Moe) -> MlpLike:
        """Gated, plain or sparse."""
        if isinstance(mlp, spec.Moe):
            return self.experts(at, mlp)
        up, down = self.linear(at + "mlp.up"), self.linear(at + "mlp.down")
        if not mlp.gated:
            plain = self.at(at).bind(at + "mlp", mlp.act, lambda backend: backend.activation(mlp.act))
            return PlainMlp(plain, up, down)
        act = self.at(at).bind(at + "mlp", mlp.act, lambda backend: backend.gated(mlp.act))
        return GatedMlp(act, self.linear(at + "mlp.gate"), up, down)

    def experts(self, at: str, moe: spec.Moe) -> SparseMlp:
        """A router and every expert's three matrices."""

        def each(part: str) -> list[Linear]:
            return [self.linear(f"{at}mlp.experts.{e}.{part}") for e in range(moe.experts)]

        parts = each("gate"), each("up"), each("down")
        gate, up, down = ([linear.kernel for linear in part] for part in parts)
        kernel = self.at(at).bind(at + "mlp", _words(moe), lambda x: x.experts(moe, gate, up, down))
        experts = Experts(kernel, [Expert(*three) for three in zip(*parts, strict=True)])
        return SparseMlp(self.linear(at + "mlp.router"), experts)

    def rotation(self, chain: Chain, rope: spec.Rope | None) -> b.Rotation:
        """One table for all layers of a device that turn alike."""
        if rope is None:
            return b.stand
        key = id(chain), rope
        if key not in self._rotations:
            detail = f"{rope.dim} dimensions, {self.max_seq_len} positions"
            make: Callable[[b.Backend], b.Rotation] = lambda x: x.rotation(rope, self.max_seq_len)  # noqa: E731
            self._rotations[key] = chain.bind("rope", detail, make)
        return self._rotations[key]

    def norm(self, role: str, norm: spec.Norm | None, width: int, heads: int | None = None) -> b.Norm:
        """A bound norm, or the identity. Head norms are stored once, or once for each head."""
        if norm is None:
            return keep
        weight, bias = self.norm_tensors(role, norm, width, heads)
        return self.at(role).bind(role, norm.kind, lambda backend: backend.norm(norm, weight, bias))

    def add_norm(self, role: str, norm: spec.Norm | None, width: int) -> b.AddNorm:
        """A bound norm with the addition before it, or the addition alone."""
        if norm is None:
            return add
        weight, bias = self.norm_tensors(role, norm, width)
        return self.at(role).bind(role, norm.kind, lambda backend: backend.add_norm(norm, weight, bias))

    def norm_tensors(
        self, role: str, norm: spec.Norm, width: int, heads: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """A norm's scale, and its bias where it has one.

        They are small: checked on the CPU, and sent without waiting for what is on its way to a GPU.
        """

        def sent(suffix: str, *shapes: tuple[int, ...]) -> Tensor:
            stored = self.checkpoint.tensor(
                role, shapes, dtype=torch.float32, device=torch.device("cpu"), suffix=suffix, finite=True
            )
            return stored.to(self.at(role).device, non_blocking=True)

        each = ((width,),) if heads is None else ((width,), (heads, width))
        return sent("weight", *each), sent("bias", (width,)) if norm.bias else None

    def linear(self, role: str) -> Linear:
        """A matrix, read and bound; it is on its way already while `build` runs."""
        finish = self.prepare(role) if self._ahead is None else self._ahead.take(role)
        return finish()

    def prepare(self, role: str) -> Callable[[], Linear]:
        """All that another thread can do for a matrix; what is left to do here is returned.

        Which device and stream are current is a thread's own: there they are the builder's, so that what
        is done on either side comes in the order in which it is asked for. Kernels that need much room to
        be bound are left to the builder, one after the other.
        """
        chain = self.at(role)
        stream = self._streams.get(chain.device)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            weight = self.read(role)
            if not chain.compact:
                return partial(self.bound, role, weight)
            return partial(self._remembered, chain, *self._offer(role, weight))

    def bound(self, role: str, weight: Weight) -> Linear:
        """A weight with the kernel that multiplies it."""
        return self._remembered(self.at(role), *self._offer(role, weight))

    def _offer(self, role: str, weight: Weight) -> tuple[Linear, Choice]:
        kernel, choice = self.at(role).offer(role, weight.describe(), lambda backend: backend.linear(weight))
        return Linear(kernel, weight.in_features, weight.out_features), choice

    @staticmethod
    def _remembered(chain: Chain, linear: Linear, choice: Choice) -> Linear:
        chain.choices.append(choice)
        return linear

    def stored_bytes(self, role: str) -> int:
        """What the files say of a matrix's size; a head that is not there is the embedding."""
        return self.checkpoint.describe(role, "embed" if role == "head" else None)[1]

    def read(self, role: str) -> Weight:
        """A matrix from the files, on its module's device and in its precision."""
        _, width_in, width_out, bias = self._matrices[role]
        chain = self.at(role)
        weight = self.checkpoint.weight(
            role, width_in, width_out, bias=bias, dtype=chain.dtype, device=chain.device
        )
        return self.unit(weight) if role == "head" else weight


def _words(part: spec.Attention | spec.Moe) -> str:
    """A few words for `explain()`."""
    if isinstance(part, spec.Moe):
        return f"{part.active} of {part.experts} experts"
    window = f", window {part.window}" if part.window is not None else ""
    cap = f", cap {part.softcap:g}" if part.softcap is not None else ""
    return f"{part.heads}/{part.kv_heads} heads of {part.head_dim}{window}{cap}"
