"""The tables of `sharpmax clrs evaluate`: means of every arm, what arms gain, and every algorithm by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharpmax.report.clrs.facts import (
    LEVEL,
    algorithms,
    arms,
    base,
    gains,
    group_names,
    groups,
    lead,
    majority,
    name_of,
    others,
    shown,
)
from sharpmax.report.grid import NOTHING, Cell, Grid
from sharpmax.report.tables import Tables, readable
from sharpmax.report.words import count, points, probability, share

__all__ = ["algorithms_grid", "gains_grid", "means_grid"]

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
