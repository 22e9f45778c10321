"""Build a page of results: one HTML file that loads nothing."""

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

FILES = resources.files("safer_tta.bench") / "page"
# The browser is told that the page loads nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


@dataclass
class View:
    """A picture of one view, and the model's answer to it if it was asked."""

    image: NDArray[np.uint8]  # (3,H,W)
    title: str
    predicted: str | None = None
    confidence: float = 0.0
    right: bool = False
    reliability: float | None = None
    weight: float | None = None
    dropped: bool = False
    operators: tuple[str, ...] = ()


def page(title: str, *sections: str) -> str:
    script = (
        f"<script>{(FILES / 'sort.js').read_text('utf-8')}</script>"
        if any("<button" in section for section in sections)
        else ""
    )
    style = (FILES / "page.css").read_text("utf-8")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escaped(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<style>{style}</style></head><body><h1>{escaped(title)}</h1>{''.join(sections)}"
        f"{script}</body></html>\n"
    )


def section(heading: str, *content: str) -> str:
    return f"<section><h2>{escaped(heading)}</h2>{''.join(content)}</section>"


def paragraph(text: str) -> str:
    return f"<p>{escaped(text)}</p>"


def listed(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escaped(item)}</li>' for item in items)}</ul>"


def table(header: Sequence[str], rows: Sequence[tuple[str, Sequence[float | None]]]) -> str:
    """Return a table with a name and numbers in each row; the best of every column is bold."""
    columns = zip(*(values for _, values in rows), strict=True)
    best = [max((value for value in column if value is not None), default=None) for column in columns]
    head = "".join(f'<th scope="col">{escaped(cell)}</th>' for cell in header)
    body = "".join(f'<tr><th scope="row">{escaped(name)}</th>{_cells(values, best)}</tr>' for name, values in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


@dataclass(frozen=True)
class Value:
    """A cell of a sortable table."""

    value: float | None  # what it sorts by
    text: str  # what it shows
    mark: str = ""  # "best" or "second"


def sortable(header: Sequence[str], rows: Sequence[tuple[str, Sequence[Value]]]) -> str:
    """Return a table whose columns sort when their heads are clicked."""
    head = "".join(f'<th scope="col"><button type="button">{escaped(cell)}</button></th>' for cell in header)
    lines = ((escaped(name), "".join(map(_sorted_cell, values))) for name, values in rows)
    body = "".join(f'<tr><th scope="row">{name}</th>{cells}</tr>' for name, cells in lines)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _sorted_cell(cell: Value) -> str:
    value = "" if cell.value is None else str(cell.value)
    return f'<td data-value="{value}" class="{cell.mark}">{escaped(cell.text)}</td>'


def charts(*drawn: tuple[str, str]) -> str:
    """Return charts, given as (svg, caption), side by side."""
    named = ((svg, escaped(caption)) for svg, caption in drawn)
    figures = (f'<figure class="chart" role="img" aria-label="{caption}">{svg}</figure>' for svg, caption in named)
    return f'<div class="figures">{"".join(figures)}</div>'


def views(shown: Sequence[View]) -> str:
    return f'<div class="views">{"".join(_view(view) for view in shown)}</div>'


def _view(view: View) -> str:
    facts = []
    if view.predicted is not None:
        mark = "right" if view.right else "wrong"
        facts.append(f'<span class="{mark}">{escaped(view.predicted)} {view.confidence:.0%}</span>')
    if view.reliability is not None:
        facts.append(f"r = {view.reliability:.3f}")
    if view.weight is not None:
        facts.append("<strong>dropped</strong>" if view.dropped else f"weight {view.weight:.2f}")
    if view.operators:
        facts.append(f'<span class="soft">{escaped(" → ".join(view.operators))}</span>')
    return (
        f'<div class="view{" dropped" if view.dropped else ""}">'
        f'<img alt="{escaped(view.title)}" src="{_png(view.image)}">'
        f"<div><strong>{escaped(view.title)}</strong></div>{''.join(f'<div>{fact}</div>' for fact in facts)}</div>"
    )


def _cells(values: Sequence[float | None], best: Sequence[float | None]) -> str:
    cells = []
    for value, highest in zip(values, best, strict=True):
        mark = ' class="best"' if value is not None and value == highest else ""
        cells.append(f"<td{mark}>{'–' if value is None else f'{value:.1f}'}</td>")
    return "".join(cells)


def _png(image: NDArray[np.uint8]) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))).save(file, format="PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def escaped(text: Any) -> str:
    return html.escape(str(text), quote=True)
