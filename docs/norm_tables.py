"""The tables about the statistics of normalisation layers: a part of those in docs/tables.py."""

from __future__ import annotations

from collections.abc import Mapping

from facts import Table, Where
from selections import DIA, DRAWN, EMBEDDED, NONE, PACS, RATES, USUAL, by_target, run

NORMS = {
    "no adaptation": NONE,
    "Tent, model": run("tent"),
    "Tent, stream": run("tent", norm="stream"),
    "Tent + SAFER-G, model": run("tent", "safer-g", norm="model"),
    "Tent + SAFER-G, stream": run("tent", "safer-g", norm="stream"),
}
FULL = "Tent + SAFER-G, stream"
SIZES: dict[str, Where] = {
    name: {"batch": str(n)}
    for name, n in (("batches of 64", 64), ("batches of 16", 16), ("batches of 4", 4), ("single images", 1))
}
EACH: dict[str, Where] = {t.replace("_", " "): {"target": t} for t in PACS} | {"average": {}}
STREAM = run("tent", "safer-g", norm="stream")
SHUFFLED: Where = {**USUAL, "order": "shuffled"}
# Attacks by neighbours: "0.001" levels change nothing, and show the same images before the attack.
POISONED: Where = {**SHUFFLED, "attack": "dia", "attack_rate": "20", "threat": DIA}
POISONS: dict[str, Where] = {
    "before the attack": {"eps": "0.001"}, "8/255": {"eps": "8"}, "16/255": {"eps": "16"}, "any images": {"eps": "255"},
}  # fmt: skip
POISONED_ROWS: dict[str, Where] = {
    "Tent, model": run("tent"), "Tent, medbn": run("tent", norm="medbn"),
    **{name: where for name, where in NORMS.items() if name not in ("no adaptation", "Tent, model")},
}  # fmt: skip


def norms(columns: Mapping[str, Where], measure: str = "accuracy", **where: str) -> Table:
    """A study of norms on two of the embedded domains."""
    base = {**DRAWN, "order": "shuffled", **where}
    return Table("norms", NORMS, columns, base, EMBEDDED[:2], spread="interval", measure=measure)


NORM_TABLES: dict[str, Table] = {
    "norms-clean": norms(SIZES, attack_rate="0"),
    "norms-attacked": norms(SIZES, attack_rate="100"),
    "norms-targets": norms(by_target(EMBEDDED[:2])),
    "norms-classes": norms(
        {
            f"{rate}, {name}": {**RATES[rate], **SIZES[name]}
            for rate in ("clean", "all attacked")
            for name in ("batches of 64", "batches of 4")
        },
        order="correlated",
    ),
    "neighbours": Table(
        "neighbours", POISONED_ROWS, POISONS, {**POISONED, "images": "256"}, EMBEDDED[:2], measure="accuracy_clean"
    ),
    "pacs-norms": Table(
        "pacs-norms",
        {name: where for name, where in NORMS.items() if name != "Tent, stream"},
        EACH,
        {**SHUFFLED, "attack_rate": "0"},
        spread="interval",
    ),
    "pacs-norms-sizes": Table(
        "pacs-norms",
        {"no adaptation, clean": {**NONE, "attack_rate": "0"}}
        | {f"Tent + SAFER-G, {rate}": {**STREAM, **RATES[rate]} for rate in ("clean", "all attacked")},
        SIZES,
        {**SHUFFLED, "images": "512"},
        spread="interval",
        complete=False,
    ),
    "pacs-norms-flagged": Table(
        "pacs-norms",
        {"clean images called attacked": {**STREAM, "attack_rate": "0"}},
        SIZES,
        {**SHUFFLED, "images": "512"},
        measure="flagged_clean",
    ),
    "pacs-norms-classes": Table(
        "pacs-norms",
        NORMS,
        EACH,
        {**USUAL, "order": "correlated", "attack_rate": "0", "images": "1024"},
        spread="interval",
    ),
    "pacs-norms-flagged-classes": Table(
        "pacs-norms",
        {"clean images called attacked": {**STREAM, "attack_rate": "0"}},
        EACH,
        {**USUAL, "order": "correlated", "images": "1024"},
        measure="flagged_clean",
    ),
    "pacs-neighbours": Table(
        "pacs-norms",
        {name: where for name, where in POISONED_ROWS.items() if name in ("Tent, model", "Tent, stream", FULL)},
        {
            f"{target}, {name}": {**at, **POISONS[name]}
            for target, at in EACH.items()
            for name in POISONS
            if name != "8/255"
        },
        {**POISONED, "images": "192"},
        seeds=["0"],
        measure="accuracy_clean",
        complete=False,
        upright=True,
    ),
}
