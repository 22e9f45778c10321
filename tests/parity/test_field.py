"""Methods of the field against their updates written straight down: float64, a plain model, number for number."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import safer_tta
from tests.conftest import CLASSES
from tests.parity.field import (
    MIXED_SIZES,
    affine,
    agree,
    batch_statistics,
    features,
    h,
    near,
    source,
    step,
    stream,
    train_mode,
)


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
        length = math.sqrt(sum(float((p.grad**2).sum()) for p in affine(model)))
        here = [p.detach().clone() for p in affine(model)]
        with torch.no_grad():
            for p in affine(model):
                p += 0.05 * p.grad / (length + 1e-12)
        second = h(model(x))[certain]
        still = [i for i in range(len(certain)) if float(second[i].detach()) < margin]
        loss = second[still].mean()
        optimizer.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p, value in zip(affine(model), here, strict=True):
                p.copy_(value)
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
