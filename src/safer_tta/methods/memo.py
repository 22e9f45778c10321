"""MEMO: for every image by itself, make augmented copies agree, answer, and forget.

Zhang et al., "MEMO: Test time robustness via adaptation and augmentation", NeurIPS 2022.
Objective: entropy of the mean prediction over augmented copies of one image; one gradient step on all parameters; the
image is predicted with the stepped weights, which are then put back. Eval mode. Episodic: no image touches the next.

On a predictor with views of its own (SAFER), each of MEMO's copies is seen through those views: it works, at the
product of both costs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._internal.checks import count, positive
from ..predictors import Draw, Outlook, Prediction, Predictor, Report
from ._frame import Cost, Method, Step, option, register
from ._frame.augmentations import augmix, draw_seeded
from ._frame.losses import marginal_entropy


@register("memo")
class MEMO(Method):
    updates = "none"  # nothing stays
    cost = Cost(65, 32, "2 x copies + 1 forward, copies backward")
    by_predictor = False
    lr: float = option(2.5e-4, positive)
    copies: int = option(32, count)

    def draw(self, images: Tensor) -> Draw:
        return draw_seeded(self.predictor, images)

    def forward(self, images: Tensor, draw: Draw) -> Step:
        generator = draw.generator()
        parameters = list(self.classifier.parameters())
        source = [p.detach().clone() for p in parameters]
        asked = self.predictor.fork(seed=draw.seed, validate=False)
        answers = []
        try:
            self.classifier.requires_grad_(True)
            for image in images:
                answers.append(self._answer_one(asked, image, generator, parameters))
                _put(parameters, source)
        finally:
            _put(parameters, source)
            self.classifier.requires_grad_(False)
        return Step(Outlook.of(_joined(answers)), None)

    def _answer_one(
        self, predictor: Predictor, image: Tensor, generator: torch.Generator, parameters: list[torch.nn.Parameter]
    ) -> Prediction:
        with torch.enable_grad():
            copies = augmix(image, self.copies, generator)
            loss = marginal_entropy(predictor.look(copies, predictor.draw(copies), track=False).lesson.logits)
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    parameter.sub_(self.lr * gradient)
            # Together with its copies: a predictor that compares views over a batch needs a batch.
            batch = torch.cat([image[None], copies])
            return _first(predictor(batch, predictor.draw(batch), track=False))


def _put(parameters: list[torch.nn.Parameter], values: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


def _first(answer: Prediction) -> Prediction:
    """The answer to the first image of a batch."""

    def first(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[:1]

    report, seen = answer.report, answer.report.view_probs
    report = dataclasses.replace(
        report,
        weights=report.weights[:, :1],
        view_probs=None if seen is None else seen[:, :1],
        suspicion=first(report.suspicion),
        signals={name: signal[:1] for name, signal in report.signals.items()},
    )
    return Prediction(answer.probs[:1], answer.logits[:1], answer.features[:1], report).detach()


def _joined(answers: Sequence[Prediction]) -> Prediction:
    """Answers to single images as one batch. Each had views of its own, so no view was dropped for all of them."""
    probs, logits, features = (
        torch.cat([getattr(answer, name) for answer in answers]) for name in ("probs", "logits", "features")
    )
    reports = [answer.report for answer in answers]
    report: Report = dataclasses.replace(
        reports[0],
        weights=torch.cat([report.weights for report in reports], dim=1),
        reliability=_all([report.reliability for report in reports], lambda found: torch.stack(found).mean(dim=0)),
        dropped=None,
        view_probs=_all([report.view_probs for report in reports], lambda found: torch.cat(found, dim=1)),
        suspicion=_all([report.suspicion for report in reports], torch.cat),
        signals={name: torch.cat([report.signals[name] for report in reports]) for name in reports[0].signals},
    )
    return Prediction(probs, logits, features, report)


def _all(found: Sequence[Tensor | None], join: Callable[[list[Tensor]], Tensor]) -> Tensor | None:
    """The tensors joined, or None if there are none."""
    tensors = [tensor for tensor in found if tensor is not None]
    return join(tensors) if tensors else None
