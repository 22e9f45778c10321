"""The gate: open for the original view of an image that looks clean, shut for one that looks attacked. Not the paper's.

Augmented views tell how far a view may stray: an attack made for the original does not survive them. So how far the
original strays from them, beside how far they stray from each other, is evidence on one image that no dataset and no
share of attacked images moves. Two bells are fitted to a batch's evidence, and every image is judged by them. Nothing
is remembered from batch to batch, so there is no memory to poison.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .pooling import with_original

FLOOR = 1e-6
# Spread of the evidence in standard deviations of an augmented view's: as measured on the embedded data and on PACS.
CLEAN, ATTACKED = 0.6, 1.2
# Attacked originals are expected to stray so far: with less everybody would be a little attacked, and with more a few
# that stray far would make the others look harmless.
LEAST, MOST = 1.0, 3.0
ROUNDS = 5  # of fitting; not converged, but a sixth moves the share of attacked images by 0.03 at most


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Weigh the original by how likely it is to be attacked. One setting for all data and methods.

    alpha_clean: weight of an original that is surely clean.
    cost: how much worse it is to trust an attacked original than to do without a clean one.
    teaches: whether methods learn from the gate's answer. If not, they learn from SAFER's own pooling as if there were
        no gate: an attacked original that it lets through is answered with, but not learnt from. A method that answers
        from what it has learnt alone, as T3A does, then answers as without the gate.
    equal: whether the augmented views share the rest equally. If not, as the pooling rule weighs them; cc_drop leaves
        out the least reliable, on a clean batch one of the augmented, though the gate sees to the original.
    """

    alpha_clean: float = 0.6
    cost: float = 5.0
    # Unnamed: as in rows from before there was a choice.
    teaches: bool = field(default=True, metadata={"unnamed": True})
    equal: bool = field(default=False, metadata={"unnamed": False})

    def __post_init__(self) -> None:
        if not 0 <= self.alpha_clean <= 1:
            raise ValueError(f"alpha_clean is {self.alpha_clean}; expected a weight between 0 and 1")
        for name in ("teaches", "equal"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {getattr(self, name)!r}; expected true or false")
        if not self.cost > 0:
            raise ValueError(f"cost is {self.cost}; expected a positive number")

    @property
    def least_views(self) -> int:
        """Augmented views it takes: how two of them stray from each other is compared with a third."""
        return 3

    def mix(self, base_weights: Tensor, probs: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Final weights (V,B), and the probability (B,) that an image is attacked."""
        if len(base_weights) == 1:
            return base_weights, torch.zeros_like(base_weights[0])
        if len(base_weights) <= self.least_views:
            raise ValueError(
                f"{len(base_weights) - 1} augmented views, too few for the gate; expected at least {self.least_views}"
            )
        odds = log_odds(features)
        alpha = self.alpha_clean * torch.sigmoid(-odds - math.log(self.cost))
        shares = torch.ones_like(base_weights) if self.equal else base_weights
        return with_original(alpha.to(base_weights.dtype), shares), torch.sigmoid(odds)


def log_odds(features: Tensor) -> Tensor:
    """Attacked against clean, (B,), by two bells: of clean originals about 0, and of attacked ones further out."""
    original, augmented = straying(features)
    deviation = augmented.square().mean().sqrt().clamp_min(FLOOR)
    evidence = (original / deviation).clamp(0, 1 / FLOOR)  # nearer than the others is no more clean than among them
    # The squares of both bells cancel but for this; what is left of them is linear in the middle.
    far = evidence.square() * ((CLEAN**-2 - ATTACKED**-2) / 2) + math.log(CLEAN / ATTACKED)
    share, middle = torch.full_like(deviation, 0.5), torch.full_like(deviation, 2.0)
    for _ in range(ROUNDS):
        attacked = torch.sigmoid(_log_odds(evidence, far, share, middle))
        count = attacked.sum()
        # As if half an image of either kind had been seen before: no batch is beyond doubt.
        share = (count + 0.5) / (len(attacked) + 1)
        middle = (torch.dot(attacked, evidence) / (count + FLOOR)).clamp(LEAST, MOST)
    return _log_odds(evidence, far, share, middle)


def _log_odds(evidence: Tensor, far: Tensor, share: Tensor, middle: Tensor) -> Tensor:
    """Prior odds, and the logarithm of the attacked bell's density over the clean one's."""
    return torch.logit(share) + torch.addcmul(far, evidence - middle / 2, middle, value=ATTACKED**-2)


def straying(features: Tensor) -> tuple[Tensor, Tensor]:
    """How far a view is from the augmented ones, beside how far those are from each other, as a logarithm: of the
    original (B,), and of each augmented view (V-1,B), for which it is 0 on the average.

    An augmented view is compared with the others. So the original is compared with all but one, each left out in turn.
    """
    distance = _distances(features)
    count = len(features) - 1
    to_augmented = distance[:, 1:].sum(dim=1)
    among_all = to_augmented[1:].sum(dim=0) / 2
    among_others = (among_all - to_augmented[1:]) / ((count - 1) * (count - 2) / 2) + FLOOR
    original = (to_augmented[0] - distance[0, 1:]) / (count - 1) + FLOOR
    augmented = to_augmented[1:] / (count - 1) + FLOOR
    return (original / among_others).log().mean(dim=0), (augmented / among_others).log()


def _distances(features: Tensor) -> Tensor:
    """Squared distances (V,V,B) between an image's views, each dimension on the scale of the augmented views."""
    z = features.to(torch.promote_types(features.dtype, torch.float32))
    z = z - z[1:].mean(dim=(0, 1))
    z = z / (z[1:].square().mean(dim=(0, 1)) + FLOOR).sqrt()
    z = z.transpose(0, 1)
    products = z @ z.transpose(1, 2) / z.shape[2]
    lengths = products.diagonal(dim1=1, dim2=2)
    return (lengths[:, :, None] + lengths[:, None] - 2 * products).clamp_min(0).permute(1, 2, 0)
