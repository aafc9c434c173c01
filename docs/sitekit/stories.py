"""Committed results in pages: `<!-- story: reproduce -->` and its like become figures, tables and sentences."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from sharpmax.report.compare import markdown_lines
from sharpmax.report.page import command_of
from sharpmax.report.tables import Cell, Figure, Report, Table
from sharpmax.report.words import origin_of_run
from sharpmax.results import Results, load

from .benches import BENCHES, horizon_lines
from .commands import command_lines
from .drawn import DIRECTIVE, file_of, report_in
from .tables import folded, table

__all__ = ["KINDS", "filled"]


def filled(root: Path, page: str, markdown: str) -> str:
    """The page with everything it asks for in its place; what has not been run yet is said to be missing."""

    def put(found: re.Match[str]) -> str:
        kind, what = found[1], found[2]
        if kind not in KINDS:
            return found[0]
        above = re.findall(r"^(#+) ", markdown[: found.start()], re.MULTILINE) or ["#"]
        return "\n".join(KINDS[kind](root, what, _Place(page, len(above[-1]) + 1)))

    return DIRECTIVE.sub(put, markdown)


class _Place:
    """Where something is put: on which page, under a heading of which level."""

    def __init__(self, page: str, level: int) -> None:
        self.page, self.level = page, level

    def heading(self, text: str) -> str:
        return f"{'#' * self.level} {text}"

    def link(self, path: str) -> str:
        return posixpath.relpath(path, posixpath.dirname(f"docs/{self.page}"))


_Tell = Callable[[Path, str, _Place], list[str]]


def _if_committed(tell: _Tell) -> _Tell:
    def told(root: Path, what: str, place: _Place) -> list[str]:
        name = what.partition("/")[0]
        if not file_of(root, name).exists():
            return [f"*No run is committed as `results/{name}` yet, so there is nothing to show here.*"]
        return tell(root, what, place)

    return told


@_if_committed
def _told(root: Path, name: str, place: _Place) -> list[str]:
    results, report = load(file_of(root, name)), report_in(file_of(root, name))
    lines = _origin(results, name, place) + _summary(report)
    for part in report.parts:
        if len(report.parts) > 1:
            lines += ["", place.heading(part.label)]
        for figure in part.figures:
            lines += ["", *_shown(figure, name, place)]
        for grid in (*part.tables, *part.details):
            lines += ["", *folded(grid.title, _grid_lines(grid))]
    return lines


def _summary(report: Report) -> list[str]:
    first, *rest = report.headline
    lines = ["", f"**{first}**", "", *(f"- {sentence}" for sentence in rest)]
    return lines + (["", *folded("Notes", [f"- {note}" for note in report.notes])] if report.notes else [])


def _grid_lines(grid: Table) -> list[str]:
    rows = [[_cell(cell) for cell in row] for row in grid.rows]
    return [grid.note, "", *table([_cell(cell) for cell in grid.head], rows)]


def _cell(cell: Cell) -> str:
    text = f"**{cell.text}**" if cell.strong and cell.text.strip() else cell.text
    return f"{text}<br><small>{cell.small}</small>" if cell.small else text


def _shown(figure: Figure, name: str, place: _Place) -> list[str]:
    alt = figure.alt.replace("[", "(").replace("]", ")").replace("\n", " ")
    picture = f"![{alt}]({place.link(f'results/{name}/{figure.name}.svg')})"
    return [f"**{figure.title}**", "", picture, "", f"*{figure.caption}*"]


@_if_committed
def _one_figure(root: Path, what: str, place: _Place) -> list[str]:
    name, _, wanted = what.partition("/")
    results = load(file_of(root, name))
    figures = {figure.name: figure for figure in report_in(file_of(root, name)).figures}
    return [
        *_shown(figures[wanted], name, place),
        "",
        f"<small>Drawn from `results/{name}` (`{results.command}`).</small>",
    ]


def _origin(results: Results, name: str, place: _Place) -> list[str]:
    pairs = dict(origin_of_run(results.command, results.provenance, results.tables))
    where = ", ".join(pairs[key] for key in ("Hardware", "Date") if key in pairs)
    raw, page = (place.link(f"results/{name}/{file}") for file in ("results.json", "report.html"))
    drawn = f" · [the interactive page]({page})" if command_of(results.tables) else ""
    return [f"`{results.command}`  \n{where} · [all numbers]({raw}){drawn}"]


@_if_committed
def _league(root: Path, name: str, place: _Place) -> list[str]:
    return list(markdown_lines(load(file_of(root, name)).tables))


@_if_committed
def _horizons(root: Path, name: str, place: _Place) -> list[str]:
    results = load(file_of(root, name))
    return [*_origin(results, name, place), "", *horizon_lines(results.tables)]


def _bench(root: Path, name: str, place: _Place) -> list[str]:
    results = load(root / "benchmarks" / f"{name}.json")
    raw = place.link(f"benchmarks/{name}.json")
    pairs = dict(origin_of_run(results.command, results.provenance, {}))
    said = f"`{results.command}`  \n{pairs['Hardware']}, {pairs['Date']} · [all numbers]({raw})"
    return [said, "", *BENCHES[name](results.tables)]


def _command(root: Path, name: str, place: _Place) -> list[str]:
    return list(command_lines(name, place.heading))


KINDS: dict[str, _Tell] = {
    "story": _told,
    "figure": _one_figure,
    "league": _league,
    "horizon": _horizons,
    "bench": _bench,
    "command": _command,
}
"""What a page can ask for."""
