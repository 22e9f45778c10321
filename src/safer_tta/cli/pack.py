"""The command `safer pack`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from . import options
from .options import result

SOURCE = (
    "timm:NAME, torchvision:NAME, the folder of a Hugging Face model, FILE.py:FUNCTION of your own, a name of the zoo "
    "such as resnet50, or a packed file."
)
OUT = typer.Option(help="The file to write (safetensors).")
WEIGHTS = typer.Option(help="The state dict or checkpoint: .pth of torch.save, or safetensors.")
CLASSES = typer.Option(callback=options.parse_classes, help="Names of the classes: a,b,c, or a file with one a line.")
SIDE = typer.Option(min=8, help="Pixels a side of the model's images (default: as the model says).")
RESIZE = typer.Option(help="How images come to that side: stretch, or a crop such as 'crop 0.875 bicubic'.")
MEAN = typer.Option(help="Mean of the channels in training, for pixels in [0,1]: 0.485,0.456,0.406, or one number.")
STD = typer.Option(help="Standard deviation of the channels. --mean 0 --std 1: images were not normalised.")
HEAD = typer.Option(help="The layer that gives the scores, if it is not found.")
OUTPUT = typer.Option(help="Where the scores are in what the network returns: a key, or an index such as 0.")
ARGUMENT = typer.Option(metavar="NAME=VALUE", help="An argument that builds the network; may be repeated.")


def pack(
    source: Annotated[str, typer.Argument(help=SOURCE)],
    out: Annotated[Path, OUT],
    weights: Annotated[Path | None, WEIGHTS] = None,
    classes: Annotated[str | None, CLASSES] = None,
    side: Annotated[int | None, SIDE] = None,
    resize: Annotated[str | None, RESIZE] = None,
    mean: Annotated[str | None, MEAN] = None,
    std: Annotated[str | None, STD] = None,
    head: Annotated[str | None, HEAD] = None,
    output: Annotated[str | None, OUTPUT] = None,
    argument: Annotated[list[str] | None, ARGUMENT] = None,
    as_json: options.AsJson = False,
) -> None:
    """Put a model and all that it takes to run it into one file, which serve, run, attack, train and bench take."""
    from .._internal import user_code
    from ..models import pack as write
    from ..models.building import is_own_code

    card = write(
        source, out, weights=weights, arguments=options.parse_settings(argument), side=side, resize=resize, head=head,
        classes=None if classes is None else classes.split("\n"), mean=_numbers(mean), std=_numbers(std),
        output=int(output) if output is not None and output.isdecimal() else output,
    )  # fmt: skip
    shown: dict[str, Any] = {"model": str(out), "architecture": card.architecture, "classes": len(card.classes)}
    shown |= {"side": card.side, "resize": card.resize, "mean": card.mean, "std": card.std}
    own = user_code.find(card.architecture.partition(":")[0]) if is_own_code(card.architecture) else None
    file = source.rpartition(":")[0] or (own.module.__file__ if own else "")  # a packed file does not name it
    code = f"--extension {file} " if own else ""
    result({**shown, "next": f"safer {code}serve --model {out}"}, as_json)


def _numbers(text: str | None) -> list[float] | None:
    """Read numbers such as 0.485,0.456,0.406."""
    try:
        return None if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers; expected 0.485,0.456,0.406") from None
