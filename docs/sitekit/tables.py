"""Tables and folded parts in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["folded", "table"]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table."""
    lines = [list(head), ["---"] * len(head), *[list(row) for row in rows]]
    return ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines]


def folded(title: str, lines: Sequence[str]) -> list[str]:
    """A part that opens when it is pressed."""
    quoted = title.replace('"', "'")
    return [f'??? abstract "{quoted}"', "", *(f"    {line}" if line else "" for line in lines), ""]
