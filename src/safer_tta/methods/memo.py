"""MEMO: for every image alone, make augmented copies agree, answer, and forget.

Zhang et al., "MEMO: Test time robustness via adaptation and augmentation", NeurIPS 2022.
Objective: entropy of the mean prediction over augmented copies of one image; one gradient step on all parameters; the
image is predicted with the stepped weights, which are then put back. Eval mode. Episodic: no image touches the next.

On a predictor with views of its own (SAFER), each of MEMO's copies is seen through those views: it works, at the
product of both costs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ..predictors import Prediction, Predictor, Report
from .base import Method
from .checks import count, positive
from .cost import Cost
from .losses import marginal_entropy
from .own_views import Seeded, augmix, seeded
from .registry import register


@register("memo")
class MEMO(Method):
    updates = "none"  # nothing stays
    cost = Cost(65, 32, "2 x copies + 1 forward, copies backward")
    by_predictor = False

    def __init__(self, predictor: Predictor, *, lr: float = 2.5e-4, copies: int = 32) -> None:
        positive(lr=lr)
        count(copies=copies)
        self.lr, self.copies = lr, copies
        super().__init__(predictor)

    def draw(self, images: Tensor) -> Seeded:
        return seeded(self.predictor, images)

    def forward(self, images: Tensor, draw: Any) -> tuple[Prediction, None]:
        generator = draw.generator()
        parameters = list(self.classifier.parameters())
        source = [p.detach().clone() for p in parameters]
        quiet = self.predictor.over(self.classifier)
        quiet.validate = False
        quiet.generator = torch.Generator().manual_seed(draw.seed)
        answers = []
        try:
            self.classifier.requires_grad_(True)
            for image in images:
                answers.append(self._answer_one(quiet, image, generator, parameters))
                _put(parameters, source)
        finally:
            _put(parameters, source)
            self.classifier.requires_grad_(False)
        return _joined(answers), None

    def _answer_one(
        self, predictor: Predictor, image: Tensor, generator: torch.Generator, parameters: list[torch.nn.Parameter]
    ) -> Prediction:
        with torch.enable_grad():
            copies = augmix(image, self.copies, generator)
            loss = marginal_entropy(predictor.lesson(copies, predictor.draw(copies), track=False).logits)
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    parameter.sub_(self.lr * gradient)
            # In the company of its copies, so that a predictor which compares views over a batch has one to compare.
            company = torch.cat([image[None], copies])
            return _first(predictor(company, predictor.draw(company), track=False))


def _put(parameters: list[torch.nn.Parameter], values: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


def _first(answer: Prediction) -> Prediction:
    """The first image of a batch alone."""
    seen = answer.report.view_probs
    report = dataclasses.replace(
        answer.report,
        weights=answer.report.weights[:, :1],
        view_probs=None if seen is None else seen[:, :1],
        signal=None if answer.report.signal is None else answer.report.signal[:1],
    )
    return Prediction(answer.probs[:1], answer.logits[:1], answer.features[:1], report).detach()


def _joined(answers: list[Prediction]) -> Prediction:
    """Single images as one batch. Each had views of its own, so no view was dropped for all of them."""
    weights = torch.cat([a.report.weights for a in answers], dim=1)
    probs, logits, features = (
        torch.cat([getattr(a, name) for a in answers]) for name in ("probs", "logits", "features")
    )
    seen = [a.report.view_probs for a in answers if a.report.view_probs is not None]
    signals = [a.report.signal for a in answers if a.report.signal is not None]
    reliability = [a.report.reliability for a in answers if a.report.reliability is not None]
    report: Report = dataclasses.replace(
        answers[0].report,
        weights=weights,
        reliability=torch.stack(reliability).mean(dim=0) if reliability else None,
        dropped=None,
        view_probs=torch.cat(seen, dim=1),
        signal=torch.cat(signals) if signals else None,
    )
    return Prediction(probs, logits, features, report)
