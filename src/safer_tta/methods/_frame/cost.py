"""What a step of a method costs."""

from typing import NamedTuple


class Cost(NamedTuple):
    """Passes of a batch through a model; in words too, where two numbers do not say it all."""

    forward: float
    backward: float
    words: str = ""

    def __str__(self) -> str:
        return self.words or f"{self.forward:g} forward, {self.backward:g} backward"

    @property
    def passes(self) -> float:
        """The cost in forward passes, where a backward pass counts as two; only for estimates."""
        return self.forward + 2 * self.backward
