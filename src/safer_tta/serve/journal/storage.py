"""One SQLite file in a folder, with one writer and any number of readers; what fails there is said in words."""

import errno
import logging
import sqlite3
import threading
import time
import urllib.parse
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

from ...data.store import locked
from ...errors import JournalError, StorageError
from .reserve import Reserve

log = logging.getLogger("safer_tta.serve")
T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

NAME = "streams.sqlite"
PROBE = 2.0  # seconds between two tries whether anything can be written
QUIET = 10.0  # seconds between two lines in the log about a lasting trouble
PAGES = 256  # in the write-ahead log, after which they go to the file; few, as they take room twice
LARGEST_PROBE = 64 * 2**20
# Results of SQLite after which the file may be whole, but nothing can be written or read at present.
TROUBLES = {
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_IOERR: "the disk fails or is full",
    sqlite3.SQLITE_READONLY: "it is read-only, or was moved",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened",
    sqlite3.SQLITE_PERM: "it may not be written",
    sqlite3.SQLITE_BUSY: "another program keeps it locked",
}
ERRORS = (sqlite3.Error, UnicodeDecodeError)  # the latter if a message has a damaged name in it
UNSUPPORTED = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOTSUP, errno.EISDIR}  # a lock on a folder, over NFS


class Connection(sqlite3.Connection):
    """A connection that can be referred to weakly: it closes when its thread ends."""


class _Local(threading.local):
    connection: Connection | None = None
    place: tuple[int, ...] = ()  # what the files were when the connection was opened


