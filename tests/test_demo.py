import json
import re

import pytest

from safer_tta import demo as demos
from safer_tta.demo import WAYS, run_demo
from tests.processes import good

IMAGES, RATES = 320, (0, 50, 100)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo with a third of its images, at the three rates of its table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demos, "IMAGES", IMAGES)
        patch.setattr(demos, "RATES", RATES)
        yield run_demo(tmp_path_factory.mktemp("demo"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", ["Tent + SAFER", "Tent + SAFER-G"])
def test_safer_wins_back_three_quarters_of_what_tent_loses(demo, way):
    accuracy = dict(demo.table())
    lost = accuracy["Tent"][0] - accuracy["Tent"][2]
    won_back = accuracy[way][2] - accuracy["Tent"][2]
    assert lost >= 40
    assert won_back >= 0.75 * lost


def test_the_surrogate_falls(demo):
    clean, attacked = demo.surrogate
    assert clean > 90
    assert attacked < 5


def test_rows_are_kept(demo):
    rows = [json.loads(line) for line in (demo.page.parent / "results.jsonl").read_text().splitlines()]
    assert len(rows) == len(WAYS) * len(RATES)
    assert len({row["run"] for row in rows}) == len(rows)
    assert len({row["stream"] for row in rows}) == len(RATES), "every method saw the same streams"


def test_the_page_needs_no_network_and_shows_the_dropped_view(demo):
    page = demo.page.read_text()
    addresses = set(re.findall(r"https?://[^\"'<> ]+", page))
    assert {a for a in addresses if "w3.org" not in a and "purl.org" not in a and "creativecommons" not in a} == set()
    assert not re.search(r"<(script|link|iframe)\b", page)
    row, clean, original, views = 1, 1, 1, 4
    assert page.count('class="view') == row + clean + original + views
    assert page.count("<strong>dropped</strong>") == 1
    assert page.count("<svg") == 2


def test_asked_again_nothing_is_computed_twice(demo, monkeypatch):
    monkeypatch.setattr("safer_tta.training.trainer._Training.run", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr("safer_tta.bench.run.Record.add", lambda *_: pytest.fail("ran again"))
    again = run_demo(demo.page.parent)
    assert again.table() == demo.table()


def test_safer_run_finds_the_rows_of_the_demo(demo):
    folder = demo.page.parent
    source, surrogate = (folder / f"{kind}-sketch-0.safetensors" for kind in ("source", "surrogate"))
    models = ["--model", source, "--surrogate", surrogate, "--target", "sketch"]
    for rate in (0, 100):
        options = [*models, "--store", folder, "--images", IMAGES, "--attack-rate", rate]
        assert good("run", *options) == demo.rows["Tent + SAFER-G", rate]  # times of its steps included
