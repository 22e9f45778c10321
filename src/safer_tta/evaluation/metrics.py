"""Figures of a stream of answers: calibration, detection of attacked images, accuracy of those that are answered."""

import numpy as np
import torch
from torch import Tensor

BINS = 15  # of the calibration error
COVERED = range(100, 49, -10)  # percent of the images that are answered


def rolling(values: list[float], window: int = 16) -> list[float]:
    """Return the mean of the last `window` values at every place; 16 is the paper's window."""
    return [float(np.mean(values[max(0, i + 1 - window) : i + 1])) for i in range(len(values))]


def calibration_error(probs: Tensor, right: Tensor) -> float:
    """Return the expected calibration error over 15 equal bins of confidence."""
    confidence = probs.amax(dim=1)
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    gaps = [(right[bins == b].sum() - confidence[bins == b].sum()).abs() for b in range(BINS)]
    return float(sum(gaps) / len(right))


def detection(suspicion: Tensor, attacked: Tensor) -> float | None:
    """Return the AUROC, the chance that an attacked image looks more suspicious than a clean one; None without both."""
    suspicious, calm = suspicion[attacked].double(), suspicion[~attacked].double()
    if not len(suspicious) or not len(calm) or bool(suspicion.isnan().any()):
        return None
    calm = calm.sort().values
    below, upto = (torch.searchsorted(calm, suspicious, right=right) for right in (False, True))
    return float((below + upto).double().mean() / (2 * len(calm)))


def selective(suspicion: Tensor, right: Tensor) -> list[float | None] | None:
    """Return the accuracy if only the least suspicious 100, 90, ..., 50 % of the images are answered."""
    if bool(suspicion.isnan().any()):
        return None
    order = suspicion.argsort(stable=True)
    return [percent(right[order[: round(len(right) * covered / 100)]]) for covered in COVERED]


def percent(right: Tensor) -> float | None:
    """Return the mean in percent; None of nothing."""
    return 100 * float(right.mean()) if len(right) else None
