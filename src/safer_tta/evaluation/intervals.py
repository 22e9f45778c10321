"""Confidence intervals of 95 % for accuracies, in percent.

Over images: Wilson's interval of each target. Over seeds, which give other models on the same images: Student's.
Distances from the estimate are added in squares, as for a sum of independent parts (Zou and Donner, 2008).
"""

import math
import statistics
from collections.abc import Sequence

NORMAL = 1.96  # the 97.5 % quantile of the normal law
# The 97.5 % quantiles of Student's law for 1, 2, ... degrees of freedom; for more than nine, the last is a safe bound.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def wilson(accuracy: float, images: int) -> tuple[float, float]:
    """Return Wilson's interval of an accuracy over that many images."""
    share, weight = accuracy / 100, NORMAL**2 / images
    centre = (share + weight / 2) / (1 + weight)
    half = math.sqrt(weight * share * (1 - share) + weight**2 / 4) / (1 + weight)
    return min(accuracy, 100 * max(0.0, centre - half)), max(accuracy, 100 * min(1.0, centre + half))


def interval(accuracies: Sequence[Sequence[float]], images: Sequence[int]) -> tuple[float, float]:
    """Return the interval of the mean of accuracies, one row for each seed and one column for each target.

    `images` says how many images each target has; they are taken to be the same for all seeds.
    """
    targets = [statistics.mean(column) for column in zip(*accuracies, strict=True)]
    ends = [wilson(mean, count) for mean, count in zip(targets, images, strict=True)]
    seeds = [statistics.mean(row) for row in accuracies]
    spread = 0.0
    if len(seeds) > 1:
        spread = STUDENT[min(len(seeds) - 1, len(STUDENT)) - 1] * statistics.stdev(seeds) / math.sqrt(len(seeds))
    mean = statistics.mean(targets)
    below, above = (
        math.hypot(spread, *(abs(own - end[side]) / len(targets) for own, end in zip(targets, ends, strict=True)))
        for side in (0, 1)
    )
    return max(0.0, mean - below), min(100.0, mean + above)
