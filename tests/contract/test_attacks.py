"""One contract for every registered attack."""

import copy

import pytest
import torch

from safer_tta import Plain, methods
from safer_tta.attacks import ATTACKS, full_threat
from tests.conftest import classifier
from tests.contract.parts import generator


def victim(known, model, threat):
    """What an attack is made on."""
    if known.memory is not None:
        return known.memory(copy.deepcopy(model), threat)
    if known.adapts:
        return methods.create("none", Plain(model))
    return Plain(model) if known.live else model


def own(known, size):
    """Every second image, for one that poisons; all, for one that attacks a method."""
    told = known.live and (known.poisons or known.adapts)
    return (torch.arange(size) % (2 if known.poisons else 1) == 0,) if told else ()


@pytest.mark.parametrize(("name", "norm"), [(name, norm) for name in ATTACKS for norm in ATTACKS[name].norms or [None]])
class TestAttack:
    def attacked(self, name, norm, images, seed=0):
        model = classifier().eval()
        labels = model(images)[1].argmax(dim=1)
        budget = {"eps": 8 / 255 if norm == "linf" else 1.0, "norm": norm} if norm else {}
        asked = budget | ({"step": 2 / 255, "steps": 3} if norm else {})
        taken = {*budget, *ATTACKS[name].options} | (set() if ATTACKS[name].own_steps else {"step", "steps"})
        threat = full_threat(name, **{key: value for key, value in asked.items() if key in taken})
        before = copy.deepcopy(model.state_dict())
        attacked, mine = victim(ATTACKS[name], model, threat), own(ATTACKS[name], len(images))
        found = ATTACKS[name].make(attacked, images, labels, threat, generator(seed), *mine)
        assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
        assert not model.training
        return found, model, labels, threat

    def test_keeps_the_budget_on_eight_bits_and_the_model_as_it_was(self, name, norm, images):
        images = (images * 255).round() / 255
        found, _, _, threat = self.attacked(name, norm, images)
        assert found.shape == images.shape
        assert found.min() >= 0
        assert found.max() <= 1
        assert torch.allclose(found * 255, (found * 255).round(), atol=1e-3)
        assert ATTACKS[name].exceeds(found - images, threat) is None
        if norm:
            moved = (found - images).flatten(1).norm(p=torch.inf if norm == "linf" else 2, dim=1)
            assert float(moved.max()) <= threat["eps"] + 1e-5

    def test_does_harm_and_the_same_again(self, name, norm, images):
        found, model, labels, _ = self.attacked(name, norm, images)
        if ATTACKS[name].poisons:  # it harms others, and this model shows no image to another
            assert torch.equal(found, self.attacked(name, norm, images)[0])
            return
        right = (model(found)[1].argmax(dim=1) == labels).sum()
        loss = torch.nn.functional.cross_entropy
        assert right < len(labels) or loss(model(found)[1], labels) > loss(model(images)[1], labels)
        assert torch.equal(found, self.attacked(name, norm, images)[0])
