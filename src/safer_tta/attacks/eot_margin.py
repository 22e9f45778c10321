"""EOT that is carried through: the attacker knows all but the draws of the views, and does not stop early.

Ten steps on the cross-entropy overstate what a random defence withstands. Here a hundred small steps with momentum
climb the margin of the *mean* scores over the draws: by how much the best wrong class leads the true one. Restarts keep
the best image of each. A cautious attacker also keeps the suspicion low.

The margin of mean scores is linear in the scores once the best wrong class is known. So a first pass without gradients
finds that class, and a second adds up the gradients of the draws, one after another: memory does not grow with them.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Generator, Tensor

from .._internal.checks import count, not_negative, share
from .._internal.seeds import draw_seed
from ..errors import InvalidTypeError, InvalidValueError
from ..models.norm import exact_gradients
from ..predictors import Prediction, Predictor
from ..views import Draw
from .goals import check_target, margin, rivals
from .pgd import Budget, ascend, check_labels
from .registry import register

BUDGET: Budget = {"eps": 8 / 255, "step": 1 / 255, "steps": 100, "norm": "linf"}
JUDGES = 16  # draws by which images of several restarts are compared
SURE = 1e-6  # from here to certainty, single precision has no gradient


def eot_margin(
    predictor: Predictor,
    images: Tensor,
    labels: Tensor,
    *,
    draws: int = 8,
    restarts: int = 1,
    momentum: float = 0.75,
    caution: float = 0.0,
    target: str | None = None,
    generator: Generator | None = None,
    **budget: Unpack[Budget],
) -> Tensor:
    """Attack a batch through a predictor as it stands now, with all that the attacker can do.

    Args:
        predictor: What is attacked, such as `Safer(model)` or `adapted.predictor`.
        images: (B,3,H,W), floats in [0,1] or uint8.
        labels: The true classes (B,).
        draws: Over how many draws of the views the scores are averaged, in every step anew.
        restarts: How often the attack starts, at random; the best image of all is kept, judged by fresh draws.
        momentum: The share of earlier gradients that is kept in every step; 0 for none.
        caution: How much a lower suspicion counts: this many times its log-odds are taken off the margin. It needs a
            predictor that estimates suspicion.
        target: "next" leads every image to the class after its own; None to any wrong class.
        generator: The attacker's own, on the CPU.
        **budget: `eps`, `step`, `steps` and `norm`, as `pgd` takes them; by default 8/255, 1/255, 100 and "linf".

    Returns:
        Attacked images on 8-bit values, within the budget.
    """
    count(draws=draws, restarts=restarts)
    share(momentum=momentum)
    not_negative(caution=caution)
    check_target(target)
    if not isinstance(predictor, Predictor):
        raise InvalidTypeError(
            f"predictor is {type(predictor).__name__}; expected a Predictor, such as Safer(model) or adapted.predictor"
        )
    if caution and not predictor.estimates_suspicion:
        raise InvalidValueError(
            f"caution is {caution:g} and {type(predictor).__name__} estimates no suspicion; expected 0, or a predictor "
            "that does, such as safer-g"
        )
    check_labels(labels, images)
    known = predictor.fork(seed=draw_seed(generator), validate=False)  # perturbed images are in range by construction
    judges = [known.draw(images) for _ in range(JUDGES)]
    with exact_gradients(known.classifier.norms()), torch.inference_mode(False):
        aim = Aim(known, labels.to(images.device, copy=True), target, caution)

        def gradient(perturbed: Tensor) -> Tensor:
            return aim.gradient(perturbed, [known.draw(perturbed) for _ in range(draws)])

        climb = functools.partial(ascend, gradient, images, momentum=momentum, generator=generator, **(BUDGET | budget))
        return aim.best((climb() for _ in range(restarts)), judges)


OPTIONS = {"draws": 8, "restarts": 1, "momentum": 0.75, "caution": 0.0, "target": None}


# Each draw is passed once without a gradient and once with it.
@register("eot-margin", live=True, steps=100, step=1 / 255, passes=4, options=OPTIONS)
def attack_predictor(
    model: Predictor, images: Tensor, labels: Tensor, threat: Mapping[str, Any], randomness: Generator
) -> Tensor:
    return eot_margin(model, images, labels, generator=randomness, **threat)


@dataclass(frozen=True)
class Aim:
    """What is climbed: the margin of the mean scores over draws, less the mean log-odds of suspicion."""

    predictor: Predictor
    labels: Tensor
    target: str | None = None
    caution: float = 0.0

    def gradient(self, images: Tensor, draws: Sequence[Draw]) -> Tensor:
        """Return the gradient of the summed value with respect to the images."""
        raised, lowered = rivals(self._mean(images, draws)[0], self.labels, self.target)
        total = torch.zeros_like(images)
        for draw in draws:
            with torch.enable_grad():
                own = images.detach().clone().requires_grad_(True)
                prediction = self.predictor(own, draw, track=False)
                gain = margin(prediction.logits.float(), raised, lowered) - self._worry(prediction)
                total += torch.autograd.grad(gain.sum(), own)[0]
        return total / len(draws)

    def value(self, images: Tensor, draws: Sequence[Draw]) -> Tensor:
        """Return the value of every image, (B,)."""
        logits, worry = self._mean(images, draws)
        return margin(logits, *rivals(logits, self.labels, self.target)) - worry

    def best(self, candidates: Iterable[Tensor], draws: Sequence[Draw]) -> Tensor:
        """Return for every image the candidate of the highest value; all are judged by the same draws."""
        first, *others = candidates
        best, highest = first, self.value(first, draws)
        for candidate in others:
            value = self.value(candidate, draws)
            best = torch.where((value > highest)[:, None, None, None], candidate, best)
            highest = torch.maximum(value, highest)
        return best

    @torch.no_grad()
    def _mean(self, images: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
        """Return the mean scores (B,K), and the mean of what caution takes off (B,)."""
        logits = worry = torch.zeros((), device=images.device)
        for draw in draws:
            prediction = self.predictor(images, draw, track=False)
            logits, worry = logits + prediction.logits.float(), worry + self._worry(prediction)
        return logits / len(draws), worry / len(draws)

    def _worry(self, prediction: Prediction) -> Tensor:
        """Return what caution takes off for every image. Log-odds keep their gradient where suspicion is near 1."""
        if not self.caution or prediction.suspicion is None:
            return prediction.logits.new_zeros(())
        return self.caution * torch.logit(prediction.suspicion.clamp(SURE, 1 - SURE))
