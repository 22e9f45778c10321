"""Terms that several objectives share. They take logits, so that small probabilities keep their precision."""

import math

import torch
from torch import Tensor


def largest_entropy(classes: int) -> float:
    """Return the entropy of a uniform answer, in nats; of one class, that of two."""
    return math.log(max(2, classes))


def softmax_entropy(logits: Tensor) -> Tensor:
    """Return the entropy (B,) of softmax(logits), in nats."""
    log_probs = logits.log_softmax(dim=1)
    return -(log_probs.exp() * log_probs).sum(dim=1)


def marginal_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of the mean prediction over the first dimension."""
    log_mean = logits.log_softmax(dim=1).logsumexp(dim=0) - torch.log(torch.tensor(float(len(logits))))
    return -(log_mean.exp() * log_mean).sum()


def cross_entropy(target: Tensor, logits: Tensor) -> Tensor:
    """Return -Σ_k target_k log softmax(logits)_k, one value per image."""
    return -(target * logits.log_softmax(dim=1)).sum(dim=1)
