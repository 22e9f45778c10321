"""The harness of benchmarks/chaos.py: it sees what a service loses, doubles or changes, and leaves nothing behind."""

import contextlib
import json
import os
import re
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from safer_tta.client import Client
from tests.benchmarks.conftest import SCRIPTS

FAIR = [[0.75, 0.25]]
IMAGES = [np.zeros((1, 8, 8, 3), np.uint8)]


@contextlib.contextmanager
def service(trouble):
    """Something that answers like the service, and does this to its third batch."""
    answers, batches = {}, []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def reply(self, status, content):
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            self.reply(200, {"batches": len(batches)})

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            key = self.headers["Idempotency-Key"]
            third = len(batches) == 2 and key not in answers and not done.is_set()
            if third:
                done.set()
            if third and trouble == "fails":
                self.reply(500, {"error": "the service failed"})
                return
            if key not in answers:
                batches.extend([key] * (2 if third and trouble == "doubles" else 1))
                shown = [[0.74, 0.26]] if third and trouble == "differs" else FAIR
                answers[key] = {"number": len(batches), "probabilities": shown, "adapted": True}
            self.reply(200, answers[key])
            if third and trouble == "loses":  # as a restart from an older file would
                answers.pop(batches.pop())
            if third and trouble == "forgets":
                del answers[key]

    done = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def notice(script, monkeypatch):
    """Send batches to a service with some trouble, and return what the harness says of it."""
    chaos = script("chaos_clean")
    monkeypatch.setattr(chaos, "PAUSE", 0.01)

    def see(trouble, count=5):
        with service(trouble) as url, chaos.Clean(lambda: Client(url), "clean", IMAGES) as clean:
            until = time.monotonic() + 60
            while len(clean.answered) < count and time.monotonic() < until:
                time.sleep(0.01)
            clean.finish()
            row = clean.measure(script("chaos_service").Excuses()) | clean.audit() | clean.compare(lambda _: FAIR)
            return row | chaos.server_errors(clean.statuses)

    return see


def test_a_service_without_fault_is_given_none(notice):
    row = notice("")
    assert row["sent"] == row["answered"] == row["in_time"] == row["exact"] >= 5
    assert row["availability"] == 100
    faults = ("lost", "doubled", "different", "undocumented_5xx", "given_up", "retries")
    assert not any(row[fault] for fault in faults)


@pytest.mark.parametrize(
    ("trouble", "fault"),
    [("loses", "lost"), ("forgets", "lost"), ("doubles", "doubled"), ("differs", "different")],
)
def test_one_batch_that_is_not_kept_applied_or_answered_rightly_is_counted_as_what_it_is(notice, trouble, fault):
    row = notice(trouble)
    found = {name: row[name] for name in ("lost", "doubled", "different")}
    # Asking again for what was forgotten applies it again, which is what a client that repeats a key must not see.
    assert found == {"lost": 0, "doubled": 0, "different": 0, fault: 1}


def test_an_error_that_is_not_documented_counts_against_availability(notice):
    row = notice("fails")
    assert (row["errors_5xx"], row["undocumented_5xx"], row["given_up"], row["retries"]) == ("500:1", 1, 1, 1)
    assert row["in_time"] == row["answered"] - 1
    assert row["availability"] < 100


def test_documented_errors_are_told_from_others(script):
    counts = Counter({200: 9, 429: 3, 500: 2, 503: 4, 507: 1})
    found = script("chaos_clean").server_errors(counts)
    assert found == {"errors_5xx": "500:2 503:4 507:1", "undocumented_5xx": 2}


def test_time_that_is_excused_does_not_count_twice_or_at_all(script):
    excuses = script("chaos_service").Excuses()
    excuses.spans = [[10.0, 20.0], [12.0, 14.0], [18.0, 25.0], [40.0, float("inf")]]
    assert excuses.counted(0, 9) == 9
    assert excuses.counted(5, 30) == 10
    assert excuses.counted(13, 19) == 0
    assert excuses.counted(30, 50) == 10
    assert [excuses.cover(moment) for moment in (9, 13, 25, 30, 99)] == [False, True, True, False, True]


def test_verdicts_hold_only_if_every_phase_does(script):
    chaos = script("chaos")
    good = dict.fromkeys(chaos.FIELDS, "") | {"sent": "9", "availability": "99.50", "lost": "0", "p99_ratio": "2.00"}
    rows = [good | {"phase": "calm", "p99_ratio": ""}, good | {"phase": "flood"}]
    rows.append(dict.fromkeys(chaos.FIELDS, "") | {"phase": "full disk", "notes": "skipped: no root"})
    assert all(chaos.verdicts(rows).values())
    worse = {"lost": "1", "doubled": "2", "different": "1", "undocumented_5xx": "3", "availability": "98.90"}
    for field, value in {**worse, "p99_ratio": "3.10", "sent": ""}.items():
        broken = [
            what
            for what, holds in chaos.verdicts([*rows, good | {"phase": "flood", field: value}]).items()
            if not holds
        ]
        assert len(broken) == 1, field


