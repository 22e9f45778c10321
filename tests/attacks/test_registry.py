import pytest
import torch

from safer_tta.attacks import ATTACKS, describe
from safer_tta.attacks.registry import Attack
from safer_tta.data import ArrayStore, open_dataset
from safer_tta.errors import InvalidValueError
from safer_tta.training import attacked_copies
from tests.attacks.parts import EPS, eight_bit, labels
from tests.conftest import classifier

CHANGES = {
    "out of range": (lambda images: images - 0.5, r"own made values outside \[0,1\]; expected images"),
    "linf": (lambda images: (images + 9 / 255).clamp(0, 1), r"changed an image by 0.0353 .linf.; allowed is 0.0314"),
    "shape": (lambda images: images[..., ::2], r"made images of shape .* from .*; expected the same"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_an_attack_that_breaks_its_threat_is_refused(what, tmp_path, monkeypatch):
    change, message = CHANGES[what]
    own = Attack("own", lambda model, images, labels, threat, randomness: change(images / 255), own_steps=True)
    monkeypatch.setitem(ATTACKS, "own", own)
    sketch = open_dataset("synthetic", count=8).domain("sketch")
    with pytest.raises(InvalidValueError, match=message):
        attacked_copies(sketch, classifier(), ArrayStore(tmp_path), source="s", attack="own")
    assert not list(tmp_path.rglob("*.npy"))


def test_a_budget_is_measured_in_the_norm_of_the_threat():
    images = eight_bit() // 2
    own = Attack("own", lambda model, images, *_: (images + 1.0) / 255)
    threat = {"eps": EPS, "norm": "linf"}
    assert torch.equal(own.perturb(None, images, labels(), threat, None), images + 1)
    with pytest.raises(InvalidValueError, match=r"\(l2\); allowed is 0.0314"):
        own.perturb(None, images, labels(), {**threat, "norm": "l2"}, None)


def test_draws_and_restarts_multiply_the_cost_of_an_attack():
    assert ATTACKS["pgd"].cost({"steps": 20}) == 60
    assert ATTACKS["eot"].cost({"steps": 10}) == 30
    assert ATTACKS["eot"].cost({"steps": 10, "draws": 8}) == 240
    assert ATTACKS["eot-margin"].cost({"steps": 100, "draws": 2, "restarts": 5}) == 4 * 100 * 2 * 5
    assert ATTACKS["apgd-eot"].cost({}) == 6 * 100 * 20
    assert ATTACKS["autoattack"].cost({"eps": EPS}) == 100


def test_an_attack_describes_itself():
    described = describe("eot-margin")
    assert described["through"] == "the deployed predictor"
    assert (described["steps"], described["options"]["momentum"]) == (100, 0.75)
    assert describe("transfer")["through"] == "a surrogate"
    assert (describe("autoattack")["steps"], describe("apgd-eot")["steps"]) == (None, 100)
    assert all(describe(name)["what"] for name in ATTACKS)
