"""What a run of benchmarks/chaos.py found of what the service promises, over all phases."""

from __future__ import annotations

from facts import MISSING, Listing, Row, markdown, read

CHAOS = Listing(
    "chaos",
    {
        "phase": "phase", "batches": "answered", "in time, %": "availability", "median, ms": "p50_ms",
        "99th percentile, ms": "p99_ms", "relative to calm": "p99_ratio", "lost": "lost",
        "doubled": "doubled", "different": "different", "errors 5xx": "errors_5xx",
        "back to normal, s": "recovery_s", "memory, MB": "rss_mb",
    },
)  # fmt: skip


class Promises:
    """The promises of the service, each with the worst that was found."""

    def make(self) -> tuple[dict[str, str], str]:
        """Return the facts and the Markdown."""
        ran = [row for row in read("chaos") if not row["notes"].startswith("skipped")]
        worst = min(ran, key=lambda row: float(row["availability"]))
        flood = [f"{float(row['p99_ratio']):.1f}" for row in ran if row["phase"] == "flood" and row["p99_ratio"]]
        lines = [
            ["acknowledged batches that are lost", "0", _total(ran, "lost")],
            ["batches applied twice", "0", _total(ran, "doubled")],
            ["answers that differ from the library's", "0", _total(ran, "different")],
            ["errors 5xx that are not documented", "0", _total(ran, "undocumented_5xx")],
            ["batches answered in time, %", "≥ 99", f"{float(worst['availability']):.1f} ({worst['phase']})"],
            ["99th percentile beside a flood, relative to calm", "≤ 3", *(flood or [MISSING])],
        ]
        facts = {f"{what} / found": found for what, _, found in lines}
        facts |= {
            "batches": _total(ran, "answered"),
            "minutes": f"{sum(float(row['seconds']) for row in ran) / 60:.0f}",
        }
        return facts, markdown(["promise", "expected", "found"], lines)


def _total(rows: list[Row], field: str) -> str:
    return str(sum(int(row[field] or 0) for row in rows))
