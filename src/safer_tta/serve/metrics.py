"""Metrics for Prometheus."""

import functools
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.registry import Collector

from .. import __version__
from .answers import Served
from .record import Record

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
LONG = (*SECONDS, 30, 60, 120)  # requests and queues
OWNERS = "safer_tta_owner_"  # how metrics begin that name owners


class Metrics:
    """The metrics of one service, in a registry of their own, so that services in one process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"namespace": "safer_tta", "registry": self.registry}
        flagged = "Images flagged as suspicious, or answered with non-finite numbers."
        self.batches = Counter("batches", "Batches answered.", **own)
        self.images = Counter("images", "Images answered.", **own)
        self.unlearnt = Counter("batches_not_learnt_from", "Batches answered without learning.", **own)
        self.abstained = Counter("images_abstained", flagged, **own)
        self.alarms = Counter("alarms", "Batches after which a guard acted.", **own)
        self.alarms_active = Gauge("alarms_active", "Streams with this alarm.", ("kind",), **own)
        self.alarms_raised = Counter("alarms_raised", "Alarms that were raised.", ("kind",), **own)
        self.webhook = Counter("webhook_messages", "Messages to the webhook.", ("result",), **own)
        for result in ("sent", "failed"):
            self.webhook.labels(result)  # known from the start, with 0
        self.build = Info("build", "What is served.", **own)
        self.queue = Gauge("queue", "Batches waiting.", **own)
        self.hot = Gauge("streams_in_memory", "Streams whose state is in memory.", **own)
        self.damaged = Gauge("streams_damaged", "Streams whose stored state is damaged.", **own)
        self.seconds = Histogram("batch_seconds", "Time in the model.", buckets=SECONDS, **own)
        self._add_requests(own)
        self._add_shadow(own)
        self._add_owners(own)
        ProcessCollector(registry=self.registry)

    def _add_requests(self, own: dict[str, Any]) -> None:
        asked = ("method", "route")
        why = "Requests refused for lack of access, room or time."
        self.refused = Counter("requests_refused", why, ("status", "reason"), **own)
        self.requests = Counter("http_requests", "Requests answered.", (*asked, "status"), **own)
        self.duration = Histogram("http_request_seconds", "Time to the end of an answer.", asked, buckets=LONG, **own)
        self.in_flight = Gauge("http_requests_in_flight", "Requests that are being answered, feeds included.", **own)
        self.received = Counter("http_request_bytes", "Bytes of bodies that arrived.", **own)
        self.sent = Counter("http_response_bytes", "Bytes of bodies that were sent.", **own)
        parts = {
            "queue": "Time that work for a stream waits for the model.",
            "decode": "Time from a whole body to its decoded images, waiting for a free thread included.",
            "commit": "Time to write a batch to disk.",
        }
        self.parts = {name: Histogram(f"{name}_seconds", says, buckets=LONG, **own) for name, says in parts.items()}

    def _add_shadow(self, own: dict[str, Any]) -> None:
        self.shadow_batches = Counter("shadow_batches", "Batches for the shadow of a roll-out.", ("result",), **own)
        for result in ("answered", "missed", "failed"):
            self.shadow_batches.labels(result)
        self.shadow_images = Counter("shadow_images", "Images that the shadow answered.", **own)
        same = "Images to which the shadow gave the class that was answered."
        self.shadow_same = Counter("shadow_images_same", same, **own)

    def _add_owners(self, own: dict[str, Any]) -> None:
        self.owner_batches = Counter("owner_batches", "Batches answered, by owner.", ("owner",), **own)
        self.owner_images = Counter("owner_images", "Images answered, by owner.", ("owner",), **own)
        self.owner_refused = Counter("owner_requests_refused", "Requests refused, by owner.", ("owner",), **own)

    def tell_build(self, served: Served) -> None:
        """Say what is served."""
        built = {"method": served.method, "predictor": served.predictor, "model": served.version}
        self.build.info({"version": __version__, **built})

    def watch(self, folder: Path, ready: Callable[[], bool]) -> None:
        """Measure a service's folder and readiness whenever somebody asks."""
        own: dict[str, Any] = {"namespace": "safer_tta", "registry": self.registry}
        Gauge("ready", "1 if batches are accepted, else 0.", **own).set_function(ready)
        Gauge("journal_bytes", "Size of the files of all streams.", **own).set_function(lambda: _size(folder))
        disk = {"disk_free_bytes": ("free", "Free bytes of the folder's disk."), "disk_bytes": ("total", "Its size.")}
        for name, (figure, says) in disk.items():
            Gauge(name, says, **own).set_function(functools.partial(_disk, folder, figure))

    def count(self, report: dict[str, Any], owner: str) -> None:
        self.batches.inc()
        self.images.inc(report["images"])
        self.unlearnt.inc(not report["adapted"])
        self.abstained.inc(report["abstained"])
        self.alarms.inc(bool(report["alarm"]))
        self.seconds.observe(report["seconds"])
        self.owner_batches.labels(owner).inc()
        self.owner_images.labels(owner).inc(report["images"])

    def count_request(self, record: Record, seconds: float) -> None:
        """Count an answered request. Labels come from short lists, so what clients send cannot add metrics."""
        self.requests.labels(record.method, record.route, record.status).inc()
        self.duration.labels(record.method, record.route).observe(seconds)
        self.received.inc(record.received)
        self.sent.inc(record.sent)
        for name, histogram in self.parts.items():
            if name in record.seconds:
                histogram.observe(record.seconds[name])
        if record.reason:
            self.refused.labels(record.status, record.reason).inc()
            if record.owner:
                self.owner_refused.labels(record.owner).inc()

    def text(self, *, owners: bool = True) -> bytes:
        """Return all metrics, with or without those that name owners."""
        return generate_latest(self.registry if owners else _WithoutOwners(self.registry))


class _WithoutOwners(Collector):
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

    def collect(self) -> Any:
        return (metric for metric in self.registry.collect() if not metric.name.startswith(OWNERS))


def _disk(folder: Path, figure: str) -> float:
    try:
        return float(getattr(shutil.disk_usage(folder), figure))
    except OSError:  # the folder is gone; the other metrics still count
        return math.nan


def _size(folder: Path) -> float:
    try:
        return sum(entry.stat().st_size for entry in os.scandir(folder) if entry.is_file())
    except OSError:
        return math.nan
