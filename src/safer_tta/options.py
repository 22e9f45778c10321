"""Options by name: one that does not exist is refused with those that do."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any


def check(made: Callable[..., Any], options: Iterable[str], what: str, *, own: Iterable[str] = ()) -> None:
    """Whether `made` takes these options. own: parameters of it that are not options."""
    parameters = inspect.signature(made).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return  # it takes whatever comes, and says itself what it does not know
    accepted = [name for name in parameters if name not in own]
    unknown = [option for option in options if option not in accepted]
    if unknown:
        raise TypeError(
            f"{what} has no option {', '.join(unknown)}; "
            + (f"expected some of {', '.join(accepted)}" if accepted else "it has none")
        )
