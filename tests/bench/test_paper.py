import csv
from collections import Counter

from safer_tta.bench import plan
from safer_tta.bench.paper import FILES, published
from tests.bench.helpers import PACS


def read(name):
    with (FILES / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def test_every_published_figure_is_found_by_the_plan_of_its_study():
    """Each row of the CSV files is compared with some cell of some shipped plan."""
    found = Counter()
    for shipped in plan.shipped().values():
        for cell in plan.cells(shipped, PACS, seeds=1):
            grid = shipped.grids[cell.grid]
            varied = {k: v for k, v in cell.varied.items() if k not in grid.best_of}
            for target in (cell.target, "average"):
                if published(grid.paper, "pacs", target, cell.row.label, varied, cell.attack_rate):
                    found[grid.paper, target == "average", cell.row.label, str(varied), target, cell.attack_rate] += 1
    count = Counter(key[0] for key in found if key[1] == (key[0] == "pooling"))
    expected = Counter(row["study"] for row in read("ablations"))
    expected["main"] = sum(row["dataset"] == "PACS" for row in read("main_tables"))
    expected["alpha_tau_kappa"] = len(read("alpha_tau_kappa"))
    del expected["alpha_parameters"]  # see the next test
    assert count == expected


def test_the_published_parameter_curves_are_the_best_of_the_published_heatmap():
    """So the plan alpha-parameters, which varies one parameter at a time, is not compared with them."""
    curves = [row for row in read("ablations") if row["parameter"] in ("tau", "kappa")]
    assert len(curves) == 28
    for point in curves:
        place = (float(point["value"]), float(point["attack_rate_percent"]))
        heat = [(cell[point["parameter"]], cell["attack_rate"], cell["acc_mean"]) for cell in read("alpha_tau_kappa")]
        line = [figure for *where, figure in (map(float, cell) for cell in heat) if tuple(where) == place]
        assert float(point["accuracy_mean"]) == max(line)


def test_published_figures_are_those_of_the_paper():
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
