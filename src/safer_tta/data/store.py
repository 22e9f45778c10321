"""Arrays that are made once and kept: named by the hash of their definition, written atomically, checked when read."""

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._internal.files import atomic_write
from .._internal.hashing import hash_bytes
from .._internal.progress import Tick, silent
from ..errors import StoreError

Bytes = NDArray[np.uint8]
Make = Callable[[int, int], Bytes]  # returns the rows from the first up to the last


def digest(definition: Mapping[str, Any]) -> str:
    """Return a short name for anything that can be written as JSON."""
    return hash_bytes([json.dumps(definition, sort_keys=True, separators=(",", ":")).encode()], size=8).hex()


def digest_arrays(*arrays: NDArray[Any]) -> str:
    """Return a hash of the shapes, types and contents of arrays."""
    pairs = ((f"{array.dtype}{array.shape}".encode(), np.ascontiguousarray(array).data) for array in arrays)
    return hash_bytes(part for pair in pairs for part in pair).hex()


def digest_file(path: str | os.PathLike[str]) -> str:
    """Return a hash of a file's content."""
    with open(path, "rb") as file:
        return hash_bytes(iter(lambda: file.read(1 << 20), b"")).hex()


def write_json(path: Path, content: Any) -> None:
    """Write a file as JSON, completely or not at all."""
    with atomic_write(path) as file:
        file.write(json.dumps(content, indent=1, sort_keys=True).encode())


def read_json(path: Path) -> Any:
    """Read a JSON file, or raise a StoreError that names it."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise StoreError(f"{path} is damaged: it is not JSON. Remove it, and it will be made again") from error


def content_of(array: NDArray[Any]) -> str:
    """Return a hash of an array's content; for a memory-mapped file it is computed once per process."""
    if isinstance(array, np.memmap) and array.filename is not None:
        status = os.stat(array.filename)
        return _hash_mapped(str(array.filename), status.st_mtime_ns, status.st_size, array.offset, array.shape)
    return digest_arrays(array)


@functools.lru_cache(maxsize=64)
def _hash_mapped(name: str, changed: int, size: int, offset: int, shape: tuple[int, ...]) -> str:
    return digest_arrays(np.memmap(name, dtype=np.uint8, mode="r", offset=offset, shape=shape))


class ArrayStore:
    """Large uint8 arrays in a folder. Each is made in parts, and a killed process loses only its current part."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def get(
        self, definition: Mapping[str, Any], count: int, make: Make, *, part: int = 64, tick: Tick = silent
    ) -> Bytes:
        """Return an array of `count` rows, memory-mapped; `make(first, last)` makes those that the store lacks.

        The hash of the definition, which is JSON, is the name of the array. `part` rows are made at a time.
        """
        definition = {**definition, "count": count, "part": part}
        place = self.folder / digest(definition)
        if not (place / "manifest.json").exists():
            place.mkdir(parents=True, exist_ok=True)
            with locked(place / "lock"):  # another process may be making the array, or have just finished
                if not (place / "manifest.json").exists():
                    self._make(place, definition, make, tick)
        return self._open(place, definition)

    def _make(self, place: Path, definition: dict[str, Any], make: Make, tick: Tick) -> None:
        for leftover in place.glob(".*.part"):  # from a process that was killed while it wrote
            leftover.unlink()
        count, part = definition["count"], definition["part"]
        parts = []
        for first in range(0, count, part):
            last = min(first + part, count)
            stored = _find_part(place, first, last)
            if stored is None:
                made = make(first, last)
                stored = place / f"part-{first:08d}-{digest_arrays(made)}.npy"
                _save(stored, made)
            parts.append(stored)
            tick(last, count)
        whole = np.concatenate([np.load(path) for path in parts])
        _save(place / "array.npy", whole)
        write_json(place / "manifest.json", {"definition": definition, "content": digest_arrays(whole)})
        for path in parts:
            path.unlink()

    def _open(self, place: Path, definition: dict[str, Any]) -> Bytes:
        manifest, path = read_json(place / "manifest.json"), place / "array.npy"
        if not isinstance(manifest, dict) or manifest.get("definition") != json.loads(json.dumps(definition)):
            raise StoreError(f"{place / 'manifest.json'} describes something else than was asked for. Remove {place}")
        try:
            array: Bytes = np.load(path, mmap_mode="r")
            intact = content_of(array) == manifest.get("content") and len(array) == definition["count"]
        except (OSError, ValueError) as error:
            problem = f"{path} is damaged or missing ({error})"
            raise StoreError(f"{problem}. Remove {place}; it will be made again") from error
        if not intact:
            raise StoreError(f"{path} is damaged: its hash differs. Remove {place}; it will be made again")
        return array


def _find_part(place: Path, first: int, last: int) -> Path | None:
    """Return the path of a part that an earlier process finished; its name holds the hash of its content."""
    for path in place.glob(f"part-{first:08d}-*.npy"):
        try:
            part = np.load(path)
        except (OSError, ValueError):
            continue
        if len(part) == last - first and path.stem.endswith(digest_arrays(part)):
            return path
    return None


def _save(path: Path, array: Bytes) -> None:
    """Save an array through Python's own writes, which always report a full disk, unlike numpy's fast path."""
    with atomic_write(path) as file:
        writer: Any = SimpleNamespace(write=file.write)
        np.lib.format.write_array(writer, np.ascontiguousarray(array), allow_pickle=False)


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Inside, no other process is in a block locked by this file or folder.

    The lock ends with the process that holds it. Without `wait` it raises BlockingIOError if another process is.
    """
    try:
        import fcntl
    except ImportError:  # Windows, where nothing is locked
        yield
        return
    opened = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(opened)
