"""A stream that is attacked raises an alarm wherever an operator looks, once, until it is clean again."""

import contextlib
import json
import re
import sqlite3
import threading

import httpx
import pytest

from safer_tta.client import Client
from safer_tta.guards import KINDS
from safer_tta.serve import schemas
from safer_tta.serve.journal.checksums import hash_state
from safer_tta.serve.limits import Limits
from tests.serve.attacked import BATCH, clean, half_attacked
from tests.serve.helpers import CHEAP, engine_of, pictures, send, serving
from tests.serve.receiver import receiving

LONG_ENOUGH = 2 * 256 // BATCH  # clean batches after which the images before are forgotten


@pytest.fixture(scope="module")
def attacked(source_file):
    return half_attacked(source_file, 8)


def value(metrics: str, name: str) -> float:
    (found,) = re.findall(rf"^{re.escape(name)} (\S+)$", metrics, re.MULTILINE)
    return float(found)


def test_half_a_stream_attacked_is_an_alarm_everywhere_until_it_is_clean(source_file, tmp_path, attacked):
    secret = tmp_path / "secret"
    secret.write_text("s" * 24 + "\n")
    with receiving() as receiver:
        options = ["--webhook", receiver.url, "--webhook-secret", str(secret)]
        with serving(source_file, tmp_path / "served", *options) as server, Client(server.url) as asking:
            asking.create("gate")
            asking.create("clean")
            answers = [asking.send("gate", images) for images in attacked]
            for images in clean(8):
                assert asking.send("clean", images)["report"]["alarms"] == []

            stream = schemas.Stream.model_validate(asking.stream("gate"), strict=True)
            (alarm,) = stream.alarms
            assert alarm.kind == "attack"
            assert 0.3 < stream.suspicious < 0.6
            assert stream.abstained == sum(sum(answer["abstain"]) for answer in answers)
            report = answers[-1]["report"]
            assert [a["since"] for a in report["alarms"]] == [alarm.since]
            assert (report["suspicious"], report["alarm"]) == (stream.suspicious, "")
            assert report["suspicion"]["median"] is not None
            first = next(a["number"] for a in answers if a["report"]["alarms"])
            assert alarm.batch == first
            assert [(a["stream"], a["kind"]) for a in asking.alarms()] == [("gate", "attack")]
            raised = [event for event in asking.audit() if "alarm raised" in event["what"]]
            assert [event["stream"] for event in raised] == ["gate"]
            metrics = httpx.get(server.url + "/metrics").text
            assert value(metrics, 'safer_tta_alarms_active{kind="attack"}') == 1
            assert value(metrics, 'safer_tta_alarms_raised_total{kind="attack"}') == 1

            for images in clean(LONG_ENOUGH):
                last = asking.send("gate", images)["report"]
                if not last["alarms"]:
                    break
            assert last["alarms"] == asking.alarms() == asking.stream("gate")["alarms"] == []
            told = [(m["event"], m["stream"], m["alarm"]["kind"], m["alarm"]["batch"]) for m in receiver.wait_for(2)]
            assert told == [(event, "gate", "attack", first) for event in ("raised", "cleared")]
            assert receiver.verified("s" * 24)
            metrics = httpx.get(server.url + "/metrics").text
            assert value(metrics, 'safer_tta_alarms_active{kind="attack"}') == 0
            assert value(metrics, 'safer_tta_alarms_raised_total{kind="attack"}') == 1
            assert value(metrics, 'safer_tta_webhook_messages_total{result="sent"}') == 2


def test_alarms_outlive_a_restart_and_are_not_raised_again(source_file, tmp_path, attacked):
    with engine_of(source_file, tmp_path / "served", "a") as made:
        for images in attacked[:4]:
            send(made, images)
        before = made.alarms.of("local")
        assert [alarm["kind"] for alarm in before] == ["attack"]
    with engine_of(source_file, tmp_path / "served") as made:
        assert made.alarms.of("local") == before
        assert made.alarms.of("loca") == []
        assert made.metrics.alarms_active.labels("attack")._value.get() == 1
        report = send(made, attacked[4])["report"]
        assert [alarm["since"] for alarm in report["alarms"]] == [before[0]["since"]]
        assert made.metrics.alarms_raised.labels("attack")._value.get() == 0
        assert sum("alarm raised" in event["what"] for event in made.journal.audit("local")) == 1


