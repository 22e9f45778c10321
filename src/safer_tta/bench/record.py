"""What is kept of every batch of a run: enough to compute its figures, and to resume it after a kill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from .._internal import safetensors_io
from .._internal.hashing import hash_bytes
from ..errors import StoreError
from ..evaluation.metrics import calibration_error, detection, percent, selective
from ..predictors import Prediction

PER_IMAGE = {"probs", "labels", "attacked", "suspicion", "flagged"}
FLAGGED = 0.5  # the suspicion above which an image is more probably attacked than not


class Stateful(Protocol):
    """What a run saves and resumes beside its answers."""

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, snapshot: dict[str, Tensor], /) -> None: ...


@dataclass
class Record:
    """The answers of a run so far, batch by batch."""

    columns: dict[str, list[Tensor]] = field(default_factory=dict)

    @property
    def batches(self) -> int:
        return len(self.columns.get("seconds", ()))

    @property
    def last_accuracy(self) -> float:
        """The accuracy of the last batch, in percent."""
        return 100 * float((self.columns["probs"][-1].argmax(1) == self.columns["labels"][-1]).float().mean())

    def add(self, prediction: Prediction, labels: Tensor, attacked: Tensor, seconds: float) -> None:
        report = prediction.report
        signal = next(iter(report.signals.values()), None)
        suspicion = signal if report.suspicion is None else report.suspicion  # a probability, else what ranks images
        new = {
            "probs": prediction.probs.float().cpu(),
            "labels": labels,
            "attacked": attacked,
            "sizes": torch.tensor([len(labels)]),
            "seconds": torch.tensor([seconds], dtype=torch.float64),
            "dropped": torch.tensor([-1 if report.dropped is None else int(report.dropped)]),
            "reliability": _or_nan(report.reliability, len(report.weights))[None],
            "suspicion": _or_nan(suspicion, len(labels)),
            "flagged": _or_nan(_flag(report.suspicion), len(labels)),
        }
        for column, values in new.items():
            self.columns.setdefault(column, []).append(values)

    def save(self, path: Path, run: str, **parts: Stateful | None) -> None:
        """Write it to a file, with the states of the method and of an attacker in the loop."""
        tensors = {f"column.{column}": torch.cat(values) for column, values in self.columns.items()}
        for part, thing in _present(parts):
            tensors |= {f"{part}.{name}": tensor for name, tensor in thing.state_dict().items()}
        safetensors_io.write(path, tensors, {"run": run, "content": _hash(tensors)})

    @classmethod
    def load(cls, path: Path, run: str, **parts: Stateful | None) -> Record:
        """Continue where an earlier process was stopped, with its parts in their states then; else start afresh."""
        if not path.exists():
            return cls()
        tensors, header = safetensors_io.read(path)
        if header.get("run") != run or header.get("content") != _hash(tensors):
            raise StoreError(f"{path} is damaged or belongs to another run. Remove it to start this run afresh")
        for part, thing in _present(parts):
            thing.load_state_dict(_below(tensors, part))
        columns = _below(tensors, "column")
        sizes = columns["sizes"].tolist()
        return cls({name: list(torch.split(t, sizes if name in PER_IMAGE else 1)) for name, t in columns.items()})

    def benign_figures(self, tail: int) -> dict[str, float | None]:
        """Return the accuracy on images that are not the attacker's: in the clean tail of the stream, and before it."""
        table = self._table()
        right = (table["probs"].argmax(dim=1) == table["labels"]).double()
        end = max(0, len(right) - tail)
        return {"accuracy_benign": percent(right[:end][~table["attacked"][:end]])} | (
            {"accuracy_tail": percent(right[end:])} if tail else {}
        )

    def figures(self, classes: int) -> dict[str, Any]:
        """Return the figures of the row; accuracies are in percent."""
        table = self._table()
        probs, labels, attacked = table["probs"], table["labels"], table["attacked"]
        right = (probs.argmax(dim=1) == labels).double()
        per_batch = [100 * float(part.mean()) for part in torch.split(right, table["sizes"].tolist())]
        taken = table["seconds"][1:] if len(table["seconds"]) > 1 else table["seconds"]  # the first batch warms up
        views = table["reliability"].shape[1]
        return {
            "images": len(labels),
            "batches": len(per_batch),
            "accuracy": percent(right),
            "attacked_share": 100 * float(attacked.double().mean()),
            "accuracy_attacked": percent(right[attacked]),
            "accuracy_clean": percent(right[~attacked]),
            "flagged_clean": _share(table["flagged"][~attacked]),
            "flagged_attacked": _share(table["flagged"][attacked]),
            "per_class": [percent(right[labels == k]) for k in range(classes)],
            "nll": float(-probs.double()[torch.arange(len(labels)), labels].clamp_min(1e-12).log().mean()),
            "ece": calibration_error(probs.double(), right),
            "batch_accuracy": per_batch,
            "dropped_share": [float((table["dropped"] == view).double().mean()) for view in range(views)],
            "reliability": None if views == 1 else table["reliability"].double().mean(dim=0).tolist(),
            "detection": detection(table["suspicion"], attacked),
            "selective": selective(table["suspicion"], right),
            "ms_per_step": 1e3 * float(taken.median()),
            "images_per_s": float(table["sizes"].double().mean() / taken.median()),
        }

    def _table(self) -> dict[str, Tensor]:
        return {name: torch.cat(values) for name, values in self.columns.items()}


def _present(parts: Mapping[str, Stateful | None]) -> list[tuple[str, Stateful]]:
    return [(part, thing) for part, thing in parts.items() if thing is not None]


def _below(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """Return the tensors whose names start with this part, without it."""
    return {name.removeprefix(f"{part}."): t for name, t in tensors.items() if name.startswith(f"{part}.")}


def _hash(tensors: Mapping[str, Tensor]) -> str:
    return hash_bytes(name.encode() + safetensors_io.raw_bytes(tensors[name]) for name in sorted(tensors)).hex()


def _flag(suspicion: Tensor | None) -> Tensor | None:
    return None if suspicion is None else suspicion > FLAGGED


def _share(flagged: Tensor) -> float | None:
    """Return how many percent of the images were called attacked; None if the predictor does not say."""
    return percent(flagged.double()) if len(flagged) and bool(torch.isfinite(flagged).all()) else None


def _or_nan(values: Tensor | None, size: int) -> Tensor:
    return torch.full([size], torch.nan) if values is None else values.float().cpu()
