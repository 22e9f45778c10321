"""One attacked image and the answer of each of its views: the paper's qualitative figure."""

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..data import Batch, Stream, StreamSpec
from ..models import Classifier, load_classifier
from ..predictors import Prediction
from ..views import Draw
from .experiment import Experiment
from .report import View
from .run import Materials

Picture = NDArray[np.uint8]


@dataclass(frozen=True)
class _Found:
    """An image whose attacked original is misread and whose pooled views are not."""

    number: int  # of its batch
    index: int  # in its batch
    batch: Batch
    draw: Draw
    prediction: Prediction
    confidence: float


def one_attacked_image(experiment: Experiment, materials: Materials, most: int | None = None) -> list[View]:
    """Adapt on the CPU to a stream that is attacked throughout, and show the image that views saved most clearly.

    Return the clean image, the attacked original and its views; nothing if the first `most` batches have no such image.
    """
    domain, seed = materials.domains[0], experiment.stream.seed
    method = experiment.build(load_classifier(materials.source))
    spec = StreamSpec(attack_rate=100, seed=seed, batch=experiment.stream.batch)
    stream = Stream([domain], spec, materials.attacked)
    found = []
    for number, batch in enumerate(itertools.islice(stream, most)):
        draw = method.predictor.draw(batch.images)
        prediction = method.predictor(batch.images, draw, track=False).detach()
        saved = _saved(prediction, batch.labels)
        if number and saved.any():
            confidence, index = (saved * prediction.probs.amax(dim=1)).max(dim=0)
            found.append(_Found(number, int(index), batch, draw, prediction, float(confidence)))
        method(batch.images)
    if not found:
        return []
    chosen = max(found, key=lambda candidate: candidate.confidence)
    original = domain.images[stream.order[chosen.number * spec.batch + chosen.index, 1]]
    return _views(chosen, original, load_classifier(materials.source), domain.classes)


def _saved(prediction: Prediction, labels: Tensor) -> Tensor:
    """Return which images are read rightly with the original dropped, and wrongly from the original."""
    report = prediction.report
    if report.view_probs is None or report.dropped is None or int(report.dropped) != 0:
        return torch.zeros(len(labels), dtype=torch.bool)
    return (prediction.labels == labels) & (report.view_probs[0].argmax(dim=1) != labels)


def _views(found: _Found, original: Picture, source: Classifier, classes: tuple[str, ...]) -> list[View]:
    label, report = int(found.batch.labels[found.index]), found.prediction.report
    assert report.view_probs is not None
    assert report.reliability is not None
    with torch.no_grad():
        clean = source(torch.from_numpy(np.array(original))[None].float() / 255)[1].softmax(1)[0]
    shown = [_view(original, f"clean: {classes[label]}", clean, label, classes)]
    pictures = found.draw.views(found.batch.images.float() / 255)[:, found.index]
    for number, picture in enumerate((pictures * 255).round().byte().numpy()):
        title = f"view {number}" if number else "attacked original"
        view = _view(picture, title, report.view_probs[number, found.index], label, classes)
        view.reliability = float(report.reliability[number])
        view.weight = float(report.weights[number, found.index])
        view.dropped = report.dropped is not None and int(report.dropped) == number
        view.operators = report.pipelines[number - 1] if number else ()
        shown.append(view)
    return shown


def _view(picture: Picture, title: str, probs: Tensor, label: int, classes: tuple[str, ...]) -> View:
    answer = int(probs.argmax())
    return View(picture, title, classes[answer], float(probs[answer]), answer == label)
