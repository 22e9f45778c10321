"""A plan: a small TOML file that says which runs make a study. It expands to runs; nothing is computed here.

A plan holds one grid or several. A grid is rows × targets × attack rates × whatever it varies × seeds.
"""

from __future__ import annotations

import copy
import difflib
import itertools
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

try:
    from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
except ImportError as error:
    raise ImportError("plans need pydantic: pip install 'safer-tta[bench]'") from error

from .. import methods, predictors
from ..api import NORMS, split_name
from ..attacks import ATTACKS
from ..data import Dataset, StreamSpec

PLANS = resources.files("safer_tta.bench") / "plans"
# The paper's studies of one domain are on Art Painting; of the embedded ones, sketch is furthest from the others.
ONE = {"pacs": "art_painting", "synthetic": "sketch"}


class PlanError(ValueError):
    """A plan that cannot be carried out; the message says where and why."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Attack(_Strict):
    """How images are attacked: budgets in 255ths of a pixel's range. eot attacks the deployed predictor, live."""

    name: str = "pgd"
    eps: float = Field(default=8, gt=0)
    step: float | None = Field(default=None, gt=0, description="by default 2; of an l2 budget 2.5 eps / steps")
    steps: int | None = Field(default=None, ge=1, description="by default the size's: the paper's 20, and 10 for eot")
    norm: Literal["linf", "l2"] = "linf"
    draws: int = Field(default=1, ge=0, description="of the views per step of eot; 0 is the transferred attack")

    @field_validator("name")
    @classmethod
    def _known_attack(cls, name: str) -> str:
        _known("attack", name, [*ATTACKS, "eot"])
        return name

    @model_validator(mode="after")
    def _heard(self) -> Self:
        if self.name in ATTACKS and ATTACKS[self.name].own_steps and (self.step or self.steps):
            raise ValueError(f"{self.name} chooses its steps itself; leave step and steps out")
        return self


class Order(_Strict):
    """How images arrive."""

    order: Literal["shuffled", "correlated", "continual", "mixed"] = "shuffled"
    draw: Literal["exact", "bernoulli", "late"] = "exact"
    batch: int | None = Field(default=None, ge=1, description="by default the size's: the paper's 64")


class Row(_Strict):
    """One line of a table: a method on a predictor, from a source model."""

    label: str
    method: str = "none"
    predictor: str = "plain"
    options: dict[str, Any] = {}
    predictor_options: dict[str, Any] = {}
    source: Literal["erm", "robust"] = "erm"
    attack: Attack = Attack()
    stream: Order = Order()

    @field_validator("method")
    @classmethod
    def _known_method(cls, name: str) -> str:
        method, norm = split_name(name)
        _known("method", method, methods.METHODS)
        if norm:
            _known("normalisation", norm, NORMS)
        return name

    @field_validator("predictor")
    @classmethod
    def _known_predictor(cls, name: str) -> str:
        _known("predictor", name, predictors.PREDICTORS)
        return name


class Grid(_Strict):
    """Rows × targets × rates × what varies.

    targets: each domain in turn, one of them, or several as one stream ("rest": the source model sees the first alone).
    vary: dotted places in a row, such as "predictor_options.views", and the values each takes.
    best_of: varied places of which a table shows the best setting, as the paper's table of signals does.
    figure: what is drawn. paper: the published study to compare with.
    """

    title: str = ""
    rows: tuple[Row, ...] = Field(min_length=1)
    targets: Literal["each", "one", "rest"] | tuple[str, ...] = "one"
    rates: tuple[float, ...] = Field(default=(0, 50, 100), min_length=1)
    vary: dict[str, tuple[Any, ...]] = {}
    best_of: tuple[str, ...] = ()
    figure: Literal["bars", "lines", "heatmap", "rolling", "pictures", "none"] = "none"
    paper: str | None = None

    @field_validator("rates")
    @classmethod
    def _percent(cls, rates: tuple[float, ...]) -> tuple[float, ...]:
        for rate in rates:
            StreamSpec(attack_rate=rate)
        return rates

    @field_validator("rows")
    @classmethod
    def _distinct(cls, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        twice = [label for label, count in Counter(row.label for row in rows).items() if count > 1]
        if twice:
            raise ValueError(f"label {twice[0]!r} stands on more than one row; expected each row to have its own")
        return rows

    @model_validator(mode="after")
    def _can_be_shown(self) -> Self:
        unknown = set(self.best_of) - set(self.vary)
        if unknown:
            raise ValueError(f"best_of has {sorted(unknown)[0]!r}, which is not varied")
        for place, values in self.vary.items():
            if not values or any(isinstance(value, (dict, list, tuple)) for value in values):
                raise ValueError(f"{place} varies over {list(values)}; expected numbers, words or true/false")
        named = () if isinstance(self.targets, str) else self.targets
        for name, listed in {"rates": self.rates, "targets": named, **self.vary}.items():
            if len(set(listed)) < len(listed):
                raise ValueError(f"{name} has a value twice: {list(listed)}; expected each once")
        shown = [place for place in self.vary if place not in self.best_of]
        numbers = all(isinstance(v, (int, float)) for place in shown for v in self.vary[place])
        if self.figure == "lines" and (len(shown) > 1 or not numbers):
            raise ValueError("a figure of lines has one axis; expected at most one varied place, and numbers there")
        if self.figure == "heatmap" and (len(shown) != 2 or len(self.rows) != 1):
            raise ValueError("a heatmap shows one row over two varied places; expected exactly these")
        orders = {row.stream.order for row in self.rows}
        if self.targets == "rest" and not orders <= {"continual", "mixed"}:
            raise ValueError("targets 'rest' is a stream of several domains; expected stream.order continual or mixed")
        return self


class Plan(_Strict):
    title: str
    about: str = ""
    grids: tuple[Grid, ...] = Field(min_length=1)


@dataclass(frozen=True)
class Cell:
    """One run of a plan, and where it stands in it."""

    grid: int
    row: Row  # with what varies filled in
    target: str
    attack_rate: float
    seed: int
    varied: dict[str, Any] = field(default_factory=dict)


def shipped() -> dict[str, Plan]:
    """The plans that come with the package, by name."""
    names = sorted(file.name.removesuffix(".toml") for file in PLANS.iterdir() if file.name.endswith(".toml"))
    return {name: load(name) for name in names}


def load(name: str) -> Plan:
    """A shipped plan by its name, or any by the path of its file."""
    path = Path(name)
    file = path if path.suffix == ".toml" else PLANS / f"{name}.toml"
    if not file.is_file():
        known = sorted(f.name.removesuffix(".toml") for f in PLANS.iterdir() if f.name.endswith(".toml"))
        raise PlanError(f"there is no plan {name!r}{_near(name, known)}; expected one of {', '.join(known)}, or a file")
    try:
        return Plan.model_validate(tomllib.loads(file.read_text()))
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"{name} is not TOML: {error}") from error
    except ValidationError as error:
        raise PlanError(f"plan {name}:\n" + "\n".join(_explained(error))) from error


