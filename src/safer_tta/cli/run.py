"""The commands `safer attack` and `safer run`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .._internal.checks import one_of
from .._internal.defaults import METHOD, PREDICTOR
from .._internal.progress import progress
from .._internal.resizing import Resize
from . import options
from .options import drop_missing, open_data, result

NORMS = ("linf", "l2")  # of an attack
SHOWN = ["accuracy", "accuracy_attacked", "accuracy_clean", "nll", "ece", "ms_per_step", "run"]
MODEL = typer.Option(exists=True, help="The source model, from `safer train source` or `safer pack`.")
SURROGATE = typer.Option(exists=True, help="The attacker's model, from `safer train surrogate` or `safer pack`.")


def attack(
    target: options.Target,
    surrogate: Annotated[Path, SURROGATE],
    store: options.Store,
    data: options.Data = "synthetic",
    attack: options.AttackName = "pgd",
    eps: options.Budget = None,
    step: options.StepSize = None,
    attack_steps: options.AttackSteps = None,
    attack_norm: options.AttackNorm = None,
    attack_option: options.AttackOptions = None,
    images: options.Images = None,
    seed: options.Seed = 0,
    side: options.ModelSide = None,
    device: options.Device = "cpu",
    as_json: options.AsJson = False,
) -> None:
    """Attack every image of a domain on the surrogate. The copies are kept, and all runs share them."""
    from ..training.trainer import accuracy

    threat = _threat(attack, eps, step, attack_steps, attack_norm, attack_option)
    domain = _domain(data, surrogate, side, target, images, seed)[1]
    model, attacked = _attacked(domain, surrogate, store, device=device, attack=attack, threat=threat, seed=seed)
    clean, under_attack = (accuracy(model, pictures, domain.labels) for pictures in (domain.images, attacked))
    result({"images": len(domain), "surrogate_clean": clean, "surrogate_attacked": under_attack}, as_json)


def run(
    target: options.Target,
    model: Annotated[Path, MODEL],
    store: options.Store,
    data: options.Data = "synthetic",
    method: options.MethodName = METHOD,
    predictor: options.PredictorName = PREDICTOR,
    norm: options.NormName = None,
    option: options.MethodOptions = None,
    predictor_option: options.PredictorOptions = None,
    attack_option: options.AttackOptions = None,
    attack_rate: Annotated[float, typer.Option(help="Percent of every batch that is attacked.")] = 0.0,
    surrogate: Annotated[Path | None, SURROGATE] = None,
    attack: options.AttackName = "pgd",
    eps: options.Budget = None,
    step: options.StepSize = None,
    attack_steps: options.AttackSteps = None,
    attack_norm: options.AttackNorm = None,
    order: Annotated[str, typer.Option(help="shuffled, or correlated (one class after the other).")] = "shuffled",
    batch: Annotated[int, typer.Option(help="Images in a batch.")] = 64,
    images: options.Images = None,
    seed: options.Seed = 0,
    side: options.ModelSide = None,
    precision: options.Precision = "float32",
    device: options.Device = "cpu",
    as_json: options.AsJson = False,
) -> None:
    """Run one method on one stream. A run that a store holds is looked up, also if `safer bench` made it."""
    from ..api import check_names
    from ..bench.experiment import Experiment
    from ..bench.run import Materials, perform
    from ..data import StreamSpec
    from ..training.definitions import definition_of

    stream = StreamSpec(order=order, attack_rate=attack_rate, batch=batch, seed=seed)
    check_names(method, predictor, norm)
    threat = _threat(attack, eps, step, attack_steps, attack_norm, attack_option)
    attacked_by = _attack_on(attack, threat, surrogate) if attack_rate > 0 else None
    dataset, domain = _domain(data, model, side, target, images, seed)
    experiment = Experiment(
        data=dataset.identity, target=target, source=definition_of(model), method=method, predictor=predictor,
        norm=norm, options=options.parse_settings(option),
        predictor_options=options.parse_settings(predictor_option), stream=stream,
        attack=attacked_by, images=images, precision=precision,
    )  # fmt: skip
    attacked = None
    if surrogate is not None and attacked_by is not None and attacked_by.surrogates:
        how = {"attack": attack, "threat": threat, "seed": seed}
        attacked = (_attacked(domain, surrogate, store, device=device, precision=precision, **how)[1],)
    with progress(f"{method} on {predictor}") as tick:
        row = perform(experiment, Materials((domain,), model, attacked, device), store / "runs", tick=tick)
    result(row, as_json, SHOWN)


def _domain(data: str, model: Path, side: int | None, target: str, images: int | None, seed: int) -> tuple[Any, Any]:
    """Return the dataset, its images as the model takes them, and its target or an excerpt of that."""
    from ..data import excerpt
    from ..models.card import read_card

    card = read_card(model)
    dataset = open_data(data, side or card.side, target, others=False, resize=Resize.parse(card.resize))
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
    domain: Any, surrogate: Path, store: Path, *, device: str, precision: str = "float32", **how: Any
) -> tuple[Any, Any]:
    """Return the attacker's model, and the attacked copies of a domain. how: attack, threat and seed."""
    from ..data import ArrayStore
    from ..data.store import digest_file
    from ..models import load_classifier
    from ..training import attacked_copies
    from ..training.trainer import check_classes

    check_classes(surrogate, domain)
    model = load_classifier(surrogate).to(device)
    model.accelerate(precision=precision)
    copies = ArrayStore(store / "attacked")
    with progress("attacked images") as tick:
        return model, attacked_copies(domain, model, copies, source=digest_file(surrogate), tick=tick, **how)


def _threat(
    attack: str, eps: float | None, step: float | None, steps: int | None, norm: str | None, settings: list[str] | None
) -> dict[str, Any]:
    from .._internal.signatures import check_names
    from ..attacks import ATTACKS, full_threat

    one_of(NORMS, **drop_missing(attack_norm=norm))
    known, own = ATTACKS.find(attack), options.parse_settings(settings)
    if known.own_steps and (step is not None or (steps and "steps" not in known.options)):
        raise typer.BadParameter(f"{attack} chooses its steps itself; leave --step and --attack-steps out")
    check_names(own, known.options, f"attack {attack!r}")
    return full_threat(attack, **{**own, **drop_missing(norm=norm, eps=eps, step=step, steps=steps)})
