"""From a plan to rows, tables, figures and a page: in processes that die, on disks that fill, in a real browser."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import multiprocessing
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from safer_tta import executors as engines
from safer_tta.bench import drawings, plan, tables
from safer_tta.bench.paper import FILES, published
from safer_tta.bench.publish import publish
from safer_tta.bench.results import Results, without
from safer_tta.bench.sinks import create
from safer_tta.bench.study import estimate, prepare, states
from safer_tta.bench.tasks import QUICK_COUNT, Place, Task, execute, read_tasks, write_tasks
from safer_tta.data import Dataset, StoreError, open_dataset
from tests.conftest import CHROMIUM, CHROMIUM_FLAGS
from tests.test_data import folder as image_folder

SIZES = {
    "main": 504, "pooling": 324, "alpha-mode": 54, "alpha-signal": 810, "alpha-parameters": 150, "alpha-heatmap": 294,
    "views": 36, "max-operators": 36, "attack-rate": 315, "stability": 15, "autoattack": 18, "epsilon": 36, "eot": 51,
    "qualitative": 6, "continual": 81, "mixed": 72, "correlated": 81, "batch-size": 270, "methods": 306,
    "released": 216, "beyond": 432 + 132 + 72 + 24 + 72 + 432 + 72,
}  # fmt: skip
SMALL = """
title = "Two methods"
[[grids]]
rates = [0, 100]
figure = "bars"
[[grids.rows]]
label = "Tent"
method = "tent"
[[grids.rows]]
label = "Tent+SAFER"
method = "tent"
predictor = "safer"
"""
WORKERS = 1 if "PYTEST_XDIST_WORKER" in os.environ else None  # of each engine: the other core has tests of its own
MADE_UP = {
    "accuracy": 50.0, "ms_per_step": 5.0, "images_per_s": 200.0, "peak_mb": None, "device": "none", "threads": 1,
    "precision": "float32", "versions": {},
}  # fmt: skip
PACS = Dataset("pacs", ("art_painting", "cartoon", "photo", "sketch"), tuple("abcdefg"), lambda name: None, "x")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """One store for all plans, and for all processes of the test run: what they share is made once, by whoever is
    first, and nobody is in anybody's way. That is itself what a store promises."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if WORKERS == 1 else base) / "store"
    shared.mkdir(exist_ok=True)
    return shared


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "small.toml"
    path.write_text(SMALL)
    return path


def quick(name, store, **options):
    place = Place(store, count=QUICK_COUNT)
    return prepare(str(name), place, quick=True, **options), place


def carried_out(study, place, engine="local", **options):
    events = []
    options = {"workers": WORKERS, "threads": 1, **options}
    failed = engines.execute(engine, study.tasks, place, events.append, **options)
    return failed, events


# --- plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIZES)
def test_shipped_plans_expand_to_the_runs_of_their_studies(name):
    cells = plan.cells(plan.load(name), PACS)
    assert len(cells) == SIZES[name]
    assert len({(c.grid, c.row.model_dump_json(), c.target, c.attack_rate, c.seed) for c in cells}) == SIZES[name]


