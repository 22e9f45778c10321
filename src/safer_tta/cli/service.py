"""The commands `safer serve` and `safer send`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from .._internal.defaults import METHOD, PREDICTOR
from .._internal.progress import progress
from ..errors import MissingPackageError
from . import options
from .options import result

MEGABYTE = 2**20
MODEL = typer.Option(exists=True, help="The classifier: a file of `safer pack` or `safer train`.")
FOLDER = typer.Option(help="Where streams are kept; a later start continues them.")
SHADOW = typer.Option(
    exists=True, dir_okay=False, help="A new model to roll out: it sees every batch too, until you switch to it."
)
HOST = typer.Option(help="Address to listen on. Addresses beyond this machine need --tokens.")
TOKENS = typer.Option(
    exists=True, dir_okay=False, help='Who may use it: a JSON file {"owner": "token"}; read again when it changes.'
)
UPLOADS = typer.Option(min=1, help="MB for bodies and decoded images of requests, shared by owners.")
CONNECTIONS = typer.Option(min=16, help="Open connections, at most; then idle ones are closed.")
UPLOAD_SECONDS = typer.Option(min=0.1, help="Time for a body to arrive; more for one that keeps coming.")
WAIT = typer.Option(min=0.1, help="Seconds that a batch may wait for its turn.")
OWNER_DISK = typer.Option(min=1, help="MB on disk beyond which an owner creates no further stream.")
ABSTAIN = typer.Option(
    help="Suspicion above which an image is flagged (default: 0.5). Needs a predictor such as safer-g."
)
LOG_LEVEL = typer.Option(help="What is logged at least; info has one line for each request.")
WEBHOOK = typer.Option(help="Address to which alarms are posted when they are raised or cleared.")
WEBHOOK_SECRET = typer.Option(
    exists=True, dir_okay=False, help="A file with the secret that signs them (default: $SAFER_WEBHOOK_SECRET)."
)
BATCH_STREAMS = typer.Option(
    min=1, help="Streams whose waiting batches are answered together; their answers then differ in the last digits."
)
LABELLED = typer.Option("--labelled", help="Images lie in folders named by their class: post the labels.")

OUT = typer.Option(help="A CSV file for the answer to each image: class, probability, suspicion and so on.")


def serve(
    ctx: typer.Context,
    model: Annotated[Path | None, MODEL] = None,
    folder: Annotated[Path, FOLDER] = Path("served"),
    shadow: Annotated[Path | None, SHADOW] = None,
    method: options.MethodName = METHOD,
    predictor: options.PredictorName = PREDICTOR,
    norm: options.NormName = None,
    option: options.MethodOptions = None,
    predictor_option: options.PredictorOptions = None,
    views: Annotated[int | None, typer.Option(min=1, help="Augmented views of SAFER (default: 4).")] = None,
    side: options.ModelSide = None,
    host: Annotated[str, HOST] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8017,
    tokens: Annotated[Path | None, TOKENS] = None,
    device: options.Device = "cpu",
    precision: options.Precision = "float32",
    abstain: Annotated[float | None, ABSTAIN] = None,
    seconds: Annotated[float | None, typer.Option(help="Time per batch; while behind, it answers only.")] = None,
    seed: Annotated[int | None, typer.Option(help="For replays (default: a secret one for every stream).")] = None,
    memory: Annotated[int, typer.Option(min=1, help="MB for adapted states in memory; others wait on disk.")] = 1024,
    queue: Annotated[int, typer.Option(min=1, help="How many batches may wait.")] = 256,
    batch_streams: Annotated[int, BATCH_STREAMS] = 1,
    rate: Annotated[float, typer.Option(min=0.1, help="Requests per second of one owner.")] = 200.0,
    images: Annotated[int, typer.Option(min=1, help="Images of a batch, at most.")] = 256,
    streams: Annotated[int, typer.Option(min=1, help="Streams of one owner, at most.")] = 1000,
    owner_disk: Annotated[int, OWNER_DISK] = 16 * 1024,
    disk: Annotated[int, typer.Option(min=1, help="MB on disk beyond which no stream is created.")] = 64 * 1024,
    uploads: Annotated[int, UPLOADS] = 1024,
    upload_seconds: Annotated[float, UPLOAD_SECONDS] = 20.0,
    wait: Annotated[float, WAIT] = 50.0,
    connections: Annotated[int, CONNECTIONS] = 4096,
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="One line for each event, or JSON lines.")
    ] = "text",
    log_level: Annotated[Literal["debug", "info", "warning", "error"], LOG_LEVEL] = "info",
    webhook: Annotated[str | None, WEBHOOK] = None,
    webhook_secret: Annotated[Path | None, WEBHOOK_SECRET] = None,
) -> None:
    """Serve a classifier that adapts to every stream separately: a REST API under /v1, a dashboard at /."""
    if ctx.invoked_subcommand is not None:
        return
    if model is None:
        ctx.fail("Missing option '--model'.")
    try:
        from ..serve import logs
        from ..serve.limits import Limits
        from ..serve.server import Service
        from ..serve.server import serve as run
        from ..serve.tokens import Tokens
        from ..serve.webhook import Webhook
    except ImportError as error:
        raise MissingPackageError(
            f"the service needs a package that is not installed ({error}): pip install 'safer-tta[serve]'"
        ) from error
    logs.set_up(log_format, log_level)
    limits = Limits(
        memory_bytes=memory * MEGABYTE, queue=queue, requests_per_s=rate, images=images, owner_streams=streams,
        owner_disk_bytes=owner_disk * MEGABYTE, disk_bytes=disk * MEGABYTE, upload_bytes=uploads * MEGABYTE,
        body_s=upload_seconds, wait_s=wait, connections=connections,
        batch_streams=batch_streams,
    )  # fmt: skip
    told = options.parse_settings(predictor_option) | options.drop_missing(views=views)
    service = Service(
        model=model, folder=folder, shadow=shadow, method=method, norm=norm, options=options.parse_settings(option),
        predictor={"name": predictor, **told} if told else predictor, side=side, device=device,
        precision=precision, abstain=abstain, seed=seed, seconds=seconds, limits=limits,
        webhook=None if webhook is None else Webhook.read(webhook, webhook_secret),
    )  # fmt: skip
    run(
        service, host=host, port=port, tokens=None if tokens is None else Tokens.read(tokens),
        ready=lambda address: logs.log.info("serving %s with %s at %s", model.name, method, address),
    )  # fmt: skip


def send(
    folder: Annotated[Path, typer.Argument(help="A folder with PNG, JPEG or WebP images, in it or below it.")],
    stream: Annotated[str, typer.Option(help="The stream to send to; created if it does not exist.")],
    url: options.Url = "http://127.0.0.1:8017",
    token: options.Token = None,
    batch: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 64,
    labelled: Annotated[bool, LABELLED] = False,
    out: Annotated[Path | None, OUT] = None,
    as_json: options.AsJson = False,
) -> None:
    """Send a folder of images to a stream of a running service. Running the command again resumes it."""
    from ..client import Client, send_folder

    with Client(url, token) as client, progress("sending") as tick:
        sent = send_folder(client, folder, stream, batch=batch, labelled=labelled, out=out, tick=tick)
    result(sent, as_json)
