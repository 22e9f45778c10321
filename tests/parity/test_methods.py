"""Compare methods with the updates of their papers, written down step by step for a plain model in float64."""

import copy
import inspect
import io
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import safer_tta
from safer_tta import methods
from safer_tta.models.norm import MedBN
from safer_tta.predictors import TRANSFORMS
from tests.conftest import CLASSES
from tests.parity.field import (
    MIXED_SIZES,
    affine,
    agree,
    at_the_worst_point_nearby,
    batch_statistics,
    features,
    h,
    near,
    norms,
    source,
    step,
    stream,
    train_mode,
)

# The constants of the methods' papers, which the docstring of every method's file repeats.
DEFAULTS: dict[str, dict[str, float]] = {
    "none": {},
    "bn": {},
    "tent": {"lr": 1e-3},
    "pl": {"lr": 1e-4, "threshold": 0.9},
    "shot_im": {"lr": 1e-4},
    "t3a": {"keep": 100},
    "tsd": {"lr": 1e-4, "keep": 100, "released": False},
    "eata": {"lr": 2.5e-4, "margin": 0.4, "redundancy": 0.05, "momentum": 0.9, "fisher": 2000},
    "tesla": {"lr": 1e-4, "keep": 0.99, "easy_views": 4, "queue": 256, "neighbours": 10, "policy_lr": 0.1},
    "memo": {"lr": 2.5e-4, "copies": 32},
    "note": {"lr": 1e-4, "capacity": 64, "every": 64, "momentum": 0.01},
    "sotta": {"lr": 1e-3, "threshold": 0.99, "capacity": 64, "every": 64, "momentum": 0.2, "radius": 0.05},
    "rotta": {"lr": 1e-3, "capacity": 64, "every": 64, "momentum": 0.05, "keep": 0.999},
    "sar": {"lr": 2.5e-4, "margin": 0.4, "radius": 0.05, "recovery": 0.2},
    "cotta": {"lr": 1e-3, "keep": 0.999, "restore_rate": 0.01, "threshold": 0.92, "versions": 32},
    "rdumb": {"lr": 2.5e-4, "margin": 0.4, "redundancy": 0.05, "momentum": 0.9, "every": 1000},
}


@pytest.mark.parametrize("method", methods.METHODS)
def test_defaults_are_the_published_ones(method):
    options = inspect.signature(methods.METHODS[method]).parameters.values()
    assert {option.name: option.default for option in options if option.name != "predictor"} == DEFAULTS[method]


def test_tent_minimises_entropy():
    ours, model = safer_tta.adapt(source(), "tent", "plain"), batch_statistics(source())
    optimizer = torch.optim.Adam(affine(model), lr=1e-3)
    for images in stream([6] * 5):
        logits = model(images)
        step(optimizer, h(logits).mean())
        assert near(ours(images).logits, logits)
    agree(ours, model)


def test_pl_learns_from_confident_images():
    ours, model = safer_tta.adapt(source(), "pl", "plain"), train_mode(source())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for images in stream([6] * 5):
        logits = model(images)
        confidence, label = logits.softmax(1).max(1)
        keep = confidence > 0.9
        assert 0 < keep.sum() < len(keep), "this test needs confident and unconfident images"
        step(optimizer, F.cross_entropy(logits[keep], label[keep]))
        assert near(ours(images).logits, logits)
    agree(ours, model)


def test_bn_uses_the_batch_and_moves_the_running_statistics():
    ours, model = safer_tta.adapt(source(), "bn", "plain"), train_mode(source())
    for images in stream([6] * 3):
        assert torch.allclose(ours(images).logits, model(images).detach(), rtol=0, atol=1e-9)
    agree(ours, model, tolerance=1e-8)


def test_none_is_the_source_model_in_eval_mode():
    ours, model = safer_tta.adapt(source(), "none", "plain"), source().eval()
    for images in stream([6] * 2):
        assert torch.equal(ours(images).logits, model(images).detach())


@pytest.mark.parametrize("method", ["pl", "shot_im", "tsd", "bn"])
def test_train_mode_is_for_batch_norms_only(method):
    """Another norm with running statistics keeps those of the source, and dropout stays off."""
    model = source()
    model.norm2 = nn.InstanceNorm2d(16, affine=True, track_running_stats=True, dtype=torch.float64)
    nn.init.uniform_(model.norm2.running_mean, -0.2, 0.2)
    (images,), ours = stream([6]), safer_tta.adapt(model, method, "plain")
    model.eval().norm1.train()
    assert torch.allclose(ours(images).logits, model(images).detach(), rtol=0, atol=1e-9)
    assert torch.equal(ours.export().norm2.running_mean, model.norm2.running_mean)


