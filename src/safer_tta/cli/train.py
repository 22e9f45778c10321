"""The command `safer train`."""

from typing import Annotated, Any

import typer

from .._internal.progress import progress
from . import options
from .options import drop_missing, open_data, result

KINDS = ("source", "robust", "surrogate")
WHAT = (
    "source: a model of all domains but the target; robust: the same, trained on attacked images; surrogate: the "
    "attacker's model, trained on 80 % of the target."
)


def train(
    what: Annotated[str, typer.Argument(help=WHAT)],
    out: options.Out,
    target: Annotated[str, typer.Option(help="The domain to adapt to.")],
    data: options.Data = "synthetic",
    architecture: options.Architecture = None,
    weights: options.Weights = None,
    steps: options.Steps = None,
    batch: options.BatchSize = None,
    lr: options.LearningRate = None,
    eps: options.Budget = None,
    attack_steps: Annotated[
        int | None, typer.Option(min=1, help="PGD steps inside every training step of `robust` (default: 20).")
    ] = None,
    seed: options.Seed = 0,
    side: options.Side = 224,
    device: options.Device = "cpu",
    as_json: options.AsJson = False,
) -> None:
    """Train a source model, a robust one, or the attacker's surrogate. A killed training resumes."""
    if what not in KINDS:
        raise typer.BadParameter(f"{what!r} cannot be trained; expected one of {', '.join(KINDS)}")
    if what != "robust" and (eps is not None or attack_steps is not None):
        raise typer.BadParameter(f"--eps and --attack-steps apply only to `safer train robust`, not to {what}")
    from .. import training

    changes = drop_missing(architecture=architecture, weights=weights, steps=steps, batch=batch, lr=lr, seed=seed)
    attack = drop_missing(eps=eps, steps=attack_steps)
    recipe = _recipe(what, data, changes, attack)  # first, since images take long to decode
    dataset = open_data(data, side, target, others=what != "surrogate")
    with progress(f"{what} model") as tick:
        if what == "surrogate":
            training.train_surrogate(dataset.domain(target), recipe, out, device=device, tick=tick)
        else:
            training.train_source(dataset, target, recipe, out, device=device, tick=tick)
    accuracy = 100 * training.trainer.recipe_of(out)["accuracy"]
    result({"model": str(out), "validation_accuracy": accuracy}, as_json)


def _recipe(what: str, data: str, changes: dict[str, Any], attack: dict[str, Any]) -> Any:
    from .. import training

    if what == "surrogate":
        return training.surrogate_recipe(data, **changes)
    recipe = training.source_recipe(data, **changes)
    return training.robust(recipe, **attack) if what == "robust" else recipe
