"""Scores as a table in the terminal, and as the tables of docs/quality.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quality.mutants import NOT_MUTATED
from quality.scores import Justified

__all__ = ["BEGIN", "END", "page_tables", "terminal", "with_tables"]

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
_MUTATION = ("room", "mutants", "noticed", "justified", "left", "percent")
_COVERAGE = ("room", "statements", "run", "percent")


def terminal(tables: dict[str, Any]) -> str:
    """Both scores, aligned."""
    parts = []
    if mutation := tables.get("mutation"):
        parts.append(f"mutation: {tables['sample']}\n" + _aligned(_MUTATION, mutation))
        parts += ["\n".join(["left:", *(f"  {key}" for key in tables["left"])])] if tables["left"] else []
    if coverage := tables.get("coverage"):
        parts.append("coverage: the whole suite, without tests of compilers\n" + _aligned(_COVERAGE, coverage))
        named = [f"  {one['file']} {one['percent']}%: {one['missing']} ({one['why']})" for one in tables["lacking"]]
        parts += ["\n".join(["under 90%:", *named])] if named else []
    return "\n\n".join(parts)


def page_tables(saved: dict[str, Any], reasons: Sequence[Justified]) -> str:
    """Everything the page shows of a run, in Markdown."""
    tables, origin = saved["tables"], saved["provenance"]
    parts = [
        "### Mutants",
        f"{tables['sample'].capitalize()}.",
        _markdown(_MUTATION, _rows(_MUTATION, tables["mutation"])),
        "Left alone, file by file:",
        _markdown(("file", "why it is not mutated"), [(f"`{file}`", why) for file, why in NOT_MUTATED.items()]),
        "Mutants that live and may:",
        _markdown(("mutants", "why"), [(str(len(one.mutants)), one.why) for one in reasons]),
    ]
    if tables["left"]:
        parts += ["Mutants that live and should not:", "\n".join(f"- `{key}`" for key in tables["left"])]
    parts += [
        "### Coverage",
        _markdown(_COVERAGE, _rows(_COVERAGE, tables["coverage"])),
        "Files under 90%, with the lines that no test runs:",
        _markdown(
            ("file", "percent", "lines", "why"),
            [(f"`{one['file']}`", str(one["percent"]), one["missing"], one["why"]) for one in tables["lacking"]],
        ),
        f"Python {origin['versions']['python']}, torch {origin['versions']['torch']}, {origin['hardware']['cpu']}, "
        f"commit {origin['commit']}, {origin['date']}, `{saved['command']}`.",
    ]
    return "\n\n".join(parts)


def with_tables(page: str, tables: str) -> str:
    """The page with these tables in their place."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{rest.partition(END)[2]}"


def _rows(columns: Sequence[str], rooms: dict[str, dict[str, Any]]) -> list[list[str]]:
    return [[room, *(f"{row[name]:,}" for name in columns[1:])] for room, row in rooms.items()]


def _aligned(columns: Sequence[str], rooms: dict[str, dict[str, Any]]) -> str:
    lines = [list(columns), *_rows(columns, rooms)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
