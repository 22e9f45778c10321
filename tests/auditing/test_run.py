"""Rows of an audit equal a straight-line computation, and rows that exist are not made again."""

import os
import signal

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import safer_tta
from safer_tta._internal.seeds import generator
from safer_tta.attacks import ATTACKS, eot_margin, pgd, resubmit
from safer_tta.auditing import LADDER, audit, run
from safer_tta.auditing.images import gather
from safer_tta.bench.results import without
from safer_tta.data import Stream, StreamSpec, excerpt
from safer_tta.errors import InvalidTypeError, InvalidValueError, UnknownNameError
from tests.auditing.conftest import BATCH, DECLARED, labelled
from tests.conftest import CLASSES, adapt_small, small_net
from tests.processes import call

TIMES = ("seconds", "passes", "check")


def rows(report):
    return [without(row, TIMES) for row in report.rows]


def stream():
    """The images of an audit as they come: its order is that of a stream of the bench."""
    domain = excerpt(gather(labelled(), 128, CLASSES, 0), 128, 0)
    return domain, list(Stream([domain], StreamSpec(batch=BATCH, seed=0)))


def right(answers, batches):
    return [int((answer.labels == batch.labels).sum()) for answer, batch in zip(answers, batches, strict=True)]


def test_the_clean_row_is_what_the_method_answers(audited):
    (row,) = audited("clean").rows
    _, batches = stream()
    adapted, alone = adapt_small("tent"), small_net().eval()
    found = right([adapted(batch.images) for batch in batches], batches)
    assert row["accuracy"] == pytest.approx(100 * sum(found) / 32)
    with torch.no_grad():
        same = [(alone(batch.images / 255).argmax(1) == batch.labels).sum() for batch in batches]
    assert row["accuracy_alone"] == pytest.approx(100 * int(sum(same)) / 32)
    assert row["low"] < row["accuracy"] < row["high"]
    assert row["accuracy"] != row["accuracy_alone"]


def test_a_prepared_attack_is_made_on_the_model_as_it_was(audited):
    (row,) = audited("pgd").rows
    domain, _ = stream()
    budget = {"eps": 8 / 255, "step": 2 / 255, "steps": 20}
    images, labels = torch.from_numpy(np.array(domain.images)), torch.from_numpy(domain.labels)
    attacked = pgd(small_net(), images, labels, **budget, generator=generator(0, "attack", 0))
    copies = (attacked * 255).round().byte().numpy()
    batches = list(Stream([domain], StreamSpec(batch=BATCH, seed=0, attack_rate=100), [copies]))
    adapted = adapt_small("tent")
    assert row["accuracy"] == pytest.approx(100 * sum(right([adapted(b.images) for b in batches], batches)) / 32)
    assert row["accuracy"] < 100


def test_the_white_box_goes_through_the_method_as_it_stands(audited):
    """Its resubmission shares the pass, and an image is right there if all ten answers are."""
    safer = {"name": "safer", "views": 2}
    white, again = audited("white-box", "resubmission", predictor=safer).rows
    _, batches = stream()
    adapted, answers, every = adapt_small("tent", safer), [], 0
    for number, batch in enumerate(batches):
        images = eot_margin(
            adapted.predictor, batch.images, batch.labels, draws=2, steps=20, step=2 / 255,
            generator=generator(0, "eot-margin", number),
        )  # fmt: skip
        images = (images * 255).round().byte()
        randomness = generator(0, "resubmission", number)
        every += int(resubmit(adapted.predictor, images, batch.labels, times=10, generator=randomness).sum())
        answers.append(adapted(images))
    assert white["accuracy"] == pytest.approx(100 * sum(right(answers, batches)) / 32)
    assert again["accuracy"] == pytest.approx(100 * every / 32)
    assert again["accuracy"] < white["accuracy"]
    (alone,) = audited("resubmission", predictor=safer, folder=None).rows
    assert without(alone, TIMES) == without(again, TIMES)


def test_one_who_knows_the_defence_has_the_one_that_is_audited(audited):
    defence = {"name": "safer", "views": 2}
    (row,) = audited("aware", predictor=defence).rows
    assert (row["told"]["defence"], row["defence"]) == (defence, "tent on safer views=2")


def test_neighbours_are_counted_on_the_images_of_others(audited):
    (row,) = audited("dia").rows
    assert 0 < row["images"] < 32


def test_every_threat_of_the_ladder_is_measured_or_says_why_not(audited):
    report = audited(*(threat.name for threat in LADDER), compare=["safer-g"])
    measured = {(row["threat"], row["defence"]) for row in report.rows}
    assert measured == {(t.name, f"tent on {p}") for t in LADDER for p in ("plain", "safer-g")} - {
        ("cautious", "tent on plain")
    }
    assert list(report.left_out) == ["cautious (tent on plain)"]
    assert [row["threat"] for row in report.own] == [t.name for t in LADDER if t.name != "cautious"]


def test_a_method_that_answers_with_more_meets_no_live_attack(audited):
    report = audited("clean", "pgd", "rays", "dia", method="t3a")
    assert [row["threat"] for row in report.rows] == ["clean", "pgd"]
    assert list(report.left_out) == ["rays (t3a on plain)", "dia (t3a on plain)"]
    assert "more than its predictor" in report.left_out["rays (t3a on plain)"]


