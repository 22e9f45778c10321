"""How early an attack was noticed in a run of benchmarks/alarms.py."""

from __future__ import annotations

import statistics

from facts import markdown, read, select


class Suspected:
    """How often an attack was suspected, after how many images, and how often before it began."""

    def make(self) -> tuple[dict[str, str], str]:
        rows = read("alarms")
        clean, false = (sum(int(row[name]) for row in rows) for name in ("clean_images", "false_alarms"))
        flagged = 100 * sum(int(row["clean_flagged"]) for row in rows) / clean
        facts = {"clean images": f"{clean:,}", "false alarms": str(false), "clean flagged": f"{flagged:.2f}"}
        rates, lines = sorted({int(row["rate"]) for row in rows} - {0}), []
        for target in dict.fromkeys(row["target"] for row in rows):
            line = []
            for rate in rates:
                found = select(rows, {"target": target, "rate": str(rate)})
                until = [int(row["images_until"]) for row in found if row["images_until"]]
                after = f", after {statistics.median(until):.0f} images" if until else ""
                facts[f"{target} / {rate}"] = f"{len(until)} of {len(found)}{after}"
                line.append(facts[f"{target} / {rate}"])
            lines.append([target, *line])
        return facts, markdown(["target", *(f"{rate} % attacked" for rate in rates)], lines)
