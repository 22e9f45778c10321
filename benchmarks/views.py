"""Which views the gate should take: SAFER on the views of several presets, and how well each operator's views are read.

Candidates are presets of this script, for this purpose alone. `run` takes the Tent+SAFER runs of a file of tasks whose
models and attacks are in the store, and gives them other views:

python benchmarks/views.py run TASKS.json STORE docs/results/views-pacs.jsonl --data PACS --weights W --device cuda
python benchmarks/views.py page docs/results/views-pacs.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

sys.path.insert(0, str(Path(__file__).parent))
from evidence import FIXED, accuracy, described, write
from recordings import recorded

from safer_tta.bench.tasks import Place, read_tasks
from safer_tta.data import Batch
from safer_tta.predictors import TRANSFORMS, Prediction
from safer_tta.views import OPERATORS, PRESETS, operator
from safer_tta.views.augment import warp
from safer_tta.views.operators import uniform
from safer_tta.views.pipeline import HARMLESS

Row = dict[str, Any]
RATES = (0, 50, 100)
SMOOTHING = ["gaussian_blur", "fft_low_pass"]
SMALLEST = 0.7  # share of the area that a crop keeps at least


def crop(images: Tensor, seeds: Tensor) -> Tensor:
    """A window of slightly other proportions, resized."""
    chance = torch.rand(4, len(images), generator=torch.Generator().manual_seed(int(seeds[0])))
    area, ratio = SMALLEST + (1 - SMALLEST) * chance[0], ((2 * chance[1] - 1) * 0.288).exp()
    width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
    across, down = (2 * chance[2] - 1) * (1 - width), (2 * chance[3] - 1) * (1 - height)
    zero = torch.zeros(len(images))
    return warp(images, [width, zero, across, zero, height, down])


def jpeg(images: Tensor) -> Tensor:
    return TRANSFORMS["jpeg"](images)


def light_blur(images: Tensor, lines: Tensor) -> Tensor:
    return OPERATORS["gaussian_blur"].function(images, lines)


def light_low_pass(images: Tensor, kept: Tensor) -> Tensor:
    return OPERATORS["fft_low_pass"].function(images, kept)


def seeds(count: int, generator: Generator | None) -> Tensor:
    return torch.randint(2**24, (count,), generator=generator)  # whole numbers that single precision holds


def one(names: Sequence[str], generator: Generator) -> str:
    return names[int(torch.randint(len(names), (1,), generator=generator))]


LIGHT = ["light_blur", "light_low_pass"]
MOST = [*HARMLESS, "rotate", "crop"]
# {name in rows: (what it is, the operators of a view)}; the paper's and the gate's are presets of the library.
CANDIDATES: dict[str, tuple[str, Callable[[Generator], list[str]]]] = {
    "ns": ("noise, smoothing", lambda g: ["gaussian_noise", one(SMOOTHING, g)]),
    "ns_flip": ("noise, smoothing, mirrored", lambda g: ["gaussian_noise", one(SMOOTHING, g), "flip"]),
    "ns_cropflip": (
        "noise, smoothing, cropped, mirrored", lambda g: ["gaussian_noise", one(SMOOTHING, g), "crop", "flip"],
    ),
    "s_cropflip": ("smoothing, cropped, mirrored", lambda g: [one(SMOOTHING, g), "crop", "flip"]),
    "nl_cropflip": (
        "noise, lighter smoothing, cropped, mirrored", lambda g: ["gaussian_noise", one(LIGHT, g), "crop", "flip"],
    ),
    "nsj_cropflip": (
        "noise, smoothing or JPEG, cropped, mirrored",
        lambda g: ["gaussian_noise", one([*SMOOTHING, "jpeg"], g), "crop", "flip"],
    ),
    "ns_gentleflip": (
        "noise, smoothing, one harmless or a turn or a crop, mirrored",
        lambda g: ["gaussian_noise", one(SMOOTHING, g), one(MOST, g), "flip"],
    ),
    "ns_both": (
        "half of the views as the line above, half cropped instead",
        lambda g: ["gaussian_noise", one(SMOOTHING, g), one([one(MOST, g), "crop"], g), "flip"],
    ),
}  # fmt: skip


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """The candidates as presets, with the operators that they take; for as long as they are looked at."""
    before = [(registry, set(registry)) for registry in (OPERATORS, PRESETS)]
    operator(seeds, prepare=lambda values, images: values, drawn=False)(crop)
    operator(drawn=False)(jpeg)
    operator(uniform(0.5, 2.0), prepare=OPERATORS["gaussian_blur"].prepare, drawn=False)(light_blur)
    operator(uniform(0.3, 0.7), prepare=OPERATORS["fft_low_pass"].prepare, drawn=False)(light_low_pass)
    for name, (_, names) in CANDIDATES.items():
        PRESETS[name] = lambda count, generator, names=names: names(generator)
    try:
        yield
    finally:
        for registry, known in before:
            for name in set(registry) - known:
                del registry[name]


LABELS = {"released": "the paper's", "gentle": "the gate's", **{name: label for name, (label, _) in CANDIDATES.items()}}


def run(o: argparse.Namespace) -> None:
    place = Place(o.store, o.data, weights=o.weights, device=o.device)
    with registered():
        for task in read_tasks(o.tasks):
            if task.kind == "run" and (task.definition["method"], task.definition["predictor"]) == ("tent", "safer"):
                for preset in o.presets:
                    write(o.rows, measured(task.definition, place, preset), _place)
                    print(task.label, preset, flush=True)


def _place(row: Row) -> tuple[Any, ...]:
    return row["views"], row["target"], row["attack_rate"], row["seed"], row.get("operator", "")


def measured(what: Mapping[str, Any], place: Place, preset: str) -> list[Row]:
    """A row on the stream, and one for each operator of its views."""
    right: dict[str, list[float]] = defaultdict(list)

    def look(prediction: Prediction, batch: Batch) -> None:
        """How well each view is read by itself."""
        assert prediction.report.view_probs is not None
        alone = (prediction.report.view_probs.argmax(dim=-1).cpu() == batch.labels).double().mean(dim=1)
        for names, share in zip(prediction.report.pipelines, alone[1:].tolist(), strict=True):
            for name in set(names) - {"gaussian_noise"}:
                right[name].append(100 * share)

    options = {**what["predictor_options"], "pipeline": {"preset": preset}}
    recording = recorded({**what, "predictor_options": options}, place, look=look)
    evidence, attacked = recording.tensors["evidence.distance"], recording.tensors["attacked"]
    where = {"views": preset, "target": what["target"], **{k: what["stream"][k] for k in ("attack_rate", "seed")}}
    found = described(evidence, attacked)
    accuracies = {name: accuracy(recording, {}, name, None) for name in FIXED}
    return [{**where, "accuracy": accuracies, "auroc": found and found["auroc"], "clean": found and found["clean"]}] + [
        {**where, "operator": name, "count": len(shares), "accuracy": statistics.mean(shares)}
        for name, shares in sorted(right.items())
    ]


def page(rows: Sequence[Row]) -> str:
    streams, operators = ([row for row in rows if ("operator" in row) == wanted] for wanted in (False, True))
    targets, seeds = ({row[key] for row in streams} for key in ("target", "seed"))
    sides = list(FIXED)
    lines = [
        f"Tent on {', '.join(sorted(targets))}, seeds {', '.join(map(str, sorted(seeds)))}; accuracy in % at 0 / 50 / "
        "100 %, mean evidence on clean originals, AUROC where half is attacked.",
        "",
        "| views | " + " | ".join(sides) + " | clean evidence | AUROC |",
        "|---" * (3 + len(sides)) + "|",
    ]
    for views in [name for name in LABELS if name in {row["views"] for row in streams}]:
        mine = [row for row in streams if row["views"] == views]
        cells = [
            " / ".join(
                f"{statistics.mean(r['accuracy'][side] for r in mine if r['attack_rate'] == rate):.1f}"
                for rate in RATES
            )
            for side in sides
        ]
        clean = statistics.mean(row["clean"][0] for row in mine if row["attack_rate"] == 0)
        found = statistics.mean(row["auroc"] for row in mine if row["attack_rate"] == 50)
        lines.append(f"| {LABELS[views]} | " + " | ".join(cells) + f" | {clean:.2f} | {found:.3f} |")
    lines += [
        "",
        "How well a view of the paper's is read, by an operator in it (accuracy of that view alone):",
        "",
        "| operator | 0 % | 50 % | 100 % | views |",
        "|---|---|---|---|---|",
    ]
    shares: dict[str, dict[float, float]] = defaultdict(dict)
    counts: dict[str, int] = defaultdict(int)
    for name in {row["operator"] for row in operators}:
        for rate in RATES:
            mine = [r for r in operators if (r["operator"], r["attack_rate"], r["views"]) == (name, rate, "released")]
            counts[name] = sum(row["count"] for row in mine)
            shares[name][rate] = sum(row["accuracy"] * row["count"] for row in mine) / max(counts[name], 1)
    for name in sorted((n for n in shares if counts[n]), key=lambda n: -shares[n][100]):
        figures = " | ".join(f"{shares[name][rate]:.1f}" for rate in RATES)
        lines.append(f"| {name} | {figures} | {counts[name]} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run")
    for name in ("tasks", "store", "rows"):
        runner.add_argument(name, type=Path)
    runner.add_argument("--data", default="synthetic")
    runner.add_argument("--weights")
    runner.add_argument("--device", default="cpu")
    runner.add_argument("--presets", nargs="*", default=list(LABELS), choices=list(LABELS))
    commands.add_parser("page").add_argument("rows", type=Path)
    o = parser.parse_args()
    if o.command == "run":
        run(o)
    else:
        sys.stdout.write(page([json.loads(line) for line in o.rows.read_text().splitlines()]))


if __name__ == "__main__":
    main()
