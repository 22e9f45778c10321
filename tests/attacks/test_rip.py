"""Images that were answered wrongly are sent again: which, in whose place, and which are forgotten."""

import torch

from safer_tta.attacks import start
from tests.attacks.parts import eight_bit
from tests.conftest import CLASSES, small_net

ALL = torch.ones(6, dtype=torch.bool)
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


def answers(classes):
    return torch.nn.functional.one_hot(torch.tensor(classes), CLASSES).float()


def test_own_misread_images_take_the_places_of_others_of_their_class():
    first, second = eight_bit(0), eight_bit(1)
    attacker = start("rip", small_net(), seed=3)
    assert torch.equal(attacker.perturb(first, LABELS, ALL, 0), first)
    attacker.see(first, LABELS, answers([0, 2, 2, 1, 1, 2]))  # images 1 and 3 were misread
    sent = attacker.perturb(second, LABELS, ALL, 1)
    changed = (sent != second).flatten(1).any(dim=1)
    assert changed.tolist() == [True, True, False, False, False, False]
    assert torch.equal(sent[0], first[3])
    assert torch.equal(sent[1], first[1])


def test_an_image_is_sent_until_it_is_answered_rightly():
    (image, other), label, mine = eight_bit(size=2), torch.tensor([4]), torch.ones(1, dtype=torch.bool)
    attacker = start("rip", small_net())
    attacker.see(image[None], label, answers([0]))
    for number in range(4):
        assert torch.equal(attacker.perturb(other[None], label, mine, number)[0], image)
        attacker.see(image[None], label, answers([1]))
    attacker.perturb(other[None], label, mine, 4)
    attacker.see(image[None], label, answers([4]))
    assert torch.equal(attacker.perturb(other[None], label, mine, 5)[0], other)


def test_every_remembered_image_is_sent_once_a_batch_and_chance_decides_which():
    remembered, fresh, labels = eight_bit(0, 20), eight_bit(1), torch.zeros(6, dtype=torch.int64)
    chosen = set()
    for seed in range(4):
        attacker = start("rip", small_net(), seed=seed)
        attacker.see(remembered, torch.zeros(20, dtype=torch.int64), answers([1] * 20))
        sent = attacker.perturb(fresh, labels, ALL, 0)
        places = [next(i for i, old in enumerate(remembered) if torch.equal(old, new)) for new in sent]
        assert len(set(places)) == 6
        chosen.add(tuple(places))
    assert len(chosen) == 4
    assert len(attacker.state_dict()["labels"]) == 14


def test_images_of_others_are_never_sent():
    """What is seen are the attacker's own images; an answer to nothing changes nothing."""
    attacker = start("rip", small_net())
    none = torch.zeros(0, dtype=torch.int64)
    attacker.see(eight_bit()[:0], none, torch.zeros(0, CLASSES))
    assert attacker.state_dict() == {}
