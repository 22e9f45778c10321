"""Domains, stores and streams: layouts as they come, damage named by file, exactly so many attacked."""

from __future__ import annotations

import itertools
import math
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from safer_tta.data import (
    ArrayStore,
    DataError,
    Domain,
    StoreError,
    Stream,
    StreamSpec,
    excerpt,
    open_dataset,
    synthetic,
)
from safer_tta.data.domains import KNOWN, ImageFolder, check
from safer_tta.data.store import digest
from tests.conftest import PACS, needs_pacs


def picture(path, colour=(10, 200, 30), size=(20, 16)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def folder(root, domains=("one", "two"), classes=("cat", "dog"), count=3):
    for d, domain in enumerate(domains):
        for c, name in enumerate(classes):
            for i in range(count):
                picture(root / domain / name / f"{i}.png", (40 * d, 80 * c, 20 * i))
    return root


def domain(count=100, classes=4, name="d", offset=0):
    labels = np.arange(count, dtype=np.int64) % classes
    images = (np.arange(count, dtype=np.uint8)[:, None, None, None] + offset) * np.ones((1, 3, 2, 2), np.uint8)
    return Domain("test", name, images, labels, tuple("abcd"[:classes]), f"{name}{count}{offset}")


# --- the embedded data ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", synthetic.DOMAINS)
def test_synthetic_is_the_same_every_time(name):
    images, labels = synthetic.domain(name, 14, seed=3)
    again, _ = synthetic.domain(name, 7, seed=3)
    assert images.shape == (14, 3, 64, 64)
    assert images.dtype == np.uint8
    assert np.array_equal(images[:7], again)
    assert set(labels) == set(range(7))
    assert not np.array_equal(images, synthetic.domain(name, 14, seed=4)[0])


def test_synthetic_has_no_other_domain():
    with pytest.raises(ValueError, match="sketch"):
        synthetic.domain("clipart", 3)


# --- folders ----------------------------------------------------------------------------------------------------------


def test_any_folder(tmp_path):
    data = open_dataset(folder(tmp_path / "Mine"), side=8, cache=tmp_path / "cache")
    assert (data.name, data.domains, data.classes) == ("mine", ("one", "two"), ("cat", "dog"))
    one = data.domain("one")
    assert one.images.shape == (6, 3, 8, 8)
    assert one.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert tuple(one.images[4, :, 0, 0]) == (0, 80, 20)


def test_a_second_opening_decodes_nothing(tmp_path, monkeypatch):
    root = folder(tmp_path / "data")
    first = open_dataset(root, side=8, cache=tmp_path / "cache").domain("two")
    monkeypatch.setattr("safer_tta.data.domains.decode", lambda *_: pytest.fail("decoded again"))
    second = open_dataset(root, side=8, cache=tmp_path / "cache").domain("two")
    assert isinstance(second.images, np.memmap)
    assert second.content == first.content


def test_a_changed_folder_is_decoded_again(tmp_path):
    root = folder(tmp_path / "data")
    first = open_dataset(root, side=8, cache=tmp_path / "cache").domain("one")
    picture(root / "one" / "cat" / "new.png")
    assert len(open_dataset(root, side=8, cache=tmp_path / "cache").domain("one")) == len(first) + 1


@pytest.mark.parametrize("spelling", ["Real World", "RealWorld"])
def test_office_home_spellings(tmp_path, spelling):
    root = folder(tmp_path, ("Art", "Clipart", "Product", spelling))
    found = ImageFolder(root)
    assert found.name == "officehome"
    assert list(found.places) == ["art", "clipart", "product", "realworld"]


@pytest.mark.parametrize("splits", [("train", "test"), ("full", "train", "test")])
def test_vlcs_with_splits_between(tmp_path, splits):
    for place in ("Caltech101", "LabelMe", "SUN09", "VOC2007"):
        for split in splits:
            folder(tmp_path / place, (split,), ("bird", "car"), count=2)
    found = ImageFolder(tmp_path)
    assert found.name == "vlcs"
    assert found.classes == ("bird", "car")
    assert len(found.files("caltech")) == (4 if "full" in splits else 8)


def test_official_numbers_add_up():
    for known in KNOWN.values():
        for name, per_class in known.per_class.items():
            assert sum(per_class) == known.images[name]
            assert len(per_class) == known.classes


def test_an_empty_class_is_named(tmp_path):
    root = folder(tmp_path)
    shutil.rmtree(root / "two" / "dog")
    (root / "two" / "dog").mkdir()
    with pytest.raises(DataError, match=r"two: no image in class 'dog'"):
        open_dataset(root)


def test_a_wrong_domain_is_named(tmp_path):
    with pytest.raises(DataError, match=r"no domain 'three'; expected one of one, two"):
        open_dataset(folder(tmp_path)).domain("three")


@pytest.mark.parametrize("damage", ["garbage", "truncated"])
def test_an_unreadable_image_is_named_and_nothing_is_kept(tmp_path, damage):
    root = folder(tmp_path / "data")
    bad = root / "one" / "cat" / "bad.jpg"
    Image.effect_noise((64, 64), 90).convert("RGB").save(bad)
    bad.write_bytes(b"not an image" if damage == "garbage" else bad.read_bytes()[:600])
    with pytest.raises(DataError, match=r"bad\.jpg"):
        open_dataset(root, side=8, cache=tmp_path / "cache").domain("one")
    assert not list((tmp_path / "cache").rglob("manifest.json"))
    found = check(root)
    assert len(found["unreadable"]) == 1
    assert "bad.jpg" in found["unreadable"][0]


def test_no_folder():
    with pytest.raises(DataError, match="not a folder"):
        open_dataset("/nowhere/at/all")


def test_a_decompression_bomb_is_named(tmp_path):
    root = folder(tmp_path)
    bomb = root / "one" / "cat" / "bomb.png"
    picture(bomb)
    raw = bytearray(bomb.read_bytes())
    raw[16:24] = (60000).to_bytes(4, "big") * 2
    import zlib

    raw[29:33] = zlib.crc32(raw[12:29]).to_bytes(4, "big")
    bomb.write_bytes(raw)
    assert "bomb.png" in check(root)["unreadable"][0]


def test_sixteen_bit_grey_keeps_its_brightness(tmp_path):
    from safer_tta.data.domains import decode

    Image.fromarray(np.full((8, 8), 257 * 100, np.uint16)).save(tmp_path / "x.png")
    assert set(decode(tmp_path / "x.png", None).flatten()) == {100}


def test_check_compares_copies(tmp_path):
    one = check(folder(tmp_path / "a"))
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


# --- the store --------------------------------------------------------------------------------------------------------


def numbers(first, last):
    return np.arange(first, last, dtype=np.uint8)[:, None] * np.ones((1, 5), np.uint8)


def test_made_once(tmp_path):
    made = []

    def make(first, last):
        made.append(first)
        return numbers(first, last)

    for _ in range(2):
        array = ArrayStore(tmp_path).get({"what": "numbers"}, 50, make, part=16)
    assert np.array_equal(array, numbers(0, 50))
    assert made == [0, 16, 32, 48]


def test_goes_on_after_a_failure(tmp_path):
    def fail(first, last):
        if first == 32:
            raise OSError(28, "No space left on device")
        return numbers(first, last)

    with pytest.raises(OSError, match="No space"):
        ArrayStore(tmp_path).get({"x": 1}, 50, fail, part=16)
    made = []
    array = ArrayStore(tmp_path).get({"x": 1}, 50, lambda a, b: made.append(a) or numbers(a, b), part=16)
    assert made == [32, 48]
    assert np.array_equal(array, numbers(0, 50))


def test_a_damaged_array_is_refused_by_name(tmp_path):
    ArrayStore(tmp_path).get({"x": 1}, 50, numbers)
    (path,) = tmp_path.rglob("array.npy")
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)
    with pytest.raises(StoreError, match=r"array\.npy.*hash differs"):
        ArrayStore(tmp_path).get({"x": 1}, 50, numbers)
    path.write_bytes(raw[:100])
    with pytest.raises(StoreError, match=r"array\.npy is damaged"):
        ArrayStore(tmp_path).get({"x": 1}, 50, numbers)


