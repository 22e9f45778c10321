import re

import pytest

from safer_tta.bench import drawings, figures, tables
from tests.bench.helpers import PLANS, made_up


@pytest.mark.parametrize("name", PLANS)
def test_figures_are_the_same_bytes_for_the_same_numbers(name):
    shipped, found = made_up(name, seeds=2, accuracy=lambda cell: 40.0 + cell.seed + cell.attack_rate / 4)
    found = [(c, {**r, "ms_per_step": 5.0, "batch_accuracy": [r["accuracy"]] * 5}) for c, r in found]
    for number, table in enumerate(tables.tables(shipped, found, "pacs")):
        first, second = (drawings.drawing(shipped, number, found, table) for _ in range(2))
        if shipped.grids[number].figure in ("none", "pictures"):
            assert first is None
        else:
            assert first == second
            assert first.svg.startswith("<svg")
            assert first.png.startswith(b"\x89PNG")


def test_a_curve_shows_the_setting_that_its_table_shows():
    def accuracy(cell):
        return 90.0 if cell.varied["predictor_options.mixing.tau"] == 0.05 else 10.0

    shipped, found = made_up("alpha-signal", accuracy=accuracy)
    grid = shipped.grids[0].model_copy(update={"figure": "lines"})
    drawn = shipped.model_copy(update={"grids": (grid,)})
    table = tables.tables(drawn, found, "pacs")[0]
    chosen = [(c, r) for c, r in found if r["accuracy"] == 90]
    assert drawings.drawing(drawn, 0, found, table) == drawings.drawing(drawn, 0, chosen, table)


def test_bars_reach_over_their_intervals():
    """Also where there is no run; and a wider interval is drawn wider."""
    drawn = [figures.bars(["a", "b"], {"x": [50.0, None]}, ends={"x": [end, None]}) for end in ((40.0, 70.0), (40, 60))]
    reach = [[float(n) for n in re.findall(r"[ML] ([\d.]+) [\d.]+", _last_line(one.svg))] for one in drawn]
    assert reach[0][0] == reach[1][0]
    assert reach[0][1] > reach[1][1]


def _last_line(svg):
    """The path of the line at the end of the first bar."""
    return re.findall(r'<g id="LineCollection_1">\s*<path d="([^"]+)"', svg)[0]
