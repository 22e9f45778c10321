"""The attacker's own model, and the attacked copies it makes of a target domain.

The attacker has labelled data like the target domain: 80 % of it. It never sees the deployed model.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import extensions
from ..attacks import ATTACKS
from ..attacks.pgd import check_threat
from ..data import ArrayStore, Domain
from ..models import Classifier
from ..seeds import generator
from .source import source_recipe
from .trainer import Recipe, train

OTHER_SEEDS = 1000  # the attacker's seeds are not the defender's
THREAT = {"eps": 8 / 255, "step": 2 / 255, "steps": 20, "norm": "linf"}


def surrogate_recipe(dataset: str, **changes: Any) -> Recipe:
    """The attacker's settings: those of a source model, on one domain, from a seed of its own."""
    one_domain = {"steps": 150, "batch": 64} if dataset == "synthetic" else {}
    changes = {**one_domain, **changes}
    return source_recipe(dataset, **{**changes, "seed": changes.get("seed", 0) + OTHER_SEEDS})


def train_surrogate(target: Domain, recipe: Recipe, path: str | os.PathLike[str], **options: Any) -> Classifier:
    return train([target], recipe, path, **options)


def full_threat(**changes: Any) -> dict[str, Any]:
    """The paper's threat with changes; an l2 budget brings its own step unless one is given."""
    threat = {**THREAT, **changes}
    if threat["norm"] == "l2":
        if "eps" not in changes:
            raise ValueError("an l2 budget has no default; expected eps, such as 1.0 for images of 64 pixels a side")
        threat["step"] = changes.get("step", 2.5 * threat["eps"] / threat["steps"])
    check_threat(**threat)
    return threat


def _levels(attacked: Tensor, images: Tensor, threat: dict[str, Any], attack: str) -> Tensor:
    """Attacked images as bytes, if they are what the threat allows: anybody may have written the attack."""
    levels = (attacked * 255).round()
    if levels.shape != images.shape:
        raise ValueError(f"{attack} made images of shape {tuple(levels.shape)} of {tuple(images.shape)}")
    if not bool(((levels >= 0) & (levels <= 255)).all()):
        raise ValueError(f"{attack} made values outside [0,1]; expected images")
    change = ((levels - images) / 255).flatten(1)
    size = float((change.abs() if threat["norm"] == "linf" else change.norm(dim=1)).max())
    if size > threat["eps"] + 0.5 / 255:  # a budget that is no whole level may be rounded up to one
        raise ValueError(f"{attack} changed an image by {size:.4f} ({threat['norm']}); allowed is {threat['eps']:.4f}")
    return levels.byte()


def attacked_copies(
    target: Domain,
    surrogate: Classifier,
    store: ArrayStore,
    *,
    source: str,
    attack: str = "pgd",
    threat: dict[str, Any] | None = None,
    seed: int = 0,
    part: int = 64,
    **options: Any,
) -> NDArray[np.uint8]:
    """Every image of the domain, attacked on the surrogate; made once and kept.

    source: a hash of the surrogate. attack: a name of `safer_tta.attacks.ATTACKS`.
    """
    if attack not in ATTACKS:
        raise ValueError(f"attack {attack!r} is unknown; expected one of {', '.join(ATTACKS)}")
    threat = full_threat(**(threat or {}))
    definition = {"attack": attack, "threat": threat, "seed": seed, "surrogate": source, "domain": target.content}
    definition |= extensions.code_of(ATTACKS[attack].make)
    if surrogate.precision != "float32":
        definition["precision"] = surrogate.precision

    def make(first: int, last: int) -> NDArray[np.uint8]:
        images = torch.from_numpy(np.array(target.images[first:last])).to(surrogate.device)
        labels = torch.from_numpy(target.labels[first:last]).to(surrogate.device)
        attacked = ATTACKS[attack].make(surrogate, images, labels, threat, generator(seed, "attack", first))
        return _levels(attacked, images, threat, attack).cpu().numpy()

    return store.get(definition, len(target), make, part=part, **options)
