import numpy as np
import pytest
from PIL import Image

from safer_tta.bench.report import View
from safer_tta.data import open_dataset
from safer_tta.training import source_recipe, surrogate_recipe


def shown(**facts):
    return View(np.zeros((3, 8, 8), np.uint8), "view 1", "cup", 0.9, True, **facts)


def test_a_view_is_described_by_its_reliability_weight_and_operators(script):
    words = script("picture").words
    assert words(shown()) == []
    found = words(shown(reliability=0.5, weight=0.25, operators=("blur", "flip")))
    assert found == ["reliability 0.50, weight 0.25", "blur", "flip"]
    assert words(shown(reliability=0.5, weight=0.0, dropped=True)) == ["reliability 0.50, dropped"]


def test_views_of_an_attacked_image_are_drawn(script, tmp_path, monkeypatch):
    """With models that have hardly learnt no image need be saved, so the one that is drawn is made up."""
    picture, asked = script("picture"), []
    monkeypatch.setattr(picture, "open_dataset", lambda name: open_dataset(name, count=28))
    monkeypatch.setattr(picture, "source_recipe", lambda name: source_recipe(name, steps=2, batch=4))
    monkeypatch.setattr(picture, "surrogate_recipe", lambda name: surrogate_recipe(name, steps=2, batch=4))
    found = picture.one_attacked_image
    monkeypatch.setattr(picture, "IMAGES", 20)
    monkeypatch.setattr(picture, "one_attacked_image", lambda *given: (asked.append(found(*given)), [shown()] * 3)[1])
    monkeypatch.setattr("sys.argv", ["picture.py", "--folder", str(tmp_path), "--out", str(tmp_path / "views.png")])
    picture.main()
    assert len(asked) == 1
    width, height = Image.open(tmp_path / "views.png").size
    assert width > height > 100


def test_a_stream_without_a_saved_image_is_an_error(script, tmp_path, monkeypatch, capsys):
    picture = script("picture")
    monkeypatch.setattr(picture, "views", lambda folder, target: [])
    monkeypatch.setattr("sys.argv", ["picture.py", "--folder", str(tmp_path), "--out", str(tmp_path / "views.png")])
    with pytest.raises(SystemExit):
        picture.main()
    assert "choose another --target" in capsys.readouterr().err
