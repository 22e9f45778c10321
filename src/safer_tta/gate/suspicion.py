"""How likely it is that an image is attacked, from the evidence of straying: a mixture of two normal distributions.

Clean and attacked are fitted to the evidence of the last 64 images. Every image is judged twice, with and without a
longer memory, and the more suspicious verdict counts. So the memory can raise suspicion but never lower it: a stream
that was clean for long buys an attacker nothing.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .straying import FLOOR, WINDOW

ROUNDS = 5  # of fitting; a sixth moves the share of attacked images by 0.03 at most
DECAY = 0.8  # of the long memory, over 64 images
COUNTS = 3  # images, attacked images among them, and the sum of these ones' evidence


class Law(NamedTuple):
    """What is assumed of clean and attacked originals. How the values were chosen is on the page docs/safer-g.md.

    Attributes:
        offset: Subtracted from the evidence, since clean originals lie a little apart from mild views.
        clean: Standard deviation of clean originals' evidence.
        attacked: Standard deviation of attacked originals' evidence.
        least: The smallest mean evidence of attacked originals.
        most: The largest one; above it, a few that stray far would make the others look harmless.
    """

    offset: float
    clean: float
    attacked: float
    least: float
    most: float


# Attacks that hardly show, as on sketches, stray little more than clean originals of other data do. The weights heed
# even these and pay with some clean originals. What is reported is what can be told apart on most data.
CAREFUL = Law(offset=0.3, clean=0.8, attacked=1.2, least=1.0, most=3.0)
REPORTED = Law(offset=0.6, clean=1.0, attacked=1.5, least=2.5, most=4.0)


def judge(evidence: Tensor, counts: Tensor, law: Law) -> tuple[Tensor, Tensor]:
    """Return log-odds (B,) that an image is attacked, and the counts (2,3) that include this batch.

    Args:
        evidence: Of every image of the batch, (B,).
        counts: Of the window that completes a small batch, and of a long memory.
        law: What is assumed.
    """
    kept = max(0.0, 1 - len(evidence) / WINDOW)
    window, long = kept * counts[0], counts[1]
    odds = log_odds(evidence, torch.stack([window, long]), law)
    strayed = (evidence.detach() - law.offset).clamp(0, 1 / FLOOR)
    attacked = torch.sigmoid(odds).detach()
    seen = torch.stack([torch.ones_like(attacked).sum(dim=1), attacked.sum(dim=1), attacked @ strayed], dim=1)
    decay = DECAY ** min(1.0, len(evidence) / WINDOW)
    return odds.amax(dim=0), torch.stack([window + seen[0], decay * (long + seen[1])])


def log_odds(evidence: Tensor, memory: Tensor, law: Law) -> Tensor:
    """Fit the mixture and return log-odds (R,B) of attacked against clean, one row for each memory (R,3)."""
    # Being closer than the other views is not extra evidence of being clean.
    evidence = (evidence - law.offset).clamp(0, 1 / FLOOR)
    # Quadratic terms of both densities cancel but for this; the rest is linear in the mean of the attacked ones.
    quadratic = evidence.square() * ((law.clean**-2 - law.attacked**-2) / 2) + math.log(law.clean / law.attacked)
    images, before, strayed = memory.T.unsqueeze(-1)
    # Images that are missing in a window count as clean: a stream that has shown few must not look attacked.
    images = images.clamp(min=WINDOW - len(evidence))
    prior, mean = torch.full_like(images, 0.5), torch.full_like(images, max(2.0, law.least))
    for _ in range(ROUNDS):
        attacked = torch.sigmoid(_density_ratio(evidence, quadratic, prior, mean, law))
        count = attacked.sum(dim=1, keepdim=True) + before
        # Half an image of either kind counts as seen before: no batch is beyond doubt.
        prior = (count + 0.5) / (images + (len(evidence) + 1))
        mean = (((attacked @ evidence).unsqueeze(-1) + strayed) / (count + FLOOR)).clamp(law.least, law.most)
    return _density_ratio(evidence, quadratic, prior, mean, law)


def _density_ratio(evidence: Tensor, quadratic: Tensor, prior: Tensor, mean: Tensor, law: Law) -> Tensor:
    """Return prior log-odds plus the log-ratio of the attacked to the clean density."""
    return torch.logit(prior) + torch.addcmul(quadratic, evidence - mean / 2, mean, value=law.attacked**-2)
