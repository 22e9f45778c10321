"""A file whose room is given back when the disk is full: SQLite needs some even to delete."""

import contextlib
import os
import shutil
from pathlib import Path

LARGEST = 8 * 2**20  # bytes: more than what waits in the write-ahead log, and many deletions
LEAST = 2**16
SHARE = 4  # of the free room, at most one part of so many


class Reserve:
    """Room on the disk of a folder that can be given back once."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "reserve"

    def hold(self) -> None:
        """Take the room, if there is plenty and it is not taken yet."""
        if self.path.exists():
            return
        with contextlib.suppress(OSError):
            size = min(LARGEST, shutil.disk_usage(self.path.parent).free // SHARE)
            if size < LEAST:
                return
            try:
                with self.path.open("xb") as file:
                    _allocate(file.fileno(), size)
            except OSError:
                self.path.unlink()

    def drop(self) -> bool:
        """Give the room back, and return whether there was any."""
        try:
            self.path.unlink()
        except OSError:
            return False
        return True


def _allocate(opened: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(opened, 0, size)
    else:
        os.write(opened, bytes(size))