def test_every_plan_is_tested():
    assert set(plan.shipped()) == set(SIZES)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('method = "tent"', 'method = "tnt"'), "did you mean 'tent'"),
        (('method = "tent"', 'method = "tent+medbm"'), "medbn"),
        (('predictor = "safer"', 'predictor = "safe"'), "did you mean 'safer'"),
        (('rates = [0, 100]', 'rates = [0, 101]'), "0 to 100"),
        (('rates = [0, 100]', 'rate = [0, 100]'), "grids.0.rate"),
        (('label = "Tent"', 'labl = "Tent"'), "label"),
        (('rates = [0, 100]', 'targets = ["sktch"]'), "sktch"),
        (('predictor = "safer"', 'predictor = "safer"\npredictor_options = { vews = 3 }'), "vews"),
        (('predictor = "safer"', 'predictor = "safer"\npredictor_options = { views = -3 }'), "views is -3"),
        (('method = "tent"', 'method = "tent"\noptions = { lr = -1.0 }'), "lr is -1.0"),
        (('title = "Two methods"', 'title = '), "not TOML"),
        (('label = "Tent+SAFER"', 'label = "Tent"'), "more than one row"),
        (('figure = "bars"', 'figure = "lines"\nvary = { "predictor" = ["plain", "jpeg"] }'), "numbers"),
        (('figure = "bars"', 'figure = "lines"\nvary = { "attack.eps" = [4], "stream.batch" = [8] }'), "one axis"),
        (('figure = "bars"', 'figure = "heatmap"\nvary = { "attack.eps" = [4] }'), "two varied"),
        (('figure = "bars"', 'best_of = ["attack.eps"]'), "not varied"),
        (('figure = "bars"', 'vary = { "options" = [{ lr = 0.1 }] }'), "numbers, words"),
        (('figure = "bars"', 'targets = "rest"'), "continual or mixed"),
        (('figure = "bars"', 'vary = { "attack.eps" = [4, 4] }'), "a value twice"),
        (('rates = [0, 100]', 'rates = [0, 0]'), "a value twice"),
        (('figure = "bars"', 'vary = { "predictor.tau" = [0.1] }'), "expected a table"),
        (('predictor = "safer"', 'predictor = "safer"\nattack = { name = "autoattack", steps = 3 }'), "steps itself"),
    ],
)  # fmt: skip
def test_mistakes_in_a_plan_are_named_before_anything_is_made(change, said, tmp_path):
    path = tmp_path / "p.toml"
    path.write_text(SMALL.replace(*change, 1))
    with pytest.raises(plan.PlanError, match=said):
        quick(path, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_an_unknown_plan_is_named():
    with pytest.raises(plan.PlanError, match=r"did you mean 'pooling'"):
        plan.load("poling")


def test_varied_places_reach_the_run(tmp_path):
    study, _ = quick("max-operators", tmp_path)
    asked = {t.definition["predictor_options"]["pipeline"]["max_operators"] for t in study.tasks if t.kind == "run"}
    assert asked == {2, 5}


def test_runs_that_differ_in_nothing_that_matters_are_one(tmp_path):
    """A clean stream does not depend on the attacker."""
    path = tmp_path / "p.toml"
    path.write_text(SMALL.replace('figure = "bars"', 'vary = { "attack.eps" = [4, 8] }'))
    study, _ = quick(path, tmp_path)
    assert len(study.cells) == 8
    assert len(set(study.runs)) == 6


# --- the paper's figures --------------------------------------------------------------------------------------------


def test_every_published_figure_is_found_by_the_plan_of_its_study():
    """Each row of the csv files is what some cell of some shipped plan is compared with."""
    found = Counter()
    for shipped in plan.shipped().values():
        for cell in plan.cells(shipped, PACS, seeds=1):
            grid = shipped.grids[cell.grid]
            varied = {k: v for k, v in cell.varied.items() if k not in grid.best_of}
            for target in (cell.target, "average"):
                entry = published(grid.paper, "pacs", target, cell.row.label, varied, cell.attack_rate)
                if entry:
                    found[grid.paper, target == "average", cell.row.label, str(varied), target, cell.attack_rate] += 1
    count = Counter(key[0] for key in found if key[1] == (key[0] == "pooling"))
    with (FILES / "ablations.csv").open() as file:
        expected = Counter(row["study"] for row in csv.DictReader(file))
    expected["main"], expected["alpha_tau_kappa"] = 4 * 14 * 3, 98
    del expected["alpha_parameters"]  # curves of the best over the other parameters: not what one at a time gives
    assert count == expected


def test_the_published_parameter_curves_are_the_best_of_the_published_heatmap():
    """Why the plan alpha-parameters is not put beside them."""
    with (FILES / "ablations.csv").open() as file:
        curves = [row for row in csv.DictReader(file) if row["parameter"] in ("tau", "kappa")]
    with (FILES / "alpha_tau_kappa.csv").open() as file:
        heatmap = list(csv.DictReader(file))
    assert len(curves) == 28
    for point in curves:
        line = [
            float(cell["acc_mean"])
            for cell in heatmap
            if float(cell[point["parameter"]]) == float(point["value"])
            and float(cell["attack_rate"]) == float(point["attack_rate_percent"])
        ]
        assert float(point["accuracy_mean"]) == max(line)


def test_published_figures_are_the_papers_own():
    assert published("main", "pacs", "art_painting", "ERM", {}, 0).mean == 78.82
    assert published("main", "vlcs", "sun", "Tent", {}, 100) is not None
    assert published("views", "pacs", "art_painting", "Tent+SAFER", {"predictor_options.views": 4}, 50).mean == 74.5
    assert published("epsilon", "pacs", "art_painting", "Tent", {"attack.eps": 2}, 100).mean == 22.61
    assert published("alpha_tau_kappa", "pacs", "art_painting", "x", {"m.tau": 0.02, "m.kappa": 0.5}, 0).mean == 83.89
    assert published("views", "pacs", "cartoon", "Tent+SAFER", {"predictor_options.views": 4}, 50) is None
    assert published("main", "synthetic", "sketch", "ERM", {}, 0) is None
    assert published("eot", "pacs", "art_painting", "Tent+SAFER", {"attack.draws": 0}, 100).note
    assert not published("eot", "pacs", "art_painting", "Tent+SAFER", {"attack.draws": 1}, 100).note
    assert published("pooling", "pacs", "average", "Tent", {}, 0).std is None


# --- tables ---------------------------------------------------------------------------------------------------------


def made_up(name, dataset=PACS, seeds=3, figure=lambda cell: 50.0):
    shipped = plan.load(name)
    return shipped, [(cell, {"accuracy": figure(cell)}) for cell in plan.cells(shipped, dataset, seeds=seeds)]


def test_means_and_deviations_over_seeds():
    """The average over targets is taken within each seed, the deviation over seeds."""

    def figure(cell):
        return 10.0 * PACS.domains.index(cell.target) + cell.seed**2 + (5 if cell.row.label == "Tent" else 0)

    shipped, found = made_up("main", figure=figure)
    table = tables.tables(shipped, found, "pacs")[0]
    tent = dict(table.rows)["Tent"]
    column = table.columns.index("photo, 0 %")
    values = [20 + s * s + 5 for s in range(3)]
    assert tent[column].mean == pytest.approx(statistics.mean(values))
    assert tent[column].std == pytest.approx(statistics.stdev(values))
    average = tent[table.columns.index("average, 0 %")]
    assert average.mean == pytest.approx(statistics.mean(15 + s * s + 5 for s in range(3)))
    assert average.std == pytest.approx(statistics.stdev([0, 1, 4]))
    assert average.paper.mean == pytest.approx(85.35, abs=0.01)


def test_the_cost_is_the_median_run_of_a_label_and_setting():
    shipped, found = made_up("views", seeds=3)
    times = {0: 1.0, 1: 2.0, 2: 9.0}
    found = [(cell, {**MADE_UP, "ms_per_step": times[cell.seed]}) for cell, _ in found]
    cost = dict(tables.cost(found))
    assert set(cost) == {f"{row.label}, views {v}" for row in shipped.grids[0].rows for v in (1, 2, 3, 4)}
    assert all(figures == {"ms_per_step": 2.0, "images_per_s": 200.0, "peak_mb": 0.0} for figures in cost.values())


def test_best_is_bold_and_second_underlined():
    shipped, found = made_up("alpha-mode", figure=lambda cell: 60.0 + len(cell.row.label))
    table = tables.tables(shipped, found, "pacs")[0]
    text = tables.markdown(table)
    assert text.count("**") == 2 * 3
    assert "| Tent+SAFER-A(sigmoid) | **81.0 ± 0.0**" in text
    assert "| Tent+SAFER-A(linear) | <u>80.0 ± 0.0</u>" in text
    assert r"\textbf{81.0 $\pm$ 0.0}" in tables.latex(table)
    assert r"\underline{80.0 $\pm$ 0.0}" in tables.latex(table)


def test_a_missing_run_is_a_dash_and_no_average_hides_it():
    shipped, found = made_up("main", seeds=1)
    found = [(c, r) for c, r in found if (c.row.label, c.attack_rate, c.target) != ("ERM", 50, "photo")]
    table = tables.tables(shipped, found, "pacs")[0]
    row = dict(table.rows)["ERM"]
    assert row[table.columns.index("photo, 50 %")].mean is None
    assert row[table.columns.index("average, 50 %")].mean is None
    assert row[table.columns.index("average, 0 %")].mean == 50.0
    assert "–" in tables.markdown(table)


def test_an_average_over_the_targets_that_happen_to_be_done_is_none():
    """Half-way through a study: two of four targets."""
    shipped, found = made_up("main", seeds=1)
    done = [(c, r) for c, r in found if c.target in ("photo", "sketch")]
    table = tables.tables(shipped, done, "pacs", [cell for cell, _ in found])[0]
    row = dict(table.rows)["Tent"]
    assert row[table.columns.index("photo, 0 %")].mean == 50.0
    assert row[table.columns.index("average, 0 %")].mean is None


def test_a_target_that_is_asked_for_twice_is_run_once():
    cells = plan.cells(plan.load("main"), PACS, only=["sketch", "sketch"])
    assert len(cells) == len(plan.cells(plan.load("main"), PACS, only=["sketch"]))


def test_an_average_over_some_targets_is_not_put_beside_the_papers():
    shipped, found = made_up("main", seeds=1)
    found = [(c, r) for c, r in found if c.target in ("photo", "sketch")]
    table = tables.tables(shipped, found, "pacs")[0]
    average = dict(table.rows)["Tent"][table.columns.index("average, 0 %")]
    assert average.mean == 50.0
    assert average.paper is None


def test_unfinished_settings_do_not_win():
    def figure(cell):
        return 95.0 if cell.varied["predictor_options.mixing.tau"] == 0.5 else 60.0

    shipped, found = made_up("alpha-signal", figure=figure)
    half = [(c, r) for c, r in found if r["accuracy"] != 95.0 or c.attack_rate == 0]
    assert "tau 0.5" not in tables.tables(shipped, half, "pacs")[0].rows[0][0]
    assert "tau 0.5" in tables.tables(shipped, found, "pacs")[0].rows[0][0]


def test_the_best_of_a_sweep_is_one_setting():
    """Of a signal's settings the one with the best mean over all rates is shown, not the best of every column."""

    def figure(cell):
        tau = cell.varied["predictor_options.mixing.tau"]
        return {0: 90.0 if tau == 0.5 else 80.0, 50: 70.0, 100: 20.0 if tau == 0.5 else 60.0}[cell.attack_rate]

    shipped, found = made_up("alpha-signal", figure=figure)
    label, entries = tables.tables(shipped, found, "pacs")[0].rows[0]
    assert "tau 0.05" in label
    assert [entry.mean for entry in entries] == [80.0, 70.0, 60.0]


def test_a_curve_shows_the_setting_that_its_table_shows():
    def figure(cell):
        return 90.0 if cell.varied["predictor_options.mixing.tau"] == 0.05 else 10.0

    shipped, found = made_up("alpha-signal", figure=figure)
    grid = shipped.grids[0].model_copy(update={"figure": "lines"})
    drawn = shipped.model_copy(update={"grids": (grid,)})
    table = tables.tables(drawn, found, "pacs")[0]
    chosen = [(c, r) for c, r in found if r["accuracy"] == 90]
    assert drawings.drawing(drawn, 0, found, table) == drawings.drawing(drawn, 0, chosen, table)


def test_side_by_side_and_comma_separated():
    shipped, found = made_up("views")
    table = tables.tables(shipped, found, "pacs")[0]
    beside = tables.beside_the_paper(table)
    assert "| Tent+SAFER | views 4, 50 % | 50.0 ± 0.0 | 74.5 | -24.5 |" in beside
    lines = list(csv.DictReader(tables.comma_separated([table, table]).splitlines()))
    assert len(lines) == 24
    one = [line for line in lines if (line["predictor_options.views"], line["attack_rate"]) == ("1", "0.0")]
    assert {line["paper_mean"] for line in one} == {"65.38"}
    assert {line["target"] for line in lines} == {"art_painting"}


@pytest.mark.parametrize("name", SIZES)
def test_figures_are_the_same_bytes_for_the_same_numbers(name):
    shipped, found = made_up(name, seeds=2, figure=lambda cell: 40.0 + cell.seed + cell.attack_rate / 4)
    found = [(c, {**r, "ms_per_step": 5.0, "rolling": [r["accuracy"]] * 5}) for c, r in found]
    made = tables.tables(shipped, found, "pacs")
    for number, table in enumerate(made):
        first, second = (drawings.drawing(shipped, number, found, table) for _ in range(2))
        if shipped.grids[number].figure in ("none", "pictures"):
            assert first is None
        else:
            assert first.svg == second.svg
            assert first.svg.startswith("<svg")
            assert first.png.startswith(b"\x89PNG")


# --- end to end -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def everything(store):
    """The tasks of all shipped plans, carried out as one."""
    studies = {name: quick(name, store)[0] for name in SIZES}
    tasks = {task.name: task for study in studies.values() for task in study.tasks}
    place = Place(store, count=QUICK_COUNT)
    ordered = sorted(tasks.values(), key=lambda task: task.kind == "run")
    assert engines.execute("local", ordered, place, lambda event: None, workers=WORKERS, threads=1) == {}
    return studies, place


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SIZES)
def test_every_plan_runs_end_to_end_at_its_quick_size(name, everything):
    study, place = everything[0][name], everything[1]
    page = publish(study, place).read_text()
    assert states(study, place) == {"done": len(set(study.runs))}
    found, problems = study.found(place)
    assert len(found) == len(study.cells)
    assert problems == []
    for cell, row in found:
        assert (row["target"], row["attack_rate"], row["seed"]) == (cell.target, cell.attack_rate, cell.seed)
        assert (row["method"], row["predictor"]) == (cell.row.method, cell.row.predictor)
        assert row["images"] == 32 - (32 % 3 if "+" in cell.target else 0)
        assert math.isfinite(row["nll"])
    folder = place.store / "reports" / study.folder
    assert {"rows.jsonl", "tables.md", "tables.tex", "tables.csv"} <= {path.name for path in folder.iterdir()}
    drawn = [grid.figure for grid in study.plan.grids]
    expected = [f"figure-{i}.svg" for i, kind in enumerate(drawn) if kind not in ("none", "pictures")]
    assert sorted(p.name for p in folder.glob("*.svg")) == sorted(expected)
    assert page.count("<svg") == len(expected)
    for row in {cell.row.label for cell in study.cells}:
        assert row.replace("&", "&amp;") in page


