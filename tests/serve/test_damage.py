"""Damage to what is stored: it is found, said, listed and counted, and it concerns only the stream that it is in."""

import random
import shutil
import sqlite3
from collections import deque
from contextlib import closing

import httpx
import pytest
import torch

from safer_tta._internal import safetensors_io
from safer_tta.client import Client, ServiceError
from safer_tta.errors import DamagedStreamError, JournalError
from safer_tta.serve.journal import Journal, Stream, check
from tests.serve.helpers import Replay, engine_of, pictures, send, serving

PLAIN = {"predictor": "plain"}
CHANGES = {
    "a state of another stream": "update states set state = (select state from states where stream = 'local/good')",
    "guard": "update states set guard = replace(guard, '\"judged\": 9', '\"judged\": 8')",
    "text that is none": "update states set guard = cast(x'80ff' as text)",
    "no JSON": "update states set guard = '{'",
    "batches": "update streams set batches = batches - 1",
    "images": "update streams set images = images + 1",
    "labelled": "update streams set labelled = 100",
    "right": "update streams set right = right + 1",
    "frozen": "update streams set frozen = 1",
    "seed": "update streams set seed = seed + 1",
    "versions": "update streams set versions = '[]'",
    "no state": "delete from states",
    "another type": "update streams set images = 'many'",
    "snapshot": "update snapshots set state = zeroblob(9) where stream = 'local/bad'",
    "a snapshot less": "delete from snapshots where id = (select min(id) from snapshots where stream = 'local/bad')",
    "a snapshot that moved": "update snapshots set stream = 'local/bad' where stream = 'local/good'",
}


@pytest.fixture(scope="module")
def stored(source_file, tmp_path_factory):
    """A folder with two streams of nine batches, one with a snapshot of its guard."""
    folder = tmp_path_factory.mktemp("stored")
    with engine_of(source_file, folder, "bad", "good", **PLAIN) as made:
        for number, images in enumerate(pictures(9, 2)):
            send(made, images, "bad", key=f"k{number}")
            send(made, images, "good")
        made.journal.label("local/bad", 9, [0, 1])
    return folder


@pytest.fixture
def folder(stored, tmp_path):
    shutil.copytree(stored, tmp_path / "served")
    return tmp_path / "served"


def change(folder, *queries):
    with closing(sqlite3.connect(folder / "streams.sqlite")) as database, database:
        for query in queries:
            assert database.execute(query).rowcount > 0


def on_bad(query):
    if query.startswith("update streams"):
        return f"{query} where name = 'bad'"
    return query if query.count("where stream") == 1 and "snapshots" in query else f"{query} where stream = 'local/bad'"


@pytest.mark.parametrize("what", CHANGES)
def test_any_changed_column_of_a_stream_is_found_and_reset_puts_it_right(what, source_file, folder, caplog):
    (images,) = pictures(1, 2, seed=3)
    change(folder, on_bad(CHANGES[what]))
    assert list(check(folder).damaged) == (
        ["local/bad", "local/good"] if what == "a snapshot that moved" else ["local/bad"]
    )
    with engine_of(source_file, folder, **PLAIN) as made:
        for ask in (lambda: send(made, images, "bad"), lambda: made.change("local/bad", "rollback").result()):
            with pytest.raises(DamagedStreamError, match="Reset the stream, or delete it"):
                ask()
        states = {stream["name"]: stream["state"] for stream in made.describe("local")}
        assert states["bad"] == "damaged"
        made.change("local/bad", "reset").result()
        answer, replay = send(made, images, "bad"), Replay(source_file, "bad", **PLAIN)
        assert (answer["number"], answer["probabilities"]) == (10, replay(images))
        assert made.describe("local", "bad")[0]["state"] == "hot"
    assert "local/bad" not in check(folder).damaged
    assert "stream local/bad is damaged" in caplog.text


def test_a_damaged_stream_is_said_over_http_and_counted(source_file, folder):
    (images,) = pictures(1, 2)
    change(folder, on_bad(CHANGES["batches"]))
    with serving(source_file, folder, "--predictor", "plain") as server, Client(server.url, retries=0) as client:
        assert count(server) == 1
        for ask in (lambda: client.send("bad", images), lambda: client.rollback("bad")):
            with pytest.raises(ServiceError, match="damaged") as refused:
                ask()
            assert refused.value.status == 409
        assert [stream["state"] for stream in client.streams()] == ["damaged", "parked"]
        assert client.send("good", images)["number"] == 10
        assert client.reset("bad")["state"] == "hot"
        assert count(server) == 0
        assert client.send("bad", images)["number"] == 10
        assert "Traceback" not in server.log.read_text()


def count(server):
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith("safer_tta_streams_damaged ")).split()[1])


@pytest.mark.parametrize("column", ["answer", "report", "content", "right", "key"])
def test_a_changed_answer_is_not_given_again(column, source_file, folder):
    images = pictures(9, 2)[4]
    change(folder, f"update answers set {column} = 'x' where stream = 'local/bad' and number = 5")
    assert check(folder).answers == {"local/bad": [5]}
    with engine_of(source_file, folder, **PLAIN) as made:
        assert [report["number"] for report in made.journal.reports("local/bad", 9)] == [1, 2, 3, 4, 6, 7, 8, 9]
        with pytest.raises(DamagedStreamError, match="batch 5 is damaged"):
            send(made, images, "bad", key="x" if column == "key" else "k4")
        with pytest.raises(DamagedStreamError, match="batch 5 is damaged"):
            made.journal.label("local/bad", 5, [0, 0])
        assert send(made, images, "bad")["number"] == 10


