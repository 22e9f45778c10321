import contextlib
import functools
from types import SimpleNamespace

import pytest
import torch

from safer_tta.data import open_dataset
from safer_tta.training import source_recipe


@pytest.fixture
def soak(script, monkeypatch):
    module = script("soak")
    monkeypatch.setattr(module, "open_dataset", lambda name, count: open_dataset(name, count=28))
    monkeypatch.setattr(module, "source_recipe", lambda name, steps: source_recipe(name, steps=2, batch=4))
    pool = contextlib.nullcontext(SimpleNamespace(imap_unordered=map))
    monkeypatch.setattr(module.multiprocessing, "get_context", lambda kind: SimpleNamespace(Pool=lambda *_, **__: pool))
    return module


def test_every_method_and_kind_of_garbage_makes_a_row_once(soak, run, tmp_path):
    measure = functools.partial(run, "soak", tmp_path / "rows.csv", "--batches", 3, "--steps", 20, "--folder", tmp_path)
    rows = measure("--methods", "none", "tent")
    kinds = [*soak.KINDS, "memory"]
    assert [(row["kind"], row["method"]) for row in rows] == [(kind, m) for kind in kinds for m in ("none", "tent")]
    for row in rows:
        if row["kind"] == "memory":
            assert min(float(row["early_mb"]), float(row["end_mb"])) > 0
            assert row["batches"] == "20"
        else:
            assert (row["batches"], row["finite"]) == ("3", "true")
            assert all(0 <= float(row[when]) <= 100 for when in ("start", "before", "after", "rolled_back"))
            assert row["non_finite_answers"] == ("1" if row["kind"] == "nan" else "0")  # every other batch of three
            assert row["method"] != "none" or row["start"] == row["after"]
    assert measure("--methods", "none", "tent") == rows, "what is there is not measured again"
    assert len(measure("--methods", "none", "tent", "pl")) == len(rows) + len(kinds)


def test_garbage_is_what_its_name_says(soak):
    draws = torch.Generator().manual_seed(0)
    first, second = (soak.garbage("noise", number, draws, 8) for number in (0, 1))
    assert not torch.equal(first, second)
    assert len(soak.garbage("constant", 3, draws, 8).unique()) == 1
    repeated = soak.garbage("repeated", 5, draws, 8)
    assert (repeated == repeated[0]).all()
    assert [bool(soak.garbage("nan", number, draws, 8).isnan().all()) for number in (0, 1)] == [False, True]
