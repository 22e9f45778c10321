"""One contract for the attacker in the loop of a stream, with every live attack."""

import copy

import pytest
import torch

from safer_tta import Classifier
from safer_tta.attacks import ATTACKS, start
from safer_tta.errors import InvalidTypeError, InvalidValueError
from tests.conftest import adapt_small, batches, identical, small_net

LIVE = [name for name, attack in ATTACKS.items() if attack.live]
FEW = {"steps": 2, "queries": 3, "draws": 1, "restarts": 1, "rounds": 1}
MINE = torch.tensor([True, False, True, True, False, False])
ALL = torch.ones(6, dtype=torch.bool)
LABELS = torch.arange(6) % 5


def levels(count, seed=1):
    return [(images * 255).round().byte() for images in batches(count, seed=seed)]


def started(name, method="tent", seed=0):
    """An attacker, and the method that it attacks."""
    known, adapted = ATTACKS[name], adapt_small(method)
    taken = {*known.options} | (set() if known.own_steps else {"steps"})
    asked = {option: value for option, value in FEW.items() if option in taken}
    source = Classifier(small_net(), mean=0, std=1)
    return start(name, adapted if known.memory is None else source, seed=seed, **asked), adapted


def attacked(attacker, adapted, stream, first=0, mine=MINE):
    """What is sent, from batch `first` on; the method answers, and the attacker sees the answers."""
    sent = []
    for number, images in enumerate(stream[first:], start=first):
        sent.append(attacker.perturb(images, LABELS, mine, number))
        answer = adapted(sent[-1])
        attacker.see(sent[-1][mine], LABELS[mine], answer.probs[mine])
    return sent


@pytest.mark.parametrize("name", LIVE)
class TestAttacker:
    def test_changes_its_own_images_only_and_does_so_again(self, name):
        stream = levels(3)
        once, again = (attacked(*started(name), stream) for _ in range(2))
        for images, sent, same in zip(stream, once, again, strict=True):
            assert sent.dtype == torch.uint8
            assert torch.equal(sent[~MINE], images[~MINE])
            assert torch.equal(sent, same)
        assert any(not torch.equal(images, sent) for images, sent in zip(stream, once, strict=True))

    def test_does_not_move_what_it_attacks(self, name):
        attacker, adapted = started(name)
        before = adapted.state_dict()
        attacker.perturb(levels(1)[0], LABELS, MINE, 0)
        assert identical(adapted.state_dict(), before)

    def test_takes_floats_as_they_are(self, name):
        (images,), floats = levels(1), batches(1)[0]
        sent = started(name)[0].perturb(floats, LABELS, MINE, 0)
        assert torch.equal(sent[~MINE], floats[~MINE])
        assert torch.equal((sent[MINE] * 255).round().byte(), started(name)[0].perturb(images, LABELS, MINE, 0)[MINE])

    def test_owns_nothing_or_all(self, name):
        (images,) = levels(1)
        assert torch.equal(started(name)[0].perturb(images, LABELS, ~ALL, 0), images)
        assert started(name)[0].perturb(images, LABELS, ALL, 0).shape == images.shape

    def test_resumes_from_its_state(self, name):
        stream = levels(4)
        attacker, adapted = started(name)
        whole = attacked(attacker, adapted, stream[:2], mine=ALL)
        memory, method = copy.deepcopy(attacker.state_dict()), adapted.state_dict()
        whole += attacked(attacker, adapted, stream, 2, mine=ALL)
        resumed, again = started(name)
        resumed.load_state_dict(memory)
        again.load_state_dict(method)
        rest = attacked(resumed, again, stream, 2, mine=ALL)
        assert all(torch.equal(a, b) for a, b in zip(whole[2:], rest, strict=True))
        assert identical(resumed.state_dict(), attacker.state_dict())


def test_what_is_remembered_decides_what_is_sent():
    """A memory that is lost is noticed; else resuming would prove nothing."""
    for name in (name for name in LIVE if ATTACKS[name].memory is not None):
        stream = levels(3)
        attacker, adapted = started(name)
        attacked(attacker, adapted, stream[:2], mine=ALL)
        fresh = started(name)[0].perturb(stream[2], LABELS, ALL, 2)
        assert not torch.equal(attacker.perturb(stream[2], LABELS, ALL, 2), fresh), name


@pytest.mark.parametrize(
    ("attack", "victim", "error", "message"),
    [
        ("pgd", adapt_small, InvalidValueError, "ahead of a stream, so there is no attacker to start; expected one of"),
        ("dia", small_net, InvalidTypeError, "victim is SmallNet; 'dia' expects the method that it attacks"),
        ("rttdp", adapt_small, InvalidTypeError, "victim is Tent; 'rttdp' expects the source model"),
        ("eot", lambda: adapt_small("t3a"), InvalidValueError, "t3a answers with more than its predictor"),
    ],
)
def test_a_victim_that_cannot_be_attacked_so_is_refused(attack, victim, error, message):
    with pytest.raises(error, match=message):
        start(attack, victim())


@pytest.mark.parametrize("mine", [torch.ones(6), torch.ones(5, dtype=torch.bool), [True] * 6])
def test_what_does_not_say_which_images_are_the_attackers_is_refused(mine):
    with pytest.raises(InvalidTypeError, match="a bool for each of the 6 images"):
        started("dia")[0].perturb(levels(1)[0], LABELS, mine, 0)
