"""The report says what the rows say, in every form, and recommends only what they support."""

import json
import re

import pytest
import torch

from safer_tta.attacks import ATTACKS
from safer_tta.auditing import LADDER, audit
from safer_tta.auditing.advice import advice
from safer_tta.auditing.measure import SHOWN
from safer_tta.auditing.requirements import Requirement, parse
from safer_tta.errors import InvalidValueError, UnknownNameError
from tests.auditing.conftest import BATCH, DECLARED, labelled
from tests.conftest import CHROMIUM, CLASSES, small_net


@pytest.fixture
def report(audited):
    return audited("clean", "pgd", "dia", "cautious", predictor="safer-g", compare=["plain"])


def test_every_form_has_every_row(report):
    text, markdown, data = report.table(), report.markdown(), json.loads(report.to_json())
    assert repr(report) == text
    assert len(report.rows) == 7
    for row in report.rows:
        name, accuracy = f"{row['threat']} ({row['defence']})", f"{row['accuracy']:.1f}"
        assert any(line.startswith(name) and accuracy in line for line in text.splitlines())
        assert any(line.startswith(f"| {name} |") and f"| {accuracy} |" in line for line in markdown.splitlines())
    assert data["rows"] == list(report.rows)
    assert data["left_out"] == report.left_out
    assert "cautious (tent on plain)" in markdown
    assert "cautious (tent on plain)" in text


def test_what_was_not_tried_is_every_other_attack(report):
    named = [line.partition(":")[0] for line in report.untried]
    rungs = {threat.name for threat in LADDER} - {"clean", "pgd", "dia", "cautious"}
    attacks = set(ATTACKS) - {threat.attack for threat in LADDER}
    assert rungs | attacks <= set(named)
    assert not {"clean", "pgd", "dia", "cautious"} & set(named)


def test_the_page_loads_nothing_and_shows_every_row(report, tmp_path):
    page = report.html(tmp_path / "report.html").read_text()
    loaded = re.findall(r"""(?:src|href|srcset|action)=["']?([^"'> ]+)|url\(([^)]+)\)|@import""", page)
    assert all(first.startswith(("data:", "#")) or second.startswith("#") for first, second in loaded)
    assert loaded, "pictures"
    assert page.index("<svg") < page.index("<table")
    assert page.count("<tr>") == len(report.rows) + 1
    assert "the change × 8" in page


@pytest.mark.skipif(CHROMIUM is None, reason="Debian's chromium is not installed")
def test_the_page_in_a_browser(report, tmp_path, browser):
    file = report.html(tmp_path / "report.html")
    heard, page = [], browser.new_page()
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("request", lambda request: heard.append(request.url) if request.url.startswith("http") else None)
    page.goto(file.as_uri())
    page.locator("thead button").nth(2).click()
    shown = [float(text) for text in page.locator("tbody tr td:nth-child(3)").all_inner_texts()]
    broken = page.evaluate("[...document.images].filter(image => !image.naturalWidth).length")
    box = page.locator("svg").first.bounding_box()
    page.close()
    assert heard == []
    assert broken == 0
    assert shown == sorted(shown, reverse=True)
    assert box["width"] > 300


def test_worst_images_were_right_before_and_changed_within_the_budget():
    """Half of the labels are wrong, so half of the images are misread before they are attacked."""
    model, flip = small_net().eval(), torch.arange(BATCH) % 2
    data = [(images, (labels + flip) % CLASSES) for images, labels in labelled()]
    report = audit(model, data, method="none", predictor="plain", threats=["pgd"], batch=BATCH, **DECLARED)
    (pictures,) = report.pictures.values()
    assert len(pictures) == SHOWN
    assert [p.confidence for p in pictures] == sorted((p.confidence for p in pictures), reverse=True)
    for picture in pictures:
        with torch.no_grad():
            answers = model(torch.stack([picture.clean, picture.attacked]) / 255).argmax(dim=1)
        assert answers.tolist() == [picture.label, picture.answer]
        assert picture.answer != picture.label
        assert 0 < int((picture.attacked.int() - picture.clean.int()).abs().max()) <= 8


def made_up(threat, accuracy, suspicion=None, *, alone=50.0, defence="tent on safer-g", images=100):
    """A row of a hundred images."""
    half = {"low": accuracy - 5, "high": accuracy + 5}
    told = {"threat": threat, "defence": defence, "accuracy": accuracy, "accuracy_alone": alone, "images": images}
    return {**told, **half, "suspicion": suspicion}


CALM, LOUD = [0.1] * 100, [0.9] * 100


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([made_up("clean", 80.0)], ["Adapt: on clean images it is better"]),
        ([made_up("clean", 20.0)], ["Use another method, or do not adapt"]),
        ([made_up("clean", 52.0)], []),
        ([made_up("clean", 52.0), made_up("dia", 40.0)], ["Give every user a stream of their own"]),
        ([made_up("clean", 52.0), made_up("dia", 50.0)], []),
        ([made_up("clean", 52.0), made_up("pgd", 18.0)], ["Have a person review"]),
        ([made_up("clean", 52.0, CALM), made_up("pgd", 50.0, LOUD)], ["Abstain above a suspicion of 0.1:"]),
        ([made_up("clean", 52.0, CALM), made_up("pgd", 50.0, CALM)], ["Do not rely on suspicion against pgd"]),
        ([made_up("pgd", 50.0), made_up("pgd", 70.0, defence="tent on plain")], ["Under pgd, tent on plain is better"]),
        ([made_up("pgd", 50.0), made_up("pgd", 58.0, defence="tent on plain")], []),
        ([], []),
    ],
)
def test_a_recommendation_needs_rows_that_lie_apart(rows, said):
    found = advice(rows, [row for row in rows if row["defence"] == "tent on safer-g"])
    assert len(found) == len(said)
    assert all(sentence.startswith(start) for sentence, start in zip(found, said, strict=True))


def test_a_threshold_leaves_few_clean_images_unanswered():
    clean = made_up("clean", 52.0, [number / 100 for number in range(100)])
    (sentence, *_) = advice([], [clean, made_up("pgd", 50.0, [1.0] * 100)])
    assert re.match(r"Abstain above a suspicion of 0\.94\d?: that leaves 5 % .* and 100 % of pgd\.", sentence)


def test_requirements_are_read():
    assert parse("dia>=90, transfer >= 80.5") == [Requirement("dia", 90.0), Requirement("transfer", 80.5)]
    assert parse("white-box>=0") == [Requirement("white-box", 0.0)]


@pytest.mark.parametrize("text", ["", "dia", "dia>90", "dia>=", "dia>=101", "dia>=-1", "dia>=90,", "dia>=90;pgd>=1"])
def test_requirements_that_say_nothing_are_refused(text):
    with pytest.raises(InvalidValueError, match="expected threats with the accuracy in percent"):
        parse(text)


def test_a_requirement_names_a_threat():
    with pytest.raises(UnknownNameError, match="did you mean 'dia'"):
        parse("daa>=90")


def test_a_requirement_is_met_by_the_audited_defence_alone(report):
    found = {row["threat"]: row["accuracy"] for row in report.own}
    exact = [Requirement("pgd", found["pgd"]), Requirement("clean", 0)]
    assert report.failed(exact) == []
    (above,) = report.failed([*exact, Requirement("pgd", found["pgd"] + 0.1)])
    assert above.startswith(f"pgd left an accuracy of {found['pgd']:.1f} %")
    assert report.failed([Requirement("rays", 0)]) == ["rays was not measured; required are 0 %"]
