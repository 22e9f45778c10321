import numpy as np
import pytest

from safer_tta import load_classifier
from safer_tta.data import ArrayStore, excerpt
from safer_tta.errors import InvalidValueError
from safer_tta.training import attacked_copies, surrogate_recipe, train_surrogate
from safer_tta.training.trainer import accuracy


def change(copies, domain):
    return np.abs(copies.astype(int) - domain.images).max()


def test_attacked_copies_fool_the_surrogate_and_are_made_once(data, tmp_path):
    sketch = data.domain("sketch")
    surrogate = train_surrogate(sketch, surrogate_recipe("synthetic", steps=60, batch=32), tmp_path / "s")
    store = ArrayStore(tmp_path / "a")
    attacked = attacked_copies(sketch, surrogate, store, source="s")
    assert change(attacked, sketch) == 8
    assert accuracy(surrogate, sketch.images, sketch.labels) > 60
    assert accuracy(surrogate, attacked, sketch.labels) < 5
    assert change(attacked_copies(sketch, surrogate, store, source="s", threat={"eps": 4 / 255}), sketch) == 4
    attacked_copies(sketch, surrogate, store, source="s", tick=lambda *_: pytest.fail("made again"))
    assert len(list((tmp_path / "a").iterdir())) == 2
    with pytest.raises(InvalidValueError, match="8/255"):
        attacked_copies(sketch, surrogate, store, source="s", threat={"eps": 8})


def test_copies_depend_on_surrogate_seed_images_and_threat_and_live_attacks_make_none(data, trained, tmp_path):
    few, other = (excerpt(data.domain("sketch"), 4, seed) for seed in (0, 1))
    surrogate, store, usual = load_classifier(trained), ArrayStore(tmp_path), {"source": "one", "threat": {"steps": 1}}
    asked = [(few, {}), (few, {"source": "another"}), (few, {"seed": 1}), (other, {}), (few, {"threat": {"steps": 2}})]
    made = [attacked_copies(domain, surrogate, store, **{**usual, **how}) for domain, how in asked]
    assert len(list(tmp_path.iterdir())) == len(asked)
    assert not np.array_equal(made[0], made[2]), "another seed is another random start"
    for (domain, _), copies in zip(asked, made, strict=True):
        assert change(copies, domain) <= 8
    with pytest.raises(InvalidValueError, match=r"'eot' goes through the deployed predictor.*; expected"):
        attacked_copies(few, surrogate, store, source="s", attack="eot")
