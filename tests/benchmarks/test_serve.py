import pytest

from tests.serve.helpers import free_port


@pytest.mark.timeout(600)
def test_the_service_is_measured_beside_the_library(run, tmp_path):
    tiny = "--rounds 2 --requests 2 --batch 2 --streams 1 2 --port"
    rows = run("serve", tmp_path / "rows.csv", *tiny.split(), free_port())
    latency, throughput = ([row for row in rows if row["section"] == name] for name in ("latency", "throughput"))
    assert [row["what"] for row in latency] == ["library", "library under guard", "service"]
    assert float(latency[0]["ratio"]) == 1
    assert [(row["streams"], row["requests"]) for row in throughput] == [("1", "2"), ("2", "4")]  # two of each stream
    assert len(rows) == 5
    assert all(0 < float(row["p50_ms"]) <= float(row["p99_ms"]) for row in rows)


def test_percentiles_stay_within_what_was_seen(script):
    found = script("serve").percentiles([float(number) for number in range(1, 61)])
    assert found["p50_ms"] == 30.5
    assert 59 < found["p99_ms"] < 60
