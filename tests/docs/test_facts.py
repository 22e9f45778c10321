"""Figures on pages are what the rows in docs/results give, and pages ask only for figures that there are."""

import importlib
import json
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


@pytest.fixture
def facts(monkeypatch):
    """The module docs/facts.py, which imports its neighbours by their names alone, as a script does."""
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("facts")


def test_facts_are_computed_from_the_rows(facts):
    assert json.loads(facts.FACTS.read_text()) == facts.build(), "run `python docs/facts.py`"


def test_the_readme_shows_the_facts(facts):
    page = facts.README.read_text()
    assert facts.BLOCK.search(page)
    assert facts.filled(page, json.loads(facts.FACTS.read_text())) == page, "run `python docs/facts.py`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_ask_for_facts_that_exist(facts, page):
    import hooks

    text = hooks.replace(page.read_text(), json.loads(facts.FACTS.read_text()), page.name)  # raises if there is none
    assert "{{" not in text


def test_an_unknown_fact_stops_the_build(facts):
    import hooks
    from mkdocs.exceptions import PluginError

    with pytest.raises(PluginError, match=r"index\.md.*no such / figure"):
        hooks.replace("{{ no such / figure }}", {"cells": {}, "tables": {}}, "index.md")


def test_a_mean_is_over_targets_and_seeds(facts, monkeypatch):
    """Two seeds on two targets, and a seed that lacks a target and does not count."""
    values = {("0", "a"): 10.0, ("0", "b"): 30.0, ("1", "a"): 20.0, ("1", "b"): 40.0, ("2", "a"): 99.0}
    rows = [{"method": "tent", "seed": s, "target": t, "accuracy": str(v)} for (s, t), v in values.items()]
    table = facts.Table("made-up", {"Tent": {"method": "tent"}}, {"clean": {}}, targets=("a", "b"), spread="deviation")
    monkeypatch.setattr(facts, "read", lambda file: rows)
    cells, markdown = table.make()
    assert cells == {"seeds": "0 and 1", "Tent / clean": "25.0"}
    assert markdown.splitlines()[-1] == "| Tent | 25.0 ± 7.1 |"


def test_one_seed_can_have_the_interval_over_its_images(facts, monkeypatch):
    rows = [{"method": "tent", "seed": "0", "target": "a", "images": "10", "accuracy": "80"}]
    where = {"base": {"images": "10"}, "targets": ["a"], "spread": "images"}
    monkeypatch.setattr(facts, "read", lambda file: rows)
    cells, markdown = facts.Table("made-up", {"Tent": {"method": "tent"}}, {"clean": {}}, **where).make()
    assert cells == {"seeds": "0", "Tent / clean": "80.0"}
    assert markdown.splitlines()[-1] == "| Tent | 80.0 [49.0, 94.3] |"
