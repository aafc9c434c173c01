"""Tables of docs/gpu.md: `python -m sharpmax.report.sections.gpu_page benchmarks/h200.json docs/gpu.md`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from sharpmax.errors import FileFormatError
from sharpmax.files import write_text
from sharpmax.report.sections.gpu import KINDS, TARGET_COLUMNS, Entry, columns, of_kind, read_entries, rows, target_rows

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def page_tables(entries: Sequence[Entry], figure: str) -> str:
    """All tables in Markdown, with the figure at that address and where they come from."""
    parts = [
        f"![Times of each case, in times of the fastest stock kernel]({figure})",
        "### Targets",
        _table(TARGET_COLUMNS, target_rows(entries)),
    ]
    for kind, title in KINDS.items():
        if of_kind(entries, kind):
            parts += [f"### {title}", _table(columns(kind), rows(entries, kind))]
    first = entries[0]
    versions, hardware = first["provenance"]["versions"], first["provenance"]["hardware"]
    origin = [hardware["gpu"] or hardware["cpu"], f"torch {versions['torch']}"]
    origin += [f"Triton {versions['triton']}"] if "triton" in versions else []
    origin += [f"commit {first['provenance']['commit']}", first["provenance"]["date"], f"`{first['command']}`"]
    return "\n\n".join([*parts, "\\* not part of a mean. " + ", ".join(origin) + "."])


def with_tables(page: str, tables: str) -> str:
    """The page with these tables in their place."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise FileFormatError(f"page: no place for tables; allowed: a page with {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


def _table(headings: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *body]
    return "\n".join("| " + " | ".join(cell.replace("*", "\\*") for cell in line) + " |" for line in lines)


def main(arguments: Sequence[str]) -> None:
    """Put the tables of the first file into the second."""
    saved, page = (Path(argument).resolve() for argument in arguments)
    figure = Path(os.path.relpath(saved.with_suffix(".svg"), page.parent)).as_posix()
    write_text(page, with_tables(page.read_text(encoding="utf-8"), page_tables(read_entries(saved), figure)))


if __name__ == "__main__":
    main(sys.argv[1:])
