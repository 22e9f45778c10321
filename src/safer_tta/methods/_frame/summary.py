"""What a method is, in a few lines."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ...models.classifier import Updates
from ...models.norm import describe_statistics
from .options import declared

if TYPE_CHECKING:
    from .method import Method

LEARNS: dict[Updates, str] = {
    "none": "none",
    "norm": "scale and shift of the norms",
    "features": "all but the head",
    "all": "all",
}


def summarise(method: Method) -> str:
    """Return what a method is made of, a line each."""
    classifier = method.classifier
    options = ", ".join(f"{name}={getattr(method, name)!r}" for name in declared(type(method)))
    with method.exclusively(), method.answering():
        norms = Counter(f"{type(norm).__name__} with {describe_statistics(norm)}" for norm in classifier.norms())
    normalisation = f"by {classifier.normalised_by}" if classifier.normalised_by else "none declared"
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
        "learns": f"{learning:,} of {sum(parameter.numel() for parameter in parameters):,} parameters: "
        + (LEARNS[method.updates] if not method.frozen else "frozen, it only predicts until unfreeze()"),
    }
    return "\n".join([f"{method.name}({options})", *(f"  {name}: {text}" for name, text in lines.items())])