def test_what_the_time_does_not_allow_is_left_out(audited):
    report = audited("clean", "white-box", seconds=1e-9)
    assert [row["threat"] for row in report.rows] == ["clean"]  # before it, nothing is known of the time
    assert "which the time does not allow" in report.left_out["white-box (tent on plain)"]
    assert "white-box" in [line.partition(":")[0] for line in report.untried]


def test_a_second_call_measures_only_what_is_missing(audited, monkeypatch):
    before = audited("clean", "rays")
    made, measure = [], run.measure
    monkeypatch.setattr(run, "measure", lambda *given, **named: made.append(given[1]) or measure(*given, **named))
    again = audited("clean", "rays", "dia")
    assert [[threat.name for threat in threats] for threats in made] == [["dia"]]
    assert list(before.rows) == list(again.rows[:2])


def audit_until_killed(folder):
    """Be a process that is killed once it has begun to attack images."""
    run.attacked_copies = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    usual = {"threats": ["clean", "pgd"], "predictor": "plain", "batch": BATCH, "folder": folder}
    audit(small_net(), labelled(), **usual, **DECLARED)


def test_an_audit_that_was_killed_continues(audited, tmp_path, monkeypatch):
    folder = tmp_path / "killed"
    assert call(audit_until_killed, folder) == -signal.SIGKILL
    assert len(list((folder / "rows").glob("*.jsonl"))) == 1
    made, measure = [], run.measure
    monkeypatch.setattr(run, "measure", lambda *given, **named: made.append(given[1]) or measure(*given, **named))
    found = audited("clean", "pgd", folder=folder)
    assert [threat.name for (threat,) in made] == ["pgd"]
    assert rows(found) == rows(audited("clean", "pgd", folder=None))


@pytest.mark.parametrize(
    "changed",
    [{"batch": 4}, {"seed": 1}, {"lr": 0.1}, {"norm": "medbn"}, {"predictor": "safer"}, {"std": 2}, {"method": "none"}],
    ids=str,
)
def test_rows_are_named_by_what_they_depend_on(changed, audited):
    (before,), (after,) = audited("clean", norm="stream").rows, audited("clean", **{"norm": "stream", **changed}).rows
    assert before["run"] != after["run"]


def test_only_prepared_attacks_depend_on_the_surrogate(audited):
    other = small_net(seed=1)
    before, after = audited("clean", "pgd", "dia"), audited("clean", "pgd", "dia", surrogate=other)
    same = [one["run"] == two["run"] for one, two in zip(before.rows, after.rows, strict=True)]
    assert same == [True, False, True]
    assert before.surrogate != after.surrogate


def test_images_come_from_a_loader_a_dataset_or_a_domain():
    pairs = TensorDataset(*(torch.cat(parts) for parts in zip(*labelled(), strict=True)))
    loaded = gather(labelled(), 128, CLASSES, 0)
    drawn = gather(pairs, 128, CLASSES, 0)
    assert gather(loaded, 5, CLASSES, 0) is loaded
    assert not np.array_equal(drawn.images, loaded.images), "a dataset is drawn from"
    assert sorted(map(bytes, drawn.images)) == sorted(map(bytes, loaded.images))
    assert len(gather(labelled(), 5, CLASSES, 0)) == len(gather(pairs, 5, CLASSES, 0)) == 5
    assert np.abs(loaded.images / 255 - torch.cat([images for images, _ in labelled()]).numpy()).max() < 0.002


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "data gave no images"),
        ([(torch.rand(2, 3, 8, 8), torch.tensor([0, 9]))], "labels are from 0 to 9"),
        ([(3 * torch.rand(2, 3, 8, 8), torch.tensor([0, 1]))], "images"),
        ([(torch.rand(2, 3, s, s), torch.tensor([0, 1])) for s in (8, 9)], "differ in size"),
    ],
)
def test_images_that_cannot_be_used_are_refused(data, said):
    with pytest.raises(InvalidValueError, match=said):
        audit(small_net(), data, **DECLARED)


@pytest.mark.parametrize(
    ("changed", "said", "error"),
    [
        ({"effort": "ful"}, "did you mean 'full'", UnknownNameError),
        ({"threats": ["daa"]}, "did you mean 'dia'", UnknownNameError),
        ({"method": "tnt"}, "did you mean 'tent'", UnknownNameError),
        ({"predictor": "safe"}, "did you mean 'safer'", UnknownNameError),
        ({"compare": ["plan"]}, "did you mean 'plain'", UnknownNameError),
        ({"predictor": safer_tta.Plain(small_net())}, "predictor is Plain; expected a name", InvalidTypeError),
        ({"seconds": 0}, "seconds is 0", InvalidValueError),
        ({"batch": 0}, "batch is 0", InvalidValueError),
    ],
    ids=str,
)
def test_mistakes_are_named_before_anything_is_measured(changed, said, error, tmp_path):
    with pytest.raises(error, match=said):
        audit(small_net(), labelled(), **{"folder": tmp_path, **DECLARED, **changed})
    assert not list(tmp_path.iterdir())


def test_attacks_of_the_ladder_exist():
    assert {threat.attack for threat in LADDER} - {None} <= set(ATTACKS)
