"""The attacker's own model, and the attacked copies of a target domain that are made with it.

The attacker has labelled data like the target domain, of which training sees 80 %, and never sees the deployed model.
"""

from __future__ import annotations

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
    part: int = 64,
    **options: Any,
) -> NDArray[np.uint8]:
    """Attack every image of a domain on the surrogate. The copies are made once and kept.

    Args:
        target: The domain.
        surrogate: The attacker's own model.
        store: Where the copies are kept.
        source: A hash of the surrogate.
        attack: A key of `safer_tta.attacks.ATTACKS` that is not live.
        threat: The budget, as `full_threat` takes it.
        seed: Decides every draw.
        part: How many images are attacked and saved at once.
        **options: Passed on to `ArrayStore.get`, such as `tick`.

    Returns:
        Images (N,3,H,W) of bytes.
    """
    made = ATTACKS.find(attack)
    if made.live:
        raise InvalidValueError(
            f"attack {attack!r} goes through the deployed predictor, batch by batch, so it makes no copies ahead; "
            "expected an attack on a surrogate, such as pgd"
        )
    threat = full_threat(attack, **(threat or {}))
    definition = {"attack": attack, "threat": threat, "seed": seed, "surrogate": source, "domain": target.content}
    definition |= {**made.raised_version, **extensions.code_of(made.make)}
    if surrogate.precision != "float32":
        definition["precision"] = surrogate.precision

    def make(first: int, last: int) -> NDArray[np.uint8]:
        images = torch.from_numpy(np.array(target.images[first:last])).to(surrogate.device)
        labels = torch.from_numpy(target.labels[first:last]).to(surrogate.device)
        return made.perturb(surrogate, images, labels, threat, generator(seed, "attack", first)).cpu().numpy()

    return store.get(definition, len(target), make, part=part, **options)
