"""Committed results in pages: `<!-- report: reproduce -->` and the like become a headline, a figure and tables."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sharpmax.report.page import command_of
from sharpmax.report.tables import Cell, Figure, Table
from sharpmax.report.words import origin_of_run
from sharpmax.results import Results, load

from .benches import BENCHES, folded, horizon_lines, table
from .commands import command_lines
from .drawn import DIRECTIVE, INTERACTIVE, file_of, report_in

__all__ = ["KINDS", "filled"]


def filled(root: Path, page: str, markdown: str) -> str:
    """The page with its directives replaced by results, or by a line where results are not committed yet."""

    def put(found: re.Match[str]) -> str:
        kind, what = found[1], found[2]
        if kind not in KINDS:
            return found[0]
        name = what.partition("/")[0]
        if kind in ("report", "figure", "horizon") and not file_of(root, name).exists():
            return f"*No run is committed as `results/{name}` yet.*"
        above = re.findall(r"^(#+) ", markdown[: found.start()], re.MULTILINE) or ["#"]
        return "\n".join(KINDS[kind](root, what, _Place(page, len(above[-1]) + 1)))

    return DIRECTIVE.sub(put, markdown)


_CLICK = re.compile(r"; click[^.]*|\bClick[^.]*\. ?")


@dataclass(frozen=True)
class _Place:
    """Where results are inserted: the page, and the level of their headings."""

    page: str
    level: int

    def heading(self, text: str) -> str:
        return f"{'#' * self.level} {text}"

    def link(self, path: str) -> str:
        return posixpath.relpath(path, posixpath.dirname(f"docs/{self.page}"))


_Lines = Callable[[Path, str, _Place], list[str]]


def _report(root: Path, name: str, place: _Place) -> list[str]:
    """Headline, then the main figure and table of each part. Further tables are collapsed, further figures left out."""
    report = report_in(file_of(root, name))
    lines = ["", *(f"**{sentence}**\n" for sentence in report.headline)]
    for part in report.parts:
        lines += ["", place.heading(part.label)] if len(report.parts) > 1 else []
        for figure in part.figures[:1]:
            lines += ["", *_shown(figure, name, place)]
        for grid in part.tables[:1]:
            lines += ["", f"**{grid.title}**", "", *_grid_lines(grid)]
        more: list[str] = []
        for grid in part.tables[1:]:
            more += [f"**{grid.title}**", "", *_grid_lines(grid), ""]
        lines += ["", *folded("More tables", more)] if more else []
    lines += ["", *folded("Notes", [f"- {note}" for note in report.notes])] if report.notes else []
    return [*lines, "", *_origin(load(file_of(root, name)), name, place)]


def _grid_lines(grid: Table) -> list[str]:
    lines = [[_cell(cell) for cell in line] for line in (grid.head, *grid.rows)]
    if len(lines) <= 3 and len(grid.head) >= 8:  # few rows of many columns are easier to read as columns
        lines = [list(line) for line in zip(*lines, strict=True)]
    return [grid.note, "", *table(lines[0], lines[1:])]


def _cell(cell: Cell) -> str:
    text = f"**{cell.text}**" if cell.strong and cell.text.strip() else cell.text
    return f"{text}<br><small>{cell.small}</small>" if cell.small else text


def _shown(figure: Figure, name: str, place: _Place) -> list[str]:
    alt = figure.title.replace("[", "(").replace("]", ")").replace("\n", " ")
    picture = f"![{alt}]({place.link(f'results/{name}/{figure.name}.svg')})"
    caption = _CLICK.sub("", figure.caption)  # a picture has nothing to click
    return [f"**{figure.title}**", "", picture, "", f"*{caption.strip()}*"]


def _figure(root: Path, what: str, place: _Place) -> list[str]:
    name, _, wanted = what.partition("/")
    figures = {figure.name: figure for figure in report_in(file_of(root, name)).figures}
    origin = f"<small>Drawn from `results/{name}` (`{load(file_of(root, name)).command}`).</small>"
    return [*_shown(figures[wanted], name, place), "", origin]


def _origin(results: Results, name: str, place: _Place) -> list[str]:
    pairs = dict(origin_of_run(results.command, results.provenance, results.tables))
    where = ", ".join(pairs[key] for key in ("Hardware", "Date") if key in pairs)
    raw, page = (place.link(f"results/{name}/{file}") for file in ("results.json", "report.html"))
    drawn = f" · [interactive page]({page})" if name in INTERACTIVE and command_of(results.tables) else ""
    return [f"`{results.command}`  \n{where} · [all numbers]({raw}){drawn}"]


def _horizon(root: Path, name: str, place: _Place) -> list[str]:
    results = load(file_of(root, name))
    return [*horizon_lines(results.tables), "", *_origin(results, name, place)]


def _bench(root: Path, name: str, place: _Place) -> list[str]:
    results = load(root / "benchmarks" / f"{name}.json")
    pairs = dict(origin_of_run(results.command, results.provenance, {}))
    raw = place.link(f"benchmarks/{name}.json")
    origin = f"`{results.command}`  \n{pairs['Hardware']}, {pairs['Date']} · [all numbers]({raw})"
    return [*BENCHES[name](results.tables), "", origin]


def _command(root: Path, name: str, place: _Place) -> list[str]:
    return list(command_lines(name, place.heading))


KINDS: dict[str, _Lines] = {
    "report": _report,
    "figure": _figure,
    "horizon": _horizon,
    "bench": _bench,
    "command": _command,
}
"""The directives and the functions whose lines replace them."""
