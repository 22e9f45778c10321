"""The service, talked to over loopback: isolation, durability, limits, security, the contract."""

from __future__ import annotations

import io
import json
import random
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterable

import httpx
import numpy as np
import pytest
from PIL import Image

from safer_tta.client import Client, ServiceError
from safer_tta.errors import JournalError, TensorFileError
from safer_tta.serve import schemas
from safer_tta.serve.images import from_array, from_files
from safer_tta.serve.limits import Limits, RateLimit, Refused
from safer_tta.serve.server import check_address
from safer_tta.serve.tokens import Tokens
from tests.serve.helpers import SIDE, Replay, array_file, client, engine, image_file, pictures, serving

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def model(source_file):
    return source_file


@pytest.fixture(scope="module")
def server(source_file, tmp_path_factory):
    with serving(source_file, tmp_path_factory.mktemp("serve") / "served", "--rate", "100000") as running:
        yield running


@pytest.fixture
def asking(server):
    with client(server) as talking:
        yield talking


# --- a stream's life --------------------------------------------------------------------------------------------------


def test_a_streams_life(asking):
    made = asking.create("life")
    assert (made["batches"], made["state"], made["frozen"], made["accuracy"]) == (0, "hot", False, None)
    images = pictures(1, 6)[0]
    answer = asking.send("life", images)
    assert answer["number"] == 1
    assert answer["adapted"]
    assert len(answer["labels"]) == len(answer["classes"]) == len(answer["abstain"]) == len(answer["suspicion"]) == 6
    assert np.allclose(np.sum(answer["probabilities"], axis=1), 1, atol=1e-5)
    assert np.allclose(np.sum(answer["weights"], axis=0), 1, atol=1e-5)
    assert len(answer["report"]["views"]) == len(answer["report"]["reliability"]) == 5
    assert sum(answer["report"]["suspicion"]["histogram"]) == 6
    assert answer["model"] == asking.model()["version"]
    report = asking.label("life", 1, [*answer["labels"][:5], (answer["labels"][5] + 1) % 7])
    assert report["accuracy"] == pytest.approx(100 * 5 / 6)
    assert asking.stream("life")["accuracy"] == pytest.approx(100 * 5 / 6)
    assert asking.freeze("life")["frozen"]
    assert not asking.send("life", images)["adapted"]
    assert not asking.unfreeze("life")["frozen"]
    asking.rollback("life")
    asking.reset("life")
    assert [r["number"] for r in asking.reports("life")] == [1, 2]
    assert [e["what"] for e in asking.audit() if e["stream"] == "life"][:4] == [
        "reset", "rollback", "unfreeze", "freeze",
    ]  # fmt: skip
    asking.delete("life")
    with pytest.raises(ServiceError, match="no stream 'life'"):
        asking.stream("life")


def test_answers_have_the_shapes_of_the_api_page(asking):
    made = schemas.Stream.model_validate(asking.create("shapes"), strict=True)
    answer = schemas.Answer.model_validate(asking.send("shapes", pictures(1, 3)[0]), strict=True)
    assert answer.stream == made.name == "shapes"
    schemas.Report.model_validate(asking.label("shapes", 1, answer.labels), strict=True)
    for report in asking.reports("shapes"):
        schemas.Report.model_validate(report, strict=True)
    for stream in [*asking.streams(), asking.freeze("shapes")]:
        schemas.Stream.model_validate(stream, strict=True)
    schemas.Model.model_validate(asking.model(), strict=True)
    for event in asking.audit():
        schemas.Event.model_validate(event, strict=True)
    page = httpx.get(asking.url + "/openapi.json").json()
    assert {"Answer", "Audit", "Error", "Model", "Report", "Stream"} <= page["components"]["schemas"].keys()
    assert page["components"]["securitySchemes"]
    assert httpx.get(asking.url + "/docs").text.count("<tr>") > 15


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_files_of_every_format_are_resized(asking, kind):
    name = asking.create()["name"]
    assert len(asking.send(name, [image_file(90, kind), image_file(SIDE, kind)])["labels"]) == 2


def test_sixteen_bits_of_grey_are_not_clipped():
    ramp = np.linspace(0, 65535, SIDE * SIDE).reshape(SIDE, SIDE).astype(np.uint16)
    file = io.BytesIO()
    Image.fromarray(ramp).save(file, "PNG")
    (picture,) = from_files([file.getvalue()], SIDE, Limits())
    assert 126 < picture.mean() < 129


def test_grey_and_transparent_pictures_become_rgb(asking):
    name = asking.create()["name"]
    files = [image_file(mode=mode) for mode in ("L", "RGBA", "P", "1")]
    assert len(asking.send(name, files)["labels"]) == 4


