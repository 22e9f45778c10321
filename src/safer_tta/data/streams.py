"""A test stream under attack: which images arrive, in what order, and which of them are attacked.

A stream depends only on the images, their attacked copies and a specification, so every method sees the same one.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .._internal import checks
from .._internal.seeds import generator
from ..errors import DataError, InvalidValueError
from .domains import Domain
from .store import content_of, digest

Index = NDArray[np.int64]
WHOLE_BATCHES = ("batches", "batches-first")  # draws in which a batch is attacked as a whole or not at all
DRAWS = ("exact", "bernoulli", "late", *WHOLE_BATCHES)


class Batch(NamedTuple):
    """A batch of a stream."""

    images: Tensor  # (B,3,H,W), bytes
    labels: Tensor  # (B,), for scoring
    attacked: Tensor  # (B,), which images are attacked


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """How images become a stream.

    Attributes:
        order: "shuffled", "correlated" (by class), "continual" (domains in turn) or "mixed" (domains shuffled).
        attack_rate: The percentage of attacked images in a batch; of whole batches, the percentage of these.
        draw: "exact" attacks exactly this share of a batch, "bernoulli" each image with this probability, and "late"
            exactly this share from the middle of the stream on. "batches" attacks this share of all batches as a whole,
            evenly spread over the stream; "batches-first" attacks as many, all at its start.
        batch: Images in a batch.
        limit: The stream ends after this many images.
        tail: This many images at the end of the stream are never attacked. Of whole batches, those that reach into the
            tail are not attacked.
        seed: Decides the order and which images are attacked.

    Raises:
        UnknownNameError: If there is no such `order` or `draw`.
        InvalidValueError: If a number is out of range.
    """

    order: str = "shuffled"
    attack_rate: float = 0.0
    draw: str = "exact"
    batch: int = 64
    limit: int | None = None
    tail: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        # A stream has one name, whether a value came as 50 or 50.0, or as a number of numpy's or Python's.
        object.__setattr__(self, "attack_rate", float(self.attack_rate))
        object.__setattr__(self, "seed", operator.index(self.seed))
        checks.whole(tail=self.tail)
        checks.one_of(ORDERS, order=self.order)
        checks.one_of(DRAWS, draw=self.draw)
        if not 0 <= self.attack_rate <= 100:
            raise InvalidValueError(f"attack_rate is {self.attack_rate}; expected a percentage from 0 to 100")
        if self.tail < 0:
            raise InvalidValueError(f"tail is {self.tail}; expected a number of images of at least 0")
        checks.count(batch=self.batch, limit=1 if self.limit is None else self.limit)


class Stream:
    """Batches of images of one or several domains, some of them attacked.

    Args:
        domains: The domains; orders other than "continual" and "mixed" take one.
        spec: How their images become a stream.
        attacked: For every domain its attacked copies, in the same order; needed if `attack_rate` is above 0.

    Raises:
        DataError: If domains, order and attacked copies do not fit each other.
    """

    def __init__(
        self, domains: Sequence[Domain], spec: StreamSpec, attacked: Sequence[NDArray[np.uint8]] | None = None
    ) -> None:
        if isinstance(domains, Domain):
            raise DataError(f"domains is the domain {domains.name!r} itself; expected a list of them, such as [domain]")
        if attacked is None and spec.attack_rate > 0:
            raise DataError(f"attack_rate is {spec.attack_rate} and no attacked images came; make them first")
        if len(domains) > 1 and spec.order not in ("continual", "mixed"):
            raise DataError(f"order {spec.order!r} takes one domain and {len(domains)} came; use continual or mixed")
        if attacked is not None and len(attacked) != len(domains):
            raise DataError(f"attacked has {len(attacked)} arrays for {len(domains)} domains; expected one each")
        for domain, copies in zip(domains, attacked or (), strict=False):
            if copies.shape != domain.images.shape or copies.dtype != np.uint8:
                raise DataError(
                    f"the attacked copies of {domain.name} are {copies.dtype} {copies.shape}; expected uint8 "
                    f"{domain.images.shape}. Convert floats in [0,1] with (copies * 255).round().astype('uint8')"
                )
        self.domains, self.spec, self.attacked = list(domains), spec, attacked
        self.order = ORDERS[spec.order](self.domains, spec.seed)[: spec.limit]
        # One number per image decides which are attacked first, so a higher rate attacks the same images and more.
        self.priority = torch.rand(len(self.order), generator=generator(spec.seed, "priority")).numpy()
        self.rounding = torch.rand(len(self), generator=generator(spec.seed, "rounding")).numpy()

    def __len__(self) -> int:
        return -(-len(self.order) // self.spec.batch)

    def __iter__(self) -> Iterator[Batch]:
        return self.since(0)

    def since(self, first: int) -> Iterator[Batch]:
        """Iterate over the batches from number `first` on."""
        for start in range(first * self.spec.batch, len(self.order), self.spec.batch):
            yield self._batch(slice(start, start + self.spec.batch))

    def manifest(self) -> dict[str, Any]:
        """Return the definition of the stream: its settings, and hashes of its images."""
        return {
            "spec": dataclasses.asdict(self.spec),
            "domains": [{"dataset": d.dataset, "name": d.name, "content": d.content} for d in self.domains],
            "attacked": None if not self.spec.attack_rate else [content_of(copies) for copies in self.attacked or ()],
        }

    @property
    def name(self) -> str:
        """The hash of the manifest."""
        return digest(self.manifest())

    def _batch(self, window: slice) -> Batch:
        chosen = self._choose_attacked(window)
        images, labels = [], []
        for (domain, index), replaced in zip(self.order[window], chosen, strict=True):
            source = self.attacked[domain] if replaced and self.attacked is not None else self.domains[domain].images
            images.append(source[index])
            labels.append(self.domains[domain].labels[index])
        return Batch(torch.from_numpy(np.stack(images)), torch.tensor(labels), torch.from_numpy(chosen))

    def _choose_attacked(self, window: slice) -> NDArray[np.bool_]:
        before_tail = max(0, len(self.order) - self.spec.tail - window.start)
        priority = self.priority[window]
        chosen = np.zeros(len(priority), dtype=bool)
        chosen[:before_tail] = self._choose(priority[:before_tail], window.start // self.spec.batch)
        return chosen

    def _choose(self, priority: NDArray[np.float32], number: int) -> NDArray[np.bool_]:
        """Return which images of batch `number` are attacked, of those that are not in the tail."""
        share, chosen = self.spec.attack_rate / 100, np.zeros(len(priority), dtype=bool)
        if self.spec.draw == "bernoulli":
            return np.asarray(priority < share)
        if self.spec.draw in WHOLE_BATCHES:
            return chosen | self._owned(share, number)
        if self.spec.draw == "late" and number < len(self) // 2:
            return chosen
        # A fraction of an image rounds up or down by the batch's own number, so a higher rate never attacks fewer.
        count = int(share * len(priority) + self.rounding[number] + 1e-9)
        chosen[np.argsort(priority, kind="stable")[:count]] = True
        return chosen

    def _owned(self, share: float, number: int) -> bool:
        """Return whether batch `number` is one of those that are attacked as a whole."""
        batches = (len(self.order) - self.spec.tail) // self.spec.batch if self.spec.tail else len(self)
        if number >= batches or self.spec.draw == "batches-first":
            return number < min(batches, _nearest(share * batches))
        return _nearest(share * (number + 1)) > _nearest(share * number)


def _nearest(value: float) -> int:
    """Return the nearest whole number; a half is rounded up."""
    return int(value + 0.5 + 1e-9)


def excerpt(domain: Domain, images: int, seed: int) -> Domain:
    """Return so many images of a domain for a short stream, so that fewer have to be attacked; `seed` decides which."""
    chosen = _shuffled([domain], seed)[:images, 1]
    content = digest({"of": domain.content, "seed": seed, "images": images})
    images_, labels = domain.images[chosen], domain.labels[chosen]
    return dataclasses.replace(domain, images=images_, labels=labels, content=content, origin="")


# --- orders: one row (number of the domain, index in it) for every image --------------------------------------------


def _pairs(domains: Sequence[Domain]) -> Index:
    return np.concatenate([[(number, i) for i in range(len(d))] for number, d in enumerate(domains)])


def _permute(rows: Index, *seed: object) -> Index:
    order = torch.randperm(len(rows), generator=generator("order", *seed)).numpy()
    return rows[order]


def _shuffled(domains: Sequence[Domain], seed: int) -> Index:
    return _permute(_pairs(domains), seed)


def _correlated(domains: Sequence[Domain], seed: int) -> Index:
    rows = _shuffled(domains, seed)
    turn = torch.randperm(len(domains[0].classes), generator=generator("classes", seed)).numpy()
    labels = np.array([domains[domain].labels[index] for domain, index in rows])
    return rows[np.argsort(turn[labels], kind="stable")]


def _continual(domains: Sequence[Domain], seed: int) -> Index:
    rows = _pairs(domains)
    return np.concatenate([_permute(rows[rows[:, 0] == number], seed, number) for number in range(len(domains))])


ORDERS: dict[str, Callable[[Sequence[Domain], int], Index]] = {
    "shuffled": _shuffled,
    "correlated": _correlated,
    "continual": _continual,
    "mixed": _shuffled,
}