def test_asking_again_makes_nothing_again(everything):
    study, place = everything[0]["views"], everything[1]
    rows = [place.results.path(name) for name in study.runs]
    before = [path.stat().st_mtime_ns for path in rows]
    failed, events = carried_out(study, place)
    assert (failed, events) == ({}, [])
    assert [path.stat().st_mtime_ns for path in rows] == before
    assert estimate(study, place) == 0


def test_a_default_spelt_out_is_the_same_run(tmp_path):
    path = tmp_path / "p.toml"
    path.write_text(SMALL)
    spelt = tmp_path / "q.toml"
    options = '{ views = 4, pool = "cc_drop", pipeline = { max_operators = 3 } }'
    spelt.write_text(SMALL.replace('predictor = "safer"', f'predictor = "safer"\npredictor_options = {options}'))
    assert quick(path, tmp_path)[0].runs == quick(spelt, tmp_path)[0].runs


@pytest.mark.parametrize(("options", "beside"), [({}, True), ({"quick": True}, False), ({"images": 2}, False)])
def test_only_whole_streams_are_put_beside_the_papers(options, beside, tmp_path):
    """Quick figures, and those of a few images, are no others' to compare with."""
    data = image_folder(tmp_path / "data", PACS.domains, PACS.classes, count=1)
    place = Place(tmp_path / "store", str(data), side=8, cache=tmp_path / "cache", weights="hash:any")
    study = prepare("views", place, seeds=1, **options)
    for name in set(study.runs):
        place.results.write({**MADE_UP, "run": name})
    folder = publish(study, place).parent
    for page in ("tables.md", "report.html"):
        assert ("Beside the paper" in (folder / page).read_text()) == beside
    paper = {line["paper_mean"] for line in csv.DictReader((folder / "tables.csv").read_text().splitlines())}
    assert (paper != {""}) == beside


