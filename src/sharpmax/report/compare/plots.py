"""The figures of a league: accuracy, entropy and top weight by size, and method by method what is lost to what."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sharpmax.report.axes import size_axis
from sharpmax.report.compare.ends import apart
from sharpmax.report.compare.facts import (
    SOFTMAX,
    cell,
    gap,
    highlighted,
    largest,
    leader,
    level_with,
    loss_of,
    methods,
    sizes_of,
)
from sharpmax.report.compare.looks import looks_of
from sharpmax.report.looks import BLACK, BLUE, CIRCLE, GREEN, SOFT, UP, VERMILLION, Colour, Look, Stroke
from sharpmax.report.plot import Axis, Mark, Panel, Plot, Series
from sharpmax.report.tables import Tables
from sharpmax.report.words import count, joined, nats, percent, plural, share

__all__ = ["accuracy", "causes", "note", "percent_axis", "sharpness", "sizes_axis", "training_mark"]

_TOGETHER = 6
"""So many lines have room in one box of hover text."""

_LEADER = 0.05
"""Room for the lines that lead to the names of methods, as a share of the axis."""

_NAME = 18
"""Letters of a name beside a curve."""

_KINDS: tuple[tuple[str, str, Colour, Stroke], ...] = (
    ("accuracy", "accuracy", BLACK, "solid"),
    ("hard", "if attention were hard", VERMILLION, "solid"),
    ("ranking", "right item ranked first", BLUE, "dash"),
    ("close", "ranked first in near-ties", GREEN, "dot"),
)


def accuracy(tables: Tables) -> Plot:
    """Accuracy against size, a line for each method with its name beside it."""
    looks, x = looks_of(tables), sizes_axis(tables)
    ends = {method: cell(tables, "accuracy", method, largest(tables))["mean"] for method in looks}
    last = float(largest(tables))
    end = x.limits[1] * 2.0 ** (_LEADER * _octaves(x))
    placed = apart(ends, 0.0, 100.0, most=len(looks))
    lines = [
        *_lines(tables, "accuracy", percent),
        *(
            Series(
                method, _thin(look), [last, end], [ends[method], placed[method]], "",
                marker=None, arm=method, end=method if len(method) <= _NAME else f"{method[: _NAME - 1]}…",
            )
            for method, look in looks.items()
        ),
    ]  # fmt: skip
    y = percent_axis("accuracy (%)")
    wide = dataclasses.replace(x, limits=(x.limits[0], end))
    listed = [f"{method} {percent(value)}" for method, value in sorted(ends.items(), key=lambda one: -one[1])]
    return Plot(
        _title(tables),
        note(tables),
        f"{_stand_out(tables)}{_bars(tables)}Beyond the dotted line are sizes that no method has seen in training.",
        f"Accuracy in percent against size, a line for each method; at {_n(tables)}: {joined(listed)}.",
        [Panel(wide, y, lines, training_mark(tables, x), together=len(looks) <= _TOGETHER)],
    )


def sharpness(tables: Tables) -> Plot:
    """Entropy and the largest weight of attention against size."""
    x = sizes_axis(tables)
    marks, together = training_mark(tables, x), len(methods(tables)) <= _TOGETHER
    entropy, top = _lines(tables, "entropy", lambda value: f"{nats(value)} nat"), _lines(tables, "top_weight", percent)
    known = [(float(n), math.log(float(n))) for n in sizes_of(tables)]
    even = Look("ln n: all items alike", SOFT, width=0.9, layer=1.2)
    most = max([known[-1][1], *(value for line in entropy for value in line.y)])
    words = "ln n: %{y:.2f} nat" if together else ""
    entropy.append(
        Series(even.label, even, [n for n, _ in known], [v for _, v in known], words, None, None, "dot", None)
    )
    last = largest(tables)
    ends = [
        f"{method} {nats(cell(tables, 'entropy', method, last)['mean'])} nat and "
        f"{percent(cell(tables, 'top_weight', method, last)['mean'])}"
        for method in highlighted(tables)
        if cell(tables, "entropy", method, last)["mean"] is not None
    ]
    return Plot(
        "Does attention stay sharp? Entropy, and the largest weight",
        note(tables),
        f"{_stand_out(tables)}Means over the examples and heads of the last layer. A method disperses where its "
        "entropy climbs with ln n and its largest weight falls. A method that stays sharp may still be wrong: see the "
        "next figure.",
        f"Entropy in nats and the largest weight in percent against size, a line for each method; at {_n(tables)}: "
        f"{joined(ends)}.",
        [
            Panel(x, Axis("entropy (nat)", (-0.03 * most, 1.05 * most)), entropy, marks, "Entropy", together),
            Panel(x, percent_axis("largest weight (%)"), top, marks, "Largest weight", together),
        ],
    )  # fmt: skip


def causes(tables: Tables) -> Plot:
    """For every method: accuracy, what hard attention would get right, and how often the right item is ranked first."""
    known, last = methods(tables), largest(tables)
    told = {method: loss for method in known if (loss := loss_of(tables, method, last)) is not None}
    listed = [
        f"{method} loses {share(max(0.0, spread))} points to dispersion and {share(wrong)} to wrong ranking"
        for method, (spread, wrong) in told.items()
    ]
    return Plot(
        "What is lost to dispersion, and what to wrong ranking",
        note(tables),
        "The gap between black and orange is lost to dispersion: hard attention to the very same scores would be right "
        "there. What is missing above orange is lost to wrong ranking: sharpening brings little of it back. Near-ties "
        "are the half of the examples whose best two items are least apart.",
        f"A panel for each method with accuracy, accuracy if attention were hard and right rankings in percent against "
        f"size; at {_n(tables)}: {'; '.join(listed)}.",
        [
            Panel(sizes_axis(tables), percent_axis("examples (%)"), _kinds(tables, method), title=method)
            for method in known
        ],
        small=len(known) > 2,
    )


def _kinds(tables: Tables, method: str) -> list[Series]:
    found = []
    for table, label, colour, stroke in _KINDS:
        marker = {"accuracy": CIRCLE, "hard": UP}.get(table)
        look = Look(label, colour, marker, width=1.3, size=3.2, layer=3.0 if table == "accuracy" else 2.0)
        line = _line(tables, table, method, look, lambda value, label=label: f"{label}: {percent(value)}")
        if line is not None:
            bare = dataclasses.replace(line, label=label, low=None, high=None, arm=None)
            found.append(dataclasses.replace(bare, stroke=stroke, marker="full" if marker else None))
    return found


def _lines(tables: Tables, table: str, words: Any) -> list[Series]:
    """A line for each method that has numbers, those that stand out first."""

    def said(method: str) -> Any:
        return lambda value: f"{method}: {words(value)}"

    found = (_line(tables, table, method, look, said(method)) for method, look in looks_of(tables).items())
    return [line for line in found if line is not None]


def _line(tables: Tables, table: str, method: str, look: Look, words: Any) -> Series | None:
    known = [(n, one) for n in sizes_of(tables) if (one := cell(tables, table, method, n))["mean"] is not None]
    if not known:
        return None
    outstanding = look.marker is not None
    return Series(
        method,
        look,
        [float(n) for n, _ in known],
        [one["mean"] for _, one in known],
        [f"{words(one['mean'])}{_between(one, table)}" for _, one in known],
        low=[_bounded(one["low"], table) for _, one in known] if outstanding else None,
        high=[_bounded(one["high"], table) for _, one in known] if outstanding else None,
        marker="full" if outstanding else None,
        arm=method,
    )


def _between(one: Mapping[str, Any], table: str) -> str:
    if one["low"] is None:
        return ""
    words = nats if table == "entropy" else share
    return f" ({words(_bounded(one['low'], table) or 0.0)} to {words(_bounded(one['high'], table) or 0.0)})"


def _bounded(end: float | None, table: str) -> float | None:
    """The end of an interval, which Student's may have beyond what can be."""
    return None if end is None else max(0.0, end if table == "entropy" else min(100.0, end))


