"""The figures of `sharpmax clrs evaluate`: right answers by size, a panel for each algorithm; and how arms learned."""

from __future__ import annotations

import dataclasses
import math

from sharpmax.report.clrs.facts import (
    LEVEL,
    OUT,
    algorithms,
    arms,
    base,
    gains,
    group_names,
    groups,
    lead,
    name_of,
    settings_apart,
    shown,
    training,
)
from sharpmax.report.looks import SOFT, Look, in_turn
from sharpmax.report.plot import Axis, Panel, Plot, Series
from sharpmax.report.tables import Tables, sizes
from sharpmax.report.words import count, joined, percent, plural, points, share

__all__ = ["curves", "right_answers"]

_FEW = 2
"""So many panels have room beside each other at full size."""

_MAJORITY, _TRAINED = "most frequent answer", "largest size trained on"
_Y = Axis("right final answers (%)", (-3.0, 103.0), ticks=((0.0, "0"), (50.0, "50"), (100.0, "100")))


def right_answers(tables: Tables) -> Plot:
    """Right final answers of every arm against size, a panel for each algorithm."""
    known = algorithms(tables)
    small = len(known) > _FEW
    questions = {cell["n"] for name in known for cell in tables["majority"][name].values()}
    each = f"{count(min(questions))} to {count(max(questions))}" if len(questions) > 1 else count(min(questions))
    return Plot(
        _title(tables),
        f"{plural(len(known), 'algorithm')}; {each} questions of each size, the same for every arm",
        "Right is a final answer that greedy generation gives letter by letter. Bars: Wilson's 95% intervals. Grey: "
        "what one would get right by always saying the most frequent answer. Dotted: the largest size trained on; "
        "what lies beyond was never seen in training.",
        _alt(tables),
        [_panel(tables, name, small=small) for name in known],
        small,
    )


def curves(tables: Tables) -> Plot:
    """The loss on answers of every arm, step by step."""
    known = {arm: one["curve"] for arm, one in training(tables).items() if one["curve"]}
    losses = [max(loss, 1e-6) for curve in known.values() for _, loss in curve]
    last = max(step for curve in known.values() for step, _ in curve)
    ends = joined([f"{arm} {curve[-1][1]:.3f}" for arm, curve in known.items()])
    lines = []
    for place, arm in enumerate(arms(tables)):
        if arm in known:
            x, y = [step for step, _ in known[arm]], [max(loss, 1e-6) for _, loss in known[arm]]
            look = dataclasses.replace(in_turn(arm, place), marker=None, width=1.3)
            said = [f"{arm}: {value:.3f}" for value in y]
            lines.append(Series(arm, look, x, y, said, marker=None, arm=arm))
    return Plot(
        "How the arms learned",
        f"Loss at the end: {ends} nats per token of an answer",
        "Cross-entropy of the answers in training; questions do not count. "
        + ("" if settings_apart(tables) else "All arms read the same examples in the same order. ")
        + "A point stands for a few steps and is their mean. The scale of the loss is logarithmic.",
        f"Loss on answers against training steps, a line for each arm; at the end {ends}.",
        [
            Panel(
                Axis("step", (0.0, 1.02 * last), hover="step %{x:,.0f}"),
                Axis("loss (nats)", _around(losses), log=True, ticks=_decades(*_around(losses))),
                lines,
            )
        ],
    )


def _panel(tables: Tables, name: str, *, small: bool) -> Panel:
    known = sizes(tables["majority"][name])
    lines = [_line(tables, name, arm, place, small=small) for place, arm in enumerate(arms(tables))]
    return Panel(
        _sizes(known),
        _Y,
        [*lines, *_background(tables, name, known)],
        title=name_of(name),
    )


def _sizes(known: list[str]) -> Axis:
    values = [int(n) for n in known]
    room = 0.06 * max(1, values[-1] - values[0])
    ticks = tuple((float(n), count(n)) for n in known)
    return Axis("problem size n", (values[0] - room, values[-1] + room), ticks=ticks, hover="n = %{x:,.0f}")


def _line(tables: Tables, name: str, arm: str, place: int, *, small: bool) -> Series:
    cells = tables["accuracy"][arm][name]
    known, look = sizes(cells), in_turn(arm, place)
    if small:
        look = dataclasses.replace(look, width=1.3, size=3.2)
    found = [cells[n] for n in known]
    return Series(
        arm,
        look,
        [int(n) for n in known],
        [cell["mean"] for cell in found],
        [f"{arm}: {percent(cell['mean'])} ({share(cell['low'])} to {share(cell['high'])})" for cell in found],
        low=[cell["low"] for cell in found],
        high=[cell["high"] for cell in found],
        arm=arm,
    )


def _background(tables: Tables, name: str, known: list[str]) -> list[Series]:
    cells = tables["majority"][name]
    thin = Look(_MAJORITY, SOFT, width=0.8, layer=1.5)
    # One size alone would be a line without length.
    x = [int(n) for n in known] if len(known) > 1 else list(_sizes(known).limits)
    y = [cells[n]["mean"] for n in known] if len(known) > 1 else [cells[known[0]]["mean"]] * 2
    said = f"{_MAJORITY}: %{{y:.1f}}%" if len(known) > 1 else ""
    found = [Series(_MAJORITY, thin, x, y, said, marker=None)]
    trained = max(tables["setting"]["sizes"][name]["trained"], default=0)
    if int(known[0]) <= trained < int(known[-1]):
        dotted = Look(_TRAINED, SOFT, width=1.1, layer=1.2)
        found.append(Series(_TRAINED, dotted, [trained] * 2, list(_Y.limits), "", stroke="dot", marker=None))
    return found


def _title(tables: Tables) -> str:
    arm, where = lead(tables), group_names(tables)[OUT]
    if arm is None or OUT not in groups(tables):
        return "Right answers by size"
    gain = gains(tables, arm)[OUT]
    if not shown(gain):
        return f"Right answers by size: at {where}, no arm is shown to be better than {base(tables)}"
    verb = "gains" if shown(gain) > 0 else "loses"
    return f"Right answers by size: {arm} {verb} {share(abs(gain['mean']))} points at {where} (p < {LEVEL:g})"


def _alt(tables: Tables) -> str:
    names, said = group_names(tables), []
    for arm in arms(tables):
        means = [f"{percent(tables['means'][arm][group]['mean'])} at {names[group]}" for group in groups(tables)]
        said.append(f"{arm} {joined(means)}")
    gained = [points(gains(tables, arm)[groups(tables)[-1]]["mean"]) for arm in tables["gains"]]
    less = f"; differences to {base(tables)} there: {joined(gained)} points" if gained else ""
    return (
        "Right final answers in percent against the size of the problem, a panel for each algorithm and a line for "
        f"each arm; on average: {'; '.join(said)}{less}."
    )


def _around(values: list[float]) -> tuple[float, float]:
    return min(values) / 1.15, max(values) * 1.15


def _decades(low: float, high: float) -> tuple[tuple[float, str], ...]:
    """Round numbers between two others, of each power of ten one, two and five."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    return tuple((value, f"{value:g}") for value in found if low <= value <= high)
