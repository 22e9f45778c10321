"""Source models: trained on every domain but the target (ERM), or on attacked images of them (Robust ERM)."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from ..attacks.pgd import check_threat
from ..data import Dataset
from ..errors import InvalidValueError
from ..models import Classifier
from .backbone import SHIPPED
from .trainer import Recipe, train


def train_source(
    dataset: Dataset, target: str, recipe: Recipe, path: str | os.PathLike[str], **options: Any
) -> Classifier:
    """Train on all domains of a dataset but the target.

    Args:
        dataset: The dataset.
        target: The domain to leave out, or several, as in "cartoon+sketch".
        recipe: How the model is trained.
        path: The file to write, or to load if the model has been trained before.
        **options: Further arguments of `train`.

    Raises:
        UnknownNameError: If the dataset has no such domain.
        InvalidValueError: If `path` holds another model.
    """
    left_out = target.split("+")
    for name in left_out:
        dataset.domain(name)  # find a wrong name before the training
    domains = [dataset.domain(name) for name in dataset.domains if name not in left_out]
    return train(domains, recipe, path, **options)


def source_recipe(dataset: str, **changes: Any) -> Recipe:
    """Return the settings for a dataset: the paper's, or a small pretrained network for the embedded data.

    Args:
        dataset: The name of the dataset.
        **changes: Settings that differ, by the names of `Recipe`.

    Raises:
        InvalidValueError: If the architecture needs pretrained `weights` and none are given.
    """
    embedded = {"architecture": "small", "steps": 300, "lr": 5e-4, "every": 50} if dataset == "synthetic" else {}
    settings = {**embedded, **changes}
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
