"""What the answers of several candidates to the same images say about them.

With labels the answers are counted. Without labels each image is also answered as a changed copy: cropped, mirrored and
in slightly other colours. A classifier that suits a domain answers both alike. Agreement is counted beyond chance
(Cohen's kappa), because a classifier that names one class for everything agrees with itself always. How often answers
stay the same under such changes goes along with accuracy on unseen domains:
Deng et al., "On the Strong Correlation Between Model Invariance and Generalization", NeurIPS 2022.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..pooling import entropy

SURE = 1.96  # standard errors that a difference must exceed
LEAST_GAIN = 0.02  # of agreement; less is never called a difference
NARROWER = 0.1  # a loss of spread from which answers are thought to collapse, whatever their agreement
WORDS = {"helps": "helps", "harms": "harms", "unclear": "makes no clear difference"}


@dataclass(frozen=True)
class Candidate:
    """How one way of answering did.

    Attributes:
        name: What answered.
        changed: The share of answers that are not those of the model as it is, in percent.
        agreement: How often an image and a changed copy of it got the same answer, beyond chance; 1 is always.
        spread: How evenly the answers use the classes: the entropy of the mean prediction, as a share of ln K.
        accuracy: The share of correct answers, in percent; None without labels.
        gain: How much better than the model as it is, in points of accuracy with labels and else in agreement.
        error: How large `gain` may be by chance.
        verdict: "helps", "harms" or "unclear".
    """

    name: str
    changed: float
    agreement: float
    spread: float
    accuracy: float | None
    gain: float
    error: float
    verdict: str


@dataclass(frozen=True, repr=False)
class Comparison:
    """How the model as it is, the predictor without learning and the method did; it prints as a small table."""

    images: int
    candidates: tuple[Candidate, ...]

    @property
    def verdict(self) -> str:
        """Whether adapting "helps" or "harms", compared with the model as it is, or is "unclear"."""
        return self.candidates[-1].verdict

    def __repr__(self) -> str:
        labelled = self.candidates[0].accuracy is not None
        width = max(len(candidate.name) for candidate in self.candidates) + 2
        lines = [" " * width + f"{'changed, %':>10}{'agreement':>11}{'spread':>8}" + f"{'accuracy, %':>13}" * labelled]
        for one in self.candidates:
            accuracy = "" if one.accuracy is None else f"{one.accuracy:13.1f}"
            lines.append(f"{one.name:{width}}{one.changed:10.1f}{one.agreement:11.2f}{one.spread:8.2f}{accuracy}")
        last = self.candidates[-1]
        measure, unit, digits = ("accuracy", " points", 1) if labelled else ("agreement", "", 2)
        gain = f"{measure} {last.gain:+.{digits}f} ± {last.error:.{digits}f}{unit}"
        lines.append(f"{last.name} {WORDS[last.verdict]} on these {self.images} images ({gain})")
        if not labelled:
            lines.append("This is a hint. A few hundred labels decide it: pass batches of (images, labels).")
        return "\n".join(lines)


def weigh(answers: Mapping[str, tuple[Tensor, Tensor]], truth: Tensor | None) -> Comparison:
    """Compare candidates, of which the first is the model as it is, by (probabilities, labels of changed copies)."""
    probs, _ = next(iter(answers.values()))
    before = probs.argmax(dim=1)
    candidates: list[Candidate] = []
    losses: list[Tensor] = []
    for name, (found, again) in answers.items():
        labels = found.argmax(dim=1)
        disagreement = _disagreement(labels, again, found.shape[1])
        right = None if truth is None else 100 * (labels == truth).double()
        losses.append(disagreement if right is None else -right)
        gain, error = _difference(losses[0] - losses[-1])
        spread = float(entropy(found.mean(dim=0))) / math.log(max(2, found.shape[1]))
        lost = 0.0 if not candidates or truth is not None else candidates[0].spread - spread
        candidates.append(
            Candidate(
                name=name, changed=100 * float((labels != before).double().mean()),
                agreement=1 - float(disagreement.mean()), spread=spread,
                accuracy=None if right is None else float(right.mean()), gain=gain, error=error,
                verdict=_judge(gain, error if truth is not None else max(error, LEAST_GAIN), lost),
            )
        )  # fmt: skip
    return Comparison(len(before), tuple(candidates))


def _disagreement(labels: Tensor, again: Tensor, classes: int) -> Tensor:
    """Return for every image 0, or what a disagreement counts: 1 on average if both answer at random."""
    shares = [torch.bincount(given, minlength=classes).double() / len(given) for given in (labels, again)]
    by_chance = float((shares[0] * shares[1]).sum())
    # Two constant answers show nothing: as good as chance.
    return (labels != again).double() / (1 - by_chance) if by_chance < 1 else torch.ones(len(labels)).double()


def _difference(per_image: Tensor) -> tuple[float, float]:
    """Return the mean over images, and how large it may be by chance."""
    error = float(per_image.std()) / math.sqrt(len(per_image)) if len(per_image) > 1 else math.inf
    return float(per_image.mean()), SURE * error


def _judge(gain: float, margin: float, lost_spread: float) -> str:
    if gain < -margin or lost_spread > NARROWER:
        return "harms"
    return "helps" if gain > margin else "unclear"
