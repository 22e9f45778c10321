import pytest

from safer_tta.attacks import ATTACKS
from tests.conftest import needs_pacs
from tests.data.parts import pacs_excerpt

QUICK = ("--architecture", "small", "--batch", 16, "--lr", "1e-3", "--steps")


@needs_pacs
def test_an_excerpt_of_pacs_from_training_to_a_row(safer, good, tmp_path, monkeypatch):
    common = ("--data", pacs_excerpt(tmp_path / "PACS", 20), "--target", "art_painting", "--side", 48)
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
    assert row["run"] in safer(*run).stdout


def test_a_clean_run_does_not_depend_on_the_threat(good, source_file, tmp_path):
    run = ("run", "--target", "sketch", "--model", source_file, "--images", 8, "--store", tmp_path)
    assert good(*run) == good(*run, "--eps", "16/255", "--attack", "eot")


@pytest.mark.filterwarnings("default::UserWarning")
def test_a_domain_that_the_source_was_trained_on_brings_one_line(safer, source_file, tmp_path):
    ended = safer("run", "--target", "photo", "--model", source_file, "--images", 8, "--store", tmp_path)
    assert ended.returncode == 0
    (line,) = [line for line in ended.stderr.splitlines() if line]
    assert line.startswith(f"warning: {source_file} was trained on ")


def test_attacks_take_their_options(good, source_file, tmp_path):
    """On the surrogate ahead of the stream, and live."""
    attack = ("attack", "--target", "sketch", "--surrogate", source_file, "--store", tmp_path, "--images", 16)
    asked = ("--attack", "aware", "--attack-option", "defence=plain", "--attack-option", "draws=1", "--attack-steps", 2)
    assert good(*attack, *asked)["images"] == 16
    run = ("run", "--target", "sketch", "--model", source_file, "--store", tmp_path, "--images", 16, "--method", "none")
    live = (*run, "--attack-rate", 100, "--attack", "apgd-eot", "--attack-option", "draws=1", "--attack-steps", 2)
    row = good(*live)
    assert row["threat"] == {"eps": 8 / 255, "norm": "linf", "draws": 1, "steps": 2}
    assert row["accuracy_attacked"] < good(*run)["accuracy"]


def test_attacks_are_listed_with_their_options(safer, good):
    listed = good("attacks")
    assert listed.keys() == ATTACKS.keys()
    shown = safer("attacks").stdout
    assert all(f"{name} " in shown for name in ATTACKS)
    assert "through a surrogate, 20 steps; options: defence=safer draws=4 momentum=0.0 target\n" in shown
    assert "autoattack   through a surrogate, its own steps\n" in shown
