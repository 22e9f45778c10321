"""One definition of a run: a source model, a stream under attack, and a method on a predictor.

Plans, `safer run` and the demo all make experiments, and an experiment's name follows from what it is. So a run that
one of them made is found by the others.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from .. import extensions, methods, predictors
from .._internal.defaults import METHOD, PREDICTOR
from .._internal.signatures import changed_fields
from ..api import build, preferred_norm
from ..attacks import ATTACKS
from ..data import StreamSpec
from ..data.store import digest
from ..data.streams import WHOLE_BATCHES
from ..methods import Method
from ..models import Classifier, zoo
from ..models.norm import NORMS
from ..training.definitions import kind_of

Definition = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class AttackOn:
    """An attack on the images of a stream."""

    name: str  # a key of `safer_tta.attacks.ATTACKS`
    threat: Mapping[str, Any]  # the budget and all other arguments of the attack
    # definitions of the attacker's own models, one for each domain; none for a live attack
    surrogates: tuple[Definition, ...] = ()

    def describe(self) -> dict[str, Any]:
        own = {"surrogates": [dict(surrogate) for surrogate in self.surrogates]} if self.surrogates else {}
        return {"name": self.name, "threat": self.changed_threat, **own, **extensions.code_of(ATTACKS[self.name].make)}

    @property
    def changed_threat(self) -> dict[str, Any]:
        """The budget, and those of the attack's own options that differ from their defaults."""
        options = ATTACKS[self.name].options
        return {key: value for key, value in self.threat.items() if key not in options or value != options[key]}


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A run, before it is made."""

    data: str  # the identity of the dataset
    target: str  # the domain of the stream; several are joined by "+"
    source: Definition  # the definition of the source model
    method: str = METHOD  # a key of `safer_tta.methods.METHODS`
    predictor: str = PREDICTOR  # a key of `safer_tta.predictors.PREDICTORS`
    norm: str | None = None  # what replaces the batch-norm layers; None for what the predictor prefers
    options: Mapping[str, Any] = field(default_factory=dict)  # the method's own options
    predictor_options: Mapping[str, Any] = field(default_factory=dict)  # the predictor's own options
    stream: StreamSpec = field(default_factory=StreamSpec)  # how images arrive. Its seed decides all draws of the run
    attack: AttackOn | None = None  # what is done to the images; None if nothing is
    images: int | None = None  # how many images of each domain are drawn by the seed; None for all
    precision: str = "float32"  # in which images pass through the models, "float32" or "bfloat16"

    @property
    def attacked_live(self) -> bool:
        """Whether an attacker who knows the defence attacks every batch as it comes."""
        return self.attack is not None and ATTACKS[self.attack.name].live

    @property
    def poisons(self) -> bool:
        """Whether what counts is the accuracy on the images of others, and of those who come later."""
        attacked = self.attack is not None and ATTACKS[self.attack.name].poisons
        return attacked or self.stream.draw in WHOLE_BATCHES or self.stream.tail > 0

    @property
    def targets(self) -> list[str]:
        return self.target.split("+")

    @property
    def used_norm(self) -> str | None:
        """What replaces the batch-norm layers: what is asked for, or else what the predictor prefers."""
        return self.norm or self._parts()["norm"]

    @functools.cached_property
    def name(self) -> str:
        """The run's name: it changes with the versions of its parts, and with options that differ from defaults."""
        return digest(self.describe())

    def describe(self) -> dict[str, Any]:
        """Return it as plain data, without defaults, so that a new option with a default renames no run."""
        described: dict[str, Any] = {
            "data": self.data,
            "target": self.target,
            "source": dict(self.source),
            "method": self.method,
            "predictor": self.predictor,
            "stream": {"seed": self.stream.seed, **changed_fields(self.stream)},
        }
        optional = {
            "norm": self.norm,
            **self._settings(),
            "attack": None if self.attack is None else self.attack.describe(),
            "images": self.images,
            "precision": None if self.precision == "float32" else self.precision,
        }
        described |= {key: value for key, value in optional.items() if value}
        return described | extensions.code(described)

    def copies(self) -> list[dict[str, Any]]:
        """Return the definition of each domain's attacked copies; none for a live attack."""
        if self.attack is None:
            return []
        shared = {
            "attack": self.attack.name,
            "threat": self.attack.changed_threat,
            "images": self.images,
            "seed": self.stream.seed,
            **({} if self.precision == "float32" else {"precision": self.precision}),
            **ATTACKS[self.attack.name].raised_versions(self.attack.threat),
            **extensions.code_of_attack(self.attack.name, self.attack.changed_threat),
        }
        pairs = zip(self.targets, self.attack.surrogates, strict=False)
        return [{"target": target, "surrogate": dict(surrogate), **shared} for target, surrogate in pairs]

    @property
    def views(self) -> int:
        """How many augmented views of an image its predictor makes."""
        return int({**_usual_settings(self.predictor), **self.predictor_options}.get("views", 0))

    @property
    def passes(self) -> float:
        """How many forward passes an image costs, roughly: for estimates of time."""
        views = 1 + self.views
        passes = methods.METHODS[self.method].cost.passes * views
        if self.attack is not None and self.attacked_live:
            known = ATTACKS[self.attack.name]
            passes += known.cost(self.attack.threat) * (views if known.memory is None else 1)
        return float(passes)

    @classmethod
    def from_description(cls, described: Definition) -> Self:
        """Return the experiment that `describe` was asked of."""
        given = {f.name: described[f.name] for f in dataclasses.fields(cls) if f.name in described}
        given["stream"] = StreamSpec(**given["stream"])
        if "attack" in given:
            name, surrogates = given["attack"]["name"], tuple(given["attack"].get("surrogates", ()))
            threat = {**ATTACKS[name].options, **given["attack"]["threat"]}
            given["attack"] = AttackOn(name=name, threat=threat, surrogates=surrogates)
        return cls(**given)

    def build(self, classifier: Classifier) -> Method:
        """Return the method, ready to adapt this very classifier."""
        classifier.accelerate(precision=self.precision)
        predictor, options = {"name": self.predictor, **self.predictor_options}, dict(self.options)
        return build(classifier, self.method, predictor, norm=self.norm, seed=self.stream.seed, options=options)

    def fields(self) -> dict[str, Any]:
        """Return what a row says of the run, beside its figures."""
        settings = self._settings()
        attack, threat = (None, {}) if self.attack is None else (self.attack.name, self.attack.threat)
        return {
            "target": self.target,
            "source": kind_of(self.source),
            "method": self.method,
            "norm": self.used_norm,
            "options": settings["options"],
            "predictor": self.predictor,
            "predictor_options": settings["predictor_options"],
            "attack": attack,
            "eps": threat.get("eps"),
            "threat": dict(threat) or None,
            **dataclasses.asdict(self.stream),
            "precision": self.precision,
        }

    def _settings(self) -> dict[str, dict[str, Any]]:
        """Return the options that differ from defaults, and the versions that have been raised."""
        parts = self._parts()
        found = {name: parts[name] for name in ("options", "predictor_options", "versions")}
        if self.attack is not None:
            raised = ATTACKS[self.attack.name].raised_versions(self.attack.threat)
            found["versions"] |= {f"attack {part}": version for part, version in raised.items()}
        if self.used_norm is not None and NORMS.find(self.used_norm).version != 1:
            found["versions"]["norm"] = NORMS[self.used_norm].version
        return found

    def _parts(self) -> dict[str, Any]:
        parts = (self.method, self.options, self.predictor, self.predictor_options)
        return json.loads(_settings(json.dumps(parts)))  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=4096)
def _settings(parts: str) -> str:
    """Build the method on a small network and ask for its settings, and for the norm that it prefers."""
    method, options, predictor, predictor_options = json.loads(parts)
    asked = predictors.create(predictor, _small_network(), seed=0, **predictor_options)
    made = methods.create(method, asked, **options)
    usual = _usual_settings(predictor)
    changed = {key: value for key, value in asked.settings.items() if value != usual.get(key)}
    versions = {"method": made.version, "predictor": asked.version, **asked.versions}
    raised = {part: version for part, version in versions.items() if version != 1}
    norm = preferred_norm(method, asked)
    return json.dumps({"options": made.settings, "predictor_options": changed, "versions": raised, "norm": norm})


def _small_network() -> Classifier:
    return Classifier(zoo.create("small", num_classes=7))


@functools.cache
def _usual_settings(predictor: str) -> dict[str, Any]:
    return predictors.create(predictor, _small_network(), seed=0).settings
