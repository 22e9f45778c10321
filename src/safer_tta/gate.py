"""The gate: open for the original view of an image that looks clean, shut for one that looks attacked. Not the paper's.

Augmented views tell how far a view may stray: an attack made for the original does not survive them. So how far the
original strays from them, beside how far they stray from each other, is evidence on one image that no dataset and no
share of attacked images moves. Two bells are fitted to a batch's evidence, and every image is judged by them: once
going by this batch alone, once by the batches before it as well, and whichever is more suspicious counts. So what is
remembered can shut the gate and never open it: a stream that was clean for long buys an attacker nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .pooling import with_original

FLOOR = 1e-6
ATTACKED = 1.2  # spread of attacked originals' evidence; docs/beyond.md has what was measured
# Attacked originals are expected to stray so far: with less everybody would be a little attacked, and with more a few
# that stray far would make the others look harmless.
LEAST, MOST = 1.0, 3.0
ROUNDS = 5  # of fitting; not converged, but a sixth moves the share of attacked images by 0.03 at most
SEEN = 3  # numbers that are remembered: images, those of them that were attacked, and the sum of these ones' evidence


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Weigh the original by how likely it is to be attacked. One setting for all data and methods.

    alpha_clean: weight of an original that is surely clean.
    cost: how much worse it is to trust an attacked original than to do without a clean one.
    teaches: whether methods learn from the gate's answer. If not, they learn from the probabilities of SAFER's own
        pooling as if there were no gate: an attacked original that it lets through is answered with, but its
        probabilities are not learnt from. TSD is another matter, see features.
    equal: whether the augmented views share the rest equally. If not, as the pooling rule weighs them; cc_drop leaves
        out the least reliable, on a clean batch one of the augmented, though the gate sees to the original.
    evidence: what an original's straying is compared with. "ratio": with how far the augmented views stray from each
        other. "predicted": with how far an augmented view would be expected to stray in its place, going by that;
        looked at twice, by distances and by angles. "distance": the mean of both comparisons, by distances alone.
    spread: standard deviation of clean originals' evidence.
    keeps: how much of what earlier batches have shown still counts a batch later; 0 remembers nothing.
    usual: taken off the evidence. Clean originals lie a little apart from gentle views; docs/beyond.md says how far.
    features: what a method learns from that aligns features with what is said of them (TSD). "gated": the original's
        where it is let in, the augmented views' where it is not, with the head's own scores of them, whatever `teaches`
        says. "pooled": as every other method, features and scores as the pooling rule weighs them.
    """

    alpha_clean: float = 0.5
    cost: float = 2.0
    teaches: bool = False
    equal: bool = True
    evidence: str = "distance"
    spread: float = 0.8
    keeps: float = 0.8
    usual: float = 0.3
    features: str = "gated"

    def __post_init__(self) -> None:
        if not 0 <= self.alpha_clean <= 1:
            raise ValueError(f"alpha_clean is {self.alpha_clean}; expected a weight between 0 and 1")
        for name in ("teaches", "equal"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {getattr(self, name)!r}; expected true or false")
        if self.evidence not in EVIDENCE:
            raise ValueError(f"evidence {self.evidence!r} is unknown; expected one of {', '.join(EVIDENCE)}")
        for name in ("cost", "spread"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a positive number")
        if not 0 <= self.keeps < 1:
            raise ValueError(f"keeps is {self.keeps}; expected a share from 0 (nothing) to less than 1 (everything)")
        if self.features not in ("gated", "pooled"):
            raise ValueError(f"features is {self.features!r}; expected 'gated' or 'pooled'")
        if not math.isfinite(self.usual):
            raise ValueError(f"usual is {self.usual}; expected a number of deviations")

    @property
    def least_views(self) -> int:
        """Augmented views it takes: how two of them stray from each other is compared with a third."""
        return 3

    @property
    def pipeline(self) -> str:
        """The views it takes unless told otherwise. The paper's forgo accuracy that a gate could not make up for, and
        stray so far from each other that attacked originals show less."""
        return "gentle"

    @property
    def memory(self) -> int:
        """How many numbers it remembers from batch to batch."""
        return SEEN if self.keeps else 0

    def mix(self, base_weights: Tensor, probs: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Final weights (V,B), and the probability (B,) that an image is attacked; going by this batch alone."""
        return self.remembering(base_weights, probs, features, features.new_zeros(SEEN, dtype=torch.float32))[:2]

    def remembering(
        self, base_weights: Tensor, probs: Tensor, features: Tensor, seen: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same, going by what was seen before (3,) as well; and what is to be remembered now."""
        if len(base_weights) == 1:
            return base_weights, torch.zeros_like(base_weights[0]), seen
        if len(base_weights) <= self.least_views:
            raise ValueError(
                f"{len(base_weights) - 1} augmented views, too few for the gate; expected at least {self.least_views}"
            )
        return self.weigh(base_weights, EVIDENCE[self.evidence](features), seen)

    def weigh(self, base_weights: Tensor, evidence: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What `remembering` gives, from the evidence (B,) on a batch."""
        odds, seen = self._judged(evidence - self.usual, seen.to(evidence))
        alpha = self.alpha_clean * torch.sigmoid(-odds - math.log(self.cost))
        shares = torch.ones_like(base_weights) if self.equal else base_weights
        return with_original(alpha.to(base_weights.dtype), shares), torch.sigmoid(odds), seen

    def of_features(self, weights: Tensor, base_weights: Tensor) -> Tensor | None:
        """By which views' features, and the head's scores of them, are weighed where features are learnt from (V,B);
        going by the weights of answers and of the pooling rule. Nothing is learnt by letting more in."""
        if self.features == "pooled" or len(weights) == 1:
            return None
        let_in = (weights[0].detach() / max(self.alpha_clean, FLOOR)).clamp(max=1)
        return with_original(let_in, torch.ones_like(base_weights))

    def _judged(self, evidence: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Log-odds (B,), and what is to be remembered."""
        alone = torch.zeros_like(seen)
        if not self.keeps:
            return log_odds(evidence, self.spread, alone[None])[0], alone
        odds = log_odds(evidence, self.spread, torch.stack([alone, seen]))
        attacked, strayed = torch.sigmoid(odds[1]).detach(), evidence.detach().clamp(0, 1 / FLOOR)
        now = torch.stack([torch.ones_like(attacked).sum(), attacked.sum(), torch.dot(attacked, strayed)])
        return odds.amax(dim=0), self.keeps * (seen + now)


def log_odds(evidence: Tensor, spread: float, seen: Tensor) -> Tensor:
    """Attacked against clean, (R,B), by two bells: of clean originals about 0, and of attacked ones further out. A row
    for each row of what was seen before, (R,3)."""
    evidence = evidence.clamp(0, 1 / FLOOR)  # nearer than the others is no more clean than among them
    # The squares of both bells cancel but for this; what is left of them is linear in the middle.
    far = evidence.square() * ((spread**-2 - ATTACKED**-2) / 2) + math.log(spread / ATTACKED)
    images, before, strayed = seen.T.unsqueeze(-1)
    share, middle = torch.full_like(images, 0.5), torch.full_like(images, 2.0)
    for _ in range(ROUNDS):
        attacked = torch.sigmoid(_log_odds(evidence, far, share, middle))
        count = attacked.sum(dim=1, keepdim=True) + before
        # As if half an image of either kind had been seen before: no batch is beyond doubt.
        share = (count + 0.5) / (images + (len(evidence) + 1))
        middle = (((attacked @ evidence).unsqueeze(-1) + strayed) / (count + FLOOR)).clamp(LEAST, MOST)
    return _log_odds(evidence, far, share, middle)


def _log_odds(evidence: Tensor, far: Tensor, share: Tensor, middle: Tensor) -> Tensor:
    """Prior odds, and the logarithm of the attacked bell's density over the clean one's."""
    return torch.logit(share) + torch.addcmul(far, evidence - middle / 2, middle, value=ATTACKED**-2)


# --- evidence: by how many deviations of an augmented view's straying the original strays too far -------------------


def by_ratio(features: Tensor) -> Tensor:
    """Evidence (B,): as far as the augmented views stray from each other an original may."""
    original, augmented, others = straying(_distances(features))
    return _deviations(original - others, augmented - others)


def by_prediction(features: Tensor) -> Tensor:
    """Evidence (B,): as far as an augmented view would, going by how the others of the same image stray. Those are few,
    so much of what they say is chance: how far to go by it, a line through all augmented views of the batch tells.
    The mean of two looks: distances, each dimension on its scale, and angles."""
    return (_surprise(_distances(features)) + _surprise(_angles(features))) / 2


def by_distance(features: Tensor) -> Tensor:
    """Evidence (B,): what the two others say of distances, and nothing of angles; their mean."""
    return of_distances(_distances(features))


def of_distances(distance: Tensor) -> Tensor:
    """The same, of distances (V,V,B) between the views."""
    original, augmented, others = straying(distance)
    return (_deviations(original - others, augmented - others) + _surprise(distance)) / 2


EVIDENCE = {"ratio": by_ratio, "predicted": by_prediction, "distance": by_distance}


def _surprise(distance: Tensor) -> Tensor:
    original, augmented, others = straying(distance)
    beyond = others - others.mean()
    slope = (beyond * (augmented - augmented.mean())).sum() / (beyond.square().sum() + FLOOR)
    expected = augmented.mean() + slope.clamp(0, 1) * beyond
    return _deviations(original - expected, augmented - expected)


def _deviations(original: Tensor, augmented: Tensor) -> Tensor:
    return original.mean(dim=0) / augmented.square().mean().sqrt().clamp_min(FLOOR)


def straying(distance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From distances (V,V,B) between an image's views three logarithms, each (V-1,B), each augmented view left out in
    turn: how far the original is from the others, how far the one left out, and how far those are from each other."""
    count = len(distance) - 1
    to_augmented = distance[:, 1:].sum(dim=1)
    among_all = to_augmented[1:].sum(dim=0) / 2
    others = (among_all - to_augmented[1:]) / ((count - 1) * (count - 2) / 2)
    original = (to_augmented[0] - distance[0, 1:]) / (count - 1)
    augmented = to_augmented[1:] / (count - 1)
    return (original + FLOOR).log(), (augmented + FLOOR).log(), (others + FLOOR).log()


def _distances(features: Tensor) -> Tensor:
    """Squared distances (V,V,B) between an image's views, each dimension on the scale of the augmented views."""
    z = features.to(torch.promote_types(features.dtype, torch.float32))
    z = z - z[1:].mean(dim=(0, 1))
    z = z / (z[1:].square().mean(dim=(0, 1)) + FLOOR).sqrt()
    z = z.transpose(0, 1)
    products = z @ z.transpose(1, 2) / z.shape[2]
    lengths = products.diagonal(dim1=1, dim2=2)
    return (lengths[:, :, None] + lengths[:, None] - 2 * products).clamp_min(0).permute(1, 2, 0)


def _angles(features: Tensor) -> Tensor:
    """1 - cosine (V,V,B) between an image's views."""
    z = F.normalize(features.to(torch.promote_types(features.dtype, torch.float32)), dim=-1).transpose(0, 1)
    return (1 - z @ z.transpose(1, 2)).clamp_min(0).permute(1, 2, 0)
