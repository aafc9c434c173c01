"""Facts, tables and figures of `sharpmax clrs evaluate`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from sharpmax.report.plot import Axis, Panel, Plot, Series
from sharpmax.report.section import NOTHING, Cell, Grid
from sharpmax.report.tables import Tables, readable, sizes
from sharpmax.report.theme import SOFT, Look, in_turn
from sharpmax.report.words import count, joined, percent, plural, points, probability, share

IN, OUT = "in", "out"
"""Sizes that the arms were trained on, and all others."""

LEVEL = 0.01
"""A difference counts as shown when its p value is below this and its interval holds no zero."""

TOUCHSTONE, LEARNT = "minimum", 90.0
"""The algorithm that is easiest to learn, and the right answers in percent at sizes trained on that say it was."""

_OF_THE_POLICY = {"policy_name", "policy_describe", "policy_rate", "learn", "touched", "trained_weights"}
"""Settings in which arms are meant to differ."""


def arms(tables: Tables) -> list[str]:
    """The arms, in the order of the run."""
    return list(tables["accuracy"])


def base(tables: Tables) -> str:
    """The arm that the others are compared with."""
    return str(tables["setting"]["base"])


def others(tables: Tables) -> list[str]:
    """All arms but the base."""
    return [arm for arm in arms(tables) if arm != base(tables)]


def algorithms(tables: Tables) -> list[str]:
    """The algorithms that were asked for."""
    return list(tables["majority"])


def name_of(algorithm: str) -> str:
    """An algorithm in words.

    >>> name_of("bubble_sort")
    'bubble sort'
    """
    return algorithm.replace("_", " ")


def groups(tables: Tables) -> list[str]:
    """Which of the two groups of sizes were asked for."""
    return [group for group in (IN, OUT) if group in tables["means"][base(tables)]]


def group_names(tables: Tables) -> dict[str, str]:
    """The groups in words: how much may be said depends on the arms and the sizes."""
    setting = tables["setting"]
    trained = any(about["trained"] for about in setting["arms"].values())
    larger = all(
        size in one["trained"] or size > max(one["trained"], default=0)
        for one in setting["sizes"].values()
        for size in one["examined"]
    )
    return {
        IN: "sizes trained on" if trained else "sizes meant for training",
        OUT: "larger sizes" if larger else "other sizes",
    }


def gains(tables: Tables, arm: str) -> Mapping[str, Any]:
    """What an arm gains over the base, by group."""
    found: Mapping[str, Any] = tables["gains"][arm]
    return found


def lead(tables: Tables) -> str | None:
    """The arm that gains most over the base where it was not trained, or None where there is only the base."""
    last = groups(tables)[-1]
    return max(others(tables), key=lambda arm: gains(tables, arm)[last]["mean"], default=None)


def shown(gain: Mapping[str, Any]) -> int:
    """1 for a gain that is shown, −1 for a loss that is, 0 for what may be chance."""
    if gain["p"] >= LEVEL or gain["low"] <= 0.0 <= gain["high"]:
        return 0
    # The test counts questions and the mean algorithms: where they point apart, nothing is shown.
    agrees = (gain["mean"] > 0.0) == (gain["gained"] > gain["lost"])
    return (1 if gain["mean"] > 0.0 else -1) if agrees else 0


def learnt(tables: Tables) -> dict[str, float] | None:
    """Right answers of each arm to the touchstone at sizes trained on; None where nobody was asked."""
    found = {arm: tables["by_algorithm"][arm].get(TOUCHSTONE, {}).get(IN) for arm in arms(tables)}
    return {arm: cell["mean"] for arm, cell in found.items()} if all(found.values()) else None


def majority(tables: Tables, algorithm: str, group: str) -> float | None:
    """What one would get right in a group of sizes by always saying the most frequent answer."""
    trained = tables["setting"]["sizes"][algorithm]["trained"]
    cells = tables["majority"][algorithm]
    values = [cell["mean"] for size, cell in cells.items() if (int(size) in trained) == (group == IN)]
    return sum(values) / len(values) if values else None


def above_chance(tables: Tables, arm: str, group: str) -> tuple[int, int]:
    """On how many algorithms, of how many, an arm's whole interval lies above the most frequent answer."""
    cells = {name: one[group] for name, one in tables["by_algorithm"][arm].items() if group in one}
    return sum(cell["low"] > (majority(tables, name, group) or 0.0) for name, cell in cells.items()), len(cells)


def training(tables: Tables) -> Mapping[str, Any]:
    """How arms were trained, where that is known."""
    found: Mapping[str, Any] = tables.get("training") or {}
    return found


def settings_apart(tables: Tables) -> dict[str, dict[str, Any]]:
    """Settings of training, the policy aside, in which arms differ: then not only the policy is compared."""
    known = {arm: one["setting"] for arm, one in training(tables).items()}
    names = dict.fromkeys(name for setting in known.values() for name in setting if name not in _OF_THE_POLICY)
    values = {name: {arm: setting.get(name) for arm, setting in known.items()} for name in names}
    return {name: by_arm for name, by_arm in values.items() if len({repr(value) for value in by_arm.values()}) > 1}


