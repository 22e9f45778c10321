"""The page of an audit: a picture first, then figures, the worst images, and what was not tried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..bench import figures
from ..bench.report import Value, View, charts, listed, paragraph, section, sortable, views
from ..bench.report import page as whole_page
from .measure import Picture

if TYPE_CHECKING:
    from .report import Report

NOISE = 8  # times which the change of an image is shown
GREY = 128


def page(report: Report, meaning: str, columns: Sequence[str]) -> str:
    """Return the page as HTML."""
    facts = report.facts
    about = (
        f"{facts['defence']} was attacked in a stream of batches of {facts['batch']} images ({facts['effort']} effort, "
        f"seed {facts['seed']}). Every threat met a fresh start of it."
    )
    left = [f"{name}: {reason}" for name, reason in report.left_out.items()]
    parts = [
        paragraph(about),
        charts((_bars(report).svg, "accuracy under each threat")),
        section("Recommendations", listed(report.advice)) if report.advice else "",
        section("Figures", paragraph(meaning), _table(report, columns)),
        section("Who attacks", listed(_attackers(report)), paragraph(report.surrogate)),
        *_worst(report),
        section("Not measured", listed(left)) if left else "",
        section("Not tried", listed(report.untried)),
    ]
    return whole_page("How much this model withstands", *parts)


def _bars(report: Report) -> figures.Drawing:
    threats = list(dict.fromkeys(row["threat"] for row in report.rows))
    found = {(row["defence"], row["threat"]): row for row in report.rows}
    series, ends = {}, {}
    for name in dict.fromkeys(row["defence"] for row in report.rows):
        rows = [found.get((name, threat)) for threat in threats]
        series[name] = [None if row is None else row["accuracy"] for row in rows]
        ends[name] = [None if row is None else (row["low"], row["high"]) for row in rows]
    return figures.bars(threats, series, ends=ends, title="accuracy under each threat")


def _table(report: Report, columns: Sequence[str]) -> str:
    several = len({row["defence"] for row in report.rows}) > 1
    lines = []
    for row in report.rows:
        figures_ = [row["accuracy_alone"], row["flagged"], row["accuracy_answered"]]
        texts = ["–" if value is None else f"{value:.1f}" for value in figures_]
        interval = Value(row["low"], f"[{row['low']:.1f}, {row['high']:.1f}]")
        values = [Value(row["images"], str(row["images"])), Value(row["accuracy"], f"{row['accuracy']:.1f}"), interval]
        values += [Value(value, text) for value, text in zip(figures_, texts, strict=True)]
        lines.append((f"{row['threat']} ({row['defence']})" if several else row["threat"], values))
    return sortable(["threat", *columns], lines)


def _attackers(report: Report) -> list[str]:
    return list(dict.fromkeys(f"{row['threat']}: {row['attacker']}" for row in report.rows))


def _worst(report: Report) -> Iterator[str]:
    """Show for each threat the images that it had misread most confidently."""
    classes = report.facts["classes"]
    for row in report.own:
        shown = [view for picture in report.pictures.get(row["run"], ()) for view in _shown(picture, classes)]
        if shown:
            yield section(f"Worst images under {row['threat']}", views(shown))


def _shown(picture: Picture, classes: Sequence[str]) -> list[View]:
    """Return an image as it was, as it was attacked, and the change."""
    clean, attacked = _colours(picture.clean), _colours(picture.attacked)
    change = GREY + NOISE * (attacked.astype(int) - clean)
    return [
        View(clean, f"clean: {classes[picture.label]}", classes[picture.label], picture.before, True),
        View(attacked, "attacked", classes[picture.answer], picture.confidence, False),
        View(change.clip(0, 255).astype(np.uint8), f"the change × {NOISE}"),
    ]


def _colours(image: Tensor) -> NDArray[np.uint8]:
    """Return an image with three channels; of any other number the first is shown in grey."""
    return (image if len(image) == 3 else image[:1].expand(3, -1, -1)).numpy()
