"""Who is asking: API and admin keys, compared in constant time, and each key's own salt for the prompt cache.

What a caller may do is said here; that every route asks is `guard`'s business.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Caller:
    """Somebody who may ask. Those with different salts never share what the prompt cache holds."""

    admin: bool = False
    salt: str = ""


class ApiKeys:
    """The keys there are; without any, everybody may ask, and nobody is an admin."""

    def __init__(self, keys: Iterable[str] = (), admin_keys: Iterable[str] = ()) -> None:
        """Salts are made of the keys and of a secret that dies with this object."""
        secret = secrets.token_bytes(32)
        self._callers: list[tuple[bytes, Caller]] = []
        for listed, admin in ((keys, False), (admin_keys, True)):
            for key in listed:
                salt = hashlib.blake2b(key.encode(), key=secret, digest_size=16).hexdigest()
                self._callers.append((key.encode(), Caller(admin, salt)))

    def __len__(self) -> int:
        """How many keys there are."""
        return len(self._callers)

    def authenticate(self, headers: Mapping[bytes, bytes]) -> Caller | None:
        """Who a request is from, by its headers; None for somebody without a key that counts."""
        if not self._callers:
            return Caller()
        shown = _presented_key(headers)
        found = None
        for key, caller in self._callers:  # all of them, so that time tells nothing
            if hmac.compare_digest(key, shown):
                found = caller
        return found


def _presented_key(headers: Mapping[bytes, bytes]) -> bytes:
    """The key that a request shows: a bearer token, a browser's password, or X-API-Key."""
    kind, _, value = headers.get(b"authorization", b"").partition(b" ")
    if kind.lower() == b"bearer":
        return value.strip()
    if kind.lower() == b"basic":
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return headers.get(b"x-api-key", b"")