def test_a_quick_page_does_not_write_over_a_real_one(tmp_path):
    assert quick("views", tmp_path)[0].folder != prepare("views", Place(tmp_path)).folder


def test_foreign_files_in_the_store_are_left_alone(tmp_path):
    results = Results(tmp_path)
    row = results.write({"run": "0123456789abcdef", "accuracy": 50.0})
    (tmp_path / "notes.jsonl").write_text("mine\n")
    assert results.rows() == [row]
    assert results.query("select accuracy from rows") == [(50.0,)]


def test_rows_are_asked_in_sql(everything):
    study, place = everything[0]["alpha-mode"], everything[1]
    names = ", ".join(f"'{name}'" for name in study.runs)
    counted = place.results.query(f"select count(*), count(distinct run) from rows where run in ({names})")[0]
    assert counted == (len(study.runs),) * 2
    best = place.results.query(f"select max(accuracy) from rows where predictor = 'safer' and run in ({names})")
    asked = [r["accuracy"] for r in place.results.rows(study.runs) if r["predictor"] == "safer"]
    assert best[0][0] == max(asked)


def test_tasks_travel_as_a_file(store, tmp_path, small):
    study, _ = quick(small, store)
    write_tasks(tmp_path / "tasks.json", study.tasks)
    elsewhere = Place(tmp_path / "there", count=QUICK_COUNT)
    for task in read_tasks(tmp_path / "tasks.json"):
        execute(task, elsewhere)
    assert states(study, elsewhere) == {"done": 4}
    others = Place(tmp_path / "other data")  # 1,400 images a domain
    with pytest.raises(StoreError, match="other data"):
        execute(study.tasks[0], others)
    assert not others.store.exists()
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(StoreError, match="no tasks"):
        read_tasks(tmp_path / "other.json")


