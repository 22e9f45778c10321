"""Who may ask: bearer tokens, each of an owner."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from pathlib import Path

from .limits import Refused

NOBODY_ASKED = "local"  # the owner of everything where no tokens are
OWNER = re.compile(r"[A-Za-z0-9._-]{1,64}")
TOKEN = re.compile(r"[\x21-\x7e]{16,}")


class Tokens:
    """The owners and what they must show. Without any, everybody is one owner; only a loopback address may do that."""

    def __init__(self, tokens: dict[str, str] | None = None) -> None:
        for owner, token in (tokens or {}).items():
            if not OWNER.fullmatch(owner):
                raise ValueError(f"owner {owner!r} is no name; expected 1 to 64 letters, digits, '.', '_' or '-'")
            if not isinstance(token, str) or not TOKEN.fullmatch(token):
                raise ValueError(f"the token of {owner!r} is none; expected 16 or more printable characters, no spaces")
        if len(set((tokens or {}).values())) < len(tokens or {}):
            raise ValueError("two owners have the same token; expected one for each")
        self._hashes = {owner: _hash(token) for owner, token in (tokens or {}).items()}

    def __bool__(self) -> bool:
        return bool(self._hashes)

    @classmethod
    def read(cls, path: str | Path) -> Tokens:
        """From a JSON file {"owner": "token", …}."""
        try:
            content = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(
                f'{path} cannot be read as tokens ({error}); expected JSON {{"owner": "token"}}'
            ) from error
        if not isinstance(content, dict) or not content:
            raise ValueError(f'{path} holds no tokens; expected JSON {{"owner": "token"}}')
        return cls(content)

    def owner(self, header: str | None) -> str:
        """Whose request it is. Every token is compared, each in constant time: how long it takes tells nothing."""
        if not self._hashes:
            return NOBODY_ASKED
        kind, _, token = (header or "").partition(" ")
        shown = _hash(token.strip()) if kind.lower() == "bearer" else b""
        found = [owner for owner, known in self._hashes.items() if hmac.compare_digest(known, shown)]
        if not found:
            raise Refused(401, "no known token; expected the header Authorization: Bearer TOKEN")
        return found[0]


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
