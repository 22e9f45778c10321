"""`safer audit`: its exit codes, its folder, and Ctrl-C."""

import dataclasses
import json

import numpy as np
import pytest
from PIL import Image

import safer_tta
from safer_tta.auditing import run
from safer_tta.data import open_dataset
from safer_tta.models.card import read_card
from tests.data.parts import image_folder

CHEAP = ("--predictor", "plain", "--threat", "clean", "--threat", "dia")
SKETCH = ("--data", "synthetic", "--target", "sketch")


@pytest.fixture
def audit(safer, source_file, tmp_path, monkeypatch):
    """Audit the model on 15 images of the embedded data, briefly."""
    quickly(monkeypatch)
    command = ("audit", "--model", source_file, "--out", tmp_path / "audit")
    return lambda *words: safer(*command, *words)


def quickly(monkeypatch):
    monkeypatch.setattr(run.Threat, "count", lambda threat, effort: 15)
    monkeypatch.setattr(run.Threat, "told", lambda threat, effort: {"steps": 2} if threat.name == "dia" else {})


def test_a_report_is_written_and_the_requirement_decides(audit, tmp_path):
    ended = audit(*SKETCH, *CHEAP, "--require", "clean>=0,dia>=0")
    assert ended.returncode == 0, ended.stderr
    assert {"clean", "dia"} <= {line.partition(" ")[0] for line in ended.stdout.splitlines()}
    assert {path.name for path in (tmp_path / "audit").iterdir()} == {"report.html", "report.json", "report.md", "rows"}
    failed = audit(*SKETCH, *CHEAP, "--require", "clean>=100,dia>=0,rays>=1", "--json")
    assert failed.returncode == 1
    assert [line.split()[1] for line in failed.stderr.splitlines() if line.startswith("required:")] == ["clean", "rays"]
    assert json.loads(failed.stdout) == json.loads((tmp_path / "audit" / "report.json").read_text())


def test_minutes_leave_out_what_takes_longer(audit):
    found = json.loads(audit(*SKETCH, *CHEAP, "--minutes", 1e-9, "--json").stdout)
    assert [row["threat"] for row in found["rows"]] == ["clean"]
    assert list(found["left_out"]) == ["dia (tent on plain)"]


def test_ctrl_c_leaves_the_rows_that_are_done(audit, tmp_path, monkeypatch):
    attack = run.attacked_copies

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "attacked_copies", interrupted)
    words = (*SKETCH, "--predictor", "plain", "--threat", "clean", "--threat", "pgd")
    stopped = audit(*words)
    assert stopped.returncode == 130
    assert "the same command resumes" in stopped.stderr
    assert len(list((tmp_path / "audit" / "rows").glob("*.jsonl"))) == 1
    monkeypatch.setattr(run, "attacked_copies", attack)
    assert audit(*words).returncode == 0


def test_a_folder_of_classes_needs_no_target(audit, source_file, tmp_path):
    """It may lack classes, and the model numbers them in an order of its own."""
    classes = read_card(source_file).classes[:5]
    assert list(classes) != sorted(classes)
    folder, drawn = tmp_path / "data", open_dataset("synthetic", count=60).domain("sketch")
    for number, (image, label) in enumerate(zip(drawn.images, drawn.labels, strict=True)):
        if drawn.classes[label] in classes:
            place = folder / "photographs" / drawn.classes[label]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.transpose(1, 2, 0)).save(place / f"{number}.png")
    ways = (("--data", folder / "photographs"), ("--data", folder, "--target", "photographs"))
    ended = [audit(*words, *CHEAP, "--json") for words in ways]
    assert [one.returncode for one in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    one, two = (json.loads(each.stdout) for each in ended)
    assert [row["images"] for row in one["rows"]] == [row["images"] for row in two["rows"]]
    assert one["facts"]["classes"] == list(read_card(source_file).classes)
    drawn = open_dataset(folder, side=64, cache=tmp_path / "decoded").domain("photographs")
    labels = np.array([classes.index(name) for name in drawn.classes])[drawn.labels]
    known = dataclasses.replace(drawn, labels=labels, classes=read_card(source_file).classes)
    model = safer_tta.load_classifier(source_file)
    (row,) = run.audit(model, known, method="none", predictor="plain", threats=["clean"]).rows
    assert row["accuracy_alone"] > 0
    for found in (one, two):
        assert found["rows"][0]["accuracy_alone"] == row["accuracy_alone"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data synthetic", "name one with --target"),
        ("--data nowhere", "Invalid value for '--data': 'nowhere' is not a folder"),
        ("--data synthetic --target sktch", "--target 'sktch' is unknown (did you mean 'sketch'?)"),
        ("--data synthetic --target sketch --require dia>90", "--require is 'dia>90'; expected threats with"),
        ("--data synthetic --target sketch --require daa>=90", "--threat 'daa' is unknown (did you mean 'dia'?)"),
        ("--data synthetic --target sketch --threat daa", "--threat 'daa' is unknown (did you mean 'dia'?)"),
        ("--data synthetic --target sketch --minutes 0", "--minutes is 0.0; expected a positive number"),
        ("--data synthetic --target sketch --method tnt", "--method 'tnt' is unknown (did you mean 'tent'?)"),
        ("--data synthetic --target sketch --surrogate nowhere", "Invalid value for '--surrogate'"),
        ("--data synthetic --target sketch --batch 0", "--batch is 0; expected a whole number of at least 1"),
        ("--data EMPTY", "holds no images; expected EMPTY/class/image"),
        ("--data OTHER", "knows the classes"),
    ],
)
def test_mistakes_give_one_line(words, message, audit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").mkdir()
    image_folder(tmp_path, ["OTHER"])
    ended = audit(*words.split())
    assert (ended.returncode, ended.stdout) == (2, "")
    assert message in " ".join(ended.stderr.replace("│", " ").split())
    assert not list((tmp_path / "audit").glob("rows"))
