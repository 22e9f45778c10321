"""Backups, checks and journals of earlier versions."""

import json
import random
import sqlite3
from collections import Counter, deque
from contextlib import closing

import pytest
import torch

from safer_tta.client import Client
from safer_tta.errors import JournalError
from safer_tta.guards import Memory
from safer_tta.serve.journal import Journal, Stream, backup, check, restore, schema
from tests.processes import safer as command
from tests.serve import earlier
from tests.serve.helpers import Replay, engine_of, pictures, send, sending, serving

PLAIN = {"predictor": "plain"}


def test_a_backup_of_a_running_service_is_one_moment_of_it(source_file, tmp_path):
    """Batches go on while it is made. What is restored has every batch up to some number, and goes on from there."""
    batches = pictures(6, 2)
    with (
        serving(source_file, tmp_path / "served", "--rate", "100000", "--predictor", "plain") as server,
        Client(server.url) as client,
    ):
        client.create("a")
        for number, images in enumerate(batches[:5]):
            client.send("a", images, key=f"k{number}")
        client.create("busy")
        with sending(server.url, "busy"):
            for number in range(3):
                ended = command("serve", "backup", tmp_path / "served", tmp_path / f"backup-{number}", "--json")
                assert (ended.returncode, json.loads(ended.stdout)["streams"]) == (0, 2), ended.stderr
        client.delete("a")
    assert sorted(path.name for path in tmp_path.glob("*backup*")) == [f"backup-{number}" for number in range(3)]
    assert restore(tmp_path / "backup-2", tmp_path / "other").intact
    with engine_of(source_file, tmp_path / "other", **PLAIN) as made:
        replay = Replay(source_file, "a", **PLAIN)
        for images in batches[:5]:
            replay(images)
        answer = send(made, batches[5])
        assert (answer["number"], answer["probabilities"]) == (6, replay(batches[5]))
        assert made.batch("local/a", batches[0], "k0", "?").exception() is not None  # its key is known
        busy = made.journal.describe("local", "busy")[0]
        assert busy["batches"] == len(made.journal.reports("local/busy", 256))


