"""The ids with a role, under the names that scripts read and assign: where a text begins, ends, is filled."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

from ..errors import TokenizerError
from .codec import Codec


class SpecialTokenIds:
    """Something with a codec, whose ids of BOS, EOS and padding may be assigned; it counts from then on."""

    codec: Codec

    @property
    def bos_token_id(self) -> int | None:
        """The id that `add_bos` puts before a text."""
        return self.codec.bos_id

    @bos_token_id.setter
    def bos_token_id(self, token_id: int | None) -> None:
        self._replace_ids(_checked_token_id("bos_token_id", token_id), self.codec.eos_ids, self.codec.pad_id)

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a text. Assigned, it is the only one that does."""
        return self.codec.eos_id

    @eos_token_id.setter
    def eos_token_id(self, token_id: int | None) -> None:
        self.eos_token_ids = [] if token_id is None else [token_id]

    @property
    def eos_token_ids(self) -> list[int]:
        """Every id that ends a text, the usual one first."""
        return list(self.codec.eos_ids)

    @eos_token_ids.setter
    def eos_token_ids(self, numbers: Sequence[int]) -> None:
        found = [_checked_token_id("eos_token_id", token_id) for token_id in numbers]
        eos_ids = [token_id for token_id in found if token_id is not None]
        self._replace_ids(self.codec.bos_id, eos_ids, self.codec.pad_id)

    @property
    def pad_token_id(self) -> int:
        """The id that fills up the shorter rows of a batch; -1: nothing can."""
        return self.codec.pad_id

    @pad_token_id.setter
    def pad_token_id(self, token_id: int | None) -> None:
        found = _checked_token_id("pad_token_id", token_id)
        self._replace_ids(self.codec.bos_id, self.codec.eos_ids, -1 if found is None else found)

    def _replace_ids(self, bos: int | None, eos: Sequence[int], pad: int) -> None:
        self.codec = self.codec.with_ids(bos, eos, pad)


def _checked_token_id(name: str, token_id: object) -> int | None:
    if token_id is None:
        return None
    try:
        if isinstance(token_id, bool):
            raise TypeError
        return index(token_id)  # type: ignore[arg-type]  # what is no whole number says so
    except TypeError:
        raise TokenizerError(f"{name} must be a token's id, or None; found {token_id!r:.80}.") from None
