"""The page of `sharpmax reproduce`: one HTML file that needs nothing else, on a desk, on a phone and on paper."""

from __future__ import annotations

import base64
import importlib.resources
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sharpmax.errors import FileFormatError
from sharpmax.files import write_text
from sharpmax.lazy import require
from sharpmax.report import looks
from sharpmax.report.figures import drawing, svg_text
from sharpmax.report.gains import end_sentence
from sharpmax.report.grids import end_grid, grids
from sharpmax.report.interactive import interactive_figure
from sharpmax.report.origin import origin_of_run, origin_of_weights
from sharpmax.report.plot import Heat, Plot, legend
from sharpmax.report.plotly_parts import FONT
from sharpmax.report.plots import build, plottable
from sharpmax.report.static import static_figure
from sharpmax.report.summary import detected, fixed, meant, measured
from sharpmax.report.tables import Tables, describe, part, readable, recipe_name, recipes
from sharpmax.report.tiles import tiles
from sharpmax.report.words import capital, count, joined

__all__ = ["FILE_NAME", "write_page"]

FILE_NAME = "report.html"

_PURPOSE = "writing the report page"


def write_page(command: str, provenance: Mapping[str, Any], tables: Tables, folder: str | Path) -> Path:
    """Write the report of a run, from its saved tables alone, to `folder`/report.html."""
    figures = plottable(tables)
    if not figures:
        raise FileFormatError(
            f"results: nothing to report in tables {sorted(tables)}; allowed: those of sharpmax reproduce"
        )
    with readable("the report"):
        page = _page(command, provenance, tables, figures)
    return write_text(Path(folder) / FILE_NAME, page)


def _page(command: str, provenance: Mapping[str, Any], tables: Tables, figures: list[tuple[str, str]]) -> str:
    plots = {pair: _plot(tables, *pair) for pair in figures}
    with drawing():
        views = {pair: _figure_view(*pair, plot) for pair, plot in plots.items()}
    context = {
        "summary": _summary(tables),
        "recipes": [_recipe_view(tables, recipe, views) for recipe in recipes(tables)],
        "method": _method(tables),
        "origin": origin_of_run(command, provenance, tables),
        "weights": [
            (recipe_name(recipe), origin_of_weights(weights))
            for recipe, weights in (tables.get("weights") or {}).items()
        ],
        "figures": {view["id"]: interactive_figure(plots[pair]) for pair, view in views.items()},
        "dark": {colour.light: colour.dark for colour in looks.PALETTE},
        "font": FONT,
        "looks": looks,
    }
    return _rendered(context)


def _rendered(context: Mapping[str, Any]) -> str:
    jinja2 = require("jinja2", "report", _PURPOSE)
    markup = require("markupsafe", "report", _PURPOSE).Markup
    plotlyjs = require("plotly.offline", "report", _PURPOSE).get_plotlyjs()
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sharpmax.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    templates = importlib.resources.files("sharpmax.report") / "templates"
    script = (templates / "report.js").read_text(encoding="utf-8")
    template = environment.get_template("report.html.jinja")
    return str(template.render(context, plotlyjs=markup(plotlyjs), script=markup(script)))


def _plot(tables: Tables, name: str, recipe: str) -> Plot | Heat:
    with readable(f"figure {name!r}"):
        return build(tables, name, recipe)


def _figure_view(name: str, recipe: str, plot: Plot | Heat) -> dict[str, Any]:
    svg = svg_text(static_figure(plot, titled=False)).encode("utf-8")
    return {
        "id": f"{name}-{recipe}",
        "name": name,
        "recipe": recipe,
        "title": plot.title,
        "note": plot.note,
        "caption": plot.caption,
        "alt": plot.alt,
        "static": "data:image/svg+xml;base64," + base64.b64encode(svg).decode("ascii"),
        "hint": name == "accuracy",
        "legend": [] if isinstance(plot, Heat) else legend(plot),
        "choices": [(arm, looks.look(arm).label) for arm in plot.arms] if isinstance(plot, Heat) else [],
    }


def _recipe_view(tables: Tables, recipe: str, views: Mapping[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": recipe,
        "label": capital(recipe_name(recipe)),
        "describe": describe(tables, recipe),
        "tiles": tiles(tables, recipe),
        "figures": [view for (_, its), view in views.items() if its == recipe],
        "grids": grids(tables, recipe),
        "end": end_sentence(tables, recipe),
        "end_grid": end_grid(tables, recipe) if part(tables, "fit", recipe) else None,
        "end_span": (part(tables, "fit", recipe) or {}).get("paper_acts_on"),
    }


def _summary(tables: Tables) -> list[tuple[str, list[str]]]:
    parts = (
        ("What was measured", measured),
        ("What it means", meant),
        ("What the fix buys", fixed),
        ("Can failures be noticed?", detected),
    )
    return [(title, said) for title, say in parts if (said := say(tables))]


def _method(tables: Tables) -> dict[str, Any]:
    setting = tables.get("setting") or {}
    arms = looks.in_order({arm for recipe in recipes(tables) for arm in part(tables, "accuracy", recipe) or {}})
    policies = setting.get("policies") or {}
    return {
        "train_sizes": [count(n) for n in setting.get("train_sizes") or []],
        "classes": setting.get("classes"),
        "samples": setting.get("samples"),
        "sizes": joined([count(n) for n in setting.get("sizes") or []]),
        "recipes": [
            {
                "label": capital(recipe_name(recipe)),
                "describe": describe(tables, recipe),
                "steps": count(chosen["steps"]),
                "seeds": len(chosen["seeds"]),
            }
            for recipe, chosen in (setting.get("recipes") or {}).items()
        ],
        "arms": [
            {
                "label": capital(looks.look(arm).label),
                "about": looks.look(arm).about,
                "rules": _rules(policies, arm),
            }
            for arm in arms
        ],
    }


def _rules(policies: Mapping[str, Any], arm: str) -> list[tuple[str, str]]:
    """The rule of an arm for each recipe, or once if it is the same for all."""
    rules = [(capital(recipe_name(recipe)), str(known[arm])) for recipe, known in policies.items() if known.get(arm)]
    return rules[:1] if len({rule for _, rule in rules}) == 1 else rules
