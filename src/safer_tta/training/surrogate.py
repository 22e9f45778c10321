"""The attacker's own model, and the attacked copies of a target domain that are made with it.

The attacker has labelled data like the target domain, of which training sees 80 %, and never sees the deployed model.
"""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import extensions
from .._internal.seeds import generator
from ..attacks import ATTACKS
from ..attacks.threat import full_threat
from ..data import ArrayStore, Domain
from ..errors import InvalidValueError
from ..models import Classifier
from .source import source_recipe
from .trainer import Recipe, train

OTHER_SEEDS = 1000  # the attacker's seeds are not the defender's


def surrogate_recipe(dataset: str, **changes: Any) -> Recipe:
    """Return the attacker's recipe: that of a source model, for one domain, with another seed."""
    one_domain = {"steps": 150, "batch": 64} if dataset == "synthetic" else {}
    changes = {**one_domain, **changes}
    return source_recipe(dataset, **{**changes, "seed": changes.get("seed", 0) + OTHER_SEEDS})


def train_surrogate(target: Domain, recipe: Recipe, path: str | os.PathLike[str], **options: Any) -> Classifier:
    """Train the attacker's model on the target domain; the arguments are those of `train_source`."""
    return train([target], recipe, path, **options)


def attacked_copies(
    target: Domain,
    surrogate: Classifier,
    store: ArrayStore,
    *,
    source: str,
    attack: str = "pgd",
    threat: Mapping[str, Any] | None = None,
    seed: int = 0,
    **options: Any,
) -> NDArray[np.uint8]:
    """Return attacked copies (N,3,H,W) of all images of a domain; they are made once on the surrogate and kept.

    `source` is a hash of the surrogate, `threat` is what `full_threat` takes, and `options` are those of `store.get`.
    """
    made = ATTACKS.find(attack)
    if made.live:
        raise InvalidValueError(
            f"attack {attack!r} goes through the deployed predictor, batch by batch, so it makes no copies ahead; "
            "expected an attack on a surrogate, such as pgd"
        )
    threat = full_threat(attack, **(threat or {}))
    definition = {"attack": attack, "threat": threat, "seed": seed, "surrogate": source, "domain": target.content}
    definition |= {**made.raised_versions(threat), **extensions.code_of_attack(attack, threat)}
    if surrogate.precision != "float32":
        definition["precision"] = surrogate.precision

    def make(first: int, last: int) -> NDArray[np.uint8]:
        images = torch.from_numpy(np.array(target.images[first:last])).to(surrogate.device)
        labels = torch.from_numpy(target.labels[first:last]).to(surrogate.device)
        return made.perturb(surrogate, images, labels, threat, generator(seed, "attack", first)).cpu().numpy()

    return store.get(definition, len(target), make, **options)
