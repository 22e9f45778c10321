import httpx
import pytest

from safer_tta.client import Client, ServiceError
from safer_tta.serve.cluster import deployment, shard_of
from safer_tta.serve.server import Service
from safer_tta.serve.tokens import Tokens
from tests.serve.helpers import NPY, SEED, SIDE, Replay, free_port, pictures

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def url(source_file, tmp_path_factory):
    ray = pytest.importorskip("ray")
    serve = pytest.importorskip("ray.serve")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    service = Service(model=source_file, folder=tmp_path_factory.mktemp("cluster"), side=SIDE, seed=SEED)
    serve.run(deployment(service, Tokens(), 2), name="safer")
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


def test_streams_are_answered_as_by_one_engine(url, source_file):
    batches = pictures(3, 3)
    names = [f"gate-{number}" for number in range(6)]
    assert {shard_of("local", name, 2) for name in names} == {0, 1}
    with Client(url) as asking:
        for name in names:
            asking.create(name)
        given = {name: [asking.send(name, images)["probabilities"] for images in batches] for name in names}
        assert [(stream["name"], stream["batches"]) for stream in asking.streams()] == [(name, 3) for name in names]
        for name in names[:3]:
            replay = Replay(source_file, name)
            assert given[name] == [replay(images) for images in batches]
        asking.reset(names[0])
        assert asking.audit()[0]["what"] == "reset"
        assert asking.alarms() == []
        for body in (b"", b"{}", b'{"name": null}'):  # a name that is made up leads to the shard that has it
            headers = {"Content-Type": "application/json"} if body else {}
            made = httpx.post(f"{url}/v1/streams", content=body, headers=headers).json()["name"]
            assert asking.stream(made)["batches"] == 0
        asking.delete(names[0])
        with pytest.raises(ServiceError, match="no stream"):
            asking.stream(names[0])
        first = asking.send(names[1], batches[0], key="k")
        assert asking.send(names[1], batches[0], key="k") == first


def test_what_is_malformed_stays_so(url):
    streams, batch = url + "/v1/streams", {"content": b"x", "headers": NPY}
    cut = {"content": b"{", "headers": {"Content-Type": "application/json"}}
    invalid = [httpx.post(streams, **what) for what in ({"json": {"name": "a/b"}}, {"json": {"nome": "x"}}, cut)]
    missing = [httpx.get(path) for path in (streams + "/none", streams + "/none/reports", url + "/nowhere")]
    answers = [*invalid, *missing, httpx.post(streams + "/none/batches", **batch)]
    assert [answer.status_code for answer in answers] == [422] * 3 + [404] * 4
    assert all(answer.json()["error"] for answer in answers)
    assert httpx.get(url + "/healthz").json() == {"status": "ok"}
    assert "default-src 'none'" in httpx.get(url + "/").headers["content-security-policy"]


def test_no_address_leads_to_another_shard_than_its_streams(url):
    with Client(url) as asking:
        asking.create("n0")
        for name in ("n1%2f..", "n2%2f..", "n3%2f.."):
            answer = httpx.post(f"{url}/v1/streams/{name}", json={"name": "n0"})
            assert answer.status_code == 404, answer.text
            assert httpx.get(f"{url}/v1/streams/{name}%2fn0").status_code == 404
        assert [stream["name"] for stream in asking.streams()].count("n0") == 1
    assert httpx.get(url + "/v1/model", headers={"Origin": "http://["}).status_code == 400


def test_a_stream_stays_where_it_is():
    """In every process and in every version: these numbers say where states lie on people's disks."""
    assert [shard_of("anna", f"gate-{n}", 4) for n in range(6)] == [2, 2, 2, 0, 1, 1]
    assert [shard_of("bert", f"gate-{n}", 4) for n in range(6)] == [1, 2, 2, 1, 0, 3]
    assert shard_of("local", "gate-0", 1) == 0
    counts = [sum(shard_of("anna", f"gate-{n}", 4) == shard for n in range(1000)) for shard in range(4)]
    assert min(counts) > 200
