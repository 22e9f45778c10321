"""The table of connections, with the protocol of the server in this process."""

import asyncio
import contextlib
import socket
import sys

import pytest
import uvicorn
from uvicorn.server import ServerState

from safer_tta.serve.connections import Connection, Connections, fit
from safer_tta.serve.limits import Limits
from tests.processes import call

PATIENT = {"headers_s": 3600.0, "idle_s": 3600.0, "answer_s": 3600.0}


async def greet(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.asynccontextmanager
async def listening(app, **limits):
    """Serve an application; yield its table of connections and its address."""
    table = Connections(Limits(**{**PATIENT, **limits}))
    config, state = uvicorn.Config(app, lifespan="off", log_level="critical"), ServerState()
    config.load()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Connection(table, config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    try:
        yield table, server.sockets[0].getsockname()
    finally:
        for connection in list(table.open):
            connection.transport.abort()
        server.close()


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_client_that_takes_nothing_of_its_answer_is_cut_off():
    async def endless(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(2000):  # more than the buffers between both ends hold
            await send({"type": "http.response.body", "body": bytes(2**16), "more_body": True})

    async def run():
        async with listening(endless, answer_s=0.3) as (table, address):
            with socket.create_connection(address) as line:
                line.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
                await until(lambda: table.open)
                await until(lambda: not table.open)

    asyncio.run(run())


def test_a_busy_connection_is_not_closed_for_a_new_one():
    proceed = asyncio.Event()

    async def slow(scope, receive, send):
        await proceed.wait()
        await greet(scope, receive, send)

    async def run():
        async with listening(slow, connections=3) as (table, address), contextlib.AsyncExitStack() as stack:
            lines = [await asyncio.open_connection(*address) for _ in range(3)]
            for _, writer in lines:
                stack.callback(writer.close)
                writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            await until(lambda: sum(c.cycle is not None for c in table.open) == 3)
            reader, writer = await asyncio.open_connection(*address)
            stack.callback(writer.close)
            refused = await reader.read()
            proceed.set()
            answers = [await reader.read(15) for reader, _ in lines]
            return refused, answers

    refused, answers = asyncio.run(run())
    assert refused.startswith(b"HTTP/1.1 503")
    head, _, body = refused.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}\r\n".encode() in head + b"\r\n"
    assert answers == [b"HTTP/1.1 200 OK"] * 3


def test_connections_of_the_address_that_has_most_are_closed_first():
    async def run():
        async with listening(greet, connections=4) as (table, address):
            lines = []
            for number, last in enumerate((2, 3, 3, 3, 4), start=1):
                lines.append(await asyncio.open_connection(*address, local_addr=(f"127.0.0.{last}", 0)))
                await until(lambda number=number: len(table.open) == min(4, number))
            assert await lines[1][0].read() == b""  # the oldest of those
            left = sorted(connection.address for connection in table.open)
            for _, writer in lines:
                writer.close()
            return left

    if sys.platform == "linux":  # where all of 127.0.0.0/8 is this machine
        assert asyncio.run(run()) == ["127.0.0.2", "127.0.0.3", "127.0.0.3", "127.0.0.4"]


def test_an_answered_connection_is_idle_and_may_be_used_again():
    async def run():
        async with listening(greet) as (table, address):
            reader, writer = await asyncio.open_connection(*address)
            for _ in range(3):
                writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 2)  # two at once, as pipelining allows
                for _ in range(2):
                    assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
                (connection,) = table.open
                assert list(table._idle["127.0.0.1"]) == [connection]
            writer.close()
            await until(lambda: not table.open)
            assert not table._idle

    asyncio.run(run())


def ask_for_files(soft, hard, connections, expected):
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    limits = fit(Limits(connections=connections))
    assert (limits.connections, limits.requests, resource.getrlimit(resource.RLIMIT_NOFILE)[0]) == expected


@pytest.mark.parametrize(
    ("files", "connections", "expected"),
    [
        ((1024, 8192), 4096, (4096, 1024, 5120)),  # raised
        ((1024, 4096), 4096, (3072, 1024, 4096)),  # raised as far as possible
        ((1024, 1024), 4096, (512, 256, 1024)),
        ((6000, 8192), 4096, (4096, 1024, 6000)),  # enough
    ],
)
def test_connections_fit_the_files_that_a_process_may_open(files, connections, expected):
    assert call(ask_for_files, *files, connections, expected) == 0
