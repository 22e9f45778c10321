"""Bearer tokens, each of one owner."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from pathlib import Path

from ..errors import InvalidValueError
from .limits import Refused

ONLY_OWNER = "local"  # of a service without tokens
OWNER = re.compile(r"[A-Za-z0-9._-]{1,64}")
TOKEN = re.compile(r"[\x21-\x7e]{16,}")


class Tokens:
    """The tokens of all owners. Without any, all requests belong to one owner, which only a loopback address allows."""

    def __init__(self, tokens: dict[str, str] | None = None) -> None:
        tokens = tokens or {}
        for owner, token in tokens.items():
            if not OWNER.fullmatch(owner):
                expected = "expected 1 to 64 letters, digits, '.', '_' or '-'"
                raise InvalidValueError(f"owner {owner!r} is not a valid name; {expected}")
            if not isinstance(token, str) or not TOKEN.fullmatch(token):
                problem = f"the token for {owner!r} is too short or contains spaces"
                raise InvalidValueError(f"{problem}; expected at least 16 printable characters")
        if len(set(tokens.values())) < len(tokens):
            raise InvalidValueError("two owners have the same token; expected a different one for each")
        self._hashes = {owner: _hash(token) for owner, token in tokens.items()}

    def __bool__(self) -> bool:
        return bool(self._hashes)

    @classmethod
    def read(cls, path: str | Path) -> Tokens:
        """Read a JSON file {"owner": "token", …}."""
        expected = 'expected JSON {"owner": "token"}'
        try:
            content = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise InvalidValueError(f"{path} cannot be read as tokens ({error}); {expected}") from error
        if not isinstance(content, dict) or not content:
            raise InvalidValueError(f"{path} holds no tokens; {expected}")
        return cls(content)

    def owner(self, header: str | None) -> str:
        """Return the owner of a request. Every token is compared in constant time, so that timing reveals nothing."""
        if not self._hashes:
            return ONLY_OWNER
        kind, _, token = (header or "").partition(" ")
        shown = _hash(token.strip()) if kind.lower() == "bearer" else b""
        found = [owner for owner, known in self._hashes.items() if hmac.compare_digest(known, shown)]
        if not found:
            raise Refused(401, "the token is missing or unknown; expected the header Authorization: Bearer TOKEN")
        return found[0]


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
