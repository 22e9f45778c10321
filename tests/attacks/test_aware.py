import copy

import pytest
import torch

import safer_tta
from safer_tta.attacks import ATTACKS, aware, eot_pgd, pgd
from safer_tta.errors import InvalidTypeError, UnknownNameError
from tests.attacks.parts import STEPS, drawings, eight_bit, generator, labels, trained_net
from tests.conftest import CLASSES, classifier, small_net


@pytest.mark.parametrize("defence", ["safer", {"name": "safer", "views": 2, "pool": "mean"}])
def test_it_is_eot_through_the_defence_around_the_surrogate(defence):
    options = {} if defence == "safer" else {"views": 2, "pool": "mean"}
    surrogate, images = classifier().eval(), eight_bit(side=24)
    defended = safer_tta.Safer(surrogate, seed=7, **options)
    expected = eot_pgd(defended, images, labels(), draws=2, generator=generator(), **STEPS)
    found = aware(surrogate, images, labels(), defence=defence, draws=2, generator=generator(), **STEPS)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("defence", ["safer", "safer-g"])
def test_the_surrogate_is_left_as_it_was_and_attacked_in_eval_mode(defence):
    surrogate = classifier().train()
    before = copy.deepcopy(surrogate.state_dict())
    images = eight_bit(side=24)
    found = aware(surrogate, images, labels(), defence=defence, draws=1, generator=generator(), **STEPS)
    assert all(module.training for module in surrogate.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in surrogate.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in surrogate.parameters())
    fixed = aware(surrogate.eval(), images, labels(), defence=defence, draws=1, generator=generator(), **STEPS)
    assert torch.equal(found, fixed)


def test_momentum_and_target_reach_eot():
    surrogate, images, y = classifier().eval(), eight_bit(side=24), labels()
    defended, asked = safer_tta.Safer(surrogate, seed=0), {"draws": 1, "momentum": 0.5, "target": "next"}
    expected = eot_pgd(defended, images, y, generator=generator(), **asked, **STEPS)
    assert torch.equal(aware(surrogate, images, y, generator=generator(), **asked, **STEPS), expected)
    for option in ("momentum", "target"):
        fewer = {name: value for name, value in asked.items() if name != option}
        assert not torch.equal(eot_pgd(defended, images, y, generator=generator(), **fewer, **STEPS), expected)


def test_knowledge_of_the_defence_carries_over_to_another_model():
    """The deployed model is another one behind the same defence."""
    x, y = drawings()
    threat = {"eps": 16 / 255, "step": 2 / 255, "steps": 10}
    known = aware(trained_net(), x, y, draws=4, generator=generator(), **threat)
    unknown = pgd(trained_net(), x, y, generator=generator(), **threat)
    deployed = safer_tta.Safer(trained_net(1), seed=0)

    def remaining(images):
        return sum((deployed(images).labels == y).float().mean().item() for _ in range(10)) / 10

    assert remaining(known) < remaining(unknown) - 0.1


def test_a_target_is_what_images_are_read_as():
    x, y = drawings()
    found = aware(trained_net(), x, y, defence="plain", draws=1, target="next", eps=32 / 255, generator=generator())
    assert (trained_net()(found).argmax(dim=1) == (y + 1) % CLASSES).float().mean() > 0.9


def test_images_are_made_again_if_the_defence_changes(monkeypatch):
    known = ATTACKS["aware"]
    assert known.raised_versions({}) == {}
    monkeypatch.setattr(safer_tta.Safer, "version", 2)
    assert known.raised_versions({"defence": "safer"}) == {"predictor safer": 2}
    assert known.raised_versions({"defence": "plain"}) == {}


def test_predictors_and_unknown_defences_are_refused():
    with pytest.raises(InvalidTypeError, match=r"surrogate is Safer; expected a model .* eot_pgd"):
        aware(safer_tta.Safer(small_net()), eight_bit(), labels())
    with pytest.raises(UnknownNameError, match=r"predictor 'sfer' is unknown .did you mean 'safer'"):
        aware(small_net(), eight_bit(), labels(), defence="sfer")
