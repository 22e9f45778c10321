"""The commands `safer serve rollout` and `switch`, which ask a running service."""

import json
from typing import Annotated, Any

import typer

from . import options
from .journal import app as app

FIGURES = {"flagged": "{:.1%}", "accuracy": "{:.1f} %", "seconds": "{:.3f}"}


@app.command("rollout")
def rollout(
    url: options.Url = "http://127.0.0.1:8017", token: options.Token = None, as_json: options.AsJson = False
) -> None:
    """Show how the new model, which is the shadow, compares with the one that answers."""
    from ..client import Client

    with Client(url, token) as client:
        _tell(client.rollout(), as_json)


@app.command("switch")
def switch(
    version: Annotated[str, typer.Argument(help="The version that is to answer, as `safer serve rollout` shows it.")],
    url: options.Url = "http://127.0.0.1:8017",
    token: options.Token = None,
    as_json: options.AsJson = False,
) -> None:
    """Let the shadow answer from now on. The model before it is the shadow then, so that you can switch back."""
    from ..client import Client

    with Client(url, token) as client:
        found = client.switch(version)
    if not as_json:
        typer.echo(f"{version} answers from now on" if found["switched"] else f"{version} was live already")
    _tell(found, as_json)


def _tell(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(found, sort_keys=True))
        return
    row = "{:22}{:>22}{:>22}".format
    typer.echo(row("", "live", "shadow"))
    for field in ("version", "model"):
        typer.echo(row(field, *(found[role][field] for role in ("live", "shadow"))))
    for field, form in FIGURES.items():
        shown = ["–" if value is None else form.format(value) for value in found[field].values()]
        typer.echo(row({"seconds": "seconds per batch"}.get(field, field), *shown))
    counts, agreement = found["counts"], found["agreement"]
    seen = f"{counts['batches']:.0f} batches, {counts['images']:.0f} images, {counts['labelled']:.0f} labelled"
    typer.echo(f"compared: {seen}; missed {counts['missed']:.0f}, failed {counts['failed']:.0f}")
    typer.echo(f"same class: {'–' if agreement is None else format(agreement, '.1%')}")
