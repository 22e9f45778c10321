"""SAFER-G, the gate: weigh the original view of an image by how likely it is to be attacked. Not part of the paper.

An attack made for the original does not survive the augmentations. So the augmented views tell how far a view may
stray, and an original that strays further from them is evidence of an attack, image by image. The evidence is judged
twice: carefully for the weights, and by what can be told apart for the suspicion that is reported.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .._internal.checks import positive, share
from ..errors import InvalidValueError
from ..pooling import Verdict, with_original
from .straying import SIZE, Recent, evidence
from .suspicion import CAREFUL, COUNTS, REPORTED, judge

LAWS = (CAREFUL, REPORTED)


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Weigh the original view by how likely it is to be attacked; one setting for all data and methods.

    The weights follow the signal "caution", which heeds attacks that hardly show too.

    Methods learn from SAFER's own pooling, as if there were no gate. Only those that align features with scores (TSD)
    get the original's features where it is trusted, and the augmented views' where it is not.

    Args:
        cost: How much worse it is to trust an attacked original than to do without a clean one.
        alpha_clean: Weight of an original that is surely clean.
    """

    cost: float = 2.0
    alpha_clean: float = 0.5

    version: ClassVar[int] = 9
    least_views: ClassVar[int] = 3  # how two augmented views stray from each other is compared with a third
    preset: ClassVar[str] = "gentle"
    norm: ClassVar[str | None] = "stream"
    estimates_suspicion: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive(cost=self.cost)
        share(alpha_clean=self.alpha_clean)

    def memory_size(self, features: int) -> int:
        """Return how many numbers it remembers: counts of two memories, and the window of the evidence."""
        return len(LAWS) * 2 * COUNTS + SIZE

    def weigh(self, base: Tensor, probs: Tensor, features: Tensor, memory: Tensor) -> Verdict:
        """Decide about a batch; `Mixing.weigh` explains the arguments."""
        if len(base) == 1:  # no augmented view to compare with
            return Verdict(base, base)
        if len(base) <= self.least_views:
            raise InvalidValueError(
                f"{len(base) - 1} augmented views are too few for the gate; expected at least {self.least_views}"
            )
        size = len(LAWS) * 2 * COUNTS
        counts, before = torch.split(
            memory.to(torch.promote_types(features.dtype, torch.float32)), [size, len(memory) - size]
        )
        found, recent = evidence(features, Recent.of(before))
        verdicts = [judge(found, c, law) for c, law in zip(counts.view(-1, 2, COUNTS), LAWS, strict=True)]
        odds, reported = (verdict[0] for verdict in verdicts)
        equal = torch.ones_like(base)
        trust = torch.sigmoid(-odds - math.log(self.cost))
        let_in = trust.detach() if self.alpha_clean else torch.zeros_like(trust)
        return Verdict(
            answer=with_original((self.alpha_clean * trust).to(base.dtype), equal),
            lesson=base,
            aligned=with_original(let_in.to(base.dtype), equal),
            suspicion=torch.sigmoid(reported),
            signals={"caution": torch.sigmoid(odds)},
            memory=torch.cat([*(counts.flatten() for _, counts in verdicts), recent.pack().detach()]),
        )
