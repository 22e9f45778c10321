"""The labelled images of an audit, from whatever the user has them in."""

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from torch.utils.data import Dataset as TorchDataset

from .._internal.seeds import generator
from ..data import Domain
from ..data.store import digest_arrays
from ..errors import InvalidValueError
from ..evaluation.scores import check_range, split
from ..predictors import check_images

LOADED = 64  # images of a dataset that are loaded at a time


def gather(data: Any, most: int, classes: int, seed: int) -> Domain:
    """Return labelled images as a domain: the first `most` of a loader, or so many of a dataset, drawn by the seed."""
    if isinstance(data, Domain):
        check_range(torch.from_numpy(data.labels), classes)
        return data
    if isinstance(data, TorchDataset):
        size = len(data)  # type: ignore[arg-type]
        chosen = torch.randperm(size, generator=generator(seed, "audit"))[:most].tolist()
        data = DataLoader(Subset(data, chosen), batch_size=LOADED)
    pairs = list(itertools.islice(_single(data, classes), most))
    if not pairs:
        raise InvalidValueError("data gave no images; expected batches of (images, labels), or a dataset of pairs")
    if len({image.shape for image, _ in pairs}) > 1:
        raise InvalidValueError("images in data differ in size; expected one size, so resize them first")
    images = torch.stack([image for image, _ in pairs]).numpy()
    labels = np.array([label for _, label in pairs], dtype=np.int64)
    names = tuple(map(str, range(classes)))
    return Domain("audit", "images", images, labels, names, digest_arrays(images, labels))


def _single(loader: Iterable[Any], classes: int) -> Iterable[tuple[Tensor, int]]:
    """Yield each image as bytes, with its label."""
    for batch in loader:
        images, labels, _ = split(batch)
        check_images(images, channels=())
        check_range(labels, classes)
        levels = images if images.dtype == torch.uint8 else (images.detach() * 255).round().byte()
        yield from zip(levels.cpu(), labels.tolist(), strict=True)