def test_a_sink_gets_every_row(everything, tmp_path):
    study, place = everything[0]["views"], everything[1]
    send = create("tensorboard", tmp_path)
    row = place.results.row(study.runs[0])
    send("a run", row)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard" / row["run"]))
    events.Reload()
    assert events.Scalars("accuracy")[0].value == pytest.approx(row["accuracy"])
    with pytest.raises(ValueError, match="expected one of tensorboard, mlflow"):
        create("cloud", tmp_path)


# --- what goes wrong ------------------------------------------------------------------------------------------------


def rows_of(study, place):
    return {name: without(place.results.row(name)) for name in study.runs}


@pytest.fixture(scope="module")
def undisturbed(store, small):
    study, place = quick(small, store)
    assert carried_out(study, place)[0] == {}
    return rows_of(study, place)


def test_a_damaged_row_is_named_and_the_others_stay(store, small, undisturbed, tmp_path):
    study, _ = quick(small, store)
    place = Place(tmp_path, count=QUICK_COUNT)
    results = Results(tmp_path / "runs")
    results.folder.mkdir()
    for name in set(study.runs):
        results.path(name).write_bytes((store / "runs" / f"{name}.jsonl").read_bytes())
    damaged = results.path(study.runs[0])
    damaged.write_text(damaged.read_text().replace('"accuracy": ', '"accuracy": 1'))
    found, problems = study.found(place)
    assert len(found) == 3
    assert str(damaged) in problems[0]
    assert "Remove it" in problems[0]
    assert str(damaged) in publish(study, place).read_text()
    damaged.write_text("{half a row")
    assert "not JSON" in study.found(place)[1][0]
    assert states(study, place) == {"done": 3, "damaged": 1}
    done = subprocess.run([*command(small, tmp_path), "--json"], capture_output=True, text=True)
    assert done.returncode == 1
    assert json.loads(done.stdout)["damaged"] == 1


