"""Metrics for Prometheus."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Metrics:
    """The metrics of one service, in a registry of their own, so that services in one process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.batches = self._counter("batches", "Batches answered.")
        self.images = self._counter("images", "Images answered.")
        self.unlearnt = self._counter("batches_not_learnt_from", "Batches answered without learning.")
        self.abstained = self._counter(
            "images_abstained", "Images flagged as suspicious, or answered with non-finite numbers."
        )
        self.alarms = self._counter("alarms", "Batches after which a guard acted.")
        self.refused = self._counter("requests_refused", "Batches refused because a queue was full.")
        self.queue = Gauge("safer_tta_queue", "Batches waiting.", registry=self.registry)
        self.hot = Gauge("safer_tta_streams_in_memory", "Streams whose state is in memory.", registry=self.registry)
        self.seconds = Histogram(
            "safer_tta_batch_seconds", "Time in the model.", buckets=SECONDS, registry=self.registry
        )

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(f"safer_tta_{name}", help, registry=self.registry)

    def count(self, report: dict[str, Any]) -> None:
        """Count a batch by its report."""
        self.batches.inc()
        self.images.inc(report["images"])
        self.unlearnt.inc(not report["adapted"])
        self.abstained.inc(report["abstained"])
        self.alarms.inc(bool(report["alarm"]))
        self.seconds.observe(report["seconds"])

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self.registry)
