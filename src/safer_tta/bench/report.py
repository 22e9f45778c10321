"""A page that shows results to a person: one HTML file, nothing loaded from anywhere."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --soft: #5a6472; --line: #d9dee5; --good: #0b6e4f;
  --bad: #b3261e; --card: #f6f8fa; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ecf1; --paper: #14181d; --soft: #9aa6b4; --line: #323a44;
  --good: #5fd3a8; --bad: #ff8a80; --card: #1d232a; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; } p, li { max-width: 46rem; }
.soft { color: var(--soft); } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .9rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; } td.best { font-weight: 700; }
.figures, .views { display: flex; flex-wrap: wrap; gap: .9rem; } figure { margin: 0; }
.chart { background: #fff; border-radius: 6px; padding: .4rem; flex: 1 1 24rem; max-width: 46rem;
  margin-top: 1rem; }
.chart svg { width: 100%; height: auto; }
.view { background: var(--card); border-radius: 8px; padding: .6rem; width: 9.2rem; font-size: .82rem;
  box-sizing: border-box; border: 2px solid transparent; } .view.dropped { border-color: var(--bad); }
.view img { width: 100%; image-rendering: pixelated; border-radius: 4px; }
.right { color: var(--good); } .wrong { color: var(--bad); }
code { background: var(--card); padding: .1rem .3rem; border-radius: 4px; overflow-wrap: anywhere; }
.wide { overflow-x: auto; } .wide th { white-space: nowrap; }
td.second { text-decoration: underline; }
th button { font: inherit; color: inherit; background: none; border: 0; padding: 0; cursor: pointer; font-weight: 700; }
th[aria-sort=ascending] button::after { content: " ▲"; } th[aria-sort=descending] button::after { content: " ▼"; }
"""

# A click on a column's head sorts by it; a second one the other way round.
SCRIPT = """
for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => {
  const head = button.parentElement, row = head.parentElement, body = head.closest("table").tBodies[0];
  const down = head.getAttribute("aria-sort") === "descending";
  for (const other of row.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "ascending" : "descending");
  const value = line => line.cells[head.cellIndex].dataset.value ?? line.cells[head.cellIndex].textContent;
  const order = (a, b) => a !== "" && b !== "" && !isNaN(a) && !isNaN(b) ? a - b : String(a).localeCompare(String(b));
  [...body.rows].sort((a, b) => (down ? 1 : -1) * order(value(a), value(b))).forEach(line => body.append(line));
});
"""
# Nothing is loaded from anywhere, and the page says so to the browser.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


@dataclass
class View:
    """One picture of the qualitative figure and what is said of it."""

    image: NDArray[np.uint8]  # (3,H,W)
    title: str
    predicted: str
    confidence: float
    right: bool
    reliability: float | None = None
    weight: float | None = None
    dropped: bool = False
    operators: tuple[str, ...] = ()


def page(title: str, *sections: str) -> str:
    script = f"<script>{SCRIPT}</script>" if any("<button" in section for section in sections) else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escaped(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<style>{STYLE}</style></head><body><h1>{escaped(title)}</h1>{''.join(sections)}"
        f"{script}</body></html>\n"
    )


def section(heading: str, *content: str) -> str:
    return f"<section><h2>{escaped(heading)}</h2>{''.join(content)}</section>"


def paragraph(text: str) -> str:
    return f"<p>{escaped(text)}</p>"


def table(header: Sequence[str], rows: Sequence[tuple[str, Sequence[float | None]]]) -> str:
    """A name and numbers in each row; the best of every column is bold."""
    best = [
        max((v for v in column if v is not None), default=None) for column in zip(*(r[1] for r in rows), strict=True)
    ]
    head = "".join(f'<th scope="col">{escaped(cell)}</th>' for cell in header)
    body = "".join(f'<tr><th scope="row">{escaped(name)}</th>{_cells(values, best)}</tr>' for name, values in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


@dataclass(frozen=True)
class Value:
    """A cell of a sortable table: what it sorts by, what it shows, how it is marked (best, second)."""

    value: float | None
    text: str
    mark: str = ""


def sortable(header: Sequence[str], rows: Sequence[tuple[str, Sequence[Value]]]) -> str:
    """A table whose columns sort when their heads are clicked."""
    head = "".join(f'<th scope="col"><button type="button">{escaped(cell)}</button></th>' for cell in header)
    body = (
        f'<tr><th scope="row">{escaped(name)}</th>{"".join(map(_sorted_cell, values))}</tr>' for name, values in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _sorted_cell(cell: Value) -> str:
    value = "" if cell.value is None else str(cell.value)
    return f'<td data-value="{value}" class="{cell.mark}">{escaped(cell.text)}</td>'


def charts(*drawn: tuple[str, str]) -> str:
    """(svg, caption) side by side."""
    figures = (
        f'<figure class="chart" role="img" aria-label="{escaped(caption)}">{svg}</figure>' for svg, caption in drawn
    )
    return f'<div class="figures">{"".join(figures)}</div>'


def views(shown: Sequence[View]) -> str:
    return f'<div class="views">{"".join(_view(view) for view in shown)}</div>'


def _view(view: View) -> str:
    said = f'<span class="{"right" if view.right else "wrong"}">{escaped(view.predicted)} {view.confidence:.0%}</span>'
    facts = [said]
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
