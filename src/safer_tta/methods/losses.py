"""Terms that several objectives share. Logits come in, so that small probabilities keep their precision."""

from __future__ import annotations

import torch
from torch import Tensor


def entropy(logits: Tensor) -> Tensor:
    """Entropy (B,) of softmax(logits), in nats."""
    log_probs = logits.log_softmax(dim=1)
    return -(log_probs.exp() * log_probs).sum(dim=1)


def marginal_entropy(logits: Tensor) -> Tensor:
    """Entropy of the mean prediction over the first dimension."""
    log_mean = logits.log_softmax(dim=1).logsumexp(dim=0) - torch.log(torch.tensor(float(len(logits))))
    return -(log_mean.exp() * log_mean).sum()


def cross_entropy(target: Tensor, logits: Tensor) -> Tensor:
    """-Σ_k target_k log softmax(logits)_k, one value per image."""
    return -(target * logits.log_softmax(dim=1)).sum(dim=1)