def test_a_foreign_array_is_refused_by_name(tmp_path):
    ArrayStore(tmp_path).get({"x": 1}, 50, numbers)
    ArrayStore(tmp_path).get({"x": 2}, 50, numbers)
    one, two = tmp_path.iterdir()
    shutil.rmtree(one)
    shutil.copytree(two, one)
    moved = 1 if digest({"x": 1}) == one.name else 2
    with pytest.raises(StoreError, match="something else"):
        ArrayStore(tmp_path).get({"x": moved}, 50, numbers)


@pytest.mark.parametrize("damage", ["flip", "foreign"])
def test_a_damaged_part_is_made_again(tmp_path, damage):
    def stop(first, last):
        if first == 32:
            raise KeyboardInterrupt
        return numbers(first, last)

    with pytest.raises(KeyboardInterrupt):
        ArrayStore(tmp_path).get({"x": 1}, 50, stop, part=16)
    part = sorted(tmp_path.rglob("part-*.npy"))[0]
    raw = bytearray(part.read_bytes())
    raw[-1] ^= 1
    part.write_bytes(raw)
    if damage == "foreign":
        np.save(part, numbers(0, 10))
    assert np.array_equal(ArrayStore(tmp_path).get({"x": 1}, 50, numbers, part=16), numbers(0, 50))


