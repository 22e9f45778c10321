import shutil
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from safer_tta._internal.resizing import STRETCH, Resize
from safer_tta.data import DataError, open_dataset
from safer_tta.data.check import check
from safer_tta.data.decoding import decode
from safer_tta.data.domains import KNOWN, ImageFolder
from safer_tta.data.store import digest_file
from safer_tta.errors import UnknownNameError
from tests.conftest import PACS, needs_pacs
from tests.data.parts import image_folder, picture


@pytest.fixture
def root(tmp_path):
    return image_folder(tmp_path / "data")


def open_small(root, side=8):
    return open_dataset(root, side=side, cache=root.parent / "cache")


def test_any_folder_is_opened(tmp_path):
    data = open_small(image_folder(tmp_path / "Mine"))
    assert (data.name, data.domains, data.classes) == ("mine", ("one", "two"), ("cat", "dog"))
    one = data.domain("one")
    assert one.images.shape == (6, 3, 8, 8)
    assert one.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert tuple(one.images[4, :, 0, 0]) == (0, 80, 20)


def test_a_flat_folder_is_one_domain(root):
    one, whole = open_dataset(root / "one", flat=True, side=8, cache=root.parent / "cache"), open_small(root)
    assert (one.domains, one.classes) == (("one",), whole.classes)
    assert np.array_equal(one.domain("one").images, whole.domain("one").images)
    assert one.domain("one").labels.tolist() == whole.domain("one").labels.tolist()
    with pytest.raises(DataError, match="expected data/class/image"):
        open_dataset(root, flat=True)


def test_images_are_decoded_once_and_again_if_the_folder_changes(root):
    first = open_small(root).domain("two")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("safer_tta.data.domains.decode", lambda *_: pytest.fail("decoded again"))
        second = open_small(root).domain("two")
    assert isinstance(second.images, np.memmap)
    assert second.content == first.content
    picture(root / "two" / "cat" / "new.png")
    assert len(open_small(root).domain("two")) == len(first) + 1


def test_a_dataset_is_identified_by_side_and_contents(root):
    first = open_small(root).identity
    assert open_small(root).identity == first
    assert open_small(root, side=16).identity != first
    place = root / "two" / "dog" / "0.png"
    size = place.stat().st_size
    picture(place, (41, 80, 0))
    assert place.stat().st_size == size
    assert open_small(root).identity != first


@pytest.mark.parametrize("spelling", ["Real World", "RealWorld"])
def test_office_home_has_two_spellings(tmp_path, spelling):
    found = ImageFolder(image_folder(tmp_path, ("Art", "Clipart", "Product", spelling)))
    assert (found.name, [*found.places]) == ("officehome", ["art", "clipart", "product", "realworld"])


@pytest.mark.parametrize("splits", [("train", "test"), ("full", "train", "test")])
def test_vlcs_has_splits_between_domain_and_class(tmp_path, splits):
    for place in ("Caltech101", "LabelMe", "SUN09", "VOC2007"):
        for split in splits:
            image_folder(tmp_path / place, (split,), ("bird", "car"), count=2)
    found = ImageFolder(tmp_path)
    assert (found.name, found.classes) == ("vlcs", ("bird", "car"))
    assert len(found.files("caltech")) == (4 if "full" in splits else 8)


def test_official_numbers_add_up():
    for known in KNOWN.values():
        for official in known.domains.values():
            if official.per_class:
                assert sum(official.per_class) == official.images
                assert len(official.per_class) == known.classes
    counted = {name: sum(bool(o.per_class) for o in known.domains.values()) for name, known in KNOWN.items()}
    assert counted == {"pacs": 4, "vlcs": 4, "officehome": 0}


def test_what_is_missing_empty_or_too_deep_is_refused(root):
    with pytest.raises(UnknownNameError, match=r"domain 'tow' is unknown \(did you mean 'two'.*one, two"):
        open_dataset(root).domain("tow")
    with pytest.raises(DataError, match="not a folder"):
        open_dataset("/nowhere/at/all")
    with pytest.raises(DataError, match="expected one/domain/class/image"):
        check(root / "one")
    for file in (root / "two" / "dog").iterdir():
        file.unlink()
    with pytest.raises(DataError, match=r"two: no image in class 'dog'"):
        open_dataset(root)


def decompression_bomb(path):
    picture(path)
    raw = bytearray(path.read_bytes())
    raw[16:24] = (60000).to_bytes(4, "big") * 2
    raw[29:33] = zlib.crc32(raw[12:29]).to_bytes(4, "big")
    path.write_bytes(raw)


def truncated(path):
    Image.effect_noise((64, 64), 90).convert("RGB").save(path, "JPEG")
    path.write_bytes(path.read_bytes()[:600])


