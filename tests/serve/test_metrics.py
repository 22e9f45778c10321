import re
import shutil

import pytest
from prometheus_client.parser import text_string_to_metric_families

from safer_tta.serve.app import create_app
from safer_tta.serve.limits import Limits, RateLimit
from safer_tta.serve.tokens import Tokens
from tests.serve.helpers import CHEAP, NPY, array_file, converse, engine_of, pictures

OWNERS = Tokens({"anna": "a" * 20, "bert": "b" * 20, "metrics": "m" * 20})
ANNA, BERT, METRICS = ({"Authorization": f"Bearer {letter * 20}"} for letter in "abm")


def parse(text: str) -> dict[tuple[str, ...], float]:
    """Return every sample by its name and the values of its labels, which are sorted by their names."""
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {(one.name.removeprefix("safer_tta_"), *one.labels.values()): one.value for one in samples}


async def scrape(asking, **headers) -> dict[tuple[str, ...], float]:
    answer = await asking.get("/metrics", headers=headers)
    assert answer.status_code == 200
    return parse(answer.text)


def test_requests_are_counted_by_the_template_of_their_route(source_file, tmp_path):
    async def talk(asking):
        for number in range(30):
            await asking.get(f"/v1/streams/nobody-{number}", headers=ANNA)
            await asking.get(f"/nothing/{number}?x={number}", headers=ANNA)
            await asking.request(f"VERB{number}", "/v1/model", headers=ANNA)
            await asking.get(f"/v1/streams/nobody-{number}")  # without a token
        return await scrape(asking)

    with engine_of(source_file, tmp_path, **CHEAP) as made:
        found = converse(create_app(made, OWNERS), talk)
    counted = {key[1:]: value for key, value in found.items() if key[0] == "http_requests_total"}
    assert counted == {
        ("GET", "/v1/streams/{name}", "404"): 30,
        ("GET", "unknown", "404"): 30,
        ("unknown", "/v1/model", "405"): 30,
        ("GET", "/v1/streams/{name}", "401"): 30,
    }
    assert found["http_request_seconds_count", "GET", "/v1/streams/{name}"] == 60
    assert found["requests_refused_total", "token", "401"] == 30


def test_times_bytes_disk_and_process_are_measured(source_file, tmp_path):
    content = array_file(pictures(1)[0])

    async def talk(asking):
        before = await scrape(asking)
        answer = await asking.post("/v1/streams/a/batches", content=content, headers=NPY)
        return before, await scrape(asking), len(answer.content)

    with engine_of(source_file, tmp_path, "a", **CHEAP) as made:
        before, after, sent = converse(create_app(made, Tokens()), talk)
    for part in ("queue", "decode", "commit", "batch"):
        assert after[f"{part}_seconds_count",] - before[f"{part}_seconds_count",] == 1, part
    assert after["http_request_bytes_total",] == len(content)
    assert after["http_response_bytes_total",] > sent
    assert before["http_requests_in_flight",] == after["http_requests_in_flight",] == 1  # the question itself
    assert after["journal_bytes",] >= 4096
    assert 0 < after["disk_free_bytes",] <= after["disk_bytes",]
    assert after["ready",] == 1
    assert after["process_resident_memory_bytes",] > 10_000_000
    assert after["process_open_fds",] > 3
    built = next(set(key) for key in after if key[0] == "build_info")
    assert built >= {made.served.version, made.served.method, "plain"}


@pytest.mark.parametrize(
    ("limits", "reason"),
    [(Limits(requests_per_s=1.0), "rate"), (Limits(upload_bytes=1000), "uploads"), (Limits(decoding=0), "decoding")],
)
def test_every_refusal_for_lack_of_room_is_counted_with_its_reason(source_file, tmp_path, limits, reason):
    async def talk(asking):
        content = array_file(pictures(1)[0])
        codes = [
            (await asking.post("/v1/streams/a/batches", content=content, headers=NPY)).status_code for _ in range(4)
        ]
        return codes, await scrape(asking)

    with engine_of(source_file, tmp_path, "a", limits=limits, **CHEAP) as made:
        app = create_app(made, Tokens())
        app.app.admission.rate = RateLimit(limits.requests_per_s, clock=lambda: 0.0)
        codes, found = converse(app, talk)
    refused = codes.count(429)
    assert refused >= 2
    assert found["requests_refused_total", reason, "429"] == refused
    assert found["owner_requests_refused_total", "local"] == refused


def test_a_full_queue_is_counted_once(source_file, tmp_path):
    async def talk(asking):
        return (await asking.post("/v1/streams")).status_code, await scrape(asking)

    with engine_of(source_file, tmp_path, limits=Limits(stream_queue=0), **CHEAP) as made:
        code, found = converse(create_app(made, Tokens()), talk)
    assert (code, found["requests_refused_total", "queue", "429"]) == (429, 1)


def test_owners_are_named_only_to_who_has_the_token_for_it(source_file, tmp_path):
    async def talk(asking):
        for headers, count in ((ANNA, 2), (BERT, 1)):
            await asking.post("/v1/streams", json={"name": "s"}, headers=headers)
            for images in pictures(count, 3):
                answer = await asking.post("/v1/streams/s/batches", content=array_file(images), headers=headers | NPY)
                assert answer.status_code == 200
        wrong = await asking.get("/metrics", headers={"Authorization": "Bearer " + "x" * 20})
        texts = [(await asking.get("/metrics", headers=headers)).text for headers in ({}, ANNA, METRICS)]
        return wrong.status_code, *texts

    with engine_of(source_file, tmp_path, **CHEAP) as made:
        wrong, nobody, anna, operator = converse(create_app(made, OWNERS), talk)
    assert wrong == 401
    for text in (nobody, anna):
        assert not re.search("anna|bert|owner=", text)
        assert parse(text)["batches_total",] == 3
    counts = {key[1]: value for key, value in parse(operator).items() if key[0] == "owner_batches_total"}
    assert counts == {"anna": 2, "bert": 1}
    assert parse(operator)["owner_images_total", "anna"] == 6


def test_readiness_says_why_not_and_liveness_goes_on(source_file, tmp_path):
    with engine_of(source_file, tmp_path, **CHEAP) as made:

        async def talk(asking):
            before = (await asking.get("/readyz")).json()
            made.refuse()
            after, found = await asking.get("/readyz"), await scrape(asking)
            return before, after, found, [(await asking.get(path)).status_code for path in ("/livez", "/healthz")]

        before, after, found, alive = converse(create_app(made, Tokens()), talk)
    assert before == {"status": "ok"}
    assert (after.status_code, after.headers["retry-after"], alive) == (503, "5", [200, 200])
    assert after.json()["reasons"].keys() == {"engine"}
    assert after.json()["request_id"] == after.headers["x-request-id"]
    assert found["ready",] == 0


def test_metrics_outlive_their_folder(source_file, tmp_path):
    with engine_of(source_file, tmp_path / "gone", "a", **CHEAP) as made:
        shutil.rmtree(tmp_path / "gone")
        assert "safer_tta_disk_free_bytes nan" in made.metrics.text().decode().lower()
