import itertools
from collections import Counter

import pytest

from safer_tta.bench import plan
from safer_tta.errors import PlanError, UnknownNameError
from safer_tta.methods import METHODS
from tests.bench.helpers import PACS, PLANS, SMALL, quick

TARGETS = {"each": PACS.domains, "one": ("art_painting",), "rest": ("cartoon+photo+sketch",)}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_expands_to_every_combination_once(name):
    shipped = plan.load(name)
    found = Counter(
        (cell.grid, cell.row.label, cell.target, cell.attack_rate, cell.seed, tuple(cell.varied.items()))
        for cell in plan.cells(shipped, PACS, seeds=2)
    )
    expected = Counter(
        (number, row.label, target, rate, seed, tuple(zip(grid.vary, values, strict=True)))
        for number, grid in enumerate(shipped.grids)
        for row, target, rate, seed, values in itertools.product(
            grid.rows, TARGETS[grid.targets], grid.rates, (0, 1), [*itertools.product(*grid.vary.values())]
        )
    )
    assert found == expected
    assert expected


@pytest.mark.parametrize("name", PLANS)
def test_what_varies_reaches_the_row(name):
    for cell in plan.cells(plan.load(name), PACS, seeds=1):
        for place, value in cell.varied.items():
            inner = cell.row.model_dump()
            for part in place.split("."):
                inner = inner.get(part)
            transferred = (place, value) == ("attack.draws", 0)
            assert inner == (None if transferred else value)


def test_plans_are_shipped_by_the_names_of_their_files():
    assert sorted(plan.shipped()) == PLANS


def test_the_plan_of_methods_has_every_method_plain_and_on_safer():
    (grid,) = plan.load("methods").grids
    found = Counter((row.method, row.predictor, row.norm) for row in grid.rows)
    expected = {(method, predictor, None) for method in METHODS for predictor in ("plain", "safer")}
    assert found == Counter([*expected, ("tent", "plain", "medbn"), ("tent", "safer", "medbn")])


def test_eot_without_draws_is_the_transferred_attack():
    cells = plan.cells(plan.load("eot"), PACS, seeds=1)
    used = {(cell.varied.get("attack.draws") == 0, cell.row.attack.name) for cell in cells}
    assert used == {(True, "pgd"), (False, "eot")}


def test_a_quick_size_takes_fewer_steps_also_of_an_attack_that_chooses_their_size():
    for name, steps in (("eot-margin", 10), ("apgd-eot", 10), ("transfer", 2)):
        assert plan.Attack(name=name).threat(0.1)["steps"] == steps
        assert plan.Attack(name=name, steps=7).threat(0.1)["steps"] == 7
    assert "steps" not in plan.Attack(name="autoattack").threat(0.1)
    assert plan.Attack(name="square").threat(0.1)["queries"] == 100
    assert plan.Attack(name="square", queries=7).threat(0.1)["queries"] == 7


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('method = "tent"', 'method = "tnt"'), "did you mean 'tent'"),
        (('method = "tent"', 'method = "tent"\nnorm = "medbm"'), "did you mean 'medbn'"),
        (('method = "tent"', 'method = "tent+medbn"'), "method 'tent.medbn' is unknown"),
        (('predictor = "safer"', 'predictor = "safe"'), "did you mean 'safer'"),
        (('method = "tent"', 'method = "tent"\nattack = { name = "pdg" }'), "did you mean 'pgd'"),
        (("rates = [0, 100]", "rates = [0, 101]"), "0 to 100"),
        (("rates = [0, 100]", "rate = [0, 100]"), "grids.0.rate"),
        (('label = "Tent"', 'labl = "Tent"'), "label"),
        (("rates = [0, 100]", 'targets = ["sktch"]'), "did you mean 'sketch'"),
        (('predictor = "safer"', 'predictor = "safer"\npredictor_options = { vews = 3 }'), "did you mean 'views'"),
        (('predictor = "safer"', 'predictor = "safer"\npredictor_options = { views = -3 }'), "views is -3"),
        (('method = "tent"', 'method = "tent"\noptions = { lr = -1.0 }'), "lr is -1.0"),
        (('title = "Two methods"', "title = "), "not TOML"),
        (('label = "Tent+SAFER"', 'label = "Tent"'), "more than one row"),
        (('figure = "bars"', 'figure = "lines"\nvary = { "predictor" = ["plain", "jpeg"] }'), "numbers"),
        (('figure = "bars"', 'figure = "lines"\nvary = { "attack.eps" = [4], "stream.batch" = [8] }'), "one axis"),
        (('figure = "bars"', 'figure = "heatmap"\nvary = { "attack.eps" = [4] }'), "two varied"),
        (('figure = "bars"', 'best_of = ["attack.eps"]'), "not varied"),
        (('figure = "bars"', 'vary = { "options" = [{ lr = 0.1 }] }'), "numbers, words"),
        (('figure = "bars"', 'targets = "rest"'), "continual or mixed"),
        (('figure = "bars"', 'vary = { "attack.eps" = [4, 4] }'), "a value twice"),
        (("rates = [0, 100]", "rates = [0, 0]"), "a value twice"),
        (('figure = "bars"', 'vary = { "predictor.tau" = [0.1] }'), "expected a table"),
        (('method = "tent"', 'method = "tent"\nattack = { name = "autoattack", steps = 3 }'), "no option steps"),
        (('method = "tent"', 'method = "tent"\nattack = { draws = 3 }'), "no option draws"),
        (('method = "tent"', 'method = "tent"\nattack = { name = "apgd-eot", step = 3 }'), "no option step"),
        (('method = "tent"', 'method = "tent"\nattack = { name = "patch", eps = 4 }'), "no option eps"),
        (('method = "tent"', 'method = "tent"\nattack = { name = "square", eps = 300, norm = "l2" }'), "expected linf"),
    ],
)
def test_mistakes_are_named_before_anything_is_made(change, said, tmp_path):
    assert change[0] in SMALL
    path = tmp_path / "p.toml"
    path.write_text(SMALL.replace(*change, 1))
    with pytest.raises((PlanError, UnknownNameError), match=said):
        quick(path, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_target_that_is_named_twice_is_run_once():
    main = plan.load("main")
    assert plan.cells(main, PACS, only=["sketch", "sketch"]) == plan.cells(main, PACS, only=["sketch"])


def test_a_file_that_does_not_exist_is_said_to_be_missing(tmp_path):
    with pytest.raises(PlanError, match=r"no\.toml does not exist"):
        plan.load(str(tmp_path / "no.toml"))
