import itertools

import httpx
import numpy as np
import pytest

from safer_tta.client import ServiceError
from safer_tta.serve import schemas
from safer_tta.serve.app import create_app
from tests.serve.helpers import CHEAP, NPY, TOKENS, Replay, array_file, converse, engine_of, pictures, sending


def test_a_stream_from_creation_to_deletion(asking):
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
    events = [event["what"] for event in asking.audit() if event["stream"] == "life"]
    assert events[:4] == ["reset", "rollback", "unfreeze", "freeze"]
    asking.delete("life")
    with pytest.raises(ServiceError, match="no stream 'life'"):
        asking.stream("life")


def test_answers_match_the_schemas_of_the_api_page(asking):
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
    schemas.Alarms.model_validate({"alarms": asking.alarms()}, strict=True)
    page = httpx.get(asking.url + "/openapi.json").json()
    assert {"Answer", "Audit", "Error", "Model", "Report", "Stream"} <= page["components"]["schemas"].keys()
    assert page["components"]["securitySchemes"]


def test_answers_equal_those_of_the_library(asking, source_file):
    asking.create("same")
    replay = Replay(source_file, "same")
    batches = pictures(12, 5)
    for number, images in enumerate(batches):
        assert asking.send("same", images)["probabilities"] == replay(images)
        if change := {3: "freeze", 5: "unfreeze", 9: "rollback"}.get(number):
            getattr(asking, change)("same")
            getattr(replay.guard, change)()
    asking.reset("same")
    fresh = Replay(source_file, "same")
    for images in batches[:3]:
        assert asking.send("same", images)["probabilities"] == fresh(images)


def test_a_batch_is_applied_once_however_often_it_is_sent(asking, source_file, server):
    asking.create("once")
    images, more = pictures(2, 4)
    first = asking.send("once", images, key="a")
    assert asking.send("once", images, key="a") == first
    content, headers = array_file(images.transpose(0, 2, 3, 1)), {**NPY, "Idempotency-Key": "a"}
    raw = httpx.post(f"{server.url}/v1/streams/once/batches", content=content, headers=headers)
    assert raw.headers["Idempotent-Replay"] == "true"
    with pytest.raises(ServiceError, match="other images") as refused:
        asking.send("once", more, key="a")
    assert refused.value.status == 409
    assert asking.stream("once")["batches"] == 1
    replay = Replay(source_file, "once")
    assert replay(images) == first["probabilities"]
    assert replay(more) == asking.send("once", more, key="b")["probabilities"]


def test_the_feed_reports_every_batch(asking):
    asking.create("feed")
    with sending(asking.url, "feed"):
        heard = [report["number"] for report in itertools.islice(asking.follow("feed"), 3)]
    assert heard == list(range(heard[0], heard[0] + 3))


def test_random_requests_of_the_schema_are_answered(server):
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


def test_a_stopping_service_is_alive_and_not_ready(source_file, tmp_path):
    with engine_of(source_file, tmp_path, **CHEAP) as made:

        async def talk(asking):
            before = await asking.get("/readyz")
            made.refuse()
            after = [await asking.get(path) for path in ("/readyz", "/livez", "/healthz")]
            return [answer.status_code for answer in (before, *after)]

        assert converse(create_app(made, TOKENS), talk) == [200, 503, 200, 200]
