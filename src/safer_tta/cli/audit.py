"""The command `safer audit`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from .._internal.defaults import METHOD, PREDICTOR
from .._internal.resizing import Resize
from . import options
from .options import open_data

MODEL = typer.Option(exists=True, dir_okay=False, help="The model: a file of `safer pack` or `safer train`.")
DATA_HELP = "A folder class/image; or 'synthetic' or a folder root/domain/class/image, with --target."
TARGET = typer.Option(help="The domain of the data to audit on.")
SURROGATE = typer.Option(
    exists=True, dir_okay=False, help="The attacker's own model (default: the model before it adapts)."
)
COMPARE = typer.Option(help="Another predictor to measure in the same way; may be repeated.")
THREAT = typer.Option(help="Only this threat; may be repeated.")
FULL = typer.Option("--full/--quick", help="More images, steps and queries; --quick is a first look.")
MINUTES = typer.Option(help="No threat is begun that would exceed this time.")
REQUIRE = typer.Option(help="Accuracies that threats must leave, such as 'dia>=90,transfer>=80'; else it exits with 1.")
OUT = typer.Option(help="The folder of the report, and of rows that a later call continues.")


def audit(
    model: Annotated[Path, MODEL],
    data: Annotated[str, typer.Option(callback=options.check_data, help=DATA_HELP)],
    target: Annotated[str | None, TARGET] = None,
    method: options.MethodName = METHOD,
    predictor: options.PredictorName = PREDICTOR,
    norm: options.NormName = None,
    option: options.MethodOptions = None,
    predictor_option: options.PredictorOptions = None,
    compare: Annotated[list[str] | None, COMPARE] = None,
    surrogate: Annotated[Path | None, SURROGATE] = None,
    threat: Annotated[list[str] | None, THREAT] = None,
    full: Annotated[bool, FULL] = False,
    minutes: Annotated[float | None, MINUTES] = None,
    require: Annotated[str | None, REQUIRE] = None,
    out: Annotated[Path, OUT] = Path("audit"),
    batch: Annotated[int, typer.Option(help="Images in a batch.")] = 64,
    seed: options.Seed = 0,
    side: options.ModelSide = None,
    device: options.Device = "cpu",
    precision: options.Precision = "float32",
    as_json: options.AsJson = False,
) -> None:
    """Measure how much a model with a defence withstands, threat by threat. The same command continues it."""
    from .._internal.checks import positive
    from .._internal.files import atomic_write
    from ..api import check_names
    from ..auditing import audit as measure
    from ..auditing.requirements import parse
    from ..models import load_classifier

    required = [] if require is None else parse(require)
    check_names(method, predictor, norm)
    if minutes is not None:
        positive(minutes=minutes)
    domain = _domain(model, data, target, side)
    out.mkdir(parents=True, exist_ok=True)
    report = measure(
        load_classifier(model).to(device), domain, method=method,
        predictor={"name": predictor, **options.parse_settings(predictor_option)}, norm=norm, compare=compare or (),
        threats=threat, surrogate=None if surrogate is None else _attackers(surrogate, domain, device),
        effort="full" if full else "quick", batch=batch, seed=seed, seconds=None if minutes is None else 60 * minutes,
        folder=out, progress=True, precision=precision, **options.parse_settings(option),
    )  # fmt: skip
    page = report.html(out / "report.html")
    for name, text in (("report.md", report.markdown()), ("report.json", report.to_json())):
        with atomic_write(out / name) as file:
            file.write(text.encode())
    failed = report.failed(required)
    typer.echo(report.to_json() if as_json else "\n".join([report.table(), *report.advice, f"page: {page}"]))
    for problem in failed:
        typer.echo(f"required: {problem}", err=True)
    if failed:
        raise typer.Exit(1)


def _domain(model: Path, data: str, target: str | None, side: int | None) -> Any:
    """Return the images, as the model takes them; without a target, the folder has classes and no domains."""
    from ..models.card import read_card
    from ..training.trainer import check_classes, warn_if_seen

    if target is None and data == "synthetic":
        raise typer.BadParameter("the synthetic data have four domains; name one with --target, such as sketch")
    card = read_card(model)
    resize, flat = Resize.parse(card.resize), target is None
    name = target or Path(data).resolve().name
    domain = open_data(data, side or card.side, name, others=False, resize=resize, flat=flat).domain(name)
    domain = _as_known(domain, card.classes)
    check_classes(model, domain)
    warn_if_seen(model, [domain])
    return domain


def _as_known(domain: Any, classes: tuple[str, ...]) -> Any:
    """Number the classes of images as the model does, if it knows all of them; folders are in the order of names."""
    import numpy as np

    from ..data.store import digest

    if domain.classes == tuple(classes) or not set(domain.classes) <= set(classes):
        return domain
    numbers = np.array([classes.index(name) for name in domain.classes])
    content = digest({"of": domain.content, "classes": list(classes)})
    return dataclasses.replace(domain, labels=numbers[domain.labels], classes=tuple(classes), content=content)


def _attackers(surrogate: Path, domain: Any, device: str) -> Any:
    from ..models import load_classifier
    from ..training.trainer import check_classes

    check_classes(surrogate, domain)
    return load_classifier(surrogate).to(device)
