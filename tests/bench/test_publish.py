import csv
import io
import json
import math

import pytest

from safer_tta.bench.publish import publish
from safer_tta.bench.results import POISONED, SLIM
from safer_tta.bench.study import prepare, states
from safer_tta.bench.tasks import Place
from tests.bench.conftest import IMAGES
from tests.bench.helpers import MADE_UP, PACS, PLANS, quick
from tests.conftest import CHROMIUM
from tests.data.parts import image_folder

DOMAINS_OF_REST = 3


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PLANS)
def test_every_plan_runs_end_to_end(name, everything):
    study, place = everything[0][name], everything[1]
    page = publish(study, place).read_text()
    assert states(study, place) == {"done": len(set(study.runs))}
    found, problems = study.found(place)
    assert len(found) == len(study.cells)
    assert problems == []
    for cell, row in found:
        assert (row["target"], row["attack_rate"], row["seed"]) == (cell.target, cell.attack_rate, cell.seed)
        assert (row["method"], row["predictor"]) == (cell.row.method, cell.row.predictor)
        assert cell.row.norm in (None, row["norm"])  # a row names the norm that was used, also where none was asked for
        assert row["images"] == IMAGES - (IMAGES % DOMAINS_OF_REST if "+" in cell.target else 0)
        assert math.isfinite(row["nll"])
    folder = place.store / "reports" / study.folder
    assert {"tables.md", "tables.tex", "tables.csv"} <= {path.name for path in folder.iterdir()}
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert {row["run"] for row in rows} == set(study.runs)
    slim = list(csv.DictReader(io.StringIO((folder / "rows.csv").read_text())))
    assert [row["run"] for row in slim] == [row["run"] for row in rows]
    assert slim[0].keys() == {*SLIM, *(POISONED if name in ("neighbours", "poison") else ())}
    drawn = [grid.figure for grid in study.plan.grids]
    expected = [f"figure-{i}.svg" for i, kind in enumerate(drawn) if kind not in ("none", "pictures")]
    assert sorted(p.name for p in folder.glob("*.svg")) == sorted(expected)
    assert page.count("<svg") == len(expected)
    for label in {cell.row.label for cell in study.cells}:
        assert label.replace("&", "&amp;") in page


@pytest.mark.parametrize(("options", "beside"), [({}, True), ({"quick": True}, False), ({"images": 2}, False)])
def test_only_whole_streams_are_compared_with_the_paper(options, beside, tmp_path):
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


def test_a_quick_page_does_not_overwrite_a_real_one(tmp_path):
    assert quick("views", tmp_path)[0].folder != prepare("views", Place(tmp_path)).folder


@pytest.mark.skipif(CHROMIUM is None, reason="Debian's chromium is not installed")
def test_the_page_in_a_browser(everything, browser):
    study, place = everything[0]["main"], everything[1]
    page_file = publish(study, place)
    heard, page = [], browser.new_page()
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("request", lambda request: heard.append(request.url) if "report.html" not in request.url else None)
    page.goto(page_file.as_uri())
    column = "table >> nth=0 >> tbody tr td:nth-child(2)"
    heads = page.locator("table >> nth=0 >> thead button")
    heads.nth(1).click()
    down = [float(t.split()[0]) for t in page.locator(column).all_inner_texts()]
    heads.nth(1).press("Enter")  # by keyboard as well
    up = [float(t.split()[0]) for t in page.locator(column).all_inner_texts()]
    box = page.locator("svg").first.bounding_box()
    page.close()
    assert heard == []
    assert len(down) == len(study.plan.grids[0].rows)
    assert down == sorted(down, reverse=True)
    assert up == sorted(up)
    assert box["width"] > 300
    assert box["height"] > 100
