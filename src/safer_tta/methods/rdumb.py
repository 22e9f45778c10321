"""RDumb: a method that forgets on schedule beats many that do not.

Press et al., "RDumb: A simple approach that questions our progress in continual test-time adaptation", NeurIPS 2023.
EATA without its Fisher penalty, put back to the source model every 1,000 batches.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..predictors import Prediction, Predictor
from .checks import count
from .eata import EATA
from .registry import register


@register("rdumb")
class RDumb(EATA):
    def __init__(self, predictor: Predictor, *, lr: float = 2.5e-4, every: int = 1000) -> None:
        count(every=every)
        self.every = every
        super().__init__(predictor, lr=lr, fisher=0.0)

    def prepare(self) -> None:
        super().prepare()
        self.state.memory["steps"] = torch.zeros((), dtype=torch.int64)

    def fit_source(self, batches: Iterable[Any]) -> None:
        raise TypeError("rdumb has no Fisher penalty to fit; use eata for one")

    def commit(self, images: Tensor, prediction: Prediction) -> None:
        super().commit(images, prediction)
        self.state.memory["steps"] = self.state.memory["steps"] + 1
        if int(self.state.memory["steps"]) >= self.every:
            self.restore()
