"""One pass over the images under one attack, and the rows of the threats that it is a measurement of."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from .._internal.progress import Tick
from .._internal.seeds import generator
from ..attacks import resubmit, start
from ..bench.experiment import AttackOn
from ..bench.record import FLAGGED
from ..data import Batch, Domain, Stream, StreamSpec
from ..evaluation.intervals import wilson
from ..evaluation.metrics import percent
from ..methods import Method
from ..predictors import Prediction
from .defence import Defence
from .threats import Threat

SHOWN = 3  # images of each threat that are kept to be looked at


@dataclass(frozen=True)
class Picture:
    """An image that was read rightly until it was attacked."""

    clean: Tensor  # (C,H,W), bytes
    attacked: Tensor
    label: int
    answer: int  # the class that it is taken for once it is attacked
    confidence: float  # of that answer
    before: float  # of the right answer to the clean image


@dataclass
class Pass:
    """What is kept of every batch: whether answers were right, and what was suspected."""

    columns: dict[str, list[Tensor]] = field(default_factory=dict)
    pictures: list[Picture] = field(default_factory=list)

    def add(self, **values: Tensor) -> None:
        for name, value in values.items():
            self.columns.setdefault(name, []).append(value.detach().cpu())

    def figures(self, threat: Threat) -> dict[str, Any]:
        """Return a threat's figures, over all images or, if it poisons, over those of others; shares in percent."""
        table = {name: torch.cat(values) for name, values in self.columns.items()}
        counted = ~table["attacked"] if threat.poisons else torch.ones_like(table["attacked"])
        table = {name: values[counted] for name, values in table.items()}
        right = table[f"right {threat.times}"].double()
        accuracy = 100 * float(right.mean())
        low, high = wilson(accuracy, len(right))
        found: dict[str, Any] = {"images": len(right), "accuracy": accuracy, "low": low, "high": high}
        found["accuracy_alone"] = percent(table["alone"].double())
        suspicion = table["suspicion"].double()
        if bool(suspicion.isnan().any()):
            return found | {"flagged": None, "accuracy_answered": None, "suspicion": None}
        flagged = suspicion > FLAGGED
        found |= {"flagged": percent(flagged.double()), "accuracy_answered": percent(right[~flagged])}
        return found | {"suspicion": [round(value, 4) for value in suspicion.tolist()]}


def measure(
    defence: Defence,
    threats: Sequence[Threat],
    attack: AttackOn | None,
    domain: Domain,
    copies: NDArray[Any] | None,
    *,
    batch: int,
    tick: Tick,
) -> tuple[list[dict[str, Any]], list[Picture]]:
    """Adapt once to a stream under attack, and return the figures of each threat and the worst images.

    The threats share the attack and the stream. `copies` are attacked ahead of it; without them the attack is live.
    """
    spec = StreamSpec(attack_rate=threats[0].rate if attack else 0, batch=batch, seed=defence.seed)
    arriving = domain.images if copies is None else copies
    clean, stream = (Stream([domain], spec, [images]) for images in (domain.images, arriving))
    method, alone, kept = defence.start(), defence.alone(), Pass()
    attacker = None
    if attack is not None and copies is None:
        attacker = start(attack.name, method, seed=defence.seed, **attack.threat)
    for number, (before, arrived) in enumerate(zip(clean, stream, strict=True)):
        images = arrived.images
        if attacker is not None:
            images = attacker.perturb(images, arrived.labels, arrived.attacked, number)
        was = method.predict(before.images)
        again = _resubmitted(method, threats, images, arrived.labels, defence.seed, number)
        _note(kept, before, images, was, alone(images), method(images), again)
        tick(number + 1, len(stream), accuracy=100 * float(kept.columns["right 1"][-1].double().mean()))
    return [kept.figures(threat) for threat in threats], kept.pictures


def _resubmitted(
    method: Method, threats: Sequence[Threat], images: Tensor, labels: Tensor, seed: int, number: int
) -> dict[str, Tensor]:
    """Return for every number of times that an image is sent whether all answers to it are right."""
    device, several = method.classifier.device, {threat.times for threat in threats} - {1}
    with method.answering():
        return {
            f"right {times}": resubmit(
                method.predictor, images.to(device), labels.to(device), times=times,
                generator=generator(seed, "resubmission", number),
            )
            for times in several
        }  # fmt: skip


def _note(
    kept: Pass, clean: Batch, images: Tensor, was: Prediction, alone: Prediction, now: Prediction,
    again: dict[str, Tensor],
) -> None:  # fmt: skip
    labels = clean.labels
    right, suspicion = now.labels.cpu() == labels, now.suspicion
    known = torch.full((len(labels),), torch.nan) if suspicion is None else suspicion.float()
    kept.add(
        attacked=clean.attacked, alone=alone.labels.cpu() == labels, suspicion=known, **{"right 1": right}, **again
    )
    harmed = clean.attacked & ~right & (was.labels.cpu() == labels)
    for index in harmed.nonzero().flatten().tolist():
        confidence, before = float(now.probs[index].max()), float(was.probs[index].max())
        answer = int(now.labels[index])
        shown = Picture(clean.images[index], images[index], int(labels[index]), answer, confidence, before)
        kept.pictures.append(shown)
    kept.pictures = sorted(kept.pictures, key=lambda picture: -picture.confidence)[:SHOWN]
