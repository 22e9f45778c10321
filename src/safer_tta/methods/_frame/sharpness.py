"""A sharpness-aware step (Foret et al., 2021): the gradient is taken at the worst point nearby."""

import torch
from torch.optim import Optimizer

from .closing import Closure


def sharpness_aware_step(optimizer: Optimizer, closure: Closure, radius: float) -> None:
    """Call closure() here and again `radius` up the gradient, then step from here with the second gradient.

    If the second pass has nothing to learn from, nothing is learnt. Weights are put back whatever happens.
    """
    closure()
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    here = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        length = torch.stack([torch.linalg.vector_norm(p.grad) for p in parameters]).norm()
        for p in parameters:
            p.add_(p.grad * (radius / (length + 1e-12)))
    try:
        second = closure()
    finally:
        with torch.no_grad():
            for p, value in zip(parameters, here, strict=True):
                p.copy_(value)
    if second is not None:
        optimizer.step()