def forget_watch(database: sqlite3.Connection) -> None:
    guard = json.loads(database.execute("select guard from states").fetchone()[0])
    del guard["watch"]
    database.execute("update states set guard = ?", [json.dumps(guard)])
    (version,) = database.execute("select version from states").fetchone()
    database.execute("update states set checksum = ?", [hash_state(database, "local/a", version)])


def test_a_stream_of_an_earlier_version_has_no_alarms_yet(source_file, tmp_path, attacked):
    with engine_of(source_file, tmp_path / "served", "a") as made:
        send(made, attacked[0])
        made.journal.storage.write(forget_watch)
    with engine_of(source_file, tmp_path / "served") as made:
        (stream,) = made.describe("local")
        assert (stream["alarms"], stream["suspicious"], stream["abstained"]) == ([], None, 0)
        for images in attacked[:4]:
            report = send(made, images)["report"]
        assert [alarm["kind"] for alarm in report["alarms"]] == ["attack"]


def test_an_alarm_of_a_batch_that_is_not_written_is_told_only_when_one_is(source_file, tmp_path, attacked, monkeypatch):
    with engine_of(source_file, tmp_path / "served", "a") as made:
        commit = made.journal.commit
        monkeypatch.setattr(made.journal, "commit", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        for images in attacked[:3]:
            with contextlib.suppress(OSError):
                send(made, images)
        assert made.alarms.of("local") == []
        monkeypatch.setattr(made.journal, "commit", commit)
        for images in attacked[:3]:
            send(made, images)
        assert made.metrics.alarms_raised.labels("attack")._value.get() == 1
        assert [alarm["kind"] for alarm in made.alarms.of("local")] == ["attack"]


def test_deleting_a_stream_clears_its_alarms_and_a_reset_does_not(source_file, tmp_path, attacked):
    with receiving() as receiver, engine_of(source_file, tmp_path / "served", "a", webhook=receiver.webhook()) as made:
        for images in attacked[:4]:
            send(made, images)
        made.change("local/a", "reset").result()
        assert len(made.alarms.of("local")) == 1
        made.delete("local/a").result()
        assert made.alarms.of("local") == []
        assert made.metrics.alarms_active.labels("attack")._value.get() == 0
        assert [message["event"] for message in receiver.wait_for(2)] == ["raised", "cleared"]


def test_a_predictor_without_suspicion_says_so(source_file, tmp_path):
    with engine_of(source_file, tmp_path / "served", "a", **CHEAP) as made:
        report = send(made, pictures(1, 4)[0])["report"]
        assert (report["suspicious"], report["alarms"]) == (None, [])
        (stream,) = made.describe("local")
        assert (stream["suspicious"], stream["abstained"]) == (None, 0)
        assert set(KINDS) == {"attack", "abstentions"}


def test_streams_that_are_answered_together_raise_alarms_of_their_own(source_file, tmp_path, attacked):
    """Also an alarm is on disk with its batch, and told once."""
    sent = {"gate": attacked, "yard": clean(len(attacked))}
    with engine_of(source_file, tmp_path / "served", *sent, limits=Limits(batch_streams=2)) as made:
        taken = []
        step = made.live.together.step
        made.live.together.step = lambda states, *given: taken.append(len(states)) or step(states, *given)
        for batches in zip(*sent.values(), strict=True):
            go = threading.Event()
            made.submit("local/held", go.wait)
            waiting = [
                made.batch(f"local/{name}", images, None, "") for name, images in zip(sent, batches, strict=True)
            ]
            go.set()
            reports = [future.result(60)[0]["report"] for future in waiting]
        assert taken == [2] * len(attacked)
        assert [[alarm["kind"] for alarm in report["alarms"]] for report in reports] == [["attack"], []]
        assert [alarm["stream"] for alarm in made.alarms.of("local")] == ["gate"]
        assert made.metrics.alarms_raised.labels("attack")._value.get() == 1
        events = [event["stream"] for event in made.journal.audit("local") if "alarm raised" in event["what"]]
        assert events == ["gate"]
