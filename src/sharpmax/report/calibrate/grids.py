"""The tables of `sharpmax calibrate`: candidates, touched heads and validation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharpmax.report.calibrate.facts import leash
from sharpmax.report.grid import NOTHING, Cell, Grid
from sharpmax.report.tables import Tables, readable, sizes
from sharpmax.report.texts import text_name, texts_in_order
from sharpmax.report.words import count, points, share

__all__ = ["candidates_grid", "heads_grid", "validation_grid"]

_SHOWN = 60


def candidates_grid(tables: Tables) -> Grid:
    """Every policy that was learned and could have been chosen."""
    with readable("the candidates", tables):
        table = tables["candidates"]
        known = texts_in_order(column for about in table.values() for column in about["rise"])
        return Grid(
            "Candidates",
            "Right answers on validation prompts and the rise of perplexity on each text, which may be "
            f"{leash(tables):g}% at most. Bold: the policy that was chosen. A foldable policy can be written into "
            "the weights and then costs nothing.",
            [
                *map(Cell, ("candidate", "kind", "strength", "heads touched", "right answers (%)")),
                *(Cell(f"rise on {text_name(column)} (%)") for column in known),
                Cell("foldable"),
            ],
            [_candidate(tables, name, known) for name in table],
        )


def heads_grid(tables: Tables) -> Grid | None:
    """The heads that the policy touches, those it changes most first."""
    with readable("the heads", tables):
        touched = tables["heads"]["touched"]
        if not touched:
            return None
        some = f" The {_SHOWN} that change most of {count(len(touched))}." if len(touched) > _SHOWN else ""
        return Grid(
            "Touched heads",
            f"β at a row of typical length, with the rule that gives it; layers and heads count from 0.{some}",
            [Cell(text) for text in ("layer", "head", "β", "rule")],
            [
                [Cell(count(layer)), Cell(count(head)), Cell(f"{beta:.2f}", strong=beta > 1.0), Cell(str(rule))]
                for layer, head, rule, beta in touched[:_SHOWN]
            ],
        )


def validation_grid(tables: Tables) -> Grid | None:
    """Right answers on validation prompts, by size."""
    table = tables.get("validation")
    if not table:
        return None
    with readable("the validation", tables):
        known = sizes(*table.values())
        return Grid(
            "Right answers on validation prompts (%)",
            f"Task {tables['setting']['task']}; prompts that were not learned from.",
            [Cell("arm"), *(Cell(f"n = {count(n)}") for n in known)],
            [[Cell(arm), *(_right(cells.get(n)) for n in known)] for arm, cells in table.items()],
        )


def _candidate(tables: Tables, name: str, known: list[str]) -> list[Cell]:
    about, won = tables["candidates"][name], name == tables["chosen"]
    rises = [about["rise"].get(column) for column in known]
    return [
        Cell(name, "chosen" if won else "", strong=won),
        Cell(str(about["kind"])),
        Cell(f"{about['strength']:.2f}"),
        Cell(count(about["touched"])),
        Cell(share(about["validation"]), strong=won),
        *(_rise(rise, leash(tables)) for rise in rises),
        Cell("yes" if about["foldable"] else "no"),
    ]


def _rise(rise: float | None, most: float) -> Cell:
    if rise is None:
        return Cell(NOTHING)
    return Cell(points(rise, 2), "beyond the leash" if rise > most else "")


def _right(cell: Mapping[str, Any] | None) -> Cell:
    if cell is None:
        return Cell(NOTHING)
    known = cell.get("low") is not None and cell.get("high") is not None
    return Cell(share(cell["mean"]), f"{share(cell['low'])}–{share(cell['high'])}" if known else "")