def medbn(norm: nn.BatchNorm2d, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for c in range(x.shape[1]):
        values = sorted(x[:, c].flatten().tolist())
        median = values[(len(values) - 1) // 2]
        variance = sum((v - median) ** 2 for v in values) / len(values)
        out[:, c] = (x[:, c] - median) / (variance + norm.eps) ** 0.5 * norm.weight[c] + norm.bias[c]
    return out


def test_medbn_normalises_about_the_lower_median():
    norm = nn.BatchNorm2d(4).double()
    nn.init.uniform_(norm.weight)
    nn.init.uniform_(norm.bias)
    x = torch.randn(5, 4, 3, 4, dtype=torch.float64) ** 3
    assert torch.allclose(MedBN.like(norm)(x), medbn(norm, x), rtol=0, atol=1e-10)


def test_tent_with_medbn_replaces_every_batch_norm():
    (images,), model = stream([6]), source().eval()
    ours = safer_tta.adapt(model, "tent", "plain", norm="medbn")
    for norm in norms(model):
        norm.forward = lambda x, norm=norm: medbn(norm, x)
    assert torch.allclose(ours(images).logits, model(images).detach(), atol=1e-9)
    assert ours.state_bytes > 0


def test_jpeg_is_close_to_a_real_codec():
    noise = torch.rand(1, 3, 9, 11, generator=torch.Generator().manual_seed(0))
    image = (F.interpolate(noise, (70, 90), mode="bicubic").clamp(0, 1) * 255).round() / 255
    buffer = io.BytesIO()
    pixels = (image[0].permute(1, 2, 0) * 255).round().byte().numpy()
    Image.fromarray(pixels).save(buffer, format="JPEG", quality=50)
    codec = np.asarray(Image.open(buffer).convert("RGB")).astype(float)
    ours = TRANSFORMS["jpeg"](image)[0].permute(1, 2, 0).numpy() * 255
    untouched = np.abs(pixels - codec).mean()
    assert np.abs(ours - codec).mean() < 0.25 * untouched


def test_shot_im():
    ours, model = safer_tta.adapt(source(), "shot_im", "plain"), train_mode(source())
    optimizer = torch.optim.Adam([p for n, p in model.named_parameters() if not n.startswith("fc")], lr=1e-4)
    for x in stream([6] * 5):
        logits = model(x)
        mean = logits.softmax(1).mean(0)
        step(optimizer, h(logits).mean() + (mean * mean.log()).sum())
        assert near(ours(x).logits, logits)
    agree(ours, model)


class Memory:
    """T3A's and TSD's supports as plain lists."""

    def __init__(self, head: nn.Linear, keep: int) -> None:
        self.keep = keep
        self.rows = []
        self.add(head.weight.detach(), head(head.weight).detach())

    def add(self, z: Tensor, logits: Tensor) -> None:
        for feature, row in zip(z, logits, strict=True):
            self.rows.append((feature, int(row.argmax()), float(h(row[None]))))
        kept = []
        for k in range(CLASSES):
            kept += sorted((r for r in self.rows if r[1] == k), key=lambda r: r[2])[: self.keep]
        self.rows = kept

    def prototypes(self) -> Tensor:
        sums = torch.zeros(CLASSES, len(self.rows[0][0]), dtype=torch.float64)
        for feature, label, _ in self.rows:
            sums[label] += feature / feature.norm()
        return sums


@pytest.mark.parametrize("sizes", MIXED_SIZES)
@pytest.mark.parametrize("keep", [100, 3])
def test_t3a(sizes, keep):
    ours, model = safer_tta.adapt(source(), "t3a", "plain", keep=keep), source().eval()
    memory = Memory(model.fc, keep)
    for x in stream(sizes):
        z = features(model, x)
        memory.add(z.detach(), model.fc(z).detach())
        prototypes = memory.prototypes()
        unit = prototypes / prototypes.norm(dim=1, keepdim=True).clamp_min(1e-12)
        assert near(ours(x).logits, z @ unit.T)
    assert len(ours.state.memory["labels"]) == len(memory.rows)


@pytest.mark.parametrize("sizes", MIXED_SIZES)
@pytest.mark.parametrize("released", [False, True])
def test_tsd(sizes, released):
    ours = safer_tta.adapt(source(), "tsd", "plain", keep=4, released=released)
    model = train_mode(source())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    memory = Memory(model.fc, 4)
    for x in stream(sizes):
        z = features(train_mode(model), x)
        logits = model.fc(z)
        memory.add(z.detach(), logits.detach())
        c = memory.prototypes()
        length = 1 if released else 2
        similarity = (z / z.norm(p=length, dim=1, keepdim=True)) @ (
            c / c.norm(p=length, dim=1, keepdim=True).clamp_min(1e-12)
        ).T
        target = (logits.softmax(1) if released else logits).detach().log_softmax(1)
        q = similarity.softmax(1)
        loss = (q * (q.log() - target)).sum(1).mean()
        step(optimizer, loss)
        assert near(ours(x).logits, logits)
    agree(ours, model)


def eata_reference(model, images, mean, margin, fisher=None, anchor=None, redundancy=0.05):
    logits = model(images)
    entropy = h(logits)
    probs = logits.softmax(1).detach()
    kept = []
    for b in range(len(images)):
        certain = float(entropy[b].detach()) < margin
        new = mean is None or abs(float(F.cosine_similarity(mean[None], probs[b : b + 1]))) < redundancy
        if certain and new:
            kept.append(b)
    if not kept:
        return logits, None, mean
    loss = sum(math.exp(margin - float(entropy[b].detach())) * entropy[b] for b in kept) / len(kept)
    if fisher is not None:
        loss = loss + 2000 * sum(
            (f * (p - a) ** 2).sum() for f, p, a in zip(fisher, affine(model), anchor, strict=True)
        )
    new_mean = probs[kept].mean(0)
    return logits, loss, new_mean if mean is None else 0.9 * mean + 0.1 * new_mean


@pytest.mark.parametrize("sizes", MIXED_SIZES)
@pytest.mark.parametrize("with_source", [False, True])
def test_eata(sizes, with_source):
    ours = safer_tta.adapt(source(), "eata", "plain", redundancy=0.97, margin=0.9)
    model = batch_statistics(source())
    fisher = anchor = None
    if with_source:
        samples = stream([7, 5])
        ours.fit_source(samples)
        fisher = [torch.zeros_like(p) for p in affine(model)]
        for x in samples:
            logits = model(x)
            gradients = torch.autograd.grad(F.cross_entropy(logits, logits.argmax(1)), affine(model))
            fisher = [f + g**2 / 2 for f, g in zip(fisher, gradients, strict=True)]
        anchor = [p.detach().clone() for p in affine(model)]
    optimizer = torch.optim.Adam(affine(model), lr=2.5e-4)
    mean, steps = None, 0
    for x in stream(sizes):
        logits, loss, mean = eata_reference(model, x, mean, 0.9 * math.log(CLASSES), fisher, anchor, 0.97)
        if loss is not None:
            steps += 1
            step(optimizer, loss)
        assert near(ours(x).logits, logits)
    assert steps > 0
    agree(ours, model)


def test_eata_keeps_nothing_and_learns_nothing():
    ours = safer_tta.adapt(source(), "eata", "plain", margin=1e-9)
    before = ours.state_dict()
    ours(stream([6])[0])
    assert all(torch.equal(t, before[n]) for n, t in ours.state_dict().items())


def test_rdumb_starts_over():
    ours, model = safer_tta.adapt(source(), "rdumb", "plain", every=2), batch_statistics(source())
    start, mean, optimizer = copy.deepcopy(model.state_dict()), None, None
    for number, x in enumerate(stream([6] * 5)):
        if number % 2 == 0:
            model.load_state_dict(start)
            mean, optimizer = None, torch.optim.Adam(affine(model), lr=2.5e-4)
        logits, loss, mean = eata_reference(model, x, mean, 0.4 * math.log(CLASSES))
        if loss is not None:
            step(optimizer, loss)
        assert near(ours(x).logits, logits)


def test_sar():
    ours, model = safer_tta.adapt(source(), "sar", "plain", margin=0.6), batch_statistics(source())
    optimizer = torch.optim.SGD(affine(model), lr=2.5e-4, momentum=0.9)
    margin, mean = 0.6 * math.log(CLASSES), None
    for x in stream([6] * 5):
        logits = model(x)
        certain = [b for b in range(6) if float(h(logits)[b].detach()) < margin]
        assert certain
        optimizer.zero_grad()
        h(logits)[certain].mean().backward()
        with at_the_worst_point_nearby(affine(model)):
            second = h(model(x))[certain]
            still = [i for i in range(len(certain)) if float(second[i].detach()) < margin]
            loss = second[still].mean()
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        mean = loss.item() if mean is None else 0.9 * mean + 0.1 * loss.item()
        assert near(ours(x).logits, logits)
        assert float(ours.state.memory["mean_loss"]) == pytest.approx(mean, abs=1e-6)
    agree(ours, model)


def test_sar_recovers():
    ours = safer_tta.adapt(source(), "sar", "plain", margin=0.6, recovery=100.0)
    start = ours.state_dict()
    ours(stream([6])[0])
    assert all(torch.equal(t, start[n]) for n, t in ours.state_dict().items() if n != "generator")
