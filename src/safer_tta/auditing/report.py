"""What an audit found: as a text, as Markdown, as JSON and as a page."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._internal.files import FilePath, atomic_write
from .advice import advice
from .measure import Picture
from .page import page
from .requirements import Requirement
from .threats import untried

Row = Mapping[str, Any]
COLUMNS = ("images", "accuracy, %", "interval", "model alone, %", "called attacked, %", "answered right, %")
MEANING = (
    "Accuracy is that of the adapting model under each attack, with its 95 % interval over the images (Wilson). Model "
    "alone: the model without method and predictor on the same images. Answered right: among the images that were not "
    "called attacked."
)
OWN_SURROGATE = (
    "No surrogate was given, so the attacker's own model is your model as it was before it adapted. Threats that are "
    "prepared on a surrogate (pgd, transfer, aware) are therefore as strong as if your model had been published."
)
GIVEN_SURROGATE = "Threats that are prepared on a surrogate (pgd, transfer, aware) use the model that was given for it."


@dataclass(frozen=True, repr=False)
class Report:
    """How much a model withstands, threat by threat; it prints as a table.

    Attributes:
        rows: The figures of each threat that was measured, first those of the defence that was audited.
        left_out: Why each further threat was not measured.
        facts: What the audit was made with.
    """

    rows: tuple[Row, ...]
    left_out: Mapping[str, str]
    facts: Mapping[str, Any]
    pictures: Mapping[str, Sequence[Picture]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return self.table()

    @property
    def own(self) -> tuple[Row, ...]:
        """The rows of the defence that was audited, without those it is compared with."""
        return tuple(row for row in self.rows if row["defence"] == self.facts["defence"])

    @property
    def advice(self) -> list[str]:
        """What the measured rows recommend, in sentences."""
        return advice(self.rows, self.own)

    @property
    def untried(self) -> list[str]:
        """What was not tried, in sentences."""
        return untried(row["threat"] for row in self.own)

    @property
    def surrogate(self) -> str:
        """Whose model the attacker prepared attacks on, in a sentence."""
        return GIVEN_SURROGATE if self.facts["surrogate"] == "given" else OWN_SURROGATE

    def failed(self, requirements: Sequence[Requirement]) -> list[str]:
        """Return in sentences which requirements the audited defence does not meet."""
        accuracies = {row["threat"]: row["accuracy"] for row in self.own}
        return [one.problem(accuracies) for one in requirements if not one.met(accuracies)]

    def table(self) -> str:
        """Return the figures as lines of text."""
        names = [self._name(row) for row in self.rows]
        width = max(map(len, names), default=0) + 2
        lines = [" " * width + "".join(f"{column:>20}" for column in COLUMNS)]
        for name, row in zip(names, self.rows, strict=True):
            lines.append(f"{name:{width}}" + "".join(f"{cell:>20}" for cell in cells(row)))
        return "\n".join([*lines, *(f"not measured: {name}: {reason}" for name, reason in self.left_out.items())])

    def markdown(self) -> str:
        """Return the whole report as Markdown."""
        header = ["threat", "the attacker", *COLUMNS]
        body = [[self._name(row), row["attacker"], *cells(row)] for row in self.rows]
        lines = [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *body)]
        parts = [
            f"# Audit of {self.facts['defence']}", MEANING, self.surrogate, "\n".join(lines),
            *_listed("Recommendations", self.advice),
            *_listed("Not measured", [f"{name}: {reason}" for name, reason in self.left_out.items()]),
            *_listed("Not tried", self.untried),
        ]  # fmt: skip
        return "\n\n".join(parts) + "\n"

    def to_json(self) -> str:
        """Return everything but the pictures as JSON."""
        rows = [dict(row) for row in self.rows]
        found = {"facts": dict(self.facts), "rows": rows, "left_out": dict(self.left_out), "untried": self.untried}
        return json.dumps({**found, "advice": self.advice}, sort_keys=True)

    def html(self, path: FilePath) -> Path:
        """Write a page that loads nothing from elsewhere, and return its path."""
        with atomic_write(path) as file:
            file.write(page(self, MEANING, COLUMNS).encode())
        return Path(path)

    def _name(self, row: Row) -> str:
        several = len({row["defence"] for row in self.rows}) > 1
        return f"{row['threat']} ({row['defence']})" if several else str(row["threat"])


def cells(row: Row) -> list[str]:
    """Return what a table says of a row, by `COLUMNS`."""
    figures = [row[name] for name in ("accuracy_alone", "flagged", "accuracy_answered")]
    interval = f"[{row['low']:.1f}, {row['high']:.1f}]"
    return [str(row["images"]), f"{row['accuracy']:.1f}", interval, *map(shown, figures)]


def shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _listed(heading: str, items: Sequence[str]) -> list[str]:
    return [f"## {heading}", "\n".join(f"- {item}" for item in items)] if items else []
