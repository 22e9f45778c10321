"""SAFER-G, the gate: weigh the original view of an image by how likely it is to be attacked. Not part of the paper.

An attack made for the original does not survive the augmentations. So the augmented views tell how far a view may
stray, and an original that strays further from them is evidence of an attack, image by image. A mixture of two normal
distributions, clean and attacked, is fitted to the evidence of a batch; every image is judged by it twice, with and
without the memory of earlier batches, and the more suspicious verdict counts. So the memory can raise suspicion but
never lower it: a stream that was clean for long buys an attacker nothing.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ._internal.checks import positive, share
from .errors import InvalidValueError
from .pooling import Verdict, with_original

# How these were chosen is on the page docs/safer-g.md.
CLEAN_OFFSET = 0.3  # subtracted from the evidence: clean originals lie a little apart from mild views
CLEAN_SPREAD = 0.8  # standard deviation of clean originals' evidence
ATTACKED_SPREAD = 1.2  # standard deviation of attacked originals' evidence
# Bounds of the mean evidence of attacked originals. Below the lower one every image would be called a little attacked;
# above the upper one a few that stray far would make the others look harmless.
LEAST, MOST = 1.0, 3.0
ROUNDS = 5  # of fitting; a sixth moves the share of attacked images by 0.03 at most
DECAY = 0.8  # of the memory, from one batch to the next
MEMORY_SIZE = 3  # images, attacked images among them, and the sum of these ones' evidence
FLOOR = 1e-6


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Weigh the original view by how likely it is to be attacked; one setting for all data and methods.

    Methods learn from SAFER's own pooling, as if there were no gate. Only those that align features with scores (TSD)
    get the original's features where it is trusted, and the augmented views' where it is not.

    Args:
        cost: How much worse it is to trust an attacked original than to do without a clean one.
        alpha_clean: Weight of an original that is surely clean.
    """

    cost: float = 2.0
    alpha_clean: float = 0.5

    version: ClassVar[int] = 7
    least_views: ClassVar[int] = 3  # how two augmented views stray from each other is compared with a third
    preset: ClassVar[str] = "gentle"
    memory_size: ClassVar[int] = MEMORY_SIZE
    estimates_suspicion: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive(cost=self.cost)
        share(alpha_clean=self.alpha_clean)

    def weigh(self, base: Tensor, probs: Tensor, features: Tensor, memory: Tensor) -> Verdict:
        """Decide about a batch; `Mixing.weigh` explains the arguments."""
        if len(base) == 1:  # no augmented view to compare with
            return Verdict(base, base)
        if len(base) <= self.least_views:
            raise InvalidValueError(
                f"{len(base) - 1} augmented views are too few for the gate; expected at least {self.least_views}"
            )
        odds, remembered = judge(evidence(features) - CLEAN_OFFSET, memory)
        equal = torch.ones_like(base)
        trust = torch.sigmoid(-odds - math.log(self.cost))
        let_in = trust.detach() if self.alpha_clean else torch.zeros_like(trust)
        return Verdict(
            answer=with_original((self.alpha_clean * trust).to(base.dtype), equal),
            lesson=base,
            aligned=with_original(let_in.to(base.dtype), equal),
            suspicion=torch.sigmoid(odds),
            memory=remembered,
        )


