"""What the sampler is given and what it gives back: `Row`, `Picks`, and what can be wrong with a row.

Plain data. A failure is a row's own: its token is a negative number that says what happened, so that nobody
has to wait for the device to find out, and the other rows are as if it were not there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from ..errors import BadLogits
from ..kernels.sampling_layout import INFINITE_LOGITS, NAN_LOGITS, NO_TOKEN_ALLOWED, TOO_MANY_CANDIDATES
from .settings import VERSION_STAMPS, Settings
from .state import SamplerState

if TYPE_CHECKING:
    from .gpu_kernels import HostTokens


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
    """One sequence that wants a token.

    `history` are all its ids so far, prompt included; None if the state is told of each token by `accept`.
    `blocked` ids are taken only if everything else is excluded. `allowed` excludes all others: ids, a mask
    of booleans (vocab,), or one of bits packed into int32 words, the first id in the lowest bit. A `guided`
    row stands for two neighbouring rows of logits, which its settings' `cfg_scale` mixes. Of `want_top`
    tokens the probabilities come back, too.
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
        """Set a field; that makes another `edition`, but for `allowed`, which is read anew for each token."""
        fields = self.__dict__
        if fields.get(name, fields) is not value:
            fields[name] = value
            if name == "allowed":
                VERSION_STAMPS.latest_mask_change = object()
            else:
                fields["version_stamp"] = VERSION_STAMPS.new_stamp()

    @property
    def position(self) -> int:
        """The position of the token that is wanted."""
        return len(self.state) if self.history is None else len(self.history)


@dataclass
class SamplerOutput:
    """The chosen tokens (rows,) as int64 and their final probabilities (rows,), on the logits' device.

    `top_tokens` and `top_probs` (rows, most wanted) are None unless a row wanted them; a row that wanted
    fewer uses its first ones. A negative token is a failure: see `error`. `told` are the tokens where the
    host can read them without asking for a copy.
    """

    tokens: Tensor
    probs: Tensor
    top_tokens: Tensor | None = None
    top_probs: Tensor | None = None
    resample: Callable[[list[int]], SamplerOutput] | None = None
    host_tokens: HostTokens | None = None

    def tolist(self) -> list[int]:
        """The tokens as integers; waits for the device, but if they are `told` only for them.

        Rows that had too many candidates for a kernel are picked once more, with `again`, and what is here
        becomes final; the logits must still be what they were.
        """
        tokens: list[int] = self.tokens.tolist() if self.host_tokens is None else self.host_tokens.tolist()
        if self.resample is not None and TOO_MANY_CANDIDATES in tokens:
            indices = [index for index, token in enumerate(tokens) if token == TOO_MANY_CANDIDATES]
            resampled, self.resample, self.host_tokens = self.resample(indices), None, None
            self.tokens[indices], self.probs[indices] = resampled.tokens, resampled.probs
            for mine, theirs in (
                (self.top_tokens, resampled.top_tokens),
                (self.top_probs, resampled.top_probs),
            ):
                if mine is not None and theirs is not None:
                    mine[indices] = theirs
            tokens = self.tokens.tolist()
        return tokens

    @staticmethod
    def error(token: int) -> BadLogits | None:
        """What went wrong if a token of `tolist` is a failure; None if it is a token."""
        return None if token >= 0 else BadLogits(FAILURE_MESSAGES[token])
