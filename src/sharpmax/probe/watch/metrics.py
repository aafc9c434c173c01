"""What a monitor says, as Prometheus metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from sharpmax.errors import reject_type
from sharpmax.lazy import require
from sharpmax.probe.watch.requests import Report

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["Metrics", "metrics_of"]

_BUCKETS = (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)


class Metrics:
    """The metrics of all monitors that share a registry; the label `model` tells them apart."""

    def __init__(self, registry: CollectorRegistry) -> None:
        client = require("prometheus_client", "monitor", "metrics of a monitor")

        def metric(kind: str, name: str, text: str, *labels: str, **options: Any) -> Any:
            return getattr(client, kind)(f"sharpmax_monitor_{name}", text, labels, registry=registry, **options)

        self._requests = metric("Counter", "requests", "Requests, by outcome: ok, alarm, no_score", "model", "outcome")
        self._scores = metric("Histogram", "score", "Scores of sequences", "model", buckets=_BUCKETS)
        self._threshold = metric("Gauge", "threshold", "Score above which there is an alarm", "model", "rows")
        self._heads = metric("Counter", "heads_above", "Heads above their own thresholds", "model", "layer")

    def watch(self, model: str, thresholds: dict[str, float]) -> None:
        """Show the thresholds of a monitor, and its counts from zero on."""
        for rows, threshold in thresholds.items():
            self._threshold.labels(model, rows).set(threshold)
        for outcome in ("ok", "alarm", "no_score"):
            self._requests.labels(model, outcome)

    def add(self, model: str, report: Report) -> None:
        """Count a request."""
        known = [score for score in report.scores if score is not None]
        outcome = "alarm" if report.alarm else "ok" if known else "no_score"
        self._requests.labels(model, outcome).inc()
        for score in known:
            self._scores.labels(model).observe(score)
        for head in report.heads:
            self._heads.labels(model, str(head.layer)).inc()


_OF_REGISTRY: WeakKeyDictionary[Any, Metrics] = WeakKeyDictionary()


def metrics_of(given: CollectorRegistry | bool | None) -> Metrics | None:
    """The metrics in a registry (True: the client's own), made once for each; None for none."""
    if given is None or given is False:
        return None
    client = require("prometheus_client", "monitor", "metrics of a monitor")
    registry = client.REGISTRY if given is True else given
    if not isinstance(registry, client.CollectorRegistry):
        reject_type("metrics", type(registry).__name__, "True, None or a prometheus_client.CollectorRegistry")
    if registry not in _OF_REGISTRY:
        _OF_REGISTRY[registry] = Metrics(registry)
    return _OF_REGISTRY[registry]
