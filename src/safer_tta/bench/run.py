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
from .._internal.seeds import generator
from ..attacks import ATTACKS
from ..data import Batch, Domain, Stream
from ..data.store import digest
from ..errors import InvalidValueError
from ..methods import Method
from ..models import load_classifier
from ..training.definitions import definition_of
from ..training.trainer import check_classes, warn_if_seen
from .experiment import AttackOn, Experiment
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
    record = Record.load(unfinished, method, experiment.name)
    saved = time.monotonic()
    for batch in stream.since(record.batches):
        images = batch.images
        if experiment.attacked_live and experiment.attack is not None:
            images = attack_live(experiment.attack, method, batch, experiment.stream.seed, record.batches)
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


def attack_live(attack: AttackOn, method: Method, batch: Batch, seed: int, number: int) -> Tensor:
    """Attack a batch of this number as one who knows the defence: its predictor as it stands after the updates so far.

    Return bytes, on the CPU. Randomness is named by the seed, the attack and the number.
    """
    randomness = generator(seed, attack.name, number)
    device = method.classifier.device
    images, labels = batch.images.to(device), batch.labels.to(device)
    with method.answering():
        known = ATTACKS[attack.name]
        mine = (batch.attacked.to(device),) if known.poisons else ()
        attacked = known.perturb(method.predictor, images, labels, attack.threat, randomness, *mine)
    return torch.where(batch.attacked[:, None, None, None], attacked.cpu(), batch.images)


def _check_source(experiment: Experiment, path: Path) -> None:
    """Refuse another source model than the experiment names."""
    found = definition_of(path)
    if digest(found) != digest(experiment.source):
        raise InvalidValueError(
            f"{path} is the source model {found}; the run expects {dict(experiment.source)}. Give the file of that "
            "model, or define the run with safer_tta.training.definitions.definition_of(file)"
        )


def check_attackable(experiment: Experiment) -> None:
    """Refuse a live attack on a method that answers with more than its predictor."""
    problem = unattackable(experiment.method) if experiment.attacked_live else None
    if problem is not None:
        raise InvalidValueError(f"{problem}; expected a method such as tent, pl or tsd")


def unattackable(method: str) -> str | None:
    """Say why no live attack is made on a method; None if one can be."""
    if methods.METHODS[method].by_predictor:
        return None
    return (
        f"{method} answers with more than its predictor (a teacher, prototypes, an average), so an attack through the "
        "predictor would overstate its robustness"
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
    classifier, device = method.classifier, method.classifier.device
    dtype = str(classifier.dtype).removeprefix("torch.")
    return {
        "peak_mb": _peak(device),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "precision": dtype if classifier.precision == "float32" else classifier.precision,
        "versions": {"safer_tta": __version__, "torch": torch.__version__, "numpy": np.__version__},
    }
