import dataclasses
import math
import statistics
from dataclasses import dataclass

import pytest
import torch

from safer_tta.bench.record import Record
from safer_tta.evaluation.metrics import rolling
from safer_tta.predictors import Prediction, Report

CLASSES, VIEWS, BATCHES = 3, 3, 19
DROPPED = [-1, 0, 2, 2, 2]  # view 1 never is


@dataclass(frozen=True)
class Seen:
    """One image, as a row's figures see it."""

    probs: list[float]
    label: int
    attacked: bool
    suspicion: float

    @property
    def right(self) -> bool:
        return max(self.probs) == self.probs[self.label]


@pytest.fixture(scope="module", params=["probability", "signal"])
def recorded(request):
    """The figures of a made-up run, its batches (the last is short) and its images, of which a quarter is attacked."""
    randomness, record, batches = torch.Generator().manual_seed(0), Record(), []
    for number in range(BATCHES):
        size = 3 if number == BATCHES - 1 else 8
        probs = (2 * torch.randn(size, CLASSES, generator=randomness)).softmax(dim=1)
        labels = torch.randint(CLASSES, (size,), generator=randomness)
        attacked = torch.rand(size, generator=randomness) < 0.25
        suspicion = (10 * torch.rand(size, generator=randomness)).round() / 10
        probable = request.param == "probability"
        report = Report(
            torch.full((VIEWS, size), 1 / VIEWS),
            reliability=torch.tensor([0.0, 0.5, number / 18]),
            dropped=torch.tensor(DROPPED[number % 5]),
            suspicion=suspicion if probable else None,
            signals={"other": -suspicion} if probable else {"disagreement": suspicion, "other": -suspicion},
        )
        # The first batch is slow, as on a machine that warms up.
        record.add(Prediction(probs, probs.log(), probs, report), labels, attacked, number / 10 or 9.0)
        images = zip(probs.tolist(), labels.tolist(), attacked.tolist(), suspicion.tolist(), strict=True)
        batches.append([Seen(*image) for image in images])
    return record.figures(CLASSES), batches, [image for batch in batches for image in batch]


def percent(images):
    return 100 * statistics.mean(image.right for image in images)


def test_accuracies_are_of_all_attacked_and_clean_images_by_class_and_by_batch(recorded):
    figures, batches, images = recorded
    attacked = [image for image in images if image.attacked]
    assert (figures["images"], figures["batches"]) == (len(images), BATCHES)
    assert figures["accuracy"] == pytest.approx(percent(images))
    assert figures["attacked_share"] == pytest.approx(100 * len(attacked) / len(images))
    assert figures["accuracy_attacked"] == pytest.approx(percent(attacked))
    assert figures["accuracy_clean"] == pytest.approx(percent([image for image in images if not image.attacked]))
    of_class = [[image for image in images if image.label == k] for k in range(CLASSES)]
    assert figures["per_class"] == pytest.approx([percent(some) for some in of_class])
    assert figures["batch_accuracy"] == pytest.approx([percent(batch) for batch in batches])


def test_the_rolling_curve_is_over_the_last_sixteen_batches(recorded):
    figures, batches, _ = recorded
    each = [percent(batch) for batch in batches]
    curve = rolling(figures["batch_accuracy"])
    assert curve[:3] == pytest.approx([each[0], sum(each[:2]) / 2, sum(each[:3]) / 3])
    assert curve[15:] == pytest.approx([sum(each[i : i + 16]) / 16 for i in range(4)])
    assert rolling([0, 100, 50], 2) == [0, 50, 75]


def test_calibration_is_the_gap_between_confidence_and_accuracy_over_fifteen_equal_bins(recorded):
    figures, _, images = recorded
    assert figures["nll"] == pytest.approx(statistics.mean(-math.log(image.probs[image.label]) for image in images))
    bins = {}
    for image in images:
        bins.setdefault(int(15 * max(image.probs)), []).append(image)
    gaps = [abs(sum(image.right - max(image.probs) for image in some)) for some in bins.values()]
    assert figures["ece"] == pytest.approx(sum(gaps) / len(images))


def test_a_step_takes_the_median_time_without_the_first_and_views_are_averaged_over_the_steps(recorded):
    figures, batches, _ = recorded
    median = statistics.median_low(number / 10 for number in range(1, BATCHES))
    assert figures["ms_per_step"] == pytest.approx(1000 * median)
    assert figures["images_per_s"] == pytest.approx(statistics.mean(map(len, batches)) / median)
    dropped = [DROPPED[number % 5] for number in range(BATCHES)]
    assert figures["dropped_share"] == pytest.approx([dropped.count(view) / BATCHES for view in range(VIEWS)])
    assert figures["reliability"] == pytest.approx([0.0, 0.5, 0.5])


def test_detection_and_selection_follow_the_suspicion(recorded):
    """How often an attacked image is more suspicious than a clean one, ties counting half; and the accuracy on the
    least suspicious 100, 90, ... 50 %."""
    figures, _, images = recorded
    pairs = [(a.suspicion, c.suspicion) for a in images for c in images if a.attacked and not c.attacked]
    assert figures["detection"] == pytest.approx(statistics.mean((a > c) + 0.5 * (a == c) for a, c in pairs))
    assert figures["detection"] != pytest.approx(0.5, abs=1e-3)
    ordered = sorted(images, key=lambda image: image.suspicion)
    expected = [percent(ordered[: round(len(images) * share)]) for share in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)]
    assert figures["selective"] == pytest.approx(expected)


def test_without_suspicion_there_is_neither_detection_nor_selection():
    probs, record = torch.full((4, CLASSES), 1 / CLASSES), Record()
    prediction = Prediction(probs, probs.log(), probs, Report(torch.ones(1, 4)))
    record.add(prediction, torch.zeros(4, dtype=torch.int64), torch.tensor([True, True, False, False]), 0.1)
    figures = record.figures(CLASSES)
    assert figures["detection"] is figures["selective"] is figures["reliability"] is None


def test_the_share_of_images_that_are_called_attacked():
    record = Record()
    for suspicion in ([0.1, 0.6, 0.9], [0.2, 0.5, 0.51]):
        probs = torch.full((3, 2), 0.5)
        report = Report(weights=torch.ones(1, 3), view_probs=probs[None], suspicion=torch.tensor(suspicion))
        prediction = Prediction(probs, probs, probs, report)
        record.add(prediction, torch.zeros(3, dtype=torch.long), torch.tensor([False, False, True]), 0.1)
    figures = record.figures(2)
    assert figures["flagged_clean"] == pytest.approx(25)
    assert figures["flagged_attacked"] == pytest.approx(100)
    ranking = dataclasses.replace(report, suspicion=None, signals={"x": torch.ones(3)})
    only = Record()
    only.add(Prediction(probs, probs, probs, ranking), torch.zeros(3, dtype=torch.long), torch.ones(3) > 0, 0.1)
    assert only.figures(2)["flagged_clean"] is only.figures(2)["flagged_attacked"] is None
