"""Methods with a memory of images (NOTE, SoTTA, RoTTA) against their updates written straight down."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import safer_tta
from safer_tta.methods._frame.augmentations import strong
from tests.conftest import CLASSES, batches, small_net
from tests.parity.field import SEED, affine, agree, h, near, norms, source, step, stream


def iabn(norm: nn.BatchNorm2d, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """NOTE's normalisation, image by image and channel by channel."""
    pixels, rows = x[0, 0].numel(), []
    for b in range(len(x)):
        channels = []
        for c in range(x.shape[1]):
            own_mean, own_var = x[b, c].mean(), x[b, c].var()
            band_mean = 4 * torch.sqrt((var[c] + norm.eps) / pixels)
            band_var = 4 * (var[c] + norm.eps) * math.sqrt(2 / (pixels - 1))
            d, e = own_mean - mean[c], own_var - var[c]
            m = mean[c] + torch.sign(d) * torch.relu(d.abs() - band_mean)
            v = torch.relu(var[c] + torch.sign(e) * torch.relu(e.abs() - band_var))
            channels.append((x[b, c] - m) / torch.sqrt(v + norm.eps) * norm.weight[c] + norm.bias[c])
        rows.append(torch.stack(channels))
    return torch.stack(rows)


class NoteNet(nn.Module):
    """The small network with NOTE's normalisation written out; `learning` uses and moves the batch's statistics."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.learning = net, False
        for norm in norms(net):
            norm.forward = lambda x, norm=norm: self.normalise(norm, x)

    def normalise(self, norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
        if not self.learning:
            return iabn(norm, x, norm.running_mean, norm.running_var)
        mean, var = x.mean(dim=(0, 2, 3)), x.var(dim=(0, 2, 3))
        norm.running_mean.copy_(0.99 * norm.running_mean + 0.01 * mean.detach())
        norm.running_var.copy_(0.99 * norm.running_var + 0.01 * var.detach())
        return iabn(norm, x, mean, var)


def test_note():
    ours = safer_tta.adapt(source(), "note", "plain", every=6)
    model = NoteNet(source().eval())
    optimizer = torch.optim.Adam(affine(model.net), lr=1e-4)
    memory = []
    for x in stream([6] * 3):
        model.learning = False
        logits = model.net(x).detach()
        memory += list(x)
        model.learning = True
        step(optimizer, h(model.net(torch.stack(memory))).mean())
        assert near(ours(x).logits, logits)
    agree(ours, model.net)


def test_notes_memory_stays_balanced():
    ours = safer_tta.adapt(small_net(), "note", "plain", capacity=10, every=10_000, seed=0)
    ours(torch.cat(batches(30)))
    counts = torch.bincount(ours.memory["label"], minlength=CLASSES)
    predicted = ours.state.memory["seen"]
    assert counts.sum() == 10
    assert counts.max() - counts[predicted > 3].min() <= 2


def of_class(method: safer_tta.Method, label: int) -> Tensor:
    """Images that the method takes for this class, however often it sees them."""
    images = torch.cat(batches(60))
    return images[method.predict(images).labels == label]


def places(remembered: Tensor, stream: Tensor) -> list[int]:
    """Where in the stream the images of a memory came from."""
    return [next(i for i, image in enumerate(stream) if torch.equal(image, one)) for one in remembered]


def test_notes_reservoir_holds_early_and_late_images_alike():
    """Of one class every image has the same chance to be in the memory, whenever it came."""
    kept = []
    for seed in range(6):
        ours = safer_tta.adapt(small_net(), "note", "plain", capacity=10, every=10_000, seed=seed)
        images = of_class(ours, 1)[:200]
        ours(images)
        kept += places(ours.memory["image"], images)
    assert len(kept) == 60
    assert 80 < sum(kept) / len(kept) < 120
    assert sum(place < 100 for place in kept) > 18


def test_notes_memory_makes_room_for_a_rare_class():
    ours = safer_tta.adapt(small_net(), "note", "plain", capacity=10, every=10_000, seed=0)
    ours(torch.cat([of_class(ours, 1)[:50], of_class(ours, 0)[:5]]))
    assert torch.bincount(ours.memory["label"]).tolist() == [5, 5]


def test_sotta():
    ours = safer_tta.adapt(source(), "sotta", "plain", threshold=0.3, every=6)
    model = source().eval()
    optimizer = torch.optim.Adam(affine(model), lr=1e-3)
    memory = []
    for x in stream([6] * 5):
        logits = model.eval()(x).detach()
        memory += [image for image, row in zip(x, logits.softmax(1), strict=True) if row.max() > 0.3]
        images = torch.stack(memory)
        for norm in norms(model):
            norm.train()
            norm.momentum = 0.2
        optimizer.zero_grad()
        h(model(images)).mean().backward()
        length = math.sqrt(sum(float((p.grad**2).sum()) for p in affine(model)))
        here = [p.detach().clone() for p in affine(model)]
        with torch.no_grad():
            for p in affine(model):
                p += 0.05 * p.grad / (length + 1e-12)
        statistics = [(n.running_mean.clone(), n.running_var.clone()) for n in norms(model)]
        optimizer.zero_grad()
        h(model(images)).mean().backward()
        for norm, (mean, var) in zip(norms(model), statistics, strict=True):  # the second pass moves none
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(var)
        with torch.no_grad():
            for p, value in zip(affine(model), here, strict=True):
                p.copy_(value)
        optimizer.step()
        assert near(ours(x).logits, logits)
    assert memory
    agree(ours, model)


def test_sottas_memory_is_confident_and_uniform():
    ours = safer_tta.adapt(small_net(), "sotta", "plain", threshold=0.3, capacity=10, every=10_000, seed=0)
    images = torch.cat(batches(30))
    prediction = ours(images)
    sure = prediction.probs.amax(1) > 0.3
    available = torch.bincount(prediction.labels[sure], minlength=CLASSES)
    counts = torch.bincount(ours.memory["label"], minlength=CLASSES)
    assert counts.sum() == 10
    assert counts.max() - counts[available > 3].min() <= 2


def test_sottas_memory_keeps_what_is_rare_and_any_of_what_is_not():
    """Room is made in the largest class, and there at random: not by age."""
    gone = set()
    for seed in range(6):
        ours = safer_tta.adapt(small_net(), "sotta", "plain", threshold=0.3, capacity=10, every=10_000, seed=seed)
        rare, common = of_class(ours, 1)[:4], of_class(ours, 0)[:7]
        ours(torch.cat([rare, common]))
        assert torch.equal(ours.memory["image"][:4], rare)
        gone |= set(range(7)) - set(places(ours.memory["image"][4:], common))
    assert len(gone) > 1


class RobustNet(NoteNet):
    def normalise(self, norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
        mean, var = norm.running_mean, norm.running_var
        if self.learning:
            mean = 0.95 * mean + 0.05 * x.mean(dim=(0, 2, 3))
            var = 0.95 * var + 0.05 * x.var(dim=(0, 2, 3), correction=0)
            norm.running_mean, norm.running_var = mean.detach(), var.detach()
        per = (1, -1, 1, 1)
        out = (x - mean.view(per)) / torch.sqrt(var.view(per) + norm.eps)
        return out * norm.weight.view(per) + norm.bias.view(per)


@pytest.mark.parametrize("capacity", [64, 8])
def test_rotta(capacity):
    ours = safer_tta.adapt(source(), "rotta", "plain", seed=SEED, every=6, keep=0.9, capacity=capacity)
    generator = torch.Generator().manual_seed(SEED)
    student, teacher = RobustNet(source().eval()), RobustNet(source().eval())
    optimizer = torch.optim.Adam(affine(student.net), lr=1e-3)
    memory: list[dict] = []

    def score(age: float, uncertainty: float) -> float:
        return 1 / (1 + math.exp(-age / capacity)) + uncertainty / math.log(CLASSES)

    for x in stream([6] * 5):
        teacher.learning = False
        logits = teacher.net(x).detach()
        for image, row in zip(x, logits, strict=True):
            label, uncertainty = int(row.argmax()), float(h(row[None]))
            of_class = {k: [m for m in memory if m["label"] == k] for k in range(CLASSES)}
            among = None
            if len(of_class[label]) >= capacity / CLASSES:
                among = of_class[label]
            elif len(memory) >= capacity:
                most = max(len(v) for v in of_class.values())
                among = [m for m in memory if len(of_class[m["label"]]) == most]
            room = among is None
            if among is not None:
                worst = max(among, key=lambda m: score(m["age"], m["uncertainty"]))
                if score(worst["age"], worst["uncertainty"]) > score(0, uncertainty):
                    memory = [m for m in memory if m is not worst]
                    room = True
            if room:
                memory.append({"image": image, "label": label, "uncertainty": uncertainty, "age": 0})
            for m in memory:
                m["age"] += 1
        images = torch.stack([m["image"] for m in memory])
        ages = torch.tensor([m["age"] / capacity for m in memory], dtype=torch.float64)
        augmented = strong(images, generator)
        teacher.learning = student.learning = True
        target = teacher.net(images).softmax(1).detach()
        weight = torch.exp(-ages) / (1 + torch.exp(-ages))
        loss = (-(target * student.net(augmented).log_softmax(1)).sum(1) * weight).mean()
        step(optimizer, loss)
        with torch.no_grad():
            for t, p in zip(teacher.net.parameters(), student.net.parameters(), strict=True):
                t.copy_(0.9 * t + 0.1 * p)
        assert near(ours(x).logits, logits)
    agree(ours, student.net)
