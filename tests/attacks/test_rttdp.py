"""Realistic test-time data poisoning: against its formulas, step by step, and what it does to others' images."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F

import safer_tta
from safer_tta.attacks import start
from safer_tta.attacks.consistency import Consistency, divergence, moments
from safer_tta.attacks.matching import match
from safer_tta.attacks.rttdp import Surrogate, rttdp
from safer_tta.errors import InvalidValueError, UnknownNameError
from tests.attacks.parts import eight_bit, generator, labels
from tests.conftest import CLASSES, SmallNet, small_net

THREAT = {"eps": 51 / 255, "step": 20 / 255, "steps": 4, "norm": "linf"}


def surrogate(objective="nhe", model=None):
    return Surrogate(safer_tta.Classifier(small_net() if model is None else model), {"objective": objective})


def in_batch_mode(model):
    """The network with batch statistics, which do not move, and its first layers' outputs before each norm."""
    model = copy.deepcopy(model).eval()
    for norm in (model.norm1, model.norm2):
        norm.training, norm.track_running_stats = True, False
    return model


def passed(model, x):
    """Scores, and what enters the two norms."""
    first = model.conv1(x)
    second = model.conv2(torch.relu(model.norm1(first)))
    return model.fc(torch.relu(model.norm2(second)).mean(dim=(2, 3))), (first, second)


def fitted(features):
    mean = features.mean(dim=(2, 3))
    return mean, ((features - mean[:, :, None, None]) ** 2).mean(dim=(2, 3)) + 1e-5


@pytest.mark.parametrize("objective", ["nhe", "ble"])
def test_poison_follows_its_formula(objective):
    x, y, model = eight_bit(side=24) / 255, labels(), in_batch_mode(small_net())
    scores, clean = passed(model, x)
    clean = [tuple(t.detach() for t in fitted(features)) for features in clean]
    if objective == "nhe":
        wanted = torch.full((6, CLASSES), 1 / (CLASSES - 1))
        wanted[range(6), y] = 0
    else:
        confusion = torch.stack([0.2 * scores.softmax(1)[y == k].mean(dim=0) for k in range(CLASSES)])
        ways = [p for p in itertools.permutations(range(CLASSES)) if all(k != q for k, q in enumerate(p))]
        best = max(ways, key=lambda p: sum(confusion[k, q].item() for k, q in enumerate(p)))
        wanted = F.one_hot(torch.tensor(best)[y], CLASSES).float()
    expected, weights = x.clone(), [0.0, 0.0]
    for _ in range(4):
        here = expected.clone().requires_grad_(True)
        scores, features = passed(model, here)
        loss = -(wanted * scores.log_softmax(dim=1)).sum(dim=1).mean()
        for layer in range(2):
            (m, v), (n, w) = clean[layer], fitted(features[layer])
            apart = (0.5 * ((w / v).log() + (v + (m - n) ** 2) / w - 1)).sum() / 2
            loss = loss + weights[layer] * apart
            weights[layer] += 0.001 * apart.item()
        moved = expected - 20 / 255 * torch.autograd.grad(loss, here)[0].sign()
        expected = torch.minimum(torch.maximum(moved, x - 0.2), x + 0.2).clamp(0, 1)
    assert weights[1] > 0
    found = rttdp(surrogate(objective), x, y, objective=objective, **THREAT)
    torch.testing.assert_close(found, (expected * 255).round() / 255)


