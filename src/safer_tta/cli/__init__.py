"""The command `safer`: it parses, calls and prints. Everything it does can be called from Python."""

import dataclasses
import os
import re
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from typer.core import TyperGroup, TyperOption
except ImportError:
    sys.exit("the command needs typer and rich: pip install 'safer-tta[bench]'")

from .. import __version__
from .._internal.malloc import keep_freed_memory
from .._internal.progress import progress
from ..errors import SaferError
from . import audit, bench, pack, rollout, run, service, train
from .options import AsJson, Seed, Target, result

EXTENSION_HELP = (
    "A Python file of yours that may be run: it registers a method, an attack and so on, or builds the network of a "
    "packed model; may be repeated."
)
EXTENSION = typer.Option(help=EXTENSION_HELP)
MANIFEST = typer.Option(help="Where to write every file's hash (default: NAME-manifest.json).")


class Commands(TyperGroup):
    """The commands. A mistake of the user prints one line and exits with 2; a bug shows a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # typer ends quietly
            raise
        except (SaferError, OSError, ImportError) as error:
            if os.environ.get("SAFER_DEBUG"):
                raise
            command = self.commands.get(ctx.invoked_subcommand or "", self)
            typer.echo(f"error: {explain(error, [*self.params, *command.params])}", err=True)
            raise typer.Exit(2) from None


def explain(error: Exception, parameters: Iterable[Any]) -> str:
    """Return an error as one line, in which an option has the name that it has on the command line."""
    if isinstance(error, OSError) and error.filename is not None:
        missing = isinstance(error, FileNotFoundError)
        return f"{error.filename} does not exist" if missing else f"{error.filename}: {error.strerror}"
    options = {parameter.name: parameter.opts[0] for parameter in parameters if isinstance(parameter, TyperOption)}
    options |= {"domain": options["target"]} if "target" in options else {}
    line = " ".join(str(error).split())
    return re.sub(r"^\w+(?= (?:is|'))", lambda word: options.get(word[0], word[0]), line)


app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, help="Test-time adaptation that survives attacked inputs."
)
data_app = typer.Typer(no_args_is_help=True, help="Inspect a dataset.")
app.add_typer(data_app, name="data")
app.add_typer(rollout.app, name="serve")
app.command("pack")(pack.pack)
app.command("train")(train.train)
app.command("attack")(run.attack)
app.command("run")(run.run)
app.command("audit")(audit.audit)
app.command("bench")(bench.bench)
app.command("send")(service.send)


def print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"safer-tta {__version__}")
        raise typer.Exit


VERSION = typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and end.")


@app.callback()
def extend(
    extension: Annotated[list[Path] | None, EXTENSION] = None, version: Annotated[bool, VERSION] = False
) -> None:
    if extension:
        from .. import extensions

        extensions.load(extension)


@app.command("demo")
def demo(
    folder: Annotated[Path, typer.Option(help="Where models, rows and the page go.")] = Path("demo"),
    target: Target = "sketch",
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Train, attack and adapt on the embedded data, and compare with and without SAFER; it takes three minutes."""
    from ..demo import TABLE_RATES, run_demo

    folder.mkdir(parents=True, exist_ok=True)
    found = run_demo(folder, target=target, seed=seed)
    if as_json:
        return result({"rows": list(found.rows.values()), "page": str(found.page)}, True)
    typer.echo(f"accuracy on {target}, %".ljust(28) + "".join(f"{rate:>4} % attacked" for rate in TABLE_RATES))
    for name, values in found.table():
        typer.echo(name.ljust(28) + "".join(f"{value:15.1f}" for value in values))
    typer.echo(f"the attacker's own model: {found.surrogate[0]:.1f} % clean, {found.surrogate[1]:.1f} % attacked")
    return typer.echo(f"rows: {folder / 'results.jsonl'}   page: {found.page}")


