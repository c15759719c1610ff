"""What the sampler is given and what it gives back: `SamplingRequest` and `SamplerOutput`.

A row that cannot be sampled does not affect the others: its token is a negative number that says what is
wrong, so the host need not wait for the device to find out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..errors import BadLogits
from ..kernels.sampling_layout import INFINITE_LOGITS, NAN_LOGITS, NO_TOKEN_ALLOWED
from .settings import VERSION_STAMPS, Settings
from .state import SamplerState

FAILURE_MESSAGES = {
    NO_TOKEN_ALLOWED: (
        "No token is left to choose from: filters, token_bias and allowed tokens together exclude all. "
        "Loosen one of them."
    ),
    NAN_LOGITS: (
        "The logits are not numbers (NaN). The weights, the token_bias or a filter's mask are broken; "
        "if the model computes in float16, try bfloat16 or float32."
    ),
    INFINITE_LOGITS: (
        "A logit is infinite. The token_bias or a filter's mask is broken, or the model's numbers overflow; "
        "if it computes in float16, try bfloat16 or float32."
    ),
}


@dataclass(eq=False)
class SamplingRequest:
    """One sequence that needs a token.

    `history` holds all its ids so far, prompt included; None if the state is given each token by `accept`.
    `blocked` ids are taken only if everything else is excluded. `allowed` excludes all others: ids, a mask
    of booleans (vocab,), or one of bits packed into int32 words, the first id in the lowest bit. A request
    with `uses_cfg` stands for two neighbouring rows of logits, which its settings' `cfg_scale` mixes. The
    `num_top_tokens` most probable tokens come back with their probabilities.
    """

    settings: Settings
    state: SamplerState
    history: Sequence[int] | None = None
    blocked: Collection[int] = ()
    allowed: Tensor | Collection[int] | None = None
    return_probs: bool = False
    num_top_tokens: int = 0
    uses_cfg: bool = False
    version_stamp: object = field(default=None, init=False, repr=False)

    def __setattr__(self, name: str, value: object) -> None:
        """Set a field: a new version stamp, except for `allowed`, which is read anew for each token."""
        fields = self.__dict__
        if fields.get(name, fields) is not value:
            fields[name] = value
            if name == "allowed":
                VERSION_STAMPS.latest_mask_change = object()
            else:
                fields["version_stamp"] = VERSION_STAMPS.new_stamp()

    @property
    def position(self) -> int:
        """The position of the token that is to be sampled."""
        return len(self.state.history if self.history is None else self.history)


@dataclass(frozen=True)
class SamplerOutput:
    """The tokens of a batch, on the host; a negative one is a failure (see `error`).

    `probs` (rows,) are their final probabilities in float32. `top_tokens` and `top_probs` (rows, most
    requested) are None unless a row asked for them; a row that asked for fewer uses its first ones. These
    three are still on the logits' device. `resampled` says that some tokens are not those that the device
    had first: a row had too many candidates for the kernel and was drawn again.
    """

    tokens: list[int]
    probs: Tensor
    top_tokens: Tensor | None = None
    top_probs: Tensor | None = None
    resampled: bool = False

    @staticmethod
    def error(token: int) -> BadLogits | None:
        """What went wrong if a token is a failure; None if it is a token."""
        return None if token >= 0 else BadLogits(FAILURE_MESSAGES[token])