def _thin(look: Look) -> Look:
    # Pale names could not be read.
    return Look(look.label, look.colour if look.marker else SOFT, width=0.6, layer=1.4)


def percent_axis(label: str) -> Axis:
    """From nothing to all, with some room."""
    ticks = tuple((float(value), str(value)) for value in range(0, 101, 20))
    return Axis(label, (-3.0, 103.0), ticks=ticks)


def sizes_axis(tables: Tables) -> Axis:
    """The axis of the sizes tested, in the unit of the task."""
    unit = tables["setting"]["unit"]
    return size_axis(sizes_of(tables), label=f"number of {unit} n", hover=f"%{{x:,.0f}} {unit}")


def training_mark(tables: Tables, x: Axis) -> Sequence[Mark]:
    """Where training ends, unless that is beyond the axis."""
    end = float(tables["setting"]["train_sizes"][1])
    inside = x.limits[0] <= end <= x.limits[1] and len(sizes_of(tables)) > 1
    return [Mark("x", end, "training ends", SOFT)] if inside else []


def note(tables: Tables) -> str:
    """What the numbers of a figure are of."""
    setting = tables["setting"]
    trained = f"trained at {setting['train_sizes'][0]} to {setting['train_sizes'][1]} {setting['unit']}"
    return (
        f"{setting['model']} on {setting['task']}, {trained} for {plural(setting['steps'], 'step')}; "
        f"{plural(len(setting['seeds']), 'seed')}, {plural(setting['samples'], 'example')} of each size and seed"
    )


def _title(tables: Tables) -> str:
    known, first, last = methods(tables), leader(tables), largest(tables)
    best = percent(cell(tables, "accuracy", first, last)["mean"])
    if len(known) == 1:
        return f"{first} gets {best} right at {_n(tables)}"
    if SOFTMAX in known and first != SOFTMAX:
        ahead = gap(tables, first, SOFTMAX, last)
        more = f"{share(ahead.mean)} points more than softmax"
        doubt = "" if ahead.shown else ", which may be chance"
        return f"{first} gets {best} right at {_n(tables)}, {more}{doubt}"
    level = "" if not level_with(tables) else ", not shown to be ahead of all others"
    return f"{first} leads with {best} right at {_n(tables)}{level}"


def _stand_out(tables: Tables) -> str:
    chosen = highlighted(tables)
    if len(chosen) == len(methods(tables)):
        return ""
    return f"In colour: {joined(chosen)}; the others are grey. "


def _bars(tables: Tables) -> str:
    if len(tables["setting"]["seeds"]) == 1:
        return "One seed: no intervals. "
    colour = "" if len(highlighted(tables)) == len(methods(tables)) else " of the methods in colour"
    return f"Bars: Student's 95% intervals{colour} over seeds. "


def _n(tables: Tables) -> str:
    return f"{count(largest(tables))} {tables['setting']['unit']}"


def _octaves(x: Axis) -> float:
    return math.log2(x.limits[1] / x.limits[0])
