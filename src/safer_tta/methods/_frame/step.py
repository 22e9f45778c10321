"""What a method makes of a batch before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from ...predictors import Outlook, Prediction


class Step(NamedTuple):
    """What `forward` returns.

    Attributes:
        seen: What the predictor showed.
        loss: What to minimise; None to learn nothing from this batch.
        answer: The method's own answer, if it is not the predictor's.
        kept: Tensors that `commit` needs.
    """

    seen: Outlook
    loss: Tensor | None
    answer: Prediction | None = None
    kept: Mapping[str, Tensor] = MappingProxyType({})

    @property
    def prediction(self) -> Prediction:
        """What the user gets."""
        return self.seen.answer if self.answer is None else self.answer

    def detach(self) -> Step:
        """Return the same numbers without the graph that made them, and without the loss."""
        answer = None if self.answer is None else self.answer.detach()
        return Step(self.seen.detach(), None, answer, {name: tensor.detach() for name, tensor in self.kept.items()})
