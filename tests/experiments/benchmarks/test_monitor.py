"""The benchmark of the monitor: its measurements in one pass, its tables, its cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import sharpmax as sm
from sharpmax.experiments.benchmarks.monitor import TaskPlan, answered, monitor_tables, replies_of
from sharpmax.integrations.transformers.interface import installed
from sharpmax.models.scoring import Reply, judge
from sharpmax.monitoring.monitor import reference_rows
from sharpmax.monitoring.scores import Report
from tests.experiments.evaluate import tiny

TASK_PLANS = (TaskPlan(tiny.LETTERS, (4, 8, 16), 8), TaskPlan(replace(tiny.LETTERS, name="other"), (4, 8), 4))


def replies(count: int = 6) -> list[Reply]:
    return [one for size in (4, 8) for one in replies_of(tiny.language(), tiny.LETTERS, size, count, 0)]


def test_one_pass_measures_what_separate_passes_do() -> None:
    """Compared with `judge`, the logits of each prompt alone, and the rows that a monitor sees."""
    model, asked = tiny.model(), replies()
    asked.sort(key=lambda reply: len(reply.ids))  # the order of batches
    found = answered(model, asked)
    assert found["right"].tolist() == [one.right for one in judge(model, asked)]
    rows, _ = reference_rows(model, [reply.ids[: reply.start] for reply in asked])
    assert torch.allclose(torch.from_numpy(found["rows"]), rows[:, 0], atol=1e-4)
    assert found["length"].tolist() == [reply.start for reply in asked]
    for place, reply in enumerate(asked):
        with torch.no_grad():
            logits = model(torch.tensor([reply.ids[: reply.start]])).logits[0, -1].double()
        p = logits.softmax(0)
        assert found["confidence"][place] == pytest.approx(-float(p.max()), abs=1e-5)
        assert found["entropy"][place] == pytest.approx(-float((p * p.log()).sum()), abs=1e-4)
        assert found["energy"][place] == pytest.approx(-float(logits.logsumexp(0)), abs=1e-4)
    assert installed(model) is None
    assert not model._forward_hooks


def test_a_monitor_raises_the_alarms_of_the_table() -> None:
    """With the same reference and evaluation prompts."""
    language = tiny.language()
    found = monitor_tables(language, TASK_PLANS[:1], limit=12, false_alarms=0.3, rounds=1, context=40)

    def read(seed: int) -> list[list[tuple[int, ...]]]:
        asked = [replies_of(language, tiny.LETTERS, size, 24, seed) for size in (4, 8)]
        return [[one.ids[: one.start] for one in part] for part in asked]

    reports: list[Report] = []
    # The benchmark learns from rows in order of length.
    known = [ids for part in read(1000) for ids in sorted(part, key=len)]
    with sm.monitor(language.model, known, false_alarms=0.3, generated=0, callback=reports.append), torch.no_grad():
        for part in read(3000):
            for ids in part:
                language.model(torch.tensor([ids]))
    alarms = [report.alarm for report in reports]
    assert found["false_alarms"]["pooled"]["mean"] == pytest.approx(100 * sum(alarms) / len(alarms))
    assert 0 < sum(alarms) < len(alarms)
