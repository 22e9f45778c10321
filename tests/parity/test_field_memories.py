"""Compare methods with memories, teachers or views of their own with their updates, written down step by step."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import safer_tta
from safer_tta.methods._frame.augmentations import augmix, easy, strong
from safer_tta.methods._frame.policy import Policy
from tests.conftest import CLASSES, batches, small_net
from tests.parity.field import (
    MIXED_SIZES,
    SEED,
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
        statistics = [buffer.clone() for buffer in model.buffers()]
        with at_the_worst_point_nearby(affine(model)):
            optimizer.zero_grad()
            h(model(images)).mean().backward()
        for buffer, value in zip(model.buffers(), statistics, strict=True):  # the second pass moves none
            buffer.copy_(value)
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


@pytest.mark.parametrize("threshold", [0.0, 1.1])
def test_cotta(threshold):
    ours = safer_tta.adapt(source(), "cotta", "plain", seed=SEED, threshold=threshold, versions=3, restore_rate=0.2)
    generator = torch.Generator().manual_seed(SEED)
    model, teacher, first = (batch_statistics(source()) for _ in range(3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for x in stream([6] * 5):
        views = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=generator)))
        logits = model(x)
        with torch.no_grad():
            answer = teacher(x)
            if threshold > 1:
                answer = sum(teacher(strong(x, views)) for _ in range(3)) / 3
        step(optimizer, -(answer.softmax(1) * logits.log_softmax(1)).sum(1).mean())
        mask = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=generator)))
        with torch.no_grad():
            for p, t, s in zip(model.parameters(), teacher.parameters(), first.parameters(), strict=True):
                t.copy_(0.999 * t + 0.001 * p)
                back = torch.rand(p.shape, generator=mask) < 0.2
                p.copy_(torch.where(back, s, p))
        assert near(ours(x).logits, answer)
    agree(ours, model)


def test_memo():
    ours = safer_tta.adapt(source(), "memo", "plain", seed=SEED, copies=5, lr=0.1)
    generator = torch.Generator().manual_seed(SEED)
    for x in stream([3] * 3):
        views = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=generator)))
        expected = []
        for image in x:
            model = source().eval()
            mean = model(augmix(image, 5, views)).softmax(1).mean(0)
            step(torch.optim.SGD(model.parameters(), lr=0.1), -(mean * mean.log()).sum())
            expected.append(model(image[None]).detach())
        assert near(ours(x).logits, torch.cat(expected))
    assert ours.state_bytes < 10_000, "nothing stays"


def input_means(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    caught = []
    hooks = [n.register_forward_pre_hook(lambda m, i: caught.append(i[0].mean(dim=(0, 2, 3)))) for n in norms(model)]
    logits = model(x)
    for hook in hooks:
        hook.remove()
    return logits, caught


@pytest.mark.parametrize("sizes", MIXED_SIZES)
def test_tesla(sizes):
    ours = safer_tta.adapt(source(), "tesla", "plain", seed=SEED, queue=5, neighbours=3)
    generator = torch.Generator().manual_seed(SEED)
    student, teacher, policy = train_mode(source()), source().eval(), Policy()
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-4)
    policy_optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    queue: list[tuple[Tensor, Tensor]] = []
    for x in stream(sizes):
        own = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=generator)))
        views = [x] + [easy(x, own) for _ in range(4)]
        chosen = int(torch.randint(5, (), generator=own))
        hard = policy.apply_pairs(x, policy.draw(len(x), own)).detach()
        with torch.no_grad():
            probs = sum(teacher(v).softmax(1) for v in views) / 5
            z = sum(features(teacher, v) for v in views) / 5
            queue += list(zip(z, probs, strict=True))
            soft = []
            for row in z:
                order = sorted(queue, key=lambda q: -float(F.cosine_similarity(row[None], q[0][None])))
                soft.append(torch.stack([q[1] for q in order[:3]]).mean(0))
            soft = torch.stack(soft)
        logits = student(views[chosen])
        p = logits.softmax(1)
        mean = p.mean(0)
        on_hard = student(hard).log_softmax(1)
        loss = (
            (mean * mean.log()).sum() - (p * soft.log()).sum(1).mean() + (soft * (soft.log() - on_hard)).sum(1).mean()
        )
        step(optimizer, loss)
        for k in range(CLASSES):  # the youngest five of every class stay
            of_class = [q for q in queue if int(q[1].argmax()) == k]
            gone = {id(q) for q in of_class[:-5]}
            queue = [q for q in queue if id(q) not in gone]
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
                t.copy_(0.99 * t + 0.01 * s)
        pairs = torch.randint(91, (len(x),), generator=generator)
        with torch.no_grad():
            _, plain = input_means(teacher, x)
        answer, moved = input_means(teacher, policy.apply_pairs(x, pairs))
        drift = sum(((a - b) ** 2).mean() for a, b in zip(moved, plain, strict=True)) / len(plain)
        preference = policy.choice.log_softmax(0)[pairs]
        step(policy_optimizer, drift - h(answer).mean() - (preference * h(answer).detach()).mean())
        assert near(ours(x).logits, logits)
    agree(ours, student)
    assert near(ours.policy.strength, policy.strength)
    assert near(ours.policy.choice, policy.choice)
