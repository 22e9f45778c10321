"""Options that several commands share, and how a result is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

Data = Annotated[
    str, typer.Option(help="'synthetic', or the folder of PACS, VLCS, OfficeHome: root/domain/class/image.")
]
Target = Annotated[str, typer.Option(help="The domain to adapt to; a source model is trained on the others.")]
Seed = Annotated[int, typer.Option(help="Decides everything random.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or mps.")]
Side = Annotated[int, typer.Option(min=8, help="Pixels a side to which a folder's images are resized.")]
ModelSide = Annotated[
    int | None, typer.Option("--side", min=8, help="Pixels a side of a folder's images (default: the model's).")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for machines.")]
Budget = Annotated[str | None, typer.Option(help="Largest change, as a fraction (default: 8/255; l2 has none).")]
StepSize = Annotated[str | None, typer.Option(help="Size of one step (default: 2/255; for l2 2.5 eps / steps).")]
AttackName = Annotated[str, typer.Option("--attack", help="pgd, autoattack (extra [attacks]), or an extension's.")]
AttackSteps = Annotated[int | None, typer.Option("--steps", help="Number of attack steps (default: 20).")]
Norm = Annotated[str, typer.Option(help="linf or l2.")]
Store = Annotated[Path, typer.Option(help="Folder for what is made once: attacked images and rows.")]
Out = Annotated[
    Path, typer.Option(help="Where to write the model (safetensors). A killed training goes on from there.")
]
Architecture = Annotated[str | None, typer.Option(help="small, resnet18, resnet50, timm:NAME … (default: by dataset).")]
Weights = Annotated[
    str | None, typer.Option(help="Pretrained weights to start from, a safetensors file; 'none' trains from scratch.")
]
Steps = Annotated[int | None, typer.Option(help="Training steps (default: the paper's 5000; less on synthetic).")]
BatchSize = Annotated[int | None, typer.Option("--batch", help="Images per domain in a training step.")]
LearningRate = Annotated[float | None, typer.Option("--lr", help="Learning rate of Adam.")]


def result(values: dict[str, Any], as_json: bool, shown: list[str] | None = None) -> None:
    if as_json:
        typer.echo(json.dumps(values, sort_keys=True))
        return
    for name in shown or values:
        value = values[name]
        typer.echo(
            f"{name:20} {value:.2f}" if isinstance(value, float) else f"{name:20} {'–' if value is None else value}"
        )