def test_a_worker_needs_neither_pydantic_nor_duckdb(tmp_path, small):
    """So that tasks can be carried out on a machine that has torch and little else."""
    study, _ = quick(small, tmp_path)
    write_tasks(tmp_path / "tasks.json", study.tasks)
    program = """
import sys
sys.modules.update(pydantic=None, duckdb=None, fastapi=None, kornia=None)  # importing any of them fails
from pathlib import Path
from safer_tta import engines
from safer_tta.bench.tasks import QUICK_COUNT, Place, read_tasks
if __name__ == "__main__":
    tasks, place = read_tasks(Path("tasks.json")), Place(Path("there"), count=QUICK_COUNT)
    assert engines.execute("local", tasks, place, lambda event: None, workers=1, threads=1) == {}
    assert all(task.done(place) for task in tasks)
"""
    (tmp_path / "program.py").write_text(program)
    subprocess.run([sys.executable, "program.py"], cwd=tmp_path, check=True)


def test_a_task_that_fails_is_named_and_the_others_go_on(store, small, tmp_path):
    study, place = quick(small, tmp_path / "s")
    source = next(task for task in study.tasks if task.kind == "source")
    surrogate = next(task for task in study.tasks if task.kind == "surrogate")
    surrogate.path(place).parent.mkdir(parents=True)
    surrogate.path(place).write_bytes(b"not a model")
    failed, _ = carried_out(study, place)
    assert source.done(place)
    assert states(study, place) == {"done": 2, "not started": 2}  # the clean streams need no surrogate
    attacked = [label for label in failed if label.startswith("pgd of")]
    assert "TensorFileError" in failed[attacked[0]]
    assert sum("which failed" in why for why in failed.values()) == 2


