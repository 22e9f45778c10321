"""Make a run: adapt over its stream, score every batch, write one row. A run that was killed is resumed."""

import contextlib
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import __version__, methods
from .._internal.progress import Tick, silent
from ..attacks import ATTACKS, Attacker, start
from ..attacks.attacker import check_attackable as attackable
from ..data import Batch, Domain, Stream
from ..data.store import digest
from ..errors import InvalidValueError
from ..methods import Method
from ..models import Classifier, load_classifier
from ..predictors import Prediction
from ..training.definitions import definition_of
from ..training.trainer import check_classes, warn_if_seen
from .experiment import Experiment
from .record import Record
from .results import Results, Row

SAVE_SECONDS = 5.0


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
    """Make a run and return its row, which the folder keeps; a row that it holds is returned as it is.

    An unfinished run is saved after every `save_seconds`, so that a killed one resumes. A UserWarning says if the
    source model was trained on a domain of the stream.
    """
    warn_if_seen(materials.source, materials.domains)
    results = Results(folder)
    if results.state(experiment.name) == "done":
        return results.row(experiment.name)
    check_attackable(experiment)
    _check_source(experiment, materials.source)
    check_classes(materials.source, materials.domains[0])
    copies = tuple(domain.images for domain in materials.domains) if experiment.attacked_live else materials.attacked
    stream = Stream(materials.domains, experiment.stream, copies)
    method = experiment.build(load_classifier(materials.source).to(materials.device))
    folder.mkdir(parents=True, exist_ok=True)
    _forget_peak(method.classifier.device)
    unfinished = results.progress(experiment.name)
    attacker = _attacker(experiment, method, materials)
    record = Record.load(unfinished, experiment.name, method=method, attacker=attacker)
    saved = time.monotonic()
    for batch in stream.since(record.batches):
        images, labels, mine = batch
        if attacker is not None:
            images = attacker.perturb(images, labels, mine, record.batches)
        answer = _answer(method, images, batch, record)
        if attacker is not None:
            attacker.see(images[mine], labels[mine], answer.probs.cpu()[mine])
        if time.monotonic() - saved >= save_seconds:
            record.save(unfinished, experiment.name, method=method, attacker=attacker)
            saved = time.monotonic()
        tick(record.batches, len(stream), accuracy=record.last_accuracy)
    return results.write(_row(experiment, stream, record, method))


def _answer(method: Method, images: Tensor, batch: Batch, record: Record) -> Prediction:
    """Let the method adapt to one batch, record its answer and its time, and return the answer."""
    started = time.perf_counter()
    prediction = method(images)
    if prediction.probs.is_cuda:
        torch.cuda.synchronize(prediction.probs.device)
    record.add(prediction, batch.labels, batch.attacked, time.perf_counter() - started)
    return prediction


def _row(experiment: Experiment, stream: Stream, record: Record, method: Method) -> Row:
    first = stream.domains[0]
    return {
        "run": experiment.name,
        "dataset": first.dataset,
        **experiment.fields(),
        **record.figures(len(first.classes)),
        **(record.benign_figures(stream.spec.tail) if experiment.poisons else {}),
        **_machine(method),
        "stream": stream.name,
        "manifest": stream.manifest(),
        "defined_by": experiment.describe(),
    }


def _attacker(experiment: Experiment, method: Method, materials: Materials) -> Attacker | None:
    """Start the attacker who is in the loop of the stream, if there is one."""
    attack = experiment.attack
    if attack is None or not experiment.attacked_live:
        return None
    victim: Method | Classifier = method
    if ATTACKS[attack.name].memory is not None:  # an attacker who knows the source model only
        victim = load_classifier(materials.source).to(materials.device)
        victim.accelerate(precision=experiment.precision)
    return start(attack.name, victim, seed=experiment.stream.seed, **attack.threat)


def _check_source(experiment: Experiment, path: Path) -> None:
    """Refuse another source model than the experiment names."""
    found = definition_of(path)
    if digest(found) != digest(experiment.source):
        raise InvalidValueError(
            f"{path} is the source model {found}; the run expects {dict(experiment.source)}. Give the file of that "
            "model, or define the run with safer_tta.training.definitions.definition_of(file)"
        )


def check_attackable(experiment: Experiment) -> None:
    """Refuse a live attack that does not see all that the method answers with."""
    if experiment.attack is not None:
        attackable(ATTACKS[experiment.attack.name], methods.METHODS[experiment.method])


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
    classifier, device = method.classifier, method.classifier.device
    dtype = str(classifier.dtype).removeprefix("torch.")
    return {
        "peak_mb": _peak(device),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "precision": dtype if classifier.precision == "float32" else classifier.precision,
        "versions": {"safer_tta": __version__, "torch": torch.__version__, "numpy": np.__version__},
    }
