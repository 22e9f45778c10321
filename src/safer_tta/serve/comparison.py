"""How the shadow of a roll-out compares with the live model, from what was counted."""

from collections.abc import Mapping
from typing import Any


def compare(counts: Mapping[str, float]) -> dict[str, Any]:
    """Return the counts, and shares that follow from them; None where nothing was counted."""

    def both(counted: str, total: str, times: float = 1.0) -> dict[str, float | None]:
        return {who: _ratio(counts[f"{who}_{counted}"], counts[total], times) for who in ("live", "shadow")}

    return {
        "counts": dict(counts),
        "agreement": _ratio(counts["same"], counts["images"]),
        "flagged": both("flagged", "images"),
        "accuracy": both("right", "labelled", 100.0),
        "seconds": both("seconds", "batches"),
    }


def _ratio(counted: float, total: float, times: float = 1.0) -> float | None:
    return times * counted / total if total else None
