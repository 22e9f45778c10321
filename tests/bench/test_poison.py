"""Runs with an attacker in the loop of the stream: what a row says of the images of others, and resuming."""

import csv
import io

import pytest
import torch

from safer_tta import load_classifier
from safer_tta.attacks import full_threat, start
from safer_tta.bench import tables
from safer_tta.bench.experiment import AttackOn
from safer_tta.bench.plan import Cell, Grid, Plan
from safer_tta.bench.plan import Row as PlanRow
from safer_tta.bench.results import POISONED, SLIM, slim_csv, without
from safer_tta.bench.run import perform
from safer_tta.data import Stream, StreamSpec
from safer_tta.evaluation.intervals import interval
from tests.bench.helpers import MADE_UP, PACS
from tests.bench.test_perform import prepare
from tests.processes import gate, kill_and_finish

STREAM = StreamSpec(batch=7, attack_rate=50, draw="batches", tail=14, seed=1)
THREATS = {"rttdp": {"steps": 2, "objective": "ble"}, "rip": {}}


def poisoned(source, attack="rttdp", stream=STREAM, **changes):
    how = {"method": "tent", "predictor": "plain", "options": {"lr": 0.01}, "stream": stream, **changes}
    if attack is not None:
        how["attack"] = AttackOn(name=attack, threat=full_threat(attack, **THREATS[attack]))
    return prepare(source, **how)


@pytest.mark.parametrize("attack", THREATS)
def test_a_run_is_the_loop_that_a_user_would_write(attack, source_file, tmp_path):
    experiment, materials = poisoned(source_file, attack)
    stream = Stream(materials.domains, STREAM, [materials.domains[0].images])
    method = experiment.build(load_classifier(source_file))
    attacker = start(attack, load_classifier(source_file), seed=1, **THREATS[attack])
    right, mine = [], []
    for number, (images, labels, owned) in enumerate(stream):
        sent = attacker.perturb(images, labels, owned, number)
        assert torch.equal(sent[~owned], images[~owned])
        probs = method(sent).probs
        attacker.see(sent[owned], labels[owned], probs[owned])
        right.append(probs.argmax(dim=1) == labels)
        mine.append(owned)
    right, mine, early = torch.cat(right).double(), torch.cat(mine), torch.arange(70) < 56
    row = perform(experiment, materials, tmp_path)
    assert row["accuracy_benign"] == pytest.approx(100 * float(right[~mine & early].mean()))
    assert row["accuracy_tail"] == pytest.approx(100 * float(right[~early].mean()))
    assert row["accuracy_attacked"] == pytest.approx(100 * float(right[mine].mean()))
    assert (row["tail"], row["attacked_share"]) == (14, 40)
    assert row["eps"] == (0.3 if attack == "rttdp" else None)


def test_one_that_does_not_adapt_answers_others_as_if_nobody_poisoned(source_file, tmp_path):
    rows = {}
    for method, options in (("none", {}), ("tent", {"lr": 0.05})):
        for rate in (0, 50):
            stream = StreamSpec(batch=7, attack_rate=rate, draw="batches-first", tail=35)
            asked = poisoned(source_file, "rttdp" if rate else None, stream, method=method, options=options)
            rows[method, rate] = perform(*asked, tmp_path)
    assert rows["none", 50]["accuracy_tail"] == rows["none", 0]["accuracy_tail"]
    assert rows["none", 50]["batch_accuracy"][3:] == rows["none", 0]["batch_accuracy"][3:]
    assert rows["tent", 50]["batch_accuracy"][3:] != rows["tent", 0]["batch_accuracy"][3:]
    assert rows["none", 0]["accuracy_benign"] is not None


def test_ordinary_rows_are_as_they_were(source_file, tmp_path):
    row = perform(*prepare(source_file, method="none", predictor="plain", images=8), tmp_path)
    assert not {"accuracy_benign", "accuracy_tail"} & set(row)
    described = prepare(source_file)[0].describe()
    assert "tail" not in described["stream"]


@pytest.mark.parametrize("attack", THREATS)
def test_a_killed_run_resumes_with_what_the_attacker_remembers(attack, source_file, tmp_path):
    asked = poisoned(source_file, attack)
    expected = perform(*asked, tmp_path / "undisturbed")
    first, second, third = kill_and_finish(perform_gated, source_file, attack, tmp_path / "runs", moments=(3, 6))
    assert first == 1
    assert 3 < second <= 6 < third
    assert without(perform(*asked, tmp_path / "runs")) == without(expected)


def perform_gated(source, attack, folder, connection):
    perform(*poisoned(source, attack), folder, tick=gate(connection), save_seconds=0)


def test_a_table_shows_the_figure_that_its_grid_asks_for():
    rows = [PlanRow(label="Tent", method="tent"), PlanRow(label="none")]
    grids = [Grid(rows=rows, rates=(50,), show=show) for show in ("accuracy", "accuracy_benign", "accuracy_tail")]
    plan = Plan(title="x", grids=grids)
    row = {**MADE_UP, "images": 100, "attacked_share": 40.0, "tail": 20, "accuracy_benign": 70.0}
    found = [(Cell(n, r, "sketch", 50.0, 0), row) for n in range(3) for r in rows]
    made = tables.tables(plan, found, PACS.name)
    assert [[entry.mean for _, entries in table.rows for entry in entries] for table in made] == [
        [50.0, 50.0],
        [70.0, 70.0],
        [None, None],  # no row has it
    ]
    assert (made[1].rows[0][1][0].low, made[1].rows[0][1][0].high) == interval([[70.0]], [40])
    assert tables.markdown(made[1]).startswith("| accuracy on images of others, % | 50 % |")


def test_slim_rows_have_more_columns_where_somebody_poisons():
    row = {**MADE_UP, "versions": {}, "run": "a", "tail": 0}
    for rows, columns in (([row], SLIM), ([row, {**row, "accuracy_benign": 0.0}], (*SLIM, *POISONED))):
        read = list(csv.DictReader(io.StringIO(slim_csv(rows))))
        assert tuple(read[0]) == columns
    assert read[1]["accuracy_benign"] == "0"
