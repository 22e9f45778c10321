"""Compare reliability, pooling rules and mixing with the paper's formulas, written as loops over float64 numbers."""

import math

import numpy as np
import pytest
import torch

from safer_tta import Classifier, Safer, mixing, pooling
from safer_tta.gate import Gate
from tests.conftest import batches, classifier, needs_pacs, photographs, small_net

V, B, K, D = 5, 7, 4, 9
NO_MEMORY = torch.zeros(0)


def random_views(seed: int, views: int = V) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(B, D, generator=generator)
    features = common + 0.7 * torch.randn(views, B, D, generator=generator)
    return (3 * torch.randn(views, B, K, generator=generator)).softmax(-1), features


def real_views() -> tuple[torch.Tensor, torch.Tensor]:
    predictor = Safer(classifier(), seed=0)
    images = photographs()
    with torch.no_grad():
        features, logits = predictor.classifier(predictor.draw(images).views(images).flatten(0, 1))
    return logits.softmax(-1).unflatten(0, (5, -1)), features.unflatten(0, (5, -1))


CASES = [pytest.param(lambda s=s: random_views(s), id=f"random{s}") for s in range(4)]
CASES.append(pytest.param(real_views, id="photographs", marks=needs_pacs))


def reliability(features: np.ndarray) -> list[float]:
    views, batch, dimensions = features.shape
    z = np.zeros_like(features)
    for v in range(views):
        for k in range(dimensions):
            mean = sum(features[v, b, k] for b in range(batch)) / batch
            variance = sum((features[v, b, k] - mean) ** 2 for b in range(batch)) / batch
            for b in range(batch):
                z[v, b, k] = (features[v, b, k] - mean) / (math.sqrt(variance + 1e-6) + 1e-6)
    r = []
    for v in range(views):
        total = 0.0
        for u in range(views):
            if u != v:
                total += sum(sum(z[v, b, k] * z[u, b, k] for b in range(batch)) / batch for k in range(dimensions))
        r.append(total / dimensions / (views - 1))
    return r


def entropy(p: np.ndarray) -> float:
    return -sum(x * math.log(x) for x in p if x > 0)


def raw_weights(rule: str, probs: np.ndarray, features: np.ndarray) -> np.ndarray:
    views, batch, classes = probs.shape
    if rule in ("cc", "cc_drop"):
        rho = [max(r, 0.0) for r in reliability(features)]
        if rule == "cc_drop":
            rho[rho.index(min(rho))] = 0.0
        return np.array([[r] * batch for r in rho])
    one = {
        "mean": lambda p: 1.0,
        "entropy": lambda p: 1 - entropy(p) / math.log(classes),
        "top1": lambda p: max(p),
    }[rule]
    return np.array([[one(probs[v, b]) for b in range(batch)] for v in range(views)])


def expected_weights(rule: str, probs: np.ndarray, features: np.ndarray) -> np.ndarray:
    raw = raw_weights(rule, probs, features)
    for b in range(raw.shape[1]):
        total = raw[:, b].sum()
        raw[:, b] = raw[:, b] / total if total > 1e-6 else 1 / len(raw)
    return raw


@pytest.mark.parametrize("case", CASES)
def test_reliability(case):
    _, features = case()
    assert pooling.reliability(features).numpy() == pytest.approx(reliability(features.double().numpy()), abs=1e-5)


@pytest.mark.parametrize("rule", pooling.RULES)
@pytest.mark.parametrize("case", CASES)
def test_weights(rule, case):
    probs, features = case()
    ours = pooling.weights(rule, probs, features).numpy()
    assert ours == pytest.approx(expected_weights(rule, probs.double().numpy(), features.double().numpy()), abs=1e-5)


def margin(p: np.ndarray) -> float:
    best, second = sorted(p, reverse=True)[:2]
    return best - second


def expected_signals(probs: np.ndarray, features: np.ndarray, b: int) -> dict[str, float]:
    p, q = probs[0, b], probs[1:, b].mean(0)
    z, y = features[0, b], features[1:, b].mean(0)
    floor = [max(x, 1e-8) for x in p], [max(x, 1e-8) for x in q]
    forth = sum(x * math.log(x / w) for x, w in zip(*floor, strict=True))
    back = sum(w * math.log(w / x) for x, w in zip(*floor, strict=True))
    cosine = float(z @ y / math.sqrt((z @ z) * (y @ y)))
    return {
        "orig_conf": max(p),
        "orig_margin": margin(p),
        "aug_margin": margin(q),
        "orig_entropy": entropy(p),
        "aug_entropy": entropy(q),
        "margin_gap": margin(p) - margin(q),
        "entropy_gap": entropy(p) - entropy(q),
        "prob_disagreement": 0.5 * (forth + back),
        "feat_disagreement": min(max(1 - cosine, 0.0), 2.0),
    }


