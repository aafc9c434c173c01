"""The board of heads: layers below each other, their heads beside each other, and what two runs differ in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sharpmax.report.board import Board, BoardMap, Kind, Spot
from sharpmax.report.probe.facts import Run, chosen, runs
from sharpmax.report.probe.kinds import in_order, letter_of
from sharpmax.report.probe.told import called, in_numbers
from sharpmax.report.tables import Tables
from sharpmax.report.words import capital, count, joined, plural, points

__all__ = ["board", "same_shape"]

_CHANGED = "≠"


def board(tables: Tables, task: str) -> Board:
    """A cell for each head: its letter is its kind, its colour its slope."""
    found = runs(tables)
    maps = [_map(run, task) for run in found]
    pair = len(found) > 1
    if pair and same_shape(found, task):
        maps.append(_difference(found[0], found[1], task))
    said = joined([f"{_losing(run, task)} in {run.letter}" if pair else _losing(run, task) for run in found])
    return Board(
        f"Heads that lose focus as {task} prompts grow: {said}",
        "; ".join(run.label for run in found),
        _caption(found, task),
        f"Map of all heads, a row for each layer, with their kind and the slope of their entropy: {said} lose focus.",
        maps,
        _kinds(found, task),
        "layer",
        "head",
        "slope of entropy against ln n",
        ("gathers", "disperses"),
        chosen(tables, task),
    )


def same_shape(found: Sequence[Run], task: str) -> bool:
    """Whether the heads of these runs correspond to each other."""
    return len({tuple(sorted(run.heads(task))) for run in found}) == 1


def _map(run: Run, task: str) -> BoardMap:
    heads = run.heads(task)
    layers, columns = run.shape(task)

    def spot(name: str) -> Spot | None:
        about = heads.get(name)
        if about is None:
            return None
        words = capital(f"{called(name)}: {in_numbers(about)}")
        return Spot(name, about["slope"], letter_of(str(about["kind"])), str(about["kind"]), words)

    return _laid_out(run.label if run.letter else "", layers, columns, spot)


def _difference(before: Run, after: Run, task: str) -> BoardMap:
    layers, columns = before.shape(task)
    one, other = before.heads(task), after.heads(task)

    def spot(name: str) -> Spot | None:
        if name not in one:
            return None
        slopes = [heads[name]["slope"] for heads in (one, other)]
        apart = None if None in slopes else slopes[1] - slopes[0]
        kinds = [str(heads[name]["kind"]) for heads in (one, other)]
        changed = kinds[0] != kinds[1]
        words = f"slope {'not known' if apart is None else points(apart, 2)} from A to B; " + (
            f"{kinds[0]} becomes {kinds[1]}" if changed else f"stays {kinds[0]}"
        )
        return Spot(name, apart, _CHANGED if changed else "", kinds[1], capital(f"{called(name)}: {words}"))

    return _laid_out("B − A", layers, columns, spot)


def _laid_out(title: str, layers: Sequence[int], columns: int, spot: Callable[[str], Spot | None]) -> BoardMap:
    rows = [(str(layer), [spot(f"{layer}.{head}") for head in range(columns)]) for layer in layers]
    return BoardMap(title, [str(head) for head in range(columns)], rows)


def _kinds(found: Sequence[Run], task: str) -> list[Kind]:
    counts = [run.kinds(task) for run in found]
    return [
        Kind(letter_of(kind), kind, " / ".join(count(known[kind]) for known in counts))
        for kind in in_order(kind for known in counts for kind in known)
    ]


def _losing(run: Run, task: str) -> str:
    return f"{count(run.losing(task))} of {count(run.known(task))}"


def _shape(run: Run, task: str) -> str:
    layers, heads = run.shape(task)
    return f"{plural(len(layers), 'layer')} of {plural(heads, 'head')}"


def _caption(found: Sequence[Run], task: str) -> str:
    text = (
        "A cell for each head. Its letter is its kind; its colour is how fast the entropy of its rows grows with ln n: "
        "+1 (red) spreads over more and more keys without end, 0 (grey) keeps what focus it has, below 0 (blue) it "
        "gathers. Press a head to see its curves, or a kind to see it alone."
    )
    if len(found) == 1:
        return text
    if same_shape(found, task):
        return f"{text} The last map is the slope of B less that of A; {_CHANGED} where the kind changes."
    said = joined([f"{run.letter} has {_shape(run, task)}" for run in found])
    return f"{text} {said}, so no head of one stands for a head of the other: a head of the same number is shown."
