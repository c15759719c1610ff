"""The ids with a role, under the names that scripts read and assign: where a text begins, ends, is filled."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

from ..errors import TokenizerError
from .codec import Codec


class Roles:
    """Something with a codec, whose ids of BOS, EOS and padding may be assigned; it counts from then on."""

    codec: Codec

    @property
    def bos_token_id(self) -> int | None:
        """The id that `add_bos` puts before a text."""
        return self.codec.bos_id

    @bos_token_id.setter
    def bos_token_id(self, number: int | None) -> None:
        self._assign(_checked("bos_token_id", number), self.codec.eos_ids, self.codec.pad_id)

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a text. Assigned, it is the only one that does."""
        return self.codec.eos_id

    @eos_token_id.setter
    def eos_token_id(self, number: int | None) -> None:
        self.eos_token_ids = [] if number is None else [number]

    @property
    def eos_token_ids(self) -> list[int]:
        """Every id that ends a text, the usual one first."""
        return list(self.codec.eos_ids)

    @eos_token_ids.setter
    def eos_token_ids(self, numbers: Sequence[int]) -> None:
        found = [_checked("eos_token_id", number) for number in numbers]
        ends = [number for number in found if number is not None]
        self._assign(self.codec.bos_id, ends, self.codec.pad_id)

    @property
    def pad_token_id(self) -> int:
        """The id that fills up the shorter rows of a batch; -1: nothing can."""
        return self.codec.pad_id

    @pad_token_id.setter
    def pad_token_id(self, number: int | None) -> None:
        found = _checked("pad_token_id", number)
        self._assign(self.codec.bos_id, self.codec.eos_ids, -1 if found is None else found)

    def _assign(self, bos: int | None, eos: Sequence[int], pad: int) -> None:
        self.codec = self.codec.with_ids(bos, eos, pad)


def _checked(name: str, number: object) -> int | None:
    if number is None:
        return None
    try:
        if isinstance(number, bool):
            raise TypeError
        return index(number)  # type: ignore[arg-type]  # what is no whole number says so
    except TypeError:
        raise TokenizerError(f"{name} must be a token's id, or None; found {number!r:.80}.") from None
