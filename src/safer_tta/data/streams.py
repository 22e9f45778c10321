"""A test stream under attack: which images arrive, in what order, and which of them were replaced.

Everything follows from the images, the attacked copies and a specification, so a manifest reproduces a stream and
every method sees the identical one.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..seeds import generator
from .domains import DataError, Domain
from .store import content_of, digest

Index = NDArray[np.int64]
DRAWS = ("exact", "bernoulli", "late")


class Batch(NamedTuple):
    """Images (B,3,H,W) of bytes, labels (B,) to score with, and which images were attacked (B,)."""

    images: Tensor
    labels: Tensor
    attacked: Tensor


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """order: shuffled, correlated (by class), continual (domains in turn) or mixed (domains shuffled together).
    attack_rate: percent of each batch; `draw` says exactly so many ("exact"), each with that chance ("bernoulli"), or
    exactly so many from half-way on, after a clean first half ("late").
    limit: only so many images.
    """

    order: str = "shuffled"
    attack_rate: float = 0.0
    draw: str = "exact"
    batch: int = 64
    limit: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        # One stream, one name: 50 and 50.0, numpy's 1 and Python's 1 are the same.
        object.__setattr__(self, "attack_rate", float(self.attack_rate))
        object.__setattr__(self, "seed", operator.index(self.seed))
        if self.order not in ORDERS:
            raise DataError(f"order {self.order!r} is unknown; expected one of {', '.join(ORDERS)}")
        if not 0 <= self.attack_rate <= 100:
            raise DataError(f"attack_rate is {self.attack_rate}; expected percent of a batch, 0 to 100")
        if self.draw not in DRAWS:
            raise DataError(f"draw {self.draw!r} is unknown; expected one of {', '.join(DRAWS)}")
        if self.batch < 1 or (self.limit is not None and self.limit < 1):
            raise DataError(f"batch is {self.batch} and limit {self.limit}; expected at least 1")


class Stream:
    """Batches of one or several domains. attacked: for each domain its perturbed copies, in the same order."""

    def __init__(
        self, domains: Sequence[Domain], spec: StreamSpec, attacked: Sequence[NDArray[np.uint8]] | None = None
    ) -> None:
        if isinstance(domains, Domain):
            raise DataError(f"domains is the domain {domains.name!r} itself; expected a list of them, such as [domain]")
        if attacked is None and spec.attack_rate > 0:
            raise DataError(f"attack_rate is {spec.attack_rate} and there are no attacked images; make them first")
        if len(domains) > 1 and spec.order not in ("continual", "mixed"):
            raise DataError(f"order {spec.order!r} is for one domain and {len(domains)} came; use continual or mixed")
        if attacked is not None and len(attacked) != len(domains):
            raise DataError(
                f"{len(attacked)} sets of attacked copies came for {len(domains)} domains; expected one each"
            )
        for domain, copies in zip(domains, attacked or (), strict=False):
            if copies.shape != domain.images.shape or copies.dtype != np.uint8:
                raise DataError(
                    f"the attacked copies of {domain.name} are {copies.dtype} {copies.shape}; expected uint8 "
                    f"{domain.images.shape}. Of floats in [0,1]: (copies * 255).round().astype('uint8')"
                )
        self.domains, self.spec, self.attacked = list(domains), spec, attacked
        self.order = ORDERS[spec.order](self.domains, spec.seed)[: spec.limit]
        # One number per image decides who is attacked first, so a higher rate attacks the same images and more.
        self.priority = torch.rand(len(self.order), generator=generator(spec.seed, "priority")).numpy()
        self.rounding = torch.rand(len(self), generator=generator(spec.seed, "rounding")).numpy()

    def __len__(self) -> int:
        return -(-len(self.order) // self.spec.batch)

    def __iter__(self) -> Iterator[Batch]:
        return self.since(0)

    def since(self, first: int) -> Iterator[Batch]:
        """The batches from number `first` on."""
        for start in range(first * self.spec.batch, len(self.order), self.spec.batch):
            yield self._batch(slice(start, start + self.spec.batch))

    def manifest(self) -> dict[str, Any]:
        """What it takes to make this stream again."""
        return {
            "spec": dataclasses.asdict(self.spec),
            "domains": [{"dataset": d.dataset, "name": d.name, "content": d.content} for d in self.domains],
            "attacked": None if not self.spec.attack_rate else [content_of(copies) for copies in self.attacked or ()],
        }

    @property
    def name(self) -> str:
        return digest(self.manifest())

    def _batch(self, window: slice) -> Batch:
        chosen = self._attacked(window)
        images, labels = [], []
        for (domain, index), replaced in zip(self.order[window], chosen, strict=True):
            source = self.attacked[domain] if replaced and self.attacked is not None else self.domains[domain].images
            images.append(source[index])
            labels.append(self.domains[domain].labels[index])
        return Batch(torch.from_numpy(np.stack(images)), torch.tensor(labels), torch.from_numpy(chosen))

    def _attacked(self, window: slice) -> NDArray[np.bool_]:
        priority = self.priority[window]
        if self.spec.draw == "bernoulli":
            drawn: NDArray[np.bool_] = priority < self.spec.attack_rate / 100
            return drawn
        number = window.start // self.spec.batch
        if self.spec.draw == "late" and number < len(self) // 2:
            return np.zeros(len(priority), dtype=bool)
        # What is not a whole image is one sometimes: a batch's own number decides, so that more is never fewer.
        exact = self.spec.attack_rate / 100 * len(priority)
        count = int(exact + self.rounding[number] + 1e-9)
        chosen = np.zeros(len(priority), dtype=bool)
        chosen[np.argsort(priority, kind="stable")[:count]] = True
        return chosen


def excerpt(domain: Domain, images: int, seed: int) -> Domain:
    """So many images of a domain, drawn by a seed: a short stream needs no more of them attacked."""
    chosen = _shuffled([domain], seed)[:images, 1]
    content = digest({"of": domain.content, "seed": seed, "images": images})
    return dataclasses.replace(domain, images=domain.images[chosen], labels=domain.labels[chosen], content=content)


# --- orders: (number of the domain, index in it), one row an image --------------------------------------------------


def _pairs(domains: Sequence[Domain]) -> Index:
    return np.concatenate([[(number, i) for i in range(len(d))] for number, d in enumerate(domains)])


def _permuted(rows: Index, *seed: object) -> Index:
    order = torch.randperm(len(rows), generator=generator("order", *seed)).numpy()
    permuted: Index = rows[order]
    return permuted


def _shuffled(domains: Sequence[Domain], seed: int) -> Index:
    return _permuted(_pairs(domains), seed)


def _correlated(domains: Sequence[Domain], seed: int) -> Index:
    rows = _shuffled(domains, seed)
    turn = torch.randperm(len(domains[0].classes), generator=generator("classes", seed)).numpy()
    labels = np.array([domains[domain].labels[index] for domain, index in rows])
    by_class: Index = rows[np.argsort(turn[labels], kind="stable")]
    return by_class


def _continual(domains: Sequence[Domain], seed: int) -> Index:
    rows = _pairs(domains)
    return np.concatenate([_permuted(rows[rows[:, 0] == number], seed, number) for number in range(len(domains))])


ORDERS: dict[str, Callable[[Sequence[Domain], int], Index]] = {
    "shuffled": _shuffled,
    "correlated": _correlated,
    "continual": _continual,
    "mixed": _shuffled,
}
