"""What a trained model is named after: the data, the domains that it saw, and its recipe.

A plan knows these before anything is trained, and a trained model's file holds them, so both name the same runs.
"""

import functools
import os
from collections.abc import Iterable, Mapping
from typing import Any

from .._internal.signatures import changed_fields
from ..data.store import digest_file
from ..models.building import code_of
from ..models.card import read_card
from .trainer import Recipe, recipe_of

ELSEWHERE = "hash:"  # stands before the hash of a file that is not on this machine


@functools.lru_cache(maxsize=8)
def hash_weights(weights: str) -> str:
    """Return the hash of a weights file; `hash:...` names a file that is not here by its hash."""
    return weights.removeprefix(ELSEWHERE) if weights.startswith(ELSEWHERE) else digest_file(weights)


def describe_model(identity: str, domains: Iterable[str], recipe: Recipe) -> dict[str, Any]:
    """Return the definition of a model that is trained on these domains of the dataset with this identity."""
    described = changed_fields(recipe)
    if recipe.weights is not None:
        described["weights"] = hash_weights(recipe.weights)
    code = code_of(recipe.architecture)
    return {"data": identity, "domains": sorted(domains), "recipe": described, **({"code": code} if code else {})}


def definition_of(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the definition of a trained model; of any other the hash of its file, and of the code that builds it."""
    known = recipe_of(path)
    if not known.get("origin"):
        code = code_of(read_card(path).architecture)
        return {"file": digest_file(path), **({"code": code} if code else {})}
    recipe = known["recipe"]
    weights = None if recipe["weights"] is None else ELSEWHERE + recipe["weights"]
    return describe_model(known["origin"], known["domains"], Recipe(**{**recipe, "weights": weights}))


def kind_of(definition: Mapping[str, Any]) -> str:
    """Return "erm", "robust", or the hash of a file that was trained on other data."""
    if "file" in definition:
        return str(definition["file"])
    return "robust" if definition["recipe"].get("attack") else "erm"
