"""What a method is, in a few lines, and how well it does on labelled batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import InvalidValueError
from ...models.norm import describe_statistics
from ...predictors import Prediction
from .options import declared

if TYPE_CHECKING:
    from .method import Method


@dataclass(frozen=True)
class Evaluation:
    """How many answers to a labelled stream were right."""

    accuracy: float  # in percent
    images: int  # how many were answered


def evaluate(adapt: Callable[[Tensor], Prediction], loader: Iterable[tuple[Tensor, Tensor]]) -> Evaluation:
    """Pass batches of (images, labels) through a method, a guard or a predictor, and return the accuracy."""
    right = []
    for images, labels in loader:
        answers = adapt(images).labels
        right.append(answers == labels.to(answers.device))
    if not right:
        raise InvalidValueError("the loader gave no batch; expected batches of (images, labels)")
    found = torch.cat(right)
    return Evaluation(accuracy=100 * float(found.double().mean()), images=len(found))


def summarise(method: Method) -> str:
    """Return what a method is made of, a line each."""
    classifier = method.classifier
    options = ", ".join(f"{name}={getattr(method, name)!r}" for name in declared(type(method)))
    with method.exclusively(), method.answering():
        norms = Counter(f"{type(norm).__name__} with {describe_statistics(norm)}" for norm in classifier.norms())
    normalisation = "none"
    if classifier.mean is not None and classifier.std is not None:
        mean, std = ([round(value, 4) for value in t.flatten().tolist()] for t in (classifier.mean, classifier.std))
        normalisation = f"mean {mean}, std {std}"
    parameters = list(classifier.parameters())
    learning = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    head = classifier.head
    lines = {
        "predictor": repr(method.predictor),
        "head": f"{classifier.head_name!r}, {head.in_features} features to {head.out_features} classes",
        "norms": ", ".join(f"{count} {kind}" for kind, count in norms.items()) or "none",
        "normalisation": normalisation,
        "learns": f"{learning:,} of {sum(parameter.numel() for parameter in parameters):,} parameters",
    }
    return "\n".join([f"{method.name}({options})", *(f"  {name}: {text}" for name, text in lines.items())])
