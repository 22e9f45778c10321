"""From a model to a method at work: the three-line start, and by names, as runs and services have them."""

from __future__ import annotations

import copy as copying
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from . import methods, predictors
from .methods import Method
from .models import Classifier
from .models.norm import MedBN
from .options import check
from .predictors import Plain, Predictor, Safer

NORMS = {"medbn": MedBN.like}


def adapt(
    model: nn.Module,
    method: str = "tent",
    safer: bool | Mapping[str, Any] | Predictor = True,
    *,
    seed: int | None = None,
    norm: str | None = None,
    copy: bool = True,
    validate: bool = True,
    precision: str | None = None,
    compile: bool | None = None,
    **options: Any,
) -> Method:
    """Wrap a trained classifier: `adapt(model)(images)` predicts a batch and learns from it.

    model: an nn.Module that returns class scores, or a Classifier. It is copied and stays as it is, unless copy=False.
    method: a name from `safer_tta.methods.METHODS`; **options go to it, such as lr.
    safer: True, False (the plain model), a dict of Safer's arguments, or a Predictor whose settings to use.
    seed: decides every draw. Without it torch's own generator does.
    norm: "medbn" normalises with medians instead of means.
    precision: "bfloat16" passes images through the model in half the bits; what is learnt stays in single precision.
    compile: let torch.compile make one program of the model; the first batch of every shape is slow.
        None, for either: as the Classifier says, "float32" and no unless told otherwise.
    validate: look at every batch's values. False skips it for trusted, fast streams.
    """
    if norm is not None and norm not in NORMS:
        raise ValueError(f"norm {norm!r} is unknown; expected one of {', '.join(NORMS)} or None")
    name, _, other = method.partition("+")
    if other in NORMS:
        raise ValueError(f"method {method!r} is a name of rows and plans; write adapt(model, {name!r}, norm={other!r})")
    with torch.inference_mode(False):
        model = copying.deepcopy(model) if copy else model
        classifier = model if isinstance(model, Classifier) else _split(model, safer)
        classifier.accelerate(precision=precision, compile=compile)
        if norm is not None:
            replace_norms(classifier, norm)
        predictor = _predictor(classifier, safer, seed)
        predictor.validate = predictor.validate and validate
        return methods.create(method, predictor, **options)


def _split(model: nn.Module, safer: object) -> Classifier:
    """As the given predictor's own classifier is split and normalised, if there is one."""
    like = safer.classifier if isinstance(safer, Predictor) else None
    if like is None or like.mean is None or like.std is None:
        return Classifier(model, head=None if like is None else like.head_name)
    return Classifier(model, head=like.head_name, mean=like.mean.flatten().tolist(), std=like.std.flatten().tolist())


def split_name(method: str) -> tuple[str, str]:
    """(method, normalisation) of a name such as "tent+medbn"; without a plus the second is empty."""
    name, _, norm = method.partition("+")
    return name, norm


def build(
    classifier: Classifier,
    method: str,
    predictor: str,
    *,
    options: Mapping[str, Any],
    predictor_options: Mapping[str, Any],
    seed: int | None,
    device: str,
) -> Method:
    """A method by the names that runs and services have; it adapts this very classifier."""
    name, norm = split_name(method)
    if norm:
        replace_norms(classifier, norm)
    over = predictors.create(predictor, classifier, seed=seed, **predictor_options)
    return methods.create(name, over, **options).to(device)  # with the optimiser of a GPU, if that is one


def check_names(method: str, predictor: str) -> None:
    """Refuse an unknown method or predictor before anything expensive starts."""
    name, norm = split_name(method)
    for given, known in ((name, methods.METHODS), (predictor, predictors.PREDICTORS), (norm, ["", *NORMS])):
        if given not in known:
            raise ValueError(f"{given!r} is unknown; expected one of {', '.join(sorted(known))}")


def replace_norms(classifier: Classifier, name: str) -> None:
    """Put the named normalisation in the place of every batch norm."""
    before = classifier.norms()
    classifier.replace_norms(NORMS[name])
    if classifier.norms() == before:
        raise ValueError(f"norm is {name!r} and the model has no batch-norm layer to replace; leave norm out")


def _predictor(classifier: Classifier, safer: bool | Mapping[str, Any] | Predictor, seed: int | None) -> Predictor:
    if isinstance(safer, Predictor):
        predictor = safer.over(classifier)
        # Its own generator: two wrapped models must not take turns with one.
        predictor.seed = safer.seed if seed is None else seed
        predictor.generator = torch.Generator().manual_seed(predictor.seed)
        predictor._remember_afresh()
        return predictor
    if isinstance(safer, Mapping):
        if seed is not None and safer.get("seed", seed) != seed:
            raise ValueError(f"seed is {seed} and safer's own seed {safer['seed']}; give one of them")
        check(Safer, safer, "safer", own=["classifier"])
        return Safer(classifier, **{"seed": seed, **safer})
    if isinstance(safer, bool):
        return Safer(classifier, seed=seed) if safer else Plain(classifier, seed=seed)
    raise TypeError(
        f"safer is {type(safer).__name__}; expected True, False, a dict of Safer's arguments or a Predictor"
    )
