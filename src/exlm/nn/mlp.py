"""MLPs: gated, plain, and mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from ..kernels.interface import ActivationFn, GatedActivationFn, MoeFn
from .batch import Batch
from .linear import Linear


class MlpLike(Protocol):
    """Any of the MLPs."""

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(rows, tokens, hidden) → the same shape."""
        ...


class GatedMlp:
    """down(act(gate) · up)."""

    def __init__(self, act: GatedActivationFn, gate: Linear, up: Linear, down: Linear) -> None:
        self.act = act
        self.gate, self.up, self.down = gate, up, down

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(rows, tokens, hidden) → the same shape."""
        hidden = self.act(self.gate.forward(x, batch), self.up.forward(x, batch))
        return self.down.forward(hidden, batch)


class ScaledGatedMlp(GatedMlp):
    """out_scale · down(act(gate_scale · gate) · up)."""

    def __init__(
        self, act: GatedActivationFn, gate: Linear, up: Linear, down: Linear, gate_scale: float, out_scale: float
    ) -> None:
        super().__init__(act, gate, up, down)
        self.gate_scale, self.out_scale = gate_scale, out_scale

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(rows, tokens, hidden) → the same shape."""
        hidden = self.act(self.gate.forward(x, batch) * self.gate_scale, self.up.forward(x, batch))
        return self.down.forward(hidden, batch) * self.out_scale


class PlainMlp:
    """down(act(up))."""

    def __init__(self, act: ActivationFn, up: Linear, down: Linear) -> None:
        self.act = act
        self.up, self.down = up, down

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(rows, tokens, hidden) → the same shape."""
        return self.down.forward(self.act(self.up.forward(x, batch)), batch)


class Expert(NamedTuple):
    """The matrices of one expert, an MLP with or without gate."""

    gate: Linear | None
    up: Linear
    down: Linear


class Experts:
    """All experts of a layer behind one kernel, which routes each token to a few of them."""

    def __init__(self, kernel: MoeFn, experts: Sequence[Expert], selection_bias: Tensor | None = None) -> None:
        """`experts` and `selection_bias` are what the kernel was bound to: LoRA binds another to them."""
        self.kernel = kernel
        self.experts = experts
        self.selection_bias = selection_bias

    def forward(self, x: Tensor, logits: Tensor, batch: Batch) -> Tensor:
        """(rows, tokens, hidden) and the router's (rows, tokens, experts) → (rows, tokens, hidden)."""
        return self.kernel(x, logits)


class MoeMlp:
    """A router and its experts."""

    def __init__(self, router: Linear, experts: Experts) -> None:
        self.router = router
        self.experts = experts

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(rows, tokens, hidden) → the same shape."""
        return self.experts.forward(x, self.router.forward(x, batch), batch)


class LatentMoeMlp(MoeMlp):
    """A router that reads hidden states, and experts that read and write a narrower latent."""

    def __init__(self, router: Linear, experts: Experts, latent_down: Linear, latent_up: Linear) -> None:
        super().__init__(router, experts)
        self.latent_down, self.latent_up = latent_down, latent_up

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(rows, tokens, hidden) → the same shape."""
        latent = self.latent_down.forward(x, batch)
        return self.latent_up.forward(self.experts.forward(latent, self.router.forward(x, batch), batch), batch)


class SharedExpertMlp:
    """Experts, and beside them a shared one that runs for every token, maybe with a gate on its output."""

    def __init__(self, routed: MoeMlp, shared: MlpLike, gate: Linear | None) -> None:
        self.routed, self.shared, self.gate = routed, shared, gate

    @property
    def router(self) -> Linear:
        """The router of the routed experts."""
        return self.routed.router

    @property
    def experts(self) -> Experts:
        """The routed experts."""
        return self.routed.experts

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(rows, tokens, hidden) → the same shape."""
        shared = self.shared.forward(x, batch)
        if self.gate is not None:
            shared = shared * self.gate.forward(x, batch).sigmoid()
        return self.routed.forward(x, batch) + shared
