"""What is made once and kept: named by the hash of what defines it, written whole or not at all, checked when read."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..tensorfile import atomic_write

Bytes = NDArray[np.uint8]
Progress = Callable[[int, int], None]


class StoreError(ValueError):
    """A stored file that is damaged, incomplete or belongs to something else."""


def digest(definition: Mapping[str, Any]) -> str:
    """A short name for anything that can be written as JSON."""
    text = json.dumps(definition, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def digest_arrays(*arrays: NDArray[Any]) -> str:
    """A hash of contents."""
    state = hashlib.blake2b(digest_size=16)
    for array in arrays:
        state.update(f"{array.dtype}{array.shape}".encode())
        state.update(np.ascontiguousarray(array).data)
    return state.hexdigest()


def digest_file(path: str | os.PathLike[str]) -> str:
    """A hash of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def write_json(path: Path, content: Any) -> None:
    with atomic_write(path) as file:
        file.write(json.dumps(content, indent=1, sort_keys=True).encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise StoreError(f"{path} is damaged: it is not JSON. Remove it to have it made again") from error


def content_of(array: NDArray[Any]) -> str:
    """A hash of an array's content; of a memory-mapped file it is computed once per process."""
    if isinstance(array, np.memmap) and array.filename is not None:
        status = os.stat(array.filename)
        return _mapped_content(str(array.filename), status.st_mtime_ns, status.st_size, array.offset, array.shape)
    return digest_arrays(array)


@functools.lru_cache(maxsize=64)
def _mapped_content(name: str, changed: int, size: int, offset: int, shape: tuple[int, ...]) -> str:
    return digest_arrays(np.memmap(name, dtype=np.uint8, mode="r", offset=offset, shape=shape))


class ArrayStore:
    """Large uint8 arrays in a folder, each made in parts: a kill loses the part at hand and nothing else."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def get(
        self,
        definition: Mapping[str, Any],
        count: int,
        make: Callable[[int, int], Bytes],
        *,
        part: int = 64,
        progress: Progress = lambda done, total: None,
    ) -> Bytes:
        """The array that `definition` names, memory-mapped. If it is not there, `make(first, last)` its parts."""
        definition = {**definition, "count": count, "part": part}
        place = self.folder / digest(definition)
        if not (place / "manifest.json").exists():
            place.mkdir(parents=True, exist_ok=True)
            with locked(place / "lock"):  # another process may be at it, or have just finished
                if not (place / "manifest.json").exists():
                    self._make(place, definition, count, make, part, progress)
        return self._open(place, definition)

    def _make(
        self,
        place: Path,
        definition: dict[str, Any],
        count: int,
        make: Callable[[int, int], Bytes],
        part: int,
        progress: Progress,
    ) -> None:
        for leftover in place.glob(".*.part"):  # of a process that was killed while it wrote
            leftover.unlink()
        parts = []
        for first in range(0, count, part):
            last = min(first + part, count)
            stored = _stored_part(place, first, last)
            if stored is None:
                made = make(first, last)
                stored = place / f"part-{first:08d}-{digest_arrays(made)}.npy"
                _save(stored, made)
            parts.append(stored)
            progress(last, count)
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
            raise StoreError(f"{path} is damaged or missing ({error}). Remove {place} to have it made again") from error
        if not intact:
            raise StoreError(f"{path} is not what was written there: its hash differs. Remove {place} to make it again")
        return array


def _stored_part(place: Path, first: int, last: int) -> Path | None:
    """A part that an earlier process finished: its name says what it must hold."""
    for path in place.glob(f"part-{first:08d}-*.npy"):
        try:
            part = np.load(path)
        except (OSError, ValueError):
            continue
        if len(part) == last - first and path.stem.endswith(digest_arrays(part)):
            return path
    return None


def _save(path: Path, array: Bytes) -> None:
    """As np.save, but through Python's own writes, which report a full disk; numpy's fast path does not always."""
    with atomic_write(path) as file:
        np.lib.format.write_array(_Writer(file), np.ascontiguousarray(array), allow_pickle=False)


class _Writer:
    def __init__(self, file: Any) -> None:
        self.write = file.write


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process that held it."""
    with open(path, "a") as file:
        try:
            import fcntl
        except ImportError:  # Windows: two processes on one store are on their own there
            yield
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
