"""What the last answers of a stream say about its health."""

import math
from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from ..models.window import LEAST_DIVERSE, MOST_INDEPENDENT, independent
from ..pooling import entropy


def concentrated(last: Collection[int], classes: int) -> bool:
    """Whether the last answers count for few independent images, as when one class comes after the other."""
    if len(last) < MOST_INDEPENDENT:  # too few to tell
        return False
    shares = torch.bincount(torch.tensor(list(last)), minlength=classes) / len(last)
    return float(independent(shares, torch.tensor(MOST_INDEPENDENT))) < LEAST_DIVERSE


def collapsed(recent: Iterable[Tensor], *, least_entropy: float, largest_share: float) -> bool:
    """Whether probabilities (B,K) of some batches are those of a model that has collapsed."""
    probs = torch.cat(list(recent))
    classes = probs.shape[1]
    if classes == 1:
        return False
    mean = probs.mean(dim=0)
    spread = float(entropy(mean)) / math.log(classes)
    largest = float(torch.bincount(probs.argmax(dim=1), minlength=classes).max()) / len(probs)
    return spread < least_entropy or largest > largest_share
