"""Wrong tokens, other sites, quotas and batches that nobody waits for, before an application in this process."""

import asyncio
import json
import logging
import time

import httpx
import pytest
from starlette.datastructures import Headers

from safer_tta.errors import InvalidValueError
from safer_tta.serve import guesses
from safer_tta.serve.app import create_app
from safer_tta.serve.guesses import Guesses, network
from safer_tta.serve.limits import Limits, Refused
from safer_tta.serve.middleware import AccessControl
from safer_tta.serve.sites import check_site
from safer_tta.serve.tokens import Tokens
from tests.serve.helpers import CHEAP, NPY, TOKENS, array_file, converse, engine_of, pictures
from tests.serve.test_limits import held

GOOD = array_file(pictures(1, 2)[0])
ANNA, BERT, WRONG = ({"Authorization": f"Bearer {letter * 20}"} for letter in "abw")


def from_addresses(app, talk):
    """Talk to an application from addresses of one's choice."""

    async def run():
        def at(address):
            transport = httpx.ASGITransport(app=app, client=(address, 1))
            return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60)

        return await talk(at)

    return asyncio.run(run())


async def statuses(asking, headers, count):
    return [(await asking.get("/v1/streams", headers=headers)).status_code for _ in range(count)]


def test_an_address_that_tries_wrong_tokens_waits_and_others_do_not(source_file, tmp_path, monkeypatch):
    waited = []
    sleep = asyncio.sleep

    async def note(seconds):
        waited.append(seconds)
        await sleep(0)

    async def talk(at):
        known = {address: at(address) for address in ("10.0.0.1", "10.0.0.2")}
        assert await statuses(known["10.0.0.1"], BERT, 1) == [200]
        assert await statuses(known["10.0.0.1"], WRONG, 60) == [401] * 60
        found = len(waited)
        assert found >= 40
        assert await statuses(known["10.0.0.2"], ANNA, 3) == [200] * 3  # another address
        assert await statuses(known["10.0.0.1"], BERT, 3) == [200] * 3  # a token that was right there before
        assert len(waited) == found
        assert await statuses(known["10.0.0.1"], ANNA, 1) == [200]  # a right token works there, after the wait
        assert len(waited) == found + 1

    with engine_of(source_file, tmp_path, **CHEAP) as made:
        monkeypatch.setattr(guesses.asyncio, "sleep", note)
        from_addresses(create_app(made, TOKENS), talk)


def test_only_some_requests_of_an_address_wait_at_once(source_file, tmp_path):
    async def talk(at):
        asking = at("10.0.0.1")
        await statuses(asking, WRONG, 10)
        answers = await asyncio.gather(*(asking.get("/v1/streams", headers=WRONG) for _ in range(100)))
        codes = [answer.status_code for answer in answers]
        assert codes.count(429) == 100 - guesses.WAITING
        assert all("Retry-After" in answer.headers for answer in answers if answer.status_code == 429)

    with engine_of(source_file, tmp_path, limits=Limits(requests_per_s=1e6), **CHEAP) as made:
        app = create_app(made, TOKENS)
        app.app.admission.guesses = Guesses(clock=lambda: 0.0)
        from_addresses(app, talk)


def test_wrong_tokens_are_one_line_in_the_log(monkeypatch, caplog):
    monkeypatch.setattr(guesses, "REPORTED", 0.05)

    async def run():
        tried = Guesses()
        for number in range(600):
            tried.wrong(f"10.0.0.{number % 2}")
        await asyncio.sleep(0.5)

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    (line,) = caplog.messages
    assert "600" in line
    assert "10.0.0.1" in line


def test_the_memory_of_wrong_tokens_is_bounded(monkeypatch):
    async def run():
        tried = Guesses()
        for number in range(3 * guesses.REMEMBERED):
            address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
            tried.wrong(address)
            tried.right(address, "Bearer x")
        return [len(found) for found in (tried._wrong, tried._right, tried._unreported)]

    assert max(asyncio.run(run())) == guesses.REMEMBERED


