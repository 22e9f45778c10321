import argparse

import pytest
import torch

from safer_tta.data import open_dataset
from safer_tta.views import OPERATORS, Pipeline

SECTIONS = ("steps", "predictors", "views", "operators", "chunks", "attack", "scaling")
TINY = "--architectures small --methods tent pl --views 1 --batch 2 --side 32 --rounds 1 --system-allocator"
WITHOUT_RATIO = {"attack", "scaling"}


@pytest.mark.filterwarnings("ignore:a batch of one image")  # in the section on scaling
def test_every_section_makes_rows(run, script, tmp_path):
    rows = run("speed", tmp_path / "rows.csv", "--sections", *SECTIONS, *TINY.split())
    assert tuple(dict.fromkeys(row["section"] for row in rows)) == SECTIONS
    assert set(script("speed").SECTIONS) - set(SECTIONS) == {"accelerated", "accuracy", "memory", "startup"}
    for row in rows:
        assert float(row["ms_low"]) <= float(row["ms"]) <= float(row["ms_high"])
        assert (row["ratio"] == "") == (row["section"] in WITHOUT_RATIO)
        assert (row["machine"], row["system_allocator"]) != ("", "false")
    found = {section: [row for row in rows if row["section"] == section] for section in SECTIONS}
    steps = {(row["method"], row["views"]): float(row["ratio"]) for row in found["steps"]}
    assert steps.keys() == {(method, views) for method in ("tent", "pl") for views in ("0", "1")}
    assert steps["tent", "0"] == steps["pl", "0"] == 1
    assert [row["predictor"] for row in found["predictors"]] == ["safer", "safer-a", "safer-g"]
    assert {row["what"] for row in found["operators"]} >= set(OPERATORS)


def test_views_are_the_same_image_by_image(script):
    """But for the noise, which is drawn for the whole batch at once."""
    images, draws = torch.rand(3, 3, 24, 24), torch.Generator().manual_seed(0)
    draw = Pipeline("paper").draw(8, 3, draws)
    quiet = [number for number, names in enumerate(draw.names, start=1) if "gaussian_noise" not in names]
    assert quiet
    one_by_one = script("speed").one_by_one(draw, images)
    torch.testing.assert_close(one_by_one[quiet], draw.views(images)[quiet], atol=1e-6, rtol=0)


def test_accuracy_is_that_of_the_library(script, source_file, monkeypatch):
    speed, data = script("speed"), open_dataset("synthetic", count=8)
    monkeypatch.setattr(speed, "WAYS", [("float32", False)])
    monkeypatch.setattr(speed, "open_dataset", lambda name: data)
    options = argparse.Namespace(data="synthetic", target="sketch", source=source_file, batch=8)
    plain, safer = list(speed.accuracy(options))
    assert (plain["views"], safer["views"]) == (0, 4)
    assert 0 <= safer["accuracy"] <= 100
    domain = data.domain("sketch")
    adapted = speed.safer_tta.adapt(speed.safer_tta.load_classifier(source_file), "tent", "plain", seed=0)
    alone = adapted.evaluate([(torch.from_numpy(domain.images), torch.from_numpy(domain.labels))]).accuracy
    assert plain["accuracy"] == pytest.approx(alone)  # one batch, in whatever order


def test_a_step_that_needs_no_memory_has_no_ratio(script, monkeypatch):
    speed = script("speed")
    options = argparse.Namespace(batch=1, side=8)
    for megabytes, ratio in ((0.0, None), (2.0, 1.0)):
        monkeypatch.setattr(speed, "peak", lambda o, predictor, found=megabytes: found)
        assert [row.get("ratio") for row in speed.memory(options)] == [ratio] * 3
