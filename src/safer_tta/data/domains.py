"""Images of several domains: PACS, VLCS, OfficeHome, any `root/domain/class/image` folder, or the embedded data.

A folder is decoded once, resized, and kept as one memory-mapped uint8 array per domain.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import synthetic
from .store import ArrayStore, Progress, content_of, digest, digest_arrays, digest_file, read_json, write_json

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff"}
SPLITS = {"train", "val", "test", "crossval", "full"}  # VLCS comes with these between domain and class


class DataError(ValueError):
    """Data that is not what it should be; the message names the file or folder."""


@dataclass(frozen=True)
class Known:
    """A published dataset: its domains by their names in rows and on disk, and how many images each should have."""

    domains: Mapping[str, tuple[str, ...]]
    classes: int
    images: Mapping[str, int]
    per_class: Mapping[str, tuple[int, ...]]


KNOWN = {
    "pacs": Known(
        {"art_painting": ("art_painting",), "cartoon": ("cartoon",), "photo": ("photo",), "sketch": ("sketch",)},
        7,
        {"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929},
        {
            "art_painting": (379, 255, 285, 184, 201, 295, 449),
            "cartoon": (389, 457, 346, 135, 324, 288, 405),
            "photo": (189, 202, 182, 186, 199, 280, 432),
            "sketch": (772, 740, 753, 608, 816, 80, 160),
        },
    ),
    "vlcs": Known(
        {
            "caltech": ("Caltech101", "CALTECH", "caltech"),
            "labelme": ("LabelMe", "LABELME", "labelme"),
            "sun": ("SUN09", "SUN", "sun"),
            "pascal": ("VOC2007", "PASCAL", "pascal"),
        },
        5,
        {"caltech": 1415, "labelme": 2656, "sun": 3282, "pascal": 3376},
        {
            "caltech": (237, 123, 118, 67, 870),
            "labelme": (80, 1209, 89, 43, 1235),
            "sun": (21, 933, 1036, 31, 1261),
            "pascal": (330, 699, 428, 420, 1499),
        },
    ),
    "officehome": Known(
        {
            "art": ("Art",),
            "clipart": ("Clipart",),
            "product": ("Product",),
            "realworld": ("Real World", "RealWorld", "Real_World", "Real"),
        },
        65,
        {"art": 2427, "clipart": 4365, "product": 4439, "realworld": 4357},
        {},
    ),
}


@dataclass(frozen=True)
class Domain:
    """Images (N,3,H,W) of bytes with their labels (N,), and a hash of both."""

    dataset: str
    name: str
    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    content: str

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Dataset:
    """Domains that share their classes. `domain(name)` decodes one, or finds it decoded.

    identity: tells two datasets of one name apart without decoding an image: a hash of all files and the side.
    """

    name: str
    domains: tuple[str, ...]
    classes: tuple[str, ...]
    load: Callable[[str], Domain]
    identity: str

    def domain(self, name: str) -> Domain:
        if name not in self.domains:
            raise DataError(f"{self.name} has no domain {name!r}; expected one of {', '.join(self.domains)}")
        return self.load(name)


def open_dataset(
    data: str | os.PathLike[str],
    *,
    side: int = 224,
    cache: str | os.PathLike[str] | None = None,
    count: int = 1400,
    progress: Progress = lambda done, total: None,
) -> Dataset:
    """`synthetic` (then `count` images a domain), or the folder of a dataset (then `side` pixels, kept in `cache`)."""
    if str(data) == "synthetic":
        load = functools.cache(functools.partial(_synthetic, count))
        identity = digest({"synthetic": count})
        return Dataset("synthetic", synthetic.DOMAINS, synthetic.CLASSES, load, identity)
    folder = ImageFolder(data)
    store = ArrayStore(Path(cache) if cache is not None else default_cache() / "images")
    load = functools.cache(functools.partial(_decoded, folder, side, store, progress))
    identity = digest({"side": side, "files": _content(folder, store.folder / "identities")})
    return Dataset(folder.name, tuple(folder.places), folder.classes, load, identity)


def _content(folder: ImageFolder, cache: Path) -> str:
    """A hash of all files' contents; computed again only when a name, size or date has changed."""
    files = [path for name in folder.places for path, _ in folder.files(name)]
    status = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    known = cache / f"{digest({'files': status})}.json"
    if known.exists():
        return str(read_json(known))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        hashes = list(pool.map(digest_file, files))
    names = [str(path.relative_to(folder.root)) for path in files]
    content = digest({"files": dict(zip(names, hashes, strict=True))})
    cache.mkdir(parents=True, exist_ok=True)
    write_json(known, content)
    return content


