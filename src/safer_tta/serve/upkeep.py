"""Streams are created, changed, renewed and deleted."""

import secrets
import time

from .._internal.seeds import generator
from ..errors import DamagedStreamError
from .journal import Journal, Stream
from .lender import refuse_missing
from .limits import Limits, Refused
from .shadow import Models


class Upkeep:
    """What is done with streams besides answering. All of it happens on the engine's thread."""

    def __init__(self, models: Models, journal: Journal, limits: Limits, seed: int | None) -> None:
        self.models, self.journal, self.limits, self.seed = models, journal, limits, seed

    def create(self, owner: str, name: str) -> None:
        if self.journal.exists(f"{owner}/{name}"):
            raise Refused(409, f"a stream {name!r} exists already; choose a new name, or use that stream")
        if self.journal.count(owner) >= (most := self.limits.owner_streams):
            raise Refused(507, f"you have {most} streams already; delete some that are not used", reason="quota")
        needed = self.models.live.state_bytes
        if (used := self.journal.nbytes()) + needed > self.limits.disk_bytes:
            problem = f"there is no room for {needed} bytes: streams take {used} of {self.limits.disk_bytes}"
            raise Refused(507, f"{problem}; delete some that are no longer used")
        seed, now = self._draw_seed(owner, name), time.time()
        stream = Stream(owner, name, now, now, self.models.live.start(seed), seed)
        self.journal.create(stream)
        self.models.live.keep(stream)

    def _draw_seed(self, owner: str, name: str) -> int:
        return secrets.randbits(62) if self.seed is None else generator(self.seed, "stream", owner, name).initial_seed()

    def delete(self, identity: str) -> None:
        if not self.journal.exists(identity):
            raise refuse_missing()
        self.journal.delete(identity)
        self.models.forget(identity)

    def change(self, identity: str, what: str) -> None:
        try:
            stream = self.models.live.stream(identity)
        except DamagedStreamError:
            if what != "reset":
                raise
            return self._renew(identity)
        self.models.live.change(stream, what)
        self.journal.change(stream, what)
        if what == "reset" and self.models.shadow is not None:
            self.models.shadow.forget(identity)
        return None

    def _renew(self, identity: str) -> None:
        """Start a stream anew whose stored state is damaged; its name, its numbers and its answers are kept."""
        owner, _, name = identity.partition("/")
        known = self.journal.salvage(identity)
        known["seed"] = self._draw_seed(owner, name) if known["seed"] is None else known["seed"]
        stream = Stream(owner=owner, name=name, last=time.time(), state=self.models.live.start(known["seed"]), **known)
        self.journal.renew(stream)
        self.models.forget(identity)
        self.models.live.keep(stream)
