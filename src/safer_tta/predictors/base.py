"""What a method asks for a prediction. The plain model, a model behind one transform and SAFER share this interface."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeVar, cast

import torch
from torch import Tensor, nn

from .._internal.checks import whole
from .._internal.hints import refuse_attribute
from .._internal.seeds import draw_seed
from ..errors import InvalidValueError
from ..models import Classifier
from ..views import Draw
from .inputs import check_images, check_not_normalised


@dataclass(frozen=True)
class Report:
    """Why a prediction came out as it did. Tensors stay on the device; nothing here waits for it.

    Attributes:
        weights: (V,B), the share of every view in every image's prediction.
        reliability: (V,), the agreement of each view with the others.
        dropped: Index of the view that the pooling rule left out, -1 if it left out none.
        suspicion: (B,), the probability that an image is attacked; None if the predictor does not estimate it.
        signals: Other figures (B,) by name, oriented so that more is more suspicious.
        view_probs: (V,B,K), the probabilities of each view.
        pipelines: The operators of each augmented view.
        health: What a guard around the method has counted so far.
    """

    weights: Tensor
    reliability: Tensor | None = None
    dropped: Tensor | None = None
    suspicion: Tensor | None = None
    signals: Mapping[str, Tensor] = field(default_factory=dict)
    view_probs: Tensor | None = None
    pipelines: tuple[tuple[str, ...], ...] = ()
    health: Mapping[str, int] = field(default_factory=dict)


OF_TENSORS = "A prediction is not a tensor; it has probs (B,K), logits (B,K), labels (B,) and suspicion (B,) or None"


@dataclass(frozen=True)
class Prediction:
    """The answer to a batch of B images.

    Attributes:
        probs: Class probabilities (B,K).
        logits: Class scores (B,K).
        features: Features (B,d).
        report: Why the prediction came out as it did.
    """

    probs: Tensor
    logits: Tensor
    features: Tensor
    report: Report = field(repr=False)

    @property
    def labels(self) -> Tensor:
        """The most probable class of every image, (B,)."""
        return self.probs.argmax(dim=1)

    @property
    def suspicion(self) -> Tensor | None:
        """The probability (B,) that an image is attacked; None if the predictor does not estimate it."""
        return self.report.suspicion

    def __getattr__(self, name: str) -> Any:
        refuse_attribute(self, name, {"argmax": "prediction.labels", "softmax": "prediction.probs"}, OF_TENSORS)

    def detach(self) -> Prediction:
        """Return the same numbers without the graph that made them."""
        return map_tensors(self, Tensor.detach)

    def clone(self, *, pipelines: tuple[tuple[str, ...], ...]) -> Prediction:
        """Return the same numbers in tensors of their own, reported as made by these pipelines."""
        copied = map_tensors(self, Tensor.clone)
        return dataclasses.replace(copied, report=dataclasses.replace(copied.report, pipelines=pipelines))

    def with_logits(self, logits: Tensor) -> Prediction:
        """Return it with other class scores, and the probabilities that follow from them."""
        return dataclasses.replace(self, logits=logits, probs=logits.softmax(dim=1))


@dataclass(frozen=True)
class Outlook:
    """What a predictor shows a method of one batch. It is never rewritten.

    Attributes:
        answer: What users get.
        lesson: What methods learn from; often the answer itself.
        aligned: What methods learn from that align features with scores; often the lesson itself.
        memory: What the predictor remembers from this batch on, if it is learnt from.
    """

    answer: Prediction
    lesson: Prediction
    aligned: Prediction
    memory: Tensor | None = None

    @classmethod
    def of(cls, prediction: Prediction) -> Outlook:
        """Show one prediction for all purposes."""
        return cls(prediction, prediction, prediction)

    def detach(self) -> Outlook:
        """Return the same numbers without the graph that made them."""
        return map_tensors(self, Tensor.detach)


T = TypeVar("T")


def map_tensors(value: T, function: Callable[[Tensor], Tensor]) -> T:
    """Return a value with every tensor in it put through the function."""
    changed: Any = value
    if isinstance(value, Tensor):
        changed = function(value)
    elif isinstance(value, Mapping):
        changed = {name: map_tensors(inner, function) for name, inner in value.items()}
    elif isinstance(value, (Report, Prediction, Outlook)):
        parts = {name: map_tensors(inner, function) for name, inner in vars(value).items()}
        changed = dataclasses.replace(value, **parts)
    return cast(T, changed)


def tensors_of(value: object) -> list[Tensor]:
    """Return every tensor in a value, in the order in which `map_tensors` comes to them."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found


