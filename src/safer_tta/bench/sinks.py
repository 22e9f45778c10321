"""Sinks also send the rows of a study elsewhere, such as to TensorBoard. An extension may register another."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .._internal.registry import Registry
from ..errors import MissingPackageError
from ..evaluation.metrics import rolling
from .results import Row

Sink = Callable[[str, Row], None]  # called with a run's label and its row
FIGURES = ("accuracy", "accuracy_attacked", "accuracy_clean", "nll", "ece", "ms_per_step", "images_per_s", "peak_mb")
SINKS: Registry[Callable[[Path], Sink]] = Registry("sink")  # makers of sinks, called with the folder to write to


@SINKS.register("tensorboard")
def tensorboard(folder: Path) -> Sink:
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError as error:
        raise MissingPackageError("this sink needs tensorboard: pip install tensorboard") from error

    def write(label: str, row: Row) -> None:
        made: Any = SummaryWriter
        with made(str(folder / row["run"])) as writer:
            writer.add_text("run", label)
            for name in FIGURES:
                if row[name] is not None:
                    writer.add_scalar(name, row[name])
            for batch, value in enumerate(rolling(row["batch_accuracy"])):
                writer.add_scalar("rolling accuracy", value, batch)

    return write
