"""What rows of measurements the tables of docs/tables.py select."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from facts import Listing, Table, Where

PACS = ["art_painting", "cartoon", "photo", "sketch"]
EMBEDDED = ["photo", "painting", "cartoon", "sketch"]
USUAL: Where = {
    "source": "erm", "norm": "", "options": "", "predictor_options": "", "attack": ("", "pgd"), "eps": ("", "8"),
    "threat": "", "draw": "exact", "batch": "64", "images": ("2048", "2344", "1670", "3929"),
}  # fmt: skip
DRAWN: Where = {**USUAL, "images": "512"}


def rates(*values: int) -> dict[str, Where]:
    return {f"{value} %": {"attack_rate": str(value)} for value in values}


RATES: dict[str, Where] = dict(zip(("clean", "half attacked", "all attacked"), rates(0, 50, 100).values(), strict=True))


def run(method: str, predictor: str = "plain", **more: str) -> Where:
    return {"method": method, "predictor": predictor, **more}


def options(**changed: object) -> str:
    """The options that differ from their defaults, as rows have them."""
    return json.dumps(changed, sort_keys=True, separators=(",", ":"))


NAMES = {"tent": "Tent", "pl": "PL", "tsd": "TSD"}
SAFERS = {"": "plain", " + SAFER": "safer", " + SAFER-A": "safer-a", " + SAFER-G": "safer-g"}
NONE, MEAN = run("none"), run("none", "safer", predictor_options=options(pool="mean"))
ROBUST = run("none", source="robust")


def around(method: str, *endings: str) -> dict[str, Where]:
    """A method on its own and inside SAFER and its variants."""
    return {f"{NAMES[method]}{end}": run(method, SAFERS[end]) for end in endings or SAFERS}


HEADLINE = {"no adaptation": NONE, **around("tent")}
PAPER = {
    "no adaptation": NONE, "Robust ERM": ROBUST, "TeSLA": run("tesla"), "EATA": run("eata"),
    "Tent + MedBN": run("tent", norm="medbn"), **around("tent"), **around("pl"), **around("tsd"),
}  # fmt: skip
WITHOUT_G = {name: where for name, where in PAPER.items() if where["predictor"] != "safer-g"}
GATED = ["", " + SAFER", " + SAFER-G"]
SAFER_G = {name: where for method in NAMES for name, where in around(method, *GATED).items()}
EOT: dict[str, Where] = {"transferred": {"attack": "pgd"}} | {
    f"EOT, {n} draw{'s' if n > 1 else ''}": {"attack": "eot", "threat": options(draws=n)} for n in (1, 4, 8)
}
KNOWING = {**around("tent"), "Tent + SAFER (mean)": run("tent", "safer", predictor_options=options(pool="mean"))}
DIA = (options(steps=1), options(step=1 / 255))  # the threats of the plan `neighbours`
METHODS = [
    "bn", "cotta", "eata", "memo", "none", "note", "pl", "rdumb", "rotta", "sar", "shot_im", "sotta", "t3a", "tent",
    "tesla", "tsd",
]  # fmt: skip
EVERY = {name: {"method": name} for name in METHODS} | {"tent, medbn": {"method": "tent", "norm": "medbn"}}


def by_target(targets: Sequence[str]) -> dict[str, Where]:
    return {f"{t}, {rate}": {**where, "target": t} for t in targets for rate, where in RATES.items()}


def beside(*predictors: str) -> dict[str, Where]:
    return {f"{p}, {rate}": {**where, "predictor": p} for p in predictors for rate, where in RATES.items()}


def art(rows: Mapping[str, Where], columns: Mapping[str, Where] = RATES, base: Where = USUAL, **more: Any) -> Table:
    """A study on Art Painting with seed 0."""
    return Table("pacs", rows, columns, base, ["art_painting"], ["0"], **more)


def speed(columns: Mapping[str, str], section: str, keys: int = 1, **where: str) -> Listing:
    return Listing("speed", columns, {"section": section, **where}, keys, 2)