def test_two_processes_share_a_store(tmp_path):
    code = """
        import sys, time
        from safer_tta.data import ArrayStore
        from tests.test_data import numbers
        def make(first, last):
            time.sleep(0.05)
            return numbers(first, last)
        print(ArrayStore(sys.argv[1]).get({"x": 1}, 100, make, part=10).sum())
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate() for process in both]
    assert answers[0][0] == answers[1][0] == f"{numbers(0, 100).sum()}\n", answers


def test_a_full_disk_is_reported_to_the_last_byte(tmp_path):
    """A limit on file sizes a few bytes below the array's: no file stands under its name."""
    code = """
        import resource, signal, sys
        from safer_tta.data import ArrayStore
        from tests.test_data import numbers
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (128 + 240, 128 + 240))
        try:
            ArrayStore(sys.argv[1]).get({"x": 1}, 50, numbers)
        except OSError as error:
            print("OSError", error.errno)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout.startswith("OSError"), result.stderr
    assert not list(tmp_path.rglob("*.npy"))


def test_killed_at_any_moment(tmp_path):
    """SIGKILL again and again: each process goes on where the last one stopped, and the array is the same."""
    code = """
        import sys, time, numpy as np
        from safer_tta.data import ArrayStore
        from tests.test_data import numbers
        def make(first, last):
            time.sleep(0.15)
            return numbers(first, last)
        print("on", flush=True)
        ArrayStore(sys.argv[1]).get({"x": 1}, 200, make, part=10)
        print("done", flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    for delay in (0.1, 0.4, 0.7):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "on\n"
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
    before = len(list(tmp_path.rglob("part-*.npy")))
    assert 0 < before < 20
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "on\ndone\n"
    assert np.array_equal(ArrayStore(tmp_path).get({"x": 1}, 200, numbers), numbers(0, 200))


# --- streams ----------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 150), batch=st.integers(1, 70), rate=st.integers(0, 100), seed=st.integers(0, 99))
def test_exactly_so_many_of_each_batch_are_attacked(count, batch, rate, seed):
    clean, attacked = domain(count), domain(count, offset=100).images
    stream = Stream([clean], StreamSpec(attack_rate=rate, batch=batch, seed=seed), [attacked])
    seen = []
    for images, labels, mask in stream:
        exact = rate / 100 * len(images)
        assert math.floor(exact) <= int(mask.sum()) <= math.ceil(exact - 1e-9)
        values = images[:, 0, 0, 0].int()
        original = torch.where(mask, (values - 100) % 256, values)
        assert torch.equal(original % 4, labels)
        seen += original.tolist()
    assert sorted(seen) == list(range(count))


def test_a_higher_rate_attacks_the_same_images_and_more():
    clean, attacked = domain(), domain(offset=100).images
    masks = [
        torch.cat([b.attacked for b in Stream([clean], StreamSpec(attack_rate=rate, batch=20), [attacked])])
        for rate in range(0, 101, 10)
    ]
    for less, more in itertools.pairwise(masks):
        assert (less <= more).all()


def test_bernoulli_draws_each_image():
    clean, attacked = domain(250), domain(250, offset=3).images
    spec = StreamSpec(attack_rate=20, draw="bernoulli", batch=25)
    counts = [int(b.attacked.sum()) for b in Stream([clean], spec, [attacked])]
    assert len(set(counts)) > 1
    assert 25 < sum(counts) < 75  # four standard deviations about 50


@pytest.mark.parametrize(("batch", "clean_batches"), [(10, 5), (20, 2), (100, 0)])
def test_late_attacks_start_half_way(batch, clean_batches):
    """A clean first half, rounded down to whole batches; then exactly so many of every batch."""
    spec = StreamSpec(attack_rate=30, draw="late", batch=batch)
    counts = [int(b.attacked.sum()) for b in Stream([domain()], spec, [domain(offset=9).images])]
    assert counts == [0] * clean_batches + [round(0.3 * batch)] * (len(counts) - clean_batches)


@pytest.mark.parametrize("order", ["shuffled", "correlated", "continual", "mixed"])
def test_every_seed_is_a_stream_of_its_own(order):
    """In the order of the images, and apart from that in who is attacked."""
    streams = [
        Stream([domain()], StreamSpec(order=order, attack_rate=30, batch=20, seed=seed), [domain(offset=9).images])
        for seed in range(6)
    ]
    assert len({stream.order.tobytes() for stream in streams}) == 6
    masks = [torch.cat([batch.attacked for batch in stream]) for stream in streams]
    assert len({tuple(mask.tolist()) for mask in masks}) == 6


def test_classes_take_turns_by_seed():
    firsts = set()
    for seed in range(6):
        labels = next(iter(Stream([domain()], StreamSpec(order="correlated", batch=100, seed=seed)))).labels
        firsts.add(tuple(labels.unique_consecutive().tolist()))
    assert all(sorted(turn) == [0, 1, 2, 3] for turn in firsts)
    assert len(firsts) > 2


def test_an_excerpt_is_images_with_their_labels_drawn_by_a_seed():
    whole = domain()
    one, again, other = (excerpt(whole, 30, seed) for seed in (1, 1, 2))
    assert np.array_equal(one.images[:, 0, 0, 0] % 4, one.labels)  # as `domain` labels them
    assert len(np.unique(one.images[:, 0, 0, 0])) == len(one) == 30
    assert np.array_equal(one.images, again.images)
    assert set(one.images[:, 0, 0, 0]) != set(other.images[:, 0, 0, 0])
    assert one.content == again.content
    assert len({whole.content, one.content, other.content, excerpt(whole, 20, 1).content}) == 4


def test_orders():
    two = [domain(60, name="a"), domain(40, name="b", offset=60)]
    shuffled = torch.cat([b.labels for b in Stream([two[0]], StreamSpec())])
    correlated = torch.cat([b.labels for b in Stream([two[0]], StreamSpec(order="correlated"))])
    assert (shuffled[1:] != shuffled[:-1]).sum() > 20
    assert (correlated[1:] != correlated[:-1]).sum() == 3
    continual = torch.cat([b.images[:, 0, 0, 0] for b in Stream(two, StreamSpec(order="continual"))])
    assert (continual[:60] < 60).all()
    assert (continual[60:] >= 60).all()
    mixed = torch.cat([b.images[:, 0, 0, 0] for b in Stream(two, StreamSpec(order="mixed"))])
    assert not (mixed[:60] < 60).all()
    kinds = torch.cat([b.labels for b in Stream(two, StreamSpec(order="mixed"))])
    assert (kinds[1:] != kinds[:-1]).sum() > 40  # unlike correlated ones


def test_one_stream_one_name():
    clean, attacked = domain(), domain(offset=9).images
    names = {
        Stream([clean], StreamSpec(attack_rate=rate, seed=seed), [attacked]).name
        for rate in (50, 50.0, np.float32(50))
        for seed in (1, np.int64(1))
    }
    assert len(names) == 1


def test_a_stream_follows_from_its_manifest():
    clean, attacked = domain(), domain(offset=9).images
    spec = StreamSpec(attack_rate=30, seed=5, limit=50, batch=16)
    one, two = Stream([clean], spec, [attacked]), Stream([clean], spec, [attacked])
    assert one.manifest() == two.manifest()
    assert one.name == two.name
    assert all(torch.equal(a.images, b.images) for a, b in zip(one, two, strict=True))
    assert sum(len(b.labels) for b in one) == 50
    assert one.name != Stream([clean], StreamSpec(attack_rate=30, seed=6, limit=50, batch=16), [attacked]).name
    assert one.name != Stream([clean], spec, [domain(offset=10).images]).name
    assert len(one) == 4
    for first in range(5):  # a run that goes on sees the batches it would have seen
        rest = zip(one.since(first), list(two)[first:], strict=True)
        assert all(torch.equal(a, b) for left, right in rest for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: StreamSpec(order="random"), "shuffled"),
        (lambda: StreamSpec(attack_rate=0.5 * 300), "0 to 100"),
        (lambda: StreamSpec(batch=0), "at least 1"),
        (lambda: StreamSpec(draw="some"), "bernoulli"),
        (lambda: Stream([domain()], StreamSpec(attack_rate=10)), "make them first"),
        (lambda: Stream([domain(), domain()], StreamSpec()), "continual"),
        (lambda: Stream([domain()], StreamSpec(attack_rate=10), [domain(7).images]), "expected"),
        (lambda: Stream([domain()], StreamSpec(attack_rate=10), []), "one each"),
    ],
)
def test_mistakes_are_named(call, says):
    with pytest.raises(DataError, match=says):
        call()


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_small_batches_keep_the_attack_rate(batch):
    """Half of single images is every other one on average, not none; and a higher rate attacks the same and more."""
    domain = open_dataset("synthetic", count=280).domain("sketch")

    def attacked(rate):
        spec = StreamSpec(attack_rate=rate, batch=batch, seed=3)
        return torch.cat([part.attacked for part in Stream([domain], spec, [domain.images])])

    shares = [float(attacked(rate).double().mean()) for rate in (0, 25, 50, 75, 100)]
    assert shares[0] == 0
    assert shares[-1] == 1
    assert all(abs(share - rate) < 0.1 for share, rate in zip(shares, (0, 0.25, 0.5, 0.75, 1), strict=True))
    for low, high in ((5, 20), (20, 50), (50, 95)):
        assert not (attacked(low) & ~attacked(high)).any()


def test_a_dataset_is_known_by_the_content_of_its_files(tmp_path):
    for label in "ab":
        for domain in "xy":
            folder = tmp_path / "data" / domain / label
            folder.mkdir(parents=True)
            Image.new("RGB", (8, 8), (10, 20, 30)).save(folder / "1.bmp")
    first = open_dataset(tmp_path / "data", side=8, cache=tmp_path / "cache").identity
    assert open_dataset(tmp_path / "data", side=8, cache=tmp_path / "cache").identity == first
    assert open_dataset(tmp_path / "data", side=16, cache=tmp_path / "cache").identity != first
    Image.new("RGB", (8, 8), (99, 20, 30)).save(folder / "1.bmp")  # the same size
    assert open_dataset(tmp_path / "data", side=8, cache=tmp_path / "cache").identity != first
