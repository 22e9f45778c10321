"""The tables that docs/facts.py computes. A key here is what a page asks for."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from facts import Listing, Table, markdown, read, select
from norm_tables import NORM_TABLES
from promises import CHAOS, Promises
from selections import (
    DRAWN,
    EMBEDDED,
    EOT,
    EVERY,
    GATED,
    HEADLINE,
    KNOWING,
    MEAN,
    PACS,
    PAPER,
    RATES,
    SAFER_G,
    USUAL,
    WITHOUT_G,
    around,
    art,
    beside,
    by_target,
    options,
    rates,
    run,
    speed,
)  # fmt: skip
from suspected import Suspected


class Signals:
    """SAFER-A by every signal of suspicion, each at the best of its thresholds and orientations, as in the paper."""

    def make(self) -> tuple[dict[str, str], str]:
        found: dict[str, list[list[float]]] = {}
        rows = select(read("pacs"), {**run("tent", "safer-a"), "images": "512"})
        for changed, group in groupby(
            sorted(rows, key=lambda r: r["predictor_options"]), lambda r: r["predictor_options"]
        ):
            signal = (json.loads(changed) if changed else {}).get("mixing", {}).get("signal", "feat_disagreement")
            in_order = sorted(group, key=lambda row: float(row["attack_rate"]))
            found.setdefault(signal, []).append([float(row["accuracy"]) for row in in_order])
        best = {signal: max(settings, key=statistics.mean) for signal, settings in sorted(found.items())}
        facts = {f"{s} / {c}": f"{v:.1f}" for s, line in best.items() for c, v in zip(RATES, line, strict=True)}
        return facts, markdown(["signal", *RATES], [[s, *(f"{v:.1f}" for v in line)] for s, line in best.items()])


class Paper:
    """The averages that the paper reports on PACS."""

    def make(self) -> tuple[dict[str, str], str]:
        with (Path(__file__).parents[1] / "src/safer_tta/bench/paper/main_tables.csv").open(newline="") as file:
            found = select(csv.DictReader(file), {"dataset": "PACS"})
        facts, lines = {}, []
        for name in dict.fromkeys(row["method"] for row in found):
            label = {"ERM": "no adaptation", "RobustERM": "Robust ERM"}.get(name, name.replace("+", " + "))
            for rate, where in RATES.items():
                rows = select(found, {"method": name, "attack_rate_percent": where["attack_rate"]})
                facts[f"{label} / {rate}"] = f"{statistics.mean(float(row['accuracy_mean']) for row in rows):.1f}"
            lines.append([label, *(facts[f"{label} / {rate}"] for rate in RATES)])
        return facts, markdown(["accuracy, %", *RATES], lines)


class Repeated:
    """Runs that were made a second time from nothing, on another day and machine, beside the first time."""

    def make(self) -> tuple[dict[str, str], str]:
        compared = [name for name in read("pacs")[0] if name not in ("run", "ms_per_step")]
        first = {tuple(row[name] for name in compared) for row in read("pacs")}
        again = [tuple(row[name] for name in compared) for row in read("pacs-repeated")]
        same = sum(row in first for row in again)
        facts = {"runs": str(len(again)), "identical": str(same)}
        return facts, markdown(list(facts), [list(facts.values())])


class Families:
    """How many models of each library work as they are, and how many with one more line: the listing of the tests."""

    def make(self) -> tuple[dict[str, str], str]:
        with (Path(__file__).parents[1] / "tests/models/families/listing.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        facts, lines = {}, []
        for library in [*dict.fromkeys(row["library"] for row in rows), "all"]:
            outcomes = [row["outcome"] for row in rows if library in (row["library"], "all")]
            counts = [len(outcomes), outcomes.count("works"), outcomes.count("advice")]
            lines.append([library, *map(str, counts)])
            facts |= dict(
                zip((f"{library} / {c}" for c in ("models", "works", "advice")), map(str, counts), strict=True)
            )
        return facts, markdown(["library", "models", "work as they are", "work with the line that is named"], lines)


@dataclass(frozen=True)
class Choices:
    """A table with further rows from gate-choices.csv, each named by its choice and data there."""

    table: Table
    chosen: Mapping[str, tuple[str, str]]

    def make(self) -> tuple[dict[str, str], str]:
        facts, _ = self.table.make()
        for label, (choice, dataset) in self.chosen.items():
            for rate, where in RATES.items():
                found = {"choice": choice, "dataset": dataset, "rate": where["attack_rate"]}
                (row,) = select(read("gate-choices"), found)
                facts[f"{label} / {rate}"] = f"{float(row['accuracy']):.1f}"
        rows = [*self.table.rows, *self.chosen]
        lines = [[row, *(facts[f"{row} / {rate}"] for rate in RATES)] for row in rows]
        return facts, markdown(["accuracy, %", *RATES], lines)


class Soak:
    """Accuracy before and after each kind of garbage, and after one rollback."""

    def make(self) -> tuple[dict[str, str], str]:
        kinds = {
            "noise": "noise",
            "constant": "constant images",
            "repeated": "one image repeated",
            "nan": "noise and NaN",
        }
        facts, lines = {}, []
        for name in sorted({row["method"] for row in read("soak")}):
            line = [f"{float(select(read('soak'), {'method': name, 'kind': 'noise'})[0]['start']):.1f}"]
            for kind, heading in kinds.items():
                (row,) = select(read("soak"), {"method": name, "kind": kind})
                line.append(f"{float(row['after']):.1f} → {float(row['rolled_back']):.1f}")
                facts[f"{name} / {heading}"] = line[-1]
            lines.append([name, *line])
        return facts, markdown(["method", "start", *kinds.values()], lines)


STEP = {"views": "views", "ms": "ms", "plain steps": "ratio"}
TIMES = {"ms": "ms", "ratio": "ratio"}
PEAK = {"step": "what", "MB": "peak_mb", "ratio": "ratio"}
CPU, GPU = "CPU x86_64, 2 cores", "NVIDIA H200"
ARTS = {**around("tent"), "SAFER's views, no adaptation": MEAN}
SCHEDULE = {
    f"{rate}, {steps} steps": {**where, "source": source}
    for rate, where in RATES.items()
    for steps, source in (("1,500", "erm"), ("5,000", "erm-5000"))
}
RULES = {
    f"Tent + SAFER, {pool}": run("tent", "safer", predictor_options=options(pool=pool) if pool != "cc_drop" else "")
    for pool in ("mean", "entropy", "top1", "cc", "cc_drop")
}
VIEWS = {
    f"{n} augmented view{'s' if n > 1 else ''}": run(
        "tent", "safer", predictor_options=options(views=n) if n != 4 else ""
    )
    for n in (1, 2, 3, 4)
}
OPERATORS = {
    f"at most {n} operators": run(
        "tent",
        "safer",
        predictor_options=options(pipeline={"max_operators": n, "preset": "released"}) if n != 3 else "",
    )
    for n in (2, 3, 4, 5)
}
CURVES = {
    curve: run(
        "tent",
        "safer-a",
        predictor_options=options(mixing={"name": "sigmoid", "curve": curve}) if curve != "sigmoid" else "",
    )
    for curve in ("step", "linear", "sigmoid")
}
DEFENCES = {f"Tent + {name}": run("tent", name) for name in ("jpeg", "fft", "blur")}
RELEASED = {
    f"{name}{note}": {**where, "options": given}
    for name, where in around("tsd", "", " + SAFER").items()
    for note, given in (("", ""), (", as released", options(released=True)))
}
ALL = {f"{eps}/255": {"attack_rate": "100", "eps": str(eps)} for eps in (2, 4, 8, 16)}
TUNED_AND_HELD_OUT = {
    f"{rate}, {name}": {**where, "seed": seeds}
    for name, seeds in (("seeds 0 and 2", ("0", "2")), ("seed 3", ("3",)))
    for rate, where in RATES.items()
}
BATCHES = {f"batches of {n}": {"batch": str(n), "attack_rate": "0"} for n in (64, 16, 4, 1)}

TABLES: dict[str, Table | Listing | Signals | Paper | Repeated | Choices | Suspected | Soak | Promises] = {
    # --- PACS: the mean of four targets
    "readme-table": Table("pacs", HEADLINE, RATES, USUAL, spread="interval"),
    "pacs-main": Table("pacs", PAPER, RATES, USUAL, spread="interval"),
    "pacs-paper": Paper(),
    "pacs-targets": Table("pacs", HEADLINE, by_target(PACS), USUAL, upright=True),
    "pacs-safer-g": Table("pacs", SAFER_G, TUNED_AND_HELD_OUT, USUAL, seeds=["0", "2"]),
    "pacs-held-out-targets": Table("pacs", SAFER_G, by_target(PACS), USUAL, seeds=["3"]),
    "pacs-tsd-sketch": Table("pacs", around("tsd", *GATED), RATES, USUAL, ["sketch"], ["0"]),
    "pacs-defences": Table("pacs", {**DEFENCES, **around("tent", " + SAFER")}, RATES, USUAL, seeds=["2"]),
    "pacs-pooling": Table("pacs", RULES, RATES, USUAL, seeds=["2"]),
    "pacs-released": Table("pacs", RELEASED, RATES, USUAL, seeds=["2"]),
    # --- PACS: studies on Art Painting
    "pacs-rates": art(ARTS, rates(*range(0, 101, 10)), upright=True),
    "pacs-epsilon": art(around("tent", *GATED), ALL),
    "pacs-eot": art(
        KNOWING, EOT, {**USUAL, "images": "128", "attack": ("pgd", "eot")}, spread="images", complete=False
    ),
    "pacs-late": art(around("tent"), rates(50, 100), {**USUAL, "draw": "late"}),
    "pacs-batch": art(around("tent", " + SAFER"), BATCHES),
    "pacs-views": art(VIEWS),
    "pacs-operators": art(OPERATORS),
    "pacs-curves": art(CURVES),
    "pacs-signals": Signals(),
    "pacs-schedule": art(
        {name: where for name, where in WITHOUT_G.items() if "source" not in where and where != run("tesla")}, SCHEDULE
    ),
    "pacs-autoattack": art(
        around("tent", *GATED),
        {name: {"attack": name} for name in ("pgd", "autoattack")},
        {**USUAL, "images": "512", "attack_rate": "100"},
        spread="images",
        complete=False,
    ),
    "pacs-repeated": Repeated(),
    "suspicion": Listing(
        "suspicion",
        {
            "target": "target",
            "seed": "seed",
            "AUROC": "auroc",
            "all images": "answered_100",
            "the less suspicious half": "answered_50",
        },
        {"dataset": "pacs", "predictor": "safer-g"},
        2,
        2,
    ),
    "abstain": Listing(
        "suspicion",
        {
            "target": "target",
            "predictor": "predictor",
            "all images": "answered_100",
            "the less suspicious half": "answered_50",
        },
        {"dataset": "pacs", "predictor": ("safer", "safer-g"), "seed": "0"},
        2,
    ),
    "gate-views": Choices(
        Table("pacs", around("tent", *GATED), RATES, USUAL, seeds=["0", "2", "3"]),
        {
            "Tent + SAFER on the views of SAFER-G": ("SAFER's own pooling on the gate's views", "pacs"),
            "Tent + SAFER-G without memory": ("no memory", "pacs"),
            "Tent + SAFER-G without the offset of 0.3": ("no clean offset", "pacs"),
            "Tent + SAFER-G, if the attacked images were known": ("attacked images known", "pacs"),
        },
    ),
    "gate-tsd": Choices(
        Table("pacs", around("tsd", " + SAFER-G"), RATES, USUAL, ["cartoon"], ["0", "2", "3"]),
        {"TSD + SAFER-G without the exception": ("TSD, pooled features", "pacs/cartoon")},
    ),
    # --- the embedded drawings
    "embedded-main": Table("embedded", WITHOUT_G, RATES, DRAWN, EMBEDDED, spread="interval"),
    "embedded-safer-g": Table("embedded", SAFER_G, RATES, DRAWN, EMBEDDED, ["0"]),
    "embedded-targets": Table("embedded", around("tent"), by_target(EMBEDDED), DRAWN, EMBEDDED, ["0"]),
    "embedded-eot": Table(
        "embedded",
        KNOWING,
        EOT,
        {**DRAWN, "images": "128", "attack": ("pgd", "eot")},
        ["sketch"],
        ["0"],
        "images",
        complete=False,
    ),
    "demo": Table(
        "embedded", {**HEADLINE, "SAFER's views, no adaptation": MEAN}, RATES, {**DRAWN, "images": "960"}, ["sketch"]
    ),
    "methods": Table(
        "methods",
        EVERY,
        beside("plain", "safer"),
        {**DRAWN, "norm": "", "images": "960"},
        ["sketch"],
        ["0", "1", "2"],
        "deviation",
        complete=False,
    ),
    "methods-safer-g": Table(
        "methods",
        {name: where for name, where in EVERY.items() if name not in ("cotta", "memo")},
        beside("plain", "safer", "safer-g"),
        DRAWN,
        ["sketch"],
        ["0"],
        complete=False,
    ),
    # --- statistics of normalisation layers
    **NORM_TABLES,
    # --- alarms
    "alarms": Suspected(),
    # --- long runs
    "soak": Soak(),
    "soak-memory": Listing(
        "soak", {"method": "method", "early, MB": "early_mb", "at the end, MB": "end_mb"}, {"kind": "memory"}, digits=0
    ),
    "chaos-promises": Promises(),
    "chaos": CHAOS,
    "families": Families(),
    # --- time and memory
    "serve": Listing(
        "serve",
        {"": "what", "median, ms": "p50_ms", "99th percentile, ms": "p99_ms", "ratio": "ratio"},
        {"section": "latency"},
        digits=2,
    ),
    "serve-streams": Listing(
        "serve",
        {"streams": "streams", "images per s": "images_per_s", "median, ms": "p50_ms"},
        {"section": "throughput"},
        digits=0,
    ),
    "streams": Listing(
        "streams",
        {"": "what", "median, ms": "ms", "images per s": "images_per_s", "ratio": "ratio", "peak, MB": "peak_mb"},
    ),
    "speed-cpu": speed(STEP, "steps", machine=CPU, system_allocator="false"),
    "speed-cpu-system-malloc": speed(STEP, "steps", machine=CPU, system_allocator="true"),
    "speed-gpu": speed({"architecture": "architecture", **STEP}, "steps", 2, machine=GPU, method="tent"),
    "speed-ways": speed(
        {
            "architecture": "architecture",
            "precision": "precision",
            "compiled": "compile",
            **STEP,
            "ms through stream()": "stream_ms",
        },
        "accelerated",
        4,
    ),
    "speed-predictors": speed({"architecture": "architecture", "predictor": "predictor", **TIMES}, "predictors", 2),
    "speed-memory-cpu": speed(PEAK, "memory", machine=CPU, system_allocator="false"),
    "speed-memory-cpu-system-malloc": speed(PEAK, "memory", machine=CPU, system_allocator="true"),
    "speed-memory-gpu": speed(PEAK, "memory", machine=GPU),
    "speed-chunks-cpu": speed({"views": "what", **TIMES}, "chunks", machine=CPU),
    "speed-chunks-gpu": speed({"views": "what", **TIMES}, "chunks", machine=GPU),
    "speed-views": speed(
        {"views": "what", "compiled": "compile", **TIMES, "ms on the device": "device_ms"}, "views", 2, machine=GPU
    ),
    "speed-accuracy": speed(
        {"views": "views", "precision": "precision", "compiled": "compile", "accuracy, %": "accuracy"}, "accuracy", 3
    ),
    "speed-startup": speed({"process": "what", "ms": "ms"}, "startup"),
    "speed-attack": speed({"machine": "machine", "images per s": "images_per_s"}, "attack"),
}
