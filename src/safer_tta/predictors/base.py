"""What a method asks for a prediction. The plain model, a model behind one transform and SAFER share this interface."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from ..models import Classifier
from ..seeds import drawn
from ..views import Draw


@dataclass(frozen=True)
class Report:
    """Why a prediction came out as it did. Tensors stay on the device; nothing here waits for it.

    weights (V,B): the share of every view in every image's prediction
    reliability (V,): agreement of each view with the others
    dropped: index of the view the pooling rule left out, -1 if it left out none (mixing may still give it weight)
    signal (B,): every image's suspicion, the more the worse: under the gate the probability that it is attacked, under
        SAFER-A the signal that its mixing names (its negative where less of it is suspicious), else `feat_disagreement`
        (a distance from 0 to 2)
    view_probs (V,B,K): what each view alone would have said
    pipelines: the operators of each augmented view
    health: what a guard around the method has counted so far
    """

    weights: Tensor
    reliability: Tensor | None = None
    dropped: Tensor | None = None
    signal: Tensor | None = None
    view_probs: Tensor | None = None
    pipelines: tuple[tuple[str, ...], ...] = ()
    health: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Prediction:
    """probs (B,K), logits (B,K), features (B,d), and a report on how they came about.

    lesson (B,K): probabilities to learn from, where they are not those to answer with; None in what a method returns
    aligned (B,d) and read (B,K): features and the head's scores of them, for methods that align the one with the
        other; where they are not the features and the lesson
    """

    probs: Tensor
    logits: Tensor
    features: Tensor
    report: Report = field(repr=False)
    kept: Mapping[str, Tensor] = field(default_factory=dict, repr=False)  # from a method's forward to its commit
    lesson: Tensor | None = field(default=None, repr=False)
    aligned: Tensor | None = field(default=None, repr=False)
    read: Tensor | None = field(default=None, repr=False)
    answer: Tensor | None = field(default=None, repr=False)  # while the lesson stands in its place
    remembered: Tensor | None = field(default=None, repr=False)  # by the predictor, once the frame says so

    @property
    def labels(self) -> Tensor:
        """The most probable class of every image, (B,)."""
        return self.probs.argmax(dim=1)

    def taught(self, *, by_features: bool = False) -> Prediction:
        """As a method sees it: the lesson in the place of the answer."""
        if by_features and self.aligned is not None and self.read is not None:
            features, probs, logits = self.aligned, probabilities(self.read), self.read
        elif self.lesson is not None:
            features, probs, logits = self.features, self.lesson, log_probabilities(self.lesson)
        else:
            return self
        bare = self._without_lessons(answer=self.probs)
        return dataclasses.replace(bare, features=features, probs=probs, logits=logits)

    def answered(self) -> Prediction:
        """As a user sees it: the answer where the lesson stood, and nothing of what the method keeps for itself."""
        bare = dataclasses.replace(self._without_lessons(), kept={}, remembered=None)
        if self.answer is None:
            return bare
        return dataclasses.replace(bare, probs=self.answer, logits=log_probabilities(self.answer))

    def saying(self, logits: Tensor, *, lesson: Tensor | None = None) -> Prediction:
        """With an answer of a method's own making in the place of the predictor's."""
        bare = self._without_lessons()
        return dataclasses.replace(bare, logits=logits, probs=logits.softmax(dim=1), lesson=lesson)

    def _without_lessons(self, answer: Tensor | None = None) -> Prediction:
        return dataclasses.replace(self, lesson=None, aligned=None, read=None, answer=answer)

    def detach(self) -> Prediction:
        """The same numbers without the graph that made them."""
        return self._through(Tensor.detach)

    def copied(self, *, pipelines: tuple[tuple[str, ...], ...]) -> Prediction:
        """The same numbers in tensors of their own, reported as of these pipelines."""
        copy = self._through(Tensor.clone)
        return dataclasses.replace(copy, report=dataclasses.replace(copy.report, pipelines=pipelines))

    def _through(self, function: Callable[[Tensor], Tensor]) -> Prediction:
        kept = {name: function(tensor) for name, tensor in self.kept.items()}
        return dataclasses.replace(_each(self, function), report=_each(self.report, function), kept=kept)


R = TypeVar("R", Prediction, Report)


def _each(record: R, function: Callable[[Tensor], Tensor]) -> R:
    """The record with every tensor of it put through the function."""
    changed: dict[str, Any] = {n: function(value) for n, value in vars(record).items() if isinstance(value, Tensor)}
    return dataclasses.replace(record, **changed)


class Predictor:
    """Images in, Prediction out, graph attached. Owns the generator from which all randomness comes.

    memory: what it remembers from batch to batch, as buffers; most remember nothing.
    """

    memory: nn.Module | None = None

    def __init__(self, classifier: Classifier | nn.Module, *, seed: int | None = None) -> None:
        self.classifier = classifier if isinstance(classifier, Classifier) else Classifier(classifier)
        # Without a seed of its own an object takes one from torch's, so that torch.manual_seed still decides.
        self.seed = drawn() if seed is None else operator.index(seed)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.validate = True
        self.repeats = True  # every pass over batches of one shape is the same program, given their views

    @property
    def settings(self) -> dict[str, Any]:
        """Every option, those left at their defaults too: `create(name, classifier, **settings)` makes it again."""
        return {}

    def draw(self, images: Tensor) -> Draw:
        """Check the images, then draw what is random about predicting them. Refused images draw nothing."""
        check_images(images, values=self.validate)
        return self.draw_views(len(images))

    def __call__(self, images: Tensor, draw: Draw | None = None, *, track: bool = True) -> Prediction:
        """Predict. draw: replay these views instead of fresh ones. track=False moves no buffer and no generator."""
        if draw is None:
            draw = self.draw(images) if track else self._peek(images)
        if draw.batch != len(images):
            raise ValueError(f"the draw was made for {draw.batch} images and {len(images)} came; draw again for these")
        with contextlib.nullcontext() if track else self.classifier.untracked():
            return self.predict(self.to_model(images), draw)

    def lesson(
        self, images: Tensor, draw: Draw | None = None, *, track: bool = True, by_features: bool = False
    ) -> Prediction:
        """What a method learns from: the prediction, unless the predictor has better to teach than it answers.
        by_features: for a method that aligns features with what is said of them."""
        return self(images, draw, track=track).taught(by_features=by_features)

    def remember(self, prediction: Prediction) -> None:
        """Add to the memory what was seen in making a prediction. The frame of a method does so once for every batch
        that it learns from; whatever else a method asks for adds nothing."""

    def _remember_afresh(self) -> None:
        """Apart from the predictor it was copied from."""

    def over(self, classifier: Classifier) -> Self:
        """The same predictor, generator included, looking through another classifier: teachers, anchors, copies."""
        other = copy.copy(self)
        other.classifier = classifier
        return other

    def to_model(self, images: Tensor) -> Tensor:
        """Images in [0,1] on the device and in the precision of the model."""
        scaled = images.to(self.classifier.device, self.classifier.dtype, non_blocking=True)
        return scaled / 255 if images.dtype == torch.uint8 else scaled

    def _peek(self, images: Tensor) -> Draw:
        state = self.generator.get_state()
        try:
            return self.draw(images)
        finally:
            self.generator.set_state(state)

    def draw_views(self, batch: int) -> Draw:
        """Draw for a batch of checked images. Nothing is random unless a predictor says so."""
        return Draw(batch)

    def predict(self, images: Tensor, draw: Draw) -> Prediction:
        raise NotImplementedError


LEAST_PROBABILITY = 1e-6


def log_probabilities(probs: Tensor) -> Tensor:
    """Logits of a pooled prediction: log max(p, 1e-6)."""
    return probs.clamp_min(LEAST_PROBABILITY).log()


def probabilities(logits: Tensor) -> Tensor:
    """Softmax in single precision at least: half precision has no room for small probabilities."""
    return logits.softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def single_view(classifier: Classifier, images: Tensor) -> Prediction:
    """The prediction of one view, which has all the weight."""
    features, logits = classifier(images)
    probs = probabilities(logits)
    report = Report(weights=probs.new_ones(1, len(probs)), view_probs=probs[None])
    return Prediction(probs, logits, features, report)


def check_images(images: Any, *, values: bool = True) -> None:
    """Refuse what is not a batch of images in [0,1]. Looking at the values costs one reduction."""
    if not isinstance(images, Tensor):
        raise TypeError(f"images are {type(images).__name__}; expected a torch.Tensor (B,3,H,W)")
    if images.ndim != 4 or images.shape[1] != 3 or 0 in images.shape:
        raise ValueError(
            f"images have shape {tuple(images.shape)}; expected (B,3,H,W) with at least one image. {_remedy(images)}"
        )
    if images.dtype == torch.uint8:
        return
    if not images.is_floating_point():
        raise TypeError(f"images are {images.dtype}; expected uint8 in 0..255 or floats in [0,1]")
    if values:
        lowest, highest = (bound.item() for bound in torch.aminmax(images.detach()))
        if not (lowest >= 0 and highest <= 1):
            if not bool(torch.isfinite(images).all()):
                raise ValueError("images hold NaN or Inf; expected floats in [0,1]. Look for it where they are decoded")
            remedy = "Pass uint8, or divide by 255; declare normalisation with Classifier(model, mean=..., std=...)"
            if lowest > -0.1 and highest < 1.1:
                remedy = "After resizing or rounding: images.clamp(0, 1)"
            raise ValueError(
                f"images lie in [{lowest:.8g}, {highest:.8g}]; expected [0,1] before any normalisation. {remedy}"
            )


def _remedy(images: Tensor) -> str:
    if images.ndim == 3:
        return "One image: images.unsqueeze(0)"
    if images.ndim == 4 and images.shape[3] == 3:
        return "Channels last: images.permute(0, 3, 1, 2)"
    if images.ndim == 4 and images.shape[1] == 1:
        return "Grey images: images.expand(-1, 3, -1, -1)"
    if images.ndim == 4 and images.shape[1] == 4:
        return "Four channels: drop the alpha channel, images[:, :3]"
    return ""
