"""SAFER-G's gate against its formulas, written as loops over float64 numbers; and what must hold for any views."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from safer_tta import Safer, methods, mixing, pooling, views
from safer_tta.gate import Gate
from safer_tta.gate.straying import evidence
from safer_tta.gate.suspicion import CAREFUL, REPORTED, Law, log_odds
from safer_tta.models import zoo
from safer_tta.predictors import Outlook, Prediction

V, B, D, K = 5, 6, 8, 4
WINDOW, FEW, DECAY = 64, 16, 0.8
ROUNDS = 5
FLOOR = 1e-6
FRESH = torch.zeros(Gate().memory_size(D))
FRESH_32 = torch.zeros(Gate().memory_size(32))  # for the features of `attacked_views`


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


def decide(features: torch.Tensor, seen: torch.Tensor = FRESH_32) -> pooling.Verdict:
    """What the gate decides where all answers are alike."""
    probs = torch.full((*features.shape[:2], K), 1 / K)
    return Gate().weigh(torch.full(features.shape[:2], 1 / V), probs, features, seen)


def distance(x: np.ndarray, y: np.ndarray) -> float:
    return sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) / len(x)


def expected_logs(features: np.ndarray) -> list[tuple[int, float, float, float]]:
    """For each image and augmented view left out, (image, logs of its, the view's, the others' distance)."""
    views, batch, _ = features.shape
    found = []
    for b in range(batch):
        floor = FLOOR * np.mean(np.square(features[:, b]))
        for left_out in range(1, views):
            others = [v for v in range(1, views) if v != left_out]
            pairs = [distance(features[u, b], features[v, b]) for u, v in itertools.combinations(others, 2)]
            original = np.mean([distance(features[0, b], features[v, b]) for v in others])
            augmented = np.mean([distance(features[left_out, b], features[v, b]) for v in others])
            found.append((b, *(math.log(x + floor) for x in (original, augmented, np.mean(pairs)))))
    return found


def expected_evidence(features: np.ndarray) -> list[float]:
    logs = expected_logs(features)
    ratio = deviations([(b, o - m) for b, o, _, m in logs], [a - m for _, _, a, m in logs])
    told = min(1, features.shape[1] / FEW)
    return [told * (a + b) / 2 for a, b in zip(ratio, surprise(logs), strict=True)]


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


@pytest.mark.parametrize("views", [4, 5, 9])
def test_evidence(views):
    _, features = random_views(views, views)
    features[0, :2] += 2
    expected = expected_evidence(features.double().numpy())
    assert evidence(features.double())[0].numpy() == pytest.approx(expected, abs=1e-5)
    assert evidence(features)[0].numpy() == pytest.approx(expected, abs=1e-3)  # as features mostly come


def density(x: float, mean: float, spread: float) -> float:
    return math.exp(-((x - mean) ** 2) / (2 * spread**2)) / spread


def odds_on(features: torch.Tensor) -> torch.Tensor:
    """Of images whose features these are, at the start of a stream."""
    return log_odds(evidence(features)[0], torch.zeros(1, 3).to(features), CAREFUL)[0]


def expected_odds(found: list[float], seen: tuple[float, float, float], law: Law) -> list[float]:
    """Fitted by loops. seen: images, attacked ones among them, the sum of their evidence."""
    images, before, strayed = seen
    evidence = [max(x - law.offset, 0) for x in found]
    share, mean = 0.5, max(2.0, law.least)

    def judge() -> list[float]:
        return [share * density(x, mean, law.attacked) / ((1 - share) * density(x, 0, law.clean)) for x in evidence]

    for _ in range(ROUNDS):
        chances = [odds / (1 + odds) for odds in judge()]
        count = sum(chances) + before
        share = (count + 0.5) / (max(len(evidence) + images, WINDOW) + 1)  # the missing ones count as clean
        found = (sum(c * x for c, x in zip(chances, evidence, strict=True)) + strayed) / (count + FLOOR)
        mean = min(max(found, law.least), law.most)
    return judge()


@pytest.mark.parametrize("gate", [Gate(), Gate(alpha_clean=0.8, cost=3), Gate(alpha_clean=0.0)])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("attacked", "by"), [(0, 0), (3, 1), (B, 1), (3, 4), (B, 4)])
@pytest.mark.parametrize("seen", [(0.0, 0.0, 0.0), (30.0, 1.0, 1.5), (30.0, 24.0, 50.0)])
def test_weights_probabilities_and_memory(gate, seed, attacked, by, seen):
    """The counts of the window and of the long memory are the same here; no image before counts for the scales."""
    probs, features = random_views(seed)
    features[0, :attacked] += by
    base = pooling.weights("cc_drop", probs, features)
    memory = FRESH.clone()
    memory[:12] = torch.tensor(seen).repeat(4)
    verdict = gate.weigh(base, probs, features, memory)
    found = expected_evidence(features.double().numpy())
    window = tuple((1 - B / WINDOW) * number for number in seen)
    laws = {law: [expected_odds(found, counts, law) for counts in (window, seen)] for law in (CAREFUL, REPORTED)}
    odds, reported = ([max(pair) for pair in zip(*laws[law], strict=True)] for law in (CAREFUL, REPORTED))
    for b in range(B):
        trust = 1 / (1 + gate.cost * odds[b])
        assert verdict.suspicion[b].item() == pytest.approx(reported[b] / (1 + reported[b]), abs=1e-4)
        for weights, original in ((verdict.answer, gate.alpha_clean * trust), (verdict.aligned, trust)):
            expected = original if gate.alpha_clean else 0.0
            assert weights[0, b].item() == pytest.approx(expected, abs=1e-4)
            assert weights[1:, b].numpy() == pytest.approx(np.full(V - 1, (1 - expected) / (V - 1)), abs=1e-4)
    assert verdict.lesson is base
    assert verdict.memory[:12].numpy() == pytest.approx(expected_counts(found, laws, window, seen), rel=1e-3, abs=1e-5)


def expected_counts(found: list[float], laws: dict, window: tuple, seen: tuple) -> list[float]:
    """Counts after a batch, for each law first of the window and then of the long memory."""
    numbers, decay = [], DECAY ** (B / WINDOW)
    for law, (by_window, by_long) in laws.items():
        for odds, before, fades in ((by_window, window, 1.0), (by_long, seen, decay)):
            chances = [o / (1 + o) for o in odds]
            strayed = sum(c * max(x - law.offset, 0) for c, x in zip(chances, found, strict=True))
            numbers += [fades * (old + new) for old, new in zip(before, (B, sum(chances), strayed), strict=True)]
    return numbers


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(0, 500), st.floats(0, 1), st.floats(0, 4))
def test_what_is_remembered_never_opens_the_gate(seed, images, share, strayed):
    probs, features = random_views(seed)
    base = pooling.weights("cc_drop", probs, features)
    seen = FRESH.clone()
    for place in (3, 9):  # the long memory of either law
        seen[place : place + 3] = torch.tensor([images, images * share, images * share * strayed])
    wary, fresh = (Gate().weigh(base, probs, features, memory) for memory in (seen, FRESH))
    assert (wary.answer[0] <= fresh.answer[0]).all()
    assert (wary.aligned[0] <= fresh.aligned[0]).all()
    assert (wary.suspicion >= fresh.suspicion).all()
    assert torch.isfinite(wary.memory).all()
    assert wary.memory[3] <= DECAY ** (B / WINDOW) * (images + B) + 1e-3


def test_an_image_is_judged_by_the_batches_before_it_too():
    features = attacked_views(8, by=1.0)
    seen = FRESH
    for _ in range(5):
        seen = decide(attacked_views(64, by=1.5), seen).memory
    assert (decide(features, seen).suspicion[:8] > decide(features).suspicion[:8] + 0.1).all()


@pytest.mark.parametrize("attacked", [0, 16, 32, 64])
def test_attacked_originals_are_shut_out_and_clean_ones_let_in(attacked):
    verdict = decide(attacked_views(attacked))
    assert (verdict.answer[0, :attacked] < 0.01).all()
    assert (verdict.suspicion[:attacked] > 0.9).all()
    if attacked < 64:
        assert verdict.answer[0, attacked:].mean() > 0.35
        assert verdict.suspicion[attacked:].mean() < 0.1


def test_an_image_is_judged_by_the_company_it_keeps():
    """The same doubtful original is believed in a clean batch, and not where the others are attacked."""
    features = attacked_views(1, by=0.7)
    among_clean = odds_on(features)[0]
    features[0, 1:] += 1.5
    assert odds_on(features)[0] > among_clean + 1


def test_decoys_that_stray_far_do_not_make_the_others_look_harmless():
    features = attacked_views(32, by=1.5)
    alone = torch.sigmoid(odds_on(features)[:32])
    features[0, 32:48] += 100
    assert (torch.sigmoid(odds_on(features)[:32]) > 0.9 * alone - 0.1).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(4, 9), st.integers(1, 12), st.sampled_from([0.0, 1e-6, 1.0, 1e4]))
def test_weights_share_one_whatever_the_views(seed, views, batch, scale):
    probs, features = random_views(seed, views, batch)
    verdict = Gate().weigh(pooling.weights("cc_drop", probs, features), probs, features * scale, FRESH)
    for weights in (verdict.answer, verdict.aligned):
        assert (weights >= 0).all()
        assert torch.allclose(weights.sum(0), torch.ones(batch), atol=1e-5)
    assert (verdict.answer[0] <= 0.5 + 1e-6).all()
    assert ((verdict.suspicion >= 0) & (verdict.suspicion <= 1)).all()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.permutations(range(B)), st.permutations(range(1, V)))
def test_order_of_images_and_of_augmented_views_does_not_matter(seed, images, views):
    _, features = random_views(seed)
    here, moved = odds_on(features), odds_on(features[[0, *views]][:, images])
    assert torch.allclose(moved, here[images], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("factor", [1e-6, 50.0])
def test_scale_and_place_of_all_features_do_not_matter(factor):
    _, features = random_views(0)
    offset = torch.linspace(-9, 9, D)
    here, moved = odds_on(features), odds_on(factor * (features + offset))
    assert torch.allclose(moved, here, atol=1e-2)


def test_it_does_not_matter_whether_the_images_of_a_stream_look_alike():
    """Evidence compares the views of an image. Images of one class differ less from each other than those of all."""
    generator = torch.Generator().manual_seed(5)
    views, images = torch.randn(V, 64, D, generator=generator), torch.randn(64, D, generator=generator)
    views *= torch.logspace(-1, 1, D)  # some features hardly move
    alike, different = (evidence(views + images * spread)[0] for spread in (0.1, 10.0))
    assert torch.allclose(alike, different, atol=2e-2)


def test_views_that_are_all_alike_are_no_evidence():
    features = torch.randn(1, B, D, generator=torch.Generator().manual_seed(0)).expand(V, B, D)
    assert (decide(features, FRESH).suspicion < 0.2).all()


def test_gradients_flow_through_the_gate():
    """An attacker who knows it must be able to follow it: nothing is detached on the way."""
    features = random_views(2)[1].double().requires_grad_(True)
    probs = random_views(3)[0].double()
    base = pooling.weights("cc_drop", probs, features.detach())

    def first_weight(z: torch.Tensor) -> torch.Tensor:
        return Gate(cost=0.1).weigh(base, probs, z, FRESH).answer[0, 0]

    assert torch.autograd.gradcheck(first_weight, (features,))
    (gradient,) = torch.autograd.grad(first_weight(features), features)
    assert gradient.abs().max() > 0


def test_no_augmented_view_is_the_base_weight():
    probs, features = random_views(0, views=1)
    verdict = Gate().weigh(torch.ones(1, B), probs, features, FRESH)
    assert torch.equal(verdict.answer, torch.ones(1, B))
    assert verdict.answer is verdict.lesson
    assert verdict.aligned is verdict.suspicion is verdict.memory is None


def gated(mixing: object = "gate", **options: object) -> Safer:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Safer(zoo.create("small", num_classes=7).eval(), mixing=mixing, seed=0, **options)


def look(images: torch.Tensor, mixing: object = "gate", **options: object) -> tuple[Safer, Outlook]:
    predictor = gated(mixing, **options)
    return predictor, predictor.look(images, predictor.draw(images))


@pytest.mark.parametrize("pool", ["cc_drop", "top1", "mean"])
def test_augmented_views_share_equally_whatever_the_pooling(pool, images):
    report = gated(pool=pool)(images).report
    original, augmented = report.weights[0], report.weights[1:]
    torch.testing.assert_close(augmented, ((1 - original) / 4).expand_as(augmented))
    caution = report.signals["caution"]
    torch.testing.assert_close(original, 0.5 / (1 + 2 * caution / (1 - caution)))


def test_the_lesson_is_pooled_without_the_gate(images):
    _, pooled = look(images, "none", pipeline="gentle")
    _, seen = look(images)
    assert torch.equal(seen.lesson.probs, pooled.lesson.probs)
    assert torch.equal(seen.lesson.logits, pooled.lesson.logits)
    assert not torch.allclose(seen.answer.probs, seen.lesson.probs, atol=1e-5)
    assert pooled.lesson is pooled.answer is pooled.aligned


def test_features_are_the_originals_where_it_is_let_in_and_the_views_where_not(images):
    """In the aligned prediction, and without a gradient through how much is let in."""
    predictor = gated()
    draw = predictor.draw(images)
    seen = predictor.look(images, draw)
    views = draw.views(predictor.to_model(images))
    features = torch.stack([predictor.classifier(view)[0] for view in views])
    weights = seen.answer.report.weights
    let_in = (weights[0] / 0.5)[:, None]
    expected = let_in * features[0] + (1 - let_in) * features[1:].mean(dim=0)
    torch.testing.assert_close(seen.aligned.features, expected)
    pooled = pooling.weights("cc_drop", seen.answer.report.view_probs, features)
    torch.testing.assert_close(seen.answer.features, (pooled[..., None] * features).sum(dim=0))
    memory = torch.zeros(Gate().memory_size(features.shape[2]))
    verdict = Gate().weigh(pooled, seen.answer.report.view_probs, features, memory)
    assert not verdict.aligned.requires_grad
    assert verdict.answer.requires_grad


def test_scores_that_go_with_features_are_the_heads(images):
    predictor, seen = look(images)
    aligned = seen.aligned
    torch.testing.assert_close(aligned.logits, predictor.classifier.head(aligned.features))
    assert not torch.allclose(aligned.features, seen.answer.features, atol=1e-3)
    torch.testing.assert_close(aligned.probs, aligned.logits.softmax(dim=1))
    assert not torch.allclose(aligned.probs, seen.lesson.probs, atol=1e-3)


@pytest.mark.parametrize("options", [{"mixing": "none"}, {"mixing": "sigmoid"}, {"views": 0}])
def test_others_hand_features_on_with_the_scores_that_all_methods_get(options, images):
    _, seen = look(images, **options)
    assert seen.aligned is seen.lesson


def written_out(method: methods.Method, aligned: Prediction) -> torch.Tensor:
    """TSD's objective, from the features that the gate lets in."""
    features, head = aligned.features.detach(), method.classifier.head
    scores = features @ head.weight.T + head.bias
    memory = method.state.memory
    kept = torch.cat([memory["features"], features]), torch.cat([memory["labels"], scores.argmax(1)])
    assert len(kept[0]) <= method.keep  # none is dropped
    prototypes = torch.stack([
        sum((z / z.norm() for z, label in zip(*kept, strict=True) if label == k), torch.zeros(features.shape[1]))
        for k in range(7)
    ])  # fmt: skip
    similar = torch.nn.functional.cosine_similarity(features[:, None], prototypes[None], dim=2)
    found, target = similar.log_softmax(1), scores.log_softmax(1)
    return (found.exp() * (found - target)).sum(1).mean()


