"""Source models: trained on every domain but the target (ERM), or on attacked images of them (Robust ERM)."""

import dataclasses
import os
from pathlib import Path
from typing import Any

from ..attacks.pgd import check_threat
from ..data import Dataset
from ..errors import InvalidValueError
from ..models import Classifier, zoo
from ..models.card import find_card
from .trainer import Recipe, train

# A small residual network, pretrained on letters and digits by tools/pretrain_backbone.py.
SHIPPED = Path(__file__).parent / "backbone.safetensors"


def train_source(
    dataset: Dataset, target: str, recipe: Recipe, path: str | os.PathLike[str], **options: Any
) -> Classifier:
    """Train on all domains of a dataset but the target, or but several, as in "cartoon+sketch"."""
    left_out = target.split("+")
    for name in left_out:
        dataset.domain(name)  # find a wrong name before the training
    domains = [dataset.domain(name) for name in dataset.domains if name not in left_out]
    return train(domains, recipe, path, **options)


def source_recipe(dataset: str, **changes: Any) -> Recipe:
    """Return the settings for a dataset: the paper's, or a small pretrained network for the embedded data."""
    embedded = {"architecture": "small", "steps": 300, "lr": 5e-4, "every": 50} if dataset == "synthetic" else {}
    packed = find_card(changes["weights"]) if changes.get("weights") is not None else None
    own = {} if packed is None else {"architecture": packed.architecture.partition(",")[0]}
    settings = {**embedded, **own, **changes}
    if settings.get("architecture"):
        zoo.check_name(settings["architecture"])
    if "weights" not in settings:
        if settings.get("architecture") != "small":
            raise InvalidValueError(
                "no pretrained weights given; expected weights from a safetensors file (ImageNet in the paper), "
                "weights none to train from scratch, or the architecture small, which has its own"
            )
        settings["weights"] = str(SHIPPED)
    return Recipe(**settings)


def robust(recipe: Recipe, *, eps: float = 8 / 255, step: float = 2 / 255, steps: int = 20) -> Recipe:
    """Return the recipe with training on PGD examples, of the budget of the attack (linf)."""
    check_threat(eps=eps, step=step, steps=steps, norm="linf")
    return dataclasses.replace(recipe, attack={"eps": eps, "step": step, "steps": steps})
