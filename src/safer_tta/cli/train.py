"""The command `safer train`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import (
    Architecture,
    AsJson,
    BatchSize,
    Budget,
    Data,
    Device,
    LearningRate,
    Out,
    Seed,
    Side,
    Steps,
    Weights,
    drop_missing,
    open_data,
    parse_fraction,
    progress,
    result,
)

KINDS = ("source", "robust", "surrogate", "backbone")


def train(
    what: Annotated[
        str,
        typer.Argument(
            help="source: a model of all domains but the target; robust: the same, trained on attacked images; "
            "surrogate: the attacker's model, trained on 80 % of the target; backbone: the small network that ships "
            "with the package."
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
    attack_steps: Annotated[
        int | None, typer.Option(min=1, help="PGD steps inside every training step of `robust` (default: 20).")
    ] = None,
    seed: Seed = 0,
    side: Side = 224,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Train a source model, a robust one, or the attacker's surrogate. A killed training resumes."""
    if what not in KINDS:
        raise typer.BadParameter(f"{what!r} cannot be trained; expected one of {', '.join(KINDS)}")
    if what != "robust" and (eps is not None or attack_steps is not None):
        raise typer.BadParameter(f"--eps and --attack-steps apply only to `safer train robust`, not to {what}")
    if what == "backbone":
        return _train_backbone(out, device, drop_missing(steps=steps, batch=batch, lr=lr, seed=seed))
    if target is None:
        raise typer.BadParameter(f"`safer train {what}` needs --target, the domain to adapt to")
    changes = drop_missing(architecture=architecture, weights=weights, steps=steps, batch=batch, lr=lr, seed=seed)
    attack = drop_missing(eps=None if eps is None else parse_fraction(eps), steps=attack_steps)
    recipe = _recipe(what, data, changes, attack)  # first, since images take long to decode
    dataset = open_data(data, side, target, others=what != "surrogate")
    _train(what, dataset, target, recipe, out, device)
    return _print_model(out, as_json)


def _recipe(what: str, data: str, changes: dict[str, Any], attack: dict[str, Any]) -> Any:
    from .. import training

    if what == "surrogate":
        return training.surrogate_recipe(data, **changes)
    recipe = training.source_recipe(data, **changes)
    return training.robust(recipe, **attack) if what == "robust" else recipe


def _train(what: str, dataset: Any, target: str, recipe: Any, out: Path, device: str) -> None:
    from .. import training

    with progress(f"{what} model") as tick:
        if what == "surrogate":
            training.train_surrogate(dataset.domain(target), recipe, out, device=device, tick=tick)
        else:
            training.train_source(dataset, target, recipe, out, device=device, tick=tick)


def _train_backbone(out: Path, device: str, changes: dict[str, Any]) -> None:
    from ..training.backbone import RECIPE, make_backbone

    with progress("backbone") as tick:
        make_backbone(out, dataclasses.replace(RECIPE, **changes), device=device, tick=tick)
    typer.echo(f"wrote {out}")


def _print_model(path: Path, as_json: bool) -> None:
    from ..training.trainer import recipe_of

    result({"model": str(path), "validation_accuracy": 100 * recipe_of(path)["accuracy"]}, as_json)
