"""Write the tables of docs/gpu.md: `python docs/gpu_tables.py benchmarks/h200.json docs/gpu.md`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from sharpmax.files import write_text
from sharpmax.report.gpu import Entry, gpu_tables, machine, read_entries
from sharpmax.report.tables import Table

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def page_tables(entries: Sequence[Entry], figure: str) -> str:
    """All tables in Markdown, with the figure at that address and where they come from."""
    parts = [f"![Time of each case relative to PyTorch's fastest kernel]({figure})"]
    for table in gpu_tables(entries):
        parts += [f"### {table.title}", _lines(table)]
    first = entries[0]
    versions = first["provenance"]["versions"]
    origin = [machine(first), f"torch {versions['torch']}"]
    origin += [f"Triton {versions['triton']}"] if "triton" in versions else []
    origin += [f"commit {first['provenance']['commit']}", first["provenance"]["date"], f"`{first['command']}`"]
    return "\n\n".join([*parts, "\\* not part of a mean. " + ", ".join(origin) + "."])


def with_tables(page: str, tables: str) -> str:
    """The page with these tables in their place."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


def _lines(table: Table) -> str:
    head, *body = ([cell.text.replace("*", "\\*") for cell in row] for row in (table.head, *table.rows))
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *body))


if __name__ == "__main__":
    saved, page = (Path(argument).resolve() for argument in sys.argv[1:])
    figure = Path(os.path.relpath(saved.with_suffix(".svg"), page.parent)).as_posix()
    write_text(page, with_tables(page.read_text(encoding="utf-8"), page_tables(read_entries(saved), figure)))