def test_files_and_arrays_of_the_same_pixels_get_the_same_answer(asking, model):
    image = np.asarray(Image.open(io.BytesIO(image_file())))
    asking.create("twin")
    given = asking.send("twin", np.stack([image] * 2))["probabilities"]
    assert given == Replay(model, "twin")(np.stack([image.transpose(2, 0, 1)] * 2))
    fresh = Replay(model, "other-twin")
    asking.create("other-twin")
    files = asking.send("other-twin", [image_file()] * 2)["probabilities"]
    assert files == fresh(np.stack([image.transpose(2, 0, 1)] * 2))
    assert np.array_equal(from_files([image_file()], SIDE, Limits())[0], image.transpose(2, 0, 1))
    assert np.array_equal(from_array(array_file(image[None]), SIDE, Limits())[0], image.transpose(2, 0, 1))


def test_the_library_answers_the_same(asking, model):
    """Number for number, over rollbacks by hand, a freeze and a reset."""
    asking.create("same")
    replay = Replay(model, "same")
    batches = pictures(12, 5)
    for number, images in enumerate(batches):
        assert asking.send("same", images)["probabilities"] == replay(images)
        if number == 3:
            asking.freeze("same")
            replay.guard.freeze()
        if number == 5:
            asking.unfreeze("same")
            replay.guard.unfreeze()
        if number == 9:
            asking.rollback("same")
            replay.guard.rollback()
    asking.reset("same")
    fresh = Replay(model, "same")
    for images in batches[:3]:
        assert asking.send("same", images)["probabilities"] == fresh(images)


def test_a_batch_is_applied_once_however_often_it_is_sent(asking, model, server):
    asking.create("once")
    images, more = pictures(2, 4)
    first = asking.send("once", images, key="a")
    assert asking.send("once", images, key="a") == first
    raw = httpx.post(
        f"{server.url}/v1/streams/once/batches", content=array_file(images.transpose(0, 2, 3, 1)),
        headers={"Content-Type": "application/x-npy", "Idempotency-Key": "a"},
    )  # fmt: skip
    assert raw.headers["Idempotent-Replay"] == "true"
    with pytest.raises(ServiceError, match="other images") as refused:
        asking.send("once", more, key="a")
    assert refused.value.status == 409
    assert asking.stream("once")["batches"] == 1
    replay = Replay(model, "once")
    assert replay(images) == first["probabilities"]
    assert replay(more) == asking.send("once", more, key="b")["probabilities"]


def test_the_feed_tells_of_every_batch(asking):
    asking.create("feed")
    heard: list[int] = []

    def listen() -> None:
        with Client(asking.url) as other:
            for report in other.follow("feed"):
                heard.append(report["number"])
                if len(heard) == 3:
                    return

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while thread.is_alive() and time.monotonic() < deadline:
        asking.send("feed", pictures(1, 2)[0])
    thread.join(10)
    assert not thread.is_alive()
    assert heard == list(range(heard[0], heard[0] + 3))


def test_the_command_sends_a_folder_once(server, asking, tmp_path):
    for number in range(5):
        path = tmp_path / ("disc" if number % 2 else "ring") / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(image_file(SIDE + number))
    settings = ["--stream", "folder", "--url", server.url, "--batch", "2", "--labelled", "--json"]
    command = [sys.executable, "-m", "safer_tta.cli", "send", str(tmp_path), *settings]
    for _ in range(2):  # the second time everything has been answered before
        told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        assert (told["images"], told["batches"]) == (5, 3)
        assert asking.stream("folder")["batches"] == 3
        assert asking.stream("folder")["accuracy"] == pytest.approx(told["accuracy"])
    wrong = subprocess.run([*command[:4], str(tmp_path / "none"), *settings], capture_output=True, text=True)
    assert (wrong.returncode, "expected" in wrong.stderr) == (2, True)


# --- isolation --------------------------------------------------------------------------------------------------------


def test_a_hostile_stream_does_not_touch_the_others(asking, model):
    """Garbage and loud noise on one stream while two others go about their work: these are answered to the last bit as
    if they had been alone."""
    names = ["clean-1", "clean-2"]
    for name in [*names, "hostile"]:
        asking.create(name)
    stop = threading.Event()

    def attack() -> None:
        rng = np.random.default_rng(0)
        kinds = [
            lambda: rng.integers(256, size=(8, SIDE, SIDE, 3), dtype=np.uint8),
            lambda: np.zeros((8, SIDE, SIDE, 3), np.uint8),
            lambda: np.full((1, SIDE, SIDE, 3), 255, np.uint8),
        ]
        with Client(asking.url) as other:
            for number in range(100_000):
                if stop.is_set():
                    return
                other.send("hostile", kinds[number % 3]())
                if number % 5 == 0:
                    other.reset("hostile")

    thread = threading.Thread(target=attack, daemon=True)
    thread.start()
    batches = pictures(10, 4, seed=3)
    given = {name: [] for name in names}
    for images in batches:
        for name in names:
            given[name].append(asking.send(name, images)["probabilities"])
    stop.set()
    thread.join(30)
    assert asking.stream("hostile")["batches"] > 5
    for name in names:
        replay = Replay(model, name)
        assert given[name] == [replay(images) for images in batches]


