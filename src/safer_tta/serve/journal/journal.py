"""What the service writes and reads of its streams.

A batch is one transaction: the new state, the guard's memory and the answer are written together or not at all. The
answer is sent afterwards. So everything that a client has seen is on disk, and a batch on disk is not applied again.
"""

import logging
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ...errors import DamagedStreamError
from ...methods import Snapshot
from . import answers, audit, listing, rows, schema, shadowed, versions
from .copies import copy, examine
from .storage import NAME, Storage
from .streams import Json, Stream, salvage

log = logging.getLogger("safer_tta.serve")


class Answered(NamedTuple):
    """An answered batch that is to be written."""

    stream: Stream
    answer: Json
    key: str | None
    content: str  # a hash of the images
    events: Sequence[str] = ()  # for the audit log


class Journal:
    """The journal of one folder.

    Attributes:
        roles: The versions of what is served, by their roles.
    """

    def __init__(
        self, folder: Path, version: str, shadow: str | None = None, *, files: Mapping[str, str] | None = None
    ) -> None:
        """Open a folder for two versions of what is served, or for one; `files` are the names of their models."""
        self.storage = Storage(folder)
        self._damaged: defaultdict[str, dict[str, str]] = defaultdict(dict)  # by version
        try:
            self._prepare(version, shadow, files or {})
            self._examine()
        except BaseException:
            self.close()
            raise
        self.storage.reserve.hold()

    @property
    def live(self) -> str:
        """The version that answers."""
        return self.roles[versions.LIVE].version

    @property
    def shadow(self) -> str | None:
        """The version that looks on."""
        return self.roles[versions.SHADOW].version if versions.SHADOW in self.roles else None

    @property
    def damaged(self) -> dict[str, str]:
        """Streams whose stored state is not what was written, {id: what was found}."""
        return self._damaged[self.live]

    def _prepare(self, version: str, shadow: str | None, files: Mapping[str, str]) -> None:
        """Make the tables or bring them up to date, and find out which version answers."""
        storage = self.storage
        found = storage.read(schema.read_schema)
        if found:
            schema.check_schema(found, storage.path)
            known = storage.read(versions.read if found == schema.SCHEMA else versions.read_earlier)
            version, shadow = versions.choose(known, storage.folder, version, shadow)
        if 0 < found < schema.SCHEMA:
            before = storage.path.with_name(f"{NAME}.schema-{found}")
            copy(storage.path, before)
            log.warning(
                "%s has schema %d and is migrated to %d; a copy is in %s", storage.path, found, schema.SCHEMA, before
            )
        if found < schema.SCHEMA:
            change = schema.migrate if found else lambda database: schema.create(database, version)
            storage.write(change, freeing=True)
        self._settle(version, shadow, files)

    def _settle(self, live: str, shadow: str | None, files: Mapping[str, str]) -> None:
        known, wanted = self.storage.read(versions.read), versions.plan(live, shadow, files)
        self.roles = versions.keep(known, wanted)
        if self.roles != known:
            self.storage.write(lambda database: versions.settle(database, self.roles), freeing=True)
        gone = {one.version for one in known.values()} - {one.version for one in self.roles.values()}
        for version in gone:
            log.warning("the roll-out of version %s has ended; what it had learnt of the streams was deleted", version)

    def _examine(self) -> None:
        """Look for damage before the first request, and note which streams it concerns."""
        started = time.perf_counter()
        findings = examine(self.storage.path)
        self.damaged.update(findings.damaged)
        if self.shadow is not None:
            self._damaged[self.shadow].update(findings.shadows)
        for problem in findings.problems():
            log.error("%s: %s", self.storage.path, problem)
        seconds = time.perf_counter() - started
        log.info("%s was checked in %.1f s: %d streams", self.storage.path, seconds, findings.streams)

    def close(self) -> None:
        self.storage.close()

    def trouble(self) -> str:
        """Return why the journal cannot be read or written, or nothing."""
        return self.storage.probe()

    # --- streams ------------------------------------------------------------------------------------------------

    def create(self, stream: Stream) -> None:
        def work(database: sqlite3.Connection) -> None:
            rows.create(database, stream, self.live)
            audit.add(database, stream.owner, stream.name, "created")

        self.storage.write(work)

    def load(
        self, identity: str, check: Callable[[Snapshot], None] = lambda snapshot: None, *, version: str | None = None
    ) -> Stream | None:
        """Return a stream with everything that its guard remembers, as it is in a version; by default in the live one.

        Its state is empty if that version has not seen the stream yet.

        Raises:
            DamagedStreamError: If something of it is not what was written, or `check` refuses a state.
        """
        version = version or self.live
        try:
            return self.storage.read(lambda database: rows.load(database, identity, version, check))
        except DamagedStreamError as error:
            self._damaged[version][identity] = str(error)
            of = "state" if version == self.live else "state for the shadow"
            log.error("the stored %s of %s is damaged: %s", of, identity, error)
            raise DamagedStreamError(
                f"the stored state of this stream is damaged: {error}. Reset the stream, or delete it"
            ) from error

    def exists(self, identity: str) -> bool:
        query = "select 1 from streams where id = ?"
        return self.storage.read(lambda database: database.execute(query, [identity]).fetchone()) is not None

    def delete(self, identity: str) -> None:
        """Delete a stream without reading its states, which may be damaged."""
        owner, _, name = identity.partition("/")

        def work(database: sqlite3.Connection) -> None:
            rows.delete(database, identity)
            audit.add(database, owner, name, "deleted")

        self.storage.write(work, freeing=True)
        self._heal(identity)

    def salvage(self, identity: str) -> Json:
        """Return what can still be read of a damaged stream, as fields of a `Stream`; its seed may be None."""
        return self.storage.read(lambda database: salvage(database, identity, self.live))

    def renew(self, stream: Stream) -> None:
        """Write a stream in the place of a damaged one, and note that it was reset."""

        def work(database: sqlite3.Connection) -> rows.Kept:
            audit.add(database, stream.owner, stream.name, "reset")
            return rows.renew(database, stream, self.live)

        stream.kept = self.storage.write(work, freeing=True)
        self._heal(stream.id)

    def _heal(self, identity: str) -> None:
        for damaged in self._damaged.values():
            damaged.pop(identity, None)

    def describe(self, owner: str, name: str | None = None) -> list[Json]:
        """Return an owner's streams, or the one of this name, as the API shows them."""
        found = self.storage.read(lambda database: listing.describe(database, self.live, owner, name))
        for stream in found:
            if stream.pop("unreadable", False):
                self.damaged.setdefault(f"{owner}/{stream['name']}", "its row cannot be read")
        return found

    def nbytes(self) -> int:
        """Return the size of everything; room that deleted streams left in the file counts as free."""

        def work(database: sqlite3.Connection) -> int:
            names = ("page_count", "freelist_count", "page_size")
            pages, free, size = (int(database.execute(f"pragma {name}").fetchone()[0]) for name in names)
            return (pages - free) * size

        return self.storage.read(work)

    def count(self, owner: str) -> int:
        """Return how many streams an owner has."""
        return self.storage.read(lambda database: listing.count(database, owner))

    def nbytes_of(self, owner: str) -> int:
        """Return the size of an owner's answers and states, without those of the shadow. It may take a while."""
        return self.storage.read(lambda database: listing.nbytes_of(database, self.live, owner))

    # --- batches ------------------------------------------------------------------------------------------------

    def commit(self, stream: Stream, answer: Json, key: str | None, content: str, events: Sequence[str] = ()) -> None:
        """Write an answered batch, with everything that it changed."""
        self.commit_many([Answered(stream, answer, key, content, events)])

    def commit_many(self, batches: Iterable[Answered]) -> None:
        """Write answered batches of different streams: all of them or none."""
        batches = list(batches)
        self.storage.largest = max(self.storage.largest, *(batch.stream.nbytes for batch in batches))

        def work(database: sqlite3.Connection) -> list[rows.Kept]:
            kept = []
            for stream, answer, key, content, events in batches:
                kept.append(rows.store(database, stream, self.live))
                answers.add(database, stream.id, stream.batches, answer, key, content)
                for event in events:
                    audit.add(database, stream.owner, stream.name, event)
            return kept

        for batch, kept in zip(batches, self.storage.write(work), strict=True):
            batch.stream.kept = kept

    def change(self, stream: Stream, what: str) -> None:
        """Write a stream that a user has changed, and note it in the audit log."""

        def work(database: sqlite3.Connection) -> rows.Kept:
            audit.add(database, stream.owner, stream.name, what)
            return (rows.reset if what == "reset" else rows.store)(database, stream, self.live)

        stream.kept = self.storage.write(work, freeing=what == "reset")
        if what == "reset":
            self._heal(stream.id)

    def answer(self, identity: str, key: str) -> tuple[Json, str] | None:
        """Return the answer once given to a key, and a hash of its images."""
        return self.storage.read(lambda database: answers.find(database, identity, key))

    def reports(self, identity: str, last: int) -> list[Json]:
        """Return the reports of the last batches, oldest first."""
        return self.storage.read(lambda database: answers.reports(database, identity, last))

    def label(self, identity: str, number: int, labels: list[int]) -> Json | str | None:
        """Score a batch and return its report, what is wrong with the labels, or None if the batch is not kept."""

        def work(database: sqlite3.Connection) -> Json | str | None:
            report = answers.label(database, identity, number, labels)
            if isinstance(report, dict):
                shadowed.label(database, identity, number, labels)
            return report

        return self.storage.write(work)

    def alarms(self, version: str | None = None) -> dict[str, list[Json]]:
        """Return the active alarms of all streams that have some, by the identity of the stream."""
        return self.storage.read(lambda database: listing.alarms(database, version or self.live))

    def audit(self, owner: str, last: int = 100) -> list[Json]:
        """Return an owner's last events, newest first."""
        return self.storage.read(lambda database: audit.read(database, owner, last))

    # --- the roll-out -------------------------------------------------------------------------------------------

    def note_shadow(self, stream: Stream, number: int, labels: list[int], counts: Mapping[str, float]) -> None:
        """Write what the shadow answered to a batch and learnt from it, and add to the comparison."""
        version = self.roles[versions.SHADOW].version

        def work(database: sqlite3.Connection) -> rows.Kept:
            shadowed.add(database, stream.id, number, version, labels)
            versions.count(database, counts)
            return rows.store_beside(database, stream, version)

        stream.kept = self.storage.write(work)

    def count_shadow(self, counts: Mapping[str, float]) -> None:
        """Add to the comparison."""
        self.storage.write(lambda database: versions.count(database, counts))

    def rollout(self) -> Json | None:
        """Return the version that answers, the shadow and how they compare; None if there is no shadow."""
        return self.storage.read(versions.describe)

    def switch(self, owner: str, counts: Mapping[str, float]) -> None:
        """Add to the comparison and exchange the roles: the shadow answers from now on, and the other is the shadow."""

        def work(database: sqlite3.Connection) -> dict[str, versions.Version]:
            versions.count(database, counts)
            roles = versions.switch(database)
            audit.add(database, owner, "", f"switched to model {roles[versions.LIVE].version}")
            return roles

        self.roles = self.storage.write(work)
