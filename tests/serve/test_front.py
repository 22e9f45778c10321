"""The front of a cluster, before shards that note what they are asked."""

import asyncio

import httpx
import pytest
from starlette.requests import Request

from safer_tta.serve.cluster import Front, shard_of
from safer_tta.serve.limits import Limits
from safer_tta.serve.tokens import Tokens
from tests.serve.helpers import NPY, TOKENS

ANNA, BERT = ({"Authorization": f"Bearer {letter * 20}", **NPY} for letter in "ab")
BATCHES = "/v1/streams/a/batches"


class Noting:
    """A shard that answers everything, and waits with it for as long as it is told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.proceed = asyncio.Event()
        self.proceed.set()
        self.handle = self

    async def remote(self, request):
        self.asked.append(request[1])
        await self.proceed.wait()
        return 200, [], b"{}"


def conversation(talk, tokens=TOKENS, **limits):
    """Talk to a front as over HTTP; return what was said, and what each of two shards was asked."""

    async def run():
        shards = Noting(), Noting()
        front = Front(tokens, Limits(**limits), *shards)

        async def application(scope, receive, send):
            await (await front(Request(scope, receive)))(scope, receive, send)

        transport = httpx.ASGITransport(app=application)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as asking:
            return await talk(asking, *shards), [shard.asked for shard in shards]

    return asyncio.run(run())


@pytest.mark.parametrize(
    "path",
    ["n3%2f..", "n3%2F..%2fn0", "..%2f..%2fmetrics", "x%5c..", "n3%2fbatches", "%2e%2e", "n%30", "a//batches", ".a"],
)
def test_an_address_with_two_readings_reaches_no_shard(path):
    async def talk(asking, *shards):
        url = httpx.URL(f"http://127.0.0.1/v1/streams/{path}")
        return [(await asking.request(verb, url, headers=ANNA)).status_code for verb in ("GET", "POST", "DELETE")]

    statuses, asked = conversation(talk)
    assert statuses == [404] * 3
    assert asked == [[], []]


def test_a_stream_is_asked_for_at_its_own_shard_only():
    names = [f"gate-{number}" for number in range(20)]

    async def talk(asking, *shards):
        for name in names:
            await asking.get(f"/v1/streams/{name}/batches?last=5", headers=ANNA)

    _, asked = conversation(talk)
    for shard in (0, 1):
        mine = [name for name in names if shard_of("anna", name, 2) == shard]
        assert asked[shard] == [f"/v1/streams/{name}/batches?last=5" for name in mine]
        assert mine


def test_bodies_in_the_front_are_shared_by_owners():
    async def talk(asking, *shards):
        def post(headers, size):
            return asyncio.create_task(asking.post(BATCHES, content=b"x" * size, headers=headers))

        for shard in shards:
            shard.proceed.clear()
        held = [post(ANNA, 1000) for _ in range(7)]
        while sum(len(shard.asked) for shard in shards) < 7:
            await asyncio.sleep(0.01)
        refused = (await post(ANNA, 1000)).status_code
        other = post(BERT, 1000)
        while sum(len(shard.asked) for shard in shards) < 8:
            await asyncio.sleep(0.01)
        for shard in shards:
            shard.proceed.set()
        return refused, [(await answer).status_code for answer in (*held, other)]

    (refused, others), _ = conversation(talk, upload_bytes=10_000)
    assert (refused, others) == (429, [200] * 8)


def test_a_body_that_does_not_arrive_is_given_up():
    async def talk(asking, *shards):
        async def stalled():
            yield b"x"
            await asyncio.sleep(3600)

        return (await asking.post(BATCHES, content=stalled(), headers=ANNA)).status_code

    assert conversation(talk, body_s=0.2) == (408, [[], []])


def test_pages_of_other_sites_do_not_pass_the_front():
    async def talk(asking, *shards):
        wrong = ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Host": "[::1"}, {"Origin": "http://["})
        return [(await asking.get("/v1/streams", headers=headers)).status_code for headers in wrong]

    assert conversation(talk, tokens=Tokens()) == ([403, 403, 400, 400], [[], []])