class Storage:
    """The file, its lock and its reserve. Every thread has a connection of its own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path, self.reserve = folder, folder / NAME, Reserve(folder)
        self.unwritable = ""  # why the last attempt to write failed
        self.largest = 0  # bytes of the largest state that was to be written
        self._probing, self._probed, self._found = threading.Lock(), -PROBE, ""
        self._said, self._new = -QUIET, True
        self._local, self._connections = _Local(), weakref.WeakSet[Connection]()
        self._lock = ExitStack()
        try:
            lock_folder(folder, self._lock)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for connection in list(self._connections):  # the last one moves the log into the file, where there is room
            with suppress(sqlite3.Error):
                connection.close()
        self._local.connection = None
        self._lock.close()

    def read(self, work: Work[T]) -> T:
        """Return what this work reads, all of it as it is at one moment."""
        try:
            database = self._connect()
            database.execute("begin")
            try:
                return work(database)
            finally:
                if database.in_transaction:
                    database.execute("rollback")
        except ERRORS as error:
            raise self._explain(error) from error

    def write(self, work: Work[T], *, freeing: bool = False) -> T:
        """Do this work in one transaction. Work that frees room may use the reserve if the disk is full."""
        try:
            done = self._write(work)
        except StorageError:
            if not freeing or not self.reserve.drop():
                raise
            done = self._write(work)
            self._shrink()
        if freeing:
            self.reserve.hold()
        return done

    def probe(self) -> str:
        """Return why nothing can be read or written, or nothing. It is tried at most every two seconds."""
        with self._probing:
            if time.monotonic() - self._probed >= PROBE:
                self._found = self._try()
                self._probed = time.monotonic()
            return self._found or self.unwritable

    # --- one try ------------------------------------------------------------------------------------------------

    def _connect(self) -> Connection:
        return self._local.connection or self._open()

    def _open(self) -> Connection:
        connection = connect(self.path, "rwc" if self._new else "rw")  # never one in the place of one that was deleted
        try:
            connection.execute("pragma journal_mode = wal")
            connection.execute("pragma synchronous = full")  # an answer also outlives a power cut
            connection.execute(f"pragma wal_autocheckpoint = {PAGES}")
            connection.execute("pragma secure_delete = fast")  # to overwrite what is deleted takes room
            connection.execute("select count(*) from sqlite_master").fetchone()  # which opens the log
            self._local.place = self._place()
        except BaseException:
            connection.close()
            raise
        self._local.connection, self._new = connection, False
        self._connections.add(connection)
        return connection

    def _write(self, work: Work[T]) -> T:
        try:
            database = self._connect()
            self._check_place()
            database.execute("begin immediate")
            try:
                done = work(database)
                database.execute("commit")
            except BaseException:
                if database.in_transaction:  # SQLite has often ended it already
                    database.execute("rollback")
                raise
        except ERRORS as error:
            raise self._explain(error, writing=True) from error
        except StorageError as error:
            self._note(error)
            raise
        self.unwritable = ""
        return done

    def _try(self) -> str:
        try:
            self.read(lambda database: database.execute("select id from streams limit 1").fetchone())
            self.read(lambda database: database.execute("select name from streams limit 1").fetchone())
            if not self.unwritable:
                self._write_probe(0)
                return ""
            self._shrink()
            self._write_probe(max(2**16, min(self.largest, LARGEST_PROBE)))  # as much as a batch, and not only a byte
            self._write_probe(0)
            self.reserve.hold()
        except JournalError as error:
            return str(error)
        return ""

    def _write_probe(self, size: int) -> None:
        query = "insert or replace into meta values ('probe', zeroblob(?))"
        self._write(lambda database: database.execute(query, [size]))

    def _shrink(self) -> None:
        """Move the write-ahead log into the file, and give its room back."""
        with suppress(sqlite3.Error):  # there is no room for the log in the file, or somebody reads
            self._connect().execute("pragma wal_checkpoint(truncate)").fetchone()

    def _place(self) -> tuple[int, ...]:
        """Return which files have the names now; nothing if one is gone."""
        try:
            found = [path.stat() for path in (self.path, self.path.with_name(f"{NAME}-wal"))]
        except OSError:
            return ()
        return tuple(number for status in found for number in (status.st_dev, status.st_ino))

    def _check_place(self) -> None:
        """Refuse to write to a file that was deleted: the system would keep it only until the service stops."""
        place = self._place()
        if not place or place != self._local.place:
            raise StorageError(
                "the folder of the service was deleted, moved or replaced while it runs. Stop the service, and "
                "restore a backup"
            )

    def _explain(self, error: Exception, *, writing: bool = False) -> Exception:
        """Return the error in our words, without paths, as clients read them; programming errors stay as they are."""
        code = getattr(error, "sqlite_errorcode", None)
        trouble = TROUBLES.get((code or 0) & 0xFF)
        if trouble is not None:
            found: JournalError = StorageError(f"{NAME}: {trouble} ({error}). Nothing was changed")
            if writing:
                self._note(found)
            return found
        if isinstance(error, (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.InterfaceError)):
            return error
        return JournalError(
            f"{NAME} is damaged, or not a journal of this service ({error}). Run safer serve check, and restore "
            "a backup"
        )

    def _note(self, trouble: Exception) -> None:
        """Remember that writing fails, and say so in the log, but not with every batch."""
        self.unwritable = str(trouble)
        if time.monotonic() - self._said >= QUIET:
            self._said = time.monotonic()
            log.error("%s: %s", self.folder, trouble)


def connect(path: Path, mode: str) -> Connection:
    """Open a file of SQLite: "ro", "rw", or "rwc", which makes it."""
    address = f"file:{urllib.parse.quote(str(path.absolute()))}?mode={mode}"
    connection = sqlite3.connect(  # other threads only close it
        address, timeout=30, isolation_level=None, uri=True, check_same_thread=False, factory=Connection
    )
    connection.text_factory = lambda text: text.decode(errors="replace")  # checksums say whether it is damaged
    return connection


def lock_folder(folder: Path, until: ExitStack) -> None:
    """Keep other services off a folder. The lock is on the folder itself, so no file can be deleted to break it."""
    try:
        try:
            until.enter_context(locked(folder, wait=False))
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
        until.enter_context(locked(folder / "lock", wait=False))  # earlier versions know only this file
    except BlockingIOError:
        raise JournalError(f"{folder} is in use by another service; stop it, or give another folder") from None
