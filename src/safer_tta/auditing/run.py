"""How much does a model with its defence withstand? Every threat is measured on a fresh start of it.

Rows are kept in a folder, named by all that they depend on. A second call measures only what is missing.
"""

import contextlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from .._internal import progress as progress_view
from .._internal.checks import count, one_of, positive
from .._internal.defaults import METHOD, PREDICTOR
from .._internal.progress import silent
from ..attacks import ATTACKS, full_threat
from ..attacks.attacker import why_unattackable
from ..bench.experiment import AttackOn
from ..bench.results import Results, Row
from ..data import ArrayStore, Domain, excerpt
from ..data.store import digest
from ..methods import METHODS
from ..training import attacked_copies
from .defence import Defence, fingerprint
from .images import gather
from .measure import measure
from .pictures import read_pictures, write_pictures
from .report import Report
from .threats import BY_NAME, EFFORTS, LADDER, Threat


def audit(
    model: nn.Module,
    data: Any,
    *,
    method: str = METHOD,
    predictor: str | Mapping[str, Any] = PREDICTOR,
    norm: str | None = None,
    compare: Sequence[str | Mapping[str, Any]] = (),
    threats: Sequence[str] | None = None,
    surrogate: nn.Module | None = None,
    effort: str = "quick",
    batch: int = 64,
    seed: int = 0,
    seconds: float | None = None,
    folder: str | Path | None = None,
    progress: bool = False,
    **options: Any,
) -> Report:
    """Measure how much a model with a defence withstands, threat by threat. The model is not changed.

    Images come in an order that the seed draws, and are rounded to 8 bits.

    Args:
        model: What `safer_tta.adapt` takes.
        data: Labelled images: a loader of (images, labels), of which the first are taken, so it should be shuffled; a
            dataset of pairs; or a domain of `safer_tta.data.open_dataset`.
        method: What `adapt` takes.
        predictor: What `adapt` takes: a name, or a dict with a name and options.
        norm: What `adapt` takes.
        compare: More predictors to measure in the same way, such as ("plain",).
        threats: Names of `safer_tta.auditing.LADDER`; all of them by default.
        surrogate: The attacker's own model. By default it is the model as it is before it adapts.
        effort: "quick" for a first look, "full" for more images, steps and queries.
        batch: Images in a batch.
        seed: Decides all random draws.
        seconds: No threat is begun that would exceed this time, estimated from the threats before it.
        folder: Where rows and attacked images are kept. Without one, nothing is.
        progress: Whether to show progress, in a terminal or a notebook.
        **options: Further arguments of `adapt`, such as mean, std or the method's own.

    Raises:
        InvalidValueError: If there are no images, or a label is that of no class.
        UnknownNameError: If a method, predictor, norm, threat or effort of that name does not exist.
    """
    one_of(EFFORTS, effort=effort)
    count(batch=batch)
    if seconds is not None:
        positive(seconds=seconds)
    names = [threat.name for threat in LADDER] if threats is None else list(threats)
    for name in names:
        one_of(BY_NAME, threat=name)
    chosen = [threat for threat in LADDER if threat.name in names]
    asked = [Defence(model, method, one, norm, seed, options) for one in (predictor, *compare)]
    defences = list({defence.name: defence for defence in asked}.values())
    with contextlib.nullcontext(str(folder)) if folder is not None else tempfile.TemporaryDirectory() as place:
        own = defences[0].surrogate(surrogate)
        domain = gather(data, max(t.count(effort) for t in LADDER), own.num_classes, seed)
        bench = _Audit(Path(place), domain, own, effort, batch, seconds, progress)
        for defence in defences:
            for group in _shared(chosen, effort):
                bench.perform(defence, group)
        facts = {"images": len(domain), "classes": list(domain.classes), "batch": batch, "effort": effort, "seed": seed}
        facts |= {"surrogate": "given" if surrogate is not None else "own", "defence": defences[0].name}
        return Report(_ordered(bench.rows), bench.left_out, facts, bench.pictures)


def _shared(threats: Sequence[Threat], effort: str) -> list[list[Threat]]:
    """Return threats in groups that one pass measures: the same attack on the same images."""
    groups: dict[str, list[Threat]] = {}
    for threat in threats:
        of = {"attack": threat.attack, "told": dict(threat.told(effort)), "images": threat.count(effort)}
        groups.setdefault(digest({**of, "rate": threat.rate}), []).append(threat)
    return list(groups.values())


