"""The command `safer`: parses, calls, prints. Everything it does can be called from Python."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
except ImportError:
    sys.exit("the command needs typer and rich: pip install 'safer-tta[bench]'")

from ..allocator import keep_freed_memory
from . import bench, service
from .options import (
    Architecture,
    AsJson,
    AttackName,
    AttackSteps,
    BatchSize,
    Budget,
    Data,
    Device,
    LearningRate,
    ModelSide,
    Norm,
    Out,
    Seed,
    Side,
    Steps,
    StepSize,
    Store,
    Target,
    Weights,
    result,
)

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Test-time adaptation that survives attacked inputs."
)
data_app = typer.Typer(no_args_is_help=True, help="Look at a dataset.")
app.add_typer(data_app, name="data")


@app.callback()
def extend(
    extension: Annotated[
        list[Path] | None,
        typer.Option(help="A Python file of yours that registers a method, an attack …; may be given again."),
    ] = None,
) -> None:
    if extension:
        from .. import extensions

        extensions.load(extension)


@app.command("train")
def train(
    what: Annotated[
        str,
        typer.Argument(
            help="source: on every domain but the target (ERM); robust: the same on attacked images; surrogate: the "
            "attacker's model, on 80 % of the target; backbone: the small network that ships with the package."
        ),
    ],
    out: Out,
    target: Annotated[str | None, typer.Option(help="The domain to adapt to.")] = None,
    data: Data = "synthetic",
    architecture: Architecture = None,
    weights: Weights = None,
    steps: Steps = None,
    batch: BatchSize = None,
    lr: LearningRate = None,
    eps: Budget = None,
    attack_steps: Annotated[int, typer.Option(help="PGD steps inside every training step of `robust`.")] = 20,
    seed: Seed = 0,
    side: Side = 224,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Train a source model, a robust one, or the attacker's surrogate; a killed training goes on from its last look."""
    from .. import training

    if what not in ("source", "robust", "surrogate", "backbone"):
        raise typer.BadParameter(f"{what!r} is nothing to train; expected source, robust, surrogate or backbone")
    if what != "robust" and eps is not None:
        raise typer.BadParameter(f"--eps is of `safer train robust`; {what} trains on images as they are")
    if what == "backbone":
        return _train_backbone(out, device, _given(steps=steps, batch=batch, lr=lr, seed=seed))
    if target is None:
        raise typer.BadParameter(f"`safer train {what}` needs --target, the domain to adapt to")
    dataset = _dataset(data, side, target, others=what != "surrogate")
    changes = _given(architecture=architecture, weights=weights, steps=steps, batch=batch, lr=lr, seed=seed)
    with _progress(f"{what} model") as tick:
        if what == "surrogate":
            recipe = training.surrogate_recipe(dataset.name, **changes)
            training.train_surrogate(dataset.domain(target), recipe, out, device=device, report=tick)
        else:
            recipe = training.source_recipe(dataset.name, **changes)
            if what == "robust":
                recipe = training.robust(recipe, eps=_fraction(eps or "8/255"), steps=attack_steps)
            training.train_source(dataset, target, recipe, out, device=device, report=tick)
    return _print_model(out, as_json)


def _train_backbone(out: Path, device: str, changes: dict[str, Any]) -> None:
    import dataclasses

    from ..training.backbone import RECIPE, make_backbone

    with _progress("backbone") as tick:
        make_backbone(out, dataclasses.replace(RECIPE, **changes), device=device, report=tick)
    typer.echo(f"wrote {out}")


