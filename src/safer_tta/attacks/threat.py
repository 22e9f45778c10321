"""A threat is all that an attack is told: its budget, its steps and its own options."""

from typing import Any

from .._internal.signatures import check_names
from ..errors import InvalidValueError
from .pgd import check_threat
from .registry import ATTACKS


def full_threat(attack: str = "pgd", **changes: Any) -> dict[str, Any]:
    """Return the paper's threat with changes of `eps`, `norm`, `step`, `steps` and the attack's own options.

    An l2 budget needs `eps`, and brings its own step unless one is given.
    """
    known = ATTACKS.find(attack)
    kept = [*(["eps", "norm"] if known.norms else []), *([] if known.own_steps else ["step", "steps"])]
    check_names(changes, [*kept, *known.options], f"attack {attack!r}")
    budget: dict[str, Any] = {"eps": known.eps, "norm": "linf", "step": known.step, "steps": known.steps} | changes
    if known.norms and budget["norm"] not in known.norms:
        raise InvalidValueError(
            f"norm is {budget['norm']!r}; expected {' or '.join(known.norms)} for attack {attack!r}"
        )
    if budget["norm"] == "l2":
        if "eps" not in changes:
            raise InvalidValueError(
                "eps is missing and an l2 budget has no default; expected a number such as 1.0 for images of 64 pixels "
                "a side"
            )
        budget["step"] = changes.get("step", 2.5 * budget["eps"] / budget["steps"])
    check_threat(**{name: budget[name] for name in ("eps", "norm", "step", "steps")})
    return {name: budget[name] for name in kept} | {name: budget.get(name, v) for name, v in known.options.items()}
