"""Send a folder of images to a stream of a running service: what `safer send FOLDER` does."""

import contextlib
import csv
import io
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .._internal.files import atomic_write
from .._internal.hashing import hash_bytes
from ..errors import InvalidValueError, ServiceError
from .client import Client

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp"}
COLUMNS = ("file", "batch", "class", "probability", "suspicion", "abstain", "true_class")
Line = tuple[Any, ...]


def send_folder(
    client: Client,
    folder: str | os.PathLike[str],
    stream: str,
    *,
    batch: int = 64,
    labelled: bool = False,
    out: str | os.PathLike[str] | None = None,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Send all images below a folder, in the order of their names; the stream is created if it does not exist.

    Each batch has a key made of the stream's name and the names and contents of its files, so a folder that is sent
    again with the same batch size is resumed: the service answers batches that it has seen from its journal and does
    not learn from them twice. It keeps the keys of a stream's last 256 batches; earlier ones are learnt from again.

    `labelled` images lie in folders named by their class, and the labels are posted after each batch. In the order of
    their names every batch would have a single class, so the images are mixed, always in the same way.

    `out` is a CSV file with a line for each image (`COLUMNS`), which is written once all batches are answered.
    """
    if batch < 1:
        raise InvalidValueError(f"batch is {batch}; expected at least 1 image")
    root = Path(folder)
    paths = _find_images(root, mixed=labelled)
    classes = client.model()["classes"] if labelled else []
    truth = _read_labels(root, paths, classes) if labelled else []
    with _table(out) as write:  # first, since a file that cannot be written should be found before anything is sent
        _ensure_exists(client, stream)
        answered: Counter[str] = Counter()
        batches = abstained = correct = 0
        for first in range(0, len(paths), batch):
            part, labels = paths[first : first + batch], truth[first : first + batch]
            answer = _send(client, stream, root, part)
            answered.update(str(name) for name in answer["classes"])
            abstained += sum(answer["abstain"])
            if labelled:
                client.label(stream, answer["number"], labels)
                correct += sum(given == true for given, true in zip(answer["labels"], labels, strict=True))
            write(_lines(root, part, answer, [classes[label] for label in labels] or [""] * len(part)))
            batches += 1
            tick(first + len(part), len(paths))
    accuracy = 100 * correct / len(paths) if labelled else None
    return {
        "images": len(paths), "batches": batches, "answered": dict(answered), "accuracy": accuracy,
        "abstained": abstained,
    }  # fmt: skip


@contextlib.contextmanager
def _table(out: str | os.PathLike[str] | None) -> Iterator[Callable[[Iterable[Line]], None]]:
    """Give a function that adds lines to a CSV file, which is complete or absent; without a file it does nothing."""
    if out is None:
        yield lambda lines: None
        return
    with atomic_write(out) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="", write_through=True)
        table = csv.writer(text)
        table.writerow(COLUMNS)
        yield table.writerows
        text.detach()  # `atomic_write` still needs the file


def _lines(root: Path, paths: Sequence[Path], answer: dict[str, Any], true: Sequence[str | int]) -> Iterator[Line]:
    """Yield a line for each image of a batch. A cell is empty if the service gives no number."""
    suspicion = answer["suspicion"] or [None] * len(paths)
    columns = (answer["classes"], answer["labels"], answer["probabilities"], suspicion, answer["abstain"], true)
    for path, name, label, probabilities, suspected, abstain, expected in zip(paths, *columns, strict=True):
        file, probability = path.relative_to(root).as_posix(), probabilities[label]
        yield file, answer["number"], name, probability, suspected, int(abstain), expected


def _find_images(root: Path, *, mixed: bool) -> list[Path]:
    """Find image files; hidden files, which a system or an editor creates beside images, are left out."""
    if not root.is_dir():
        raise InvalidValueError(f"{root} is not a folder; expected one with images. Check the path")
    files = (path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    names = sorted(path.relative_to(root).as_posix() for path in files)
    names = [name for name in names if not any(part.startswith(".") for part in name.split("/"))]
    if not names:
        kinds = ", ".join(sorted(SUFFIXES))
        raise InvalidValueError(f"{root} contains no images; expected files ending in {kinds}, in it or below it")
    return [root / name for name in (sorted(names, key=_hash) if mixed else names)]


def _hash(text: str) -> bytes:
    return hash_bytes([os.fsencode(text)], size=64)


def _read_labels(root: Path, paths: Sequence[Path], classes: Sequence[str | int]) -> list[int]:
    """Return the place of each image's folder among the model's classes, which may be names or numbers."""
    numbers = {str(name): number for number, name in enumerate(classes)}
    absolute = root.resolve()  # an image may lie in the folder itself, which may be given as "."
    names = [(absolute / path.relative_to(root)).parent.name for path in paths]
    unknown = sorted(set(names) - set(numbers))
    if unknown:
        raise InvalidValueError(
            f"the folders {_list(unknown)} are not named by a class; expected the model's classes: {_list(numbers)}. "
            "Rename the folders, or send them without labels"
        )
    return [numbers[name] for name in names]


def _list(names: Iterable[str], most: int = 10) -> str:
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def _ensure_exists(client: Client, stream: str) -> None:
    try:
        client.stream(stream)
    except ServiceError as error:
        if error.status != 404:
            raise
        client.create(stream)


def _send(client: Client, stream: str, root: Path, paths: Sequence[Path]) -> dict[str, Any]:
    # Hashes of one length each, so that no two lists of names and contents give the same bytes.
    parts = [_hash(stream)]
    for path in paths:
        parts += [_hash(path.relative_to(root).as_posix()), hash_bytes([path.read_bytes()], size=64)]
    try:
        return client.send(stream, paths, key=hash_bytes(parts).hex())
    except ServiceError as error:
        if error.status not in {413, 415, 422}:
            raise
        # The service counts the images of a batch; only the sender knows which file that is.
        raise ServiceError(error.status, f"{error.message}. Image 0 of this batch is {paths[0]}") from error