def test_the_surrogate_follows_the_answers():
    """Ten steps of SGD on half the sum of both divergences, over the scale and shift of the norms."""
    images, y = eight_bit(side=24), labels()
    answers = torch.randn(6, CLASSES, generator=generator(3)).softmax(dim=1)
    model = in_batch_mode(small_net())
    parameters = [model.norm1.weight, model.norm1.bias, model.norm2.weight, model.norm2.bias]
    for _ in range(10):
        own = passed(model, images / 255)[0].softmax(dim=1)
        there, back = answers * (answers / own).log(), own * (own / answers).log()
        gradients = torch.autograd.grad(((there + back) / 2).sum(dim=1).mean(), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.data -= 0.1 * gradient
    remembered = surrogate()
    before = remembered(images / 255).softmax(dim=1)
    remembered.see(images, y, answers)
    torch.testing.assert_close(remembered(images / 255), passed(model, images / 255)[0], rtol=1e-4, atol=1e-4)
    after = remembered(images / 255).softmax(dim=1)
    apart = [F.kl_div(own.log(), answers, reduction="batchmean") for own in (before, after)]
    assert apart[1] < apart[0] / 2
    assert torch.equal(remembered.classifier.model.fc.weight, small_net().fc.weight)


def test_confusion_is_a_moving_average_over_the_classes_that_came():
    remembered, once = surrogate("ble"), torch.tensor([[0.5, 0.5, 0, 0, 0], [0.3, 0.7, 0, 0, 0], [0, 0, 1.0, 0, 0]])
    images, y = eight_bit(size=3, side=24), torch.tensor([0, 0, 2])
    remembered.see(images, y, once)
    torch.testing.assert_close(remembered.confusion[0], 0.2 * torch.tensor([0.4, 0.6, 0, 0, 0]))
    remembered.see(images[:2], y[:2], torch.eye(5)[[3, 3]])
    torch.testing.assert_close(remembered.confusion[0], torch.tensor([0.064, 0.096, 0, 0.2, 0]))
    torch.testing.assert_close(remembered.confusion[2], torch.tensor([0, 0, 0.2, 0, 0]))
    assert not remembered.confusion[[1, 3, 4]].any()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6])
def test_a_match_is_one_to_one_and_the_best_of_all(size):
    for seed in range(20):
        gains = torch.randn(size, size, generator=generator(seed)).double()
        found = match(gains).tolist()
        assert sorted(found) == list(range(size))
        every = itertools.permutations(range(size))
        best = max(sum(float(gains[k, q]) for k, q in enumerate(way)) for way in every)
        assert sum(float(gains[k, q]) for k, q in enumerate(found)) == pytest.approx(best)


def test_features_have_moments_over_places_only():
    mean, variance = moments(torch.tensor([[[[0.0, 2.0]], [[1.0, 1.0]]]]), torch.nn.BatchNorm2d(2))
    torch.testing.assert_close(mean, torch.tensor([[1.0, 1.0]]))
    torch.testing.assert_close(variance, torch.tensor([[1.0, 0.0]]) + 1e-5)
    tokens = torch.tensor([[[0.0, 1.0], [2.0, 1.0]]])  # (B,T,C)
    torch.testing.assert_close(moments(tokens, torch.nn.LayerNorm(2))[0], torch.tensor([[1.0, 1.0]]))
    assert moments(torch.ones(2, 3), torch.nn.LayerNorm(3)) is None
    assert moments(torch.ones(2, 3, 1, 1), torch.nn.BatchNorm2d(3)) is None
    same = (torch.zeros(1, 4), torch.ones(1, 4))
    assert divergence(same, same) == 0
    torch.testing.assert_close(divergence(same, (torch.ones(1, 4), torch.ones(1, 4))), torch.tensor([2.0]))


@pytest.mark.parametrize("norm", ["none", "group"])
def test_models_without_batch_statistics_are_poisoned_too(norm):
    remembered = surrogate(model=small_net(norm=norm))
    remembered.see(eight_bit(side=24), labels(), torch.full((6, CLASSES), 1 / CLASSES))
    x = eight_bit(side=24) / 255
    found = rttdp(remembered, x, labels(), **THREAT)
    loss = [F.cross_entropy(remembered(images), labels()) for images in (x, found)]
    assert loss[1] > loss[0]
    assert len(Consistency(remembered.classifier, remembered, x).weights) == (2 if norm == "group" else 0)


def test_an_unknown_objective_and_a_foreign_state_are_refused():
    source = safer_tta.Classifier(small_net())
    with pytest.raises(UnknownNameError, match=r"objective 'nh' is unknown .did you mean 'nhe'"):
        start("rttdp", source, objective="nh")
    other = start("rttdp", safer_tta.Classifier(SmallNet(classes=3)))
    with pytest.raises(InvalidValueError, match="is not that of an attacker with this source model"):
        start("rttdp", source).load_state_dict(other.state_dict())
