"""What all objects of a request have in common: unknown fields are refused, and so are too long lists.

Validation holds up every other thread of the process, and an error takes a kilobyte: both must be bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

MAX_UNKNOWN_FIELDS = 20
"""How many unknown fields of an object are named; the others need no errors of their own."""


@dataclass(frozen=True)
class MaxItems:
    """The bound of a list or an object: its items are counted before any of them is looked at.

    A list is validated up to the first item that is wrong.
    """

    items: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The bound, before the validation of the items."""
        inner: Any = handler(source)
        inner["max_length"] = self.items
        if inner["type"] == "list":
            inner["fail_fast"] = True
        return core_schema.no_info_before_validator_function(self._check_count, inner)

    def _check_count(self, given: Any) -> Any:
        if isinstance(given, list | dict) and len(given) > self.items:
            raise PydanticCustomError(
                "too_long",
                "At most {most} items are taken, found {found}",
                {"most": self.items, "found": len(given)},
            )
        return given


class StrictModel(BaseModel):
    """Refuses what it does not know; null is as if it were left out, as clients mean it."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())

    IGNORED_NULLS: ClassVar[frozenset[str]] = frozenset()
    """What other objects of this kind have: clients with one class for all of them send null there."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        fields, unknown, kept = _field_names(cls), 0, {}
        for name, value in given.items():
            if value is None and (name in fields or name in cls.IGNORED_NULLS):
                continue
            if name not in fields:
                unknown += 1
                if unknown > MAX_UNKNOWN_FIELDS:
                    continue
            kept[name] = value
        return kept


@cache
def _field_names(kind: type[BaseModel]) -> frozenset[str]:
    """The fields of an object, as requests spell them."""
    return frozenset(field.alias or name for name, field in kind.model_fields.items())
