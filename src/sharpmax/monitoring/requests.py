"""Monitored requests, their reports, and Prometheus metrics."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from sharpmax.errors import reject_type
from sharpmax.lazy import require
from sharpmax.monitoring.passes import Run

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_HEADS_LOGGED = 8


@dataclass(frozen=True)
class Head:
    """A head whose entropy exceeds the threshold that it has learned for itself."""

    sequence: int
    layer: int
    head: int
    entropy: float
    threshold: float
    excess: float
    """How far above the threshold, in standard deviations of the reference."""


@dataclass(frozen=True)
class Verdict:
    """The outcome for one sequence of a request."""

    score: float | None
    """How far its attention was from the reference, in standard deviations; None where there is no score."""

    threshold: float
    tokens: int
    """Tokens that its last row could see."""

    rows: int
    """How many of its rows were measured."""

    why: str | None = None
    """Why it has no score."""

    @property
    def alarm(self) -> bool:
        """Whether the score exceeds its threshold."""
        return self.score is not None and self.score > self.threshold


@dataclass(frozen=True)
class Report:
    """The outcome of a request."""

    sequences: tuple[Verdict, ...]
    heads: tuple[Head, ...] = ()
    """Heads above their own thresholds, worst first."""

    why: str | None = None
    """Why there is no score, if any sequence has none."""

    @property
    def scores(self) -> list[float | None]:
        """The score of each sequence."""
        return [one.score for one in self.sequences]

    @property
    def alarm(self) -> bool:
        """Whether a sequence is above its threshold."""
        return any(one.alarm for one in self.sequences)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values, rounded, with the worst heads alone."""
        return {
            "alarm": self.alarm,
            "why": self.why,
            "sequences": [_short(one) | {"alarm": one.alarm} for one in self.sequences],
            "heads": [_short(one) for one in self.heads[:_HEADS_LOGGED]],
            "heads_above": len(self.heads),
        }

    def to_line(self, **more: Any) -> str:
        """The report as one line of JSON."""
        return json.dumps({**more, **self.to_dict()}, ensure_ascii=False)


def _short(one: Verdict | Head) -> dict[str, Any]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(one).items()}


class Request:
    """A request that is being answered or has been; its properties are about the rows measured so far."""

    def __init__(self, judge: Callable[[Request], Report]) -> None:
        self.runs: list[Run] = []
        self.problem: str | None = None
        """What went wrong inside the monitor, if anything did."""

        self._judge = judge
        self._report: Report | None = None

    @property
    def report(self) -> Report:
        """The report about the rows so far."""
        return self._judge(self) if self._report is None else self._report

    def finish(self) -> Report:
        """The report, which stays as it is from now on; the rows it was made from are let go."""
        self._report = self.report
        self.runs.clear()
        return self._report

    @property
    def scores(self) -> list[float | None]:
        """The score of each sequence, in the order of the batch; None where there is none."""
        return self.report.scores

    @property
    def alarm(self) -> bool:
        """Whether a sequence is less focused than the reference allows."""
        return self.report.alarm

    @property
    def heads(self) -> tuple[Head, ...]:
        """Heads above their own thresholds, worst first."""
        return self.report.heads

    @property
    def why(self) -> str | None:
        """Why there is no score, if there is none."""
        return self.report.why


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