def default_cache() -> Path:
    """Where decoded images go unless told otherwise: SAFER_CACHE, else the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("SAFER_CACHE") or Path(home) / "safer-tta")


class ImageFolder:
    """`root/domain/class/image`, with the layouts in which the published datasets come."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).resolve()
        if not self.root.is_dir():
            raise DataError(f"{self.root} is not a folder; expected root/domain/class/image or the word 'synthetic'")
        found = sorted(p.name for p in self.root.iterdir() if p.is_dir() and not p.name.startswith("."))
        self.name, self.places = _recognise(self.root, found)
        if not self.places:
            raise DataError(
                f"{self.root} holds no folders; expected one for each domain, with one for each class in it"
            )
        per_domain = {domain: self._classes(place) for domain, place in self.places.items()}
        if not any(images for classes in per_domain.values() for images in classes.values()):
            raise DataError(
                f"{self.root} holds no images where they are looked for; expected {self.root.name}/domain/class/image. "
                "Is it a folder too deep, or not deep enough?"
            )
        self.classes = tuple(sorted(set().union(*per_domain.values())))
        for domain, classes in per_domain.items():
            missing = [c for c in self.classes if not classes.get(c)]
            if missing:
                raise DataError(
                    f"{self.places[domain]}: no image in class {', '.join(map(repr, missing[:5]))}; expected every "
                    "domain to hold images of every class. Remove the class everywhere or complete it"
                )

    def files(self, domain: str) -> list[tuple[Path, int]]:
        """(path, label) of every image of a domain, by class and then by name."""
        classes = self._classes(self.places[domain])
        return [(path, label) for label, name in enumerate(self.classes) for path in classes.get(name, [])]

    def _classes(self, place: Path) -> dict[str, list[Path]]:
        found: dict[str, list[Path]] = {}
        for folder in self._class_folders(place):
            images = sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
            found[folder.name] = sorted([*found.get(folder.name, []), *images])
        return found

    @staticmethod
    def _class_folders(place: Path) -> list[Path]:
        folders = sorted(p for p in place.iterdir() if p.is_dir() and not p.name.startswith("."))
        splits = [p for p in folders if p.name in SPLITS]
        if not splits or len(splits) < len(folders):
            return folders
        whole = [p for p in splits if p.name == "full"] or splits
        return sorted(c for split in whole for c in split.iterdir() if c.is_dir() and not c.name.startswith("."))


def _recognise(root: Path, found: list[str]) -> tuple[str, dict[str, Path]]:
    """Which published dataset has these domains; else the folder's own names."""
    for name, known in KNOWN.items():
        places = {}
        for domain, spellings in known.domains.items():
            on_disk = [s for s in spellings if s in found]
            if on_disk:
                places[domain] = root / on_disk[0]
        if len(places) == len(known.domains):
            return name, places
    own = root.name.lower()
    return f"folder-{own}" if own in ("synthetic", *KNOWN) else own, {name: root / name for name in found}


def decode(path: Path, side: int | None) -> NDArray[np.uint8]:
    """An image file as (3,side,side) bytes, resized without a crop; side None keeps its size."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            picture = eight_bit(image).convert("RGB")
            if side is not None:
                picture = picture.resize((side, side), Image.Resampling.BILINEAR)
            return np.ascontiguousarray(np.asarray(picture).transpose(2, 0, 1))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be read as an image: {error}. Replace or remove the file") from error


def eight_bit(image: Any) -> Any:
    """16-bit grey images by their upper eight bits; Pillow would clip them to white."""
    return image.point(lambda value: value / 257).convert("L") if image.mode.startswith("I;16") else image


def _decoded(folder: ImageFolder, side: int, store: ArrayStore, progress: Progress, name: str) -> Domain:
    files = folder.files(name)
    labels = np.array([label for _, label in files], dtype=np.int64)
    listing = [[str(path.relative_to(folder.root)), path.stat().st_size, path.stat().st_mtime_ns] for path, _ in files]
    definition = {"dataset": folder.name, "domain": name, "side": side, "files": digest({"files": listing})}

    def make(first: int, last: int) -> NDArray[np.uint8]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # decoding happens outside the interpreter lock
            return np.stack(list(pool.map(lambda item: decode(item[0], side), files[first:last])))

    images = store.get(definition, len(files), make, part=256, progress=progress)
    content = digest({"images": content_of(images), "labels": digest_arrays(labels)})
    return Domain(folder.name, name, images, labels, folder.classes, content)


def _synthetic(count: int, name: str) -> Domain:
    images, labels = synthetic.domain(name, count)
    return Domain("synthetic", name, images, labels, synthetic.CLASSES, digest_arrays(images, labels))


def check(root: str | os.PathLike[str], progress: Progress = lambda done, total: None) -> dict[str, Any]:
    """Counts against the official numbers, files that cannot be decoded, and a hash of every file's content."""
    folder = ImageFolder(root)
    items = [(domain, path, label) for domain in folder.places for path, label in folder.files(domain)]
    known = KNOWN.get(folder.name)

    def look(item: tuple[str, Path, int]) -> tuple[str, str | None]:
        try:
            decode(item[1], None)
            problem = None
        except DataError as error:
            problem = str(error)
        return digest_file(item[1]), problem

    counts = {domain: dict.fromkeys(folder.classes, 0) for domain in folder.places}
    hashes, unreadable = {}, []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done, (item, (content, problem)) in enumerate(zip(items, pool.map(look, items), strict=True), start=1):
            domain, path, label = item
            counts[domain][folder.classes[label]] += 1
            hashes[str(path.relative_to(folder.root))] = content
            if problem:
                unreadable.append(problem)
            progress(done, len(items))
    return {
        "dataset": folder.name,
        "counts": counts,
        "expected": dict(known.images) if known else None,
        "differences": _differences(counts, known),
        "unreadable": unreadable,
        "content": digest(hashes),
        "files": hashes,
    }


def _differences(counts: Mapping[str, Mapping[str, int]], known: Known | None) -> list[str]:
    if known is None:
        return []
    found = []
    classes = len(next(iter(counts.values())))
    if classes != known.classes:  # then the classes below do not line up with the official ones
        return [f"{classes} classes, officially {known.classes}"]
    for domain, per_class in counts.items():
        if sum(per_class.values()) != known.images[domain]:
            found.append(f"{domain}: {sum(per_class.values())} images, officially {known.images[domain]}")
        for (name, count), official in zip(per_class.items(), known.per_class.get(domain, ()), strict=False):
            if count != official:
                found.append(f"{domain}/{name}: {count} images, officially {official}")
    return found
