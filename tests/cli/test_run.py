"""`safer attack` and `safer run`: from images to a row."""

from __future__ import annotations

import shutil

import pytest

from tests.conftest import PACS, needs_pacs

QUICK = ("--architecture", "small", "--batch", 16, "--lr", "1e-3", "--steps")


@needs_pacs
def test_an_excerpt_of_pacs_from_training_to_a_row(safer, good, tmp_path, monkeypatch):
    """4 domains x 7 classes x 20 images of PACS: train a source and a surrogate, attack, run."""
    monkeypatch.setenv("SAFER_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "PACS"
    for place in sorted(PACS.glob("*/*")):
        target = root / place.relative_to(PACS)
        target.mkdir(parents=True)
        for image in sorted(place.iterdir())[:20]:
            shutil.copy(image, target)
    common = ("--data", root, "--target", "art_painting", "--side", 48)
    source, surrogate, store = tmp_path / "source.safetensors", tmp_path / "surrogate.safetensors", tmp_path / "store"
    model = good("train", "source", *common, *QUICK, 30, "--out", source)
    assert model["validation_accuracy"] > 100 / 7
    good("train", "surrogate", *common, *QUICK, 60, "--out", surrogate)
    good("train", "robust", *common, *QUICK, 2, "--attack-steps", 2, "--out", tmp_path / "robust.safetensors")
    threat = ("--surrogate", surrogate, "--store", store)
    attacked = good("attack", *common, *threat)
    assert attacked["images"] == 140
    assert attacked["surrogate_attacked"] < attacked["surrogate_clean"] / 2
    run = ("run", *common, *threat, "--model", source, "--attack-rate", 50)
    row = good(*run)
    assert (row["dataset"], row["target"], row["images"]) == ("pacs", "art_painting", 140)
    monkeypatch.setattr("safer_tta.bench.run.Record.add", lambda *_: pytest.fail("it was run again"))
    assert good(*run) == row
    assert row["run"] in safer(*run).output


def test_a_clean_run_does_not_depend_on_the_threat(good, source_file, tmp_path):
    run = ("run", "--target", "sketch", "--model", source_file, "--images", 8, "--store", tmp_path)
    assert good(*run) == good(*run, "--eps", "16/255", "--attack", "eot")
