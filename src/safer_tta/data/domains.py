"""Images of several domains: PACS, VLCS, OfficeHome, any `root/domain/class/image` folder, or the embedded data.

The images of a folder are decoded and resized once, and kept as one memory-mapped uint8 array for each domain.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._internal import checks
from .._internal.progress import Tick, silent
from .._internal.resizing import STRETCH, Resize
from ..errors import DataError
from . import synthetic
from .decoding import decode, is_broken_link, is_turned
from .store import ArrayStore, content_of, digest, digest_arrays, digest_file, read_json, write_json

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff"}
SPLITS = {"train", "val", "test", "crossval", "full"}  # VLCS has these folders between domain and class


class Official(NamedTuple):
    """A domain of a published dataset: its names on disk, and how many images it has, in all and of every class."""

    spellings: tuple[str, ...]
    images: int
    per_class: tuple[int, ...] = ()


class Known(NamedTuple):
    """A published dataset: how many classes it has, and its domains by the names that rows have."""

    classes: int
    domains: Mapping[str, Official]


PACS = {
    "art_painting": Official(("art_painting",), 2048, (379, 255, 285, 184, 201, 295, 449)),
    "cartoon": Official(("cartoon",), 2344, (389, 457, 346, 135, 324, 288, 405)),
    "photo": Official(("photo",), 1670, (189, 202, 182, 186, 199, 280, 432)),
    "sketch": Official(("sketch",), 3929, (772, 740, 753, 608, 816, 80, 160)),
}
VLCS = {
    "caltech": Official(("Caltech101", "CALTECH", "caltech"), 1415, (237, 123, 118, 67, 870)),
    "labelme": Official(("LabelMe", "LABELME", "labelme"), 2656, (80, 1209, 89, 43, 1235)),
    "sun": Official(("SUN09", "SUN", "sun"), 3282, (21, 933, 1036, 31, 1261)),
    "pascal": Official(("VOC2007", "PASCAL", "pascal"), 3376, (330, 699, 428, 420, 1499)),
}
OFFICEHOME = {
    "art": Official(("Art",), 2427),
    "clipart": Official(("Clipart",), 4365),
    "product": Official(("Product",), 4439),
    "realworld": Official(("Real World", "RealWorld", "Real_World", "Real"), 4357),
}
KNOWN = {"pacs": Known(7, PACS), "vlcs": Known(5, VLCS), "officehome": Known(65, OFFICEHOME)}


@dataclass(frozen=True)
class Domain:
    """Images of one kind with their labels."""

    dataset: str
    name: str
    images: NDArray[np.uint8]  # (N,3,H,W)
    labels: NDArray[np.int64]  # (N,)
    classes: tuple[str, ...]
    content: str  # a hash of images and labels
    origin: str = ""  # the identity of the dataset of which this is a whole domain; empty for excerpts

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Dataset:
    """Domains that share their classes."""

    name: str
    domains: tuple[str, ...]
    classes: tuple[str, ...]
    load: Callable[[str], Domain]
    identity: str  # a hash of all files and of the side of the images, which needs no decoding

    def domain(self, name: str) -> Domain:
        """Return a domain; its images are decoded the first time."""
        checks.one_of(self.domains, domain=name)
        return dataclasses.replace(self.load(name), origin=self.identity)


def open_dataset(
    data: str | os.PathLike[str],
    *,
    side: int = 224,
    resize: Resize = STRETCH,
    cache: str | os.PathLike[str] | None = None,
    count: int = 1400,
    flat: bool = False,
    tick: Tick = silent,
) -> Dataset:
    """Open the embedded data or a folder of images.

    Args:
        data: "synthetic", or a folder `root/domain/class/image`.
        side: The pixels on a side to which images of a folder are resized.
        resize: How they come to that side.
        cache: Where decoded images are kept. By default it is `$SAFER_CACHE`, or else the user's cache folder.
        count: The images in each domain of the embedded data.
        flat: Whether the folder is `root/class/image`: a single domain, which has the folder's name.
        tick: Called with the number of images decoded and of all.

    Raises:
        DataError: If the folder is missing, empty or laid out in another way.
    """
    if str(data) == "synthetic":
        load = functools.cache(functools.partial(_synthetic, count))
        return Dataset("synthetic", synthetic.DOMAINS, synthetic.CLASSES, load, digest({"synthetic": count}))
    folder = ImageFolder(data, flat=flat)
    for problem in folder.empty_classes():
        raise DataError(problem)
    store = ArrayStore(Path(cache) if cache is not None else default_cache() / "images")
    load = functools.cache(functools.partial(_decode_domain, folder, side, resize, store, tick))
    identity = digest({"side": side, **_described(resize), "files": _content(folder, store.folder / "identities")})
    return Dataset(folder.name, tuple(folder.places), folder.classes, load, identity)


def _described(resize: Resize) -> dict[str, str]:
    """Return a rule for the name of what is made with it; the usual one has none."""
    return {} if resize == STRETCH else {"resize": str(resize)}


def _content(folder: ImageFolder, cache: Path) -> str:
    """Return a hash of the contents of all files; it is computed again only if a name, size or date has changed."""
    files = [path for name in folder.places for path, _ in folder.files(name)]
    status = [[str(path), *_status(path)] for path in files]
    known = cache / f"{digest({'files': status, 'upright': True})}.json"
    if known.exists():
        return str(read_json(known))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        hashes = list(pool.map(_identify, files))
    names = [str(path.relative_to(folder.root)) for path in files]
    content = digest({"files": dict(zip(names, hashes, strict=True))})
    cache.mkdir(parents=True, exist_ok=True)
    write_json(known, content)
    return content


def _identify(path: Path) -> str:
    """Return a hash of a file's content. An image that is turned when it is decoded is not what earlier runs saw."""
    return digest_file(path) + (" upright" if is_turned(path) else "")


