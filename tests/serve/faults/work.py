"""Runs under faults.c: does the same work again and again in children, each time with another call that fails.

What a child was told is compared with what is on disk afterwards.
Arguments: the folder, what to do, and in how many ways every call fails.
"""

import contextlib
import ctypes
import errno
import functools
import json
import os
import shutil
import sqlite3
import sys
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch

from safer_tta._internal.files import atomic_write
from safer_tta.errors import SaferError
from safer_tta.serve.journal import Answered, Journal, Stream, backup, check
from tests.serve import earlier

ONCE, ALWAYS, DIE, TEAR = 1, 2, 3, 4
FAULTS = [(ONCE, errno.ENOSPC), (ONCE, errno.EIO), (ALWAYS, errno.ENOSPC), (DIE, 0), (TEAR, errno.EIO)]
NAMES = ("a", "b")
BATCHES = 3
library = ctypes.CDLL(None)


# --- batches --------------------------------------------------------------------------------------------------------


def tensors(number: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((1500,), float(number))}


def advance(stream: Stream) -> Answered:
    """Change a stream as a batch does, so that its number says what all of it must be."""
    stream.batches += 1
    number = stream.batches
    stream.state, stream.memory.recent = tensors(number), deque([torch.full((2, 3), float(number))])
    stream.memory.healthy = [*stream.memory.healthy, (number, tensors(number))][-2:]
    return Answered(stream, {"labels": [number], "report": {"number": number}}, f"k{number}", "c")


def work_batches(folder: Path, say: Callable[[str], None]) -> None:
    """Apply batches; what fails is tried once more, with what is on disk, as the service does."""
    for _ in range(2):  # the second time after a recovery, which may fail too
        with contextlib.suppress(SaferError, OSError):
            apply(Journal(folder, "v"), say)


def apply(journal: Journal, say: Callable[[str], None]) -> None:
    try:
        for name in NAMES:
            if not journal.exists(f"o/{name}"):
                stream = Stream("o", name, 1.0, 2.0, tensors(0), 7)
                twice(functools.partial(journal.create, stream), f"create {name}", say)
        for _ in range(BATCHES):
            twice(lambda: journal.commit_many([advance(load(journal, name)) for name in NAMES]), "both", say)
        twice(lambda: journal.commit(*advance(load(journal, "a"))), "a", say)
        twice(lambda: journal.delete("o/c"), "nothing", say)
    finally:
        journal.close()


def load(journal: Journal, name: str) -> Stream:
    stream = journal.load(f"o/{name}")
    if stream is None:
        raise SaferError("it was never created")
    return stream


def twice(work: Callable[[], object], what: str, say: Callable[[str], None]) -> None:
    for _ in range(2):
        say(f"try {what}")
        try:
            work()
        except SaferError:
            continue
        say(f"did {what}")
        return


def check_batches(folder: Path, said: list[str]) -> None:
    """Everything that was acknowledged is there, and what is there is whole."""
    journal = Journal(folder, "v")
    for name in NAMES:
        told, tried = (said.count(f"{word} both") + said.count(f"{word} {name}") for word in ("did", "try"))
        stream = journal.load(f"o/{name}")
        if stream is None:
            assert f"did create {name}" not in said, "a stream is lost"
            continue
        number = stream.batches
        assert told <= number <= tried, f"{name} has {number} batches; {told} were acknowledged and {tried} tried"
        assert torch.equal(stream.state["x"], tensors(number)["x"]), "a state is of another batch"
        kept = [(when, float(snapshot["x"][0])) for when, snapshot in stream.memory.healthy]
        assert kept == [(n, float(n)) for n in range(max(1, number - 1), number + 1)], "snapshots"
        assert [report["number"] for report in journal.reports(f"o/{name}", 256)] == [*range(1, number + 1)], "answers"
        assert all(journal.answer(f"o/{name}", f"k{n}") is not None for n in range(1, number + 1)), "keys"
    journal.close()
    assert check(folder).intact, str(check(folder))


