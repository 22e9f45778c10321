"""The answer to a batch, as the API gives it."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..guards import flags, troubles
from ..predictors import Prediction
from .journal import Json, Stream

BINS = 10  # of the suspicion histogram


@dataclass(frozen=True)
class Served:
    """What is served; the version changes with the model and with everything that decides its answers."""

    version: str
    method: str
    predictor: str
    norm: str | None
    classes: tuple[str, ...]
    side: int
    resize: str  # how images of another size come to that side
    views: int
    abstain: float | None  # the suspicion above which an image is flagged


def describe(
    served: Served,
    stream: Stream,
    prediction: Prediction,
    before: Counter[str],
    *,
    seconds: float,
    adapted: bool,
    noted: bool,
) -> Json:
    """Return the answer to a batch with its report, ready for JSON.

    Args:
        served: What is served.
        stream: The stream, after the batch.
        prediction: What the method answered.
        before: The guard's counters before the batch.
        seconds: How long the method took.
        adapted: Whether weights or memories of the method moved.
        noted: Whether these moved, or only what is remembered of the stream: statistics, and evidence of attacks.
    """
    report, probs, labels = prediction.report, prediction.probs.float().cpu(), prediction.labels.tolist()
    suspicion = None if prediction.suspicion is None else prediction.suspicion.float().cpu()
    abstain = flags(prediction, served.abstain)[1].tolist()
    shares = torch.bincount(torch.tensor(labels), minlength=probs.shape[1]).double() / len(labels)
    watched = stream.memory.watch.describe()
    summary = {
        "stream": stream.name, "number": stream.batches, "time": stream.last, "images": len(labels),
        "adapted": adapted, "noted": noted, "seconds": seconds,
        "reliability": _to_json(report.reliability),
        "dropped": None if report.dropped is None or int(report.dropped) < 0 else int(report.dropped),
        "views": ["original", *(" → ".join(names) for names in report.pipelines)],
        "suspicion": None if suspicion is None else _summarise(suspicion),
        "abstained": sum(abstain), "shares": shares.tolist(), "accuracy": None,
        "alarm": ", ".join(troubles(before, stream.memory.counters)),
        "alarms": watched["alarms"], "suspicious": watched["suspicious"],
        "health": dict(stream.memory.counters),
    }  # fmt: skip
    return {
        "stream": stream.name, "number": stream.batches, "labels": labels,
        "classes": [served.classes[label] for label in labels], "probabilities": _to_json(probs),
        "suspicion": _to_json(suspicion), "abstain": abstain,
        "weights": _to_json(report.weights), "adapted": adapted, "noted": noted, "model": served.version,
        "report": summary,
    }  # fmt: skip


def _to_json(tensor: Tensor | None) -> Any:
    """Convert a tensor to lists, with null in place of numbers that JSON does not have."""
    if tensor is None:
        return None
    values = tensor.float().cpu().tolist()
    return values if bool(torch.isfinite(tensor).all()) else _without_nan(values)


def _without_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return value if math.isfinite(value) else None


def _summarise(suspicion: Tensor) -> Json:
    finite = torch.nan_to_num(suspicion, nan=1.0).clamp(0, 1)
    mean, median = float(finite.mean()), float(finite.median())
    return {"mean": mean, "median": median, "histogram": torch.histc(finite, BINS, 0, 1).long().tolist()}
