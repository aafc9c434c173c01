"""The league as a table for a README, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharpmax.report.compare.facts import cell, largest, leader, measured, methods, place_of, shown_sizes
from sharpmax.report.grid import NOTHING
from sharpmax.report.tables import Tables, readable
from sharpmax.report.words import count

__all__ = ["league_lines"]

_AT_LARGEST = {"hard": "if hard", "ranking": "ranked first", "close": "near-ties"}


def league_lines(tables: Tables) -> list[str]:
    """The lines of the table, the best method first; bold is the leader at the largest size."""
    with readable("the league", tables):
        known = shown_sizes(tables)
        kinds = [table for table in _AT_LARGEST if measured(tables, table)]
        head = ["method", "rank", *(count(n) for n in known), *(_AT_LARGEST[table] for table in kinds), "train s"]
        rows = [
            [
                f"`{method}`",
                place_of(tables, method),
                *(
                    _number(cell(tables, "accuracy", method, n), method == leader(tables) and n == known[-1])
                    for n in known
                ),
                *(_number(cell(tables, table, method, largest(tables))) for table in kinds),
                f"{tables['training'][method]['seconds']:.0f}",
            ]
            for method in methods(tables)
        ]
        return [_line(head), _line(["---", *["---:"] * (len(head) - 1)]), *map(_line, rows)]


def _number(one: Mapping[str, Any], strong: bool = False) -> str:
    if one["mean"] is None:
        return NOTHING
    text = f"{one['mean']:.1f}"
    return f"**{text}**" if strong else text


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
