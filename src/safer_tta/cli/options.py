"""Options that several commands share, and how a result is printed."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .._internal.progress import progress
from .._internal.resizing import STRETCH, Resize


def check_device(name: str) -> str:
    """Refuse a device that torch does not know, or that this machine does not have."""
    import torch

    try:
        found = torch.device(name)
    except RuntimeError:
        raise typer.BadParameter(f"{name!r} is not a device; expected cpu, cuda, cuda:0 or mps") from None
    missing = {"cuda": not torch.cuda.is_available(), "mps": not torch.backends.mps.is_available()}
    if missing.get(found.type):
        raise typer.BadParameter(f"torch finds no {found.type} device on this machine; expected cpu")
    return name


def parse_fraction(text: str) -> float:
    """Read a number such as 8/255 or 0.03."""
    above, _, below = text.partition("/")
    try:
        return float(above) / float(below or 1)
    except (ValueError, ZeroDivisionError):
        raise typer.BadParameter(f"{text!r} is not a number; expected a fraction such as 8/255") from None


def check_data(data: str) -> str:
    """Refuse data that are neither a folder nor the word 'synthetic'."""
    if data != "synthetic" and not Path(data).is_dir():
        raise typer.BadParameter(f"{data!r} is not a folder; expected root/domain/class/image or the word 'synthetic'")
    return data


def check_weights(weights: str | None) -> str | None:
    """Refuse weights that are neither a file nor the word 'none'."""
    if weights not in (None, "none") and not Path(str(weights)).is_file():
        raise typer.BadParameter(f"file {weights!r} does not exist; expected a safetensors file or 'none'")
    return weights


LISTS = (".txt", ".csv", ".tsv", ".lst", ".names")  # endings of files with the names of classes


def parse_classes(text: str | None) -> str | None:
    """Return the names of classes, one a line, from a file or from a list with commas."""
    if text is None:
        return None
    file = Path(text)
    if "," not in text and not file.exists() and (file.suffix in LISTS or len(file.parts) > 1):
        raise typer.BadParameter(f"{text} does not exist; expected a file with one name a line, or names: a,b,c")
    try:  # other programs begin text files with a mark, which is no part of the first name
        lines = file.read_text(encoding="utf-8-sig").splitlines() if file.is_file() else text.split(",")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{text} is not text in UTF-8 ({error}); save it as that") from None
    return "\n".join(name.strip() for name in lines if name.strip())


def parse_settings(settings: list[str] | None) -> dict[str, Any]:
    """Read settings such as lr=1e-3; a value is a number, true, false, a list in JSON, or else a word."""
    found: dict[str, Any] = {}
    for setting in settings or ():
        name, equals, value = setting.partition("=")
        if not name.isidentifier() or not equals:
            raise typer.BadParameter(f"{setting!r} is not a setting; expected NAME=VALUE, such as lr=0.001")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


DATA_HELP = "'synthetic', or a folder root/domain/class/image, such as that of PACS, VLCS or OfficeHome."
Data = Annotated[str, typer.Option(callback=check_data, help=DATA_HELP)]
Target = Annotated[str, typer.Option(help="The domain to adapt to; the source model is trained on the others.")]
Seed = Annotated[int, typer.Option(help="Decides all random draws.")]
Device = Annotated[str, typer.Option(callback=check_device, help="cpu, cuda or mps.")]
Side = Annotated[int, typer.Option(min=8, help="Pixels a side to which a folder's images are resized.")]
MODEL_SIDE_HELP = "Pixels a side of a folder's images (default: the model's)."
ModelSide = Annotated[int | None, typer.Option("--side", min=8, help=MODEL_SIDE_HELP)]
Url = Annotated[str, typer.Option(help="The address of the service.")]
Token = Annotated[str | None, typer.Option(envvar="SAFER_TOKEN", help="Your token for the service.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for other programs.")]
MethodName = Annotated[str, typer.Option(help="The adaptation method; `safer methods` lists them.")]
PREDICTOR_HELP = "What the method asks for predictions: plain, jpeg, fft, blur, safer, safer-a or safer-g."
PredictorName = Annotated[str, typer.Option(help=PREDICTOR_HELP)]
NormName = Annotated[str | None, typer.Option(help="What replaces the batch-norm layers, such as medbn.")]
OPTION_HELP = "An option of the method, such as lr=0.001; may be repeated."
MethodOptions = Annotated[list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help=OPTION_HELP)]
PREDICTOR_OPTION_HELP = "An option of the predictor, such as views=6; may be repeated."
PredictorOptions = Annotated[
    list[str] | None, typer.Option("--predictor-option", metavar="NAME=VALUE", help=PREDICTOR_OPTION_HELP)
]
BUDGET_HELP = "The largest change, as a fraction (default: 8/255; an l2 budget has no default)."
Budget = Annotated[float | None, typer.Option(parser=parse_fraction, metavar="<str>", help=BUDGET_HELP)]
STEP_SIZE_HELP = "The size of an attack step (default: 2/255; l2: 2.5 eps / steps)."
StepSize = Annotated[float | None, typer.Option(parser=parse_fraction, metavar="<str>", help=STEP_SIZE_HELP)]
ATTACK_HELP = "The attack; `safer attacks` lists them. autoattack and apgd-eot need the extra \\[attacks]."
AttackName = Annotated[str, typer.Option("--attack", help=ATTACK_HELP)]
ATTACK_STEPS_HELP = "The number of attack steps (default: the attack's own, 20 for pgd)."
AttackSteps = Annotated[int | None, typer.Option(min=1, help=ATTACK_STEPS_HELP)]
ATTACK_OPTION_HELP = "An option of the attack, such as draws=8; may be repeated. `safer attacks` lists them."
AttackOptions = Annotated[
    list[str] | None, typer.Option("--attack-option", metavar="NAME=VALUE", help=ATTACK_OPTION_HELP)
]
AttackNorm = Annotated[str | None, typer.Option(help="How the attack's budget is measured: linf (default) or l2.")]
Precision = Annotated[str, typer.Option(help="float32 or bfloat16.")]
IMAGES_HELP = "Images in a stream, drawn by the seed (default: all; bench on synthetic 512)."
Images = Annotated[int | None, typer.Option(min=1, help=IMAGES_HELP)]
Store = Annotated[Path, typer.Option(help="The folder for attacked images and rows, which are made once.")]
OUT_HELP = "Where to write the model (safetensors). A killed training resumes from there."
Out = Annotated[Path, typer.Option(help=OUT_HELP)]
Architecture = Annotated[str | None, typer.Option(help="small, resnet18, resnet50, timm:NAME … (default: by dataset).")]
WEIGHTS_HELP = "Pretrained weights to start from, a safetensors file; 'none' trains from scratch."
Weights = Annotated[str | None, typer.Option(callback=check_weights, help=WEIGHTS_HELP)]
STEPS_HELP = "Training steps (default: the paper's 5000; fewer on synthetic)."
Steps = Annotated[int | None, typer.Option(min=1, help=STEPS_HELP)]
BatchSize = Annotated[int | None, typer.Option("--batch", min=1, help="Images of each domain in a training step.")]
LearningRate = Annotated[float | None, typer.Option("--lr", help="The learning rate of Adam.")]


def result(values: dict[str, Any], as_json: bool, shown: list[str] | None = None) -> None:
    """Print a result, as JSON or in lines."""
    if as_json:
        typer.echo(json.dumps(values, sort_keys=True))
        return
    for name in shown or values:
        value = "–" if values[name] is None else values[name]
        typer.echo(f"{name:20} {value:.2f}" if isinstance(value, float) else f"{name:20} {value}")


def drop_missing(**values: Any) -> dict[str, Any]:
    """Return the options that were given; weights 'none' asks for no weights."""
    given = {name: value for name, value in values.items() if value is not None}
    return {name: None if (name, value) == ("weights", "none") else value for name, value in given.items()}


def open_data(data: str, side: int, target: str, *, others: bool, resize: Resize = STRETCH, flat: bool = False) -> Any:
    """Open a dataset and decode its target, and the other domains if they are needed too."""
    from ..data import open_dataset

    with progress("decoding images") as tick:
        dataset = open_dataset(data, side=side, resize=resize, flat=flat, tick=tick)
        dataset.domain(target)
        for name in dataset.domains if others else ():
            dataset.domain(name)
        return dataset
