"""What is audited: a method on a predictor around a model, which starts afresh for every threat."""

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from .. import extensions, predictors
from .._internal.hashing import hash_bytes
from .._internal.safetensors_io import raw_bytes
from ..api import adapt, preferred_norm
from ..comparison.run import SHARED
from ..errors import InvalidTypeError
from ..methods import METHODS, Method
from ..models import Classifier
from ..models.building import code_of
from ..models.norm import NORMS
from ..predictors import Predictor


class Defence:
    """A method on a predictor around a model.

    Args:
        model: What `adapt` takes; it is not changed.
        method: What `adapt` takes.
        predictor: A name, or a dict with a name and options.
        norm: What `adapt` takes.
        seed: Decides all draws.
        options: Further arguments of `adapt`.
    """

    def __init__(
        self, model: nn.Module, method: str, predictor: str | Mapping[str, Any], norm: str | None, seed: int,
        options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        if isinstance(predictor, Predictor):
            raise InvalidTypeError(
                f"predictor is {type(predictor).__name__}; expected a name or a dict such as "
                "{'name': 'safer', 'views': 6}, since rows are named by it"
            )
        self.model, self.method, self.predictor, self.norm = model, method, predictor, norm
        self.seed, self.options = seed, dict(options)
        started = self.start()
        name, own = predictors.parse(predictor)
        self.name = " ".join([f"{method} on {name}", *(f"{option}={value}" for option, value in own.items())])
        self.suspects = started.predictor.estimates_suspicion
        self.passes = METHODS[method].cost.passes
        self.views = 1 + int(started.predictor.settings.get("views", 0))
        self.definition = self._describe(started)

    def start(self) -> Method:
        """Return it as it is before the first batch."""
        return self._adapt(self.method, self.predictor, self.norm, self.options)

    def alone(self) -> Method:
        """Return the model as it is, which does not adapt."""
        return self._adapt("none", "plain", None, self._shared())

    def surrogate(self, model: nn.Module | None) -> Classifier:
        """Return the attacker's own model; without one it is the model itself, as it was before it adapted."""
        if model is None:
            return self.alone().classifier
        shared = {} if isinstance(model, Classifier) else self._shared()
        return adapt(model, "none", "plain", seed=self.seed, **shared).classifier.to(self.alone().classifier.device)

    def _adapt(self, method: str, predictor: Any, norm: str | None, options: Mapping[str, Any]) -> Method:
        with warnings.catch_warnings():
            if hasattr(self, "definition"):  # what there is to say was said at the first start
                warnings.simplefilter("ignore")
            return adapt(self.model, method, predictor, norm=norm, seed=self.seed, **options)

    def _shared(self) -> dict[str, Any]:
        return {name: self.options[name] for name in SHARED & self.options.keys()}

    def _describe(self, started: Method) -> dict[str, Any]:
        """Return all that its answers depend on, as plain data."""
        norm = self.norm or preferred_norm(self.method, started.predictor)
        versions = {"method": started.version, "predictor": started.predictor.version, **started.predictor.versions}
        if norm is not None:
            versions["norm"] = NORMS[norm].version
        described = {
            "model": fingerprint(self.alone().classifier),
            "method": self.method,
            "options": started.settings,
            "predictor": predictors.parse(self.predictor)[0],
            "predictor_options": started.predictor.settings,
            "norm": norm,
            "precision": started.classifier.precision,
            "versions": versions,
        }
        return described | extensions.code(described)


def fingerprint(classifier: Classifier) -> str:
    """Return a hash of a model: its layers and its numbers, what normalises its images, and code of the user's own."""
    normalised = [None if t is None else t.flatten().tolist() for t in (classifier.mean, classifier.std)]
    code = "" if classifier.card is None else code_of(classifier.card.architecture)
    state = classifier.model.state_dict()
    described = repr((classifier.model, classifier.head_name, normalised, code, list(state)))
    return hash_bytes([described.encode(), *map(raw_bytes, state.values())]).hex()
