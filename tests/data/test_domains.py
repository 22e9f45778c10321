"""Datasets: folders in the layouts in which they are published, and damage that is reported by file."""

from __future__ import annotations

import shutil
import zlib

import numpy as np
import pytest
from PIL import Image

from safer_tta.data import DataError, open_dataset
from safer_tta.data.domains import KNOWN, ImageFolder, check, decode
from safer_tta.errors import UnknownNameError
from tests.conftest import PACS, needs_pacs
from tests.data.parts import image_folder, picture


def open_small(root, cache, side=8):
    return open_dataset(root, side=side, cache=cache)


def test_any_folder_is_opened(tmp_path):
    data = open_small(image_folder(tmp_path / "Mine"), tmp_path / "cache")
    assert (data.name, data.domains, data.classes) == ("mine", ("one", "two"), ("cat", "dog"))
    one = data.domain("one")
    assert one.images.shape == (6, 3, 8, 8)
    assert one.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert tuple(one.images[4, :, 0, 0]) == (0, 80, 20)


def test_images_are_decoded_once(tmp_path, monkeypatch):
    root = image_folder(tmp_path / "data")
    first = open_small(root, tmp_path / "cache").domain("two")
    monkeypatch.setattr("safer_tta.data.domains.decode", lambda *_: pytest.fail("decoded again"))
    second = open_small(root, tmp_path / "cache").domain("two")
    assert isinstance(second.images, np.memmap)
    assert second.content == first.content


def test_a_changed_folder_is_decoded_again(tmp_path):
    root = image_folder(tmp_path / "data")
    first = open_small(root, tmp_path / "cache").domain("one")
    picture(root / "one" / "cat" / "new.png")
    assert len(open_small(root, tmp_path / "cache").domain("one")) == len(first) + 1


def test_a_dataset_is_identified_by_side_and_contents(tmp_path):
    root, cache = image_folder(tmp_path / "data", count=1), tmp_path / "cache"
    first = open_small(root, cache).identity
    assert open_small(root, cache).identity == first
    assert open_small(root, cache, side=16).identity != first
    place = root / "two" / "dog" / "0.png"
    size = place.stat().st_size
    picture(place, (41, 80, 0))
    assert place.stat().st_size == size
    assert open_small(root, cache).identity != first


@pytest.mark.parametrize("spelling", ["Real World", "RealWorld"])
def test_office_home_has_two_spellings(tmp_path, spelling):
    found = ImageFolder(image_folder(tmp_path, ("Art", "Clipart", "Product", spelling)))
    assert found.name == "officehome"
    assert list(found.places) == ["art", "clipart", "product", "realworld"]


@pytest.mark.parametrize("splits", [("train", "test"), ("full", "train", "test")])
def test_vlcs_has_splits_between_domain_and_class(tmp_path, splits):
    for place in ("Caltech101", "LabelMe", "SUN09", "VOC2007"):
        for split in splits:
            image_folder(tmp_path / place, (split,), ("bird", "car"), count=2)
    found = ImageFolder(tmp_path)
    assert found.name == "vlcs"
    assert found.classes == ("bird", "car")
    assert len(found.files("caltech")) == (4 if "full" in splits else 8)


def test_official_numbers_add_up():
    for known in KNOWN.values():
        for official in known.domains.values():
            if official.per_class:
                assert sum(official.per_class) == official.images
                assert len(official.per_class) == known.classes
    assert {name: sum(bool(o.per_class) for o in known.domains.values()) for name, known in KNOWN.items()} == {
        "pacs": 4, "vlcs": 4, "officehome": 0,
    }  # fmt: skip


def test_an_empty_class_is_reported(tmp_path):
    root = image_folder(tmp_path)
    shutil.rmtree(root / "two" / "dog")
    (root / "two" / "dog").mkdir()
    with pytest.raises(DataError, match=r"two: no image in class 'dog'"):
        open_dataset(root)


def test_unknown_domain_is_refused(tmp_path):
    with pytest.raises(UnknownNameError, match=r"domain 'tow' is unknown \(did you mean 'two'.*one, two"):
        open_dataset(image_folder(tmp_path)).domain("tow")


def test_a_missing_folder_is_refused():
    with pytest.raises(DataError, match="not a folder"):
        open_dataset("/nowhere/at/all")


def test_a_folder_too_deep_is_refused(tmp_path):
    with pytest.raises(DataError, match="expected one/domain/class/image"):
        check(image_folder(tmp_path) / "one")


@pytest.mark.parametrize("damage", ["garbage", "truncated"])
def test_an_unreadable_image_is_reported_and_nothing_is_kept(tmp_path, damage):
    root = image_folder(tmp_path / "data")
    bad = root / "one" / "cat" / "bad.jpg"
    Image.effect_noise((64, 64), 90).convert("RGB").save(bad)
    bad.write_bytes(b"not an image" if damage == "garbage" else bad.read_bytes()[:600])
    with pytest.raises(DataError, match=r"bad\.jpg"):
        open_small(root, tmp_path / "cache").domain("one")
    assert not list((tmp_path / "cache").rglob("manifest.json"))
    found = check(root)
    assert len(found["unreadable"]) == 1
    assert "bad.jpg" in found["unreadable"][0]


def test_a_decompression_bomb_is_reported(tmp_path):
    root = image_folder(tmp_path)
    bomb = root / "one" / "cat" / "bomb.png"
    picture(bomb)
    raw = bytearray(bomb.read_bytes())
    raw[16:24] = (60000).to_bytes(4, "big") * 2
    raw[29:33] = zlib.crc32(raw[12:29]).to_bytes(4, "big")
    bomb.write_bytes(raw)
    assert "bomb.png" in check(root)["unreadable"][0]


def test_sixteen_bit_grey_keeps_its_brightness(tmp_path):
    Image.fromarray(np.full((8, 8), 257 * 100, np.uint16)).save(tmp_path / "x.png")
    assert set(decode(tmp_path / "x.png", None).flatten()) == {100}


def test_check_compares_copies(tmp_path):
    one = check(image_folder(tmp_path / "a"))
    assert one["content"] == check(shutil.copytree(tmp_path / "a", tmp_path / "b"))["content"]
    picture(tmp_path / "b" / "one" / "cat" / "0.png", (1, 2, 3))
    assert one["content"] != check(tmp_path / "b")["content"]


@needs_pacs
def test_pacs_has_the_official_numbers():
    found = check(PACS)
    assert found["dataset"] == "pacs"
    assert found["differences"] == []
    assert found["unreadable"] == []
    assert sum(sum(counts.values()) for counts in found["counts"].values()) == 9991
