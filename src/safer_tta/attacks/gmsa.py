"""GMSA and FPA (Chen et al., ICLR 2022): attacks through the adaptation.

An attack on the model as it stands misses that the method adapts to the attacked batch. So the attacker lets a copy of
the method adapt to it, attacks again, and so on. FPA, the fixed point attack, attacks the newest copy. GMSA, the greedy
model space attack, attacks all copies so far: by their mean loss ("avg"), or by the smallest one ("min").

Of all rounds, the batch is kept to which a copy of the deployed method gives the worst answers. Neither the method nor
its generator is moved.
"""

import copy
import functools
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from .._internal.checks import count, one_of
from .._internal.seeds import draw_seed
from ..errors import InvalidTypeError
from ..methods import Method
from ..models.norm import exact_gradients
from ..predictors import Predictor
from .attacker import check_attackable, check_mine
from .pgd import LEVELS, Budget, ascend, check_labels
from .registry import ATTACKS, Threat, register

BUDGET: Budget = {"eps": 8 / 255, "step": 2 / 255, "steps": 10, "norm": "linf"}
OVER = ("min", "avg", "last")  # which copies are attacked: GMSA-MIN, GMSA-AVG, FPA


def gmsa(
    method: Method,
    images: Tensor,
    labels: Tensor,
    mine: Tensor | None = None,
    *,
    over: str = "min",
    rounds: int = 3,
    draws: int = 1,
    generator: Generator | None = None,
    **budget: Unpack[Budget],
) -> Tensor:
    """Attack a batch through a method as it stands now, and through what the batch makes of it.

    Args:
        method: What is attacked, as `adapt` returns it. It answers with its predictor (`by_predictor`).
        images: (B,3,H,W), floats in [0,1] or uint8.
        labels: The true classes (B,).
        mine: Which images are the attacker's, (B,) of bool; None for all.
        over: "min" and "avg" attack all copies of the method, by the smallest or the mean loss of each image (GMSA);
            "last" attacks the newest copy (FPA).
        rounds: How often a copy adapts to the attacked batch, and the batch is attacked again.
        draws: Over how many draws of the views each gradient is averaged.
        generator: The attacker's own, on the CPU.
        **budget: `eps`, `step`, `steps` (of each round) and `norm`, as `pgd` takes them; by default 8/255, 2/255, 10
            and "linf".

    Returns:
        The batch, with the attacker's images changed within the budget, on 8-bit values.
    """
    count(rounds=rounds, draws=draws)
    one_of(OVER, over=over)
    if not isinstance(method, Method):
        raise InvalidTypeError(f"method is {type(method).__name__}; expected what adapt returns")
    check_attackable(ATTACKS["gmsa"], type(method))
    check_labels(labels, images)
    mine = torch.ones_like(labels, dtype=torch.bool) if mine is None else mine
    check_mine(mine, labels)
    images = images / LEVELS if images.dtype == torch.uint8 else images.detach()
    if not bool(mine.any()):
        return images
    mine, labels = mine.to(images.device), labels.to(images.device)
    copies = [_twin(method, generator)]
    found: list[tuple[float, Tensor]] = []
    for _ in range(rounds + 1):
        attacked = _Attacked(copies[-1:] if over == "last" else copies, over, images, labels, mine, draws, generator)
        own = ascend(attacked.gradient, images[mine], generator=generator, **(BUDGET | budget))
        batch = images.index_put((mine,), own)
        adapted = _twin(method, generator)
        answer = adapted(batch)
        harm = F.cross_entropy(answer.logits.float()[mine], labels[mine])
        found.append((float(harm), batch))
        copies.append(adapted)
    return max(found, key=lambda one: one[0])[1]


# A step goes through the mean number of copies.
@register("gmsa", live=True, adapts=True, steps=10, passes=10, options={"over": "min", "rounds": 3, "draws": 1})
def attack_method(
    model: Method, images: Tensor, labels: Tensor, threat: Threat, randomness: Generator, mine: Tensor
) -> Tensor:
    return gmsa(model, images, labels, mine, generator=randomness, **threat)


def _twin(method: Method, generator: Generator | None) -> Method:
    """Return a copy of a method that draws by the attacker's own numbers."""
    twin = copy.deepcopy(method)
    twin.predictor.generator.manual_seed(draw_seed(generator))
    twin.predictor.validate = False  # what is made here is in range by construction
    return twin


class _Attacked:
    """The gradient of the loss of the attacker's images, over several copies of a method."""

    def __init__(
        self,
        copies: Sequence[Method],
        over: str,
        images: Tensor,
        labels: Tensor,
        mine: Tensor,
        draws: int,
        generator: Generator | None,
    ) -> None:
        self.copies, self.over, self.draws = copies, over, draws
        self.images, self.labels, self.mine = images, labels, mine
        self.predictors: list[Predictor] = [m.predictor.fork(seed=draw_seed(generator), validate=False) for m in copies]

    def gradient(self, own: Tensor) -> Tensor:
        total = torch.zeros_like(own)
        for _ in range(self.draws):
            with ExitStack() as modes, torch.inference_mode(False), torch.enable_grad():
                own = own.detach().clone().requires_grad_(True)
                losses = []
                for method, predictor in zip(self.copies, self.predictors, strict=True):
                    modes.enter_context(method.answering())
                    modes.enter_context(exact_gradients(predictor.classifier.norms()))
                    losses.append(self._loss(predictor, own))
                several = torch.stack(losses)
                chosen = several.amin(dim=0) if self.over == "min" else several.mean(dim=0)
                total += torch.autograd.grad(chosen.sum(), own)[0]
        return total / self.draws

    def _loss(self, predictor: Predictor, own: Tensor) -> Tensor:
        batch = self.images.index_put((self.mine,), own)
        predict = functools.partial(predictor, draw=predictor.draw(batch), track=False)
        return F.cross_entropy(predict(batch).logits.float()[self.mine], self.labels[self.mine], reduction="none")
