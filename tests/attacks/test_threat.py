import pytest

from safer_tta.attacks import full_threat
from safer_tta.errors import InvalidTypeError, InvalidValueError, UnknownNameError


def test_the_default_is_the_papers_and_an_attack_adds_its_own_options():
    assert full_threat() == {"eps": 8 / 255, "step": 2 / 255, "steps": 20, "norm": "linf"}
    assert full_threat("eot", draws=3) == {**full_threat(), "steps": 10, "draws": 3}
    assert full_threat("autoattack") == {"eps": 8 / 255, "norm": "linf"}, "it chooses its steps itself"
    assert full_threat("eot-margin", restarts=5) == {
        "eps": 8 / 255, "step": 1 / 255, "steps": 100, "norm": "linf",
        "draws": 8, "restarts": 5, "momentum": 0.75, "caution": 0.0, "target": None,
    }  # fmt: skip
    assert full_threat("apgd-eot", draws=3) == {"eps": 8 / 255, "norm": "linf", "draws": 3, "steps": 100}
    assert full_threat(norm="l2", eps=1.0)["step"] == pytest.approx(2.5 / 20)


def test_impossible_threats_are_refused():
    with pytest.raises(InvalidValueError, match=r"eps is missing.*no default; expected"):
        full_threat(norm="l2")
    with pytest.raises(UnknownNameError, match=r"attack 'pdg' is unknown .did you mean 'pgd'"):
        full_threat("pdg")
    with pytest.raises(InvalidTypeError, match=r"attack 'autoattack' has no option steps.*; expected .* eps, norm"):
        full_threat("autoattack", steps=3)
    with pytest.raises(InvalidValueError, match=r"eps is 8; expected .* write 8/255"):
        full_threat(eps=8)
