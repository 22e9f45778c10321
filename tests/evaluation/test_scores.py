"""Test the scores of labelled streams against straight-line formulas."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import safer_tta
from safer_tta.errors import InvalidTypeError, InvalidValueError
from safer_tta.evaluation import Evaluation, Scores, evaluate
from safer_tta.guards import Guard
from tests.conftest import CLASSES, adapt_small, batches, small_net


def stream(count=3, size=6):
    draw = torch.Generator().manual_seed(0)
    labels = [torch.randint(0, CLASSES, (size,), generator=draw) for _ in range(count)]
    attacked = [torch.arange(size) % 3 == 0 for _ in range(count)]
    return list(zip(batches(count, size), labels, attacked, strict=True))


def by_hand(predictions, truth, chosen=None):
    """The scores of the chosen images, image by image."""
    bins = {}
    right, suspicions = [], []
    number = 0
    for prediction, labels in zip(predictions, truth, strict=True):
        for i in range(len(labels)):
            if chosen is None or chosen[number]:
                confidence, label = prediction.probs[i].double().max(dim=0)
                right.append(float(label == labels[i]))
                bins.setdefault(min(int(confidence * 15), 14), []).append((float(confidence), right[-1]))
                suspicions.append(None if prediction.suspicion is None else float(prediction.suspicion[i]))
            number += 1
    gaps = [abs(sum(c for c, _ in members) - sum(r for _, r in members)) for members in bins.values()]
    mean = None if None in suspicions else pytest.approx(sum(suspicions) / len(suspicions), rel=1e-5)
    count = len(right)
    return Scores(count, pytest.approx(100 * sum(right) / count), pytest.approx(sum(gaps) / count), mean)


@pytest.mark.parametrize("predictor", ["plain", "safer", "safer-g"])
@pytest.mark.parametrize("watch", [lambda method: method, Guard])
def test_the_scores_are_those_of_a_stream_by_hand(predictor, watch):
    data = stream()
    predictions = list(adapt_small("tent", predictor).stream(data))
    truth, attacked = [labels for _, labels, _ in data], torch.cat([a for *_, a in data])
    found = watch(adapt_small("tent", predictor)).evaluate(data)
    assert Scores(found.images, found.accuracy, found.ece, found.suspicion) == by_hand(predictions, truth)
    assert found.attacked == by_hand(predictions, truth, attacked)
    assert found.clean == by_hand(predictions, truth, ~attacked)
    assert (found.suspicion is None) == (found.detection is None) == (predictor != "safer-g")


def test_without_word_of_attacks_there_are_no_parts():
    for more in ((), (torch.arange(6),), (["a name"],)):  # numbers or names of images, as some datasets give them
        found = adapt_small().evaluate([(images, labels, *more) for images, labels, _ in stream()])
        assert (found.clean, found.attacked, found.detection) == (None, None, None)


@pytest.mark.parametrize(("images", "labels", "key"), [("pixel_values", "labels", None), ("image", "label", "image")])
@pytest.mark.parametrize("watch", [lambda method: method, Guard])
def test_a_batch_may_be_a_dict(images, labels, key, watch):
    data = stream()
    named = [{"name": ["x"] * 6, images: x, labels: y, "attacked": a} for x, y, a in data]
    assert watch(adapt_small()).evaluate(named, key=key) == adapt_small().evaluate(data)


def test_all_images_may_be_clean_or_attacked():
    for flag in (True, False):
        found = adapt_small("none").evaluate([(x, y, torch.full((6,), flag)) for x, y, _ in stream()])
        part, other = (found.attacked, found.clean) if flag else (found.clean, found.attacked)
        assert (part.images, part.accuracy, other) == (18, found.accuracy, None)


def test_a_table_has_a_line_for_each_part():
    part = Scores(30, 70.04, 0.0512, 0.126)
    both = Evaluation(50, 66.6667, 0.1, 0.25, clean=part, attacked=Scores(20, 60.0, 0.2, 0.4), detection=0.875)
    lines = repr(both).splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["all", "50", "66.7", "0.100", "0.25"], ["clean", "30", "70.0", "0.051", "0.13"],
        ["attacked", "20", "60.0", "0.200", "0.40"],
    ]  # fmt: skip
    assert lines[4].endswith("AUROC of 0.88")
    assert [line.split() for line in repr(Evaluation(50, 66.6667, 0.1, None)).splitlines()[1:]] == [
        ["all", "50", "66.7", "0.100", "–"]
    ]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_parts_add_up_to_the_whole(sizes, data):
    flags = [torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n))) for n in sizes]
    loader = [(batches(1, n, seed=n)[0], torch.arange(n) % CLASSES, a) for n, a in zip(sizes, flags, strict=True)]
    found = evaluate(safer_tta.Plain(adapt_small("none").classifier), loader)
    parts = [part for part in (found.clean, found.attacked) if part is not None]
    assert sum(part.images for part in parts) == found.images == sum(sizes)
    assert sum(part.images * part.accuracy for part in parts) == pytest.approx(found.images * found.accuracy)


@pytest.mark.parametrize(
    ("loader", "error", "says"),
    [
        ([], InvalidValueError, "gave no batch"),
        (batches(1), InvalidTypeError, "a batch is Tensor; expected \\(images, labels\\)"),
        ([{"pixel_values": batches(1)[0]}], InvalidTypeError, "a batch has 'pixel_values' and no 'labels'"),
        ([()], InvalidTypeError, r"a batch is 0 element\(s\)"),
        ([batches(1)], InvalidTypeError, r"a batch is 1 element\(s\)"),
        ([(batches(1)[0], torch.zeros(5, dtype=torch.long))], InvalidValueError, r"labels are torch.int64 \(5,\)"),
        ([(batches(1)[0], torch.zeros(6))], InvalidValueError, "labels are torch.float32"),
        ([(batches(1)[0], torch.zeros(6, CLASSES, dtype=torch.long))], InvalidValueError, "6 whole numbers"),
        ([(batches(1)[0], torch.ones(6, dtype=torch.bool))], InvalidValueError, "labels are true or false"),
        ([(batches(1)[0], torch.tensor([0, 1, -1, 0, 0, 0]))], InvalidValueError, "labels are from -1 to 1"),
        ([(batches(1)[0], [1, 2, 3, 4, 0, 0])], InvalidValueError, "labels are list"),
    ],
)
def test_batches_without_usable_labels_are_refused_before_they_teach(loader, error, says):
    adapted = adapt_small()
    before = adapted.state_dict()
    with pytest.raises(error, match=says):
        adapted.evaluate(loader)
    assert all(torch.equal(before[name], tensor) for name, tensor in adapted.state_dict().items())


@pytest.mark.parametrize(
    "score", [evaluate, lambda method, loader: safer_tta.compare(small_net(), loader, mean=0, std=1)]
)
def test_labels_of_no_class_are_refused(score):
    """Such as labels that start at 1, which would be scored as wrong answers."""
    loader = [(images, labels + 1) for images, labels, _ in stream()]
    with pytest.raises(InvalidValueError, match=rf"to {CLASSES}; .* from 0 to {CLASSES - 1}.*Subtract 1"):
        score(adapt_small(), loader)
