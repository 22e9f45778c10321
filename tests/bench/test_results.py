import csv
import io
import json
import re

import pytest

from safer_tta.bench.publish import publish
from safer_tta.bench.results import SLIM, Results, slim_csv
from safer_tta.bench.study import states
from safer_tta.bench.tasks import QUICK_COUNT, Place
from tests.bench.helpers import MADE_UP, command, quick
from tests.processes import safer


def test_a_damaged_row_is_named_and_fails_the_command_and_the_others_stay(store, small, undisturbed, tmp_path):
    study, _ = quick(small, store)
    place = Place(tmp_path, count=QUICK_COUNT)
    results = place.results
    results.folder.mkdir()
    for name in set(study.runs):
        results.path(name).write_bytes((store / "runs" / f"{name}.jsonl").read_bytes())
    damaged = results.path(study.runs[0])
    damaged.write_text(damaged.read_text().replace('"accuracy": ', '"accuracy": 1'))
    found, problems = study.found(place)
    assert len(found) == 3
    assert re.search(f"{damaged}.*Remove it", problems[0])
    assert str(damaged) in publish(study, place).read_text()
    damaged.write_text("{half a row")
    assert "not JSON" in study.found(place)[1][0]
    assert states(study, place) == {"done": 3, "damaged": 1}
    ended = safer(*command(small, place.store, "--json"))
    found = json.loads(ended.stdout)
    assert (ended.returncode, found["done"], found["damaged"]) == (1, 3, 1)


def test_a_row_under_the_name_of_another_is_damaged(tmp_path):
    results = Results(tmp_path)
    results.write({"run": "0" * 16, "accuracy": 50.0})
    results.path("f" * 16).write_bytes(results.path("0" * 16).read_bytes())
    with pytest.raises(ValueError, match="is damaged"):
        results.row("f" * 16)


def test_a_store_is_queried_without_its_foreign_files(tmp_path):
    results = Results(tmp_path)
    with pytest.raises(ValueError, match="no rows yet"):
        results.query("select 1")
    row = results.write({"run": "0123456789abcdef", "accuracy": 50.0})
    (tmp_path / "notes.jsonl").write_text("mine\n")
    assert results.rows() == [row]
    assert results.query("select accuracy from rows") == [(50.0,)]


def test_rows_are_queried_in_sql(everything):
    study, place = everything[0]["alpha-mode"], everything[1]
    names = ", ".join(f"'{name}'" for name in study.runs)
    counted = place.results.query(f"select count(*), count(distinct run) from rows where run in ({names})")[0]
    assert counted == (len(study.runs),) * 2
    best = place.results.query(f"select max(accuracy) from rows where predictor = 'safer' and run in ({names})")
    asked = [r["accuracy"] for r in place.results.rows(study.runs) if r["predictor"] == "safer"]
    assert best[0][0] == max(asked)


def test_slim_rows_hold_what_tables_need(undisturbed):
    rows = [{**MADE_UP, **row} for row in undisturbed.values()]
    written = list(csv.DictReader(io.StringIO(slim_csv(rows))))
    assert written[0].keys() == set(SLIM)
    assert len(rows[0]) > len(SLIM)
    for row, slim in zip(rows, written, strict=True):
        assert (slim["run"], slim["predictor"], slim["norm"]) == (row["run"], row["predictor"], "")
        assert float(slim["accuracy"]) == pytest.approx(row["accuracy"], rel=1e-5)
        assert slim["options"] == slim["predictor_options"] == ""  # nothing differs from its default
        assert (json.loads(slim["threat"]) if slim["threat"] else None) == row["threat"]
