"""What the monitor says, as Prometheus metrics."""

from __future__ import annotations

import sys

import pytest
import torch

from sharpmax.errors import ArgumentTypeError, MissingExtraError
from sharpmax.integrations.transformers.interface import installed
from tests.monitoring.monitored import model, monitored

prometheus = pytest.importorskip("prometheus_client", reason="needs the extra monitor")


def test_requests_scores_thresholds_and_heads_are_counted() -> None:
    one, registry = model(), prometheus.CollectorRegistry()
    with monitored(one, metrics=registry, false_alarms=0.4) as monitor, torch.no_grad():

        def value(name: str, **labels: str) -> float | None:
            found: float | None = registry.get_sample_value(
                f"sharpmax_monitor_{name}", {"model": "LlamaForCausalLM", **labels}
            )
            return found

        assert value("requests_total", outcome="alarm") == 0.0
        found = []
        for number in range(6):
            with monitor.request() as r:
                one(torch.randint(3, 97, (2, 5 + number)))
            found.append(r)
        with monitor.request():
            pass
        alarms = sum(r.alarm for r in found)
        assert 0 < alarms < 6
        assert value("requests_total", outcome="alarm") == alarms
        assert value("requests_total", outcome="ok") == 6 - alarms
        assert value("requests_total", outcome="no_score") == 1
        assert value("score_count") == 12
        for limit in (0.0, 1.0):
            below = sum(score is not None and score <= limit for r in found for score in r.scores)
            assert value("score_bucket", le=str(limit)) == below > 0
        assert value("threshold", rows="prompt") == monitor.thresholds["prompt"]
        for layer in (0, 1):
            above = sum(head.layer == layer for r in found for head in r.heads)
            assert value("heads_above_total", layer=str(layer)) == above > 0


def test_monitors_share_a_registry_and_mistakes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    one, registry = model(), prometheus.CollectorRegistry()
    for _ in range(2):
        with monitored(one, metrics=registry), torch.no_grad():
            one(torch.tensor([[5, 6]]))
    assert registry.get_sample_value("sharpmax_monitor_score_count", {"model": "LlamaForCausalLM"}) == 2.0
    with pytest.raises(ArgumentTypeError, match="metrics"):
        monitored(one, metrics="yes")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*'prometheus-client>="):
        monitored(one, metrics=True)
    assert installed(one) is None
    monitored(one).close()