@pytest.mark.parametrize("case", CASES)
def test_signals(case):
    probs, features = case()
    ours = mixing.signals(probs, features)
    for b in range(probs.shape[1]):
        expected = expected_signals(probs.double().numpy(), features.double().numpy(), b)
        assert set(ours) == set(expected)
        for name, value in expected.items():
            assert ours[name][b].item() == pytest.approx(value, abs=1e-5), name


@pytest.mark.parametrize("higher", [True, False])
@pytest.mark.parametrize("curve", mixing.CURVES)
@pytest.mark.parametrize("signal", mixing.SIGNALS)
def test_mixing(signal, curve, higher):
    probs, features = random_views(5)
    options = {"tau": 0.3, "kappa": 4.0, "delta": 0.2, "alpha_attacked": 0.1, "alpha_clean": 0.8}
    rule = mixing.AdaptiveMixing(curve=curve, signal=signal, higher_is_suspicious=higher, **options)
    base = pooling.weights("cc_drop", probs, features)
    verdict = rule.weigh(base, probs, features, NO_MEMORY)
    assert verdict.lesson is verdict.answer
    assert set(verdict.signals) == {signal}
    ours = verdict.answer.numpy()
    for b in range(B):
        s = expected_signals(probs.double().numpy(), features.double().numpy(), b)[signal]
        o = s - 0.3 if higher else 0.3 - s
        q = {
            "step": float(o >= 0),
            "linear": min(max(0.5 + o / 0.2, 0), 1),
            "sigmoid": 1 / (1 + math.exp(-4 * o)),
        }[curve]
        alpha = 0.8 + q * (0.1 - 0.8)
        rest = base[1:, b].double().numpy()
        assert verdict.signals[signal][b].item() == pytest.approx(s if higher else -s, abs=1e-5)
        assert ours[0, b] == pytest.approx(alpha, abs=1e-5)
        assert ours[1:, b] == pytest.approx((1 - alpha) * rest / rest.sum(), abs=1e-5)


def test_defaults_are_the_papers():
    rule = mixing.AdaptiveMixing()
    assert (rule.tau, rule.kappa, rule.alpha_attacked, rule.alpha_clean) == (0.2, 3.0, 0.25, 0.65)
    assert rule.delta == 0.1
    assert (rule.curve, rule.signal, rule.higher_is_suspicious) == ("sigmoid", "feat_disagreement", True)


def test_augmented_views_without_any_weight_share_evenly():
    probs, features = random_views(1)
    base = torch.zeros(V, B)
    base[0] = 1
    weights = mixing.AdaptiveMixing().weigh(base, probs, features, NO_MEMORY).answer
    assert torch.allclose(weights[1:], (1 - weights[0]).expand(V - 1, B) / (V - 1))


def test_gradients_flow_through_the_weights():
    """Autograd gives d(weight)/d(features) as finite differences do, so nothing is detached on the way."""
    _, features = random_views(2)
    features = features.double().requires_grad_(True)
    probs = random_views(3)[0].double()

    def first_weight(z: torch.Tensor) -> torch.Tensor:
        return pooling.weights("cc_drop", probs, z)[2, 0]

    assert torch.autograd.gradcheck(first_weight, (features,))
    (gradient,) = torch.autograd.grad(first_weight(features), features)
    assert gradient.abs().max() > 0


