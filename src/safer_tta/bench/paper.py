"""The figures that the paper published, for the cells of a plan."""

import csv
import functools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ..data.domains import KNOWN

FILES = resources.files("safer_tta.bench") / "paper"
AVERAGE = "average"


@dataclass(frozen=True)
class Published:
    mean: float
    std: float | None = None
    note: str = ""  # why a difference to it would mean nothing


def published(
    study: str | None, dataset: str, target: str, label: str, varied: Mapping[str, Any], rate: float
) -> Published | None:
    """Return what the paper reports; the target "average" is the mean over the dataset's domains."""
    if study is None or dataset not in KNOWN:
        return None
    if study == "main":
        return _main(dataset, target, label, rate)
    if dataset != "pacs":
        return None  # every other study of the paper is on PACS
    values = {place.rpartition(".")[2]: value for place, value in varied.items()}
    if study == "alpha_tau_kappa":
        return _heatmap(values, rate) if target == "art_painting" else None
    return _ablation(study, target, label, values, rate)


@functools.cache
def _read(name: str) -> list[dict[str, str]]:
    with (FILES / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def _main(dataset: str, target: str, label: str, rate: float) -> Published | None:
    found = [
        row
        for row in _read("main_tables")
        if (row["dataset"].lower(), row["method"], float(row["attack_rate_percent"])) == (dataset, label, rate)
        and target in (AVERAGE, _domain(dataset, row["target_domain"]))
    ]
    if not found:
        return None
    if target == AVERAGE:
        return Published(statistics.mean(float(row["accuracy_mean"]) for row in found))
    return Published(float(found[0]["accuracy_mean"]), float(found[0]["accuracy_std"]))


def _domain(dataset: str, name: str) -> str:
    """Return our name for a domain of the paper."""
    domains, plain = KNOWN[dataset].domains, name.lower().replace(" ", "_")
    return next(ours for ours, known in domains.items() if plain in map(str.lower, (ours, *known.spellings)))


def _ablation(study: str, target: str, label: str, values: Mapping[str, Any], rate: float) -> Published | None:
    where = "PACS average" if target == AVERAGE else f"PACS {target.replace('_', ' ').title()}"
    for row in _read("ablations"):
        found = (row["study"], row["data"], row["method"], float(row["attack_rate_percent"]))
        if found == (study, where, label, rate) and _same_setting(row, values):
            std = float(row["accuracy_std"]) if row["accuracy_std"] else None
            clean = "of the clean stream" if (study, row["value"]) == ("eot", "0") else ""
            return Published(float(row["accuracy_mean"]), std, clean)
    return None


def _same_setting(row: Mapping[str, str], values: Mapping[str, Any]) -> bool:
    """Return whether our setting has the value that the paper varies; a setting chosen by `best_of` has not."""
    if row["parameter"] == "attack_rate_percent" or not row["value"]:
        return True
    return any(_equal(row["value"], value) for value in values.values())


def _equal(published: str, ours: Any) -> bool:
    try:
        return float(published) == float(ours)
    except (TypeError, ValueError):
        return published == str(ours)


def _heatmap(values: Mapping[str, Any], rate: float) -> Published | None:
    wanted = (rate, values.get("tau"), values.get("kappa"))
    for row in _read("alpha_tau_kappa"):
        if (float(row["attack_rate"]), float(row["tau"]), float(row["kappa"])) == wanted:
            return Published(float(row["acc_mean"]))
    return None
