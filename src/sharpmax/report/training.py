"""The page of `AttentionObserver`: entropy and largest logit of every head over the steps of a training."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from sharpmax.report import charts
from sharpmax.report.tables import Cell, Figure, Metric, Part, Report, Table, Tables, cell_of, header
from sharpmax.report.words import count, plural

_MOST_STEPS = 120  # columns of a heat map; of more steps, evenly spaced ones are shown

_SHOWN = {
    "relative_entropy": ("Entropy of every head over training", "H / ln n", "mean H / ln n|.3f"),
    "max_logit": ("Largest logit of every head over training", "largest logit", "largest logit|.3g"),
}


def matches(tables: Tables) -> bool:
    """Whether these are tables of an `AttentionObserver`."""
    return "training_heads" in tables


def report(tables: Tables) -> Report:
    """The page's contents."""
    setting = tables["setting"]
    part = Part("heads", "Heads over training", metrics(tables), list(_figures(tables)), [_table(tables)])
    method = [
        f"Every {count(setting['every'])}th step was measured: for every head the means of entropy, entropy / ln n and "
        "top weight over all rows of two keys or more, and the largest logit that its softmax got. A head counts as "
        f"collapsed below H / ln n = {setting['collapsed']:g} and as dispersed above {setting['dispersed']:g}."
    ]
    return Report("training", [_headline(tables)], [part], [], method)


def _values(step: dict[str, Any], name: str) -> list[float]:
    return [value for row in step[name] for value in row if value is not None]


def _mean(step: dict[str, Any], name: str) -> float | None:
    values = _values(step, name)
    return sum(values) / len(values) if values else None


def _share(tables: Tables, step: dict[str, Any], which: str) -> float:
    limit, values = tables["setting"][which], _values(step, "relative_entropy")
    outside = [value < limit if which == "collapsed" else value > limit for value in values]
    return 100.0 * float(sum(outside)) / max(1, len(outside))


def _summary(tables: Tables, step: dict[str, Any]) -> list[tuple[str, float | None, str]]:
    return [
        ("mean entropy / ln n", _mean(step, "relative_entropy"), ".3f"),
        ("mean entropy (nats)", _mean(step, "entropy"), ".3f"),
        ("mean top weight", _mean(step, "top_weight"), ".3f"),
        ("largest logit", max(_values(step, "max_logit"), default=None), ".3g"),
        ("collapsed heads (%)", _share(tables, step, "collapsed"), ".1f"),
        ("dispersed heads (%)", _share(tables, step, "dispersed"), ".1f"),
    ]


def _ends(tables: Tables) -> list[tuple[str, str]]:
    """Each number at the first and at the last measured step, in words."""
    steps = tables["training_heads"]
    found = []
    for first, last in zip(_summary(tables, steps[0]), _summary(tables, steps[-1]), strict=True):
        values = ["not finite" if value is None else format(value, form) for _, value, form in (first, last)]
        found.append((first[0], " → ".join(values)))
    return found


def _headline(tables: Tables) -> str:
    ends, steps = dict(_ends(tables)), tables["training_heads"]
    return (
        f"Steps {count(steps[0]['step'])} to {count(steps[-1]['step'])}: entropy / ln n "
        f"{ends['mean entropy / ln n']}, largest logit {ends['largest logit']}, collapsed heads "
        f"{ends['collapsed heads (%)']}%, dispersed heads {ends['dispersed heads (%)']}%."
    )


def metrics(tables: Tables) -> list[Metric]:
    """First and last measured step."""
    steps = tables["training_heads"]
    detail = f"step {count(steps[0]['step'])} → {count(steps[-1]['step'])}"
    return [Metric(value, name, detail) for name, value in _ends(tables)]


def _table(tables: Tables) -> Table:
    steps = _thinned(tables["training_heads"], 20)
    rows = [
        [Cell(count(step["step"])), *(cell_of(value, partial(_formatted, form)) for _, value, form in numbers)]
        for step in steps
        for numbers in [_summary(tables, step)]
    ]
    heads = plural(sum(tables["setting"]["heads"]), "head")
    names = [name for name, _, _ in _summary(tables, steps[0])]
    return Table(
        "Measured steps", f"Means over {heads}; the largest logit is that of any.", header("step", *names), rows
    )


def _formatted(form: str, value: float) -> str:
    return format(value, form)


def _thinned(steps: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    if len(steps) <= most:
        return steps
    return [steps[round(place * (len(steps) - 1) / (most - 1))] for place in range(most)]


def _figures(tables: Tables) -> Iterator[Figure]:
    for name, (title, colour, tip) in _SHOWN.items():
        if any(_values(step, name) for step in tables["training_heads"]):
            yield Figure(
                name.replace("_", "-"),
                title,
                "A row for each head (layer.head), a column for each measured step.",
                f"Heat map: {colour} of each head against the training step.",
                partial(_heat, tables, name, colour, tip),
            )


def _heat(tables: Tables, name: str, colour: str, tip: str) -> Any:
    steps = _thinned(tables["training_heads"], _MOST_STEPS)
    width = len(str(max(map(len, steps[0][name])) - 1))
    rows = [
        {"x": step["step"], "y": f"{layer:02}.{head:0{width}}", "value": value}
        for step in steps
        for layer, values in enumerate(step[name])
        for head, value in enumerate(values)
        if value is not None
    ]
    values = [row["value"] for row in rows]
    domain = (0.0, 1.0) if name == "relative_entropy" else (min(values), max(max(values), min(values) + 1e-6))
    tips = charts.tooltip(y="head", x="step|,", value=tip)
    high = len({row["y"] for row in rows})
    panel = charts.heat_panel(
        "", rows, "step", "head", colour, domain=domain, tips=tips, height=max(120, min(640, 17 * high))
    )
    return charts.figure(panel, columns=1)
