"""Send a folder of images to a stream of a running service: what `safer send FOLDER` does."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .client import Client, ServiceError

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp"}


def send_folder(
    client: Client,
    folder: str | os.PathLike[str],
    stream: str,
    *,
    batch: int = 64,
    labelled: bool = False,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Send all images below a folder, in the order of their names; the stream is created if it does not exist.

    Each batch has a key made of the stream's name and the names and contents of its files. Killed and started again
    with the same batch size, the command sends every batch again, but the service answers those it has seen from what
    it stored and does not learn from them twice. It keeps the keys of a stream's last 256 batches: if more than that
    had been applied when the command was killed, the first keys are gone and the folder is learnt from anew. For the
    same reason, a folder sent a second time on purpose changes nothing; send it to another stream.

    labelled: the folder an image lies in is named after its class; the labels are posted after each batch. In the order
        of their names every batch would hold a class alone, so these are mixed, always in the same way.
    tick: called with (images done, images in all) after each batch.

    Returns images, batches, answered (how many images were given each class, abstained ones included), accuracy (in
    percent, of this folder; None if not labelled) and abstained.
    """
    if batch < 1:
        raise ValueError(f"got a batch of {batch} images; expected 1 or more")
    root = Path(folder)
    paths = _mixed(root, _images(root)) if labelled else _images(root)
    truth = _labels(root, paths, client.model()["classes"]) if labelled else []
    _ensure(client, stream)
    answered: Counter[str] = Counter()
    batches = abstained = correct = 0
    for first in range(0, len(paths), batch):
        part = paths[first : first + batch]
        answer = _sent(client, stream, root, part)
        answered.update(str(name) for name in answer["classes"])
        abstained += sum(answer["abstain"])
        if labelled:
            labels = truth[first : first + batch]
            client.label(stream, answer["number"], labels)
            correct += sum(given == true for given, true in zip(answer["labels"], labels, strict=True))
        batches += 1
        tick(first + len(part), len(paths))
    return {
        "images": len(paths),
        "batches": batches,
        "answered": dict(answered),
        "accuracy": 100 * correct / len(paths) if labelled else None,
        "abstained": abstained,
    }


def _images(root: Path) -> list[Path]:
    """Hidden files are left out: what a system or an editor puts beside images is not an image."""
    if not root.is_dir():
        raise ValueError(f"got {root}, which is not a folder; expected one with images. Check the path")
    found = {
        path.relative_to(root).as_posix(): path
        for path in root.rglob("*")
        if path.suffix.lower() in SUFFIXES and path.is_file()
    }
    images = [path for name, path in sorted(found.items()) if not any(p.startswith(".") for p in name.split("/"))]
    if not images:
        kinds = ", ".join(sorted(SUFFIXES))
        raise ValueError(f"got {root}, which holds no images; expected files ending in {kinds}, in it or below it")
    return images


def _mixed(root: Path, paths: Sequence[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: hashlib.blake2b(os.fsencode(path.relative_to(root).as_posix())).digest())


def _labels(root: Path, paths: Sequence[Path], classes: Sequence[str | int]) -> list[int]:
    """The place of each image's folder among the model's classes, which may be names or numbers."""
    numbers = {str(name): number for number, name in enumerate(classes)}
    whole = root.resolve()  # an image may lie in the folder itself, which may be given as "."
    names = [(whole / path.relative_to(root)).parent.name for path in paths]
    unknown = sorted(set(names) - set(numbers))
    if unknown:
        raise ValueError(
            f"got images in folders named {_some(unknown)}; expected the model's classes: {_some(numbers)}. "
            "Rename the folders, or send them without labels"
        )
    return [numbers[name] for name in names]


def _some(names: Sequence[str] | dict[str, int], most: int = 10) -> str:
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def _ensure(client: Client, stream: str) -> None:
    try:
        client.stream(stream)
    except ServiceError as error:
        if error.status != 404:
            raise
        client.create(stream)


def _sent(client: Client, stream: str, root: Path, paths: Sequence[Path]) -> dict[str, Any]:
    try:
        return client.send(stream, paths, key=_key(stream, root, paths))
    except ServiceError as error:
        if error.status not in {413, 415, 422}:
            raise
        # The service counts the images of a batch; which file that is, is known only here.
        raise ServiceError(error.status, f"{error.message}. Image 0 of this batch is {paths[0]}") from error


def _key(stream: str, root: Path, paths: Sequence[Path]) -> str:
    # Hashes of one length each, so that no two lists of names and contents are written alike.
    state = hashlib.blake2b(hashlib.blake2b(stream.encode()).digest(), digest_size=16)
    for path in paths:
        state.update(hashlib.blake2b(os.fsencode(path.relative_to(root).as_posix())).digest())
        state.update(hashlib.blake2b(path.read_bytes()).digest())
    return state.hexdigest()
