"""A threat is all that an attack is told: its budget, its steps and its own options."""

from __future__ import annotations

from typing import Any

from .._internal.signatures import check_names
from ..errors import InvalidValueError
from .pgd import check_threat
from .registry import ATTACKS

EPS, STEP = 8 / 255, 2 / 255  # the paper's


def full_threat(attack: str = "pgd", **changes: Any) -> dict[str, Any]:
    """Return the paper's threat with changes.

    Args:
        attack: The attack, whose default number of steps and options are taken.
        **changes: `eps`, `norm`, `step`, `steps`, and the attack's own options. An l2 budget needs `eps`, and brings
            its own step unless one is given.

    Raises:
        InvalidValueError: If the budget is impossible.
        InvalidTypeError: If the attack has no such option.
    """
    known = ATTACKS.find(attack)
    steps = [] if known.own_steps else ["step", "steps"]
    check_names(changes, ["eps", "norm", *steps, *known.options], f"attack {attack!r}")
    budget: dict[str, Any] = {"eps": EPS, "norm": "linf", "step": STEP, "steps": known.steps} | changes
    if budget["norm"] == "l2":
        if "eps" not in changes:
            raise InvalidValueError(
                "an l2 budget has no default; expected eps, such as 1.0 for images of 64 pixels a side"
            )
        budget["step"] = changes.get("step", 2.5 * budget["eps"] / budget["steps"])
    check_threat(**{name: budget[name] for name in ("eps", "norm", "step", "steps")})
    kept = ["eps", "norm", *steps]
    return {name: budget[name] for name in kept} | {name: budget.get(name, v) for name, v in known.options.items()}
