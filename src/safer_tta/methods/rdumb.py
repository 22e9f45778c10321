"""RDumb: EATA that is reset on a schedule.

Press et al., "RDumb: A simple approach that questions our progress in continual test-time adaptation", NeurIPS 2023.
Without EATA's Fisher penalty, and put back to the source model every 1,000 batches.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidTypeError
from . import Step, count, option, register
from .eata import EATA


@register("rdumb")
class RDumb(EATA):
    every: int = option(1000, count)
    fisher = 0.0

    def prepare(self) -> None:
        super().prepare()
        self.state.memory["steps"] = torch.zeros((), dtype=torch.int64)

    def fit_source(self, batches: Iterable[Any]) -> None:
        raise InvalidTypeError("rdumb has no Fisher penalty to fit; use eata for one")

    def commit(self, images: Tensor, step: Step) -> None:
        super().commit(images, step)
        self.state.memory["steps"] = self.state.memory["steps"] + 1
        if int(self.state.memory["steps"]) >= self.every:
            self.restore()