def test_tsd_learns_from_features_and_the_heads_scores_of_them(images):
    predictor = gated()
    method = methods.create("tsd", predictor)
    draw = predictor.draw(images)
    step = method.forward(images, draw)
    torch.testing.assert_close(step.loss, written_out(method, predictor.look(images, draw, track=False).aligned))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(step.loss, written_out(method, step.seen.lesson))


def test_the_gate_takes_gentle_views_unless_told_otherwise():
    net = zoo.create("small", num_classes=7)
    gentle, paper = views.Pipeline("gentle", max_operators=4), views.Pipeline("released", max_operators=3)
    assert Safer(net, mixing="gate").pipeline == gentle
    assert Safer(net, mixing="gate", pipeline="released").pipeline == paper
    assert Safer(net, mixing="gate", pipeline={"max_operators": 2}).pipeline == views.Pipeline("gentle", 2)
    assert Safer(net, pipeline="gentle").pipeline == Safer(net, pipeline={"preset": "gentle"}).pipeline == gentle
    assert Safer(net).pipeline == Safer(net, mixing="sigmoid").pipeline == paper


def test_settings_make_a_mixing_again_and_tell_it_from_others():
    """Runs are named by their settings: two mixings must not share a name."""

    class Elsewhere(Gate):
        pass

    gate = Gate(cost=7)
    assert mixing.create(mixing.settings(gate)) == gate
    assert mixing.create("gate") == Gate()
    assert mixing.settings(Elsewhere())["name"].endswith("Elsewhere")
    assert mixing.settings(Gate())["name"] == "gate"
    assert mixing.settings(mixing.NoMixing()) == {"name": "none"}
