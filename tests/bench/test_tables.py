import csv
import statistics

import pytest

from safer_tta.bench import tables
from safer_tta.evaluation.intervals import interval
from tests.bench.helpers import MADE_UP, PACS, made_up


def entry(table, label, column):
    return dict(table.rows)[label][table.columns.index(column)]


def test_means_and_deviations_over_seeds():
    """The average over targets is taken within each seed, and the deviation over seeds."""

    def accuracy(cell):
        return 10.0 * PACS.domains.index(cell.target) + cell.seed**2 + (5 if cell.row.label == "Tent" else 0)

    shipped, found = made_up("main", accuracy=accuracy)
    table = tables.tables(shipped, found, "pacs")[0]
    photo, average = (entry(table, "Tent", f"{target}, 0 %") for target in ("photo", "average"))
    values = [20 + s * s + 5 for s in range(3)]
    assert (photo.mean, photo.std) == pytest.approx((statistics.mean(values), statistics.stdev(values)))
    values = [15 + s * s + 5 for s in range(3)]
    assert (average.mean, average.std) == pytest.approx((statistics.mean(values), statistics.stdev(values)))
    assert average.paper.mean == pytest.approx(85.35, abs=0.01)


def test_the_cost_is_the_median_run_of_a_label_and_setting():
    shipped, found = made_up("views")
    times = {0: 1.0, 1: 2.0, 2: 9.0}
    found = [(cell, {**MADE_UP, "ms_per_step": times[cell.seed]}) for cell, _ in found]
    cost = dict(tables.cost(found))
    assert set(cost) == {f"{row.label}, views {v}" for row in shipped.grids[0].rows for v in (1, 2, 3, 4)}
    assert all(figures == {"ms_per_step": 2.0, "images_per_s": 200.0, "peak_mb": 0.0} for figures in cost.values())


def test_best_is_bold_and_second_underlined():
    shipped, found = made_up("alpha-mode", accuracy=lambda cell: 60.0 + len(cell.row.label))
    table = tables.tables(shipped, found, "pacs")[0]
    text = tables.markdown(table)
    assert text.count("**") == 2 * 3
    assert "| Tent+SAFER-A(sigmoid) | **81.0 ± 0.0 [72.2, 87.5]**" in text
    assert "| Tent+SAFER-A(linear) | <u>80.0 ± 0.0 [71.1, 86.7]</u>" in text
    assert r"\textbf{81.0 $\pm$ 0.0 [72.2, 87.5]}" in tables.latex(table)
    assert r"\underline{80.0 $\pm$ 0.0 [71.1, 86.7]}" in tables.latex(table)


def test_a_missing_run_is_a_dash_and_in_no_average():
    shipped, found = made_up("main", seeds=1)
    found = [(c, r) for c, r in found if (c.row.label, c.attack_rate, c.target) != ("ERM", 50, "photo")]
    table = tables.tables(shipped, found, "pacs")[0]
    columns = ("photo, 50 %", "average, 50 %", "average, 0 %")
    assert [entry(table, "ERM", column).mean for column in columns] == [None, None, 50.0]
    assert "–" in tables.markdown(table)


def test_an_average_is_over_all_targets_of_the_plan_and_compared_only_if_the_paper_has_the_same():
    shipped, found = made_up("main", seeds=1)
    done = [(c, r) for c, r in found if c.target in ("photo", "sketch")]
    unfinished = tables.tables(shipped, done, "pacs", [cell for cell, _ in found])[0]
    assert entry(unfinished, "Tent", "photo, 0 %").mean == 50.0
    assert entry(unfinished, "Tent", "average, 0 %").mean is None
    average = entry(tables.tables(shipped, done, "pacs")[0], "Tent", "average, 0 %")
    assert (average.mean, average.paper) == (50.0, None)


def test_unfinished_settings_do_not_win():
    def accuracy(cell):
        return 95.0 if cell.varied["predictor_options.mixing.tau"] == 0.5 else 60.0

    shipped, found = made_up("alpha-signal", accuracy=accuracy)
    half = [(c, r) for c, r in found if r["accuracy"] != 95.0 or c.attack_rate == 0]
    assert "tau 0.5" not in tables.tables(shipped, half, "pacs")[0].rows[0][0]
    assert "tau 0.5" in tables.tables(shipped, found, "pacs")[0].rows[0][0]


def test_the_best_of_a_sweep_is_one_setting():
    """It is the one with the best mean over all rates, not the best of every column."""

    def accuracy(cell):
        tau = cell.varied["predictor_options.mixing.tau"]
        return {0: 90.0 if tau == 0.5 else 80.0, 50: 70.0, 100: 20.0 if tau == 0.5 else 60.0}[cell.attack_rate]

    shipped, found = made_up("alpha-signal", accuracy=accuracy)
    label, entries = tables.tables(shipped, found, "pacs")[0].rows[0]
    assert "tau 0.05" in label
    assert [entry.mean for entry in entries] == [80.0, 70.0, 60.0]


def test_side_by_side_and_comma_separated():
    shipped, found = made_up("views")
    table = tables.tables(shipped, found, "pacs")[0]
    beside = tables.beside_the_paper(table)
    assert "| Tent+SAFER | views 4, 50 % | 50.0 ± 0.0 [40.4, 59.6] | 74.5 | -24.5 |" in beside
    lines = list(csv.DictReader(tables.comma_separated([table, table]).splitlines()))
    assert len(lines) == 2 * 4 * 3
    one = [line for line in lines if (line["predictor_options.views"], line["attack_rate"]) == ("1", "0.0")]
    assert {line["paper_mean"] for line in one} == {"65.38"}
    assert {line["target"] for line in lines} == {"art_painting"}


def test_the_interval_is_over_images_and_seeds():
    def accuracy(cell):
        return 50.0 + 2 * cell.seed + 10 * (cell.target == "photo")

    for seeds in (1, 3):
        shipped, found = made_up("main", seeds=seeds, accuracy=accuracy)
        found = [(cell, {**row, "images": 400 if cell.target == "photo" else 100}) for cell, row in found]
        table = tables.tables(shipped, found, "pacs")[0]
        photo, average = (entry(table, "Tent", f"{target}, 0 %") for target in ("photo", "average"))
        values = [60.0 + 2 * s for s in range(seeds)]
        assert (photo.low, photo.high) == interval([[v] for v in values], [400])
        assert (average.low, average.high) == pytest.approx(
            interval([[v, *[v - 10] * 3] for v in values], [400, *[100] * 3])
        )
        lines = list(csv.DictReader(tables.comma_separated([table]).splitlines()))
        assert all(float(line["low"]) < float(line["mean"]) < float(line["high"]) for line in lines)
