"""Every method on {plain, safer, safer-gate} at {0, 50, 100 %}, embedded data; rows as JSON Lines, tables from them.

python benchmarks/methods.py run --seed 0 --out docs/results/methods-0.jsonl     # once per seed
python benchmarks/methods.py page docs/results/methods-[012].jsonl               # a table of what these rows are of
python benchmarks/methods.py page docs/results/methods-gate.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from safer_tta.bench.run import Run, Setting, perform
from safer_tta.data import ArrayStore, StreamSpec, open_dataset
from safer_tta.data.store import digest_file
from safer_tta.methods import METHODS
from safer_tta.training import THREAT, attacked_copies, source_recipe, surrogate_recipe, train_source, train_surrogate
from safer_tta.training.trainer import accuracy

RATES = (0, 50, 100)
NAMES = [*sorted(METHODS), "tent+medbn"]
PREDICTORS = ("plain", "safer", "safer-gate")


def run(seed: int, out: Path, device: str, target: str, limit: int, names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, open(out, "a") as file:
        place, dataset = Path(folder), open_dataset("synthetic")
        source, other = place / "source.safetensors", place / "surrogate.safetensors"
        train_source(dataset, target, source_recipe("synthetic", seed=seed), source, device=device)
        domain = dataset.domain(target)
        surrogate = train_surrogate(domain, surrogate_recipe("synthetic", seed=seed), other, device=device)
        attacked = attacked_copies(domain, surrogate, ArrayStore(place / "a"), source=digest_file(other), seed=seed)
        print(
            "surrogate", accuracy(surrogate, domain.images, domain.labels), accuracy(surrogate, attacked, domain.labels)
        )
        setting = Setting((domain,), (attacked,), THREAT, source, device)
        for name in names:
            for predictor in PREDICTORS:
                for rate in RATES:
                    stream = StreamSpec(attack_rate=rate, seed=seed, limit=limit)
                    row = perform(Run(method=name, predictor=predictor, stream=stream), setting, place / "runs")
                    file.write(json.dumps(row, sort_keys=True) + "\n")
                    file.flush()
                    print(
                        f"{name:12} {predictor:6} {rate:4} {row['accuracy']:6.1f} {row['ms_per_step']:8.1f} ms",
                        flush=True,
                    )


def page(rows: list[dict]) -> str:
    seeds, first = sorted({row["seed"] for row in rows}), rows[0]
    predictors = [name for name in PREDICTORS if any(row["predictor"] == name for row in rows)]
    names = ", ".join(map(str, seeds))
    which = f"mean ± standard deviation over seeds {names}" if len(seeds) > 1 else f"seed {names}"
    lines = [
        f"Target {first['target']}, {first['images']} images a stream, batches of {first['batch']}, PGD 8/255 on a "
        f"surrogate; accuracy in %, {which}. Measured on {first['device']} with torch {first['versions']['torch']}.",
        "",
        "| method | "
        + " | ".join(f"{name} 0 % | 50 % | 100 %" for name in predictors)
        + " | ms/step "
        + " | ".join(predictors)
        + " |",
        "|---" * (1 + 4 * len(predictors)) + "|",
    ]
    for name in (name for name in NAMES if any(row["method"] == name for row in rows)):
        cells = []
        for predictor in predictors:
            for rate in RATES:
                found = _of(rows, name, predictor, rate, "accuracy")
                spread = f" ± {statistics.stdev(found):.1f}" if len(found) > 1 else ""
                cells.append(f"{statistics.mean(found):.1f}{spread}" if found else "not measured")
        taken = [_of(rows, name, predictor, 0, "ms_per_step") for predictor in predictors]
        times = [f"{statistics.median(values):.0f}" if values else "–" for values in taken]
        lines.append(f"| {name} | " + " | ".join([*cells, *times]) + " |")
    return "\n".join(lines) + "\n"


def _of(rows: list[dict], name: str, predictor: str, rate: int, figure: str) -> list[float]:
    return [
        row[figure] for row in rows if (row["method"], row["predictor"], row["attack_rate"]) == (name, predictor, rate)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run")
    runner.add_argument("--seed", type=int, default=0)
    runner.add_argument("--out", type=Path, required=True)
    runner.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    runner.add_argument("--target", default="sketch")
    runner.add_argument("--limit", type=int, default=960)
    runner.add_argument("--methods", nargs="*", default=NAMES)
    pager = commands.add_parser("page")
    pager.add_argument("rows", nargs="+", type=Path)
    options = parser.parse_args()
    if options.command == "run":
        run(options.seed, options.out, options.device, options.target, options.limit, options.methods)
    else:
        rows = [json.loads(line) for path in options.rows for line in path.read_text().splitlines()]
        sys.stdout.write(page(rows))


if __name__ == "__main__":
    main()
