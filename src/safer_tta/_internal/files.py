"""Files that are complete or absent: written under another name, flushed to the disk and then renamed."""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

FilePath = str | os.PathLike[str]
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # the system reports these without the name of the file


@contextlib.contextmanager
def atomic_write(path: FilePath) -> Iterator[IO[bytes]]:
    """Open a temporary file beside `path`, which is renamed to `path` if the block succeeds.

    Raises:
        OSError: If the file cannot be written; the error names it, also if there is no room for it.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; expected the name of a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} is not a folder; create it before writing {path.name} there")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        with temporary.open("xb") as file:  # with the user's own permissions; mkstemp would hide it from others
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno in NO_ROOM and error.filename is None:
            error.filename = str(path)
        raise
