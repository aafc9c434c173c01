"""The page itself: one HTML file that needs nothing else."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from sharpmax.files import write_text
from sharpmax.report import charts
from sharpmax.report.explore.presets import CHOICES, SCENES, START
from sharpmax.report.page import rendered, trusted

FILE_NAME = "explore.html"

_LIBRARY = "uPlot 1.6.32, from the npm package uplot, unchanged"


def write(path: str | Path = FILE_NAME) -> Path:
    """Write the page to `path`; it opens in any browser, without a network."""
    context = {
        "choices": CHOICES,
        "scenes": SCENES,
        "start": START,
        "told": {"policies": {name: choice.plain() for name, choice in CHOICES.items()}, "start": START.plain()},
        "charts": charts,
        "library": {
            "script": trusted(_credited("uplot/uPlot.iife.min.js")),
            "style": trusted(_text("uplot/uPlot.min.css")),
        },
        "scripts": [trusted(_text(name)) for name in ("maths.js", "charts.js", "page.js")],
    }
    return write_text(path, rendered("explore.html.jinja", context))


def _text(name: str) -> str:
    return (importlib.resources.files(__package__) / name).read_text(encoding="utf-8")


def _credited(name: str) -> str:
    """A file of the plotting library under its licence, which has to stand wherever the library goes."""
    return f"/*! {_LIBRARY}\n\n{_text('uplot/LICENSE').strip()}\n*/\n{_text(name)}"
