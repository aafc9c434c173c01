"""The site's files that are not pages: results as they are committed, and what is drawn from them."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from sharpmax.report import explore
from sharpmax.report.figures import drawing, made, svg_text
from sharpmax.report.page import write_page
from sharpmax.report.registry import story_of
from sharpmax.report.section import Story
from sharpmax.report.static import static_figure
from sharpmax.results import load

__all__ = ["DIRECTIVE", "explore_page", "file_of", "generated", "story_in"]

DIRECTIVE = re.compile(r"^<!-- (\w+): (\S[^>]*?) -->$", re.MULTILINE)
"""What a page says where something of the results is to stand."""


def file_of(root: Path, name: str) -> Path:
    """The committed results of this name, whether they are there or not."""
    return root / "results" / name / "results.json"


def generated(root: Path, pages: Sequence[str]) -> dict[str, str | bytes]:
    """Files of the site: results as they are committed, and the figures and pages that `pages` ask for."""
    files: dict[str, str | bytes] = {}
    for file in sorted([*root.glob("results/*/*.json"), *root.glob("benchmarks/*.*")]):
        files[f"data/{file.relative_to(root).as_posix()}"] = file.read_bytes()
    told: set[str] = set()
    for kind, what in (found for text in pages for found in DIRECTIVE.findall(text)):
        name, _, figure = what.partition("/")
        if not file_of(root, name).exists() or kind not in ("story", "figure"):
            continue
        for one in story_in(file_of(root, name)).figures(load(file_of(root, name)).tables):
            if kind == "story" or one.file == figure:
                files[f"data/results/{name}/{one.file}.svg"] = _svg(file_of(root, name), one.file)
        if kind == "story":
            told.add(name)
    for name in sorted(told):
        files[f"data/results/{name}/report.html"] = _page(file_of(root, name))
    return files


@cache
def story_in(file: Path) -> Story:
    """Who can tell the results of a file."""
    story = story_of(load(file).tables)
    if story is None:
        raise ValueError(f"{file}: no story tells these results")
    return story


@cache
def _svg(file: Path, name: str) -> str:
    tables = load(file).tables
    figures = {figure.file: figure for figure in story_in(file).figures(tables)}
    with drawing():
        return svg_text(static_figure(made(figures[name], tables), titled=False))


@cache
def _page(file: Path) -> str:
    results = load(file)
    with tempfile.TemporaryDirectory() as folder:
        return write_page(results.command, results.provenance, results.tables, folder).read_text(encoding="utf-8")


@cache
def explore_page() -> str:
    """The page of `sharpmax explore`."""
    with tempfile.TemporaryDirectory() as folder:
        return explore.write(Path(folder) / explore.FILE_NAME).read_text(encoding="utf-8")
