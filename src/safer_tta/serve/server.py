"""A service made from a model file and some choices; it runs until it is told to stop."""

import asyncio
import contextlib
import dataclasses
import functools
import ipaddress
import math
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import uvicorn

from .. import api, extensions, predictors
from .._internal.checks import share
from .._internal.defaults import METHOD, PREDICTOR
from ..data.store import digest, digest_file
from ..errors import InvalidValueError
from ..methods import Method
from ..models import load_classifier
from ..models.card import read_card
from ..training.definitions import definition_of
from .answers import Served
from .app import create_app
from .connections import Connection, Connections, fit
from .engine import Engine
from .journal import Journal
from .lender import Model
from .limits import Limits
from .shadow import check_alike
from .sizes import check_memory
from .tokens import Tokens
from .webhook import Webhook

ABSTAIN = 0.5  # above which suspicion an image is more probably attacked than not


@dataclass(frozen=True, kw_only=True)
class Service:
    """What to serve, and how. `safer_tta.adapt` explains method, predictor, norm, options and precision."""

    model: Path  # a file that `safer pack` or `safer train` wrote
    folder: Path  # where streams are kept
    shadow: Path | None = None  # the file of another model, which sees every batch too; the folder says which is live
    method: str = METHOD
    predictor: str | Mapping[str, Any] = PREDICTOR
    norm: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # of the method
    side: int | None = None  # height and width of the model's images; by default those that its file says
    device: str = "cpu"
    precision: str = "float32"
    abstain: float | None = None  # the suspicion above which an image is flagged; 0.5 if the predictor estimates it
    seed: int | None = None  # of every stream's draws, for replays; by default every stream draws a secret one
    seconds: float | None = None  # allowed per batch; a stream that is behind is answered without learning
    limits: Limits = field(default_factory=Limits)
    webhook: Webhook | None = None  # where alarms that are raised or cleared are sent
    code: tuple[str, ...] = ()  # your own Python files that this service may run, such as the one that builds the model

    def build(self) -> Method:
        """Return the method as every stream starts with it."""
        extensions.load(self.code)
        classifier = load_classifier(self.model)
        classifier.accelerate(precision=self.precision)
        method = api.build(classifier, self.method, self.predictor, norm=self.norm, seed=0, options=self.options)
        return method.to(self.device)  # afterwards, so that the optimiser is one for that device

    def engine(self) -> Engine:
        """Return a running engine."""
        models = [self.load()]
        if self.shadow is not None:
            models.append(dataclasses.replace(self, model=self.shadow, shadow=None).load())
            check_alike(*(model.served for model in models))
        for model in models:
            check_memory(model.method, self.limits.memory_bytes // len(models))
        versions = [model.served.version for model in models]
        journal = Journal(self.folder, *versions, files={model.served.version: model.file for model in models})
        return Engine(models, journal, self.limits, self.seed, self.seconds, self.webhook)

    def load(self) -> Model:
        """Return the model, ready to serve."""
        api.check_names(self.method, self.predictor, self.norm)
        card, method = read_card(self.model), self.build()
        side = self.side or card.side
        served = Served(
            version=self._version(method, side),
            method=self.method,
            predictor=self._predictor_name,
            norm=self.norm,
            classes=card.classes,
            side=side,
            resize=card.resize,
            views=1 + int(method.predictor.settings.get("views", 0)),
            abstain=self._threshold(method),
        )
        return Model(method, served, self.model.name)

    @property
    def _predictor_name(self) -> str:
        return predictors.parse(self.predictor)[0]

    def _threshold(self, method: Method) -> float | None:
        if method.predictor.estimates_suspicion:
            threshold = ABSTAIN if self.abstain is None else self.abstain
            share(abstain=threshold)
            return threshold
        if self.abstain is not None:
            raise InvalidValueError(
                f"abstain is {self.abstain} and the predictor {self._predictor_name!r} estimates no suspicion; leave "
                "abstain out, or serve a predictor that does, such as 'safer-g'"
            )
        return None

    def _version(self, method: Method, side: int) -> str:
        predictor = method.predictor
        decided_by = {
            "model": digest_file(self.model), **_code_of(self.model), "method": self.method,
            "options": method.settings, "norm": self.norm,
            "predictor": self._predictor_name, "predictor_options": predictor.settings, "precision": self.precision,
            "side": side, "versions": {"method": method.version, "predictor": predictor.version, **predictor.versions},
        }  # fmt: skip
        return digest(decided_by | extensions.code(decided_by))


def _code_of(model: Path) -> dict[str, Any]:
    """Return the hash of the user's own file that builds a model, if there is one."""
    return {name: value for name, value in definition_of(model).items() if name == "code"}


def check_address(host: str, tokens: Tokens) -> None:
    """Refuse addresses beyond this machine if there are no tokens."""
    try:
        inside = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        inside = False
    if not inside and not tokens:
        problem = f"host {host} can be reached from other machines and no tokens are given"
        raise InvalidValueError(f"{problem}; expected --tokens FILE")


def serve(
    service: Service,
    *,
    host: str = "127.0.0.1",
    port: int = 8017,
    tokens: Tokens | None = None,
    ready: Callable[[str], object] = lambda address: None,
) -> None:
    """Answer requests until SIGTERM or Ctrl-C. `ready` is called with the URL once the service listens."""
    tokens = tokens or Tokens()
    check_address(host, tokens)
    service = dataclasses.replace(service, limits=fit(service.limits))
    engine = service.engine()
    protocol = cast(type[asyncio.Protocol], functools.partial(Connection, Connections(service.limits)))
    config = uvicorn.Config(
        create_app(engine, tokens), host=host, port=port, log_level="warning", log_config=None, access_log=False,
        server_header=False, timeout_graceful_shutdown=10, timeout_keep_alive=math.ceil(service.limits.idle_s),
        http=protocol, ws="none", h11_max_incomplete_event_size=2**16,
    )  # fmt: skip
    _Server(config, engine, tokens, ready).run()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, engine: Engine, tokens: Tokens, ready: Callable[[str], object]) -> None:
        super().__init__(config)
        self.engine, self.tokens, self.ready = engine, tokens, ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop without an error: unlike in uvicorn, the signal is not raised again at the end."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        if self.tokens.path is not None and hasattr(signal, "SIGHUP"):
            before[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda *_: self.tokens.refresh())
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.engine.refuse()  # first, so that no request waits for a batch that will not be started
        await super().shutdown(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.ready(f"http://{self.config.host}:{self.servers[0].sockets[0].getsockname()[1]}")
