"""The page of a run: one self-contained HTML file."""

from __future__ import annotations

import base64
import importlib.resources
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sharpmax.files import write_text
from sharpmax.lazy import require
from sharpmax.report import theme
from sharpmax.report.figures import drawing, made, svg_text
from sharpmax.report.interactive import FONT, interactive_figure
from sharpmax.report.plot import STEPS, Board, Heat, Plot, legend, step_of
from sharpmax.report.registry import no_story, story_of
from sharpmax.report.section import Figure, Story
from sharpmax.report.static import static_figure
from sharpmax.report.tables import Tables, readable
from sharpmax.report.theme import DIVERGING_DARK, DIVERGING_SCALE, shades
from sharpmax.report.words import origin_of_run

_PURPOSE = "writing pages"


def rendered(template: str, context: Mapping[str, Any]) -> str:
    """A template of the package with its blanks filled in; what is filled in is escaped unless it is `trusted`."""
    jinja2 = require("jinja2", "report", _PURPOSE)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sharpmax.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return str(environment.get_template(template).render(context))


def trusted(text: str) -> Any:
    """Text of our own, such as a script, that goes into a page as it is."""
    return require("markupsafe", "report", _PURPOSE).Markup(text)


FILE_NAME = "report.html"


def write_page(command: str, provenance: Mapping[str, Any], tables: Tables, folder: str | Path) -> Path:
    """Write the report of a run, from its saved tables alone, to `folder`/report.html."""
    story = story_of(tables)
    with readable("the report", tables):
        figures = [] if story is None else list(story.figures(tables))
        if story is None or not figures:
            raise no_story(tables, "report")
        page = _page(story, command, provenance, tables, figures)
    return write_text(Path(folder) / FILE_NAME, page)


def _page(story: Story, command: str, provenance: Mapping[str, Any], tables: Tables, figures: list[Figure]) -> str:
    plots = [(figure, made(figure, tables)) for figure in figures]
    seen: set[str] = set()
    with drawing():
        views = [_figure_view(figure, plot, seen) for figure, plot in plots]
    context = {
        "summary": story.summary(tables),
        "parts": [
            {"part": part, "figures": [view for view in views if view["part"] == part.name]}
            for part in story.parts(tables)
        ],
        "method": story.method(tables),
        "origin": origin_of_run(command, provenance, tables),
        "origins": story.origins(tables),
        "figures": {
            view["id"]: interactive_figure(plot)
            for view, (_, plot) in zip(views, plots, strict=True)
            if not isinstance(plot, Board)
        },
        "dark": {colour.light: colour.dark for colour in theme.PALETTE},
        "font": FONT,
        "looks": theme,
        "shades": {"light": shades(DIVERGING_SCALE, STEPS), "dark": shades(DIVERGING_DARK, STEPS)},
        "step_of": step_of,
        "command": story.name,
    }
    return _rendered(story, context)


def _rendered(story: Story, context: Mapping[str, Any]) -> str:
    plotlyjs = require("plotly.offline", "report", "writing the report page").get_plotlyjs()
    templates = importlib.resources.files("sharpmax.report") / "templates"
    scripts = [templates / name for name in ("report.js", f"{story.name}.js")]
    script = "\n".join(file.read_text(encoding="utf-8") for file in scripts if file.is_file())
    parts = {"plotlyjs": trusted(plotlyjs), "script": trusted(script)}
    return rendered(f"{story.name}.html.jinja", {**context, **parts})


def _figure_view(figure: Figure, plot: Plot | Heat | Board, seen: set[str]) -> dict[str, Any]:
    svg = svg_text(static_figure(plot, titled=False)).encode("utf-8")
    entries = legend(plot) if isinstance(plot, Plot) else []
    # How to hide an arm is said once, beside the first arms of a part that can be hidden.
    hint = figure.part not in seen and any(entry.arm for entry in entries)
    if hint:
        seen.add(figure.part)
    return {
        "id": figure.name,
        "kind": figure.kind,
        "part": figure.part,
        "title": plot.title,
        "note": plot.note,
        "caption": plot.caption,
        "alt": plot.alt,
        "static": "data:image/svg+xml;base64," + base64.b64encode(svg).decode("ascii"),
        "hint": hint,
        "legend": entries,
        "board": plot if isinstance(plot, Board) else None,
        "choices": list(plot.labels.items()) if isinstance(plot, Heat) and len(plot.arms) > 1 else [],
    }
