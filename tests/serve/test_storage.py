"""A disk that is full or read-only, a folder that goes away, and a second service on it."""

import contextlib
import os
import re
import shutil
import sqlite3
import subprocess
import time

import httpx
import pytest

from safer_tta.client import Client, ServiceError
from safer_tta.errors import JournalError, StorageError
from safer_tta.serve.journal import Journal, check
from tests.serve.helpers import CHEAP, NPY, Replay, array_file, engine_of, pictures, send, serving

REQUEST = re.compile(r" (GET|POST|PUT|DELETE) /")  # the line of an answered request
OPTIONS = ("--rate", "100000", "--method", "tent", "--predictor", "plain")


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 3 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place):
    """Leave no room on a disk."""
    with contextlib.suppress(OSError), open(place / "ballast", "wb", buffering=0) as file:
        while True:
            file.write(bytes(2**12))


def ready(url):
    answer = httpx.get(f"{url}/readyz")
    return answer.status_code, answer.json()


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def send_until_full(client, names, batches):
    """Send batches until one is refused; return the answers, and what was refused."""
    given = {name: [] for name in names}
    for number in range(10_000):
        name = names[number % len(names)]
        images = batches[len(given[name]) % len(batches)]
        try:
            given[name].append(client.send(name, images, key=f"{name}-{len(given[name])}"))
        except ServiceError as error:
            return given, name, error
    raise AssertionError("the disk did not fill")


@pytest.mark.parametrize("shadowed", [False, True])
def test_a_full_disk_is_said_and_left_again(shadowed, source_file, new_file, small_disk, tmp_path):
    """Nothing is half applied, readiness follows, deleting makes room, and every answer is the library's."""
    options = (*OPTIONS, "--shadow", str(new_file)) if shadowed else OPTIONS
    names, batches = [f"s{number}" for number in range(8)], pictures(5, 2)
    with (
        serving(source_file, small_disk, *options) as server,
        Client(server.url, retries=0) as client,
    ):
        for name in names:
            client.create(name)
        assert ready(server.url) == (200, {"status": "ok"})
        given, refused, error = send_until_full(client, names, batches)
        assert (error.status, "full" in str(error)) == (507, True)
        for _ in range(20):  # the same again changes nothing, and does not fill the log
            answer = post(server.url, refused, batches[0])
            assert (answer.status_code, answer.headers.get("retry-after")) == (507, "5")
        beside = [line for line in server.log.read_text().splitlines() if not REQUEST.search(line)]
        assert len(beside) < 10
        assert "Traceback" not in server.log.read_text()
        status, content = ready(server.url)
        assert (status, "full" in content["error"]) == (503, True)
        assert client.stream(refused)["batches"] == len(given[refused])
        for name in names[4:]:  # never more than the half is needed
            client.delete(name)
        wait_until(lambda: ready(server.url)[0] == 200)
        for name in names[:4]:
            images = batches[len(given[name]) % len(batches)]
            given[name].append(client.send(name, images, key=f"{name}-{len(given[name])}"))
        given = {name: given[name] for name in names[:4]}
        server.kill()
        assert check(small_disk).intact
    for name in given:
        replay = Replay(source_file, name, method="tent", predictor="plain")
        for number, answer in enumerate(given[name]):
            assert answer["number"] == number + 1
            assert answer["probabilities"] == replay(batches[number % len(batches)], learn=answer["adapted"])


def post(url, name, images):
    content = array_file(images)
    return httpx.post(f"{url}/v1/streams/{name}/batches", content=content, headers=NPY, timeout=60)


def test_a_disk_that_others_fill_recovers_by_itself(source_file, small_disk):
    (images,) = pictures(1, 2)
    with (
        serving(source_file, small_disk, *OPTIONS) as server,
        Client(server.url, retries=0) as client,
    ):
        for name in "abc":
            client.create(name)
            client.send(name, images)
        fill(small_disk)
        statuses = {post(server.url, "a", images).status_code for _ in range(60)}
        assert 507 in statuses <= {200, 507}
        assert ready(server.url)[0] == 503
        client.reset("b")
        client.delete("c")
        (small_disk / "ballast").unlink()
        wait_until(lambda: ready(server.url)[0] == 200)
        before = client.stream("a")["batches"]
        assert client.send("a", images)["number"] == before + 1


def test_a_disk_that_refuses_writes_is_said(source_file, tmp_path, caplog):
    """The connections of the journal may only read: SQLite then fails as it does on a disk that went read-only."""
    (images,) = pictures(1, 2)
    with engine_of(source_file, tmp_path / "served", "a", **CHEAP) as made:
        allow(made, False)
        for _ in range(20):
            with pytest.raises(StorageError, match="read-only"):
                send(made, images)
        assert len(caplog.records) == 1  # and no traceback for every batch
        assert "read-only" in made.readiness()["storage"]
        with pytest.raises(StorageError, match="read-only"):
            made.delete("local/a").result()
        allow(made, True)
        assert send(made, images)["number"] == 1
        wait_until(lambda: made.ready)


def allow(made, writing):
    def set_pragma():
        made.journal.storage._connect().execute(f"pragma query_only = {'off' if writing else 'on'}")

    set_pragma()
    made.submit("local/a", set_pragma).result()


def test_a_folder_that_is_deleted_under_the_service_takes_no_batches(source_file, tmp_path):
    (images,) = pictures(1, 2)
    with serving(source_file, tmp_path / "served", *OPTIONS) as server, Client(server.url, retries=0) as client:
        client.create("a")
        client.send("a", images)
        shutil.rmtree(tmp_path / "served")
        for _ in range(2):
            answer = post(server.url, "a", images)
            assert answer.status_code == 507
            assert "deleted" in answer.json()["error"]
        status, content = ready(server.url)
        assert (status, "deleted" in content["error"]) == (503, True)
        assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("end", ["", "-wal"])
def test_a_file_of_the_journal_that_is_deleted_or_replaced_is_noticed(source_file, tmp_path, end):
    (images,) = pictures(1, 2)
    with engine_of(source_file, tmp_path, "a", **CHEAP) as made:
        send(made, images)
        path = tmp_path / f"streams.sqlite{end}"
        content = path.read_bytes() if end else b""  # to open the file itself would end the locks of SQLite
        path.unlink()
        path.write_bytes(content)
        with pytest.raises(StorageError, match="replaced"):
            send(made, images)


def test_deleting_the_lock_lets_no_second_service_in(tmp_path):
    first = Journal(tmp_path, "v")
    for path in (tmp_path / "lock", tmp_path / "reserve"):
        path.unlink()
        with pytest.raises(JournalError, match="in use by another"):
            Journal(tmp_path, "v")
    first.close()
    Journal(tmp_path, "v").close()


def test_where_folders_cannot_be_locked_the_file_is(tmp_path, monkeypatch):
    import fcntl

    real = fcntl.flock

    def flock(opened, how):
        if os.path.isdir(f"/proc/self/fd/{opened}"):
            raise OSError(9, "Bad file descriptor")  # as over NFS
        return real(opened, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    first = Journal(tmp_path, "v")
    with pytest.raises(JournalError, match="in use by another"):
        Journal(tmp_path, "v")
    first.close()


def test_a_full_disk_at_the_start_is_said_in_words(tmp_path, monkeypatch):
    def full(database):
        raise error

    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    monkeypatch.setattr("safer_tta.serve.journal.schema.create", lambda database, version: full(database))
    with pytest.raises(StorageError, match="the disk is full"):
        Journal(tmp_path, "v")
    monkeypatch.undo()
    Journal(tmp_path, "v").close()
