"""One run: one method on one stream, scored as it goes, resumable, reported as one row."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import __version__, api, extensions, methods, tensorfile
from ..attacks import eot_pgd
from ..data import Batch, Domain, Stream, StreamSpec
from ..data.store import StoreError, digest, digest_file
from ..methods import Method
from ..predictors import Prediction
from ..seeds import generator
from ..training import load
from ..training.trainer import check_classes
from .results import Results, Row

Tick = Callable[..., None]
SAVE_SECONDS = 5.0
WINDOW = 16  # batches in the rolling curve, as in the paper
BINS = 15  # of the calibration error


@dataclass(frozen=True)
class Setting:
    """Where runs take place: domains, their attacked copies and the threat that made them, a trained source model."""

    domains: tuple[Domain, ...]
    attacked: tuple[NDArray[np.uint8], ...] | None
    threat: Mapping[str, Any]
    source: Path
    device: str = "cpu"
    attack: str = "pgd"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A method on a predictor on a stream."""

    method: str = "tent"  # "tent+medbn": with that normalisation
    predictor: str = "safer"
    options: Mapping[str, Any] = field(default_factory=dict)
    predictor_options: Mapping[str, Any] = field(default_factory=dict)
    stream: StreamSpec = field(default_factory=StreamSpec)
    eot: Mapping[str, Any] | None = None  # arguments of `eot_pgd`: attack the predictor itself, live, batch by batch
    precision: str = "float32"


def perform(
    run: Run, setting: Setting, folder: Path, *, defined_by: Mapping[str, Any] | None = None, **settings: Any
) -> Row:
    """The row of a run, from the folder if it has been made before.

    defined_by: what the run is named after (default: the contents of its stream and source model, and its settings).
    """
    api.check_names(run.method, run.predictor)
    if run.eot is not None:
        check_attackable(run.method)
    check_classes(setting.source, setting.domains[0])
    stream = Stream(setting.domains, run.stream, setting.attacked)
    attacked = run.stream.attack_rate > 0
    threat = dict(setting.threat if run.eot is None else run.eot)
    definition = {
        "dataset": setting.domains[0].dataset,
        "target": "+".join(domain.name for domain in setting.domains),
        "method": run.method,
        "predictor": run.predictor,
        "options": dict(run.options),
        "predictor_options": dict(run.predictor_options),
        "attack": (setting.attack if run.eot is None else "eot") if attacked else None,
        "eps": threat["eps"] if attacked else None,
        "threat": threat if attacked else None,
        "attack_rate": run.stream.attack_rate,
        "seed": run.stream.seed,
        "order": run.stream.order,
        "draw": run.stream.draw,
        "batch": run.stream.batch,
        "limit": run.stream.limit,
        "stream": stream.name,
        "source": digest_file(setting.source),
        **({} if run.precision == "float32" else {"precision": run.precision}),
    }
    definition |= extensions.code(definition)

    def build() -> Method:
        classifier = load(setting.source).to(setting.device)
        classifier.accelerate(precision=run.precision)
        return api.build(
            classifier,
            run.method,
            run.predictor,
            options=run.options,
            predictor_options=run.predictor_options,
            seed=run.stream.seed,
            device=setting.device,
        )

    perturb = None if run.eot is None else _Eot(run.eot, run.stream.seed)
    return evaluate(build, stream, definition, folder, defined_by=defined_by, perturb=perturb, **settings)


@dataclass(frozen=True)
class _Eot:
    """The attacker who knows the defence: attacks the predictor as it stands after the updates so far."""

    threat: Mapping[str, Any]
    seed: int

    def __call__(self, method: Method, batch: Batch, number: int) -> Tensor:
        images, labels = batch.images.to(method.classifier.device), batch.labels.to(method.classifier.device)
        randomness = generator(self.seed, "eot", number)
        with method.answering():
            perturbed = eot_pgd(method.predictor, images, labels, generator=randomness, **self.threat)
        attacked = (perturbed * 255).round().byte().cpu()
        return torch.where(batch.attacked[:, None, None, None], attacked, batch.images)


def check_attackable(method: str) -> None:
    """Whether an attack through the predictor is one on what answers."""
    if not methods.METHODS[api.split_name(method)[0]].by_predictor:
        raise ValueError(
            f"{method} answers with more than its predictor (a teacher, prototypes, an average), so an attack through "
            "the predictor would overstate its robustness; expected a method such as tent, pl or tsd under eot"
        )


