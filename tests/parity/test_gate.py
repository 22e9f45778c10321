"""The gate against its formulas, written as loops over float64 numbers; and what must hold for any views."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from safer_tta import Safer, mixing, pooling
from safer_tta.gate import Gate, log_odds, straying
from safer_tta.models import zoo

V, B, D, K = 5, 6, 8, 4
CLEAN, ATTACKED = 0.6, 1.2  # the two bells' spreads, as docs/beyond.md has them
LEAST, MOST = 1.0, 3.0  # between which the attacked one's middle stays
ROUNDS = 5
FLOOR = 1e-6


def random_views(seed: int, views: int = V, batch: int = B) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.randn(views, batch, K, generator=generator).softmax(-1)
    return probs, torch.randn(batch, D, generator=generator) + torch.randn(views, batch, D, generator=generator)


def attacked_views(attacked: int, by: float = 12.0, batch: int = 64) -> torch.Tensor:
    """Features whose originals lie amid their augmented views, but those of the first images elsewhere."""
    generator = torch.Generator().manual_seed(7)
    noise = torch.randn(V, batch, 32, generator=generator)
    noise[0] *= 0.7
    features = torch.randn(batch, 32, generator=generator) + noise
    features[0, :attacked] += by
    return features


def expected_straying(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    views, batch, dimensions = features.shape
    scaled = np.empty_like(features)
    for d in range(dimensions):
        seen = [features[v, b, d] for v in range(1, views) for b in range(batch)]
        middle = sum(seen) / len(seen)
        spread = math.sqrt(sum((x - middle) ** 2 for x in seen) / len(seen) + FLOOR)
        scaled[:, :, d] = (features[:, :, d] - middle) / spread

    def distance(u: int, v: int, b: int) -> float:
        return sum((x - y) ** 2 for x, y in zip(scaled[u, b], scaled[v, b], strict=True)) / dimensions

    original, augmented = np.empty(batch), np.empty((views - 1, batch))
    for b in range(batch):
        logs = []
        for left_out in range(1, views):
            others = [v for v in range(1, views) if v != left_out]
            among = np.mean([distance(u, v, b) for u, v in itertools.combinations(others, 2)]) + FLOOR
            logs.append(math.log((np.mean([distance(0, v, b) for v in others]) + FLOOR) / among))
            near = np.mean([distance(left_out, v, b) for v in others]) + FLOOR
            augmented[left_out - 1, b] = math.log(near / among)
        original[b] = np.mean(logs)
    return original, augmented


@pytest.mark.parametrize("views", [4, 5, 9])
def test_straying(views):
    _, features = random_views(views, views)
    for ours, expected in zip(straying(features), expected_straying(features.double().numpy()), strict=True):
        assert ours.numpy() == pytest.approx(expected, abs=1e-4)


def bell(x: float, middle: float, spread: float) -> float:
    return math.exp(-((x - middle) ** 2) / (2 * spread**2)) / spread


@pytest.mark.parametrize("gate", [Gate(), Gate(alpha_clean=0.8, cost=3)])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("attacked", "by"), [(0, 0), (3, 1), (B, 1), (3, 4), (B, 4)])
def test_weights_and_probabilities(gate, seed, attacked, by):
    probs, features = random_views(seed)
    features[0, :attacked] += by
    base = pooling.weights("cc_drop", probs, features)
    weights, suspicion = gate.mix(base, probs, features)
    original, augmented = expected_straying(features.double().numpy())
    deviation = math.sqrt(np.mean(augmented**2))
    evidence = [max(t / deviation, 0) for t in original]
    share, middle = 0.5, 2.0
    for _ in range(ROUNDS):
        odds = [share * bell(x, middle, ATTACKED) / ((1 - share) * bell(x, 0, CLEAN)) for x in evidence]
        chances = [o / (1 + o) for o in odds]
        share = (sum(chances) + 0.5) / (B + 1)
        mean = sum(c * x for c, x in zip(chances, evidence, strict=True)) / (sum(chances) + FLOOR)
        middle = min(max(mean, LEAST), MOST)
    for b, x in enumerate(evidence):
        odds = share * bell(x, middle, ATTACKED) / ((1 - share) * bell(x, 0, CLEAN))
        alpha, rest = gate.alpha_clean / (1 + gate.cost * odds), base[1:, b].double().numpy()
        assert suspicion[b].item() == pytest.approx(odds / (1 + odds), abs=1e-4)
        assert weights[0, b].item() == pytest.approx(alpha, abs=1e-4)
        assert weights[1:, b].numpy() == pytest.approx((1 - alpha) * rest / rest.sum(), abs=1e-4)


@pytest.mark.parametrize("attacked", [0, 16, 32, 64])
def test_attacked_originals_are_shut_out_and_clean_ones_let_in(attacked):
    features, probs = attacked_views(attacked), torch.full((V, 64, K), 1 / K)
    weights, suspicion = Gate().mix(torch.full((V, 64), 1 / V), probs, features)
    assert (weights[0, :attacked] < 0.01).all()
    assert (suspicion[:attacked] > 0.9).all()
    if attacked < 64:
        assert weights[0, attacked:].mean() > 0.4
        assert suspicion[attacked:].mean() < 0.1


def test_an_image_is_judged_by_the_company_it_keeps():
    """The same doubtful original is believed in a clean batch, and not where the others are attacked."""
    features = attacked_views(1, by=0.7)
    among_clean = log_odds(features)[0]
    features[0, 1:] += 1.5
    assert log_odds(features)[0] > among_clean + 1


def test_decoys_that_stray_far_do_not_make_the_others_look_harmless():
    features = attacked_views(32, by=1.5)
    alone = torch.sigmoid(log_odds(features)[:32])
    features[0, 32:48] += 100
    assert (torch.sigmoid(log_odds(features)[:32]) > 0.9 * alone - 0.1).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(4, 9), st.integers(1, 12), st.sampled_from([0.0, 1e-6, 1.0, 1e4]))
def test_weights_share_one_whatever_the_views(seed, views, batch, scale):
    probs, features = random_views(seed, views, batch)
    base = pooling.weights("cc_drop", probs, features)
    weights, suspicion = Gate().mix(base, probs, features * scale)
    assert (weights >= 0).all()
    assert torch.allclose(weights.sum(0), torch.ones(batch), atol=1e-5)
    assert (weights[0] <= 0.6 + 1e-6).all()
    assert ((suspicion >= 0) & (suspicion <= 1)).all()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.permutations(range(B)), st.permutations(range(1, V)))
def test_order_of_images_and_of_augmented_views_does_not_matter(seed, images, views):
    _, features = random_views(seed)
    moved = features[[0, *views]][:, images]
    assert torch.allclose(log_odds(moved), log_odds(features)[images], rtol=1e-3, atol=1e-3)


def test_scale_and_place_of_a_dimension_do_not_matter():
    _, features = random_views(0)
    factor, offset = torch.linspace(0.5, 50, D), torch.linspace(-9, 9, D)
    assert torch.allclose(log_odds(features * factor + offset), log_odds(features), atol=1e-2)


def test_views_that_are_all_alike_are_no_evidence():
    features = torch.randn(1, B, D, generator=torch.Generator().manual_seed(0)).expand(V, B, D)
    _, suspicion = Gate().mix(torch.full((V, B), 1 / V), torch.full((V, B, K), 1 / K), features)
    assert (suspicion < 0.2).all()


def test_gradients_flow_through_the_gate():
    """An attacker who knows it must be able to follow it: nothing is detached on the way."""
    features = random_views(2)[1].double().requires_grad_(True)
    probs = random_views(3)[0].double()
    base = pooling.weights("cc_drop", probs, features.detach())

    def first_weight(z: torch.Tensor) -> torch.Tensor:
        return Gate(cost=0.1).mix(base, probs, z)[0][0, 0]

    assert torch.autograd.gradcheck(first_weight, (features,))
    (gradient,) = torch.autograd.grad(first_weight(features), features)
    assert gradient.abs().max() > 0


def test_no_augmented_view_is_the_base_weight():
    probs, features = random_views(0, views=1)
    weights, suspicion = Gate().mix(torch.ones(1, B), probs, features)
    assert torch.equal(weights, torch.ones(1, B))
    assert torch.equal(suspicion, torch.zeros(B))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Gate(alpha_clean=1.5), "between 0 and 1"),
        (lambda: Gate(cost=0), "positive"),
        (lambda: Gate(cost=-1), "positive"),
        (lambda: Safer(zoo.create("small", num_classes=2), views=2, mixing="gate"), "at least 3"),
        (lambda: mixing.create({"name": "door"}), "gate"),
    ],
)
def test_refuses_with_words(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_settings_make_it_again():
    gate = Gate(cost=7)
    assert mixing.create(mixing.settings(gate)) == gate
    assert mixing.create("gate") == Gate()


@pytest.mark.parametrize("chosen", [{}, {"teaches": False}, {"equal": True}, {"teaches": False, "equal": True}])
def test_choices_are_named_where_they_are_not_those_of_older_rows(chosen):
    """Rows from before there was a choice keep their names."""
    gate = mixing.create({"name": "gate", **chosen})
    assert mixing.settings(gate) == {"name": "gate", "alpha_clean": 0.6, "cost": 5.0, **chosen}
    assert mixing.create(mixing.settings(gate)) == gate


@pytest.mark.parametrize("pool", ["cc_drop", "top1", "mean"])
def test_augmented_views_share_equally_whatever_the_pooling(pool, images):
    predictor = Safer(zoo.create("small", num_classes=7).eval(), pool=pool, mixing=Gate(equal=True), seed=0)
    report = predictor(images).report
    original, augmented = report.weights[0], report.weights[1:]
    torch.testing.assert_close(augmented, ((1 - original) / 4).expand_as(augmented))
    torch.testing.assert_close(original, 0.6 / (1 + 5 * report.signal / (1 - report.signal)))


def test_the_lesson_is_pooled_without_the_gate(images):
    def predict(mixing):
        predictor = Safer(zoo.create("small", num_classes=7).eval(), mixing=mixing, seed=0)
        predictor.classifier.model.load_state_dict(weights)
        return predictor(images, predictor.draw(images))

    weights = zoo.create("small", num_classes=7).state_dict()
    pooled, gated = predict(None), predict({"name": "gate", "teaches": False})
    lesson = gated.taught()
    assert torch.equal(lesson.probs, pooled.probs)
    assert torch.equal(lesson.logits, pooled.logits)
    assert torch.equal(lesson.answered().probs, predict("gate").probs)
    assert torch.equal(lesson.answered().logits, gated.logits)
    assert pooled.taught() is pooled
    assert predict("gate").lesson is None


def test_a_mixing_from_elsewhere_is_told_from_others():
    """Runs are named by what their settings say: two mixings must not share a name."""

    class Elsewhere(Gate):
        pass

    assert mixing.settings(Elsewhere())["name"].endswith("Elsewhere")
    assert mixing.settings(Gate())["name"] == "gate"
    assert mixing.settings(None) is None
