"""API keys."""

import hashlib
import hmac
from collections.abc import Iterable

from fastapi import Request

from adaflash.server.context import context_of
from adaflash.server.errors import UnauthorizedError


def require_key(request: Request) -> None:
    """Raise UnauthorizedError unless the request carries one of the keys, or none is needed."""
    keys = context_of(request).options.api_keys
    if not keys:
        return
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not _is_one_of(given.strip(), keys):
        raise UnauthorizedError(
            "a valid API key is needed: send the header Authorization: Bearer KEY"
        )


def _is_one_of(given: str, keys: Iterable[str]) -> bool:
    # Digests have one length and are compared in constant time: timing tells nothing of a key.
    digest = hashlib.sha256(given.encode()).digest()
    matches = [hmac.compare_digest(digest, hashlib.sha256(k.encode()).digest()) for k in keys]
    return any(matches)