@app.command("doctor")
def doctor(as_json: AsJson = False) -> None:
    """Check this machine for known problems: versions, devices, extras."""
    from ..doctor import describe, examine

    findings = []
    for finding in examine():
        findings.append(finding)
        if not as_json:
            typer.echo(describe(finding))
    if as_json:
        result({finding.what: dataclasses.asdict(finding) for finding in findings}, True)
    if any(finding.state == "bad" for finding in findings):
        raise typer.Exit(1)


@app.command("attacks")
def list_attacks(as_json: AsJson = False) -> None:
    """List the attacks: what each goes through, how many steps it takes, and its options with their defaults."""
    from ..attacks import ATTACKS, describe

    rows = {name: describe(name) for name in sorted(ATTACKS)}
    if as_json:
        return result(rows, True)
    for name, row in rows.items():
        options = " ".join(o if value is None else f"{o}={value}" for o, value in row["options"].items())
        steps = f"{row['steps']} steps" if row["steps"] else "its own steps"
        typer.echo(f"{name:12} through {row['through']}, {steps}{options and '; options: '}{options}")
        typer.echo(f"             {row['what']}")
    return None


@app.command("methods")
def list_methods(as_json: AsJson = False) -> None:
    """List the adaptation methods: what each updates, what it costs, how much state it keeps, and its paper."""
    from ..methods import METHODS, create, describe
    from ..models import zoo
    from ..predictors import Plain

    rows: dict[str, Any] = {}
    for name in sorted(METHODS):
        adapted = create(name, Plain(zoo.create("resnet18", num_classes=7), seed=0))
        rows[name] = {**describe(name), "state_bytes": adapted.state_bytes}
    if as_json:
        return result(rows, True)
    typer.echo("state: what a ResNet-18 with 7 classes keeps before the first batch; optimisers and memories grow")
    for name, row in rows.items():
        typer.echo(f"{name:8} updates {row['updates']:9} {row['cost']:36} state {row['state_bytes'] / 1e6:7.2f} MB")
        typer.echo(f"         {row['what']}" + (f"\n         {row['paper']}" if row["paper"] else ""))
    return None


@data_app.command("check")
def data_check(
    path: Annotated[Path, typer.Argument(help="The dataset's folder.")],
    manifest: Annotated[Path | None, MANIFEST] = None,
    as_json: AsJson = False,
) -> None:
    """Count images against the official numbers, name unreadable files, and write a manifest of all files."""
    from ..data.check import check
    from ..data.store import write_json

    with progress("checking") as tick:
        found = check(path, tick)
    place = manifest or Path(f"{found['dataset']}-manifest.json")
    write_json(place, {"content": found["content"], "files": found["files"]})
    problems = found["differences"] + found["empty"] + found["unreadable"]
    if as_json:
        result({key: value for key, value in found.items() if key != "files"}, True)
    else:
        for domain, counts in found["counts"].items():
            listed = ", ".join(f"{name} {count}" for name, count in counts.items())
            typer.echo(f"{domain:15} {sum(counts.values()):6} images: {listed}")
        for problem in problems:
            typer.echo(f"problem: {problem}")
        typer.echo(f"content {found['content']}, manifest {place}" + ("" if problems else "; no problems found"))
    if problems:
        raise typer.Exit(1)


def main() -> None:
    """Run the command; SAFER_DEBUG=1 shows where an error came from."""
    keep_freed_memory()
    with warnings.catch_warnings():  # this process may be a test's
        warnings.showwarning = show_warning
        raise SystemExit(call())


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning as one line, without the place in the code that Python adds."""
    typer.echo(f"warning: {message}", err=True)


def call() -> int:
    """Run the command and return its exit code."""
    try:
        code = app(standalone_mode=False)
    except Exception as error:  # typer's own: a wrong option, or nothing to do
        show, code = getattr(error, "show", None), getattr(error, "exit_code", None)
        if show is None or code is None:
            raise
        show()
    if code == 130:  # Ctrl-C, as typer reports it
        typer.echo("stopped; the same command resumes from here", err=True)
    return int(code or 0)
