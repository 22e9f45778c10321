"""What the gate goes by: the evidence on clean and attacked originals, and what gates would have answered. A method
learns from SAFER's own pooling, so all gates on one kind of views are judged by the very same ones.

python benchmarks/evidence.py run STORE docs/results/evidence-synthetic.jsonl     # 36 streams, after their trainings
python benchmarks/evidence.py judge FOLDER docs/results/evidence-pacs.jsonl       # recordings made elsewhere, on a GPU
python benchmarks/evidence.py page docs/results/evidence-synthetic.jsonl
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from recordings import Recording, found_in, matrix, recorded

from safer_tta.bench.run import detection
from safer_tta.bench.study import prepare
from safer_tta.bench.tasks import Place, execute
from safer_tta.gate import EVIDENCE, SEEN, Gate, of_distances
from safer_tta.pooling import with_original

Row = dict[str, Any]
RATES = (0, 50, 100)
FOLDS = 5
OWN = Gate().pipeline  # the gate's views
# By the preset of the views that were recorded: the gate's own, and the paper's, which earlier versions took.
SECOND = Gate(alpha_clean=0.6, cost=5, teaches=False, equal=False, evidence="ratio", spread=0.6, keeps=0, usual=0)
GATES: dict[str, dict[str, Gate]] = {
    "gentle": {
        "the gate": Gate(),
        "clean originals expected amid their views": Gate(usual=0),
        "remembers nothing": Gate(keeps=0),
        "evidence by ratio": Gate(evidence="ratio"),
        "evidence by angles too": Gate(evidence="predicted"),
    },
    "released": {
        "fifth version": Gate(usual=0),
        "fourth version": Gate(evidence="predicted", usual=0),
        "remembers nothing": Gate(keeps=0, usual=0),
        "third version": Gate(evidence="predicted", cost=5, spread=0.6, keeps=0, usual=0),
        "second version, answering only": SECOND,
    },
}
# The weight (B,) of the original, of who is attacked; the augmented views share the rest equally. SAFER has its own.
FIXED: dict[str, Callable[[Tensor], Tensor] | None] = {
    "SAFER": None,
    "augmented views alone": lambda attacked: torch.zeros(len(attacked)),
    "who is attacked is known": lambda attacked: 0.5 * (~attacked).float(),
}
TAUGHT = "the gate, taught who is attacked"  # how far its evidence would carry a gate without an error in its bells


def run(store: Path, out: Path, seeds: int = 3, targets: Sequence[str] = (), **size: Any) -> None:
    place = Place(store)
    study = prepare("beyond", place, seeds=seeds, targets=targets, **size)
    known = {task.name: task for task in study.tasks}
    for task in study.tasks:
        what = task.definition
        if task.kind == "run" and (what["method"], what["predictor"]) == ("tent", "safer") and _usual(what, study):
            for need in task.needs:
                execute(known[need], place)
            write(out, [judged(recorded(what, place))], _place)
            print(task.label, flush=True)


def _usual(what: Mapping[str, Any], study: Any) -> bool:
    """Of the streams of the main table: not one of the plan's other rates, budgets, batches or late attacks."""
    stream, attack = what["stream"], what["attack"]
    batch = statistics.mode(task.definition["stream"]["batch"] for task in study.tasks if task.kind == "run")
    return (
        (stream["draw"], stream["batch"]) == ("exact", batch)
        and stream["attack_rate"] in RATES
        and (attack is None or round(255 * attack["threat"]["eps"]) == 8)
    )


def judge(folder: Path, out: Path) -> None:
    write(out, [judged(Recording.read(path)) for path in found_in(folder)], _place)


def write(out: Path, rows: Sequence[Row], place: Callable[[Row], tuple[Any, ...]]) -> None:
    """These rows in the place of those that are of the same, beside the others."""
    kept = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    found = {place(row): row for row in (*kept, *rows)}
    out.write_text("".join(json.dumps(found[name], sort_keys=True) + "\n" for name in sorted(found)))


