import resource
import shutil
import signal
import time

import numpy as np
import pytest

from safer_tta.data import ArrayStore, StoreError
from safer_tta.data.store import digest
from tests.processes import CONTEXT, call, running


def numbers(first, last):
    return np.arange(first, last, dtype=np.uint8)[:, None] * np.ones((1, 5), np.uint8)


def slow_numbers(first, last):
    time.sleep(0.05)
    return numbers(first, last)


def get(folder, make=numbers, key=1, **options):
    return ArrayStore(folder).get({"x": key}, 50, make, **options)


def test_an_array_is_made_once_even_if_it_fails_on_the_way(tmp_path):
    made = []

    def make(first, last):
        made.append(first)
        if made == [0, 16, 32]:
            raise OSError(28, "No space left on device")
        return numbers(first, last)

    with pytest.raises(OSError, match="No space"):
        get(tmp_path, make, part=16)
    for _ in range(2):
        assert np.array_equal(get(tmp_path, make, part=16), numbers(0, 50))
    assert made == [0, 16, 32, 32, 48]


def test_a_damaged_array_is_refused_by_name(tmp_path):
    get(tmp_path)
    (path,) = tmp_path.rglob("array.npy")
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)
    with pytest.raises(StoreError, match=r"array\.npy.*hash differs"):
        get(tmp_path)
    path.write_bytes(raw[:100])
    with pytest.raises(StoreError, match=r"array\.npy is damaged"):
        get(tmp_path)


def test_another_array_in_its_place_is_refused(tmp_path):
    get(tmp_path)
    get(tmp_path, key=2)
    one, two = tmp_path.iterdir()
    shutil.rmtree(one)
    shutil.copytree(two, one)
    moved = 1 if digest({"x": 1, "count": 50, "part": 64}) == one.name else 2
    with pytest.raises(StoreError, match="something else"):
        get(tmp_path, key=moved)


@pytest.mark.parametrize("damage", ["flip", "foreign"])
def test_a_damaged_part_is_made_again(tmp_path, damage):
    def stop(first, last):
        if first == 32:
            raise KeyboardInterrupt
        return numbers(first, last)

    with pytest.raises(KeyboardInterrupt):
        get(tmp_path, stop, part=16)
    part = min(tmp_path.rglob("part-*.npy"))
    raw = bytearray(part.read_bytes())
    raw[-1] ^= 1
    part.write_bytes(raw)
    if damage == "foreign":
        np.save(part, numbers(0, 10))
    assert np.array_equal(get(tmp_path, part=16), numbers(0, 50))


def send_sum(folder, connection):
    connection.send(int(get(folder, slow_numbers, part=5).sum()))


def test_two_processes_share_a_store(tmp_path):
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(2)]
    with running(send_sum, tmp_path, pipes[0][1]), running(send_sum, tmp_path, pipes[1][1]):
        assert [receiver.recv() for receiver, _ in pipes] == [int(numbers(0, 50).sum())] * 2


def fill_disk(folder):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (128 + 240, 128 + 240))
    with pytest.raises(OSError, match="File too large"):
        get(folder)


def test_a_full_disk_is_reported_to_the_last_byte(tmp_path):
    """A limit on file sizes is a few bytes below the array's size: no file is left under its name."""
    assert call(fill_disk, tmp_path) == 0
    assert not list(tmp_path.rglob("*.npy"))


def make_slowly(folder, connection):
    connection.send("started")
    get(folder, slow_numbers, part=2)
    connection.send("done")


def test_an_array_survives_kills_at_any_moment(tmp_path):
    receiver, sender = CONTEXT.Pipe(duplex=False)
    for delay in (0.05, 0.15, 0.3):
        with running(make_slowly, tmp_path, sender) as process:
            assert receiver.recv() == "started"
            time.sleep(delay)
            process.kill()
            process.join()
            assert process.exitcode == -signal.SIGKILL
    assert 0 < len(list(tmp_path.rglob("part-*.npy"))) < 25
    assert call(make_slowly, tmp_path, sender) == 0
    assert [receiver.recv(), receiver.recv()] == ["started", "done"]
    assert np.array_equal(get(tmp_path, slow_numbers, part=2), numbers(0, 50))
