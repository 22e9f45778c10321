import json
import re

import pytest
import torch

from safer_tta.bench.results import without
from safer_tta.bench.study import prepare, states
from safer_tta.bench.tasks import Place, execute
from tests.bench.helpers import PLANS
from tests.data.parts import image_folder
from tests.processes import python

SAME = """
title = "Runs of every kind"
[[grids]]
rates = [0, 50]
targets = ["two"]
[[grids.rows]]
label = "recommended"
method = "tent"
predictor = "safer-g"
[[grids.rows]]
label = "medians of a robust model, by classes"
method = "pl"
norm = "medbn"
source = "robust"
stream = { order = "correlated", batch = 4 }
attack = { eps = 4, step = 1, steps = 3 }
[[grids.rows]]
label = "l2"
predictor = "jpeg"
attack = { norm = "l2", eps = 255 }
[[grids.rows]]
label = "live"
method = "tent"
predictor = "safer"
attack = { name = "eot", steps = 2 }
"""
# What says the same to `safer run`. Method and predictor are left out where they are what is recommended.
OPTIONS = {
    "recommended": "",
    "medians of a robust model, by classes": "--method pl --predictor plain --norm medbn --order correlated --batch 4 "
    "--eps 4/255 --step 1/255 --attack-steps 3",
    "l2": "--method none --predictor jpeg --attack-norm l2 --eps 1",
    "live": "--predictor safer --attack eot --attack-steps 2",
}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def same(request, tmp_path_factory):
    """A plan that is carried out on a folder of images, and for every run what `safer run` is to be told."""
    folder = tmp_path_factory.mktemp("same")
    data = image_folder(folder / "data", count=6)
    (folder / "same.toml").write_text(SAME)
    place = Place(folder / "store", str(data), side=16, cache=folder / "cache")
    size = {"architecture": "small", "steps": 2, "images": 8, "precision": request.param}
    study = prepare(str(folder / "same.toml"), place, seeds=2, **size)
    for task in study.tasks:
        execute(task, place)
    known, told = {task.name: task for task in study.tasks}, {}
    for cell, name in zip(study.cells, study.runs, strict=True):
        needs = [known[need] for need in known[name].needs]
        (source,) = [need.path(place) for need in needs if need.kind == "source"]
        surrogates = [need.path(place) for need in needs if need.kind == "surrogate"]
        told[name] = ["--data", data, "--target", "two", "--model", source, "--images", 8, "--seed", cell.seed]
        told[name] += ["--attack-rate", cell.attack_rate, "--precision", request.param]
        told[name] += [word for path in surrogates for word in ("--surrogate", path)]
        told[name] += OPTIONS[cell.row.label].split()
    return study, place, told


def test_safer_run_finds_the_rows_of_safer_bench(same, safer, monkeypatch):
    study, place, told = same
    assert len(told) == len(study.cells) == 4 * 2 * 2, "the names of runs differ"
    monkeypatch.setenv("SAFER_CACHE", str(place.cache))
    monkeypatch.setattr("safer_tta.bench.run.Record.add", lambda *_: pytest.fail("it was run again"))
    for name, options in told.items():
        ended = safer("run", *options, "--store", place.store, "--json")
        assert ended.returncode == 0, ended.stderr
        assert json.loads(ended.stdout) == place.results.row(name)


def test_safer_bench_finds_the_rows_of_safer_run(same, safer, monkeypatch, tmp_path):
    study, place, told = same
    monkeypatch.setenv("SAFER_CACHE", str(place.cache))
    for name, options in told.items():
        row = json.loads(safer("run", *options, "--store", tmp_path, "--json").stdout)
        assert row["run"] == name
        assert without(row) == without(place.results.row(name))
    assert states(study, Place(tmp_path)) == {"done": len(study.runs)}


def test_plans_are_listed_shown_and_counted(safer, store, small, undisturbed):
    listed = safer("bench", "list")
    assert listed.returncode == 0
    assert all(name in listed.stdout for name in PLANS)
    assert json.loads(safer("bench", "list", "--json").stdout).keys() == set(PLANS)
    dry = json.loads(safer("bench", small, "--quick", "--store", store, "--dry-run", "--json").stdout)
    assert dry["runs"] == dry["done"] == 4
    assert dry["seconds_on_one_worker"] == 0
    assert json.loads(safer("bench", "status", small, "--quick", "--store", store, "--json").stdout)["done"] == 4


@pytest.mark.parametrize("options", ["", "--weights none", "--weights none --architecture resnet18"])
def test_a_quick_look_at_ones_own_folder_needs_no_weights(options, safer, tmp_path):
    data = image_folder(tmp_path / "data", count=6)
    quick = ("bench", "attack-rate", "--quick", "--dry-run", "--json", "--data", data, "--side", 16)
    ended = safer(*quick, "--store", tmp_path / "store", *options.split())
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["runs"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_device_that_is_not_there_is_refused(safer, small, tmp_path):
    ended = safer("bench", small, "--quick", "--store", tmp_path / "s", "--device", "cuda")
    assert ended.returncode == 2
    assert "expected cpu" in ended.stderr
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_process_ends_with_one_line_and_a_code():
    ended = python("-m", "safer_tta.cli", "bench", "mian")
    assert ended.returncode == 2
    assert re.fullmatch(r"error: .*'mian' is unknown \(did you mean 'main'\?\).*\n", ended.stderr)


def test_an_unknown_executor_is_refused_before_a_plan_is_shown(safer, small, tmp_path):
    ended = safer("bench", small, "--quick", "--store", tmp_path / "s", "--dry-run", "--executor", "cloud")
    assert ended.returncode == 2
    assert "--executor 'cloud' is unknown; expected one of local, ray" in ended.stderr
    assert not ended.stdout
