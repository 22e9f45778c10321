import dataclasses

import numpy as np
import pytest

from safer_tta.attacks import full_threat
from safer_tta.bench.experiment import AttackOn, Experiment
from safer_tta.bench.results import without
from safer_tta.bench.run import Materials, perform
from safer_tta.data import StoreError, StreamSpec, excerpt, open_dataset
from safer_tta.errors import InvalidValueError
from safer_tta.training.definitions import definition_of
from tests.processes import gate, kill_and_finish


def prepare(model, *, attacked=False, images=None, target="sketch", **changes):
    """Return a run on a domain and what it is made of; attacked copies are the images in another order."""
    dataset = open_dataset("synthetic", count=70)
    sketch = dataset.domain(target)
    sketch = sketch if images is None else excerpt(sketch, images, seed=0)
    attack = AttackOn(name="pgd", threat=full_threat(), surrogates=({"file": "a surrogate"},)) if attacked else None
    described = {"data": dataset.identity, "target": target, "source": definition_of(model), "images": images}
    experiment = Experiment(**{**described, "attack": attack, **changes})
    return experiment, Materials((sketch,), model, (sketch.images[::-1].copy(),) if attacked else None)


def test_a_row_holds_what_was_measured(source_file, tmp_path):
    stream = StreamSpec(batch=16, attack_rate=25, limit=64)
    asked = prepare(source_file, attacked=True, predictor="safer", stream=stream)
    row = perform(*asked, tmp_path)
    assert (row["dataset"], row["target"], row["method"], row["predictor"]) == ("synthetic", "sketch", "tent", "safer")
    assert (row["images"], row["batches"], row["attack_rate"], row["attacked_share"]) == (64, 4, 25, 25)
    assert row["accuracy"] == pytest.approx((row["accuracy_attacked"] + 3 * row["accuracy_clean"]) / 4)
    assert row["accuracy"] == pytest.approx(np.mean(row["batch_accuracy"]))
    assert len(row["per_class"]) == 7
    assert len(row["reliability"]) == len(row["dropped_share"]) == 5
    assert sum(row["dropped_share"]) <= 1
    assert row["stream"]
    assert row["source"]
    assert perform(*asked, tmp_path) == row


def test_a_clean_run_has_no_threat(source_file, tmp_path):
    row = perform(*prepare(source_file, method="none", predictor="plain"), tmp_path)
    assert (row["attack"], row["eps"], row["threat"], row["accuracy_attacked"]) == (None, None, None, None)
    assert row["reliability"] is None


def test_a_domain_that_the_source_was_trained_on_brings_a_warning(source_file, tmp_path):
    seen = prepare(source_file, target="photo", images=6, method="none", predictor="plain")
    for _ in range(2):  # the second time the row is looked up
        with pytest.warns(UserWarning, match=r"was trained on 'cartoon', 'painting', 'photo', .* of 'photo'"):
            perform(*seen, tmp_path)


def test_different_runs_have_different_rows(source_file, tmp_path):
    """Of another method, stream, attack or image; that each setting is in the name is a test of experiments."""
    shared = {"attacked": True, "images": 6, "stream": StreamSpec(attack_rate=25, batch=3)}
    seed = dataclasses.replace(shared["stream"], seed=1)
    attack = AttackOn(name="pgd", threat=full_threat(eps=16 / 255), surrogates=({"file": "a surrogate"},))
    changes = [{}, {"method": "pl"}, {"stream": seed}, {"attack": attack}, {"images": 5}]
    asked = [prepare(source_file, **{**shared, **change}) for change in changes]
    rows = [perform(*each, tmp_path) for each in asked]
    assert len({row["run"] for row in rows}) == len(asked)
    assert [perform(*each, tmp_path) for each in asked] == rows


def test_damaged_and_foreign_rows_are_refused(source_file, tmp_path):
    asked = prepare(source_file, method="none", predictor="plain", images=8)
    perform(*asked, tmp_path)
    (path,) = tmp_path.iterdir()
    good = path.read_text()
    for bad in ('{"accuracy": 99.9}', good[:-20], good.replace('"none"', '"tent"')):
        path.write_text(bad)
        with pytest.raises(StoreError, match=path.name):
            perform(*asked, tmp_path)


def attacked_stream(source):
    return prepare(source, attacked=True, stream=StreamSpec(batch=5, attack_rate=40))


def perform_gated(source, folder, connection):
    perform(*attacked_stream(source), folder, tick=gate(connection), save_seconds=0)


def test_a_run_that_is_killed_again_and_again_ends_the_same(source_file, tmp_path):
    """It resumes with the batch after those that it had saved, and with the method as it was then."""
    asked = attacked_stream(source_file)
    expected = perform(*asked, tmp_path / "undisturbed")
    first, second, third = kill_and_finish(perform_gated, source_file, tmp_path / "runs", moments=(4, 9))
    assert first == 1
    assert 4 < second <= 9 < third
    got = perform(*asked, tmp_path / "runs")
    assert without(got) == without(expected)
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_another_source_model_is_refused(source_file, tmp_path):
    asked = prepare(source_file, source={"file": "another model"})
    with pytest.raises(InvalidValueError, match=r"the run expects \{'file': 'another model'\}"):
        perform(*asked, tmp_path)
    assert not list(tmp_path.iterdir())
