"""A roll-out from outside: the addresses, the client, the commands, kills in the middle of a switch."""

import asyncio
import functools
import json
import random
import time

import pytest
from starlette.requests import Request

from safer_tta.client import Client, ServiceError
from safer_tta.serve.app import create_app
from safer_tta.serve.cluster import Front, Shard
from safer_tta.serve.journal import check
from safer_tta.serve.limits import Limits
from safer_tta.serve.server import Service
from safer_tta.serve.tokens import Tokens
from tests.processes import safer as command
from tests.serve.helpers import (
    CHEAP,
    NPY,
    SEED,
    SIDE,
    Replay,
    array_file,
    converse,
    engine_of,
    meanwhile,
    pictures,
    serving,
)
from tests.serve.test_durability import insist
from tests.serve.test_metrics import scrape

OWNERS = Tokens({"anna": "a" * 20, "operator": "o" * 20})
ANNA, OPERATOR = ({"Authorization": f"Bearer {letter * 20}"} for letter in "ao")
ROLLOUT, SWITCH = "/v1/rollout", "/v1/rollout/switch"


def test_only_the_operator_may_look_and_switch(source_file, new_file, tmp_path):
    content = array_file(pictures(1)[0])

    async def talk(asking):
        for headers, status in ((ANNA, 403), ({}, 401)):
            for answer in (
                await asking.get(ROLLOUT, headers=headers), await asking.post(SWITCH, headers=headers, json={"to": "x"})
            ):  # fmt: skip
                assert answer.status_code == status
        assert "'operator'" in (await asking.get(ROLLOUT, headers=ANNA)).json()["error"]
        await asking.post("/v1/streams", json={"name": "a"}, headers=ANNA)
        answer = await asking.post("/v1/streams/a/batches", content=content, headers=NPY | ANNA)
        found = (await asking.get(ROLLOUT, headers=OPERATOR)).json()
        old, new = found["live"]["version"], found["shadow"]["version"]
        assert answer.json()["model"] == old
        assert [m for m in await scrape(asking, **OPERATOR) if m[0] == "owner_batches_total"]
        assert (await asking.post(SWITCH, headers=OPERATOR, json={"to": "other"})).status_code == 422
        for switched in (True, False):
            found = (await asking.post(SWITCH, headers=OPERATOR, json={"to": new})).json()
            assert (found["switched"], found["live"]["version"], found["shadow"]["version"]) == (switched, new, old)
        assert (await asking.get("/v1/model", headers=ANNA)).json()["version"] == new
        events = (await asking.get("/v1/audit", headers=OPERATOR)).json()["events"]
        assert (events[0]["owner"], events[0]["what"]) == ("operator", f"switched to model {new}")
        assert (await asking.get("/v1/audit", headers=ANNA)).json()["events"][0]["what"] == "created"
        return new, (await asking.get("/metrics")).text

    with engine_of(source_file, tmp_path, shadow=new_file, **CHEAP) as made:
        new, text = converse(create_app(made, OWNERS), talk)
    built = next(line for line in text.splitlines() if line.startswith("safer_tta_build_info{"))
    assert f'model="{new}"' in built
    assert 'safer_tta_shadow_batches_total{result="answered"}' in text


def test_without_a_roll_out_there_is_nothing_to_compare(asking):
    for ask in (asking.rollout, lambda: asking.switch("x")):
        with pytest.raises(ServiceError, match="--shadow NEW") as refused:
            ask()
        assert refused.value.status == 404


def test_the_commands_show_the_comparison_and_switch(source_file, new_file, tmp_path):
    options = ("--shadow", str(new_file), "--method", "none", "--predictor", "plain")
    with serving(source_file, tmp_path / "served", *options) as server, Client(server.url) as client:
        client.create("a")
        sent = client.send("a", pictures(1, 4)[0])
        client.label("a", 1, sent["labels"])
        wait_for(client, 1)
        ended = command("serve", "rollout", "--url", server.url, "--json")
        assert ended.returncode == 0, ended.stderr
        found = json.loads(ended.stdout)
        assert (found["counts"]["images"], found["accuracy"]["live"]) == (4, 100.0)
        shown = command("serve", "rollout", "--url", server.url).stdout
        assert all(found[role]["version"] in shown for role in ("live", "shadow"))
        assert "new.safetensors" in shown
        new = found["shadow"]["version"]
        ended = command("serve", "switch", new, "--url", server.url)
        assert (ended.returncode, client.model()["version"]) == (0, new), ended.stderr
        assert client.send("a", pictures(1, 4)[0])["model"] == new
        assert command("serve", "switch", "other", "--url", server.url).returncode == 2
        assert "Traceback" not in server.log.read_text()
        server.kill()
        server.start()
        assert client.model()["version"] == new
    assert "switched from model" in server.log.read_text()


