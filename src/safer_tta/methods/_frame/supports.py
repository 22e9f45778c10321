"""The support memory of T3A and TSD: for every class the features the model was surest about.

It starts with the head's own rows, labelled by what the head says of them. Each batch is appended, then every class
keeps its lowest entropies. The prototype of a class is the sum of its unit-norm supports.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...predictors import Prediction
from .losses import softmax_entropy

Supports = dict[str, Tensor]  # features (M,d), labels (M,), entropies (M,)


def from_head(head: nn.Linear) -> Supports:
    with torch.no_grad():
        rows = head.weight.detach().clone()
        logits = head(rows)
        return {"features": rows, "labels": logits.argmax(dim=1), "entropies": softmax_entropy(logits)}


def extended(supports: Mapping[str, Tensor], prediction: Prediction, keep: int) -> Supports:
    """Return the supports with a batch added, reduced to the `keep` surest of each class."""
    with torch.no_grad():
        features = torch.cat([supports["features"], prediction.features.detach()])
        labels = torch.cat([supports["labels"], prediction.labels])
        entropies = torch.cat([supports["entropies"], softmax_entropy(prediction.logits.detach())])
        kept = lowest_of_each_class(labels, entropies, keep)
        kept = kept[entropies[kept].isfinite()]  # without images whose answer is not finite
        return {"features": features[kept], "labels": labels[kept], "entropies": entropies[kept]}


def lowest_of_each_class(labels: Tensor, values: Tensor, keep: int) -> Tensor:
    """Return the indices of the `keep` lowest values of every class."""
    order = values.argsort(stable=True)
    order = order[labels[order].argsort(stable=True)]  # by class, and within a class by value
    counts = torch.bincount(labels)
    first = (counts.cumsum(0) - counts)[labels[order]]
    rank = torch.arange(len(order), device=order.device) - first
    return order[rank < keep]


def prototypes(supports: Mapping[str, Tensor], classes: int) -> Tensor:
    """Return sums (K,d) of unit-norm supports."""
    units = F.normalize(supports["features"], dim=1)
    # A GPU adds in varying order; in double precision that is rounded away, so a run repeats itself.
    exact = units.dtype if units.device.type == "mps" else torch.float64  # MPS has no double precision
    sums = units.new_zeros(classes, units.shape[1], dtype=exact)
    return sums.index_add_(0, supports["labels"], units.to(exact)).to(units.dtype)