def evaluate(
    build: Callable[[], Method],
    stream: Stream,
    definition: Mapping[str, Any],
    folder: Path,
    *,
    defined_by: Mapping[str, Any] | None = None,
    perturb: Callable[[Method, Batch, int], Tensor] | None = None,
    tick: Tick = lambda done, total, **figures: None,
    save_seconds: float = SAVE_SECONDS,
) -> Row:
    """The row of a run. Asked again it comes from the folder; killed half-way it goes on from the last save."""
    name, results = digest(defined_by or definition), Results(folder)
    if results.state(name) == "done":
        return results.row(name)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = results.progress(name)
    method = build()
    _forget_peak(method.classifier.device)
    record = Record.load(unfinished, method, name)
    saved = time.monotonic()
    for batch in stream.since(record.batches):
        images = batch.images if perturb is None else perturb(method, batch, record.batches)
        started = time.perf_counter()
        prediction = method(images)
        _wait(prediction.probs)
        record.add(prediction, batch.labels, batch.attacked, time.perf_counter() - started)
        if time.monotonic() - saved >= save_seconds:
            record.save(unfinished, method, name)
            saved = time.monotonic()
        tick(record.batches, len(stream), accuracy=record.last_accuracy)
    figures = record.figures(len(stream.domains[0].classes))
    row = {**definition, **figures, **_machine(method), "manifest": stream.manifest(), "run": name}
    return results.write(row if defined_by is None else {**row, "defined_by": dict(defined_by)})


@dataclass
class Record:
    """What is kept of every batch."""

    columns: dict[str, list[Tensor]] = field(default_factory=dict)

    @property
    def batches(self) -> int:
        return len(self.columns.get("seconds", ()))

    @property
    def last_accuracy(self) -> float:
        """Of the last batch, in percent."""
        return 100 * float((self.columns["probs"][-1].argmax(1) == self.columns["labels"][-1]).float().mean())

    def add(self, prediction: Prediction, labels: Tensor, attacked: Tensor, seconds: float) -> None:
        report = prediction.report
        views = len(report.weights)
        new = {
            "probs": prediction.probs.float().cpu(),
            "labels": labels,
            "attacked": attacked,
            "sizes": torch.tensor([len(labels)]),
            "seconds": torch.tensor([seconds], dtype=torch.float64),
            "dropped": torch.tensor([-1 if report.dropped is None else int(report.dropped)]),
            "reliability": _row_of(report.reliability, views),
            "suspicion": torch.full([len(labels)], torch.nan) if report.signal is None else report.signal.float().cpu(),
        }
        for column, values in new.items():
            self.columns.setdefault(column, []).append(values)

    def save(self, path: Path, method: Method, run: str) -> None:
        tensors = {f"column.{column}": torch.cat(values) for column, values in self.columns.items()}
        tensors |= {f"state.{name}": tensor for name, tensor in method.state_dict().items()}
        tensorfile.write(path, tensors, {"run": run, "content": _content(tensors)})

    @classmethod
    def load(cls, path: Path, method: Method, run: str) -> Record:
        """Where an earlier process left off, the method put into that state; else a fresh start."""
        if not path.exists():
            return cls()
        tensors, header = tensorfile.read(path)
        if header.get("run") != run or header.get("content") != _content(tensors):
            raise StoreError(f"{path} is damaged or belongs to another run. Remove it to start this run afresh")
        method.load_state_dict({n.removeprefix("state."): t for n, t in tensors.items() if n.startswith("state.")})
        columns = {n.removeprefix("column."): t for n, t in tensors.items() if n.startswith("column.")}
        sizes = columns["sizes"].tolist()
        per_image = {"probs", "labels", "attacked", "suspicion"}
        return cls({name: list(torch.split(t, sizes if name in per_image else 1)) for name, t in columns.items()})

    def figures(self, classes: int) -> dict[str, Any]:
        """The row's numbers: accuracies in percent."""
        table = {name: torch.cat(values) for name, values in self.columns.items()}
        probs, labels, attacked = table["probs"], table["labels"], table["attacked"]
        right = (probs.argmax(dim=1) == labels).double()
        per_batch = [100 * float(part.mean()) for part in torch.split(right, table["sizes"].tolist())]
        taken = table["seconds"][1:] if len(table["seconds"]) > 1 else table["seconds"]  # the first batch warms up
        views = table["reliability"].shape[1]
        return {
            "images": len(labels),
            "batches": len(per_batch),
            "accuracy": _percent(right),
            "attacked_share": 100 * float(attacked.double().mean()),
            "accuracy_attacked": _percent(right[attacked]),
            "accuracy_clean": _percent(right[~attacked]),
            "per_class": [_percent(right[labels == k]) for k in range(classes)],
            "nll": float(-probs.double()[torch.arange(len(labels)), labels].clamp_min(1e-12).log().mean()),
            "ece": calibration_error(probs.double(), right),
            "batch_accuracy": per_batch,
            "rolling": rolling(per_batch, WINDOW),
            "dropped_share": [float((table["dropped"] == view).double().mean()) for view in range(views)],
            "reliability": None if views == 1 else table["reliability"].double().mean(dim=0).tolist(),
            "detection": detection(table["suspicion"], attacked),
            "selective": selective(table["suspicion"], right),
            "ms_per_step": 1e3 * float(taken.median()),
            "images_per_s": float(table["sizes"].double().mean() / taken.median()),
        }


