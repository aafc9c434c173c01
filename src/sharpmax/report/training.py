"""The page of a training run: heads over its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from sharpmax.report import charts
from sharpmax.report.tables import Figure, Metric, Part, Report, Tables
from sharpmax.report.words import count, percent

_MAX_STEPS = 120  # columns of a heat map; of more steps, evenly spaced ones are shown

_OVER_STEPS = {
    "relative_entropy": ("Entropy of every head over training", "H / ln n", "mean H / ln n|.3f"),
    "max_logit": ("Largest logit of every head over training", "largest logit", "largest logit|.3g"),
}


def report(tables: Tables) -> Report:
    """The contents of a page of `AttentionObserver`."""
    setting, steps = tables["setting"], tables["training_heads"]
    first, last = (_summary(setting, step) for step in (steps[0], steps[-1]))
    where = f"step {count(steps[0]['step'])} → {count(steps[-1]['step'])}"
    metrics = [Metric(f"{value} → {last[name]}", name, where) for name, value in first.items()]
    caption = "A row for each head (layer.head), a column for each measured step."
    figures = [
        Figure(name.replace("_", "-"), title, caption, partial(_steps_chart, steps, name))
        for name, (title, *_) in _OVER_STEPS.items() if any(_values(step, name) for step in steps)
    ]  # fmt: skip
    part = Part("heads", "Heads over training", metrics, figures, [])
    return Report("training", [part])


def _values(step: Mapping[str, Any], name: str) -> list[float]:
    return [value for row in step[name] for value in row if value is not None]


def _summary(setting: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, str]:
    """The metrics of a step, formatted."""
    entropies, logits = _values(step, "relative_entropy"), _values(step, "max_logit")
    collapsed = sum(value < setting["collapsed"] for value in entropies)
    dispersed = sum(value > setting["dispersed"] for value in entropies)
    return {
        "mean entropy / ln n": f"{fmean(entropies):.3f}" if entropies else "not finite",
        "largest logit": f"{max(logits):.3g}" if logits else "not finite",
        "collapsed heads": percent(100.0 * collapsed / max(1, len(entropies))),
        "dispersed heads": percent(100.0 * dispersed / max(1, len(entropies))),
    }


def _steps_chart(steps: Sequence[Any], name: str) -> Any:
    _, colour, tip = _OVER_STEPS[name]
    width = len(str(max(map(len, steps[0][name])) - 1))
    even = np.linspace(0, len(steps) - 1, min(len(steps), _MAX_STEPS)).round().astype(int)
    shown = [steps[place] for place in even]
    rows = [
        {"x": step["step"], "y": f"{layer:02}.{head:0{width}}", "value": value}
        for step in shown
        for layer, values in enumerate(step[name])
        for head, value in enumerate(values)
        if value is not None
    ]
    values = [row["value"] for row in rows]
    domain = (0.0, 1.0) if name == "relative_entropy" else (min(values), max(max(values), min(values) + 1e-6))
    tips = charts.tooltip(y="head", x="step|,", value=tip)
    height = max(120, min(640, 17 * len({row["y"] for row in rows})))
    panel = charts.heat_panel("", rows, "step", "head", colour, domain=domain, tips=tips, height=height)
    return charts.figure(panel, columns=1)
