"""Make a run: adapt over its stream, score every batch, write one row. A run that was killed is resumed."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import __version__, methods
from .._internal.progress import Tick, silent
from .._internal.seeds import generator
from ..attacks import ATTACKS
from ..data import Batch, Domain, Stream
from ..errors import InvalidValueError
from ..methods import Method
from ..training import load
from ..training.trainer import check_classes
from .experiment import AttackOn, Experiment
from .record import Record
from .results import Results, Row

SAVE_SECONDS = 5.0
Perturb = Callable[[Method, Batch, int], Tensor]


@dataclass(frozen=True)
class Materials:
    """What a run is made of on this machine."""

    domains: tuple[Domain, ...]  # the domains of the stream
    source: Path  # the file of the source model
    # attacked copies of the domains' images, if the attack is not live
    attacked: tuple[NDArray[np.uint8], ...] | None = None
    device: str = "cpu"  # where the run takes place


def perform(
    experiment: Experiment,
    materials: Materials,
    folder: Path,
    *,
    tick: Tick = silent,
    save_seconds: float = SAVE_SECONDS,
) -> Row:
    """Make a run and return its row; a row that the folder holds is returned as it is.

    Args:
        experiment: What the run is.
        materials: The images and the model that the experiment names.
        folder: Where rows are kept, and what a killed run needs to resume.
        tick: Called after every batch.
        save_seconds: Seconds between two saves of an unfinished run.
    """
    results = Results(folder)
    if results.state(experiment.name) == "done":
        return results.row(experiment.name)
    check_attackable(experiment)
    check_classes(materials.source, materials.domains[0])
    perturb, copies = _attack(experiment, materials)
    stream = Stream(materials.domains, experiment.stream, copies)
    method = experiment.build(load(materials.source).to(materials.device))
    folder.mkdir(parents=True, exist_ok=True)
    _forget_peak(method.classifier.device)
    unfinished = results.progress(experiment.name)
    record = Record.load(unfinished, method, experiment.name)
    saved = time.monotonic()
    for batch in stream.since(record.batches):
        images = batch.images if perturb is None else perturb(method, batch, record.batches)
        _answer(method, images, batch, record)
        if time.monotonic() - saved >= save_seconds:
            record.save(unfinished, method, experiment.name)
            saved = time.monotonic()
        tick(record.batches, len(stream), accuracy=record.last_accuracy)
    return results.write(_row(experiment, stream, record, method))


def _answer(method: Method, images: Tensor, batch: Batch, record: Record) -> None:
    """Let the method adapt to one batch, and record its answer and its time."""
    started = time.perf_counter()
    prediction = method(images)
    if prediction.probs.is_cuda:
        torch.cuda.synchronize(prediction.probs.device)
    record.add(prediction, batch.labels, batch.attacked, time.perf_counter() - started)


def _row(experiment: Experiment, stream: Stream, record: Record, method: Method) -> Row:
    first = stream.domains[0]
    return {
        "run": experiment.name,
        "dataset": first.dataset,
        **experiment.fields(),
        **record.figures(len(first.classes)),
        **_machine(method),
        "stream": stream.name,
        "manifest": stream.manifest(),
        "defined_by": experiment.describe(),
    }


def _attack(
    experiment: Experiment, materials: Materials
) -> tuple[Perturb | None, tuple[NDArray[np.uint8], ...] | None]:
    """Return what perturbs batches as they come, and the attacked copies that are mixed into the stream."""
    attack = experiment.attack
    if attack is None or not ATTACKS[attack.name].live:
        return None, materials.attacked
    return _Live(attack, experiment.stream.seed), tuple(domain.images for domain in materials.domains)


@dataclass(frozen=True)
class _Live:
    """An attacker who knows the defence: attacks the predictor as it stands after the updates so far."""

    attack: AttackOn
    seed: int

    def __call__(self, method: Method, batch: Batch, number: int) -> Tensor:
        images, labels = batch.images.to(method.classifier.device), batch.labels.to(method.classifier.device)
        randomness = generator(self.seed, self.attack.name, number)
        with method.answering():
            known, threat = ATTACKS[self.attack.name], self.attack.threat
            attacked = known.perturb(method.predictor, images, labels, threat, randomness)
        return torch.where(batch.attacked[:, None, None, None], attacked.cpu(), batch.images)


def check_attackable(experiment: Experiment) -> None:
    """Refuse a live attack on a method that answers with more than its predictor.

    Raises:
        InvalidValueError: If an attack through the predictor would not be one on what answers.
    """
    live = experiment.attack is not None and ATTACKS[experiment.attack.name].live
    if live and not methods.METHODS[experiment.method].by_predictor:
        raise InvalidValueError(
            f"{experiment.method} answers with more than its predictor (a teacher, prototypes, an average), so an "
            "attack through the predictor would overstate its robustness; expected a method such as tent, pl or tsd"
        )


PROCESS = Path("/proc/self")  # on Linux; elsewhere the peak of a CPU's memory is unknown


def _forget_peak(device: torch.device) -> None:
    """Reset the peak of memory, so that what the process did before does not count."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif (PROCESS / "clear_refs").exists():
        with contextlib.suppress(OSError):
            (PROCESS / "clear_refs").write_text("5")


def _peak(device: torch.device) -> float | None:
    """Return the peak in megabytes: of a GPU's own memory, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if not (PROCESS / "status").exists():
        return None
    lines = (PROCESS / "status").read_text().splitlines()
    return next((int(line.split()[1]) / 2**10 for line in lines if line.startswith("VmHWM")), None)


def _machine(method: Method) -> dict[str, Any]:
    device, classifier = method.classifier.device, method.classifier
    dtype = str(classifier.dtype).removeprefix("torch.")
    return {
        "peak_mb": _peak(device),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "precision": dtype if classifier.precision == "float32" else classifier.precision,
        "versions": {"safer_tta": __version__, "torch": torch.__version__, "numpy": np.__version__},
    }
