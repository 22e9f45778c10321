"""A service made from a model file and some choices, and run until it is told to stop."""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import api, extensions, methods
from ..data.store import digest, digest_file
from ..methods.registry import settings
from ..training import load
from ..training.trainer import recipe_of, side_for
from .app import create_app
from .journal import Journal
from .limits import Limits
from .metrics import Metrics
from .sessions import Engine, Served, check_memory
from .tokens import Tokens


@dataclass(frozen=True, kw_only=True)
class Service:
    """model: a file of `safer train source`. side: pixels of its images (default: as trained). abstain: suspicion above
    which an image is flagged. seed: for replays; without it every stream draws a secret one. seconds: allowed for a
    batch, before learning is left out."""

    model: Path
    folder: Path
    method: str = "tent"
    predictor: str = "safer"
    options: Mapping[str, Any] = field(default_factory=dict)
    predictor_options: Mapping[str, Any] = field(default_factory=dict)
    side: int | None = None
    device: str = "cpu"
    precision: str = "float32"
    abstain: float = 0.5
    seed: int | None = None
    seconds: float | None = None
    limits: Limits = field(default_factory=Limits)

    def build(self) -> methods.Method:
        """The method as every stream starts with it."""
        classifier = load(self.model)
        classifier.accelerate(precision=self.precision)
        return api.build(
            classifier, self.method, self.predictor, options=self.options, predictor_options=self.predictor_options,
            seed=0, device=self.device,
        )  # fmt: skip

    def engine(self) -> Engine:
        api.check_names(self.method, self.predictor)
        side, method = side_for(self.model, self.side), self.build()
        check_memory(method, self.limits)
        decided_by = {
            "model": digest_file(self.model), "method": self.method,
            "options": settings(api.split_name(self.method)[0], self.options),
            "predictor": self.predictor, "predictor_options": method.predictor.settings, "precision": self.precision,
            "side": side,
        }  # fmt: skip
        served = Served(
            version=digest(decided_by | extensions.code(decided_by)),
            method=self.method,
            predictor=self.predictor,
            classes=tuple(recipe_of(self.model)["classes"]),
            side=side,
            views=1 + int(method.predictor.settings.get("views", 0)),
            abstain=self.abstain,
        )
        journal = Journal(self.folder, served.version)
        return Engine(
            method, served, journal, limits=self.limits, metrics=Metrics(), seed=self.seed, seconds=self.seconds
        )


def check_address(host: str, tokens: Tokens) -> None:
    """Without tokens only this machine may ask."""
    try:
        inside = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        inside = False
    if not inside and not tokens:
        raise ValueError(f"host {host} can be reached from outside and no tokens are given; expected --tokens FILE")


def serve(
    service: Service,
    *,
    host: str = "127.0.0.1",
    port: int = 8017,
    tokens: Tokens | None = None,
    ready: Callable[[str], object] = lambda address: None,
) -> None:
    """Answer until SIGTERM or Ctrl-C; then finish the batch in hand. ready: called with the address once it listens."""
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Being told to stop is no failure: unlike uvicorn's own, the signal is not raised again at the end."""
            before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            engine.refuse()  # first, so that nobody waits for a batch that will not be taken up
            await super().shutdown(sockets)

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                ready(f"http://{host}:{self.servers[0].sockets[0].getsockname()[1]}")

    tokens = tokens or Tokens()
    check_address(host, tokens)
    engine = service.engine()
    app = create_app(engine, tokens)
    config = uvicorn.Config(
        app, host=host, port=port, log_level="warning", server_header=False, timeout_graceful_shutdown=10,
        timeout_keep_alive=30, limit_concurrency=2048, http="h11", h11_max_incomplete_event_size=2**16,
    )  # fmt: skip
    Server(config).run()
