"""The demo's claim, on real computations: adaptation alone collapses under attack, and SAFER wins most of it back."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from safer_tta.demo import RATES, ROWS, TABLE_RATES, run_demo


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return run_demo(tmp_path_factory.mktemp("demo"))


@pytest.mark.timeout(900)
def test_safer_wins_back_three_quarters_of_what_tent_loses(demo):
    accuracy = dict(demo.table())
    lost = accuracy["Tent"][0] - accuracy["Tent"][2]
    won_back = accuracy["Tent + SAFER"][2] - accuracy["Tent"][2]
    assert lost >= 40
    assert won_back >= 0.75 * lost


def test_the_surrogate_falls(demo):
    clean, attacked = demo.surrogate
    assert clean > 90
    assert attacked < 5


def test_rows_are_kept(demo):
    rows = [json.loads(line) for line in (demo.page.parent / "results.jsonl").read_text().splitlines()]
    assert len(rows) == len(ROWS) * len(RATES)
    assert len({row["run"] for row in rows}) == len(rows)
    assert len({row["stream"] for row in rows}) == len(RATES), "every method saw the identical streams"


def test_the_page_needs_no_network_and_shows_the_dropped_view(demo):
    page = demo.page.read_text()
    addresses = set(re.findall(r"https?://[^\"'<> ]+", page))
    assert {a for a in addresses if "w3.org" not in a and "purl.org" not in a and "creativecommons" not in a} == set()
    assert not re.search(r"<(script|link|iframe)\b", page)
    assert (
        page.count('class="view') == 7
    )  # the row of views, and the clean image, the attacked one and four views in it
    assert page.count("<strong>dropped</strong>") == 1
    assert page.count("<svg") == 2


def test_asked_again_nothing_is_computed_twice(demo, monkeypatch):
    monkeypatch.setattr("safer_tta.training.trainer._Training.run", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr("safer_tta.bench.run.Record.add", lambda *_: pytest.fail("ran again"))
    again = run_demo(demo.page.parent)
    assert again.table() == demo.table()


def test_the_readme_quotes_measured_rows():
    """The table in the README is what the kept rows say, cell by cell."""
    root = Path(__file__).parents[1]
    rows = [json.loads(line) for line in (root / "docs" / "results" / "demo.jsonl").read_text().splitlines()]
    found = {}
    table = (root / "README.md").read_text().partition("| accuracy on sketch, % |")[2].partition("\n\n")[0]
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        found[cells[0].split(" (")[0]] = cells[1:]
    for row in ROWS:
        for place, rate in enumerate(TABLE_RATES):
            (measured,) = [
                r["accuracy"]
                for r in rows
                if (r["method"], r["predictor"], r["predictor_options"], r["attack_rate"])
                == (row.method, row.predictor, dict(row.options), rate)
            ]
            assert found[row.label][place] == f"{measured:.1f}"
