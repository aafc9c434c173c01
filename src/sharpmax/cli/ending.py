"""How a command ends: what it found is told, and the files it wrote are named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sharpmax.cli.answers import answer
from sharpmax.cli.report import draw_and_name
from sharpmax.cli.terminal import wrote
from sharpmax.results import Results

__all__ = ["finish"]


def finish(
    results: Results,
    saved: Path | None,
    show: Callable[[Mapping[str, Any]], None],
    *,
    files: Sequence[Path] = (),
    draw: bool = False,
    as_json: bool = False,
) -> None:
    """Print results as tables or as JSON, name their file and others, and draw them from the file."""
    if not as_json:
        show(results.tables)
    wrote([*files, *([] if saved is None else [saved])])
    if draw and saved is not None:
        draw_and_name(saved)
    if as_json:
        answer(results.to_dict())
