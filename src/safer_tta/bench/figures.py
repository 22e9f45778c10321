"""Draw figures as SVG and PNG. Every line has a colour, a dash and a marker, for print and for the colour-blind."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import MissingPackageError

# Okabe and Ito's palette, for all common kinds of colour blindness
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# Periods without a common divisor: the first 7 x 5 x 6 curves all look different.
DASHES = ("-", "--", "-.", ":", (0, (5, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P")
Numbers = Sequence[float | None]
HATCHES = ("", "//", "xx", "--", "\\\\", "++", "..")  # dots last: they make an SVG large


@dataclass(frozen=True)
class Curve:
    """y over x, with a standard deviation if there is one."""

    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float] | None = None


@dataclass(frozen=True)
class Drawing:
    svg: str  # an <svg> element, the same bytes for the same numbers
    png: bytes


def lines(
    curves: Mapping[str, Curve],
    *,
    x: str,
    y: str = "accuracy, %",
    title: str = "",
    second: tuple[str, Mapping[str, Curve]] | None = None,
    logarithmic: bool = False,
) -> Drawing:
    """Draw named curves in one chart. `second` is another axis, on the right, with its own curves."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(5.6, 3.6))
    _plot(axes, curves)
    axes.set(xlabel=x, ylabel=y, title=title, ylim=(0, 102))
    if logarithmic:
        axes.set_xscale("log", base=2)
    ticks = sorted({value for curve in curves.values() for value in curve.x})
    if len(ticks) <= 9:
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    handles = axes.get_legend_handles_labels()
    if second is not None:
        right = axes.twinx()
        _plot(right, second[1], first=len(curves))
        right.set(ylabel=second[0], ylim=(0, None))
        handles = tuple(a + b for a, b in zip(handles, right.get_legend_handles_labels(), strict=True))
    axes.grid(alpha=0.3)
    outside = {"loc": "upper left", "bbox_to_anchor": (1.12 if second else 1.0, 1.0)}
    axes.legend(*handles, fontsize=8, frameon=False, **(outside if len(handles[0]) > 3 else {"loc": "best"}))
    _bare(axes)
    return _drawn(plt, figure)


def bars(
    groups: Sequence[str],
    series: Mapping[str, Numbers],
    *,
    spread: Mapping[str, Numbers] | None = None,
    ends: Mapping[str, Sequence[tuple[float, float] | None]] | None = None,
    title: str = "",
) -> Drawing:
    """Draw a bar of every series for each group; horizontal, so that long names can be read.

    Lines at the ends of bars show a standard deviation (`spread`), or reach over an interval (`ends`).
    """
    plt = _pyplot()
    height = 0.8 / max(1, len(series))
    figure, axes = plt.subplots(figsize=(6.2, 1.2 + 0.16 * len(groups) * (len(series) + 1)))
    for index, (name, values) in enumerate(series.items()):
        places = [group + (index - (len(series) - 1) / 2) * height for group in range(len(groups))]
        lengths = [math.nan if value is None else value for value in values]  # no bar where there is no run
        errors: Any = None if spread is None else [value or 0.0 for value in spread[name]]
        if ends is not None:
            pairs = zip(lengths, ends[name], strict=True)
            reach = [(0.0, 0.0) if end is None else (value - end[0], end[1] - value) for value, end in pairs]
            errors = list(zip(*reach, strict=True))
        axes.barh(
            places, lengths, height=height, label=name, color=COLOURS[index % len(COLOURS)], edgecolor="white",
            linewidth=0.4, hatch=HATCHES[index % len(HATCHES)], xerr=errors, error_kw={"elinewidth": 0.8},
        )  # fmt: skip
    axes.set_yticks(range(len(groups)), groups, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="accuracy, %", title=title, xlim=(0, 100))
    axes.grid(alpha=0.3, axis="x")
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _bare(axes)
    return _drawn(plt, figure)


def heatmaps(
    panels: Mapping[str, Sequence[Numbers]], *, across: tuple[str, Sequence[Any]], down: tuple[str, Sequence[Any]]
) -> Drawing:
    """Draw a map for each panel, with the number in every cell, so that colour is not needed to read it."""
    plt = _pyplot()
    size = (5.2 * len(panels), 4.2)
    figure, (all_axes,) = plt.subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained")
    for axes, (title, cells) in zip(all_axes, panels.items(), strict=True):
        filled = [[math.nan if cell is None else cell for cell in line] for line in cells]
        image = axes.imshow(filled, cmap="cividis", aspect="auto")
        for i, line in enumerate(cells):
            for j, cell in enumerate(line):
                if cell is not None:
                    light = image.norm(cell) > 0.5
                    axes.text(j, i, f"{cell:.1f}", ha="center", va="center", fontsize=7, color="k" if light else "w")
        axes.set_xticks(range(len(across[1])), [str(value) for value in across[1]])
        axes.set_yticks(range(len(down[1])), [str(value) for value in down[1]])
        axes.set(xlabel=across[0], ylabel=down[0], title=title)
        figure.colorbar(image, ax=axes, label="accuracy, %")
    return _drawn(plt, figure)


def _plot(axes: Any, curves: Mapping[str, Curve], first: int = 0) -> None:
    for index, (name, curve) in enumerate(curves.items(), start=first):
        colour = COLOURS[index % len(COLOURS)]
        style = {"color": colour, "linestyle": DASHES[index % len(DASHES)], "linewidth": 1.6}
        marker = MARKERS[index % len(MARKERS)]
        often = max(1, len(curve.x) // 12)  # a long curve has about twelve markers
        axes.plot(curve.x, curve.y, label=name, marker=marker, markersize=4, markevery=often, **style)
        if curve.spread is not None:
            low = [y - s for y, s in zip(curve.y, curve.spread, strict=True)]
            high = [y + s for y, s in zip(curve.y, curve.spread, strict=True)]
            axes.fill_between(curve.x, low, high, color=colour, alpha=0.15, linewidth=0)


def _bare(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise MissingPackageError("figures need matplotlib: pip install 'safer-tta[bench]'") from error
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "safer-tta", "svg.fonttype": "none", "font.family": "sans-serif"})
    return plt


def _drawn(plt: Any, figure: Any) -> Drawing:
    text, picture = io.StringIO(), io.BytesIO()
    figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    figure.savefig(picture, format="png", bbox_inches="tight", dpi=160, metadata={"Software": None})
    plt.close(figure)
    drawn = text.getvalue()
    return Drawing(drawn[drawn.index("<svg") :], picture.getvalue())
