"""Figures as SVG text, legible in print and for the colour-blind: every line has a colour, a dash and a marker."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

# Okabe and Ito's palette, told apart by all common kinds of colour blindness
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def lines(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, x: str, y: str = "accuracy, %", title: str = ""
) -> str:
    """Several named curves of (x, y) in one chart."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(5.6, 3.6))
    for index, (name, (across, up)) in enumerate(curves.items()):
        axes.plot(
            across,
            up,
            label=name,
            color=COLOURS[index % len(COLOURS)],
            linestyle=DASHES[index % len(DASHES)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=4,
            linewidth=1.6,
        )
    axes.set(xlabel=x, ylabel=y, title=title, ylim=(0, 102))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False, loc="best")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return _svg(plt, figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'safer-tta[bench]'") from error
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "safer-tta", "svg.fonttype": "none", "font.family": "sans-serif"})
    return plt


def _svg(plt: Any, figure: Any) -> str:
    """The chart as an <svg> element, the same bytes for the same numbers."""
    text = io.StringIO()
    figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    drawn = text.getvalue()
    return drawn[drawn.index("<svg") :]
