"""Facts and figures of `sharpmax compare`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sharpmax.report.plot import Axis, Mark, Panel, Plot, Series, size_axis
from sharpmax.report.tables import Tables
from sharpmax.report.theme import BLACK, BLUE, CIRCLE, GREEN, PALE, SOFT, UP, VERMILLION, Colour, Look, Stroke, in_turn
from sharpmax.report.words import count, joined, nats, percent, plural, share

SOFTMAX = "softmax"
"""What the others are alternatives to."""

_HIGHLIGHTED, _ALL = 5, 6
"""So many methods stand out among many; so few need no standing out."""

_SHOWN = 5
"""Sizes that have a column in tables."""


@dataclass(frozen=True)
class Gap:
    """By how many points one method is ahead of another on the same seeds and examples; 95% where seeds allow it."""

    mean: float
    low: float | None
    high: float | None

    @property
    def shown(self) -> bool:
        """Whether chance alone would hardly give it; one seed shows nothing."""
        return self.low is not None and self.high is not None and not self.low <= 0.0 <= self.high


def has_league(tables: Tables) -> bool:
    """Whether methods were compared."""
    return "league" in tables


def has_capacity(tables: Tables) -> bool:
    """Whether models of several capacities were."""
    return "capacity" in tables and "laws" in tables


def methods(tables: Tables) -> list[str]:
    """The methods, the best first."""
    return list(tables["league"])


def sizes_of(tables: Tables) -> list[str]:
    """The sizes that were tested."""
    return [str(size) for size in tables["setting"]["sizes"]]


def largest(tables: Tables) -> str:
    """The largest size that was tested."""
    return sizes_of(tables)[-1]


def shown_sizes(tables: Tables) -> list[str]:
    """A few sizes: the smallest, and the largest with some in even steps before it."""
    known = sizes_of(tables)
    if len(known) <= _SHOWN:
        return known
    step = (len(known) - 1) // (_SHOWN - 1)
    return [known[0], *known[::-1][: step * (_SHOWN - 1) : step][::-1]]


def cell(tables: Tables, table: str, method: str, size: str) -> Mapping[str, Any]:
    """Mean and interval of a measure, whose mean is None where there was nothing to measure."""
    found: Mapping[str, Any] = tables[table][method][size]
    return found


def measured(tables: Tables, table: str) -> bool:
    """Whether a measure has a number anywhere: not every task has near-ties."""
    return any(one["mean"] is not None for by_size in tables[table].values() for one in by_size.values())


def place_of(tables: Tables, method: str) -> str:
    """The rank of a method, with a sign where others share it."""
    ranks = [place["rank"] for place in tables["league"].values()]
    rank = tables["league"][method]["rank"]
    return f"{rank}=" if ranks.count(rank) > 1 else str(rank)


def leader(tables: Tables) -> str:
    """The method that is right most often at the largest size."""
    return max(methods(tables), key=lambda method: cell(tables, "accuracy", method, largest(tables))["mean"])


def level_with(tables: Tables) -> list[str]:
    """Methods that the leader is not shown to be ahead of at the largest size, the closest first."""
    first, size = leader(tables), largest(tables)
    gaps = {method: gap(tables, first, method, size) for method in methods(tables) if method != first}
    return sorted((method for method, one in gaps.items() if not one.shown), key=lambda method: gaps[method].mean)


def gap(tables: Tables, one: str, other: str, size: str) -> Gap:
    """How far a method is ahead of another at a size, seed by seed."""
    pairs = zip(tables["per_seed"][one][size], tables["per_seed"][other][size], strict=True)
    apart = [first - second for first, second in pairs]
    mean = sum(apart) / len(apart)
    reach = _quantile(tables, len(apart))
    if reach is None:
        return Gap(mean, None, None)
    sem = math.sqrt(sum((value - mean) ** 2 for value in apart) / (len(apart) - 1) / len(apart))
    return Gap(mean, mean - reach * sem, mean + reach * sem)


def _quantile(tables: Tables, seeds: int) -> float | None:
    """Student's quantile for so many seeds, as the intervals of the results have it."""
    if seeds < 2:
        return None
    cells = (one for by_size in tables["accuracy"].values() for one in by_size.values())
    known = [one for one in cells if one["n"] == seeds and one["sem"]]
    widest = max(known, key=lambda one: one["sem"], default=None)
    # Seeds that never differ leave no doubt about any difference.
    return 0.0 if widest is None else (widest["mean"] - widest["low"]) / widest["sem"]


def loss_of(tables: Tables, method: str, size: str) -> tuple[float, float] | None:
    """Points lost to dispersion, and to wrong ranking; None where hard attention was not measured.

    The first is negative where spreading its weight helps a method.
    """
    right, hard = (cell(tables, table, method, size)["mean"] for table in ("accuracy", "hard"))
    return None if hard is None else (hard - right, 100.0 - hard)


def highlighted(tables: Tables) -> list[str]:
    """The methods that stand out in figures, softmax first, then the leader and the best of the others."""
    known = methods(tables)
    order = dict.fromkeys([*(one for one in (SOFTMAX, leader(tables)) if one in known), *known])
    return list(order) if len(known) <= _ALL else list(order)[:_HIGHLIGHTED]


def apart(ends: Mapping[str, float], low: float, high: float, *, most: int, room: float = 0.058) -> dict[str, float]:
    """Where each name goes: in the order of the ends, at least `room` of the axis between two.

    >>> apart({"a": 50.0, "b": 50.0, "c": 0.0}, 0.0, 100.0, most=3, room=0.1)
    {'c': 0.0, 'b': 45.0, 'a': 55.0}
    """
    step = min(room, 1.0 / max(1, most - 1)) * (high - low)
    # Groups of names that touch stand around the mean of their ends; those that come to touch become one.
    groups: list[list[str]] = []
    for name in sorted(ends, key=lambda name: (ends[name], -list(ends).index(name))):
        groups.append([name])
        while len(groups) > 1 and _start(groups[-1], ends, step, low, high) < _start(
            groups[-2], ends, step, low, high
        ) + step * len(groups[-2]):
            last = groups.pop()
            groups[-1] += last
    return {
        name: _start(group, ends, step, low, high) + step * place
        for group in groups
        for place, name in enumerate(group)
    }


def _start(group: list[str], ends: Mapping[str, float], step: float, low: float, high: float) -> float:
    """Where the lowest name of a group goes."""
    reach = step * (len(group) - 1)
    middle = sum(ends[name] for name in group) / len(group)
    return min(max(middle - reach / 2.0, low), high - reach)


def looks_of(tables: Tables) -> dict[str, Look]:
    """The look of every method, those that stand out first."""
    chosen = highlighted(tables)
    found = {method: in_turn(method, place) for place, method in enumerate(chosen)}
    others = [method for method in methods(tables) if method not in found]
    return found | {method: Look(method, PALE, None, method, width=1.1, layer=1.5) for method in others}


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
