"""Look through a folder of images: count them, compare with official numbers, and name every file that is no use."""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .._internal.progress import Tick, silent
from ..errors import DataError
from .decoding import decode, is_broken_link
from .domains import KNOWN, SUFFIXES, ImageFolder, Known
from .store import digest, digest_file


def check(root: str | os.PathLike[str], tick: Tick = silent) -> dict[str, Any]:
    """Count the images of a folder, compare with the official numbers, and hash and try to decode every file.

    Nothing that is wrong inside the folder ends it: `empty` lists classes without images, `unreadable` lists files
    and broken links, and `differences` lists numbers that are not the official ones.

    Raises:
        DataError: If the folder is missing or holds no images.
    """
    folder = ImageFolder(root)
    files = {domain: folder.files(domain) for domain in folder.places}
    paths = [path for listed in files.values() for path, _ in listed]
    known = KNOWN.get(folder.name)
    counts = {domain: dict.fromkeys(folder.classes, 0) for domain in files}
    for domain, listed in files.items():
        for _, label in listed:
            counts[domain][folder.classes[label]] += 1
    hashes, unreadable = {}, [f"{path} is a link to a folder that does not exist" for path in _broken(folder.root)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for path, (content, problem) in zip(paths, pool.map(_examine, paths), strict=True):
            hashes[str(path.relative_to(folder.root))] = content
            if problem:
                unreadable.append(problem)
            tick(len(hashes), len(paths))
    return {
        "dataset": folder.name,
        "counts": counts,
        "expected": {name: official.images for name, official in known.domains.items()} if known else None,
        "differences": _differences(counts, known) if known else [],
        "empty": folder.empty_classes(),
        "unreadable": unreadable,
        "content": digest(hashes),
        "files": hashes,
    }


def _broken(root: Path) -> Iterator[Path]:
    """Yield links to nothing that stand where a domain or a class should; those among images are examined there."""
    for path in sorted(root.rglob("*")):
        if is_broken_link(path) and path.suffix.lower() not in SUFFIXES and not path.name.startswith("."):
            yield path


def _examine(path: Path) -> tuple[str, str]:
    """Return the hash of an image file and why it cannot be read, or an empty text."""
    problem = ""
    try:
        decode(path, None)
    except DataError as error:
        problem = str(error)
    try:
        return digest_file(path), problem
    except OSError:  # a broken link, or a file that may not be read: the problem says so
        return "", problem


def _differences(counts: Mapping[str, Mapping[str, int]], known: Known) -> list[str]:
    found = []
    classes = len(next(iter(counts.values())))
    if classes != known.classes:  # counts by class could not be compared
        return [f"{classes} classes, officially {known.classes}"]
    for domain, per_class in counts.items():
        official = known.domains[domain]
        if sum(per_class.values()) != official.images:
            found.append(f"{domain}: {sum(per_class.values())} images, officially {official.images}")
        for (name, count), expected in zip(per_class.items(), official.per_class, strict=False):
            if count != expected:
                found.append(f"{domain}/{name}: {count} images, officially {expected}")
    return found
