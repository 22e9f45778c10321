"""Transfer with knowledge of the defence: the attacker knows how predictions are defended, but not the deployed model.

So the attacker puts the same defence around a model of their own, and attacks through both with EOT ahead of the
stream.
"""

from collections.abc import Mapping
from typing import Any, Unpack

from torch import Generator, Tensor, nn

from ..errors import InvalidTypeError
from ..models import Classifier, zoo
from ..predictors import create, parse
from .eot import eot_pgd
from .pgd import Budget, undisturbed
from .registry import register
from .transfer import BUDGET


def aware(
    surrogate: nn.Module | Classifier,
    images: Tensor,
    labels: Tensor,
    *,
    defence: str | Mapping[str, Any] = "safer",
    draws: int = 4,
    momentum: float = 0.0,
    target: str | None = None,
    generator: Generator | None = None,
    **budget: Unpack[Budget],
) -> Tensor:
    """Attack a batch through a defence around the attacker's own model, which keeps its statistics and is not changed.

    Args:
        surrogate: The attacker's own model, or a Classifier.
        images: (B,3,H,W), floats in [0,1] or uint8.
        labels: The true classes (B,).
        defence: The predictor that is put around it: a name such as "safer" or "safer-g", or a dict {"name": ...,
            **options}.
        draws: Over how many draws of the views each gradient is averaged.
        momentum: The share of earlier gradients that is kept in every step; 0 for none.
        target: "next" leads every image to the class after its own; None to any wrong class.
        generator: The attacker's own, on the CPU.
        **budget: `eps`, `step`, `steps` and `norm`, as `pgd` takes them; by default 8/255, 2/255, 20 and "linf".

    Returns:
        Attacked images on 8-bit values, within the budget.
    """
    if not isinstance(surrogate, nn.Module):
        raise InvalidTypeError(
            f"surrogate is {type(surrogate).__name__}; expected a model or a Classifier of the attacker's own. Attack "
            "a deployed Predictor with eot_pgd"
        )
    name, options = parse(defence)
    defended = create(name, surrogate, seed=0, **options)  # whose own draws are not used: EOT makes others
    with undisturbed(surrogate):
        eot: dict[str, Any] = {"draws": draws, "momentum": momentum, "target": target, "generator": generator}
        return eot_pgd(defended, images, labels, **eot, **(BUDGET | budget))


def _parts(threat: Mapping[str, Any]) -> dict[str, int]:
    """Return the versions of the defence and of what it is made of."""
    name, options = parse(threat["defence"])
    defended = create(name, zoo.create("small", num_classes=7), seed=0, **options)
    return {f"predictor {name}": defended.version, **defended.versions}


OPTIONS = {"defence": "safer", "draws": 4, "momentum": 0.0, "target": None}


# A step passes an image and, in the usual defence, four views of it.
@register("aware", passes=15, options=OPTIONS, parts=_parts)
def attack_surrogate(
    model: Classifier, images: Tensor, labels: Tensor, threat: Mapping[str, Any], randomness: Generator
) -> Tensor:
    return aware(model, images, labels, generator=randomness, **threat)
