"""Metrics for Prometheus."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


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
        self.refused = Counter("requests_refused", "Batches refused because a queue was full.", **own)
        self.queue = Gauge("queue", "Batches waiting.", **own)
        self.hot = Gauge("streams_in_memory", "Streams whose state is in memory.", **own)
        self.seconds = Histogram("batch_seconds", "Time in the model.", buckets=SECONDS, **own)

    def count(self, report: dict[str, Any]) -> None:
        self.batches.inc()
        self.images.inc(report["images"])
        self.unlearnt.inc(not report["adapted"])
        self.abstained.inc(report["abstained"])
        self.alarms.inc(bool(report["alarm"]))
        self.seconds.observe(report["seconds"])

    def text(self) -> bytes:
        return generate_latest(self.registry)
