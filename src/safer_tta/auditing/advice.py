"""What the measured rows recommend. A sentence is said only where intervals of the rows lie apart."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..evaluation.intervals import wilson

Row = Mapping[str, Any]
UNANSWERED = 5.0  # percent of clean images that a recommended threshold may leave unanswered
DEFEATED = 50.0  # percent of the clean accuracy below which a threat is not withstood


def advice(rows: Sequence[Row], own: Sequence[Row]) -> list[str]:
    """Return recommendations for the defence whose rows are `own`, in sentences."""
    by_threat = {row["threat"]: row for row in own}
    clean = by_threat.get("clean")
    attacked = [row for row in own if row["threat"] != "clean"]
    others = [row for row in rows if row not in own]
    found = [*_better(by_threat, others)]
    if clean is not None:
        found = [*_adapting(clean), *_threshold(clean, attacked), *_neighbours(clean, attacked), *found]
        found += _defeated(clean, attacked)
    return found


def _adapting(clean: Row) -> Iterator[str]:
    """Compare adapting with the model alone, on clean images."""
    alone = wilson(clean["accuracy_alone"], clean["images"])
    figures = f"{clean['accuracy']:.1f} % against {clean['accuracy_alone']:.1f} % of the model alone"
    if clean["high"] < alone[0]:
        yield f"Use another method, or do not adapt: on clean images this one is worse ({figures})."
    elif clean["low"] > alone[1]:
        yield f"Adapt: on clean images it is better ({figures})."


def _threshold(clean: Row, attacked: Sequence[Row]) -> Iterator[str]:
    """Recommend a threshold of suspicion that leaves few clean images unanswered, if it finds attacked ones."""
    if clean["suspicion"] is None:
        return
    threshold = math.ceil(1000 * _quantile(clean["suspicion"], 1 - UNANSWERED / 100)) / 1000
    most = wilson(_above(clean["suspicion"], threshold), len(clean["suspicion"]))[1]
    shares = {row["threat"]: _above(row["suspicion"], threshold) for row in attacked if row["threat"] != "dia"}
    counts = {row["threat"]: row["images"] for row in attacked}
    found = {name: share for name, share in shares.items() if wilson(share, counts[name])[0] > most}
    missed = [name for name in shares if name not in found]
    if found and threshold < 1:
        listed = ", ".join(f"{share:.0f} % of {name}" for name, share in found.items())
        yield (
            f"Abstain above a suspicion of {threshold:g}: that leaves {_above(clean['suspicion'], threshold):.0f} % of "
            f"the clean images unanswered, and {listed}."
        )
    if missed:
        yield f"Do not rely on suspicion against {', '.join(missed)}: it is no higher there than on clean images."


def _neighbours(clean: Row, attacked: Sequence[Row]) -> Iterator[str]:
    """Say if images of others harm one's own."""
    for row in attacked:
        if row["threat"] == "dia" and row["high"] < clean["low"]:
            yield (
                f"Give every user a stream of their own: hostile images in a batch lowered the accuracy on the others "
                f"from {clean['accuracy']:.1f} to {row['accuracy']:.1f} %."
            )


def _better(own: Mapping[str, Row], others: Sequence[Row]) -> Iterator[str]:
    """Name the threats under which another defence of the audit did better."""
    for row in others:
        mine = own.get(row["threat"])
        if mine is not None and row["low"] > mine["high"]:
            yield (
                f"Under {row['threat']}, {row['defence']} is better: {row['accuracy']:.1f} % against "
                f"{mine['accuracy']:.1f} %."
            )


def _defeated(clean: Row, attacked: Sequence[Row]) -> Iterator[str]:
    """Name the threats that leave less than half of the clean accuracy."""
    names = [row["threat"] for row in attacked if row["high"] < clean["accuracy"] * DEFEATED / 100]
    if names:
        yield (
            f"Have a person review what matters if such attackers are possible: {', '.join(names)} left less than half "
            "of the clean accuracy."
        )


def _quantile(values: Sequence[float], share: float) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(share))


def _above(values: Sequence[float], threshold: float) -> float:
    """Return the percentage of values above a threshold."""
    return 100 * sum(value > threshold for value in values) / len(values)