def test_a_full_disk_is_named_and_earlier_rows_stay(store, small, undisturbed, tmp_path):
    """Files above 40 kB cannot be written: the model is refused, and what was there is untouched."""
    place = Place(tmp_path, count=QUICK_COUNT)
    kept = place.results
    kept.folder.mkdir()
    study, _ = quick(small, store)
    first = next(iter(undisturbed))
    kept.path(first).write_bytes((store / "runs" / f"{first}.jsonl").read_bytes())
    before = kept.path(first).read_bytes()

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    done = subprocess.run([*command(small, tmp_path)], preexec_fn=limited, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "File too large" in done.stderr
    assert kept.path(first).read_bytes() == before
    assert states(study, place)["done"] == 1
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".part")]


# The number of threads changes the last digits of a sum, and so what is learnt from it.
ALONE = ("--workers", "1", "--threads", "1")


def command(plan_file, folder):
    return [sys.executable, "-m", "safer_tta.cli", "bench", str(plan_file), "--quick", "--store", str(folder), *ALONE]


def files(folder, half_done):
    """What lies in a store, finished or half-done: temporary files, checkpoints, parts of an array."""
    found = {path for path in folder.rglob("*") if path.suffix and path.parent.name != "locks"}
    return {path for path in found if half_done == (path.suffix in (".part", ".progress") or path.stem[:5] == "part-")}


def killed_on_sight(folder, half_done, arguments, **options):
    """Whether a process was killed as soon as it had left something of this kind, or else ended by itself."""
    before = files(folder, half_done)
    process = subprocess.Popen(arguments, start_new_session=True, stdout=subprocess.DEVNULL, **options)
    while process.poll() is None:
        if files(folder, half_done) - before:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return True
        time.sleep(0.001)
    return False


def test_kills_on_the_way_change_nothing(small, undisturbed, tmp_path):
    """The whole process group is killed while it writes a file and when it has just finished one, in turn; the rows
    in the end are the same."""
    quiet = {**os.environ, "OMP_NUM_THREADS": "1"}
    study, place = quick(small, tmp_path)
    found = []
    for half_done in 4 * (True, False):
        if not killed_on_sight(tmp_path, half_done, command(small, tmp_path), env=quiet):
            break
        found.append((sum(task.done(place) for task in study.tasks), bool(files(tmp_path, half_done=True))))
    assert any(0 < done < len(study.tasks) for done, _ in found)
    assert any(half_done for _, half_done in found)
    last = subprocess.run([*command(small, tmp_path), "--json"], capture_output=True, env=quiet)
    assert json.loads(last.stdout)["done"] == 4
    assert rows_of(study, place) == undisturbed
    assert len(list(place.results.folder.glob("*.jsonl"))) == 4