def test_one_client_of_ipv6_has_many_addresses():
    assert network("2001:db8::1") == network("2001:db8::ffff:1") != network("2001:db8:0:1::1")
    assert network("fe80::1%eth0") == network("fe80::2%eth1")
    assert network("10.0.0.1") != network("10.0.0.2")
    assert network("not:an:address") == "not:an:address"


def test_a_request_without_a_token_is_no_attempt(source_file, tmp_path):
    async def talk(at):
        assert await statuses(at("10.0.0.1"), {}, 30) == [401] * 30
        assert await asyncio.wait_for(statuses(at("10.0.0.1"), ANNA, 1), 30) == [200]

    with engine_of(source_file, tmp_path, **CHEAP) as made:
        app = create_app(made, TOKENS)
        from_addresses(app, talk)
        assert not app.app.admission.guesses._wrong


def site(tokens=False, **headers):
    """The status with which a request with these headers is refused, or None."""
    try:
        check_site(Headers({name.replace("_", "-"): value for name, value in headers.items()}), tokens=tokens)
    except Refused as error:
        return error.status
    return None


def test_a_page_of_another_port_is_another_site():
    here = {"host": "127.0.0.1:8017"}
    assert site(**here, origin="http://127.0.0.1:8017") is None
    assert site(**here, origin="http://127.0.0.1:3000") == 403
    assert site(**here, origin="http://127.0.0.1") == 403
    assert site(**here, origin="null") == 403
    assert site(**here, origin="http://127.0.0.1:3000", sec_fetch_site="same-site") == 403
    assert site(**here, origin="http://localhost:8017") == 403


def test_a_page_behind_a_proxy_with_tls_is_the_services_own():
    assert site(tokens=True, host="safer.example", origin="https://safer.example") is None
    assert site(tokens=True, host="safer.example", origin="https://safer.example:443") is None
    assert site(tokens=True, host="safer.example", origin="https://safer.example:8443") == 403
    # A proxy that changes the port is no harm where the browser itself says that the page is the service's own.
    other = {"host": "safer.example:8017", "origin": "https://safer.example"}
    assert site(tokens=True, **other, sec_fetch_site="same-origin") is None
    assert site(tokens=True, **other) == 403


@pytest.mark.parametrize("text", ["[::1", "a b", "a:b", "a:123456", "http://a", "[g::]", "a/b", "a@b", ":80"])
def test_a_host_that_is_none_is_refused(text):
    assert site(tokens=True, host=text) == 400
    assert site(tokens=True, host="a", origin=f"http://{text}") in (400, 403)


def test_a_missing_host_is_fine_with_tokens_only():
    assert site(tokens=True) is None
    assert site() == 403
    assert site(host="[::1]:8017", origin="http://[::1]:8017") is None


def test_an_owner_may_have_several_tokens(tmp_path):
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps({"anna": ["n" * 20, "o" * 20], "bert": "b" * 20}))
    tokens = Tokens.read(path)
    assert [tokens.owner(f"Bearer {letter * 20}") for letter in "nob"] == ["anna", "anna", "bert"]
    for wrong in ({"a": []}, {"a": {}}, {"a": [5]}, {"a": ["short"]}, {"a": ["n" * 20], "b": ["n" * 20]}, {"a": None}):
        with pytest.raises(InvalidValueError, match="expected"):
            Tokens(wrong)


def test_a_file_of_tokens_is_looked_at_by_itself(tmp_path, monkeypatch, caplog):
    """Without a signal, as on a cluster. Neither a damaged file nor a missing one opens the service to everybody."""
    monkeypatch.setattr("safer_tta.serve.tokens.CHECKED", 0.0)
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps({"anna": "a" * 20}))
    tokens = Tokens.read(path)
    for damaged in ("{}", "{", "", "[]", '{"anna": "short"}', None):
        path.unlink() if damaged is None else path.write_text(damaged)
        for _ in range(3):
            assert tokens.owner(f"Bearer {'a' * 20}") == "anna"
            with pytest.raises(Refused):
                tokens.owner(None)
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 6  # one for each change
    path.write_text(json.dumps({"anna": "c" * 20}))
    assert tokens.owner(f"Bearer {'c' * 20}") == "anna"
    with pytest.raises(Refused):
        tokens.owner(f"Bearer {'a' * 20}")