def _content(tensors: Mapping[str, Tensor]) -> str:
    state = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        state.update(name.encode() + tensorfile.raw_bytes(tensors[name]))
    return state.hexdigest()


def rolling(values: list[float], window: int) -> list[float]:
    """The mean of the last `window` values, at every place."""
    return [float(np.mean(values[max(0, i + 1 - window) : i + 1])) for i in range(len(values))]


def calibration_error(probs: Tensor, right: Tensor) -> float:
    """Expected calibration error over 15 equal bins of confidence."""
    confidence = probs.amax(dim=1)
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    gaps = [(right[bins == b].sum() - confidence[bins == b].sum()).abs() for b in range(BINS)]
    return float(sum(gaps) / len(right))


def detection(suspicion: Tensor, attacked: Tensor) -> float | None:
    """AUROC: the chance that an attacked image looks more suspicious than a clean one; None without both kinds."""
    suspicious, calm = suspicion[attacked].double(), suspicion[~attacked].double()
    if not len(suspicious) or not len(calm) or bool(suspicion.isnan().any()):
        return None
    calm = calm.sort().values
    below, upto = (torch.searchsorted(calm, suspicious, right=right) for right in (False, True))
    return float((below + upto).double().mean() / (2 * len(calm)))


def selective(suspicion: Tensor, right: Tensor) -> list[float | None] | None:
    """Accuracy when only the least suspicious images are answered: 100, 90, … 50 % of them."""
    if bool(suspicion.isnan().any()):
        return None
    order = suspicion.argsort(stable=True)
    return [_percent(right[order[: round(len(right) * covered / 100)]]) for covered in range(100, 49, -10)]


def _row_of(reliability: Tensor | None, views: int) -> Tensor:
    """(1,V); NaN where a predictor knows no reliability."""
    return torch.full((1, views), torch.nan) if reliability is None else reliability.float().cpu()[None]


def _percent(right: Tensor) -> float | None:
    return 100 * float(right.mean()) if len(right) else None


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


PROCESS = Path("/proc/self")  # Linux; elsewhere a CPU's peak is not known


def _forget_peak(device: torch.device) -> None:
    """From now on count the most memory anew: what the process did before is not this run's."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif (PROCESS / "clear_refs").exists():
        with contextlib.suppress(OSError):
            (PROCESS / "clear_refs").write_text("5")


def _peak(device: torch.device) -> float | None:
    """Megabytes: on a GPU those of its own memory, on a CPU the process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if not (PROCESS / "status").exists():
        return None
    lines = (PROCESS / "status").read_text().splitlines()
    return next((int(line.split()[1]) / 2**10 for line in lines if line.startswith("VmHWM")), None)


def _precision(method: Method) -> str:
    """In which images pass through the model."""
    dtype = str(method.classifier.dtype).removeprefix("torch.")
    return dtype if method.classifier.precision == "float32" else method.classifier.precision


def _machine(method: Method) -> dict[str, Any]:
    device = method.classifier.device
    return {
        "peak_mb": _peak(device),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "precision": _precision(method),
        "versions": {"safer_tta": __version__, "torch": torch.__version__, "numpy": np.__version__},
    }
