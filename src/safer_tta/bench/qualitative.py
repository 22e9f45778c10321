"""One attacked image and what its views say of it: the paper's qualitative figure."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from ..api import adapt
from ..data import Domain, Stream, StreamSpec
from ..models import Classifier
from .report import View


def one_attacked_image(
    source: Classifier,
    domain: Domain,
    attacked: np.ndarray[Any, Any],
    seed: int,
    batch: int = 64,
    most: int | None = None,
) -> list[View]:
    """An image whose attacked original is misread and whose pooled views are not, of the first `most` batches."""
    method = adapt(source, "tent", seed=seed)
    stream = Stream([domain], StreamSpec(attack_rate=100, seed=seed, batch=batch), [attacked])
    candidates = []
    for number, arrived in enumerate(itertools.islice(stream, most)):
        draw = method.predictor.draw(arrived.images)
        prediction = method.predictor(arrived.images, draw, track=False).detach()
        report_on = prediction.report
        assert report_on.view_probs is not None  # SAFER always reports both
        assert report_on.dropped is not None
        saved = (prediction.labels == arrived.labels) & (report_on.view_probs[0].argmax(dim=1) != arrived.labels)
        if number and int(report_on.dropped) == 0 and saved.any():
            index = int((saved * prediction.probs.amax(dim=1)).argmax())
            candidates.append((float(prediction.probs[index].amax()), number, index, arrived, draw, prediction))
        method(arrived.images)
    if not candidates:
        return []
    _, number, index, arrived, draw, prediction = max(candidates, key=lambda c: c[0])
    place = number * stream.spec.batch + index
    original = domain.images[stream.order[place, 1]]
    return _views(original, source, arrived, index, draw, prediction, domain.classes)


def _views(
    original: np.ndarray[Any, Any],
    source: Classifier,
    batch: Any,
    index: int,
    draw: Any,
    prediction: Any,
    classes: tuple[str, ...],
) -> list[View]:
    label, said = int(batch.labels[index]), prediction.report
    with torch.no_grad():
        clean = source(torch.from_numpy(np.array(original))[None].float() / 255)[1].softmax(1)[0]
    answer = int(clean.argmax())
    shown = [View(original, f"clean: {classes[label]}", classes[answer], float(clean[answer]), answer == label)]
    pictures = (draw.views(batch.images.float() / 255)[:, index] * 255).round().byte().numpy()
    for view, picture in enumerate(pictures):
        probs = said.view_probs[view, index]
        answer = int(probs.argmax())
        shown.append(
            View(
                picture,
                "attacked original" if view == 0 else f"view {view}",
                classes[answer],
                float(probs[answer]),
                answer == label,
                reliability=float(said.reliability[view]),
                weight=float(said.weights[view, index]),
                dropped=int(said.dropped) == view,
                operators=said.pipelines[view - 1] if view else (),
            )
        )
    return shown
