import sqlite3

import pytest
import torch

from safer_tta.serve.journal import Answered, Journal, Stream
from safer_tta.serve.journal.rows import TABLES
from tests.serve.helpers import CHEAP, engine_of, pictures, send


def test_the_last_256_answers_are_kept(source_file, tmp_path):
    (image,) = pictures(1, 1)
    with engine_of(source_file, tmp_path, "a", "other", **CHEAP) as made:
        send(made, image, "other")
        for number in range(1, 260):
            send(made, image, key=f"k{number}")
        assert [report["number"] for report in made.journal.reports("local/a", 1000)] == list(range(4, 260))
        assert made.journal.answer("local/a", "k3") is None
        assert made.journal.answer("local/a", "k4") is not None
        assert made.journal.label("local/a", 3, [0]) is None
        assert len(made.journal.reports("local/other", 1000)) == 1


def test_the_journal_waits_for_the_disk_and_keeps_the_last_ten_thousand_events(tmp_path):
    journal = Journal(tmp_path, "v")
    # An answer must survive a power cut, which a test cannot cause; SQLite says what it waits for (2: full).
    assert journal.storage.read(lambda database: database.execute("pragma synchronous").fetchone()) == (2,)
    events = [(float(number), "anna", "a", "freeze") for number in range(10_020)]
    with sqlite3.connect(journal.storage.path) as database:
        insert = "insert into audit (time, owner, stream, what) values (?, ?, ?, ?)"
        database.executemany(insert, [(0.0, "bert", "b", "reset"), *events])
    journal.create(Stream("anna", "new", 0.0, 0.0, {"x": torch.zeros(1)}, 0))
    kept = journal.audit("anna", 100_000)
    assert (len(kept), kept[0]["what"], kept[-1]["time"]) == (10_000, "created", 21.0)
    assert [event["what"] for event in journal.audit("bert")] == ["reset"]  # busy owners displace only their own events
    journal.close()


def test_a_deleted_stream_leaves_only_its_audit(source_file, tmp_path):
    batches = pictures(9, 2)
    with engine_of(source_file, tmp_path, "a", "other") as made:
        send(made, batches[0], "other")
        for number, images in enumerate(batches):
            send(made, images, key=f"k{number}")
        made.delete("local/a").result()
        with sqlite3.connect(made.journal.storage.path) as database:
            for table, column in TABLES:
                assert {row[0] for row in database.execute(f"select {column} from {table}")} <= {"local/other"}
        made.create("local", "a").result()
        assert made.journal.reports("local/a", 100) == []
        assert send(made, batches[1], key="k0")["number"] == 1  # the keys of the old one are forgotten


def test_batches_of_several_streams_are_written_together_or_not_at_all(tmp_path):
    journal, answer = Journal(tmp_path, "v"), {"labels": [0], "report": {"number": 1}}
    streams = [Stream("anna", name, 0.0, 0.0, {"x": torch.zeros(1)}, 0) for name in "ab"]
    for stream in streams:
        journal.create(stream)
        stream.batches = 1
    broken = Answered(streams[1], {"report": float("nan")}, "k", "c")
    with pytest.raises(ValueError, match="JSON"):
        journal.commit_many([Answered(streams[0], answer, "k", "c"), broken])
    assert [stream["batches"] for stream in journal.describe("anna")] == [0, 0]
    assert journal.answer("anna/a", "k") is None
    journal.commit_many([Answered(stream, answer, "k", "c") for stream in streams])
    assert [stream["batches"] for stream in journal.describe("anna")] == [1, 1]
    assert [journal.answer(stream.id, "k") for stream in streams] == [(answer, "c")] * 2
    journal.close()
