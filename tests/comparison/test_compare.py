"""Test `compare`: its figures by hand, and its verdict on streams of a trained model where the labels are known."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import safer_tta
from safer_tta.comparison.run import SHARED
from safer_tta.comparison.verdict import LEAST_GAIN, weigh
from safer_tta.data import Stream, StreamSpec, open_dataset
from safer_tta.errors import InvalidTypeError, InvalidValueError
from safer_tta.models import load_classifier
from safer_tta.training import source_recipe, train_source
from tests.conftest import CLASSES, adapt_small, batches, identical, small_net


def one_hot(labels, sure=1.0):
    probs = torch.full((len(labels), CLASSES), (1 - sure) / (CLASSES - 1)).double()
    probs[torch.arange(len(labels)), torch.tensor(labels)] = sure
    return probs


answers = st.lists(st.integers(0, CLASSES - 1), min_size=2, max_size=30)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_agreement_is_cohens_kappa(data):
    given_, again = (data.draw(answers) for _ in range(2))
    count = min(len(given_), len(again))
    given_, again = given_[:count], again[:count]
    observed = sum(a == b for a, b in zip(given_, again, strict=True)) / count
    chance = sum(given_.count(k) * again.count(k) for k in range(CLASSES)) / count**2
    kappa = 0.0 if chance == 1 else (observed - chance) / (1 - chance)
    (found,) = weigh({"x": (one_hot(given_), torch.tensor(again))}, None).candidates
    assert found.agreement == pytest.approx(kappa)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, CLASSES - 1)] * 3), min_size=2, max_size=40))
def test_gain_with_labels_is_a_paired_difference(triples):
    before, after, truth = (list(column) for column in zip(*triples, strict=True))
    _, found = weigh(
        {"a": (one_hot(before), torch.tensor(before)), "b": (one_hot(after), torch.tensor(after))}, torch.tensor(truth)
    ).candidates
    count = len(truth)
    wins = [int(b == t) - int(a == t) for a, b, t in triples]
    mean = sum(wins) / count
    deviation = math.sqrt(sum((win - mean) ** 2 for win in wins) / (count - 1))
    assert found.gain == pytest.approx(100 * mean)
    assert found.error == pytest.approx(100 * 1.96 * deviation / math.sqrt(count))
    assert found.accuracy == pytest.approx(100 * sum(b == t for _, b, t in triples) / count)
    assert found.changed == pytest.approx(100 * sum(a != b for a, b, _ in triples) / count)
    decided = "unclear" if abs(found.gain) <= found.error else "helps" if found.gain > 0 else "harms"
    assert found.verdict == decided


MIXED = [i % CLASSES for i in range(400)]
SHIFTED = [(i + 1) % CLASSES if i < 100 else i % CLASSES for i in range(400)]  # a quarter answered otherwise


def without_labels(first, second):
    """The verdict about a candidate, of which both answers are given, as about the model as it is."""
    pairs = {"model": first, "candidate": second}
    return weigh({n: (one_hot(a), torch.tensor(b)) for n, (a, b) in pairs.items()}, None).candidates[1].verdict


@pytest.mark.parametrize(
    ("model", "candidate", "verdict"),
    [
        ((MIXED, SHIFTED), (MIXED, MIXED), "helps"),
        ((MIXED, MIXED), (MIXED, SHIFTED), "harms"),
        ((MIXED, SHIFTED), (MIXED, SHIFTED), "unclear"),
        ((MIXED, [1, *MIXED[1:]]), (MIXED, MIXED), "unclear"),  # one image of 400 is less than LEAST_GAIN
        ((MIXED, MIXED), ([0] * 400, [0] * 400), "harms"),  # always the same class: it always agrees with itself
        ((MIXED, SHIFTED), ([i % 2 for i in range(400)], [i % 2 for i in range(400)]), "harms"),  # few classes are left
    ],
)
def test_the_verdict_without_labels(model, candidate, verdict):
    assert LEAST_GAIN > 1 / 400 / 0.8
    assert without_labels(model, candidate) == verdict


def test_each_way_answers_as_a_method_of_its_own_would(model):
    stream = batches(3)
    found = safer_tta.compare(model, stream, "tent", "safer-g", seed=3, lr=0.05)
    assert [one.name for one in found.candidates] == ["the model as it is", "safer-g, not learning", "tent on safer-g"]
    ways = {"none": "plain", "none ": "safer-g", "tent": "safer-g"}
    labels = []
    for method, predictor in ways.items():
        options = {"lr": 0.05} if method == "tent" else {}
        adapted = safer_tta.adapt(model, method.strip(), predictor, seed=3, **options)
        probs = torch.cat([adapted(images).probs.double() for images in stream])
        labels.append(probs.argmax(dim=1))
        mean = probs.mean(dim=0)
        spread = float(-(mean * mean.log()).sum()) / math.log(CLASSES)
        assert found.candidates[len(labels) - 1].spread == pytest.approx(spread)
    changed = [100 * float((given != labels[0]).double().mean()) for given in labels]
    assert [one.changed for one in found.candidates] == pytest.approx(changed)
    assert found.images == 18


def test_the_model_stays_as_it_is_and_the_result_repeats(model):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first = safer_tta.compare(model, batches(2), "tent", "plain")
    assert identical(model.state_dict(), before)
    assert safer_tta.compare(model, iter(batches(2)), "tent", "plain") == first
    uint8 = [(images * 255).byte() for images in batches(2)]
    floats = [images.float() / 255 for images in uint8]
    assert safer_tta.compare(model, uint8, "tent", "plain") == safer_tta.compare(model, floats, "tent", "plain")


def test_arguments_reach_the_model_as_it_is_too():
    """Otherwise it would answer without its normalisation."""
    shifted = [images * 0.1 + 0.4 for images in batches(2)]
    options = {"mean": 0.4, "std": 0.1}
    plain = safer_tta.adapt(small_net(), "none", "plain", seed=0, **options)
    mean = torch.cat([plain(images).probs.double() for images in shifted]).mean(dim=0)
    first = safer_tta.compare(small_net(), shifted, "tent", "plain", **options).candidates[0]
    assert first.spread == pytest.approx(float(-(mean * mean.log()).sum()) / math.log(CLASSES))
    assert "lr" not in SHARED
    assert "norm" not in SHARED


def test_the_normalisation_of_a_given_predictor_holds_for_the_model_as_it_is():
    wrapped = safer_tta.Safer(safer_tta.Classifier(small_net().eval(), mean=0.4, std=0.1))
    found = safer_tta.compare(small_net(), batches(2), "tent", wrapped)
    by_name = safer_tta.compare(small_net(), batches(2), "tent", "safer", mean=0.4, std=0.1)
    assert [one.name for one in found.candidates] == [one.name for one in by_name.candidates]
    assert found.candidates[0] == by_name.candidates[0]


def test_labels_add_a_column(model):
    labelled = [(images, torch.arange(6) % CLASSES) for images in batches(2)]
    found = safer_tta.compare(model, labelled, "tent", "plain")
    accuracy = adapt_small().evaluate(labelled).accuracy
    assert found.candidates[-1].accuracy == pytest.approx(accuracy)
    assert "accuracy, %" in repr(found)
    without = safer_tta.compare(model, [images for images, _ in labelled], "tent", "plain")
    assert "accuracy" not in repr(without)
    assert [c.agreement for c in without.candidates] == [c.agreement for c in found.candidates]
    lines = repr(found).splitlines()
    assert [line.split()[-1] for line in lines[1:3]] == [f"{c.accuracy:.1f}" for c in found.candidates]


def test_a_batch_may_be_a_dict(model):
    labelled = [(images, torch.arange(6) % CLASSES) for images in batches(2)]
    named = [{"image": images, "labels": labels} for images, labels in labelled]
    found = safer_tta.compare(model, named, "tent", "plain", key="image")
    assert found == safer_tta.compare(model, labelled, "tent", "plain")
    without = [{"pixel_values": images} for images in batches(2)]
    assert safer_tta.compare(model, without, "tent", "plain") == safer_tta.compare(model, batches(2), "tent", "plain")


@pytest.mark.parametrize(
    ("stream", "error", "says"),
    [
        ([], InvalidValueError, "no batch"),
        ([{"images": 1}], InvalidValueError, "a batch has 'images' and no 'pixel_values'"),
        ([()], InvalidTypeError, "images are tuple"),
        ([batches(1)[0], (batches(1)[0], torch.zeros(6).long())], InvalidValueError, "1 of 2 batches have labels"),
        ([(batches(1)[0], torch.zeros(6))], InvalidValueError, "labels are torch.float32"),
    ],
)
def test_batches_that_cannot_be_compared_are_refused(model, stream, error, says):
    with pytest.raises(error, match=says):
        safer_tta.compare(model, stream, "tent", "plain")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A model that has learnt its classes well enough for a new domain."""
    path = tmp_path_factory.mktemp("model") / "source.safetensors"
    data = open_dataset("synthetic", count=210)
    train_source(data, "photo", source_recipe("synthetic", steps=120, batch=16, every=120), path)
    return path


def stream(order, shade):
    """200 photographs, as they are or nearly dark."""
    domain = open_dataset("synthetic", count=210).domain("photo")
    spec = StreamSpec(order=order, batch=40, limit=200, seed=1)
    return [((batch.images * shade).byte(), batch.labels) for batch in Stream([domain], spec)]


@pytest.mark.parametrize(("order", "shade", "verdict"), [("shuffled", 0.15, "helps"), ("correlated", 1.0, "harms")])
def test_the_verdict_without_labels_is_that_of_the_labels(source, order, shade, verdict):
    """Statistics of the batch mend darkness; on one class after the other they mislead."""
    labelled = stream(order, shade)
    for batches_ in (labelled, [images for images, _ in labelled]):
        assert safer_tta.compare(load_classifier(source), batches_, "tent", "plain").verdict == verdict
