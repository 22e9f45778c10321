import dataclasses

import pytest

from safer_tta.bench.graph import graph, size_for
from safer_tta.bench.plan import Cell, Row
from safer_tta.bench.tasks import QUICK_COUNT, Place, execute
from safer_tta.training.trainer import recipe_of
from tests.bench.helpers import PLANS, SMALL, quick


@pytest.mark.parametrize("name", PLANS)
def test_dependencies_come_first_and_every_cell_has_its_run(name, tmp_path):
    study, _ = quick(name, tmp_path)
    made = set()
    for task in study.tasks:
        assert made.issuperset(task.needs)
        assert task.name not in made
        made.add(task.name)
    assert set(study.runs) == {task.name for task in study.tasks if task.kind == "run"}
    assert len(study.runs) == len(study.cells)


def test_varied_places_reach_the_run(tmp_path):
    study, _ = quick("max-operators", tmp_path)
    settings = [t.definition["predictor_options"]["pipeline"] for t in study.tasks if t.kind == "run"]
    assert {pipeline["max_operators"] for pipeline in settings} == {2, 5}


def test_a_clean_stream_does_not_depend_on_the_attacker(tmp_path):
    path = tmp_path / "p.toml"
    path.write_text(SMALL.replace('figure = "bars"', 'vary = { "attack.eps" = [4, 8] }'))
    study, _ = quick(path, tmp_path)
    assert (len(study.cells), len(set(study.runs))) == (8, 6)


def test_defaults_that_are_spelt_out_are_the_same_runs(tmp_path):
    path, spelt = tmp_path / "p.toml", tmp_path / "q.toml"
    path.write_text(SMALL)
    options = '{ views = 4, pool = "cc_drop", mixing = "none", pipeline = { preset = "released", max_operators = 3 } }'
    text = SMALL.replace('predictor = "safer"', f'predictor = "safer"\npredictor_options = {options}')
    method = 'method = "tent"\noptions = { lr = 1e-3 }\nattack = { name = "pgd", eps = 8 }'
    spelt.write_text(text.replace('method = "tent"', method))
    assert quick(path, tmp_path)[0].runs == quick(spelt, tmp_path)[0].runs


@pytest.mark.parametrize("target", ["sketch", "cartoon+sketch"])
def test_a_source_model_has_not_seen_its_target(target, tmp_path):
    place = Place(tmp_path, count=QUICK_COUNT)
    row = Row(label="x", stream={"order": "mixed" if "+" in target else "shuffled"})
    size = dataclasses.replace(size_for("synthetic", quick=True), images=8)
    made, _ = graph([Cell(0, row, target, 0, seed=1)], place.dataset(), size)
    source = next(task for task in made if task.kind == "source")
    execute(source, place)
    assert set(recipe_of(source.path(place))["domains"]) == set(place.dataset().domains) - set(target.split("+"))


def test_fewer_images_than_domains_are_refused(tmp_path):
    with pytest.raises(ValueError, match="2 images for 3 domains"):
        quick("continual", tmp_path, images=2)