@pytest.mark.parametrize("what", ["missing", "renamed", "swapped", "not finite"])
def test_a_state_of_another_method_is_found_though_every_hash_fits(what, source_file, tmp_path):
    """As a service of another version might have written it: the hashes are those of the wrong tensors."""
    (images,) = pictures(1, 2)
    with engine_of(source_file, tmp_path, "a", **PLAIN) as made:
        send(made, images)
    with engine_of(source_file, tmp_path, **PLAIN) as made:
        stream = made.journal.load("local/a")
        name = next(name for name in stream.state if name.endswith("exp_avg_sq"))
        if what == "not finite":
            stream.state[name].fill_(torch.inf)
        elif what == "swapped":
            other = next(n for n in stream.state if stream.state[n].shape != stream.state[name].shape)
            stream.state[name], stream.state[other] = stream.state[other], stream.state[name]
        else:
            tensor = stream.state.pop(name)
            stream.state |= {} if what == "missing" else {f"{name[:-1]}r": tensor}
        made.journal.change(stream, "freeze")
        with pytest.raises(DamagedStreamError):
            send(made, images)
        assert made.describe("local")[0]["state"] == "damaged"
        made.change("local/a", "reset").result()
        assert send(made, images)["number"] == 2


def test_no_changed_byte_of_a_row_goes_unnoticed(tmp_path):
    """Bytes of the pages change, as on a failing disk. What is read afterwards is what was written, or an error."""
    journal = Journal(tmp_path / "first", "v")
    for name in "abc":
        stream = Stream("anna", name, 1.0, 2.0, {"x": torch.arange(700.0)}, 5)
        journal.create(stream)
        stream.memory.healthy, stream.memory.recent = [(3, {"x": torch.ones(300)})], deque([torch.ones(2, 3)])
        stream.batches = 1
        journal.commit(stream, {"labels": [0], "report": {"number": 1}}, "k", "c")
    journal.close()
    content, rng, found = (tmp_path / "first" / "streams.sqlite").read_bytes(), random.Random(1), 0
    written = look(tmp_path / "first")
    for number in range(300):
        folder = tmp_path / str(number)
        folder.mkdir()
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 1, 40))):
            damaged[rng.randrange(100, len(damaged))] ^= 1 << rng.randrange(8)
        (folder / "streams.sqlite").write_bytes(damaged)
        try:
            seen = look(folder)
        except JournalError:
            found += 1
            continue
        for name in "abc":
            assert seen[name] in (written[name], None, "damaged")
        found += seen != written
        shutil.rmtree(folder)
    assert found > 100  # most other bytes are in pages that are free, and in the audit


def look(folder):
    """Return what is read of every stream: its tensors and its answer, None where it is gone, or that it is damaged."""
    journal, seen = Journal(folder, "v"), {}
    try:
        for name in "abc":
            try:
                stream = journal.load(f"anna/{name}")
                answer = journal.answer(f"anna/{name}", "k")
            except DamagedStreamError:
                seen[name] = "damaged"
            else:
                seen[name] = stream and (safetensors_io.dumps(stream.state), stream.batches, stream.seed, str(answer))
        journal.describe("anna")
    finally:
        journal.close()
    return seen


def test_a_damaged_page_of_the_table_leaves_readiness_red_and_no_traceback(source_file, tmp_path):
    """The review's example: 600 bytes of noise at page 4, the root of the table of streams."""
    (images,) = pictures(1, 2)
    with engine_of(source_file, tmp_path / "served", "a", **PLAIN):
        pass
    with closing(sqlite3.connect(tmp_path / "served" / "streams.sqlite")) as database:
        (root,) = database.execute("select rootpage from sqlite_master where name = 'streams'").fetchone()
    with open(tmp_path / "served" / "streams.sqlite", "r+b") as file:
        file.seek(4096 * (root - 1))
        file.write(random.Random(0).randbytes(600))
    with serving(source_file, tmp_path / "served", "--predictor", "plain") as server:
        ready = httpx.get(f"{server.url}/readyz")
        assert (ready.status_code, "damaged" in ready.json()["error"]) == (503, True)
        with Client(server.url, retries=0) as client, pytest.raises(ServiceError) as refused:
            client.send("a", images)
        assert refused.value.status in (404, 409, 503)
        assert "Traceback" not in server.log.read_text()


def test_other_streams_go_on_beside_a_damaged_page(source_file, tmp_path):
    (images,) = pictures(1, 2)
    names = [f"s{number:02d}" for number in range(40)]
    with engine_of(source_file, tmp_path, *names, **PLAIN) as made:
        for name in names:
            send(made, images, name)
    path = tmp_path / "streams.sqlite"
    with closing(sqlite3.connect(path)) as database:
        (root,) = database.execute("select rootpage from sqlite_master where name = 'states'").fetchone()
    content = bytearray(path.read_bytes())
    page = int.from_bytes(content[4096 * (root - 1) + 8 : 4096 * (root - 1) + 12], "big")  # the last leaf of the table
    assert content[4096 * (root - 1)] == 5, "the table has one page only"
    content[4096 * (page - 1) : 4096 * page] = random.Random(0).randbytes(4096)
    path.write_bytes(content)
    with engine_of(source_file, tmp_path, **PLAIN) as made:
        states = {stream["name"]: stream["state"] for stream in made.describe("local")}
        damaged = {name for name, state in states.items() if state == "damaged"}
        assert list(states) == names
        assert 0 < len(damaged) < len(names) / 2
        for name in names:
            if name in damaged:
                with pytest.raises(JournalError):
                    send(made, images, name)
            else:
                assert send(made, images, name)["number"] == 2