@pytest.mark.parametrize("damaged", [lambda path: path.write_bytes(b"not an image"), truncated, decompression_bomb])
def test_an_unreadable_image_is_reported_and_nothing_is_kept(root, damaged):
    damaged(root / "one" / "cat" / "bad.png")
    with pytest.raises(DataError, match=r"bad\.png"):
        open_small(root).domain("one")
    assert not list((root.parent / "cache").rglob("manifest.json"))
    (unreadable,) = check(root)["unreadable"]
    assert "bad.png" in unreadable


def test_a_broken_link_is_refused_by_name_before_anything_is_decoded(root):
    (root / "one" / "cat" / "gone.png").symlink_to(root / "nowhere.png")
    with pytest.raises(DataError, match=r"gone\.png is a link to a file that does not exist"):
        open_small(root)


def test_check_names_everything_that_is_wrong_and_goes_through_the_whole_folder(root):
    (root / "one" / "cat" / "gone.png").symlink_to(root / "nowhere.png")
    (root / "two" / "bird").symlink_to(root / "nowhere")
    (root / "two" / "cat" / "folder.png").mkdir()
    for file in (root / "two" / "dog").iterdir():
        file.unlink()
    found = check(root)
    assert found["counts"] == {"one": {"cat": 4, "dog": 3}, "two": {"cat": 4, "dog": 0}}
    (empty,) = found["empty"]
    assert "no image in class 'dog'" in empty
    assert len(found["unreadable"]) == 3
    for name in ("gone.png", "folder.png", "bird"):
        assert sum(name in problem for problem in found["unreadable"]) == 1
    assert len(found["files"]) == 11


def with_orientation(path, image, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(path, exif=exif)
    return path


@pytest.mark.parametrize("kind", ["png", "jpg", "webp", "tiff"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_stands_upright_however_the_camera_was_held(tmp_path, kind, orientation):
    """The reference is Pillow's own way of turning images."""
    image = Image.new("RGB", (12, 8))
    image.paste((250, 10, 10), (0, 0, 4, 4))
    image.paste((10, 10, 250), (8, 4, 12, 8))
    path = with_orientation(tmp_path / f"x.{kind}", image, orientation)
    with Image.open(path) as opened:
        upright = ImageOps.exif_transpose(opened)
    assert np.array_equal(decode(path, None), np.asarray(upright.convert("RGB")).transpose(2, 0, 1))
    assert decode(path, None).shape[1:] == ((12, 8) if orientation > 4 else (8, 12))


def test_only_a_dataset_with_turned_images_has_a_new_identity(root, monkeypatch):
    def hash_only(path):
        return digest_file(path)

    with monkeypatch.context() as patch:
        patch.setattr("safer_tta.data.domains._identify", hash_only)
        before = open_small(root).identity
    shutil.rmtree(root.parent / "cache")
    assert open_small(root).identity == before
    with_orientation(root / "two" / "dog" / "0.png", Image.new("RGB", (20, 16)), 6)
    with monkeypatch.context() as patch:
        patch.setattr("safer_tta.data.domains._identify", hash_only)
        before = open_small(root).identity
    shutil.rmtree(root.parent / "cache")
    assert open_small(root).identity != before


def test_a_damaged_exif_block_does_not_cost_the_image(tmp_path):
    Image.new("RGB", (12, 8)).save(tmp_path / "x.jpg", exif=b"Exif\0\0damaged beyond reading")
    assert decode(tmp_path / "x.jpg", None).shape == (3, 8, 12)


def test_an_image_of_floats_is_refused_instead_of_turning_black(tmp_path):
    Image.fromarray(np.full((8, 8), 0.5, np.float32)).save(tmp_path / "x.tiff")
    with pytest.raises(DataError, match=r"x\.tiff.*floating-point numbers"):
        decode(tmp_path / "x.tiff", None)


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
    assert (found["dataset"], found["differences"], found["unreadable"]) == ("pacs", [], [])
    assert sum(sum(counts.values()) for counts in found["counts"].values()) == 9991


def test_images_come_to_their_side_by_the_rule(tmp_path):
    """Another rule gives other images, a dataset of another identity, and its own files in the cache."""
    image_folder(tmp_path / "data")
    path = tmp_path / "data" / "one" / "cat" / "0.png"
    noise = np.random.default_rng(0).integers(256, size=(16, 24, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    stretched, cropped = (
        open_dataset(tmp_path / "data", side=16, resize=resize, cache=tmp_path) for resize in (STRETCH, Resize(1.0))
    )
    assert stretched.identity == open_dataset(tmp_path / "data", side=16, cache=tmp_path).identity
    assert stretched.identity != cropped.identity
    assert np.array_equal(cropped.domain("one").images[0], noise[:, 4:20].transpose(2, 0, 1))
    assert not np.array_equal(stretched.domain("one").images[0], cropped.domain("one").images[0])