def test_a_page_of_one_stream_is_spoilt_and_no_other(script, tmp_path):
    draws, file = np.random.default_rng(0), tmp_path / "streams.sqlite"
    shared = draws.bytes(20_000)  # states of streams have much in common
    states = {name: shared + draws.bytes(20_000) for name in ("clean/a", "hostile/sacrifice", "clean/b")}
    with contextlib.closing(sqlite3.connect(file)) as database, database:
        database.execute("create table states (stream text primary key, state blob)")
        database.executemany("insert into states values (?, ?)", states.items())
    script("chaos_faults")._spoil_page(file, "hostile/sacrifice")
    found = {}
    with contextlib.closing(sqlite3.connect(file)) as database:
        for name in states:
            with contextlib.suppress(sqlite3.DatabaseError):
                (found[name],) = database.execute("select state from states where stream = ?", [name]).fetchone()
    assert found.pop("hostile/sacrifice", b"") != states.pop("hostile/sacrifice")
    assert found == states


def test_a_full_disk_has_no_room_and_gets_it_back(script, tmp_path):
    disk = script("chaos_service").Disk(tmp_path / "disk")
    try:
        if disk.problem:
            pytest.skip(f"this user may mount nothing: {disk.problem}")
        with disk.full(), pytest.raises(OSError, match="No space left"):
            (disk.folder / "more").write_bytes(bytes(4096))
        (disk.folder / "more").write_bytes(bytes(4096))
    finally:
        disk.close()
    assert str(tmp_path) not in Path("/proc/mounts").read_text()


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_clock_of_a_process_jumps_while_the_others_count_on(script, tmp_path):
    clock, library = tmp_path / "clock", tmp_path / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, script("chaos_faults").CLOCK], check=True)
    clock.write_bytes(struct.pack("=q", 1_000_000_000))
    code = "import time, datetime; print(time.time(), datetime.datetime.now().timestamp(), time.monotonic())"
    told = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True,
        env={**os.environ, "LD_PRELOAD": str(library), "CHAOS_CLOCK": str(clock)},
    ).stdout.split()  # fmt: skip
    ahead = [float(told[0]) - time.time(), float(told[1]) - time.time(), float(told[2]) - time.monotonic()]
    assert [round(seconds, -3) for seconds in ahead] == [1e9, 1e9, 0]


def remains(folder):
    """Return what of a run that worked below this folder still runs or is mounted."""
    found = [line for line in Path("/proc/mounts").read_text().splitlines() if str(folder) in line]
    for words in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            text = words.read_text(errors="replace")
            found += [text] * ("chaos" in text and str(folder) in text)
    return found


@pytest.mark.timeout(600)
def test_a_service_is_disturbed_and_found_whole(run, script, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(script("chaos"), "AVAILABLE", 0.0)  # which depends on how busy this machine is
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest has its own handlers
    monkeypatch.setattr(script("chaos").torch, "set_num_threads", lambda _: None)
    options = ("--minutes", 0.5, "--phase", "kills", "slow uploads")
    rows = {row["phase"]: row for row in run("chaos", tmp_path / "rows.csv", *options)}
    assert list(rows) == ["calm", "slow uploads", "kills"]
    for row in rows.values():
        assert int(row["answered"]) > 0
        assert [row[fault] for fault in ("lost", "doubled", "different")] == ["0", "0", "0"]
        assert int(row["probes_answered"]) <= int(row["probes"])
        assert float(row["rss_mb"]) > 0
    assert re.match(r"[1-9]\d* kills", rows["kills"]["notes"])
    assert float(rows["kills"]["excused_s"]) > 0 == float(rows["calm"]["excused_s"])
    assert "200:" in rows["kills"]["hostile"]  # it was served as well
    assert not remains(tmp_path)
    assert {row["phase"]: row for row in run("chaos", tmp_path / "rows.csv", *options)} == rows, "nothing is run again"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_process_and_no_mount(tmp_path, number):
    command = [sys.executable, SCRIPTS / "chaos.py", "--minutes", "30", "--out", tmp_path / "rows.csv"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    ) as process:
        try:
            assert "calm" in process.stdout.readline()
            process.send_signal(number)
            process.communicate(timeout=120)
        finally:
            process.kill()
    assert not remains(tmp_path)