def judge(evidence: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-odds (B,) that an image is attacked, from its evidence, and what to remember (3,)."""
    memory = memory.to(evidence)
    odds = log_odds(evidence, torch.stack([torch.zeros_like(memory), memory]))
    attacked, strayed = torch.sigmoid(odds[1]).detach(), evidence.detach().clamp(0, 1 / FLOOR)
    seen = torch.stack([torch.ones_like(attacked).sum(), attacked.sum(), torch.dot(attacked, strayed)])
    return odds.amax(dim=0), DECAY * (memory + seen)


def log_odds(evidence: Tensor, memory: Tensor) -> Tensor:
    """Fit the mixture and return log-odds (R,B) of attacked against clean, one row for each memory (R,3)."""
    evidence = evidence.clamp(0, 1 / FLOOR)  # being closer than the other views is not extra evidence of being clean
    # Quadratic terms of both densities cancel but for this; the rest is linear in the mean of the attacked ones.
    quadratic = evidence.square() * ((CLEAN_SPREAD**-2 - ATTACKED_SPREAD**-2) / 2)
    quadratic = quadratic + math.log(CLEAN_SPREAD / ATTACKED_SPREAD)
    images, before, strayed = memory.T.unsqueeze(-1)
    prior, mean = torch.full_like(images, 0.5), torch.full_like(images, 2.0)
    for _ in range(ROUNDS):
        attacked = torch.sigmoid(_density_ratio(evidence, quadratic, prior, mean))
        count = attacked.sum(dim=1, keepdim=True) + before
        # Half an image of either kind counts as seen before: no batch is beyond doubt.
        prior = (count + 0.5) / (images + (len(evidence) + 1))
        mean = (((attacked @ evidence).unsqueeze(-1) + strayed) / (count + FLOOR)).clamp(LEAST, MOST)
    return _density_ratio(evidence, quadratic, prior, mean)


def _density_ratio(evidence: Tensor, quadratic: Tensor, prior: Tensor, mean: Tensor) -> Tensor:
    """Return prior log-odds plus the log-ratio of the attacked to the clean density."""
    return torch.logit(prior) + torch.addcmul(quadratic, evidence - mean / 2, mean, value=ATTACKED_SPREAD**-2)


def evidence(features: Tensor) -> Tensor:
    """Return by how many standard deviations every original strays too far, (B,), from features (V,B,d).

    The mean of two comparisons: with how far the augmented views of the same image stray from each other, and with how
    far an augmented view would be expected to stray in the original's place. The latter is read off a line through all
    augmented views of the batch, since the few views of one image say little.
    """
    original, augmented, others = straying(view_distances(features))
    beyond = others - others.mean()
    slope = (beyond * (augmented - augmented.mean())).sum() / (beyond.square().sum() + FLOOR)
    expected = augmented.mean() + slope.clamp(0, 1) * beyond
    by_ratio = _deviations(original - others, augmented - others)
    return (by_ratio + _deviations(original - expected, augmented - expected)) / 2


def _deviations(original: Tensor, augmented: Tensor) -> Tensor:
    return original.mean(dim=0) / augmented.square().mean().sqrt().clamp_min(FLOOR)


def straying(distance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return three logarithms of mean distances, each (V-1,B), with each augmented view left out in turn.

    How far the original is from the other views, how far the view left out is from them, and how far they are from
    each other; from distances (V,V,B) between the views of every image.
    """
    count = len(distance) - 1
    to_augmented = distance[:, 1:].sum(dim=1)
    among_all = to_augmented[1:].sum(dim=0) / 2
    others = (among_all - to_augmented[1:]) / ((count - 1) * (count - 2) / 2)
    original = (to_augmented[0] - distance[0, 1:]) / (count - 1)
    augmented = to_augmented[1:] / (count - 1)
    return (original + FLOOR).log(), (augmented + FLOOR).log(), (others + FLOOR).log()


def view_distances(features: Tensor) -> Tensor:
    """Return squared distances (V,V,B) between views of an image, each dimension on the scale of augmented views."""
    z = features.to(torch.promote_types(features.dtype, torch.float32))
    z = z - z[1:].mean(dim=(0, 1))
    z = z / (z[1:].square().mean(dim=(0, 1)) + FLOOR).sqrt()
    z = z.transpose(0, 1)
    products = z @ z.transpose(1, 2) / z.shape[2]
    lengths = products.diagonal(dim1=1, dim2=2)
    return (lengths[:, :, None] + lengths[:, None] - 2 * products).clamp_min(0).permute(1, 2, 0)