@app.command("attack")
def attack(
    target: Target,
    surrogate: Annotated[Path, typer.Option(help="The attacker's model, from `safer train surrogate`.")],
    store: Store,
    data: Data = "synthetic",
    name: AttackName = "pgd",
    eps: Budget = None,
    step: StepSize = None,
    steps: AttackSteps = None,
    norm: Norm = "linf",
    seed: Seed = 0,
    side: ModelSide = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Make the attacked copy of every image of a domain on the surrogate; kept, and shared by all runs."""
    from ..training.trainer import side_for

    threat = _threat(name, eps, step, steps, norm)
    domain = _dataset(data, side_for(surrogate, side), target, others=False).domain(target)
    model, attacked = _attacked(domain, surrogate, store, name, threat, seed, device)
    result(
        {
            "images": len(domain),
            "surrogate_clean": _accuracy(model, domain.images, domain.labels),
            "surrogate_attacked": _accuracy(model, attacked, domain.labels),
        },
        as_json,
    )


@app.command("run")
def run(
    target: Target,
    model: Annotated[Path, typer.Option(help="The source model, from `safer train source`.")],
    store: Store,
    data: Data = "synthetic",
    method: Annotated[str, typer.Option(help="none, bn, tent, pl … (`safer methods`).")] = "tent",
    predictor: Annotated[str, typer.Option(help="plain, jpeg, fft, blur, safer, safer-a or safer-gate.")] = "safer",
    attack_rate: Annotated[float, typer.Option(help="Percent of every batch that is attacked.")] = 0.0,
    surrogate: Annotated[
        Path | None, typer.Option(help="The attacker's model; needed when anything is attacked.")
    ] = None,
    attack: AttackName = "pgd",
    eps: Budget = None,
    step: StepSize = None,
    steps: AttackSteps = None,
    norm: Norm = "linf",
    order: Annotated[str, typer.Option(help="shuffled or correlated.")] = "shuffled",
    batch: Annotated[int, typer.Option(help="Images in a batch.")] = 64,
    limit: Annotated[int | None, typer.Option(help="Only so many images of the stream.")] = None,
    seed: Seed = 0,
    side: ModelSide = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Run one method on one stream; a run that was made before is looked up, one that was killed goes on."""
    from ..api import check_names
    from ..bench.run import Run, Setting, perform
    from ..data import StreamSpec
    from ..training.trainer import side_for

    spec = StreamSpec(order=order, attack_rate=attack_rate, batch=batch, limit=limit, seed=seed)
    wanted = Run(method=method, predictor=predictor, stream=spec)
    check_names(method, predictor)
    threat = _threat(attack, eps, step, steps, norm)
    if attack_rate > 0 and surrogate is None:
        raise typer.BadParameter("an attack rate above 0 needs --surrogate, the attacker's model")
    domain = _dataset(data, side_for(model, side), target, others=False).domain(target)
    attacked = None
    if attack_rate > 0 and surrogate is not None:
        attacked = (_attacked(domain, surrogate, store, attack, threat, seed, device)[1],)
    setting = Setting((domain,), attacked, threat, model, device, attack)
    with _progress(f"{method} on {predictor}") as tick:
        row = perform(wanted, setting, store / "runs", tick=tick)
    result(row, as_json, ["accuracy", "accuracy_attacked", "accuracy_clean", "nll", "ece", "ms_per_step", "run"])


@app.command("demo")
def demo(
    folder: Annotated[Path, typer.Option(help="Where models, rows and the page go.")] = Path("demo"),
    target: Target = "sketch",
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Train, attack, adapt and show: what the project is for, in three minutes on the embedded data."""
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
    """Look at this machine: versions, devices, extras, known traps and what to do about them."""
    import dataclasses

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


@app.command("methods")
def list_methods(as_json: AsJson = False) -> None:
    """List the adaptation methods: what each updates, what it costs, how much state it keeps, whose it is."""
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
    manifest: Annotated[
        Path | None, typer.Option(help="Where to write every file's hash (default: NAME-manifest.json).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Count images against the official numbers, name unreadable files, write a manifest to compare copies with."""
    from ..data.domains import check
    from ..data.store import write_json

    with _progress("checking") as tick:
        found = check(path, tick)
    place = manifest or Path(f"{found['dataset']}-manifest.json")
    write_json(place, {"content": found["content"], "files": found["files"]})
    problems = found["differences"] + found["unreadable"]
    if as_json:
        result({key: value for key, value in found.items() if key != "files"}, True)
    else:
        for domain, counts in found["counts"].items():
            typer.echo(
                f"{domain:15} {sum(counts.values()):6} images: " + ", ".join(f"{k} {n}" for k, n in counts.items())
            )
        for problem in problems:
            typer.echo(f"problem: {problem}")
        typer.echo(
            f"content {found['content']}, manifest {place}" + ("" if problems else "; nothing to complain about")
        )
    if problems:
        raise typer.Exit(1)


# --- what the commands share ----------------------------------------------------------------------------------------


def _dataset(data: str, side: int, target: str, *, others: bool) -> Any:
    """The dataset with its target decoded, and the other domains where they are needed too."""
    from ..data import open_dataset

    with _progress("decoding images") as tick:
        dataset = open_dataset(data, side=side, progress=tick)
        dataset.domain(target)
        for name in dataset.domains if others else ():
            dataset.domain(name)
        return dataset


def _attacked(
    domain: Any, surrogate: Path, store: Path, attack: str, threat: dict[str, Any], seed: int, device: str
) -> Any:
    from ..data import ArrayStore
    from ..data.store import digest_file
    from ..training import attacked_copies, load
    from ..training.trainer import check_classes

    check_classes(surrogate, domain)
    model = load(surrogate).to(device)
    with _progress("attacked images") as tick:
        arrays = ArrayStore(store / "attacked")
        return model, attacked_copies(
            domain, model, arrays, source=digest_file(surrogate), attack=attack, threat=threat, seed=seed, progress=tick
        )


def _accuracy(model: Any, images: Any, labels: Any) -> float:
    from ..training.trainer import accuracy

    return accuracy(model, images, labels)


def _progress(label: str) -> Any:
    from ..progress import progress

    return progress(label)


def _fraction(text: str) -> float:
    """8/255 or 0.03."""
    above, _, below = text.partition("/")
    try:
        return float(above) / float(below or 1)
    except (ValueError, ZeroDivisionError):
        raise typer.BadParameter(f"{text!r} is not a number; expected a fraction such as 8/255") from None


def _threat(attack: str, eps: str | None, step: str | None, steps: int | None, norm: str) -> dict[str, Any]:
    from ..attacks import ATTACKS
    from ..training import full_threat

    if attack not in ATTACKS:
        raise typer.BadParameter(f"attack {attack!r} is unknown; expected one of {', '.join(sorted(ATTACKS))}")
    if ATTACKS[attack].own_steps and (step or steps):
        raise typer.BadParameter(f"{attack} chooses its steps itself; leave --step and --steps out")
    fractions = {name: _fraction(text) for name, text in (("eps", eps), ("step", step)) if text is not None}
    return full_threat(**fractions, norm=norm, **_given(steps=steps))


def _given(**values: Any) -> dict[str, Any]:
    """The options that were given; weights 'none' says so rather than nothing."""
    given = {name: value for name, value in values.items() if value is not None}
    return {name: None if (name, value) == ("weights", "none") else value for name, value in given.items()}


app.command("bench")(bench.bench)
app.command("serve")(service.serve)
app.command("send")(service.send)


def _print_model(path: Path, as_json: bool) -> None:
    from ..training.trainer import recipe_of

    described = recipe_of(path)
    result({"model": str(path), "validation_accuracy": 100 * described["accuracy"]}, as_json)


def main() -> None:
    """Run the command. A mistake is one line and a non-zero exit; SAFER_DEBUG=1 shows where it came from."""
    keep_freed_memory()
    if os.environ.get("SAFER_DEBUG"):
        app()
    try:
        code = app(standalone_mode=False)
    except (ValueError, TypeError, OSError, ImportError, RuntimeError, AssertionError) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise SystemExit(2) from None
    except Exception as error:  # typer's own: a wrong option, or nothing to do
        show, code = getattr(error, "show", None), getattr(error, "exit_code", None)
        if show is None or code is None:
            raise
        show()
    if code == 130:  # Ctrl-C, as typer reports it
        typer.echo("stopped; the same command goes on from here", err=True)
    raise SystemExit(code or 0)