# --- a roll-out -----------------------------------------------------------------------------------------------------

VERSIONS = ("v", "w")


def work_rollout(folder: Path, say: Callable[[str], None]) -> None:
    for _ in range(2):  # the second time with what is on disk, which decides the roles
        with contextlib.suppress(SaferError, OSError):
            roll_out(Journal(folder, *VERSIONS), say)


def roll_out(journal: Journal, say: Callable[[str], None]) -> None:
    try:
        if not journal.exists("o/a"):
            stream = Stream("o", "a", 1.0, 2.0, tensors(0), 7)
            twice(functools.partial(journal.create, stream), "create", say)
        for _ in range(BATCHES):
            twice(functools.partial(answer, journal), "batch", say)
            with contextlib.suppress(SaferError):
                follow(journal)
            twice(lambda: journal.switch("o", {"missed": 1}), "switch", say)
    finally:
        journal.close()


def answer(journal: Journal) -> None:
    answered = advance(load(journal, "a"))
    answered.answer["model"] = journal.live
    journal.commit(*answered)


def follow(journal: Journal) -> None:
    """Do the last batch again as the shadow."""
    seen = journal.load("o/a", version=journal.shadow)
    if seen is not None:
        seen.state = tensors(seen.batches)
        seen.memory.healthy = [(seen.batches, tensors(seen.batches))]
        journal.note_shadow(seen, seen.batches, [seen.batches], {"batches": 1})
        journal.label("o/a", seen.batches, [seen.batches])


def check_rollout(folder: Path, said: list[str]) -> None:
    """One model is live, the one that all switches so far lead to, and every batch is there once."""
    journal = Journal(folder, *VERSIONS)
    switched = len([event for event in journal.audit("o", 1000) if event["what"].startswith("switched")])
    assert said.count("did switch") <= switched <= said.count("try switch"), "a switch is lost or doubled"
    assert journal.live == VERSIONS[switched % 2], "the live model is not the one that was switched to"
    assert journal.shadow == VERSIONS[1 - switched % 2], "the shadow is not the other one"
    counts = journal.rollout()["counts"]
    assert counts["missed"] == switched, "counts are lost or doubled"
    assert counts["labelled"] == counts["live_right"] == counts["shadow_right"] <= counts["batches"], "labels"
    stream = journal.load("o/a")
    if stream is None:
        assert "did create" not in said, "a stream is lost"
    else:
        number = stream.batches
        assert said.count("did batch") <= number <= said.count("try batch"), "a batch is lost or doubled"
        assert [report["number"] for report in journal.reports("o/a", 256)] == [*range(1, number + 1)], "answers"
        assert counts["batches"] <= number, "the shadow has seen more batches than there are"
    journal.close()
    assert check(folder).intact, str(check(folder))


# --- files and backups ----------------------------------------------------------------------------------------------


def work_files(folder: Path, say: Callable[[str], None]) -> None:
    for number in range(3):
        try:
            with atomic_write(folder / "file") as file:
                for part in range(3):
                    file.write(bytes([number]) * 20_000 + bytes([part]))
        except OSError:
            say(f"failed {number}")
        else:
            say(f"did {number}")


def check_files(folder: Path, said: list[str]) -> None:
    told = [int(line.split()[1]) for line in said if line.startswith("did")]
    if not (folder / "file").exists():
        assert not told, "a file is lost"
        return
    content = (folder / "file").read_bytes()
    assert content == b"".join(content[:1] * 20_000 + bytes([part]) for part in range(3)), "a file is not whole"
    assert content[0] >= max(told, default=0), "a file is old"
    if len(said) == 3:  # the process was not killed; if it could not remove what it began, that is left
        assert len(list(folder.iterdir())) <= 2


def work_backup(folder: Path, say: Callable[[str], None]) -> None:
    try:
        backup(folder / "served", folder / "backup")
    except (SaferError, OSError):
        say("failed")
    else:
        say("did")


