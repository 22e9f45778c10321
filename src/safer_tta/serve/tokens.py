"""Bearer tokens, each of one owner."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import InvalidValueError
from .limits import Refused

log = logging.getLogger("safer_tta.serve")

CHECKED = 2.0  # seconds after which the file is looked at again
EXPECTED = 'expected JSON {"owner": "token"}, or {"owner": ["new token", "old token"]}'
ONLY_OWNER = "local"  # of a service without tokens
OPERATOR = "operator"  # the owner who may roll out a model, and see the metrics of all owners
METRICS = "metrics"  # the owner who may see the metrics of all owners
OWNER = re.compile(r"[A-Za-z0-9._-]{1,64}")
TOKEN = re.compile(r"[\x21-\x7e]{16,}")


class Tokens:
    """The tokens of all owners. Without any, all requests belong to one owner, which only a loopback address allows.

    An owner may have several, so that a new one can be handed out before the old one ends. Tokens that were read from a
    file are read again when the file changes.
    """

    def __init__(self, tokens: Mapping[str, str | Sequence[str]] | None = None, path: Path | None = None) -> None:
        self._hashes = _hashes(tokens or {})
        self.path, self._seen, self._checked = path, _signature(path), time.monotonic()

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def operates(self, owner: str) -> bool:
        """Return whether an owner may roll out a model, which concerns all owners."""
        return not self or owner == OPERATOR

    @classmethod
    def read(cls, path: str | Path) -> Tokens:
        """Read a JSON file {"owner": "token", "other": ["new token", "old token"], …}."""
        return cls(_read(Path(path)), Path(path))

    def refresh(self) -> None:
        """Read the file again if it has changed. If it is damaged, the tokens stay as they are."""
        self._checked, seen = time.monotonic(), _signature(self.path)
        if self.path is None or seen == self._seen:
            return
        self._seen = seen
        try:
            self._hashes = _hashes(_read(self.path))
        except InvalidValueError as error:
            log.error("the tokens stay as they were: %s", error)
        else:
            log.warning("the tokens were read again from %s: %d owners", self.path, len(set(self._hashes.values())))

    def owner(self, header: str | None) -> str:
        """Return the owner of a request. Every token is compared in constant time, so that timing reveals nothing."""
        if time.monotonic() - self._checked > CHECKED:
            self.refresh()
        if not self._hashes:
            return ONLY_OWNER
        kind, _, token = (header or "").partition(" ")
        shown = _hash(token.strip()) if kind.lower() == "bearer" else b""
        found = [owner for known, owner in self._hashes.items() if hmac.compare_digest(known, shown)]
        if not found:
            raise Refused(401, "the token is missing or unknown; expected the header Authorization: Bearer TOKEN")
        return found[0]


def _read(path: Path) -> dict[str, str | list[str]]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidValueError(f"{path} cannot be read as tokens ({error}); {EXPECTED}") from error
    if not isinstance(content, dict) or not content:
        raise InvalidValueError(f"{path} holds no tokens; {EXPECTED}")
    return content


def _hashes(tokens: Mapping[str, str | Sequence[str]]) -> dict[bytes, str]:
    """Return the owner of every token's hash."""
    owners: dict[bytes, str] = {}
    for owner, given in tokens.items():
        if not OWNER.fullmatch(owner):
            expected = "expected 1 to 64 letters, digits, '.', '_' or '-'"
            raise InvalidValueError(f"owner {owner!r} is not a valid name; {expected}")
        several = [given] if isinstance(given, str) else given
        if not isinstance(several, Sequence) or not several:
            raise InvalidValueError(f"the tokens for {owner!r} are neither a text nor a list of texts; {EXPECTED}")
        for token in several:
            if not isinstance(token, str) or not TOKEN.fullmatch(token):
                problem = f"a token for {owner!r} is too short or contains spaces"
                raise InvalidValueError(f"{problem}; expected at least 16 printable characters")
            if owners.setdefault(_hash(token), owner) != owner:
                raise InvalidValueError("two owners have the same token; expected a different one for each")
    return owners


def _signature(path: Path | None) -> tuple[int, ...] | None:
    """Return what changes with a file; None if there is no file."""
    try:
        found = path.stat() if path is not None else None
    except OSError:
        return None
    return None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
