import numpy as np
import pytest

from safer_tta import extensions
from safer_tta.errors import InvalidValueError
from safer_tta.pooling import RULES
from safer_tta.serve.limits import Refused
from tests.serve.attacked import half_attacked
from tests.serve.helpers import CHEAP, SIDE, engine, engine_of, pictures, send


def test_images_above_the_threshold_are_flagged(source_file, tmp_path):
    """The threshold is the suspicion of one of the images, which is not above itself."""
    (images,) = half_attacked(source_file, 1)
    with engine_of(source_file, tmp_path / "first", "a") as made:
        suspicion = send(made, images)["suspicion"]
    threshold = sorted(set(suspicion))[-2]
    with engine_of(source_file, tmp_path / "second", "a", abstain=threshold) as made:
        answer = send(made, images)
    assert answer["suspicion"] == suspicion
    assert answer["abstain"] == [value > threshold for value in suspicion]
    assert answer["report"]["abstained"] == sum(answer["abstain"]) > 0


def test_without_suspicion_only_answers_that_are_not_finite_are_flagged(source_file, tmp_path):
    (images,) = pictures(1, 3)
    with pytest.raises(InvalidValueError, match=r"abstain is 0.5.*safer-g"):
        engine(source_file, tmp_path, predictor="safer", abstain=0.5)
    with pytest.raises(InvalidValueError, match="abstain is 2"):
        engine(source_file, tmp_path, abstain=2.0)
    with engine_of(source_file, tmp_path, "a", predictor="safer") as made:
        assert made.served.abstain is None
        answer = send(made, images)
        assert (answer["suspicion"], answer["report"]["suspicion"], answer["abstain"]) == (None, None, [False] * 3)
        made.live.method.classifier.head.weight.data.fill_(3e38)
        answer = send(made, images)
    assert (answer["abstain"], answer["probabilities"]) == ([True] * 3, [[None] * 7] * 3)


def test_labels_given_again_replace_the_first(source_file, tmp_path):
    with engine_of(source_file, tmp_path, "a", **CHEAP) as made:
        right = send(made, pictures(1, 4)[0])["labels"]
        wrong = [(label + 1) % 7 for label in right]
        for labels, accuracy in ((wrong, 0), (right, 100), ([*right[:3], wrong[3]], 75), (wrong, 0)):
            assert made.journal.label("local/a", 1, labels)["accuracy"] == accuracy
            (stream,) = made.journal.describe("local")
            assert (stream["accuracy"], stream["labelled"]) == (accuracy, 4)


def test_without_a_seed_views_cannot_be_guessed(source_file, tmp_path):
    """They differ between streams, and between streams of the same name in two services."""
    images, seen = pictures(1, 2)[0], set()
    for folder in ("one", "two"):
        with engine_of(source_file, tmp_path / folder, "a", "b", seed=None) as made:
            for name in ("a", "b"):
                seen.add(str([send(made, images, name)["report"]["views"] for _ in range(3)]))
    assert len(seen) == 4


def test_a_collapse_raises_an_alarm_and_a_rollback_by_hand_does_not(source_file, tmp_path):
    """With the same picture over and over, one class takes every answer; after a window of eight the guard acts."""
    black = np.zeros((8, 3, SIDE, SIDE), np.uint8)
    with engine_of(source_file, tmp_path, "a", "b", predictor="plain") as made:
        alarms = [send(made, black)["report"]["alarm"] for _ in range(8)]
        assert alarms == [""] * 7 + ["rollback, collapse"]
        assert b"safer_tta_alarms_total 1.0" in made.metrics.text()
        send(made, pictures(1, 2)[0], "b")
        made.change("local/b", "rollback").result()
        report = send(made, pictures(1, 2)[0], "b")["report"]
        assert (report["alarm"], report["health"].get("rollbacks", 0)) == ("", 0)
        assert b"safer_tta_alarms_total 1.0" in made.metrics.text()


def test_metrics_count_what_happened(source_file, tmp_path):
    def counted(made):
        lines = [line.split() for line in made.metrics.text().decode().splitlines() if not line.startswith("#")]
        return {name.removeprefix("safer_tta_"): float(value) for name, value in lines}

    with engine_of(source_file, tmp_path, "a", abstain=0.0) as made:
        assert counted(made)["batches_total"] == 0
        send(made, pictures(1, 32)[0], key="k")
        send(made, pictures(1, 32)[0], key="k")  # answered from the journal
        made.change("local/a", "freeze").result()
        send(made, pictures(1, 2)[0])
        found = counted(made)
    asked = ("batches_total", "images_total", "batches_not_learnt_from_total", "images_abstained_total", "alarms_total")
    assert [found[name] for name in asked] == [2, 34, 1, 34, 0]
    assert found["batch_seconds_count"] == 2


def version(model, folder, **options):
    with engine_of(model, folder, **options) as made:
        return made.served.version


def test_the_version_depends_on_everything_that_decides_an_answer(source_file, tmp_path):
    deciding = [
        {}, {"options": {"lr": 0.01}}, {"method": "bn"}, {"predictor": "plain"}, {"norm": "medbn"},
        {"predictor": {"name": "safer-g", "views": 3}}, {"precision": "bfloat16"}, {"side": 32},
    ]  # fmt: skip
    beside = [
        {"abstain": 0.3}, {"seconds": 1.0}, {"seed": 1}, {"options": {"lr": 1e-3}},
        {"predictor": {"name": "safer-g", "views": 4}},
    ]  # fmt: skip
    versions = [version(source_file, tmp_path / str(n), **options) for n, options in enumerate([*deciding, *beside])]
    assert len(set(versions[: len(deciding)])) == len(deciding)
    assert set(versions[len(deciding) :]) == {versions[0]}


def test_the_version_depends_on_the_code_of_extensions(source_file, tmp_path, monkeypatch):
    before = version(source_file, tmp_path / "before")
    file = tmp_path / "own_rule.py"
    code = "from safer_tta.pooling import RULES, register\nregister('own-rule')(lambda *v: RULES['cc_drop'](*v))\n"
    file.write_text(code)
    monkeypatch.setattr(extensions, "_loaded", {})
    extensions.load([file])
    options = {"predictor": {"name": "safer", "pool": "own-rule"}}
    named = version(source_file, tmp_path / "named", **options)
    monkeypatch.setattr(extensions, "_loaded", {})
    assert version(source_file, tmp_path / "unnamed", **options) != named
    del RULES["own-rule"]
    assert version(source_file, tmp_path / "after") == before


def test_a_batch_without_a_lesson_is_not_adapted_to(source_file, tmp_path):
    (images,) = pictures(1, 8)
    for margin, adapted in ((1e-9, False), (10, True)):
        with engine_of(source_file, tmp_path / str(adapted), "a", method="eata", options={"margin": margin}) as made:
            answer = send(made, images)
            assert (answer["adapted"], answer["report"]["adapted"]) == (adapted, adapted)


def test_a_batch_that_the_method_cannot_take_is_refused(source_file, tmp_path):
    """A layer has only one value a channel left of a single small image."""
    with engine_of(source_file, tmp_path, "a", predictor="plain", side=8) as made:
        image = np.zeros((1, 3, 8, 8), np.uint8)
        with pytest.raises(Refused, match="at least two images") as refused:
            made.batch("local/a", image, None, "c").result()
        assert refused.value.status == 422
        assert made.describe("local", "a")[0]["state"] == "parked"  # what the method began is thrown away
        assert send(made, np.zeros((4, 3, 8, 8), np.uint8))["number"] == 1