def wait_for(client, batches):
    deadline = time.monotonic() + 60
    while client.rollout()["counts"]["batches"] < batches:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_kills_around_switches_leave_one_live_model_and_every_answer_once(source_file, new_file, tmp_path):
    """Every answer is one of the model that it names, as the library gives it."""
    batches, given = pictures(10, 2, seed=7), {name: [] for name in ("one", "two")}
    switched = []

    def talk(name, stop):
        with Client(server.url, retries=0) as mine:
            insist(lambda: mine.create(name))
            while not stop.is_set():
                number = len(given[name])
                images = batches[number % len(batches)]
                given[name].append(insist(lambda n=number, x=images: mine.send(name, x, key=f"{name}-{n}")))

    def turn(stop):
        with Client(server.url, retries=0) as mine:
            while not stop.is_set():
                to = insist(mine.rollout)["shadow"]["version"]
                switched.append(insist(lambda to=to: mine.switch(to)))
                time.sleep(0.1)

    options = ("--rate", "100000", "--shadow", str(new_file), "--method", "none", "--predictor", "plain")
    with serving(source_file, tmp_path / "served", *options) as server:
        rng = random.Random(0)
        with meanwhile(*(functools.partial(talk, name) for name in given), turn):
            for _ in range(8):
                time.sleep(rng.uniform(0.05, 0.4))
                server.kill()
                server.start()
            time.sleep(0.5)
        with Client(server.url) as client:
            found = client.rollout()
            versions = {client.model()["version"], found["shadow"]["version"]}
            assert len(versions) == 2
            for name, answers in given.items():
                assert client.stream(name)["batches"] == len(answers)
                assert [answer["number"] for answer in answers] == [*range(1, len(answers) + 1)]
    assert {answer["model"] for answers in given.values() for answer in answers} == versions
    replays = {}
    for file in (source_file, new_file):
        version = Service(model=file, folder=tmp_path, side=SIDE, seed=SEED, **CHEAP).load().served.version
        replays[version] = [Replay(file, "x", **CHEAP)(images) for images in batches]  # it learns nothing
    for answers in given.values():
        for number, answer in enumerate(answers):
            assert answer["probabilities"] == replays[answer["model"]][number % len(batches)]
    assert len([one for one in switched if one["switched"]]) > 2
    assert check(tmp_path / "served").intact


class Remote:
    """A shard in this process that is asked as one of Ray's."""

    def __init__(self, shard):
        self.handle, self.shard = self, shard

    def remote(self, request):
        return self.shard.handle(request)


def test_a_cluster_adds_what_its_shards_have_counted(source_file, new_file, tmp_path, monkeypatch):
    batches, shards, engines, build = pictures(6, 2), [], [], Service.engine
    monkeypatch.setattr(Service, "engine", lambda service: engines.append(build(service)) or engines[-1])
    for number in range(2):
        folder = tmp_path / str(number)
        service = Service(model=source_file, shadow=new_file, folder=folder, side=SIDE, seed=SEED, **CHEAP)
        shards.append(Shard(service, Tokens()))
    front = Front(Tokens(), Limits(), *(Remote(shard) for shard in shards))

    async def app(scope, receive, send):
        response = await front(Request(scope, receive))
        await response(scope, receive, send)

    async def talk(asking):
        for number in range(6):
            await asking.post("/v1/streams", json={"name": f"s{number}"})
            content = array_file(batches[number])
            answer = await asking.post(f"/v1/streams/s{number}/batches", content=content, headers=NPY)
            assert answer.status_code == 200
        while (found := (await asking.get(ROLLOUT)).json())["counts"]["batches"] < 6:
            await asyncio.sleep(0.02)
        assert found["counts"]["images"] == 12
        old, new = found["live"]["version"], found["shadow"]["version"]
        for switched in (True, False):
            answer = (await asking.post(SWITCH, json={"to": new})).json()
            assert (answer["switched"], answer["live"]["version"]) == (switched, new)
        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
        body = json.dumps({"to": old}).encode()
        await shards[0].handle(("POST", SWITCH, headers, body))  # as if the other one had not heard of it
        assert (await asking.get(ROLLOUT)).status_code == 409
        assert (await asking.post(SWITCH, json={"to": old})).json()["live"]["version"] == old

    try:
        converse(app, talk)
    finally:
        for made in engines:
            made.stop()
