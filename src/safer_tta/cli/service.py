"""The commands `safer serve` and `safer send`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import ModelSide

MEGABYTE = 2**20


def serve(
    model: Annotated[Path, typer.Option(help="The classifier: a file of `safer train source` (safetensors).")],
    folder: Annotated[Path, typer.Option(help="Where streams are kept; they go on from there.")] = Path("served"),
    method: Annotated[str, typer.Option(help="How it adapts: a name of `safer methods`.")] = "tent",
    predictor: Annotated[str, typer.Option(help="plain, jpeg, fft, blur, safer, safer-a or safer-gate.")] = "safer",
    views: Annotated[int | None, typer.Option(min=1, help="Augmented views of SAFER; 4 if not given.")] = None,
    side: ModelSide = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond this machine only with --tokens.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8017,
    tokens: Annotated[Path | None, typer.Option(help='Who may ask: a JSON file {"owner": "token"}.')] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or mps.")] = "cpu",
    precision: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    abstain: Annotated[float, typer.Option(help="Suspicion above which an image is flagged.")] = 0.5,
    seconds: Annotated[float | None, typer.Option(help="Allowed for a batch; behind that, it only answers.")] = None,
    seed: Annotated[int | None, typer.Option(help="For replays; without it every stream draws a secret one.")] = None,
    memory: Annotated[int, typer.Option(min=1, help="MB for adapted states in memory; others wait on disk.")] = 1024,
    queue: Annotated[int, typer.Option(min=1, help="Batches that may wait in all.")] = 256,
    rate: Annotated[float, typer.Option(min=0.1, help="Requests a second of one owner.")] = 200.0,
    images: Annotated[int, typer.Option(min=1, help="Images of a batch, at most.")] = 256,
) -> None:
    """Serve a classifier that adapts to every stream by itself: REST under /v1, a dashboard at /."""
    try:
        from ..serve.limits import Limits
        from ..serve.server import Service
        from ..serve.server import serve as run
        from ..serve.tokens import Tokens
    except ImportError as error:
        raise ImportError(
            f"the service needs more than is installed ({error}): pip install 'safer-tta[serve]'"
        ) from error
    limits = Limits(memory_bytes=memory * MEGABYTE, queue=queue, requests_per_s=rate, images=images)
    service = Service(
        model=model, folder=folder, method=method, predictor=predictor,
        predictor_options={} if views is None else {"views": views}, side=side, device=device, precision=precision,
        abstain=abstain, seed=seed, seconds=seconds, limits=limits,
    )  # fmt: skip
    run(
        service, host=host, port=port, tokens=None if tokens is None else Tokens.read(tokens),
        ready=lambda address: typer.echo(f"serving {model.name} with {method} at {address}", err=True),
    )  # fmt: skip


def send(
    folder: Annotated[Path, typer.Argument(help="Images: PNG, JPEG or WebP, in it or below it.")],
    stream: Annotated[str, typer.Option(help="The stream they belong to; created if it does not exist.")],
    url: Annotated[str, typer.Option(help="Of the service.")] = "http://127.0.0.1:8017",
    token: Annotated[str | None, typer.Option(envvar="SAFER_TOKEN", help="What the service knows you by.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images at once.")] = 64,
    labelled: Annotated[
        bool, typer.Option("--labelled", help="Images lie in folders named by their class: post the labels.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, for machines.")] = False,
) -> None:
    """Send a folder of images to a stream of a running service. The same command goes on after a stop."""
    from ..client import Client
    from ..progress import progress
    from ..send import send_folder

    with Client(url, token) as client, progress("sending") as tick:
        result: dict[str, Any] = send_folder(client, folder, stream, batch=batch, labelled=labelled, tick=tick)
    if as_json:
        typer.echo(json.dumps(result, sort_keys=True))
        return
    for name, value in result.items():
        typer.echo(f"{name:12} {'–' if value is None else value}")