_MARK = "*"
_WHAT = (("means", "final answer"), ("means_exact", "whole text"))
_SHOWN = (
    f"{_MARK} is shown to differ: the 95% interval holds no zero, and McNemar's exact test over all questions has "
    f"p < {LEVEL:g}, not corrected for the number of comparisons."
)


def means_grid(tables: Tables) -> Grid:
    """Means over algorithms of every arm, of final answers and of whole texts."""
    with readable("the means", tables):
        names = group_names(tables)
        columns = [(table, what, group) for table, what in _WHAT for group in groups(tables)]
        counted = {group: tables["means"][base(tables)][group]["algorithms"] for group in groups(tables)}
        return Grid(
            "Right answers (%): means over algorithms",
            "Every algorithm counts the same, and every size of it. With 95% intervals from drawing answers again. "
            "The final answer is what stands after the steps, where steps are asked for; the whole text is all of it.",
            [
                Cell("arm"),
                *(Cell(f"{what}, {names[group]}", _algorithms(counted[group])) for _, what, group in columns),
            ],
            [[Cell(arm), *(_mean(tables[table][arm][group]) for table, _, group in columns)] for arm in arms(tables)],
        )


def gains_grid(tables: Tables) -> Grid | None:
    """What every arm gains over the base on the same questions."""
    if not others(tables):
        return None
    with readable("the gains", tables):
        names, known = group_names(tables), groups(tables)
        return Grid(
            f"Gain over {base(tables)} (points)",
            f"On the same questions: gained are those that only the arm answers rightly, lost those that only "
            f"{base(tables)} does. {_SHOWN}",
            [Cell("arm"), *(Cell(title) for g in known for title in (names[g], "gained and lost"))],
            [
                [Cell(arm), *(cell for group in known for cell in _gain(gains(tables, arm)[group]))]
                for arm in others(tables)
            ],
        )


def algorithms_grid(tables: Tables) -> Grid:
    """Every algorithm with the means of all arms, sorted by what the leading arm gains where it was not trained."""
    with readable("the algorithms", tables):
        names, known = group_names(tables), groups(tables)
        last = known[-1]
        cells, apart = tables["by_algorithm"], tables["gains_by_algorithm"]
        order = sorted(algorithms(tables), key=lambda name: _rank(tables, name, last))
        sorted_by = (
            f"the gain of {lead(tables)} at {names[last]}" if lead(tables) else f"right answers at {names[last]}"
        )
        return Grid(
            "Right final answers (%) by algorithm",
            f"Sorted by {sorted_by}; below each gain McNemar's test. {_SHOWN if others(tables) else ''} Most frequent: "
            f"what one would get right at {names[last]} by always saying the most frequent answer.",
            [
                Cell("algorithm"),
                *(Cell(arm, names[group]) for group in known for arm in arms(tables)),
                *(Cell(f"gain of {arm}", names[last]) for arm in others(tables)),
                Cell("most frequent", names[last]),
            ],
            [
                [
                    Cell(name_of(name)),
                    *(_short(cells[arm][name].get(group)) for group in known for arm in arms(tables)),
                    *(_test(apart[arm][name].get(last)) for arm in others(tables)),
                    _share(majority(tables, name, last)),
                ]
                for name in order
            ],
        )


def _rank(tables: Tables, name: str, group: str) -> tuple[bool, float]:
    arm = lead(tables)
    cells = tables["by_algorithm"][base(tables)] if arm is None else tables["gains_by_algorithm"][arm]
    cell = cells[name].get(group)
    return cell is None, 0.0 if cell is None else -cell["mean"]


def _algorithms(number: int) -> str:
    return f"{count(number)} algorithm" + ("" if number == 1 else "s")


def _mean(cell: Mapping[str, Any]) -> Cell:
    return Cell(share(cell["mean"]), f"{share(cell['low'])}–{share(cell['high'])}")


def _gain(cell: Mapping[str, Any]) -> tuple[Cell, Cell]:
    sure = bool(shown(cell))
    between = f"{points(cell['low'])} to {points(cell['high'])}"
    return (
        Cell(points(cell["mean"]) + (_MARK if sure else ""), between, strong=sure),
        Cell(f"+{count(cell['gained'])} −{count(cell['lost'])}", probability(cell["p"])),
    )


def _short(cell: Mapping[str, Any] | None) -> Cell:
    return Cell(NOTHING, faint=True) if cell is None else Cell(share(cell["mean"]))


def _test(cell: Mapping[str, Any] | None) -> Cell:
    if cell is None:
        return Cell(NOTHING, faint=True)
    sure = bool(shown(cell))
    return Cell(points(cell["mean"]) + (_MARK if sure else ""), probability(cell["p"]), strong=sure)


def _share(value: float | None) -> Cell:
    return Cell(NOTHING if value is None else share(value), faint=True)


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