def test_two_processes_on_one_store_neither_lose_nor_double_a_row(small, undisturbed, tmp_path):
    both = [subprocess.Popen([*command(small, tmp_path)], stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    study, place = quick(small, tmp_path)
    assert rows_of(study, place) == undisturbed
    assert len(list(place.results.folder.glob("*.jsonl"))) == 4


def descendants():
    """{process: its command line} of all that this process has started, and they in turn."""
    running = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may have ended meanwhile
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            running[int(place.name)] = (parent, (place / "cmdline").read_bytes())
    mine = {os.getpid()}
    while new := {pid for pid, (parent, _) in running.items() if parent in mine} - mine:
        mine |= new
    return {pid: running[pid][1] for pid in mine - {os.getpid()}}


def test_a_worker_that_dies_is_replaced(small, undisturbed, tmp_path):
    study, place = quick(small, tmp_path)
    killed = []

    def report(event):
        if event.what == "started" and event.task.kind == "run" and not killed:
            workers = [child for child, line in descendants().items() if b"spawn_main" in line]
            for worker in workers:
                os.kill(worker, signal.SIGKILL)
            killed.extend(workers)

    assert engines.execute("local", study.tasks, place, report, workers=1, threads=1) == {}
    assert killed
    assert rows_of(study, place) == undisturbed


class Deadly(Task):
    """Kills every process that carries it out, and none that hands it out."""

    def done(self, place):
        if multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return False


def test_a_task_that_kills_its_workers_is_tried_three_times(small, tmp_path):
    """Then it is named, and the others go on."""
    study, place = quick(small, tmp_path)
    first = study.runs[0]
    tasks = [Deadly(t.kind, t.label, t.definition, t.needs) if t.name == first else t for t in study.tasks]
    died = []

    def report(event):
        if event.what == "retried":
            died.append(event.task.name)
            assert len(died) < 5, "tried again and again"

    failed = engines.execute("local", tasks, place, report, workers=1, threads=1)
    assert died == [first] * 2
    (why,) = failed.values()
    assert "worker died" in why
    assert "3 times" in why
    assert states(study, place) == {"done": 3, "not started": 1}


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.mark.parametrize("kill", [False, True])
def test_ray_gives_the_same_rows(cluster, small, undisturbed, tmp_path, kill):
    """On a real cluster of two workers; a worker killed mid-run changes nothing."""
    study, place = quick(small, tmp_path)
    killed = []

    def report(event):
        if kill and event.what == "started" and event.task.kind == "source":
            until = time.monotonic() + 60
            while not killed and time.monotonic() < until:  # until it is under way
                workers = [child for child, line in descendants().items() if line.startswith(b"ray::_work")]
                for worker in workers:
                    os.kill(worker, signal.SIGKILL)
                killed.extend(workers)

    assert engines.execute("ray", study.tasks, place, report, threads=1) == {}
    assert bool(killed) == kill
    assert rows_of(study, place) == undisturbed


def test_an_unknown_engine_is_named(small, store):
    study, place = quick(small, store)
    with pytest.raises(ValueError, match="expected local or ray"):
        engines.execute("cloud", study.tasks, place, lambda event: None)


# --- the page, in a browser -----------------------------------------------------------------------------------------


@pytest.mark.skipif(CHROMIUM is None, reason="Debian's chromium is not installed")
def test_the_page_in_a_browser(everything):
    """No console message, no request, tables sort both ways, figures have a size."""
    api = pytest.importorskip("playwright.sync_api")
    study, place = everything[0]["main"], everything[1]
    page_file = publish(study, place)
    heard = []
    with api.sync_playwright() as browser_api:
        browser = browser_api.chromium.launch(executable_path=str(CHROMIUM), args=CHROMIUM_FLAGS)
        page = browser.new_page()
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on("request", lambda request: heard.append(request.url) if "report.html" not in request.url else None)
        page.goto(page_file.as_uri())
        column = "table >> nth=0 >> tbody tr td:nth-child(2)"
        heads = page.locator("table >> nth=0 >> thead button")
        heads.nth(1).click()
        down = [float(t) for t in page.locator(column).all_inner_texts()]
        heads.nth(1).press("Enter")  # by keyboard as well
        up = [float(t) for t in page.locator(column).all_inner_texts()]
        box = page.locator("svg").first.bounding_box()
        browser.close()
    assert heard == []
    assert len(down) == 14
    assert down == sorted(down, reverse=True)
    assert up == sorted(up)
    assert box["width"] > 300
    assert box["height"] > 100


# --- the command ----------------------------------------------------------------------------------------------------


def safer(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "safer_tta.cli", "bench", *map(str, arguments)], capture_output=True, text=True
    )


def test_the_command_lists_shows_and_counts(store, small, undisturbed):
    listed = safer("list")
    assert listed.returncode == 0
    assert all(name in listed.stdout for name in SIZES)
    dry = safer(small, "--quick", "--store", store, "--dry-run", "--json")
    assert json.loads(dry.stdout)["runs"] == 4
    status = safer("status", small, "--quick", "--store", store, "--json")
    assert json.loads(status.stdout)["done"] == 4
    wrong = safer("mian")
    assert wrong.returncode == 2
    assert "did you mean 'main'" in wrong.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workers", "-1"], "equal to 1"),
        (["--seeds", "0"], "equal to 1"),
        (["--images", "-5"], "equal to 1"),
        (["--engine", "cloud"], "local or ray"),
        (["--sink", "cloud"], "tensorboard"),
        (["--device", "cuda"], "cpu"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(arguments, said, small, tmp_path):
    if torch.cuda.is_available() and "cuda" in arguments:
        pytest.skip("there is a GPU here")
    done = safer(small, "--quick", "--store", tmp_path / "s", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_an_estimate_is_there_before_the_first_run(small, tmp_path):
    study, place = quick(small, tmp_path)
    assert estimate(study, place) > 0


def test_embedded_data_of_another_size_is_other_data():
    assert open_dataset("synthetic").identity != open_dataset("synthetic", count=QUICK_COUNT).identity