def _place(row: Row) -> tuple[Any, ...]:
    return row["views"], row["method"], row["target"], row["attack_rate"], row["seed"]


def _preset(what: Mapping[str, Any]) -> str:
    """Of the views of a run."""
    return str(what["predictor_options"]["pipeline"]["preset"])


def judged(recording: Recording) -> Row:
    """One stream: what every kind of evidence and every gate makes of it."""
    method, target, rate, seed = recording.place
    attacked, evidence = recording.tensors["attacked"], evidence_of(recording)
    views, odds_by = _preset(recording.of), torch.cat(evidence[Gate().evidence])
    gates: dict[str, Gate | None] = {**dict.fromkeys(FIXED), **GATES[views]}
    return {
        "views": views, "method": method, "target": target, "attack_rate": rate, "seed": seed, "images": len(attacked),
        "evidence": {kind: described(torch.cat(evidence[kind]), attacked) for kind in EVIDENCE},
        "accuracy": {name: accuracy(recording, evidence, name, gate) for name, gate in gates.items()}
        | {TAUGHT: taught(recording, odds_by)},
    }  # fmt: skip


def described(evidence: Tensor, attacked: Tensor) -> Row | None:
    if not bool(torch.isfinite(evidence).all()):
        return None
    sides = {"clean": evidence[~attacked], "attacked": evidence[attacked]}
    spread = {side: [float(x.mean()), float(x.std())] if len(x) else None for side, x in sides.items()}
    return {**spread, "auroc": detection(evidence, attacked)}


def evidence_of(recording: Recording) -> dict[str, list[Tensor]]:
    """{kind: a tensor for each batch}; a kind that the recording does not know yet, from the distances that it kept."""
    found: dict[str, list[Tensor]] = {kind: [] for kind in EVIDENCE}
    for batch in recording.batches():
        for kind in EVIDENCE:
            known = batch.get(f"evidence.{kind}")
            found[kind].append(of_distances(matrix(batch["distances"].float())) if known is None else known)
    return found


def accuracy(recording: Recording, evidence: dict[str, list[Tensor]], name: str, gate: Gate | None) -> float | None:
    """None where distances were too large for the half precision that they are kept in."""
    if gate is not None and not all(bool(torch.isfinite(x).all()) for x in evidence[gate.evidence]):
        return None
    right, total, seen = 0, 0, torch.zeros(SEEN)
    for number, batch in enumerate(recording.batches()):
        weights = base = batch["base"]
        if gate is not None:
            weights, _, seen = gate.weigh(base, evidence[gate.evidence][number], seen)
        elif (alpha := FIXED[name]) is not None:
            weights = with_original(alpha(batch["attacked"]), torch.ones_like(base))
        answers = (weights.unsqueeze(-1) * batch["probs"]).sum(dim=0).argmax(dim=1)
        right += int((answers == batch["labels"]).sum())
        total += len(answers)
    return 100 * right / total


def taught(recording: Recording, evidence: Tensor) -> float | None:
    """A gate whose odds are a logistic regression of who is attacked, fitted to the other four fifths of the stream;
    None where there is nobody to tell apart."""
    attacked, probs, gate = recording.tensors["attacked"], recording.tensors["probs"], Gate()
    if bool(attacked.all()) or not bool(attacked.any()) or not bool(torch.isfinite(evidence).all()):
        return None
    odds, fold = torch.empty(len(evidence)), torch.arange(len(evidence)) % FOLDS
    for number in range(FOLDS):
        slope, offset = logistic(evidence[fold != number], attacked[fold != number])
        odds[fold == number] = (slope * evidence[fold == number] + offset).float()
    alpha = gate.alpha_clean * torch.sigmoid(-odds - math.log(gate.cost))
    weights = with_original(alpha, torch.ones(probs.shape[:2]))
    answers = (weights.unsqueeze(-1) * probs).sum(dim=0).argmax(dim=1)
    return 100 * float((answers == recording.tensors["labels"]).double().mean())


