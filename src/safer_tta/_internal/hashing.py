"""The hash behind names, seeds and checks of content. Stored data depends on it, so it must not change."""

import hashlib
from collections.abc import Iterable


def hash_bytes(parts: Iterable[bytes | memoryview], size: int = 16) -> bytes:
    """Return `size` bytes of the BLAKE2b hash of all parts together."""
    state = hashlib.blake2b(digest_size=size)
    for part in parts:
        state.update(part)
    return state.digest()
