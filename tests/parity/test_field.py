"""Every method of the field against its update written straight down: float64, a plain model, number for number."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import safer_tta
from safer_tta.methods.own_views import augmix, easy, strong
from safer_tta.methods.policy import Policy
from tests.conftest import CLASSES, batches, small_net

SEED = 11
MIXED_SIZES = [[6] * 5, [1] * 5, [2] * 5, [64, 64, 9]]


def source() -> nn.Module:
    return small_net().double()


def stream(sizes: list[int]) -> list[Tensor]:
    return [batches(1, size=n, seed=20 + i)[0].double() for i, n in enumerate(sizes)]


def norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    return [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]


def affine(model: nn.Module) -> list[nn.Parameter]:
    return [p for n in norms(model) for p in (n.weight, n.bias)]


def batch_statistics(model: nn.Module) -> nn.Module:
    model.eval()
    for norm in norms(model):
        norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None
    return model


def train_mode(model: nn.Module) -> nn.Module:
    model.train()
    model.dropout.eval()
    return model


def features(model: nn.Module, x: Tensor) -> Tensor:
    caught = []
    hook = model.fc.register_forward_hook(lambda m, i, o: caught.append(i[0]))
    model(x)
    hook.remove()
    return caught[0]


def h(logits: Tensor) -> Tensor:
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def agree(ours: safer_tta.Method, model: nn.Module) -> None:
    exported = dict(ours.export().named_parameters())
    for name, tensor in model.named_parameters():
        assert torch.allclose(exported[name], tensor, rtol=0, atol=1e-6), name


def near(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b.detach(), rtol=0, atol=1e-6)


def test_shot_im():
    ours, model = safer_tta.adapt(source(), "shot_im", safer=False), train_mode(source())
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
    ours, model = safer_tta.adapt(source(), "t3a", safer=False, keep=keep), source().eval()
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
    ours = safer_tta.adapt(source(), "tsd", safer=False, keep=4, released=released)
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
    ours = safer_tta.adapt(source(), "eata", safer=False, redundancy=0.97, margin=0.9)
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
    ours = safer_tta.adapt(source(), "eata", safer=False, margin=1e-9)
    before = ours.state_dict()
    ours(stream([6])[0])
    assert all(torch.equal(t, before[n]) for n, t in ours.state_dict().items())


def test_rdumb_starts_over():
    ours, model = safer_tta.adapt(source(), "rdumb", safer=False, every=2), batch_statistics(source())
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
    ours, model = safer_tta.adapt(source(), "sar", safer=False, margin=0.6), batch_statistics(source())
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
    ours = safer_tta.adapt(source(), "sar", safer=False, margin=0.6, recovery=100.0)
    start = ours.state_dict()
    ours(stream([6])[0])
    assert all(torch.equal(t, start[n]) for n, t in ours.state_dict().items() if n != "generator")


@pytest.mark.parametrize("threshold", [0.0, 1.1])
def test_cotta(threshold):
    ours = safer_tta.adapt(source(), "cotta", safer=False, seed=SEED, threshold=threshold, versions=3, restore_rate=0.2)
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
    ours = safer_tta.adapt(source(), "memo", safer=False, seed=SEED, copies=5, lr=0.1)
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
    ours = safer_tta.adapt(source(), "note", safer=False, every=6)
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
    ours = safer_tta.adapt(small_net(), "note", safer=False, capacity=10, every=10_000, seed=0)
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
        ours = safer_tta.adapt(small_net(), "note", safer=False, capacity=10, every=10_000, seed=seed)
        images = of_class(ours, 1)[:200]
        ours(images)
        kept += places(ours.memory["image"], images)
    assert len(kept) == 60
    assert 80 < sum(kept) / len(kept) < 120
    assert sum(place < 100 for place in kept) > 18


def test_notes_memory_makes_room_for_a_rare_class():
    ours = safer_tta.adapt(small_net(), "note", safer=False, capacity=10, every=10_000, seed=0)
    ours(torch.cat([of_class(ours, 1)[:50], of_class(ours, 0)[:5]]))
    assert torch.bincount(ours.memory["label"]).tolist() == [5, 5]


def test_sotta():
    ours = safer_tta.adapt(source(), "sotta", safer=False, threshold=0.3, every=6)
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
    ours = safer_tta.adapt(small_net(), "sotta", safer=False, threshold=0.3, capacity=10, every=10_000, seed=0)
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
        ours = safer_tta.adapt(small_net(), "sotta", safer=False, threshold=0.3, capacity=10, every=10_000, seed=seed)
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
    ours = safer_tta.adapt(source(), "rotta", safer=False, seed=SEED, every=6, keep=0.9, capacity=capacity)
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


def input_means(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    caught = []
    hooks = [n.register_forward_pre_hook(lambda m, i: caught.append(i[0].mean(dim=(0, 2, 3)))) for n in norms(model)]
    logits = model(x)
    for hook in hooks:
        hook.remove()
    return logits, caught


@pytest.mark.parametrize("sizes", MIXED_SIZES)
def test_tesla(sizes):
    ours = safer_tta.adapt(source(), "tesla", safer=False, seed=SEED, queue=5, neighbours=3)
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
