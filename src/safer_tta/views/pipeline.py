"""Which operators make a view, and in what order: one pipeline for each view, with new parameters for every image."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Generator, Tensor

from .._internal.registry import Registry
from .._internal.seeds import draw_seed
from ..errors import InvalidValueError
from .operators import OPERATORS
from .threads import run_all

WORTHWHILE = 1_000_000  # the number of values in a batch from which threads pay


@dataclass(frozen=True)
class Preset:
    """A way to draw the operators of a view."""

    name: str  # the name it is registered under
    function: Callable[[int, Generator], list[str]]  # returns names of operators, given their number and a generator
    operators: int = 3  # how many operators a view has by default
    version: int = 1  # raised when it draws differently; a part of the names of runs


PRESETS: Registry[Preset] = Registry("preset", Preset)
register = PRESETS.register


@dataclass(frozen=True)
class Stage:
    """One operator with its parameter for every image, and the seed of its noise if it is random."""

    name: str
    values: Tensor | None
    seed: int

    def __call__(self, images: Tensor, out: Tensor | None = None, *, compile: bool = False) -> Tensor:
        generator = torch.Generator(images.device).manual_seed(self.seed) if OPERATORS[self.name].random else None
        return OPERATORS[self.name](images, self.values, generator=generator, out=out, compile=compile)


@dataclass(frozen=True)
class Draw:
    """All the randomness of one batch: applying a draw twice gives the same views twice."""

    batch: int  # the number of images
    pipelines: tuple[tuple[Stage, ...], ...] = ()  # the stages of each augmented view
    seed: int = 0  # starts what a method draws besides the views

    def generator(self) -> Generator:
        """Return a generator for what a method draws besides the views."""
        return torch.Generator().manual_seed(self.seed)

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """The operators of each augmented view."""
        return tuple(tuple(step.name for step in pipeline) for pipeline in self.pipelines)

    def filled(self, views: Tensor) -> Draw:
        """Return this draw with its views already made."""
        return Filled(self.batch, self.pipelines, self.seed, views)

    def views(self, images: Tensor, out: Tensor | None = None, *, compile: bool = False) -> Tensor:
        """Make the views (V,B,3,H,W) of a batch, in `out` unless gradients are needed; view 0 is the images."""
        if images.requires_grad and torch.is_grad_enabled():  # an attack through the views
            return torch.stack([images, *(_apply(pipeline, images, None) for pipeline in self.pipelines)])
        views = images.new_empty(1 + len(self.pipelines), *images.shape) if out is None else out
        views[0] = images
        jobs = [
            functools.partial(_apply, pipeline, images, view, compile=compile)
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
    """A draw whose views are already made."""

    ready: Tensor = field(default_factory=lambda: torch.empty(0))

    def views(self, images: Tensor, out: Tensor | None = None, *, compile: bool = False) -> Tensor:
        return self.ready if out is None else out.copy_(self.ready)


def _apply(pipeline: tuple[Stage, ...], images: Tensor, out: Tensor | None, *, compile: bool = False) -> Tensor:
    """Pass images through a pipeline; the last stage writes to `out`."""
    for number, step in enumerate(pipeline, start=1):
        # Between compiled stages, images keep the precision of their destination.
        between = torch.empty_like(out) if compile and out is not None else None
        images = step(images, out if number == len(pipeline) else between, compile=compile)
    return images


@dataclass(frozen=True)
class Pipeline:
    """How the operators of each view are drawn."""

    preset: str = "released"  # "released", "paper", "gentle", or a preset that was registered
    max_operators: int | None = None  # how many operators a view has. By default this is up to the preset

    def __post_init__(self) -> None:
        PRESETS.find(self.preset)
        if self.max_operators is None:
            object.__setattr__(self, "max_operators", PRESETS[self.preset].operators)  # frozen, but not made yet
        most = len(drawable_operators())
        if self.max_operators not in range(1, most + 1):
            raise InvalidValueError(f"max_operators is {self.max_operators}; expected a whole number from 1 to {most}")

    @property
    def settings(self) -> dict[str, Any]:
        """The preset, and what differs from its defaults."""
        own = {} if self.max_operators == PRESETS[self.preset].operators else {"max_operators": self.max_operators}
        return {"preset": self.preset, **own}

    def draw(self, views: int, batch: int, generator: Generator) -> Draw:
        """Draw `views` pipelines for a batch."""
        return Draw(batch, tuple(self._draw_one(batch, generator) for _ in range(views)))

    def _draw_one(self, batch: int, generator: Generator) -> tuple[Stage, ...]:
        names = PRESETS[self.preset].function(cast(int, self.max_operators), generator)
        return tuple(Stage(name, OPERATORS[name].sample(batch, generator), draw_seed(generator)) for name in names)


@register("released")
def released(count: int, generator: Generator) -> list[str]:
    """Draw noise first, then one smoothing operator, then others in random order."""
    smoothing = _choose(_smoothing(), 1, generator)
    first = ["gaussian_noise", *smoothing] if count > 1 else smoothing
    rest = [name for name in drawable_operators() if name not in first]
    return first + _choose(rest, count - len(first), generator)


@register("paper")
def paper(count: int, generator: Generator) -> list[str]:
    """Draw one smoothing operator and others, all in random order; noise is not forced."""
    smoothing = _choose(_smoothing(), 1, generator)
    chosen = smoothing + _choose([name for name in drawable_operators() if name not in smoothing], count - 1, generator)
    return _choose(chosen, count, generator)


# The operators whose views models classify best. The others invert, solarise, equalise or posterise an image, or
# rotate it and leave black corners.
HARMLESS = (
    "brightness", "contrast", "saturation", "sharpness", "shear_x", "shear_y", "translate_x", "translate_y",
)  # fmt: skip


@register("gentle", operators=4)
def gentle(count: int, generator: Generator) -> list[str]:
    """Draw noise, one smoothing operator, harmless operators in random order, and a flip. It is not in the paper."""
    smoothing = _choose(_smoothing(), 1, generator)
    first = ["gaussian_noise", *smoothing] if count > 1 else smoothing
    last = ["flip"] if count > 2 else []
    others = [name for name in drawable_operators() if name not in (*first, *HARMLESS)]
    rest = _choose([*HARMLESS], len(HARMLESS), generator) + _choose(others, len(others), generator)
    return first + rest[: count - len(first) - len(last)] + last


def drawable_operators() -> list[str]:
    """Return the operators that presets draw from: the paper's, and those that users register."""
    return [name for name, operator in OPERATORS.items() if operator.drawn]


def _smoothing() -> list[str]:
    return [name for name in drawable_operators() if OPERATORS[name].smoothing]


def _choose(names: list[str], count: int, generator: Generator) -> list[str]:
    return [names[i] for i in torch.randperm(len(names), generator=generator)[:count].tolist()]
