"""What an optimiser calls for the gradients of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from .method import Method

Closure = Callable[[], Tensor | None]


def closing(method: Method, loss: Tensor, again: Callable[[], Tensor | None]) -> Closure:
    """Return a closure that computes gradients: first of the loss already computed, then of a fresh pass."""
    computed = [loss]

    def closure() -> Tensor | None:
        method.state.drop_gradients()
        if computed:
            value: Tensor | None = computed.pop()
        else:
            with method.classifier.untracked():
                value = again()
        if value is not None:
            method.backward(value)
        return value

    return closure
