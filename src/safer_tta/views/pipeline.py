"""Who is drawn, in what order: one pipeline of operators per augmented view, its parameters anew for every image."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Generator, Tensor

from ..registry import Registry
from ..seeds import drawn
from .operators import OPERATORS
from .side_by_side import run_all

WORTHWHILE = 1_000_000  # values in a batch from which threads pay
Preset = Callable[[int, Generator], list[str]]
PRESETS: Registry[Preset] = Registry("preset")
COUNTS = {"gentle": 4}  # operators in a view, of presets that take another number than the paper's three


@dataclass(frozen=True)
class Step:
    """One operator with the parameters of every image; `seed` starts the noise of operators that need some."""

    name: str
    values: Tensor | None
    seed: int

    def __call__(self, images: Tensor, out: Tensor | None = None, *, compile: bool = False) -> Tensor:
        generator = torch.Generator(images.device).manual_seed(self.seed) if OPERATORS[self.name].random else None
        return OPERATORS[self.name](images, self.values, generator=generator, out=out, compile=compile)


@dataclass(frozen=True)
class Draw:
    """All the randomness of one batch: applying a draw twice gives the same views twice."""

    batch: int
    pipelines: tuple[tuple[Step, ...], ...] = ()

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """The operators of each augmented view."""
        return tuple(tuple(step.name for step in pipeline) for pipeline in self.pipelines)

    def filled(self, views: Tensor) -> Draw:
        """This draw with its views already made."""
        return Filled(self.batch, self.pipelines, views)

    def views(self, images: Tensor, out: Tensor | None = None, *, compile: bool = False) -> Tensor:
        """(V,B,3,H,W), written to `out` if given; view 0 is the images themselves."""
        if images.requires_grad and torch.is_grad_enabled():  # an attack through the views
            return torch.stack([images, *(_applied(pipeline, images, None) for pipeline in self.pipelines)])
        views = images.new_empty(1 + len(self.pipelines), *images.shape) if out is None else out
        views[0] = images
        jobs = [
            functools.partial(_applied, pipeline, images, view, compile=compile)
            for pipeline, view in zip(self.pipelines, views[1:], strict=True)
        ]
        if images.device.type == "cpu" and images.numel() >= WORTHWHILE:
            run_all(jobs)
        else:
            for job in jobs:
                job()
        return views


@dataclass(frozen=True)
class Filled(Draw):
    """A draw whose views lie ready."""

    ready: Tensor = field(default_factory=lambda: torch.empty(0))

    def views(self, images: Tensor, out: Tensor | None = None, *, compile: bool = False) -> Tensor:
        return self.ready if out is None else out.copy_(self.ready)


def _applied(pipeline: tuple[Step, ...], images: Tensor, out: Tensor | None, *, compile: bool = False) -> Tensor:
    """Images through a pipeline, the last step straight into its place."""
    for number, step in enumerate(pipeline, start=1):
        # Between compiled steps images keep the precision of their destination.
        between = torch.empty_like(out) if compile and out is not None else None
        images = step(images, out if number == len(pipeline) else between, compile=compile)
    return images


@dataclass(frozen=True)
class Pipeline:
    """How pipelines are drawn: a preset (`released`, `paper` or `gentle`) and the number of operators in each. None: as
    many as belong to the preset, three but for `gentle`, which takes four."""

    preset: str = "released"
    max_operators: int | None = None

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ValueError(f"pipeline {self.preset!r} is unknown; expected one of {', '.join(PRESETS)}")
        if self.max_operators is None:
            object.__setattr__(self, "max_operators", COUNTS.get(self.preset, 3))  # frozen, but not made yet
        most = len(drawable())
        if self.max_operators not in range(1, most + 1):
            raise ValueError(f"max_operators is {self.max_operators}; expected a number from 1 to {most}")

    def draw(self, views: int, batch: int, generator: Generator) -> Draw:
        """Draw `views` pipelines for a batch."""
        return Draw(batch, tuple(self._draw_one(batch, generator) for _ in range(views)))

    def _draw_one(self, batch: int, generator: Generator) -> tuple[Step, ...]:
        names = PRESETS[self.preset](cast(int, self.max_operators), generator)
        return tuple(Step(name, OPERATORS[name].sample(batch, generator), drawn(generator)) for name in names)


def preset(function: Preset) -> Preset:
    """Register a function of (number of operators, generator) that names the operators of one pipeline."""
    PRESETS[function.__name__] = function
    return function


@preset
def released(count: int, generator: Generator) -> list[str]:
    """Noise first, then one smoothing operator, then distinct ones from the rest in random order."""
    smoothing = _choose(_smoothing(), 1, generator)
    first = ["gaussian_noise", *smoothing] if count > 1 else smoothing
    rest = [name for name in drawable() if name not in first]
    return first + _choose(rest, count - len(first), generator)


@preset
def paper(count: int, generator: Generator) -> list[str]:
    """One smoothing operator and distinct others, all in random order; noise is not forced."""
    smoothing = _choose(_smoothing(), 1, generator)
    chosen = smoothing + _choose([name for name in drawable() if name not in smoothing], count - 1, generator)
    return _choose(chosen, count, generator)


# The operators whose views were read best (docs/beyond.md has the table); left out are tones that are inverted,
# solarised, equalised or cut to a few steps, and turned images with black corners.
HARMLESS = (
    "brightness", "contrast", "saturation", "sharpness", "shear_x", "shear_y", "translate_x", "translate_y",
)  # fmt: skip


@preset
def gentle(count: int, generator: Generator) -> list[str]:
    """Noise first, then one smoothing operator, harmless ones in random order, and mirrored half of the time; others
    only when these are used up. Not the paper's."""
    smoothing = _choose(_smoothing(), 1, generator)
    first = ["gaussian_noise", *smoothing] if count > 1 else smoothing
    last = ["flip"] if count > 2 else []
    others = [name for name in drawable() if name not in (*first, *HARMLESS)]
    rest = _choose([*HARMLESS], len(HARMLESS), generator) + _choose(others, len(others), generator)
    return first + rest[: count - len(first) - len(last)] + last


def drawable() -> list[str]:
    """The operators that presets draw from: the paper's, and those that users register."""
    return [name for name, operator in OPERATORS.items() if operator.drawn]


def _smoothing() -> list[str]:
    return [name for name in drawable() if OPERATORS[name].smoothing]


def _choose(names: list[str], count: int, generator: Generator) -> list[str]:
    return [names[i] for i in torch.randperm(len(names), generator=generator)[:count].tolist()]
