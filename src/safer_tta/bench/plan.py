"""A plan is a small TOML file that says which runs make a study. It expands to runs; nothing is computed here.

A plan holds one or more grids. A grid is rows × targets × attack rates × what it varies × seeds.
"""

import copy
import itertools
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from ..errors import InvalidValueError, MissingPackageError, PlanError, UnknownNameError

try:
    from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
except ImportError as error:
    raise MissingPackageError("plans need pydantic: pip install 'safer-tta[bench]'") from error

from .. import methods, predictors
from .._internal.registry import Registry
from ..attacks import ATTACKS, full_threat
from ..data import Dataset, StreamSpec
from ..models.norm import NORMS

PLANS = resources.files("safer_tta.bench") / "plans"
# The paper's studies of one domain are on Art Painting; of the embedded ones, sketch is furthest from the others.
ONE = {"pacs": "art_painting", "synthetic": "sketch"}
LEVELS = 255


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _find(kind: str, name: str, known: Registry[Any]) -> None:
    """Refuse an unknown name; one that a user's own file registers needs that file."""
    if name not in known:
        advice = ". Give the file that registers a name of your own: safer --extension FILE bench ..."
        raise UnknownNameError.of(kind, name, known, advice=advice)


class Attack(BaseModel):
    """How images are attacked: budgets in 255ths of a pixel's range, and the attack's own options beside them."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = "pgd"
    eps: float | None = Field(default=None, gt=0, description="by default the attack's own, mostly 8")
    step: float | None = Field(
        default=None, gt=0, description="by default the attack's own, mostly 2; of an l2 budget 2.5 eps / steps"
    )
    steps: int | None = Field(default=None, ge=1, description="by default the attack's own number")
    norm: Literal["linf", "l2"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _transferred(cls, given: Any) -> Any:
        """Take EOT with no draws of the views as PGD on the surrogate, so that a plan may vary the draws from 0 on."""
        if isinstance(given, dict) and given.get("name") == "eot" and given.get("draws") == 0:
            return {**{name: value for name, value in given.items() if name != "draws"}, "name": "pgd"}
        return given

    @model_validator(mode="after")
    def _possible(self) -> Self:
        _find("attack", self.name, ATTACKS)
        try:
            self.threat(1.0)
        except TypeError as error:  # which pydantic would not explain
            raise InvalidValueError(str(error)) from error
        return self

    def threat(self, effort: float) -> dict[str, Any]:
        """Return what the attack is told; effort: the share of its default steps, or queries, that it takes."""
        known = ATTACKS[self.name]
        counted = "steps" in known.options or not known.own_steps
        steps = max(1, round(known.steps * effort)) if counted else None
        queries = round(known.options["queries"] * effort) if "queries" in known.options else None
        eps, step = (None if value is None else value / LEVELS for value in (self.eps, self.step))
        given = {"eps": eps, "norm": self.norm, "step": step, "steps": self.steps or steps, "queries": queries}
        given |= self.model_extra or {}
        return full_threat(self.name, **{name: value for name, value in given.items() if value is not None})


class Order(_Strict):
    order: Literal["shuffled", "correlated", "continual", "mixed"] = "shuffled"
    draw: Literal["exact", "bernoulli", "late", "batches", "batches-first"] = "exact"
    batch: int | None = Field(default=None, ge=1, description="by default the size's: the paper's 64")
    tail: int = Field(default=0, ge=0, description="images at the end that are never attacked")


class Row(_Strict):
    """A line of a table: a method on a predictor, from a source model."""

    label: str
    method: str = "none"
    predictor: str = "plain"
    norm: str | None = None
    options: dict[str, Any] = {}
    predictor_options: dict[str, Any] = {}
    source: Literal["erm", "robust"] = "erm"
    attack: Attack = Attack()
    stream: Order = Order()

    @model_validator(mode="after")
    def _known(self) -> Self:
        _find("method", self.method, methods.METHODS)
        _find("predictor", self.predictor, predictors.PREDICTORS)
        if self.norm is not None:
            _find("norm", self.norm, NORMS)
        return self


Percent = Annotated[float, AfterValidator(lambda rate: StreamSpec(attack_rate=rate).attack_rate)]


class Grid(_Strict):
    """Rows × targets × rates × what varies."""

    title: str = ""  # the title of its table; by default the plan's
    rows: tuple[Row, ...] = Field(min_length=1)  # the lines of its table
    # "each" domain in turn, "one" of them, a list of them, or "rest": one stream of all domains but the first,
    # which is the only one that the source model sees
    targets: Literal["each", "one", "rest"] | tuple[str, ...] = "one"
    rates: tuple[Percent, ...] = Field(default=(0, 50, 100), min_length=1)  # percent of each batch that is attacked
    # dotted places in a row, such as "predictor_options.views", and the values that each takes
    vary: dict[str, tuple[Any, ...]] = {}
    # varied places of which a table shows the best setting, as the paper's table of signals does
    best_of: tuple[str, ...] = ()
    # the figure that its table shows: of all images, of those that are not the attacker's, or of another part
    show: Literal["accuracy", "accuracy_clean", "accuracy_attacked", "accuracy_benign", "accuracy_tail"] = "accuracy"
    figure: Literal["bars", "lines", "heatmap", "rolling", "pictures", "none"] = "none"  # what is drawn
    paper: str | None = None  # the published study to compare with

    @model_validator(mode="after")
    def _can_be_shown(self) -> Self:
        label, times = Counter(row.label for row in self.rows).most_common(1)[0]
        if times > 1:
            raise InvalidValueError(f"label {label!r} is given to more than one row; expected another for each row")
        unknown = set(self.best_of) - set(self.vary)
        if unknown:
            raise InvalidValueError(f"best_of has {sorted(unknown)[0]!r}, which is not varied")
        for place, values in self.vary.items():
            if not values or any(isinstance(value, (dict, list, tuple)) for value in values):
                raise InvalidValueError(f"{place} varies over {list(values)}; expected numbers, words or true/false")
        named = () if isinstance(self.targets, str) else self.targets
        for name, listed in {"rates": self.rates, "targets": named, **self.vary}.items():
            if len(set(listed)) < len(listed):
                raise InvalidValueError(f"{name} has a value twice: {list(listed)}; expected each once")
        shown = [place for place in self.vary if place not in self.best_of]
        numbers = all(isinstance(v, (int, float)) for place in shown for v in self.vary[place])
        if self.figure == "lines" and (len(shown) > 1 or not numbers):
            raise InvalidValueError("a figure of lines has one axis; expected one varied place at most, with numbers")
        if self.figure == "heatmap" and (len(shown) != 2 or len(self.rows) != 1):
            raise InvalidValueError("a heatmap shows one row over two varied places; expected exactly these")
        if self.show != "accuracy" and (self.best_of or self.figure not in ("bars", "none")):
            raise InvalidValueError(
                f"show {self.show!r} applies to tables and bars only; expected no best_of beside it"
            )
        orders = {row.stream.order for row in self.rows}
        if self.targets == "rest" and not orders <= {"continual", "mixed"}:
            raise InvalidValueError("targets 'rest' streams several domains; expected stream.order continual or mixed")
        return self


class Plan(_Strict):
    title: str
    about: str = ""
    grids: tuple[Grid, ...] = Field(min_length=1)


@dataclass(frozen=True)
class Cell:
    """One run of a plan."""

    grid: int  # the number of its grid
    row: Row  # with what varies filled in
    target: str  # the domain of its stream
    attack_rate: float  # percent of each batch that is attacked
    seed: int
    varied: dict[str, Any] = field(default_factory=dict)  # the values of what varies

    @property
    def settings(self) -> list[str]:
        """The values of what varies, in words."""
        return [f"{place.rpartition('.')[2]} {value}" for place, value in self.varied.items()]


def shipped() -> dict[str, Plan]:
    """Return the plans that come with the package, by name."""
    return {name: load(name) for name in _shipped_names()}


def _shipped_names() -> list[str]:
    return sorted(file.name.removesuffix(".toml") for file in PLANS.iterdir() if file.name.endswith(".toml"))


def load(name: str) -> Plan:
    """Load a shipped plan by its name, or a plan of your own by the path of its file."""
    path = Path(name)
    file = path if path.suffix == ".toml" else PLANS / f"{name}.toml"
    if file is path and not path.is_file():
        raise PlanError(f"the file {name} does not exist; expected a plan's name, or the path of its TOML file")
    if not file.is_file():
        raise UnknownNameError.of("plan", name, _shipped_names(), advice=", or the path of a TOML file")
    try:
        return Plan.model_validate(tomllib.loads(file.read_text()))
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"{name} is not TOML: {error}") from error
    except ValidationError as error:
        raise _plan_error(f"plan {name}", error) from error


def cells(plan: Plan, dataset: Dataset, *, seeds: int = 3, only: Sequence[str] = (), quick: bool = False) -> list[Cell]:
    """Return every run of a plan on a dataset; `quick` takes one target, one seed and the ends of every range."""
    found: list[Cell] = []
    for number, grid in enumerate(plan.grids):
        targets, rates, varied = _targets(grid, dataset, only), grid.rates, list(grid.vary.values())
        if quick:
            targets, rates, varied, seeds = targets[:1], _ends(rates), [_ends(values) for values in varied], 1
        settings = [dict(zip(grid.vary, values, strict=True)) for values in itertools.product(*varied)]
        for target, values, row, rate in itertools.product(targets, settings, grid.rows, rates):
            filled = _filled(row, values)
            found += [Cell(number, filled, target, float(rate), seed, values) for seed in range(seeds)]
    return found


def _targets(grid: Grid, dataset: Dataset, only: Sequence[str]) -> list[str]:
    if grid.targets == "rest" and only:
        raise PlanError("this plan streams several domains as one, so a single target cannot be chosen")
    if grid.targets == "rest":
        return ["+".join(dataset.domains[1:])]
    if grid.targets == "one":
        chosen = [ONE.get(dataset.name, dataset.domains[0])]
    else:
        chosen = list(dataset.domains if grid.targets == "each" else grid.targets)
    for name in (*chosen, *only):
        if name not in dataset.domains:
            raise UnknownNameError.of("target", name, dataset.domains)
    return list(dict.fromkeys(only)) or chosen


def _ends(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return values if len(values) < 3 else (values[0], values[-1])


def _filled(row: Row, values: dict[str, Any]) -> Row:
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
        raise _plan_error(f"{row.label} with {values}", error) from error


def _plan_error(what: str, error: ValidationError) -> PlanError:
    lines, problems = [f"{what}:"], error.errors()
    named = [p for p in problems if p["type"] != "too_short"]  # of a list whose only entry is wrong: message already
    for problem in named or problems:
        place = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            message = "is not a setting of a plan; see the shipped plans for examples"
        lines.append(f"  {place}: {message} (came: {problem['input']!r})"[:400])
    return PlanError("\n".join(lines))