def _status(path: Path) -> tuple[int, int]:
    """Return the size and the date of a file; a broken link is refused."""
    if is_broken_link(path):
        raise DataError(
            f"{path} is a link to a file that does not exist. Replace or remove the link; `safer data check` lists all "
            "such files"
        )
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def default_cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("SAFER_CACHE") or Path(home) / "safer-tta")


class ImageFolder:
    """A folder `root/domain/class/image`, one in the layout of a published dataset, or a flat one: root/class/image."""

    def __init__(self, root: str | os.PathLike[str], *, flat: bool = False) -> None:
        self.root = Path(root).resolve()
        if not self.root.is_dir():
            raise DataError(f"{self.root} is not a folder; expected root/domain/class/image or the word 'synthetic'")
        self.name, self.places = self.root.name.lower(), {self.root.name: self.root}
        if not flat:
            self.name, self.places = _recognise(self.root, [folder.name for folder in _folders(self.root)])
        per_domain = {domain: self._classes(place) for domain, place in self.places.items()}
        if not any(images for classes in per_domain.values() for images in classes.values()):
            raise DataError(
                f"{self.root} holds no images; expected {self.root.name}/{'' if flat else 'domain/'}class/image. Is "
                "the dataset the folder above or below it?"
            )
        self.classes = tuple(sorted(set().union(*per_domain.values())))

    def empty_classes(self) -> list[str]:
        """Return what to do about each domain that lacks images of a class; nothing if all are complete."""
        found = []
        for place in self.places.values():
            classes = self._classes(place)
            missing = [name for name in self.classes if not classes.get(name)]
            if missing:
                named = ", ".join(map(repr, missing[:5])) + (f" and {len(missing) - 5} more" if missing[5:] else "")
                found.append(
                    f"{place}: no image in class {named}; expected images of every class in every domain. Add images, "
                    "or remove the class from all domains"
                )
        return found

    def files(self, domain: str) -> list[tuple[Path, int]]:
        """Return (path, label) of every image of a domain, by class and then by name."""
        classes = self._classes(self.places[domain])
        return [(path, label) for label, name in enumerate(self.classes) for path in classes.get(name, [])]

    def _classes(self, place: Path) -> dict[str, list[Path]]:
        found: dict[str, list[Path]] = {}
        for folder in self._class_folders(place):
            images = [p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith(".")]
            found[folder.name] = sorted([*found.get(folder.name, []), *images])
        return found

    @staticmethod
    def _class_folders(place: Path) -> list[Path]:
        folders = _folders(place)
        if not all(folder.name in SPLITS for folder in folders):
            return folders
        whole = [split for split in folders if split.name == "full"] or folders
        return sorted(folder for split in whole for folder in _folders(split))


def _folders(place: Path) -> list[Path]:
    return sorted(path for path in place.iterdir() if path.is_dir() and not path.name.startswith("."))


def _recognise(root: Path, found: list[str]) -> tuple[str, dict[str, Path]]:
    """Return the dataset's name and the folder of each domain: those of a published dataset, or the folder's own."""
    for name, known in KNOWN.items():
        on_disk = {domain: [s for s in official.spellings if s in found] for domain, official in known.domains.items()}
        places = {domain: root / spellings[0] for domain, spellings in on_disk.items() if spellings}
        if len(places) == len(known.domains):
            return name, places
    own = root.name.lower()
    return f"folder-{own}" if own in ("synthetic", *KNOWN) else own, {name: root / name for name in found}


def _decode_domain(folder: ImageFolder, side: int, resize: Resize, store: ArrayStore, tick: Tick, name: str) -> Domain:
    files = folder.files(name)
    labels = np.array([label for _, label in files], dtype=np.int64)
    listing = [[str(path.relative_to(folder.root)), *_status(path)] for path, _ in files]
    definition = {"dataset": folder.name, "domain": name, "side": side, "files": digest({"files": listing})}
    definition["upright"] = True  # arrays in older caches are not
    definition |= _described(resize)

    def make(first: int, last: int) -> NDArray[np.uint8]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # decoding releases the interpreter lock
            return np.stack(list(pool.map(lambda item: decode(item[0], side, resize), files[first:last])))

    images = store.get(definition, len(files), make, part=256, tick=tick)
    content = digest({"images": content_of(images), "labels": digest_arrays(labels)})
    return Domain(folder.name, name, images, labels, folder.classes, content)


def _synthetic(count: int, name: str) -> Domain:
    images, labels = synthetic.domain(name, count)
    return Domain("synthetic", name, images, labels, synthetic.CLASSES, digest_arrays(images, labels))
