"""The scripts that measure: their smallest runs, and figures that rows cannot tell from the wrong ones."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from safer_tta import mixing
from safer_tta.views import PRESETS
from tests.serve.helpers import free_port
from tests.test_results import ROOT, benchmark

TINY = {
    "speed": "--sections steps mixings chunks operators --architectures small --methods tent --views 0 1 "
    "--batch 2 --side 32 --rounds 1",
    "serve": "--rounds 2 --requests 2 --batch 2 --streams 1 2",
}


def measured(name: str, out: Path) -> subprocess.CompletedProcess[str]:
    port = ["--port", str(free_port())] if name == "serve" else []
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "run", "--out", str(out), *TINY[name].split()]
    return subprocess.run([*command, *port], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", TINY)
def test_the_smallest_run_makes_rows_that_a_page_is_made_from(name, tmp_path):
    out = tmp_path / "rows.jsonl"
    first = measured(name, out)
    assert first.returncode == 0, first.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    sections = {"speed": TINY["speed"].split()[1:5], "serve": ["latency", "throughput"]}[name]
    assert {row["section"] for row in rows} == set(sections)
    page = benchmark(name).page(rows)
    assert page.count("### ") == len(sections)
    assert sum(line.startswith("| ") for line in page.splitlines()) == len(rows) + len(sections)


def test_rows_are_added_to_others_with_a_word_about_it(tmp_path):
    out, command = tmp_path / "rows.jsonl", [sys.executable, str(ROOT / "benchmarks" / "speed.py"), "run", "--sections"]
    assert "adding" not in subprocess.run([*command, "--out", out], capture_output=True, text=True, check=True).stderr
    out.write_text('{"section": "startup"}\n')
    again = subprocess.run([*command, "--out", out], capture_output=True, text=True, check=True)
    assert f"adding to what is in {out}" in again.stderr
    assert out.read_text().startswith('{"section": "startup"}\n')


def test_percentiles_stay_within_what_was_seen():
    found = benchmark("serve").percentiles([float(number) for number in range(1, 61)])
    assert found["p50_ms"] == 30.5
    assert 59 < found["p99_ms"] < 60


def test_the_cost_of_a_run_is_that_of_batches_of_64():
    common = {"method": "tent", "predictor": "safer", "images_per_s": 200.0, "peak_mb": 9.0}
    rows = [{**common, "batch": batch, "ms_per_step": ms} for batch, ms in ((64, 300.0), (64, 320.0), (1, 20.0))]
    assert "| tent | safer | 310 | 200 | 9 |" in benchmark("pacs").cost(rows)


def test_recorded_views_are_those_of_a_run(tmp_path):
    """What SAFER would have answered is what it answers; and knowing who is attacked, where nobody is, changes nothing
    but the weight."""
    from safer_tta.bench.study import prepare
    from safer_tta.bench.tasks import Place, execute

    evidence, out = benchmark("evidence"), tmp_path / "rows.jsonl"
    evidence.run(tmp_path, out, seeds=1, targets=["sketch"], quick=True)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    place, made = Place(tmp_path), {}
    for task in prepare("beyond", place, seeds=1, targets=["sketch"], quick=True).tasks:
        what = task.definition
        usual = task.kind == "run" and (what["stream"]["batch"], what["stream"]["draw"]) == (16, "exact")
        budget = task.kind == "run" and (what["attack"] is None or round(255 * what["attack"]["threat"]["eps"]) == 8)
        if usual and budget and (what["method"], what["predictor"]) == ("tent", "safer"):
            execute(task, place)
            where = (evidence._preset(what), what["stream"]["attack_rate"])
            made[where] = place.results.row(task.name)["accuracy"]
    assert {(row["views"], row["attack_rate"]): row["accuracy"]["SAFER"] for row in rows} == made
    assert made.keys() == {(views, rate) for views in ("gentle", "released") for rate in (0, 100)}
    before = out.read_text()
    out.write_text(json.dumps({**rows[0], "images": 0}) + "\n" + json.dumps({**rows[0], "target": "elsewhere"}) + "\n")
    evidence.run(tmp_path, out, seeds=1, targets=["sketch"], quick=True)
    kept = [line for line in out.read_text().splitlines() if "elsewhere" not in line]
    assert "\n".join(kept) + "\n" == before, "the same rows anew"
    assert "elsewhere" in out.read_text(), "beside the others"
    for row in rows:
        for found in row["evidence"].values():
            assert (found["clean"] is None) == (row["attack_rate"] == 100)
            assert (found["attacked"] is None) == (row["attack_rate"] == 0)


def test_recordings_are_tasks_of_their_own_and_say_what_the_gate_answers(tmp_path):
    """Nobody needs a recording, and it is made all the same; what the gate would have answered by it is what it answers
    in a run of its own."""
    from safer_tta.bench.study import prepare
    from safer_tta.bench.tasks import Place, execute, left

    evidence, place = benchmark("evidence"), Place(tmp_path)
    recordings = sys.modules["recordings"]
    study = prepare("beyond", place, seeds=1, targets=["sketch"], quick=True)
    gate = evidence.GATES["gentle"]["the gate"]
    runs = {
        (task.definition["predictor"], task.definition["stream"]["attack_rate"]): task
        for task in reversed(study.tasks)
        if task.kind == "run"
        and task.definition["method"] == "tent"
        and task.definition["stream"]["batch"] == 16
        and task.definition["stream"]["draw"] == "exact"
        and task.definition["predictor"] in ("safer", "safer-gate")
        and task.definition["stream"]["attack_rate"] in (0, 100)
        and (task.definition["attack"] is None or round(255 * task.definition["attack"]["threat"]["eps"]) == 8)
        and task.definition["predictor_options"]["mixing"] in (None, mixing.settings(gate))
        and task.definition["predictor_options"]["pipeline"]["preset"] == gate.pipeline
    }
    assert runs.keys() == {(predictor, rate) for predictor in ("safer", "safer-gate") for rate in (0, 100)}
    made = [task for task in study.tasks if task.kind != "run"]
    views = {rate: recordings.task_for(runs["safer", rate]) for rate in (0, 100)}
    to_do = {task.name for task in left([*made, *views.values()], place)}
    assert {task.name for task in views.values()} <= to_do
    for task in [*made, *runs.values(), *views.values()]:
        execute(task, place)
    assert left([*made, *views.values()], place) == []
    for rate, task in views.items():
        judged = evidence.judged(recordings.Recording.read(task.path(place)))["accuracy"]
        for name, predictor in (("SAFER", "safer"), ("the gate", "safer-gate")):
            assert judged[name] == place.results.row(runs[predictor, rate].name)["accuracy"]


def test_views_of_other_presets_are_compared_on_the_streams_of_runs(tmp_path):
    """SAFER on the paper's views is the run itself, and every operator of a view is counted."""
    from safer_tta.bench.study import prepare
    from safer_tta.bench.tasks import Place, execute, write_tasks

    views, place, out = benchmark("views"), Place(tmp_path), tmp_path / "rows.jsonl"
    study = prepare("main", place, seeds=1, targets=["sketch"], quick=True)
    known = {task.name: task for task in study.tasks}
    tasks = [t for t in study.tasks if t.kind == "run" and t.definition["method"] == "tent"]
    safer = [task for task in tasks if task.definition["predictor"] == "safer"]
    for task in safer:
        for need in (*(known[name] for name in task.needs), task):
            execute(need, place)
    write_tasks(tmp_path / "tasks.json", tasks)
    presets = ["released", "nsj_cropflip", "ns_gentleflip"]
    asked = {"tasks": tmp_path / "tasks.json", "store": tmp_path, "rows": out, "presets": presets}
    views.run(argparse.Namespace(**asked, data="synthetic", weights=None, device="cpu"))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    found = {(row["views"], row["attack_rate"]): row for row in rows if "operator" not in row}
    assert found.keys() == {(preset, rate) for preset in presets for rate in (0, 100)}
    for task in safer:
        rate, accuracy = task.definition["stream"]["attack_rate"], place.results.row(task.name)["accuracy"]
        assert found["released", rate]["accuracy"]["SAFER"] == pytest.approx(accuracy)
    batches = 32 // 16
    mirrored = {row["attack_rate"]: row["count"] for row in rows if row.get("operator") == "flip"}
    assert mirrored == dict.fromkeys((0, 100), 4 * batches)
    assert "nsj_cropflip" not in PRESETS, "candidates are nobody else's"
