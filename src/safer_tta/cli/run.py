"""The commands `safer attack` and `safer run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .._internal.checks import one_of
from .._internal.defaults import METHOD, PREDICTOR
from .options import (
    AsJson,
    AttackName,
    AttackNorm,
    AttackSteps,
    Budget,
    Data,
    Device,
    Images,
    MethodName,
    ModelSide,
    NormName,
    Precision,
    PredictorName,
    Seed,
    StepSize,
    Store,
    Target,
    drop_missing,
    open_data,
    parse_fraction,
    progress,
    result,
)

NORMS = ("linf", "l2")  # of an attack
SHOWN = ["accuracy", "accuracy_attacked", "accuracy_clean", "nll", "ece", "ms_per_step", "run"]
Surrogate = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="The attacker's model, from `safer train surrogate`."),
]


def attack(
    target: Target,
    surrogate: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, help="The attacker's model, from `safer train surrogate`.")
    ],
    store: Store,
    data: Data = "synthetic",
    attack: AttackName = "pgd",
    eps: Budget = None,
    step: StepSize = None,
    attack_steps: AttackSteps = None,
    attack_norm: AttackNorm = "linf",
    images: Images = None,
    seed: Seed = 0,
    side: ModelSide = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Attack every image of a domain on the surrogate. The copies are kept, and all runs share them."""
    from ..training.trainer import accuracy, side_for

    threat = _threat(attack, eps, step, attack_steps, attack_norm)
    domain = _domain(data, side_for(surrogate, side), target, images, seed)[1]
    model, attacked = _attacked(domain, surrogate, store, attack, threat, seed, device)
    figures = {
        "images": len(domain),
        "surrogate_clean": accuracy(model, domain.images, domain.labels),
        "surrogate_attacked": accuracy(model, attacked, domain.labels),
    }
    result(figures, as_json)


def run(
    target: Target,
    model: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, help="The source model, from `safer train source`.")
    ],
    store: Store,
    data: Data = "synthetic",
    method: MethodName = METHOD,
    predictor: PredictorName = PREDICTOR,
    norm: NormName = None,
    attack_rate: Annotated[float, typer.Option(help="Percent of every batch that is attacked.")] = 0.0,
    surrogate: Surrogate = None,
    attack: AttackName = "pgd",
    eps: Budget = None,
    step: StepSize = None,
    attack_steps: AttackSteps = None,
    attack_norm: AttackNorm = "linf",
    order: Annotated[str, typer.Option(help="shuffled, or correlated (one class after the other).")] = "shuffled",
    batch: Annotated[int, typer.Option(help="Images in a batch.")] = 64,
    images: Images = None,
    seed: Seed = 0,
    side: ModelSide = None,
    precision: Precision = "float32",
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Run one method on one stream. A run that a store holds is looked up, also if `safer bench` made it."""
    from ..api import check_names
    from ..bench.experiment import Experiment
    from ..bench.run import Materials, perform
    from ..data import StreamSpec
    from ..training.definitions import definition_of
    from ..training.trainer import side_for

    stream = StreamSpec(order=order, attack_rate=attack_rate, batch=batch, seed=seed)
    check_names(method, predictor, norm)
    threat = _threat(attack, eps, step, attack_steps, attack_norm)
    attacked_by = _attack_on(attack, threat, surrogate) if attack_rate > 0 else None
    dataset, domain = _domain(data, side_for(model, side), target, images, seed)
    experiment = Experiment(
        data=dataset.identity, target=target, source=definition_of(model), method=method, predictor=predictor,
        norm=norm, stream=stream, attack=attacked_by, images=images, precision=precision,
    )  # fmt: skip
    attacked = None
    if surrogate is not None and attacked_by is not None and attacked_by.surrogates:
        attacked = (_attacked(domain, surrogate, store, attack, threat, seed, device, precision)[1],)
    with progress(f"{method} on {predictor}") as tick:
        row = perform(experiment, Materials((domain,), model, attacked, device), store / "runs", tick=tick)
    result(row, as_json, SHOWN)


def _domain(data: str, side: int, target: str, images: int | None, seed: int) -> tuple[Any, Any]:
    """Return the dataset and its target, or an excerpt of that."""
    from ..data import excerpt

    dataset = open_data(data, side, target, others=False)
    domain = dataset.domain(target)
    return dataset, domain if images is None else excerpt(domain, images, seed)


def _attack_on(attack: str, threat: dict[str, Any], surrogate: Path | None) -> Any:
    """Return the attack of a run; any but a live one needs the attacker's model."""
    from ..attacks import ATTACKS
    from ..bench.experiment import AttackOn
    from ..training.definitions import definition_of

    if ATTACKS[attack].live:
        return AttackOn(name=attack, threat=threat)
    if surrogate is None:
        raise typer.BadParameter("an attack rate above 0 needs --surrogate, the attacker's model")
    return AttackOn(name=attack, threat=threat, surrogates=(definition_of(surrogate),))


def _attacked(
    domain: Any,
    surrogate: Path,
    store: Path,
    attack: str,
    threat: dict[str, Any],
    seed: int,
    device: str,
    precision: str = "float32",
) -> tuple[Any, Any]:
    """Return the attacker's model, and the attacked copies of a domain."""
    from ..data import ArrayStore
    from ..data.store import digest_file
    from ..training import attacked_copies, load
    from ..training.trainer import check_classes

    check_classes(surrogate, domain)
    model = load(surrogate).to(device)
    model.accelerate(precision=precision)
    options: dict[str, Any] = {
        "source": digest_file(surrogate), "attack": attack, "threat": threat, "seed": seed,
    }  # fmt: skip
    with progress("attacked images") as tick:
        return model, attacked_copies(domain, model, ArrayStore(store / "attacked"), **options, tick=tick)


def _threat(attack: str, eps: str | None, step: str | None, steps: int | None, norm: str) -> dict[str, Any]:
    """Return what the attack is told."""
    from ..attacks import ATTACKS, full_threat

    one_of(NORMS, attack_norm=norm)
    if ATTACKS.find(attack).own_steps and (step or steps):
        raise typer.BadParameter(f"{attack} chooses its steps itself; leave --step and --attack-steps out")
    fractions = {name: parse_fraction(text) for name, text in (("eps", eps), ("step", step)) if text is not None}
    return full_threat(attack, **fractions, norm=norm, **drop_missing(steps=steps))
