"""The command `safer bench`."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from . import options
from .options import result

QUICK = typer.Option("--quick", help="Tiny models and streams, one target and one seed, to see everything work.")
ROBUST_STEPS = typer.Option(min=1, help="Training steps of Robust ERM, each of which costs four (default: --steps).")
PRECISION = typer.Option(help="Precision of attacks and runs: float32 or bfloat16. A GPU always trains in bfloat16.")
WORKERS = typer.Option(min=1, help="Tasks at once (default: one for each core or GPU).")
THREADS = typer.Option(min=1, help="Threads of each worker (default: the cores they share; ray: 1).")
SINK = typer.Option(help="Also send rows to tensorboard, or to a sink that an extension registers.")
TASKS = typer.Option(help="Only write the tasks to this file, for `safer bench tasks` on another machine.")


def bench(
    what: Annotated[str, typer.Argument(help="A plan's name or TOML file; or `list`, `status PLAN`, `tasks FILE`.")],
    of: Annotated[str | None, typer.Argument(help="The plan of `status`, or the file of `tasks`.")] = None,
    data: options.Data = "synthetic",
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds; results are means over them.")] = 3,
    target: Annotated[list[str] | None, typer.Option(help="Only this domain; may be repeated.")] = None,
    quick: Annotated[bool, QUICK] = False,
    images: options.Images = None,
    architecture: options.Architecture = None,
    weights: options.Weights = None,
    steps: options.Steps = None,
    robust_steps: Annotated[int | None, ROBUST_STEPS] = None,
    precision: Annotated[str, PRECISION] = "float32",
    side: options.Side = 224,
    store: options.Store = Path("bench"),
    device: options.Device = "cpu",
    compile: Annotated[bool, typer.Option("--compile", help="Compile the trainings, on a GPU.")] = False,
    executor: Annotated[str, typer.Option(help="local: processes of this machine; ray: a cluster.")] = "local",
    workers: Annotated[int | None, WORKERS] = None,
    threads: Annotated[int | None, THREADS] = None,
    address: Annotated[str | None, typer.Option(help="The address of a running Ray cluster.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the runs and estimate their time.")] = False,
    tasks: Annotated[Path | None, TASKS] = None,
    sink: Annotated[list[str] | None, SINK] = None,
    as_json: options.AsJson = False,
) -> None:
    """Run a study of the paper, or your own plan: rows, tables, figures and a page. The same command resumes it."""
    from .. import extensions
    from ..bench.tasks import COUNT, QUICK_COUNT, Place, read_tasks, write_tasks

    if what == "list":
        return _list_plans(as_json)
    if quick and (steps or robust_steps):
        raise typer.BadParameter("--quick sets its own sizes; leave --steps and --robust-steps out")
    _check_words(what, of, dry_run=dry_run, executor=executor, address=address)
    place = Place(
        store, data, side, QUICK_COUNT if quick else COUNT, weights=weights, device=device, compile=compile,
        extensions=extensions.loaded_paths(),
    )  # fmt: skip
    how = {"workers": workers, "threads": threads, **({"address": address} if executor == "ray" else {})}
    if what == "tasks":
        return _carry_out(read_tasks(Path(str(of))), place, executor, how, sink or [], as_json)
    from ..bench.study import prepare

    study = prepare(
        str(of) if what == "status" else what, place, seeds=seeds, targets=target or (), quick=quick, images=images,
        steps=steps, robust_steps=robust_steps, architecture=architecture, precision=precision,
        command=shlex.join(["safer", *sys.argv[1:]]),
    )  # fmt: skip
    if tasks is not None:
        write_tasks(tasks, study.tasks)
        return result({"tasks": len(study.tasks), "file": str(tasks)}, as_json)
    if dry_run or what == "status":
        return _show(study, place, dry_run, as_json)
    return _run(study, place, executor, how, sink or [], as_json)


def _check_words(what: str, of: str | None, *, dry_run: bool, executor: str, address: str | None) -> None:
    """Refuse options that would be ignored."""
    from .._internal.checks import one_of
    from ..executors import EXECUTORS

    one_of(EXECUTORS, executor=executor)
    if what in ("status", "tasks") and of is None:
        raise typer.BadParameter(f"`safer bench {what}` needs a plan or file after it")
    if what not in ("status", "tasks") and of is not None:
        raise typer.BadParameter(f"{of!r} follows {what!r}; expected one plan at a time")
    if what == "tasks" and dry_run:
        raise typer.BadParameter("`safer bench tasks` has no --dry-run; use it with the plan")
    if address is not None and executor != "ray":
        raise typer.BadParameter(f"--address needs --executor ray, and the executor is {executor}")


def _show(study: Any, place: Any, dry_run: bool, as_json: bool) -> None:
    """Show what is done and left; with `dry_run` also every task and an estimate of their time."""
    from ..bench.study import estimate, states

    shown: dict[str, Any] = {**states(study, place), "runs": len(set(study.runs)), "tasks": len(study.tasks)}
    if dry_run:
        for task in study.tasks if not as_json else ():
            typer.echo(f"{'done' if task.done(place) else 'open':5} {task.kind:10} {task.label}")
        shown["seconds_on_one_worker"] = estimate(study, place)
    result(shown, as_json)


def _run(study: Any, place: Any, executor: str, how: dict[str, Any], sinks: list[str], as_json: bool) -> None:
    from ..bench.publish import publish
    from ..bench.study import states

    try:
        failed = _execute(study.tasks, place, executor, how, sinks)
    except KeyboardInterrupt:
        publish(study, place, pictures=False)
        raise
    page, counted = publish(study, place, failed), states(study, place)
    if as_json:
        result({"page": str(page), "failed": failed, **counted}, True)
    else:
        typer.echo((page.parent / "tables.md").read_text())
        typer.echo(f"page: {page}")
    if failed or counted["damaged"]:
        raise typer.Exit(1)


def _list_plans(as_json: bool) -> None:
    from ..bench.plan import shipped

    plans = shipped()
    if as_json:
        return result({name: {"title": plan.title, "about": plan.about} for name, plan in plans.items()}, True)
    for name, plan in plans.items():
        typer.echo(f"{name:17} {plan.title}" + (f"\n{'':17} {plan.about}" if plan.about else ""))
    return None


def _carry_out(
    tasks: list[Any], place: Any, executor: str, how: dict[str, Any], sinks: list[str], as_json: bool
) -> None:
    failed = _execute(tasks, place, executor, how, sinks)
    result({"done": sum(task.done(place) for task in tasks), "tasks": len(tasks), "failed": failed}, as_json)
    if failed:
        raise typer.Exit(1)


def _execute(tasks: Any, place: Any, executor: str, how: dict[str, Any], sinks: list[str]) -> dict[str, str]:
    """Carry tasks out with live progress, and send rows to the sinks; return {label: reason} of what failed."""
    from ..bench.sinks import SINKS
    from ..executors import Event, execute
    from ..executors.progress_view import ProgressView

    targets = [SINKS.find(name)(place.store / name) for name in sinks]
    with ProgressView(tasks, place) as view:

        def report(event: Event) -> None:
            view(event)
            if event.what == "finished" and event.task.kind == "run":
                for send in targets:
                    send(event.task.label, place.results.row(event.task.name))

        return execute(executor, tasks, place, report, **how)
