"""Check a journal, copy it while the service runs, and put a copy in place."""

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from ..._internal.files import atomic_write
from ...errors import DamagedStreamError, JournalError
from . import schema, versions
from .checksums import check_state, check_stream, damaged_answers
from .storage import ERRORS, NAME, connect, lock_folder

SHOWN = 10  # problems of SQLite that are listed


@dataclass
class Findings:
    """What is wrong with a journal."""

    pages: list[str] = field(default_factory=list)  # in SQLite's words
    streams: int = 0  # how many there are
    damaged: dict[str, str] = field(default_factory=dict)  # {stream: what is not as it was written}
    shadows: dict[str, str] = field(default_factory=dict)  # {stream: the same, of the state that the shadow has of it}
    answers: dict[str, list[int]] = field(default_factory=dict)  # {stream: batches whose stored answer is damaged}

    @property
    def intact(self) -> bool:
        return not (self.pages or self.damaged or self.shadows or self.answers)

    def problems(self) -> Iterator[str]:
        """Yield everything in words."""
        for problem in self.pages:
            yield f"SQLite found: {problem}"
        for stream, problem in self.damaged.items():
            yield f"stream {stream} is damaged: {problem}"
        for stream, problem in self.shadows.items():
            yield f"the shadow's state of stream {stream} is damaged: {problem}"
        for stream, numbers in self.answers.items():
            yield f"stream {stream}: the stored answers to batches {', '.join(map(str, numbers))} are damaged"


def check(folder: Path) -> Findings:
    """Look for damage in the journal of a folder, also while a service uses it."""
    return examine(_journal_of(folder), thorough=True)


def backup(folder: Path, out: Path) -> Findings:
    """Write a copy of a folder's journal to a file, also while a service uses it; return what is wrong with it."""
    source = _journal_of(folder)
    if out.exists() and out.samefile(source):
        raise JournalError(f"{out} is the journal itself; give another file for the backup")
    copy(source, out)
    return examine(out)


def restore(file: Path, folder: Path) -> Findings:
    """Put a backup in place as the journal of a folder that has none; return what is wrong with it."""
    if not file.is_file():
        raise FileNotFoundError(2, "No such file", str(file))
    findings = examine(file, thorough=True)
    if findings.pages:
        problem = f"{file} is damaged, or not a backup ({findings.pages[0]})"
        raise JournalError(f"{problem}. Give another backup; nothing was changed")
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        lock_folder(folder, held)
        if any((folder / f"{NAME}{end}").exists() for end in ("", "-wal")):
            raise JournalError(f"{folder} has a journal already. Move it away, or give another folder")
        copy(file, folder / NAME)
    return findings


def copy(source: Path, target: Path) -> None:
    """Copy a file of SQLite as it is between two transactions, completely or not at all."""
    with atomic_write(target) as file, closing(connect(source, "ro")) as reading:
        try:
            with closing(sqlite3.connect(file.name, isolation_level=None)) as writing:
                reading.backup(writing)
                writing.execute("pragma journal_mode = delete")  # so that the copy is one file
        except ERRORS as error:
            raise JournalError(f"{source} could not be copied to {target} ({error})") from error


def examine(path: Path, *, thorough: bool = False) -> Findings:
    """Check the pages of a journal, and every stream and answer against its hash."""
    findings = Findings()
    try:
        with closing(connect(path, "ro")) as database:
            pragma = "integrity_check" if thorough else "quick_check"  # which leaves out the indices
            found = [row[0] for row in database.execute(f"pragma {pragma}({SHOWN})")]
            findings.pages += [] if found == ["ok"] else found
            database.execute("begin")  # one moment, though a service may go on writing
            _examine_streams(database, path, findings)
    except ERRORS as error:
        findings.pages.append(str(error))
    return findings


def _examine_streams(database: sqlite3.Connection, path: Path, findings: Findings) -> None:
    found = schema.read_schema(database)
    if found == 0:
        raise sqlite3.DatabaseError("it has no tables of a journal")
    schema.check_schema(found, path)
    identities = [row[0] for row in database.execute("select id from streams order by id")]
    findings.streams = len(identities)
    if found < schema.SCHEMA:  # without checksums
        return
    live = versions.read(database)[versions.LIVE].version
    for identity in identities:
        _examine_states(database, identity, live, findings)
        try:
            wrong = list(damaged_answers(database, identity))
        except ERRORS as error:
            findings.damaged.setdefault(identity, f"its answers cannot be read ({error})")
            continue
        if wrong:
            findings.answers[identity] = wrong


def _examine_states(database: sqlite3.Connection, identity: str, live: str, findings: Findings) -> None:
    try:
        known = check_stream(database, identity)
    except DamagedStreamError as error:
        findings.damaged[identity] = str(error)
        return
    for version in known:
        try:
            check_state(database, identity, version)
        except DamagedStreamError as error:
            (findings.damaged if version == live else findings.shadows)[identity] = str(error)


def _journal_of(folder: Path) -> Path:
    path = folder / NAME
    if not path.is_file():
        raise FileNotFoundError(2, "No such file", str(path))
    return path
