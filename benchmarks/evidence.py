"""What the gate goes by, on the embedded data: the evidence on clean and attacked originals, and what gates would have
answered. Tent learns from SAFER's own pooling, so all of them are judged by the very same views.

python benchmarks/evidence.py run STORE docs/results/evidence-synthetic.jsonl     # 36 streams, after their trainings
python benchmarks/evidence.py page docs/results/evidence-synthetic.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import safer_tta
from safer_tta.bench.run import detection
from safer_tta.bench.study import prepare
from safer_tta.bench.tasks import Place, Task, execute, stream_of
from safer_tta.data import Stream, StreamSpec
from safer_tta.gate import EVIDENCE, Gate
from safer_tta.pooling import with_original
from safer_tta.training import load

Row = dict[str, Any]
RATES = (0, 50, 100)
GATES = {
    "the gate": Gate(),
    "equal views": Gate(equal=True),
    "predicted evidence": Gate(evidence="predicted"),
    "both": Gate(equal=True, evidence="predicted"),
    "both, at most half (next)": Gate(equal=True, evidence="predicted", alpha_clean=0.5),
}
# The weight (B,) of the original, of who is attacked; the augmented views share the rest equally. SAFER has its own.
FIXED: dict[str, Callable[[Tensor], Tensor] | None] = {
    "SAFER": None,
    "augmented views alone": lambda attacked: torch.zeros(len(attacked)),
    "who is attacked is known": lambda attacked: 0.6 * (~attacked).float(),
}


class Recorder:
    """A mixing that changes nothing, and keeps what it sees."""

    least_views = 3

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def mix(self, base_weights: Tensor, probs: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.append((base_weights.detach(), probs.detach(), features.detach()))
        return base_weights, torch.zeros_like(base_weights[0])


def run(store: Path, out: Path, seeds: int = 3, targets: Sequence[str] = (), **size: Any) -> None:
    place = Place(store)
    study = prepare("main", place, seeds=seeds, targets=targets, **size)
    known = {task.name: task for task in study.tasks}
    with out.open("w") as file:
        for task in study.tasks:
            what = task.definition
            if task.kind == "run" and (what["method"], what["predictor"]) == ("tent", "safer"):
                for need in task.needs:
                    execute(known[need], place)
                file.write(json.dumps(judged(what, place), sort_keys=True) + "\n")
                print(task.label, flush=True)


def judged(what: Row, place: Place) -> Row:
    """One stream: what every kind of evidence and every gate makes of it."""
    domains, copies, _ = stream_of(what, place)
    spec, recorder = StreamSpec(**what["stream"]), Recorder()
    source = load(Task("source", "", what["source"]).path(place))
    adapted = safer_tta.adapt(source, "tent", safer={"mixing": recorder}, seed=spec.seed)
    batches = list(Stream(domains, spec, copies))
    for batch in batches:
        adapted(batch.images)
    attacked = torch.cat([batch.attacked for batch in batches])
    evidence = {kind: torch.cat([of(z) for _, _, z in recorder.seen]) for kind, of in EVIDENCE.items()}
    return {
        "target": what["target"], "attack_rate": spec.attack_rate, "seed": spec.seed, "images": len(attacked),
        "evidence": {kind: described(x, attacked) for kind, x in evidence.items()},
        "accuracy": {name: accuracy(batches, recorder, name) for name in (*FIXED, *GATES)},
    }  # fmt: skip


def described(evidence: Tensor, attacked: Tensor) -> Row:
    sides = {"clean": evidence[~attacked], "attacked": evidence[attacked]}
    spread = {side: [float(x.mean()), float(x.std())] if len(x) else None for side, x in sides.items()}
    return {**spread, "auroc": detection(evidence, attacked)}


def accuracy(batches: Sequence[Any], recorder: Recorder, name: str) -> float:
    right = total = 0
    for batch, (base, probs, features) in zip(batches, recorder.seen, strict=True):
        weights = base
        if name in GATES:
            weights = GATES[name].mix(base, probs, features)[0]
        elif (alpha := FIXED[name]) is not None:
            weights = with_original(alpha(batch.attacked), torch.ones_like(base))
        right += int(((weights.unsqueeze(-1) * probs).sum(dim=0).argmax(dim=1) == batch.labels).sum())
        total += len(batch.labels)
    return 100 * right / total


def page(rows: Sequence[Row]) -> str:
    targets = list(dict.fromkeys(row["target"] for row in rows))
    seeds = sorted({row["seed"] for row in rows})
    places = [(target, rate) for target in (*targets, "average") for rate in RATES]
    lines = [
        f"Seeds {', '.join(map(str, seeds))}; mean accuracy in % of what each would have answered.",
        "",
        "| answers | " + " | ".join(f"{target}, {rate} %" for target, rate in places) + " |",
        "|---" * (1 + len(places)) + "|",
    ]
    for name in (*FIXED, *GATES):
        figures = [
            statistics.mean(row["accuracy"][name] for row in of(rows, rate, targets if t == "average" else [t]))
            for t, rate in places
        ]
        lines.append(f"| {name} | " + " | ".join(f"{figure:.1f}" for figure in figures) + " |")
    lines += [
        "",
        "Evidence where half is attacked, in deviations of an augmented view's: mean ± deviation of clean originals,",
        "of attacked ones, and AUROC.",
        "",
        "| target | seed | " + " | ".join(f"{k}: clean | attacked | AUROC" for k in EVIDENCE) + " |",
        "|---" * (2 + 3 * len(EVIDENCE)) + "|",
    ]
    for row in of(rows, 50, targets):
        cells = []
        for found in (row["evidence"][kind] for kind in EVIDENCE):
            cells += [f"{mean:.2f} ± {deviation:.2f}" for mean, deviation in (found["clean"], found["attacked"])]
            cells.append(f"{found['auroc']:.3f}")
        lines.append(f"| {row['target']} | {row['seed']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def of(rows: Sequence[Row], rate: float, targets: Sequence[str]) -> list[Row]:
    return [row for row in rows if row["attack_rate"] == rate and row["target"] in targets]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run")
    runner.add_argument("store", type=Path)
    runner.add_argument("rows", type=Path)
    commands.add_parser("page").add_argument("rows", type=Path)
    o = parser.parse_args()
    if o.command == "run":
        run(o.store, o.rows)
    else:
        sys.stdout.write(page([json.loads(line) for line in o.rows.read_text().splitlines()]))


if __name__ == "__main__":
    main()