def prepare_backup(folder: Path) -> None:
    journal = Journal(folder / "served", "v")
    for name in NAMES:
        journal.create(Stream("o", name, 1.0, 2.0, tensors(0), 7))
    journal.close()


def check_backup(folder: Path, said: list[str]) -> None:
    assert check(folder / "served").intact
    if not (folder / "backup").exists():
        assert said != ["did"], "a backup is lost"
        return
    journal_folder = folder / "again"
    journal_folder.mkdir()
    shutil.copy(folder / "backup", journal_folder / "streams.sqlite")
    found = check(journal_folder)
    assert (found.intact, found.streams) == (True, 2), "a backup is not whole"


# --- a journal of the first version ---------------------------------------------------------------------------------


def prepare_migration(folder: Path) -> None:
    earlier.write_first(folder / "served")


def work_migration(folder: Path, say: Callable[[str], None]) -> None:
    with contextlib.suppress(SaferError, OSError):
        Journal(folder / "served", "v").close()
        say("did")


def check_migration(folder: Path, said: list[str]) -> None:
    """However often it failed, the next start migrates the journal, and every stream is there."""
    journal = Journal(folder / "served", "v")
    assert torch.equal(journal.load("anna/a").state["x"], earlier.STATE["x"])
    journal.close()
    assert check(folder / "served").intact
    with contextlib.closing(sqlite3.connect(folder / "served" / "streams.sqlite.schema-1")) as before:
        assert before.execute("select count(*) from streams").fetchone() == (len(NAMES),)


WORKS = {
    "migration": (prepare_migration, work_migration, check_migration),
    "batches": (lambda folder: None, work_batches, check_batches),
    "rollout": (lambda folder: None, work_rollout, check_rollout),
    "files": (lambda folder: None, work_files, check_files),
    "backup": (prepare_backup, work_backup, check_backup),
}


# --- one child for every call ---------------------------------------------------------------------------------------


def run(
    folder: Path, work: Callable[[Path, Callable[[str], None]], None], fault: tuple[int, int], n: int
) -> tuple[list[str], int]:
    """Do the work in a child in which the n-th call fails; return what it said, and how many calls it made."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            library.fault_arm(str(folder).encode(), *fault, ctypes.c_long(n))
            work(folder, lambda line: os.write(writing, f"{line}\n".encode()))
            os.write(writing, f"calls {library.fault_seen()}\n".encode())
        except BaseException:
            os.write(writing, ("error " + " | ".join(traceback.format_exc().splitlines()[-6:]) + "\n").encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as lines:
        said = lines.read().splitlines()
    os.waitpid(child, 0)
    calls = [int(line.split()[1]) for line in said if line.startswith("calls")]
    errors = [line for line in said if line.startswith("error")]
    assert not errors, errors
    return [line for line in said if not line.startswith("calls")], calls[0] if calls else -1


def main(top: Path, name: str, faults: int) -> None:
    """Fail every call once, with the given number of the ways in which it may fail, in turn."""
    prepare, work, look = WORKS[name]
    (top / "whole").mkdir()
    prepare(top / "whole")
    said, calls = run(top / "whole", work, (ONCE, errno.EIO), sys.maxsize)
    look(top / "whole", said)
    whole, tried, acknowledged, problems = len(said), 0, 0, []
    for n in range(1, calls + 1):
        for number in range(faults):
            fault, folder = FAULTS[(n + number) % len(FAULTS)], top / f"{n}-{number}"
            folder.mkdir()
            try:
                prepare(folder)
                said, _ = run(folder, work, fault, n)
                look(folder, said)
                acknowledged += sum(line.startswith("did") for line in said)
            except Exception as error:
                problems.append(f"{fault} {n}: {type(error).__name__}: {error}")
            shutil.rmtree(folder)
            tried += 1
    found = {"calls": calls, "said": whole, "tried": tried, "acknowledged": acknowledged, "problems": problems[:10]}
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