def test_many_streams_at_once(server, model):
    """Sixty-four streams, all asking at the same time."""
    batches = pictures(3, 2, seed=9)
    answers: dict[str, list] = {}

    def talk(name: str) -> None:
        with client(server, retries=50) as mine:
            mine.create(name)
            answers[name] = [mine.send(name, images) for images in batches]

    threads = [threading.Thread(target=talk, args=(f"load-{number}",)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert len(answers) == 64
    for name in ("load-0", "load-31", "load-63"):
        replay = Replay(model, name)
        for images, answer in zip(batches, answers[name], strict=True):
            assert answer["probabilities"] == replay(images, learn=answer["adapted"])


def test_a_thousand_streams_are_parked_and_come_back(model, tmp_path):
    """With room for a few in memory."""
    first, second = pictures(2, 2, seed=4)
    with serving(model, tmp_path / "served", "--memory", "1", "--rate", "100000") as server, client(server) as asking:
        names = [f"parked-{number:04}" for number in range(1000)]
        early = {}
        for name in names:
            asking.create(name)
            early[name] = asking.send(name, first)["probabilities"]
        states = [stream["state"] for stream in asking.streams()]
        assert len(states) == 1000
        assert states.count("parked") > 900
        for name in names[::50]:
            replay = Replay(model, name)
            assert early[name] == replay(first)
            assert asking.send(name, second)["probabilities"] == replay(second)


# --- durability -------------------------------------------------------------------------------------------------------


def test_thirty_kills_lose_and_double_nothing(model, tmp_path):
    """SIGKILL at random moments under load; every batch is in the streams once, in order."""
    batches, names = pictures(90, 2, seed=7), ["one", "two", "three"]
    given: dict[str, list] = {name: [] for name in names}

    def talk(url: str, name: str) -> None:
        with Client(url, retries=0) as mine:
            _insist(lambda: mine.create(name), name)
            for number, images in enumerate(batches):
                given[name].append(_insist(lambda n=number, x=images: mine.send(name, x, key=f"{name}-{n}"), name))
                time.sleep(0.02)

    with serving(model, tmp_path / "served", "--rate", "100000") as server:
        threads = [threading.Thread(target=talk, args=(server.url, name), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        rng = random.Random(0)
        for _ in range(30):
            time.sleep(rng.uniform(0.05, 0.6))
            server.kill()
            server.start()
        for thread in threads:
            thread.join(200)
        with client(server) as asking:
            for name in names:
                assert asking.stream(name)["batches"] == len(given[name]) == len(batches)
                replay = Replay(model, name)
                for images, answer in zip(batches, given[name], strict=True):
                    assert answer["probabilities"] == replay(images, learn=answer["adapted"])


def _insist(ask, name):
    """Ask until the server is there; a stream that was created before the kill is there already."""
    while True:
        try:
            return ask()
        except ServiceError as error:
            if error.status == 409 and "already" in str(error):
                return {"name": name}
            if error.status not in (0, 429, 503):
                raise
            time.sleep(0.05)


def test_a_stop_finishes_and_a_start_goes_on(model, tmp_path):
    images, more = pictures(2, 3)
    with serving(model, tmp_path / "served") as server:
        with client(server) as asking:
            asking.create("again")
            before = asking.send("again", images)["probabilities"]
        assert server.stop() == 0
        server.start()
        with client(server) as asking:
            replay = Replay(model, "again")
            assert before == replay(images)
            assert asking.send("again", more)["probabilities"] == replay(more)


def test_what_cannot_be_written_is_not_answered_and_changes_nothing(model, tmp_path, monkeypatch):
    running = engine(model, tmp_path)
    images, more = pictures(2, 3)
    try:
        running.create("local", "full").result()
        first, _ = running.batch("local/full", images, None, "x").result()
        commit = running.journal.commit

        def full(*arguments):
            raise sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr(running.journal, "commit", full)
        with pytest.raises(sqlite3.OperationalError):
            running.batch("local/full", more, None, "y").result()
        monkeypatch.setattr(running.journal, "commit", commit)
        answer, _ = running.batch("local/full", more, None, "y").result()
        replay = Replay(model, "full")
        assert first["probabilities"] == replay(images)
        assert answer["number"] == 2
        assert answer["probabilities"] == replay(more)
    finally:
        running.stop()


def test_a_folder_of_another_model_or_damaged_is_refused(model, tmp_path):
    engine(model, tmp_path / "a").stop()
    with pytest.raises(JournalError, match="another model or method"):
        engine(model, tmp_path / "a", method="bn")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "streams.sqlite").write_bytes(b"not a database, certainly" * 100)
    with pytest.raises(JournalError, match="damaged"):
        engine(model, tmp_path / "b")


def test_a_folder_belongs_to_one_service(model, tmp_path):
    """Two would write over each other's streams."""
    running = engine(model, tmp_path)
    with pytest.raises(JournalError, match="in use by another"):
        engine(model, tmp_path)
    running.stop()
    engine(model, tmp_path).stop()


def test_a_stop_under_load_answers_everybody(model, tmp_path):
    """What waits is told to come back, the feed ends, the process leaves without a complaint."""
    with serving(model, tmp_path / "served", "--rate", "100000") as server:
        with client(server) as asking:
            asking.create("load")
        ended, statuses = threading.Event(), []

        def follow() -> None:
            with Client(server.url, retries=0) as other:
                for _ in other.follow("load"):
                    pass
            ended.set()

        def send() -> None:
            content = array_file(np.zeros((64, SIDE, SIDE, 3), np.uint8))
            statuses.append(
                httpx.post(server.url + "/v1/streams/load/batches", content=content, headers=NPY, timeout=60)
            )

        threads = [threading.Thread(target=work, daemon=True) for work in [follow, *[send] * 12]]
        for thread in threads:
            thread.start()
        time.sleep(1.0)
        assert server.stop() == 0
        for thread in threads:
            thread.join(30)
        assert ended.is_set()
        assert {answer.status_code for answer in statuses} <= {200, 503}
        assert len(statuses) == 12
        assert "Traceback" not in server.log.read_text()
        assert "timeout graceful shutdown exceeded" not in server.log.read_text()  # nobody had to be cut off


def test_a_damaged_stream_can_be_deleted(model, tmp_path):
    running = engine(model, tmp_path)
    running.create("local", "bad").result()
    running.stop()
    with sqlite3.connect(tmp_path / "streams.sqlite") as database:
        database.execute("update streams set state = ?, guard = '{'", [b"12345678 nonsense"])
    running = engine(model, tmp_path)
    try:
        assert [stream["name"] for stream in running.journal.describe("local")] == ["bad"]
        running.delete("local/bad").result()
        running.create("local", "bad").result()
        assert running.batch("local/bad", pictures(1, 2)[0], None, "x").result()[0]["number"] == 1
    finally:
        running.stop()


def test_a_damaged_state_is_an_error_of_that_stream_alone(model, tmp_path):
    running = engine(model, tmp_path)
    running.create("local", "bad").result()
    running.create("local", "good").result()
    running.stop()
    with sqlite3.connect(tmp_path / "streams.sqlite") as database:
        database.execute("update streams set state = ? where name = 'bad'", [b"12345678 nonsense"])
    running = engine(model, tmp_path)
    try:
        images = pictures(1, 2)[0]
        with pytest.raises(TensorFileError):
            running.batch("local/bad", images, None, "x").result()
        assert running.batch("local/good", images, None, "x").result()[0]["number"] == 1
    finally:
        running.stop()


# --- limits -----------------------------------------------------------------------------------------------------------


def test_a_full_queue_says_when_to_come_back(model, tmp_path):
    running = engine(model, tmp_path, limits=Limits(queue=3, stream_queue=2, owner_queue=3))
    hold = threading.Event()
    try:
        running.submit("local/x", hold.wait)
        time.sleep(0.1)
        running.submit("local/x", hold.wait)
        with pytest.raises(Refused) as one:
            running.submit("local/x", hold.wait)
        running.submit("local/y", hold.wait)
        with pytest.raises(Refused, match="of this owner"):
            running.submit("local/z", hold.wait)
        running.submit("other/z", hold.wait)
        with pytest.raises(Refused, match="as much to do") as whole:
            running.submit("third/z", hold.wait)
        assert (one.value.status, whole.value.status) == (429, 429)
        assert one.value.retry_after >= 1
    finally:
        hold.set()
        running.stop()


def test_behind_it_answers_without_learning(model, tmp_path):
    running = engine(model, tmp_path, limits=Limits(behind=2))
    images = pictures(6, 2)
    hold = threading.Event()
    try:
        running.create("local", "late").result()
        running.submit("local/late", hold.wait)
        waiting = [running.batch("local/late", batch, None, "x") for batch in images]
        hold.set()
        answers = [future.result()[0] for future in waiting]
        replay = Replay(model, "late")
        assert [a["adapted"] for a in answers] == [False, False, False, False, True, True]
        for batch, answer in zip(images, answers, strict=True):
            assert answer["probabilities"] == replay(batch, learn=answer["adapted"])
    finally:
        running.stop()


def test_states_too_large_for_the_memory_are_not_served(model, tmp_path):
    with pytest.raises(ValueError, match="adapts less"):
        engine(model, tmp_path, method="pl", limits=Limits(memory_bytes=10_000))
    running = engine(model, tmp_path / "b", limits=Limits(disk_bytes=200_000))
    try:
        made = (running.create("local", f"s{number}").result() for number in range(50))
        with pytest.raises(Refused, match="no room"):
            list(made)
        made_so_far = [stream["name"] for stream in running.journal.describe("local")]
        assert 2 < len(made_so_far) < 49
        for name in made_so_far:
            running.delete(f"local/{name}").result()
        running.create("local", "again").result()  # what was deleted left room
    finally:
        running.stop()


def test_a_start_that_failed_leaves_the_folder_to_the_next(model, tmp_path):
    with pytest.raises(ValueError, match="adapts less") as refused:
        engine(model, tmp_path, method="pl", limits=Limits(memory_bytes=10_000))
    engine(model, tmp_path).stop()
    with pytest.raises(JournalError, match="another model or method") as also_refused:
        engine(model, tmp_path, method="bn")
    engine(model, tmp_path).stop()
    assert refused.value is not also_refused.value  # both are still referenced: nobody's collector freed the folder


def test_memory_is_kept_by_whatever_wakes_a_stream(model, tmp_path):
    first = engine(model, tmp_path)
    for number in range(8):
        first.create("local", f"s{number}").result()
    one = first.state_bytes
    first.stop()
    running = engine(model, tmp_path, limits=Limits(memory_bytes=3 * one))
    try:
        for number in range(8):
            running.change(f"local/s{number}", "freeze").result()
            assert 1 <= len(running._hot) <= 6
            assert sum(stream.nbytes for stream in running._hot.values()) <= 3 * one
    finally:
        running.stop()


def test_a_rate_limit_fills_again():
    now = [0.0]
    limit = RateLimit(2.0, clock=lambda: now[0])
    for _ in range(4):
        limit.take("a")
    with pytest.raises(Refused) as refused:
        limit.take("a")
    assert 0 < refused.value.retry_after <= 0.5
    limit.take("b")
    now[0] += 0.5
    limit.take("a")


# --- who may ask ------------------------------------------------------------------------------------------------------


def test_tokens_and_owners(model, tmp_path):
    (tmp_path / "tokens.json").write_text(json.dumps({"anna": "a" * 20, "bert": "b" * 20}))
    with serving(model, tmp_path / "served", "--tokens", str(tmp_path / "tokens.json")) as server:
        with client(server, "a" * 20) as anna, client(server, "b" * 20) as bert:
            anna.create("mine")
            with pytest.raises(ServiceError, match="no stream"):
                bert.stream("mine")
            bert.create("mine")  # a name is taken by its owner alone
            assert [s["owner"] for s in bert.streams()] == ["bert"]
            anna.send("mine", pictures(1, 2)[0])
            assert bert.stream("mine")["batches"] == 0
            assert {e["owner"] for e in bert.audit()} == {"bert"}
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic " + "a" * 20}):
            for path in ("/v1/streams", "/v1/model", "/v1/audit"):
                answer = httpx.get(server.url + path, headers=header)
                assert answer.status_code == 401
                assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert httpx.get(server.url + "/healthz").status_code == 200


def test_tokens_that_are_none(tmp_path):
    same = '{"a": "0123456789abcdef", "b": "0123456789abcdef"}'
    blank = '{"a": "                    "}'
    for content in ("", "[]", "{}", '{"a/b": "0123456789abcdef"}', '{"a": "short"}', same, blank):
        (tmp_path / "tokens.json").write_text(content)
        with pytest.raises(ValueError, match="expected"):
            Tokens.read(tmp_path / "tokens.json")


def test_a_page_of_another_site_is_refused(server):
    """Neither by a request a browser sends for it, nor under a name that leads here."""
    for headers in (
        {"Origin": "https://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Host": "evil.example"},
        {"Host": f"evil.example:{server.port}", "Origin": "http://evil.example"},
    ):
        for verb in ("get", "post"):
            assert httpx.request(verb, server.url + "/v1/streams", headers=headers).status_code == 403, headers
    own = {"Origin": server.url, "Sec-Fetch-Site": "same-origin"}
    assert httpx.get(server.url + "/v1/streams", headers=own).status_code == 200


def test_no_token_no_reading(model, tmp_path):
    """Who has no token is told so before his body or his headers fill the memory."""
    (tmp_path / "tokens.json").write_text(json.dumps({"anna": "a" * 20}))
    with serving(model, tmp_path / "served", "--tokens", str(tmp_path / "tokens.json")) as server:
        for content in (b"{", b"x" * 10_000_000):
            answer = httpx.post(server.url + "/v1/streams", content=content)
            assert answer.status_code == 401
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as line:
            assert cut_off(line, [b"GET / HTTP/1.1\r\n", *[b"X: " + b"x" * 1000 + b"\r\n"] * 1000])
        assert httpx.get(server.url + "/healthz").status_code == 200


def cut_off(line: socket.socket, parts: Iterable[bytes]) -> bool:
    """Whether the other side ends a conversation that never does; where it reads on for ever, the socket times out."""
    try:
        for part in parts:
            line.sendall(part)
        return line.recv(100).startswith(b"HTTP/1.1 4") or line.recv(1) == b""
    except ConnectionError:  # it has closed while we were still talking
        return True


def test_pixels_are_counted_over_the_whole_batch():
    with pytest.raises(Refused, match="the batch has 8192 pixels"):
        from_files([image_file()] * 2, SIDE, Limits(batch_pixels=8000))


def test_only_loopback_goes_without_tokens():
    for host in ("127.0.0.1", "::1", "localhost"):
        check_address(host, Tokens())
    for host in ("0.0.0.0", "192.168.1.5", "example.org"):
        with pytest.raises(ValueError, match="--tokens"):
            check_address(host, Tokens())
        check_address(host, Tokens({"a": "0123456789abcdef"}))


def test_every_answer_is_dressed(server):
    for path in ("/", "/docs", "/v1/streams", "/nothing", "/metrics", "/dashboard/dashboard.js"):
        headers = httpx.get(server.url + path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "server" not in headers


def test_no_path_from_outside_reaches_the_files(server):
    for name in ("../app.py", "..%2fapp.py", "%2e%2e/app.py", "index.html", "/etc/passwd", "%2fetc%2fpasswd"):
        assert httpx.get(f"{server.url}/dashboard/{name}").status_code == 404


# --- malformed requests -----------------------------------------------------------------------------------------------

NPY = {"Content-Type": "application/x-npy"}
GOOD = np.zeros((2, SIDE, SIDE, 3), np.uint8)


def bomb() -> bytes:
    """A whole picture of 25 megapixels in a few kilobytes; more than that, Pillow refuses by itself."""
    file = io.BytesIO()
    Image.new("1", (5000, 5000)).save(file, "PNG")
    return file.getvalue()


def claiming(shape: object, size: int = 100) -> bytes:
    """An array file whose header says more than it holds."""
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape!r}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"\0" * size


def pickled() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}, None], dtype=object), allow_pickle=True)
    return file.getvalue()


