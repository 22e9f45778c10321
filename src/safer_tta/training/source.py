"""Source models: trained on every domain but the target (ERM), if wanted on attacked images (Robust ERM)."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from ..attacks.pgd import check_threat
from ..data import Dataset
from ..models import Classifier
from .backbone import SHIPPED
from .trainer import Recipe, train


def train_source(
    dataset: Dataset, target: str, recipe: Recipe, path: str | os.PathLike[str], **options: Any
) -> Classifier:
    """Leave `target` ("sketch", or several: "cartoon+sketch") out, train on the rest."""
    left_out = target.split("+")
    for name in left_out:
        dataset.domain(name)  # a wrong name is found out before the training, not after
    domains = [dataset.domain(name) for name in dataset.domains if name not in left_out]
    return train(domains, recipe, path, **options)


def source_recipe(dataset: str, **changes: Any) -> Recipe:
    """The settings for a dataset: the paper's, or for the embedded data a small network from the shipped backbone."""
    embedded = {"architecture": "small", "steps": 300, "lr": 5e-4, "every": 50} if dataset == "synthetic" else {}
    settings = {**embedded, **changes}
    if "weights" not in settings:
        if settings.get("architecture") != "small":
            raise ValueError(
                "no pretrained weights given; expected a safetensors file to start from (the paper: ImageNet), weights "
                "none to train from scratch, or architecture small, which brings its own"
            )
        settings["weights"] = str(SHIPPED)
    return Recipe(**settings)


def robust(recipe: Recipe, *, eps: float = 8 / 255, step: float = 2 / 255, steps: int = 20) -> Recipe:
    """The same recipe on PGD examples of the attack's own budget."""
    check_threat(eps=eps, step=step, steps=steps, norm="linf")
    return dataclasses.replace(recipe, attack={"eps": eps, "step": step, "steps": steps})