def test_a_body_has_no_deadline_once_the_answer_has_begun():
    """A feed listens for the end of its reader, who may have announced a body that never comes."""

    async def feed(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.body", "body": b"end"})

    async def run():
        sent = []

        async def receive():
            await asyncio.sleep(0.5)
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message["type"])

        scope = {"type": "http", "method": "GET", "path": "/v1/feed", "headers": [(b"host", b"127.0.0.1")]}
        await AccessControl(feed, Tokens(), Limits(body_s=0.05))(scope, receive, send)
        return sent

    assert asyncio.run(run()) == ["http.response.start", "http.response.body"]


@pytest.mark.parametrize("quota", [{"owner_streams": 3}, {"owner_disk_bytes": 1000}])
def test_an_owner_has_a_quota_and_the_others_do_not_notice(source_file, tmp_path, monkeypatch, quota):
    monkeypatch.setattr("safer_tta.serve.quota.KEPT", 0)
    monkeypatch.setattr("safer_tta.serve.quota.RARELY", 0)

    async def talk(asking):
        async def create(headers):
            return (await asking.post("/v1/streams", headers=headers)).status_code

        codes = [await create(ANNA) for _ in range(10)]
        assert 201 in codes
        assert codes[-1] == 507
        assert await create(BERT) == 201
        for stream in (await asking.get("/v1/streams", headers=ANNA)).json()["streams"]:
            await asking.delete(f"/v1/streams/{stream['name']}", headers=ANNA)
        assert await create(ANNA) == 201

    with engine_of(source_file, tmp_path, limits=Limits(**quota), **CHEAP) as made:
        converse(create_app(made, TOKENS), talk)


def test_the_bytes_of_an_owner_are_those_of_its_streams(source_file, tmp_path):
    """Owners whose names begin alike are told apart."""
    with engine_of(source_file, tmp_path, predictor="plain") as made:
        for owner in ("anna", "anna-b", "anna0", "ann"):
            made.create(owner, "s").result()
        one = made.journal.nbytes_of("anna")
        assert made.journal.count("anna") == 1
        assert one > made.live.state_bytes / 3
        for _ in range(3):
            made.batch("anna-b/s", pictures(1, 2)[0], None, "x").result()
        assert made.journal.nbytes_of("anna") == one
        assert made.journal.nbytes_of("anna-b") > 1.5 * one
        assert made.journal.nbytes_of("nobody") == 0


def test_a_batch_whose_turn_does_not_come_is_refused_and_not_applied(source_file, tmp_path):
    async def talk(asking):
        with held(made, "local/other"):
            late = await asking.post("/v1/streams/a/batches", content=GOOD, headers={**NPY, "Idempotency-Key": "k"})
        again = await asking.post("/v1/streams/a/batches", content=GOOD, headers={**NPY, "Idempotency-Key": "k"})
        return late, again

    with engine_of(source_file, tmp_path, "a", limits=Limits(wait_s=0.3), **CHEAP) as made:
        late, again = converse(create_app(made, Tokens()), talk)
        assert (late.status_code, again.status_code, again.json()["number"]) == (503, 200, 1)
        assert int(late.headers["Retry-After"]) >= 1


def test_a_batch_that_has_begun_is_found_again_by_its_key(source_file, tmp_path):
    """Its turn came in time, but it takes longer than a batch may wait: it is answered all the same."""

    async def talk(asking):
        answer = await asking.post("/v1/streams/a/batches", content=GOOD, headers={**NPY, "Idempotency-Key": "k"})
        again = await asking.post("/v1/streams/a/batches", content=GOOD, headers={**NPY, "Idempotency-Key": "k"})
        return answer, again

    with engine_of(source_file, tmp_path, "a", limits=Limits(wait_s=0.05), **CHEAP) as made:
        answer_slowly = made._answer
        made._answer = lambda *batch: (time.sleep(0.3), answer_slowly(*batch))[1]
        answer, again = converse(create_app(made, Tokens()), talk)
    assert (answer.status_code, again.status_code) == (200, 200)
    assert again.headers["Idempotent-Replay"] == "true"
    assert again.json() == answer.json()
