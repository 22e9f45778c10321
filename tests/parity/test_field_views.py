"""Methods with views or teachers of their own (CoTTA, MEMO, TeSLA) against their updates written straight down."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import safer_tta
from safer_tta.methods._frame.augmentations import augmix, easy, strong
from safer_tta.methods._frame.policy import Policy
from tests.conftest import CLASSES
from tests.parity.field import (
    MIXED_SIZES,
    SEED,
    agree,
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