def multipart(*parts: tuple[str, str, bytes]) -> dict:
    return {"files": [(name, (filename, content)) for name, filename, content in parts]}


BATCHES = "/v1/streams/bad/batches"
FORM = "multipart/form-data; boundary=b"


def npy(content: bytes) -> dict:
    return {"content": content, "headers": NPY}


def typed(content: bytes, kind: str) -> dict:
    return {"content": content, "headers": {"Content-Type": kind}}


def keyed(key: str) -> dict:
    return {"content": array_file(GOOD), "headers": {**NPY, "Idempotency-Key": key}}


MALFORMED = {
    # what: (verb, path, arguments of the request)
    "batch: nothing": ("post", BATCHES, {}),
    "batch: json": ("post", BATCHES, {"json": {"images": []}}),
    "batch: text": ("post", BATCHES, typed(b"hello", "text/plain")),
    "batch: type without a slash": ("post", BATCHES, typed(b"x", "png")),
    "batch: image without multipart": ("post", BATCHES, typed(image_file(), "image/png")),
    "npy: nothing": ("post", BATCHES, npy(b"")),
    "npy: text": ("post", BATCHES, npy(b"hello")),
    "npy: magic alone": ("post", BATCHES, npy(b"\x93NUMPY")),
    "npy: version 9": ("post", BATCHES, npy(b"\x93NUMPY\x09\x00" + b"\0" * 50)),
    "npy: version 3": ("post", BATCHES, npy(b"\x93NUMPY\x03\x00" + b"\0" * 50)),
    "npy: header cut": ("post", BATCHES, npy(array_file(GOOD)[:40])),
    "npy: pixels cut": ("post", BATCHES, npy(array_file(GOOD)[:-1])),
    "npy: pixels left over": ("post", BATCHES, npy(array_file(GOOD) + b"x")),
    "npy: pickle": ("post", BATCHES, npy(pickled())),
    "npy: floats": ("post", BATCHES, npy(array_file(GOOD.astype(np.float32)))),
    "npy: int64": ("post", BATCHES, npy(array_file(GOOD.astype(np.int64)))),
    "npy: bool": ("post", BATCHES, npy(array_file(GOOD.astype(bool)))),
    "npy: text array": ("post", BATCHES, npy(array_file(np.array(["a"])))),
    "npy: scalar": ("post", BATCHES, npy(array_file(np.array(3, np.uint8)))),
    "npy: one image": ("post", BATCHES, npy(array_file(GOOD[0]))),
    "npy: five dimensions": ("post", BATCHES, npy(array_file(GOOD[None]))),
    "npy: no images": ("post", BATCHES, npy(array_file(GOOD[:0]))),
    "npy: grey": ("post", BATCHES, npy(array_file(GOOD[..., :1]))),
    "npy: four channels": ("post", BATCHES, npy(array_file(np.repeat(GOOD, 4, 3)[..., :4]))),
    "npy: another side": ("post", BATCHES, npy(array_file(np.zeros((2, 32, 32, 3), np.uint8)))),
    "npy: not square": ("post", BATCHES, npy(array_file(np.zeros((2, SIDE, 32, 3), np.uint8)))),
    "npy: too many": ("post", BATCHES, npy(claiming((100_000, SIDE, SIDE, 3)))),
    "npy: more than memory": ("post", BATCHES, npy(claiming((2**40, SIDE, SIDE, 3)))),
    "npy: a side of 8000 digits": ("post", BATCHES, npy(claiming((int("9" * 4000), SIDE, SIDE, 3)))),
    "npy: a truth for a side": ("post", BATCHES, npy(claiming((True, SIDE, SIDE, 3)))),
    "npy: negative": ("post", BATCHES, npy(claiming((-1, SIDE, SIDE, 3)))),
    "npy: sides that overflow": ("post", BATCHES, npy(claiming((1, 2**33, 2**33, 3)))),
    "npy: header that is code": ("post", BATCHES, npy(b"\x93NUMPY\x01\x00\x20\x00__import__('os').getcwd()       \n")),
    "form: no boundary": ("post", BATCHES, typed(b"x", "multipart/form-data")),
    "form: wrong boundary": ("post", BATCHES, typed(b"--a\r\n\r\nx\r\n--a--", FORM)),
    "form: cut": ("post", BATCHES, typed(b'--b\r\nContent-Disposition: form-data; name="images"\r\n\r\nxx', FORM)),
    "form: no disposition": ("post", BATCHES, typed(b"--b\r\nX: y\r\n\r\nx\r\n--b--\r\n", FORM)),
    "form: other names": ("post", BATCHES, multipart(("pictures", "a.png", image_file()))),
    "form: text for an image": ("post", BATCHES, {"data": {"images": "hello"}, "files": [("x", ("a.png", b""))]}),
    "form: empty file": ("post", BATCHES, multipart(("images", "a.png", b""))),
    "form: not an image": ("post", BATCHES, multipart(("images", "a.png", b"hello"))),
    "form: cut png": ("post", BATCHES, multipart(("images", "a.png", image_file()[:200]))),
    "form: cut jpeg": ("post", BATCHES, multipart(("images", "a.jpg", image_file(kind="JPEG")[:300]))),
    "form: gif": ("post", BATCHES, multipart(("images", "a.gif", image_file(kind="GIF")))),
    "form: bmp": ("post", BATCHES, multipart(("images", "a.bmp", image_file(kind="BMP")))),
    "form: tiff": ("post", BATCHES, multipart(("images", "a.tif", image_file(kind="TIFF")))),
    "form: svg": ("post", BATCHES, multipart(("images", "a.svg", b"<svg xmlns='http://www.w3.org/2000/svg'/>"))),
    "form: pdf": ("post", BATCHES, multipart(("images", "a.pdf", image_file(kind="PDF")))),
    "form: decompression bomb": ("post", BATCHES, multipart(("images", "a.png", bomb()))),
    "form: one good, one bad": ("post", BATCHES, multipart(("images", "a", image_file()), ("images", "b", b"x"))),
    "form: too many": ("post", BATCHES, multipart(*[("images", "a.png", b"x")] * 300)),
    "form: too many fields": (
        "post", BATCHES, {"data": {f"f{n}": "x" for n in range(50)}, "files": [("images", ("a.png", b"x"))]},
    ),
    "key: empty": ("post", BATCHES, keyed("")),
    "key: too long": ("post", BATCHES, keyed("k" * 129)),
    "key: spaces": ("post", BATCHES, keyed("a b")),
    "key: a tab": ("post", BATCHES, keyed("a\tb")),
    "batch: of no stream": ("post", "/v1/streams/none/batches", npy(array_file(GOOD))),
    "batches: last 0": ("get", BATCHES + "?last=0", {}),
    "batches: last 1000": ("get", BATCHES + "?last=1000", {}),
    "batches: last x": ("get", BATCHES + "?last=x", {}),
    "create: a list": ("post", "/v1/streams", {"json": []}),
    "create: a number": ("post", "/v1/streams", {"json": {"name": 5}}),
    "create: unknown field": ("post", "/v1/streams", {"json": {"nome": "a"}}),
    "create: empty name": ("post", "/v1/streams", {"json": {"name": ""}}),
    "create: long name": ("post", "/v1/streams", {"json": {"name": "a" * 65}}),
    "create: a path": ("post", "/v1/streams", {"json": {"name": "../../etc"}}),
    "create: a dot": ("post", "/v1/streams", {"json": {"name": "."}}),
    "create: a slash": ("post", "/v1/streams", {"json": {"name": "a/b"}}),
    "create: a newline": ("post", "/v1/streams", {"json": {"name": "a\n"}}),
    "create: null byte": ("post", "/v1/streams", {"json": {"name": "a\0b"}}),
    "create: not json": ("post", "/v1/streams", typed(b"{", "application/json")),
    "create: not utf-8": ("post", "/v1/streams", typed(b'{"name": "\xff"}', "application/json")),
    "create: deep json": ("post", "/v1/streams", typed(b"[" * 100_000, "application/json")),
    "create: there already": ("post", "/v1/streams", {"json": {"name": "bad"}}),
    "stream: unknown": ("get", "/v1/streams/none", {}),
    "stream: strange name": ("get", "/v1/streams/%00", {}),
    "stream: sql": ("get", "/v1/streams/a'%20or%20'1'='1", {}),
    "delete: unknown": ("delete", "/v1/streams/none", {}),
    "reset: unknown": ("post", "/v1/streams/none/reset", {}),
    "rollback: unknown": ("post", "/v1/streams/none/rollback", {}),
    "reset: by get": ("get", "/v1/streams/bad/reset", {}),
    "do what": ("post", "/v1/streams/bad/explode", {}),
    "labels: of a batch that is not there": ("put", BATCHES + "/7/labels", {"json": {"labels": [0]}}),
    "labels: of batch 0": ("put", BATCHES + "/0/labels", {"json": {"labels": [0]}}),
    "labels: of batch x": ("put", BATCHES + "/x/labels", {"json": {"labels": [0]}}),
    "labels: of batch 10^30": ("put", BATCHES + f"/{10**30}/labels", {"json": {"labels": [0]}}),
    "labels: none": ("put", BATCHES + "/1/labels", {"json": {"labels": []}}),
    "labels: too few": ("put", BATCHES + "/1/labels", {"json": {"labels": [0]}}),
    "labels: negative": ("put", BATCHES + "/1/labels", {"json": {"labels": [0, -1]}}),
    "labels: no class": ("put", BATCHES + "/1/labels", {"json": {"labels": [0, 7]}}),
    "labels: words": ("put", BATCHES + "/1/labels", {"json": {"labels": ["disc", "ring"]}}),
    "labels: fractions": ("put", BATCHES + "/1/labels", {"json": {"labels": [0.5, 1.0]}}),
    "labels: nothing": ("put", BATCHES + "/1/labels", {}),
    "nowhere": ("get", "/v2/streams", {}),
    "by another verb": ("patch", "/v1/streams", {}),
}  # fmt: skip