def logistic(x: Tensor, truth: Tensor) -> Tensor:
    """(slope, offset) of the log-odds of truth, by Newton's method."""
    inputs, fitted = torch.stack([x, torch.ones_like(x)], dim=1).double(), torch.zeros(2, dtype=torch.float64)
    for _ in range(20):
        chance = torch.sigmoid(inputs @ fitted)
        curve = inputs.T @ (inputs * (chance * (1 - chance)).unsqueeze(1)) + 1e-3 * torch.eye(2, dtype=torch.float64)
        fitted = fitted + torch.linalg.solve(curve, inputs.T @ (truth.double() - chance) - 1e-3 * fitted)
    return fitted


def page(rows: Sequence[Row]) -> str:
    own, paper = ([row for row in rows if row["views"] == views] for views in (OWN, "released"))
    parts = ["On the gate's own views:", answers(own), table_of_evidence(own)]
    return "\n".join([*parts, "On the paper's views, which earlier versions took:", answers(paper)])


def answers(rows: Sequence[Row]) -> str:
    targets = list(dict.fromkeys(row["target"] for row in rows))
    seeds = sorted({row["seed"] for row in rows})
    places = [(target, rate) for target in (*targets, "average") for rate in RATES]
    lines = [
        "",
        f"Seeds {', '.join(map(str, seeds))}; mean accuracy in % of what each would have answered.",
        "",
        "| answers | " + " | ".join(f"{target}, {rate} %" for target, rate in places) + " |",
        "|---" * (1 + len(places)) + "|",
    ]
    for name in (*FIXED, TAUGHT, *GATES[rows[0]["views"]]):
        found = [
            [row["accuracy"][name] for row in of(rows, rate, targets if t == "average" else [t])] for t, rate in places
        ]
        lines.append(f"| {name} | " + " | ".join(map(mean, found)) + " |")
    return "\n".join(lines) + "\n"


def table_of_evidence(rows: Sequence[Row]) -> str:
    lines = [
        "Evidence where half is attacked, in deviations of an augmented view's: mean ± deviation of clean originals,",
        "of attacked ones, and AUROC.",
        "",
        "| target | seed | " + " | ".join(f"{k}: clean | attacked | AUROC" for k in EVIDENCE) + " |",
        "|---" * (2 + 3 * len(EVIDENCE)) + "|",
    ]
    for row in rows:
        if row["attack_rate"] == 50:
            cells = []
            for found in (row["evidence"][kind] for kind in EVIDENCE):
                cells += [f"{mean:.2f} ± {deviation:.2f}" for mean, deviation in (found["clean"], found["attacked"])]
                cells.append(f"{found['auroc']:.3f}")
            lines.append(f"| {row['target']} | {row['seed']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def mean(figures: Sequence[float | None]) -> str:
    known = [figure for figure in figures if figure is not None]
    return f"{statistics.mean(known):.1f}" if len(known) == len(figures) else "–"


def of(rows: Sequence[Row], rate: float, targets: Sequence[str]) -> list[Row]:
    return [row for row in rows if row["attack_rate"] == rate and row["target"] in targets]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run")
    runner.add_argument("store", type=Path)
    runner.add_argument("rows", type=Path)
    judger = commands.add_parser("judge")
    judger.add_argument("folder", type=Path)
    judger.add_argument("rows", type=Path)
    commands.add_parser("page").add_argument("rows", type=Path)
    o = parser.parse_args()
    if o.command == "run":
        run(o.store, o.rows)
    elif o.command == "judge":
        judge(o.folder, o.rows)
    else:
        sys.stdout.write(page([json.loads(line) for line in o.rows.read_text().splitlines()]))


if __name__ == "__main__":
    main()