class Memory(nn.Module):
    """What a predictor remembers from batch to batch: `size` numbers, zeros at the start."""

    seen: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(size))


class Predictor:
    """Images in, predictions out, with the graph attached. Owns the generator from which all randomness comes.

    Args:
        classifier: The classifier that is asked; a model is wrapped in one.
        seed: Decides every draw. By default it is drawn from torch's own generator.

    Attributes:
        norm: What replaces the batch norms if the user names nothing, a key of `NORMS`; None keeps them.
        memory: What it remembers from batch to batch; None if nothing.
        estimates_suspicion: Whether its predictions say how probable it is that an image is attacked.
        repeats: Whether every pass over batches of one shape is the same program, given their views.
        version: Raised when its predictions change; a part of the names of runs.
        channels: How many channels it can handle; empty if any number that the model takes.
    """

    version: ClassVar[int] = 1
    norm: str | None = None
    channels: ClassVar[frozenset[int]] = frozenset()
    memory: Memory | None = None
    estimates_suspicion: bool = False
    repeats: bool = True

    def __init__(self, classifier: Classifier | nn.Module, *, seed: int | None = None) -> None:
        self.classifier = classifier if isinstance(classifier, Classifier) else Classifier(classifier)
        # By default the seed comes from torch's generator, so that torch.manual_seed still decides.
        if seed is not None:
            whole(seed=seed)
        self.seed = draw_seed() if seed is None else operator.index(seed)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.validate = True
        self._first = True  # whether no batch has come yet; the first is always looked at

    @property
    def joins(self) -> bool:
        """Whether it can ask the model about batches of several streams at once."""
        return type(self).show is Predictor.show

    @property
    def settings(self) -> dict[str, Any]:
        """Every option, also those left at their defaults: `create(name, classifier, **settings)` makes it again."""
        return {}

    @property
    def versions(self) -> dict[str, int]:
        """Versions of the registered parts that it is made of, by kind and name."""
        return {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.settings.items())})"

    def __call__(self, images: Tensor, draw: Draw | None = None, *, track: bool = True) -> Prediction:
        """Predict a batch.

        Args:
            images: (B,3,H,W), floats in [0,1] or uint8.
            draw: Replay these views instead of fresh ones.
            track: Whether buffers and the generator move.
        """
        return self.look(images, draw, track=track).answer

    def look(self, images: Tensor, draw: Draw | None = None, *, track: bool = True) -> Outlook:
        """Return what a method needs of a batch; see `__call__` for the arguments."""
        if draw is None:
            draw = self.draw(images) if track else self._peek(images)
        if draw.batch != len(images):
            raise InvalidValueError(
                f"the draw was made for {draw.batch} images and {len(images)} came; draw again for these"
            )
        with contextlib.nullcontext() if track else self.classifier.untracked(), self.classifier.looking():
            return self.show(self.to_model(images), draw)

    def show(self, images: Tensor, draw: Draw) -> Outlook:
        """Predict images that are ready for the model. A predictor's file fills in this, or the three steps of it."""
        views = self.make_views(images, draw)
        features, logits = (torch.unflatten(t, 0, views.shape[:2]) for t in self.pass_views(views))
        # A copy of the memory: what gradients go through must stay as it was.
        memory = None if self.memory is None else self.memory.seen.clone()
        return self.conclude(features, logits, memory, draw.names)

    def make_views(self, images: Tensor, draw: Draw) -> Tensor:
        """Return what the model is asked about, (V,B,3,H,W). By default it is the images themselves."""
        return images[None]

    def make_all_views(self, images: Tensor, draws: Sequence[Draw]) -> Tensor:
        """Return the views of several batches (G,B,3,H,W) side by side, (V,B,G,3,H,W)."""
        made = [self.make_views(batch, draw) for batch, draw in zip(images, draws, strict=True)]
        return torch.stack(made, dim=2)

    def pass_views(self, views: Tensor) -> tuple[Tensor, Tensor]:
        """Return features and logits (V·B,·) of views (V,B,3,H,W)."""
        features, logits = self.classifier(views.flatten(0, 1), len(views))
        return features, logits

    def conclude(
        self, features: Tensor, logits: Tensor, memory: Tensor | None, pipelines: tuple[tuple[str, ...], ...] = ()
    ) -> Outlook:
        """Return what follows from features (V,B,d) and logits (V,B,K). By default one view has all the weight."""
        probs = probabilities(logits[0])
        report = Report(weights=probs.new_ones(1, len(probs)), view_probs=probs[None])
        return Outlook.of(Prediction(probs, logits[0], features[0], report))

    def draw(self, images: Tensor) -> Draw:
        """Check the images, then draw what is random about predicting them. Refused images draw nothing."""
        check_images(images, values=self.validate, channels=self._accepted())
        if self._first and not self.validate:
            check_not_normalised(images)
        self._first = False
        return self.draw_views(len(images))

    def draw_views(self, batch: int) -> Draw:
        """Draw for a batch of checked images. Nothing is random by default."""
        return Draw(batch)

    def remember(self, memory: Tensor | None) -> None:
        """Replace the memory. A method's frame calls this once for every batch that it learns from."""
        if self.memory is not None and memory is not None:
            seen, now = self.memory.seen, memory.detach()
            seen.copy_(torch.where(torch.isfinite(now), now, seen))  # in place: a step may be replayed as a graph

    def fork(
        self,
        classifier: Classifier | None = None,
        *,
        seed: int | None = None,
        validate: bool | None = None,
        fresh_memory: bool = False,
    ) -> Self:
        """Return the same predictor with some things of its own: for teachers, anchors, attacks and copies.

        Args:
            classifier: Look through this one instead.
            seed: Draw from a generator of its own, seeded with this. By default both share one.
            validate: Whether it looks at the values of images.
            fresh_memory: Whether it starts with an empty memory of its own. By default both share one.
        """
        other = copy.copy(self)
        if classifier is not None:
            other.classifier = classifier
        if seed is not None:
            whole(seed=seed)
            other.seed, other.generator = seed, torch.Generator().manual_seed(seed)
        if validate is not None:
            other.validate = validate
        other._first = validate is not False  # what is not to be looked at was looked at when it arrived
        if fresh_memory and self.memory is not None:
            other.memory = Memory(len(self.memory.seen)).to(other.classifier.device)
        return other

    def to_model(self, images: Tensor) -> Tensor:
        """Return images in [0,1] on the device and in the precision of the model."""
        scaled = images.to(self.classifier.device, self.classifier.dtype, non_blocking=True)
        return scaled / 255 if images.dtype == torch.uint8 else scaled

    def _accepted(self) -> frozenset[int]:
        """Return how many channels images may have; empty if any number will do."""
        taken = self.classifier.channels
        if not self.channels or not taken:
            return taken or self.channels
        if not taken & self.channels:
            names = " or ".join(map(str, sorted(self.channels)))
            raise InvalidValueError(
                f"the model takes images of {min(taken)} channels; expected {names} for the predictor "
                f"{type(self).__name__}, whose views are made for those. Ask the model itself: "
                "adapt(model, predictor='plain')"
            )
        return taken & self.channels

    def _peek(self, images: Tensor) -> Draw:
        state = self.generator.get_state()
        try:
            return self.draw(images)
        finally:
            self.generator.set_state(state)


LEAST_PROBABILITY = 1e-6


def log_probabilities(probs: Tensor) -> Tensor:
    """Return the logits of a pooled prediction: log max(p, 1e-6)."""
    return probs.clamp_min(LEAST_PROBABILITY).log()


def probabilities(logits: Tensor) -> Tensor:
    """Return a softmax in single precision at least: half precision has no room for small probabilities."""
    return logits.softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
