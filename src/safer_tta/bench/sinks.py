"""Sinks also send rows to TensorBoard or a local MLflow database, without an account or a network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import MissingPackageError, UnknownNameError
from .metrics import rolling
from .results import Row

Sink = Callable[[str, Row], None]  # called with a run's label and its row
PARAMETERS = ("dataset", "target", "method", "predictor", "attack_rate", "seed")
FIGURES = ("accuracy", "accuracy_attacked", "accuracy_clean", "nll", "ece", "ms_per_step", "images_per_s", "peak_mb")


def create(name: str, folder: Path) -> Sink:
    """Return a sink by name, which writes below `folder`."""
    if name not in SINKS:
        raise UnknownNameError.of("sink", name, SINKS)
    return SINKS[name](folder / name)


def tensorboard(folder: Path) -> Sink:
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError as error:
        raise MissingPackageError("this sink needs tensorboard: pip install tensorboard") from error

    def write(label: str, row: Row) -> None:
        made: Any = SummaryWriter
        with made(str(folder / row["run"])) as writer:
            writer.add_text("run", label)
            for name in _given(row):
                writer.add_scalar(name, row[name])
            for batch, value in enumerate(rolling(row["batch_accuracy"])):
                writer.add_scalar("rolling accuracy", value, batch)

    return write


def mlflow(folder: Path) -> Sink:
    try:
        import mlflow as client
    except ImportError as error:
        raise MissingPackageError("this sink needs mlflow: pip install mlflow") from error
    flow: Any = client
    folder.mkdir(parents=True, exist_ok=True)
    flow.set_tracking_uri(f"sqlite:///{folder.resolve() / 'mlflow.db'}")

    def write(label: str, row: Row) -> None:
        with flow.start_run(run_name=label):
            flow.log_params({key: row[key] for key in PARAMETERS})
            flow.log_metrics({name: row[name] for name in _given(row)})

    return write


def _given(row: Row) -> list[str]:
    return [name for name in FIGURES if row[name] is not None]


SINKS: dict[str, Callable[[Path], Sink]] = {"tensorboard": tensorboard, "mlflow": mlflow}
