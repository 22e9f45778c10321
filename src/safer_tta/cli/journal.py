"""The commands `safer serve backup`, `restore` and `check`, below `safer serve` itself."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import service
from .options import AsJson, result

if TYPE_CHECKING:
    from ..serve.journal import Findings

IN_USE = typer.Argument(help="The folder of a service, which may be running.")

app = typer.Typer()
app.callback(invoke_without_command=True)(service.serve)


@app.command("backup")
def backup(
    folder: Annotated[Path, IN_USE],
    out: Annotated[Path, typer.Argument(help="The file to write; one of that name is replaced.")],
    as_json: AsJson = False,
) -> None:
    """Copy all streams of a service to one file, as they are at one moment, and check the copy."""
    from ..serve import journal

    _tell(journal.backup(folder, out), f"{out} was written", as_json)


@app.command("restore")
def restore(
    file: Annotated[Path, typer.Argument(help="A file that `safer serve backup` wrote.")],
    folder: Annotated[Path, typer.Argument(help="The folder of a service that has no streams yet.")],
    as_json: AsJson = False,
) -> None:
    """Check a backup, and put it in place for a service to continue."""
    from ..serve import journal

    _tell(journal.restore(file, folder), f"{folder} was restored", as_json)


@app.command("check")
def check(folder: Annotated[Path, IN_USE], as_json: AsJson = False) -> None:
    """Look for damage in what a service has stored, and list the damaged streams."""
    from ..serve import journal

    _tell(journal.check(folder), f"{folder} was checked", as_json)


def _tell(findings: "Findings", done: str, as_json: bool) -> None:
    """Print what was found, and end with 1 if it is damage."""
    if as_json:
        result({**dataclasses.asdict(findings), "intact": findings.intact}, True)
    else:
        typer.echo(f"{done}: {findings.streams} streams" + (", no damage found" if findings.intact else ""))
        for problem in findings.problems():
            typer.echo(f"problem: {problem}")
    if not findings.intact:
        raise typer.Exit(1)