@pytest.fixture(scope="module")
def bad_stream(server):
    with client(server) as asking:
        asking.create("bad")
        asking.send("bad", GOOD)
    return server


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_request_is_told_what_was_expected(bad_stream, what):
    verb, path, arguments = MALFORMED[what]
    answer = httpx.request(verb, bad_stream.url + path, timeout=60, **arguments)
    assert 400 <= answer.status_code < 500, answer.text
    assert len(answer.json()["error"]) > 8
    assert "Traceback" not in answer.text
    with client(bad_stream) as asking:
        assert asking.stream("bad")["batches"] == 1  # nothing was learnt


def test_there_are_many_of_them():
    assert len(MALFORMED) >= 60


def test_a_body_without_an_end_is_cut_off(bad_stream):
    """It says nothing of its length, so it is counted as it comes."""

    def endless():
        for _ in range(200):
            yield b"\0" * 2**20

    address = bad_stream.url + BATCHES
    assert httpx.post(address, content=endless(), headers=NPY, timeout=60).status_code == 413
    with socket.create_connection(("127.0.0.1", bad_stream.port)) as line:  # a length nobody would send
        line.sendall(f"POST {BATCHES} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {2**40}\r\n\r\n".encode())
        assert line.recv(100).startswith(b"HTTP/1.1 413")
    labels = httpx.put(bad_stream.url + BATCHES + "/1/labels", content=b"[" + b"1," * 2**20, headers={})
    assert labels.status_code == 413


def test_half_a_request_holds_nobody_up(server, asking):
    """Connections that never finish their request, and one that does."""
    asking.create("patient")
    lines = []
    for _ in range(50):
        line = socket.create_connection(("127.0.0.1", server.port))
        head = f"POST /v1/streams/patient/batches HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {NPY['Content-Type']}"
        line.sendall(f"{head}\r\nContent-Length: 1000000\r\n\r\nhalf".encode())
        lines.append(line)
    assert asking.send("patient", GOOD)["number"] == 1
    for line in lines:
        line.close()


def test_no_request_of_the_schemas_breaks_the_service(server):
    """Requests made up from the OpenAPI page: right ones, wrong ones, strange ones."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= 15
    for operation in operations:
        if operation.path.endswith("/reports"):  # a feed does not end by itself
            continue

        @given(case=operation.as_strategy())
        @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
        def answered(case):
            answer = case.call(timeout=30)
            assert answer.status_code < 500, answer.text

        answered()
