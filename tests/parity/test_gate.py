"""The gate against its formulas, written as loops over float64 numbers; and what must hold for any views."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from safer_tta import Safer, methods, mixing, pooling, views
from safer_tta.gate import EVIDENCE, Gate, log_odds
from safer_tta.models import zoo

V, B, D, K = 5, 6, 8, 4
ATTACKED = 1.2  # the attacked bell's spread, as docs/beyond.md has it
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


def scaled(features: np.ndarray) -> np.ndarray:
    """Each dimension on the scale of the augmented views."""
    views, batch, dimensions = features.shape
    found = np.empty_like(features)
    for d in range(dimensions):
        seen = [features[v, b, d] for v in range(1, views) for b in range(batch)]
        middle = sum(seen) / len(seen)
        spread = math.sqrt(sum((x - middle) ** 2 for x in seen) / len(seen) + FLOOR)
        found[:, :, d] = (features[:, :, d] - middle) / spread
    return found


def distance(x: np.ndarray, y: np.ndarray) -> float:
    return sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) / len(x)


def angle(x: np.ndarray, y: np.ndarray) -> float:
    return 1 - sum(x * y) / math.sqrt(sum(x * x) * sum(y * y))


def expected_logs(between, features: np.ndarray) -> list[tuple[int, float, float, float]]:
    """(image, log of the original's, the left out view's, the others' own mean distance), an entry for each image and
    augmented view left out."""
    views, batch, _ = features.shape
    found = []
    for b in range(batch):
        for left_out in range(1, views):
            others = [v for v in range(1, views) if v != left_out]
            pairs = [between(features[u, b], features[v, b]) for u, v in itertools.combinations(others, 2)]
            original = np.mean([between(features[0, b], features[v, b]) for v in others])
            augmented = np.mean([between(features[left_out, b], features[v, b]) for v in others])
            found.append((b, *(math.log(x + FLOOR) for x in (original, augmented, np.mean(pairs)))))
    return found


def expected_evidence(kind: str, features: np.ndarray) -> list[float]:
    """By loops; `predicted` is the mean of two looks, each beside a line of best fit as numpy fits it."""
    if kind == "predicted":
        looks = [surprise(expected_logs(distance, scaled(features))), surprise(expected_logs(angle, features))]
        return [(a + b) / 2 for a, b in zip(*looks, strict=True)]
    logs = expected_logs(distance, scaled(features))
    ratio = deviations([(b, o - m) for b, o, _, m in logs], [a - m for _, _, a, m in logs])
    return ratio if kind == "ratio" else [(a + b) / 2 for a, b in zip(ratio, surprise(logs), strict=True)]


def surprise(logs: list[tuple[int, float, float, float]]) -> list[float]:
    slope, _ = np.polyfit([m for _, _, _, m in logs], [a for _, _, a, _ in logs], 1)
    slope = min(max(slope, 0), 1)
    across, along = np.mean([a for _, _, a, _ in logs]), np.mean([m for _, _, _, m in logs])
    expected = [across + slope * (m - along) for _, _, _, m in logs]
    originals = [(b, o - e) for (b, o, _, _), e in zip(logs, expected, strict=True)]
    return deviations(originals, [a - e for (_, _, a, _), e in zip(logs, expected, strict=True)])


def deviations(originals: list[tuple[int, float]], augmented: list[float]) -> list[float]:
    spread = math.sqrt(np.mean(np.square(augmented)))
    batch = 1 + max(b for b, _ in originals)
    return [np.mean([t for b, t in originals if b == image]) / spread for image in range(batch)]


@pytest.mark.parametrize("kind", EVIDENCE)
@pytest.mark.parametrize("views", [4, 5, 9])
def test_evidence(kind, views):
    _, features = random_views(views, views)
    features[0, :2] += 2
    expected = expected_evidence(kind, features.double().numpy())
    assert EVIDENCE[kind](features.double()).numpy() == pytest.approx(expected, abs=1e-5)
    assert EVIDENCE[kind](features).numpy() == pytest.approx(expected, abs=1e-3)  # as features mostly come


def bell(x: float, middle: float, spread: float) -> float:
    return math.exp(-((x - middle) ** 2) / (2 * spread**2)) / spread


def odds_on(log: torch.Tensor, spread: float = 0.8, seen: tuple[float, float, float] = (0, 0, 0)) -> torch.Tensor:
    """Of evidence, going by what was seen before."""
    return log_odds(log, spread, torch.tensor([seen], dtype=log.dtype))[0]


def expected_odds(evidence: list[float], spread: float, seen: tuple[float, float, float]) -> list[float]:
    """Fitted by loops. seen: images, attacked ones among them, the sum of their evidence."""
    images, before, strayed = seen
    share, middle = 0.5, 2.0
    for _ in range(ROUNDS):
        odds = [share * bell(x, middle, ATTACKED) / ((1 - share) * bell(x, 0, spread)) for x in evidence]
        chances = [o / (1 + o) for o in odds]
        count = sum(chances) + before
        share = (count + 0.5) / (len(evidence) + images + 1)
        mean = (sum(c * x for c, x in zip(chances, evidence, strict=True)) + strayed) / (count + FLOOR)
        middle = min(max(mean, LEAST), MOST)
    return [share * bell(x, middle, ATTACKED) / ((1 - share) * bell(x, 0, spread)) for x in evidence]


GATES = [
    Gate(), Gate(keeps=0), Gate(evidence="predicted", usual=0), Gate(equal=False, keeps=0.5),
    Gate(alpha_clean=0.8, cost=3, evidence="ratio", spread=0.6, usual=-0.2),
]  # fmt: skip


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("attacked", "by"), [(0, 0), (3, 1), (B, 1), (3, 4), (B, 4)])
@pytest.mark.parametrize("seen", [(0.0, 0.0, 0.0), (30.0, 1.0, 1.5), (30.0, 24.0, 50.0)])
def test_weights_probabilities_and_memory(gate, seed, attacked, by, seen):
    probs, features = random_views(seed)
    features[0, :attacked] += by
    base = pooling.weights("cc_drop", probs, features)
    weights, suspicion, now = gate.remembering(base, probs, features, torch.tensor(seen))
    evidence = [max(x - gate.usual, 0) for x in expected_evidence(gate.evidence, features.double().numpy())]
    alone = expected_odds(evidence, gate.spread, (0, 0, 0))
    after = expected_odds(evidence, gate.spread, seen) if gate.keeps else alone
    for b, odds in enumerate(map(max, alone, after)):
        alpha, rest = gate.alpha_clean / (1 + gate.cost * odds), base[1:, b].double().numpy()
        shares = np.full(V - 1, 1 / (V - 1)) if gate.equal else rest / rest.sum()
        assert suspicion[b].item() == pytest.approx(odds / (1 + odds), abs=1e-4)
        assert weights[0, b].item() == pytest.approx(alpha, abs=1e-4)
        assert weights[1:, b].numpy() == pytest.approx((1 - alpha) * shares, abs=1e-4)
    chances = [o / (1 + o) for o in after]
    added = (B, sum(chances), sum(c * x for c, x in zip(chances, evidence, strict=True)))
    assert now.numpy() == pytest.approx(
        [gate.keeps * (old + new) for old, new in zip(seen, added, strict=True)], rel=1e-3
    )
    if seen == (0, 0, 0):
        for one, other in zip(gate.mix(base, probs, features), (weights, suspicion), strict=True):
            assert torch.equal(one, other)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(0, 500), st.floats(0, 1), st.floats(0, 4), st.sampled_from(list(EVIDENCE)))
def test_what_is_remembered_never_opens_the_gate(seed, images, share, strayed, kind):
    """Whatever an attacker has made it remember."""
    probs, features = random_views(seed)
    base, gate = pooling.weights("cc_drop", probs, features), Gate(evidence=kind)
    seen = torch.tensor([images, images * share, images * share * strayed])
    weights, suspicion, now = gate.remembering(base, probs, features, seen)
    fresh, calm = gate.mix(base, probs, features)
    assert (weights[0] <= fresh[0]).all()
    assert (suspicion >= calm).all()
    assert torch.isfinite(now).all()
    assert now[0] <= gate.keeps * (images + B) + 1e-3


def test_an_image_is_judged_by_the_batches_before_it_too():
    features = attacked_views(8, by=1.0)
    base, probs = torch.full((V, 64), 1 / V), torch.full((V, 64, K), 1 / K)
    gate = Gate()
    calm = gate.mix(base, probs, features)[1]
    seen = torch.zeros(3)
    for _ in range(5):
        _, _, seen = gate.remembering(base, probs, attacked_views(64, by=1.5), seen)
    after = gate.remembering(base, probs, features, seen)[1]
    assert (after[:8] > calm[:8] + 0.1).all()


@pytest.mark.parametrize("kind", EVIDENCE)
@pytest.mark.parametrize("attacked", [0, 16, 32, 64])
def test_attacked_originals_are_shut_out_and_clean_ones_let_in(attacked, kind):
    features, probs = attacked_views(attacked), torch.full((V, 64, K), 1 / K)
    weights, suspicion = Gate(evidence=kind).mix(torch.full((V, 64), 1 / V), probs, features)
    assert (weights[0, :attacked] < 0.01).all()
    assert (suspicion[:attacked] > 0.9).all()
    if attacked < 64:
        assert weights[0, attacked:].mean() > 0.35
        assert suspicion[attacked:].mean() < 0.1


@pytest.mark.parametrize("kind", EVIDENCE)
def test_an_image_is_judged_by_the_company_it_keeps(kind):
    """The same doubtful original is believed in a clean batch, and not where the others are attacked."""
    features = attacked_views(1, by=0.7)
    among_clean = odds_on(EVIDENCE[kind](features))[0]
    features[0, 1:] += 1.5
    assert odds_on(EVIDENCE[kind](features))[0] > among_clean + 1


@pytest.mark.parametrize("kind", EVIDENCE)
def test_decoys_that_stray_far_do_not_make_the_others_look_harmless(kind):
    features = attacked_views(32, by=1.5)
    alone = torch.sigmoid(odds_on(EVIDENCE[kind](features))[:32])
    features[0, 32:48] += 100
    assert (torch.sigmoid(odds_on(EVIDENCE[kind](features))[:32]) > 0.9 * alone - 0.1).all()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10_000), st.integers(4, 9), st.integers(1, 12), st.sampled_from([0.0, 1e-6, 1.0, 1e4]),
    st.sampled_from(list(EVIDENCE)),
)  # fmt: skip
def test_weights_share_one_whatever_the_views(seed, views, batch, scale, kind):
    probs, features = random_views(seed, views, batch)
    base = pooling.weights("cc_drop", probs, features)
    weights, suspicion = Gate(evidence=kind).mix(base, probs, features * scale)
    assert (weights >= 0).all()
    assert torch.allclose(weights.sum(0), torch.ones(batch), atol=1e-5)
    assert (weights[0] <= 0.5 + 1e-6).all()
    assert ((suspicion >= 0) & (suspicion <= 1)).all()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.permutations(range(B)), st.permutations(range(1, V)), st.sampled_from(list(EVIDENCE)))
def test_order_of_images_and_of_augmented_views_does_not_matter(seed, images, views, kind):
    _, features = random_views(seed)
    here, moved = (odds_on(EVIDENCE[kind](z)) for z in (features, features[[0, *views]][:, images]))
    assert torch.allclose(moved, here[images], rtol=1e-3, atol=1e-3)


def test_scale_and_place_of_a_dimension_do_not_matter():
    _, features = random_views(0)
    factor, offset = torch.linspace(0.5, 50, D), torch.linspace(-9, 9, D)
    here, moved = (odds_on(EVIDENCE["ratio"](z)) for z in (features, features * factor + offset))
    assert torch.allclose(moved, here, atol=1e-2)


@pytest.mark.parametrize("kind", EVIDENCE)
def test_views_that_are_all_alike_are_no_evidence(kind):
    features = torch.randn(1, B, D, generator=torch.Generator().manual_seed(0)).expand(V, B, D)
    _, suspicion = Gate(evidence=kind).mix(torch.full((V, B), 1 / V), torch.full((V, B, K), 1 / K), features)
    assert (suspicion < 0.2).all()


@pytest.mark.parametrize("kind", EVIDENCE)
def test_gradients_flow_through_the_gate(kind):
    """An attacker who knows it must be able to follow it: nothing is detached on the way."""
    features = random_views(2)[1].double().requires_grad_(True)
    probs = random_views(3)[0].double()
    base = pooling.weights("cc_drop", probs, features.detach())

    def first_weight(z: torch.Tensor) -> torch.Tensor:
        return Gate(cost=0.1, evidence=kind).mix(base, probs, z)[0][0, 0]

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
        (lambda: Gate(evidence="hearsay"), "ratio, predicted, distance"),
        (lambda: Gate(spread=0), "positive"),
        (lambda: Gate(keeps=1), "less than 1"),
        (lambda: Gate(keeps=-0.1), "less than 1"),
        (lambda: Gate(usual=math.nan), "a number of deviations"),
        (lambda: Gate(features="mine"), "'gated' or 'pooled'"),
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


@pytest.mark.parametrize("pool", ["cc_drop", "top1", "mean"])
def test_augmented_views_share_equally_whatever_the_pooling(pool, images):
    predictor = Safer(zoo.create("small", num_classes=7).eval(), pool=pool, mixing=Gate(equal=True), seed=0)
    report = predictor(images).report
    original, augmented = report.weights[0], report.weights[1:]
    torch.testing.assert_close(augmented, ((1 - original) / 4).expand_as(augmented))
    torch.testing.assert_close(original, 0.5 / (1 + 2 * report.signal / (1 - report.signal)))


def test_the_lesson_is_pooled_without_the_gate(images):
    def predict(mixing):
        predictor = Safer(zoo.create("small", num_classes=7).eval(), mixing=mixing, pipeline="gentle", seed=0)
        predictor.classifier.model.load_state_dict(weights)
        return predictor(images, predictor.draw(images))

    weights = zoo.create("small", num_classes=7).state_dict()
    pooled, gated, teaching = predict(None), predict("gate"), predict({"name": "gate", "teaches": True})
    lesson = gated.taught()
    assert torch.equal(lesson.probs, pooled.probs)
    assert torch.equal(lesson.logits, pooled.logits)
    assert torch.equal(lesson.answered().probs, teaching.probs)
    assert torch.equal(lesson.answered().logits, gated.logits)
    assert pooled.taught() is pooled
    assert teaching.lesson is None


@pytest.mark.parametrize("alpha_clean", [0.5, 1.0, 0.0])
def test_features_are_the_originals_where_it_is_let_in_and_the_views_where_not(alpha_clean):
    probs, features = random_views(0, batch=64)
    features[0, :20] += 1
    base = pooling.weights("cc_drop", probs, features)
    gate = Gate(alpha_clean=alpha_clean)
    weights, suspicion = gate.mix(base, probs, features)
    found = gate.of_features(weights, base)
    for b in range(64):
        clean = 1 - suspicion[b].item()
        let_in = clean / (clean + gate.cost * (1 - clean)) if alpha_clean else 0.0
        assert found[0, b].item() == pytest.approx(let_in, abs=1e-4)
        assert found[1:, b].numpy() == pytest.approx(np.full(V - 1, (1 - let_in) / (V - 1)), abs=1e-4)
    assert Gate(features="pooled").of_features(weights, base) is None
    assert gate.of_features(weights[:1], base[:1]) is None


def test_features_that_are_handed_on(images):
    """By the predictor, and without a gradient through how much is let in."""
    predictor = Safer(zoo.create("small", num_classes=7).eval(), mixing="gate", seed=0)
    draw = predictor.draw(images)
    prediction = predictor(images, draw)
    views = draw.views(predictor.to_model(images))
    features = torch.stack([predictor.classifier(view)[0] for view in views])
    weights = prediction.report.weights
    let_in = (weights[0] / 0.5)[:, None]
    expected = let_in * features[0] + (1 - let_in) * features[1:].mean(dim=0)
    torch.testing.assert_close(prediction.aligned, expected)
    pooled = pooling.weights("cc_drop", prediction.report.view_probs, features)
    torch.testing.assert_close(prediction.features, (pooled[..., None] * features).sum(dim=0))
    assert not Gate().of_features(weights, weights).requires_grad
    assert weights.requires_grad


@pytest.fixture
def gated(images):
    """A predictor with the gate, and what it predicts."""
    torch.manual_seed(0)
    predictor = Safer(zoo.create("small", num_classes=7).eval(), mixing="gate", seed=0)
    return predictor, predictor(images, predictor.draw(images))


def test_scores_that_go_with_features_are_the_heads(gated):
    predictor, prediction = gated
    lesson = prediction.taught(by_features=True)
    torch.testing.assert_close(lesson.logits, predictor.classifier.head(lesson.features))
    assert torch.equal(lesson.features, prediction.aligned)
    assert not torch.allclose(lesson.features, prediction.features, atol=1e-3)
    torch.testing.assert_close(lesson.probs, lesson.logits.softmax(dim=1))
    assert not torch.allclose(lesson.probs, prediction.taught().probs, atol=1e-3)
    answer = lesson.answered()
    assert torch.equal(answer.probs, prediction.probs)
    assert torch.equal(answer.logits, prediction.logits)
    assert lesson.aligned is lesson.read is answer.aligned is answer.read is None


@pytest.mark.parametrize("mixing", [None, "sigmoid", {"name": "gate", "features": "pooled"}, "no views"])
def test_others_hand_features_on_with_the_scores_that_all_methods_get(mixing, images):
    options = {"views": 0, "mixing": "gate"} if mixing == "no views" else {"mixing": mixing}
    predictor = Safer(zoo.create("small", num_classes=7).eval(), seed=0, **options)
    draw = predictor.draw(images)
    lesson, by_features = (predictor.lesson(images, draw, by_features=asked) for asked in (False, True))
    assert torch.equal(lesson.logits, by_features.logits)
    assert torch.equal(lesson.features, by_features.features)


def test_tsd_learns_from_features_and_the_heads_scores_of_them(gated, images):
    """Its objective, from the features that the gate lets in, written out."""
    predictor, _ = gated
    method = methods.create("tsd", predictor)
    draw = predictor.draw(images)
    prediction = predictor(images, draw, track=False)
    _, loss = method.forward(images, draw)
    features = prediction.aligned.detach()
    scores = features @ predictor.classifier.head.weight.T + predictor.classifier.head.bias
    memory = method.state.memory
    kept = torch.cat([memory["features"], features]), torch.cat([memory["labels"], scores.argmax(1)])
    assert len(kept[0]) <= method.keep  # none is dropped
    prototypes = torch.stack([
        sum((z / z.norm() for z, label in zip(*kept, strict=True) if label == k), torch.zeros(features.shape[1]))
        for k in range(7)
    ])  # fmt: skip
    similar = torch.nn.functional.cosine_similarity(features[:, None], prototypes[None], dim=2)
    said, target = similar.log_softmax(1), scores.log_softmax(1)
    torch.testing.assert_close(loss, (said.exp() * (said - target)).sum(1).mean())


def test_the_gate_takes_gentle_views_unless_told_otherwise():
    net = zoo.create("small", num_classes=7)
    gentle, paper = views.Pipeline("gentle", max_operators=4), views.Pipeline("released", max_operators=3)
    assert Safer(net, mixing="gate").pipeline == gentle
    assert Safer(net, mixing="gate", pipeline="released").pipeline == paper
    assert Safer(net, mixing="gate", pipeline={"max_operators": 2}).pipeline == views.Pipeline("gentle", 2)
    assert Safer(net, pipeline="gentle").pipeline == Safer(net, pipeline={"preset": "gentle"}).pipeline == gentle
    assert Safer(net).pipeline == Safer(net, mixing="sigmoid").pipeline == paper


def test_a_mixing_from_elsewhere_is_told_from_others():
    """Runs are named by what their settings say: two mixings must not share a name."""

    class Elsewhere(Gate):
        pass

    assert mixing.settings(Elsewhere())["name"].endswith("Elsewhere")
    assert mixing.settings(Gate())["name"] == "gate"
    assert mixing.settings(None) is None
