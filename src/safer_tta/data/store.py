"""What is made once and kept: named by the hash of what defines it, written whole or not at all, checked when read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
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
        place = self.folder / digest(definition)
        if not (place / "manifest.json").exists():
            self._make(place, dict(definition), count, make, part, progress)
        return self._open(place, dict(definition))

    def _make(
        self,
        place: Path,
        definition: dict[str, Any],
        count: int,
        make: Callable[[int, int], Bytes],
        part: int,
        progress: Progress,
    ) -> None:
        place.mkdir(parents=True, exist_ok=True)
        parts = []
        for first in range(0, count, part):
            path = place / f"part-{first:06d}.npy"
            if not _whole(path):
                made = make(first, min(first + part, count))
                with atomic_write(path) as file:
                    np.save(file, made)
            parts.append(path)
            progress(min(first + part, count), count)
        whole = np.concatenate([np.load(path) for path in parts])
        with atomic_write(place / "array.npy") as file:
            np.save(file, whole)
        write_json(place / "manifest.json", {"definition": definition, "content": digest_arrays(whole)})
        for path in parts:
            path.unlink()

    def _open(self, place: Path, definition: dict[str, Any]) -> Bytes:
        manifest, path = read_json(place / "manifest.json"), place / "array.npy"
        if manifest.get("definition") != json.loads(json.dumps(definition)):
            raise StoreError(
                f"{place / 'manifest.json'} describes something else than what was asked for. Remove {place}"
            )
        try:
            array: Bytes = np.load(path, mmap_mode="r")
            intact = digest_arrays(array) == manifest["content"]
        except (OSError, ValueError) as error:
            raise StoreError(f"{path} is damaged or missing ({error}). Remove {place} to have it made again") from error
        if not intact:
            raise StoreError(f"{path} is not what was written there: its hash differs. Remove {place} to make it again")
        return array


def _whole(path: Path) -> bool:
    """Parts appear under their name only when complete; a damaged one is made again."""
    try:
        np.load(path, mmap_mode="r")
    except (OSError, ValueError):
        return False
    return True