@pytest.mark.parametrize(("spread", "uniform"), [(3e-2, False), (1e-4, True)])
def test_weights_are_equal_only_if_their_sum_is_next_to_zero(spread, uniform):
    """Nearly uniform answers leave weights that sum to 1e-4 and still differ; a sum of 1e-8 counts as nothing."""
    probs = (spread * torch.randn(V, B, K, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).softmax(-1)
    weights = pooling.weights("entropy", probs, random_views(0)[1]).numpy()
    assert weights == pytest.approx(expected_weights("entropy", probs.numpy(), np.empty(0)), abs=1e-6)
    assert (np.ptp(weights) < 1e-9) == uniform


def pooled_by_hand(source: Classifier, views: torch.Tensor, mixed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return SAFER's or SAFER-A's probabilities and the features of views (V,B,3,H,W); autograd follows each line."""
    z, logits = (t.unflatten(0, views.shape[:2]) for t in source(views.flatten(0, 1)))
    p, others = logits.softmax(-1), range(len(views))
    scaled = (z - z.mean(1, keepdim=True)) / ((z.var(1, correction=0, keepdim=True) + 1e-6).sqrt() + 1e-6)
    r = [sum((scaled[v] * scaled[u]).mean() for u in others if u != v) / (len(views) - 1) for v in others]
    rho = torch.stack(r).clamp_min(0)
    rho = torch.stack([0 * x if v == int(rho.argmin()) else x for v, x in enumerate(rho)])
    base = w = (rho / rho.sum())[:, None].expand(views.shape[:2])
    if mixed:
        suspicion = 1 - torch.cosine_similarity(z[0], z[1:].mean(0), dim=1)
        alpha = 0.65 + torch.sigmoid(3 * (suspicion - 0.2)) * (0.25 - 0.65)
        w = torch.stack([alpha, *((1 - alpha) * base[v] / base[1:].sum(0) for v in others[1:])])
    return sum(w[v, :, None] * p[v] for v in others), sum(base[v, :, None] * z[v] for v in others)


@pytest.mark.parametrize("mixing", ["none", "sigmoid"])
@pytest.mark.parametrize("part", ["probs", "features"])
def test_gradients_of_the_pooled_answer(mixing, part):
    """An attacker needs gradients of the images, a method those of the parameters; both pass through the weights."""
    source = Classifier(small_net().double()).eval()
    predictor, images = Safer(source, mixing=mixing, seed=0), batches(1)[0].double().requires_grad_(True)
    draw = predictor.draw(images)
    ours = getattr(predictor(images, draw), part)
    probs, features = pooled_by_hand(source, draw.views(images), mixed=mixing == "sigmoid")
    expected = probs if part == "probs" else features
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-9)
    towards = [images, *(w for name, w in source.named_parameters() if part == "probs" or "fc" not in name)]
    weights = torch.randn(ours.shape, dtype=ours.dtype, generator=torch.Generator().manual_seed(0))
    for a, b in zip(*(torch.autograd.grad((x * weights).sum(), towards) for x in (ours, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


def test_logits_are_logarithms_of_probabilities_above_a_millionth():
    net = small_net().eval()
    net.fc.weight.data *= 20
    prediction = Safer(net, seed=0)(torch.cat(batches(8)))
    p = prediction.probs.detach().double()
    assert (p < 1e-6).any()
    assert ((p > 1e-6) & (p < 1e-4)).any()
    torch.testing.assert_close(prediction.logits.detach().double(), p.clamp_min(1e-6).log(), rtol=0, atol=1e-4)


def test_the_figures_reported_are_the_mixings(images):
    """SAFER-A reports the signal it was given, SAFER the disagreement of features, and the gate a probability."""
    source = classifier().eval()
    draw = Safer(source, pipeline="gentle", seed=0).draw(images)
    features = source(draw.views(images).flatten(0, 1))[0].unflatten(0, (5, -1)).detach()
    disagreement = (1 - torch.cosine_similarity(features[0], features[1:].mean(0), dim=1)).clamp(0, 2)
    confidence = source(images)[1].softmax(-1).amax(-1).detach()
    alike, nothing = torch.full(features.shape[:2], 1 / len(features)), torch.zeros(*features.shape[:2], 1)
    verdict = Gate().weigh(alike, nothing, features, torch.zeros(Gate().memory_size(features.shape[2])))

    def check(mixing: object, **expected: torch.Tensor) -> None:
        report = Safer(source, mixing=mixing, pipeline="gentle", seed=0)(images).report
        found = {**report.signals} if report.suspicion is None else {**report.signals, "suspicion": report.suspicion}
        assert found.keys() == expected.keys()
        for name, figure in expected.items():
            torch.testing.assert_close(found[name], figure)

    check("none", feat_disagreement=disagreement)
    check("sigmoid", feat_disagreement=disagreement)
    check({"name": "sigmoid", "signal": "orig_conf"}, orig_conf=confidence)
    check("gate", suspicion=verdict.suspicion, caution=verdict.signals["caution"])