def test_a_backup_is_put_only_where_there_is_no_journal(source_file, tmp_path):
    with engine_of(source_file, tmp_path / "served", "a", **PLAIN):
        backup(tmp_path / "served", tmp_path / "backup")
        with pytest.raises(JournalError, match="the journal itself"):
            backup(tmp_path / "served", tmp_path / "served" / "streams.sqlite")
        with pytest.raises(JournalError, match="in use"):
            restore(tmp_path / "backup", tmp_path / "served")
    with pytest.raises(JournalError, match="has a journal already"):
        restore(tmp_path / "backup", tmp_path / "served")
    damaged = bytearray((tmp_path / "backup").read_bytes())
    damaged[4096 * 3 : 4096 * 4] = random.Random(0).randbytes(4096)
    for content in (damaged, b"", b"no database " * 1000):
        (tmp_path / "damaged").write_bytes(content)
        with pytest.raises(JournalError, match="nothing was changed"):
            restore(tmp_path / "damaged", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_commands_say_what_they_found(source_file, tmp_path):
    with engine_of(source_file, tmp_path / "served", "a", "b", **PLAIN):
        pass
    ended = command("serve", "check", tmp_path / "served")
    assert (ended.returncode, ended.stdout) == (0, f"{tmp_path / 'served'} was checked: 2 streams, no damage found\n")
    with closing(sqlite3.connect(tmp_path / "served" / "streams.sqlite")) as database, database:
        database.execute("update streams set images = 7 where name = 'b'")
    ended = command("serve", "check", tmp_path / "served")
    assert (ended.returncode, "problem: stream local/b is damaged" in ended.stdout) == (1, True)
    ended = command("serve", "check", tmp_path / "served", "--json")
    assert (ended.returncode, list(json.loads(ended.stdout)["damaged"])) == (1, ["local/b"])
    # A stream can be reset; so a backup with a damaged one is made and restored, and said to be that.
    assert command("serve", "backup", tmp_path / "served", tmp_path / "backup").returncode == 1
    ended = command("serve", "restore", tmp_path / "backup", tmp_path / "again")
    assert (ended.returncode, "local/b" in ended.stdout) == (1, True)
    assert list(check(tmp_path / "again").damaged) == ["local/b"]
    ended = command("serve", "check", tmp_path / "nowhere")
    assert (ended.returncode, "does not exist" in ended.stderr) == (2, True)


@pytest.mark.parametrize("version", [1, 2])
def test_a_journal_of_an_earlier_version_is_migrated_and_a_copy_kept(version, tmp_path):
    state, snapshot = earlier.WRITERS[version](tmp_path / "served")
    for _ in range(2):  # the second time there is nothing to do
        journal = Journal(tmp_path / "served", "v")
        stream = journal.load("anna/a")
        assert torch.equal(stream.state["x"], state["x"])
        assert torch.equal(stream.memory.healthy[0][1]["x"], snapshot["x"])
        assert (stream.seed, stream.batches, stream.frozen, stream.memory.behind) == (7, 3, True, 0.5)
        assert journal.answer("anna/a", "k") == ({"labels": [0, 1]}, "c")
        assert journal.label("anna/a", 3, [0, 1])["accuracy"] == 100
        assert [event["what"] for event in journal.audit("anna")] == ["created"]
        with pytest.raises(JournalError, match="damaged"):
            journal.load("anna/b")
        journal.close()
        found = check(tmp_path / "served")
        assert (found.pages, found.damaged, found.answers) == ([], {}, {})  # what was nonsense before still is the same
    with closing(sqlite3.connect(tmp_path / "served" / f"streams.sqlite.schema-{version}")) as database:
        assert database.execute("select count(*) from streams").fetchone() == (2,)
        assert "versions" not in str(database.execute("select sql from sqlite_master").fetchall())
    with (
        closing(sqlite3.connect(tmp_path / "served" / "streams.sqlite")) as migrated,
        closing(sqlite3.connect(":memory:")) as made,
    ):
        schema.create(made, "v")
        assert columns(migrated) == columns(made)


def columns(database):
    tables = ("meta", "versions", "streams", "states", "snapshots", "shadowed", "answers", "audit")
    return {table: {row[1] for row in database.execute(f"pragma table_info({table})")} for table in tables}


def test_a_journal_that_names_no_model_is_not_migrated(tmp_path):
    earlier.write_second(tmp_path / "served")
    with closing(sqlite3.connect(tmp_path / "served" / "streams.sqlite")) as database, database:
        database.execute("delete from meta where name = 'version'")
    with pytest.raises(JournalError, match="which model"):
        Journal(tmp_path / "served", "v")


def test_what_was_damaged_before_a_migration_is_damaged_after_it(tmp_path):
    earlier.write_second(tmp_path / "served")
    with closing(sqlite3.connect(tmp_path / "served" / "streams.sqlite")) as database, database:
        database.execute("update streams set images = 7 where name = 'a'")
    journal = Journal(tmp_path / "served", "v")
    assert list(journal.damaged) == ["anna/a"]
    with pytest.raises(JournalError, match="damaged"):
        journal.load("anna/a")
    journal.close()


@pytest.mark.parametrize("version", [1, 2])
def test_a_migration_that_fails_changes_nothing(version, tmp_path, monkeypatch):
    earlier.WRITERS[version](tmp_path / "served")

    def stop(database):
        database.execute("alter table streams add column other text not null default ''")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setitem(schema.MIGRATIONS, version, stop)
        with pytest.raises(KeyboardInterrupt):
            Journal(tmp_path / "served", "v")
    Journal(tmp_path / "served", "v").close()


def test_a_journal_of_another_model_or_a_later_version_is_left_as_it_is(tmp_path):
    earlier.write_first(tmp_path / "served")
    with pytest.raises(JournalError, match="another model"):
        Journal(tmp_path / "served", "w")
    with closing(sqlite3.connect(tmp_path / "served" / "streams.sqlite")) as database:
        assert "checksum" not in columns(database)["streams"]
    Journal(tmp_path / "served", "v").close()
    with closing(sqlite3.connect(tmp_path / "served" / "streams.sqlite")) as database, database:
        database.execute("update meta set value = ? where name = 'schema'", [str(schema.SCHEMA + 1)])
    with pytest.raises(JournalError, match="newer safer-tta"):
        Journal(tmp_path / "served", "v")
    with pytest.raises(JournalError, match="newer safer-tta"):
        check(tmp_path / "served")


def test_what_a_guard_noted_of_the_last_answers_outlives_a_restart(tmp_path):
    memory = Memory(counters=Counter(batches=1), recent=deque([torch.ones(1, 2)]))
    memory.last.extend([0, 1, 1])
    stream = Stream("anna", "a", 1.0, 2.0, {"x": torch.ones(1)}, 3, memory)
    for folder in (tmp_path, tmp_path):
        journal = Journal(folder, "v")
        if not journal.exists("anna/a"):
            journal.create(stream)
        assert list(journal.load("anna/a").memory.last) == [0, 1, 1]
        journal.close()
