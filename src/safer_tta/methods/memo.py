"""MEMO: for every image by itself, make augmented copies agree, answer, and forget.

Zhang et al., "MEMO: Test time robustness via adaptation and augmentation", NeurIPS 2022.
Objective: entropy of the mean prediction over augmented copies of one image; one gradient step on all parameters; the
image is predicted with the stepped weights, which are then put back. Eval mode. Episodic: no image touches the next.

On a predictor with views of its own (SAFER), each of MEMO's copies is seen through those views: it works, at the
product of both costs.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from ..predictors import Draw, Outlook, Prediction, Predictor, Report
from . import Cost, Method, Step, count, option, positive, register
from ._frame.augmentations import augmix
from ._frame.losses import marginal_entropy


@register("memo")
class MEMO(Method):
    updates = "none"  # nothing stays
    cost = Cost(65, 32, "2 x copies + 1 forward, copies backward")
    by_predictor = False
    own_views = True
    lr: float = option(2.5e-4, positive)
    copies: int = option(32, count)

    def forward(self, images: Tensor, draw: Draw) -> Step:
        generator = draw.generator()
        parameters = list(self.classifier.parameters())
        source = [p.detach().clone() for p in parameters]
        asked = self.predictor.fork(seed=draw.seed, validate=False)
        answers = []
        try:
            self.classifier.requires_grad_(True)
            for image in images:
                answers.append(self._answer_one(asked, image, generator))
                _put(parameters, source)
        finally:
            _put(parameters, source)
            self.classifier.requires_grad_(False)
        return Step(Outlook.of(_join_first(answers)), None)

    def _answer_one(self, predictor: Predictor, image: Tensor, generator: torch.Generator) -> Prediction:
        parameters = list(self.classifier.parameters())
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
            return predictor(batch, predictor.draw(batch), track=False)


def _put(parameters: list[torch.nn.Parameter], values: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


def _join_first(answers: Sequence[Prediction]) -> Prediction:
    """Join the answers to the first images of batches that had views of their own, so that none was dropped for all."""
    reports = [answer.report for answer in answers]
    reliability = [report.reliability for report in reports if report.reliability is not None]
    suspicion = [report.suspicion[:1] for report in reports if report.suspicion is not None]
    view_probs = [report.view_probs[:, :1] for report in reports if report.view_probs is not None]
    report: Report = dataclasses.replace(
        reports[0],
        weights=torch.cat([report.weights[:, :1] for report in reports], dim=1),
        reliability=torch.stack(reliability).mean(dim=0) if reliability else None,
        dropped=None,
        view_probs=torch.cat(view_probs, dim=1) if view_probs else None,
        suspicion=torch.cat(suspicion) if suspicion else None,
        signals={name: torch.cat([report.signals[name][:1] for report in reports]) for name in reports[0].signals},
    )
    probs, logits, features = (
        torch.cat([getattr(answer, name)[:1] for answer in answers]) for name in ("probs", "logits", "features")
    )
    return Prediction(probs, logits, features, report)