def _ordered(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return rows by defence, and then as the ladder goes."""
    places, defences = list(BY_NAME), list(dict.fromkeys(row["defence"] for row in rows))
    return tuple(sorted(rows, key=lambda row: (defences.index(row["defence"]), places.index(row["threat"]))))


class _Audit:
    """An audit under way."""

    def __init__(
        self, folder: Path, domain: Domain, surrogate: Any, effort: str, batch: int, seconds: float | None, shown: bool
    ) -> None:
        self.folder, self.domain, self.surrogate, self.effort = folder, domain, surrogate, effort
        self.batch, self.shown = batch, shown
        self.results, self.source = Results(folder / "rows"), fingerprint(surrogate)
        self.deadline = None if seconds is None else time.monotonic() + seconds
        self.rows: list[Row] = []
        self.left_out: dict[str, str] = {}
        self.pictures: dict[str, list[Any]] = {}

    def perform(self, defence: Defence, threats: list[Threat]) -> None:
        """Take the rows of threats that share a pass from the folder, or measure them, unless they are left out."""
        domain = excerpt(self.domain, threats[0].count(self.effort), defence.seed)
        attack = self._attack(defence, threats[0])
        names = {threat.name: digest(self._define(defence, threat, attack, domain)) for threat in threats}
        if not all(self.results.state(name) == "done" for name in names.values()):
            problem = self._problem(defence, threats[0], len(domain), attack)
            if problem is not None:
                self.left_out |= {f"{threat.name} ({defence.name})": problem for threat in threats}
                return
            self._measure(defence, threats, attack, domain, names)
        for name in names.values():
            self.rows.append(self.results.row(name))
            self.pictures[name] = read_pictures(self.results.folder / f"{name}.safetensors")

    def _attack(self, defence: Defence, threat: Threat) -> AttackOn | None:
        if threat.attack is None:
            return None
        told = dict(threat.told(self.effort))
        if "defence" in ATTACKS[threat.attack].options:
            told["defence"] = defence.predictor
        return AttackOn(name=threat.attack, threat=full_threat(threat.attack, **told))

    def _define(self, defence: Defence, threat: Threat, attack: AttackOn | None, domain: Domain) -> dict[str, Any]:
        """Return all that a row depends on."""
        defined = {"audit": defence.definition, "data": domain.content, "batch": self.batch, "seed": defence.seed}
        defined |= {"threat": threat.name, "rate": threat.rate, "times": threat.times}
        if attack is None:
            return defined
        known = ATTACKS[attack.name]
        defined |= {"attack": attack.describe(), "versions": known.raised_versions(attack.threat)}
        return defined if known.live else {**defined, "surrogate": self.source}

    def _problem(self, defence: Defence, threat: Threat, images: int, attack: AttackOn | None) -> str | None:
        """Say why a threat is left out; None if it is not."""
        if attack is not None:
            reason = why_unattackable(ATTACKS[attack.name], METHODS[defence.method])
            if reason is not None:
                return reason
        if threat.suspected and not defence.suspects:
            return "the predictor estimates no suspicion that an attacker could keep low"
        spent, passes = (sum(row[name] for row in self.rows) for name in ("seconds", "passes"))
        if self.deadline is None or not passes:
            return None
        needed = spent / passes * _passes(defence, images, attack)
        if time.monotonic() + needed <= self.deadline:
            return None
        return f"it would take about {max(1, round(needed))} s, which the time does not allow"

    def _measure(
        self, defence: Defence, threats: list[Threat], attack: AttackOn | None, domain: Domain, names: dict[str, str]
    ) -> None:
        label = f"{' and '.join(names)} ({defence.name})"
        with progress_view.progress(label) if self.shown else contextlib.nullcontext(silent) as tick:
            started = time.monotonic()
            copies = None
            if attack is not None and not threats[0].live:
                copies = attacked_copies(
                    domain, self.surrogate, ArrayStore(self.folder / "attacked"), source=self.source,
                    attack=attack.name, threat=attack.threat, seed=defence.seed, tick=tick,
                )  # fmt: skip
            found, pictures = measure(defence, threats, attack, domain, copies, batch=self.batch, tick=tick)
        shares = {"passes": _passes(defence, len(domain), attack) / len(threats)}
        shares["seconds"] = (time.monotonic() - started) / len(threats)
        self.results.folder.mkdir(parents=True, exist_ok=True)
        for threat, figures in zip(threats, found, strict=True):
            name = names[threat.name]
            write_pictures(self.results.folder / f"{name}.safetensors", pictures)
            facts = {"threat": threat.name, "attacker": threat.attacker, "defence": defence.name}
            told = {"attack": threat.attack, "told": dict(attack.threat) if attack else {}}
            self.results.write({"run": name, **facts, **told, **figures, **shares, "made_with": defence.definition})


def _passes(defence: Defence, images: int, attack: AttackOn | None) -> float:
    """Return how many forward passes a threat costs, roughly: for estimates of time."""
    cost = 0.0 if attack is None else ATTACKS[attack.name].cost(attack.threat)
    seen = defence.views if attack is not None and ATTACKS[attack.name].live else 1
    return images * (1 + defence.views * (1 + defence.passes) + cost * seen)