def cells(plan: Plan, dataset: Dataset, *, seeds: int = 3, only: Sequence[str] = (), quick: bool = False) -> list[Cell]:
    """Every run of a plan on a dataset. only: these targets; quick: one target and seed, the ends of every range."""
    found: list[Cell] = []
    for number, grid in enumerate(plan.grids):
        targets = _targets(grid, dataset, only)
        for target in targets[:1] if quick else targets:
            for values in _settings(grid, quick):
                for row in grid.rows:
                    for rate in _ends(grid.rates) if quick else grid.rates:
                        found += [
                            Cell(number, _filled(row, values), target, float(rate), seed, values)
                            for seed in range(1 if quick else seeds)
                        ]
    return found


def _targets(grid: Grid, dataset: Dataset, only: Sequence[str]) -> list[str]:
    if grid.targets == "rest" and only:
        raise PlanError("this plan streams several domains as one; it has no single target to choose")
    if grid.targets == "rest":
        return ["+".join(dataset.domains[1:])]
    if grid.targets == "one":
        chosen = [ONE.get(dataset.name, dataset.domains[0])]
    else:
        chosen = list(dataset.domains if grid.targets == "each" else grid.targets)
    for name in (*chosen, *only):
        if name not in dataset.domains:
            raise PlanError(f"{dataset.name} has no domain {name!r}; expected one of {', '.join(dataset.domains)}")
    return list(dict.fromkeys(only)) or chosen


def _settings(grid: Grid, quick: bool) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*(_ends(v) if quick else v for v in grid.vary.values())):
        yield dict(zip(grid.vary, values, strict=True))


def _ends(values: Sequence[Any]) -> Sequence[Any]:
    return values if len(values) < 3 else (values[0], values[-1])


def _filled(row: Row, values: dict[str, Any]) -> Row:
    """The row with every varied place filled in."""
    content = copy.deepcopy(row.model_dump())
    for place, value in values.items():
        *path, last = place.split(".")
        inner = content
        for part in path:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise PlanError(f"{row.label}: {place} varies inside {part!r}, which is {inner!r}; expected a table")
        inner[last] = value
    try:
        return Row.model_validate(content)
    except ValidationError as error:
        raise PlanError(f"{row.label} with {values}:\n" + "\n".join(_explained(error))) from error


def _known(kind: str, name: str, known: Any) -> None:
    if name not in known:
        own = "" if _near(name, known) else ". Your own? Give its file: safer --extension FILE bench …"
        raise ValueError(
            f"{kind} {name!r} is unknown{_near(name, known)}; expected one of {', '.join(sorted(known))}{own}"
        )


def _near(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _explained(error: ValidationError) -> Iterator[str]:
    problems = error.errors()
    named = [p for p in problems if p["type"] != "too_short"]  # of a list whose only entry is wrong: said already
    for problem in named or problems:
        place = ".".join(str(part) for part in problem["loc"])
        said = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            said = "is no setting of a plan here; see `safer bench list` and the shipped plans for those there are"
        yield f"  {place}: {said} (came: {problem['input']!r})"[:400]
