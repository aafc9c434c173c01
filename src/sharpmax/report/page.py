"""Pages (self-contained HTML) and figure files (SVG, PNG) from saved tables."""

from __future__ import annotations

import base64
import gzip
import importlib.resources
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sharpmax.errors import FileFormatError
from sharpmax.files import write_text
from sharpmax.lazy import require
from sharpmax.report import calibrate, charts, clrs, compare, evaluate, probe, reproduce, training
from sharpmax.report.tables import RUNS, Report, Tables, readable
from sharpmax.report.words import count, joined, origin_of_run, plural, span

FILE_NAME = "report.html"

_PURPOSE = "writing pages"
_COMMANDS: dict[str, tuple[Callable[[Tables], Report], tuple[str, ...]]] = {
    "clrs": (clrs.report, ("by_algorithm",)), "compare": (compare.report, ("leaderboard", "rules")),
    "evaluate": (evaluate.report, ("paired/",)), "calibrate": (calibrate.report, ("candidates",)),
    "probe": (probe.report, (RUNS, "heads/")), "reproduce": (reproduce.report, ("comparison",)),
    "training": (training.report, ("training_heads",)),
}  # fmt: skip
"""The report of each command, and the prefixes of the names of its tables; more specific ones first."""


def command_of(tables: Tables) -> str | None:
    """Return the command of these results by the names of their tables; None if it has no page."""
    known = _COMMANDS.items()
    return next((name for name, (_, marks) in known if any(table.startswith(marks) for table in tables)), None)


def report_of(tables: Tables) -> Report:
    """Return the report of these tables; FileFormatError if they are damaged or their command has no page."""
    command = command_of(tables)
    if command is None:
        allowed = f"those of sharpmax {', '.join(sorted(_COMMANDS))}"
        raise FileFormatError(f"results: nothing to report in tables {sorted(tables)}; allowed: {allowed}")
    with readable():
        return _COMMANDS[command][0](tables)


def together(saved: Sequence[tuple[str, Mapping[str, Any]]]) -> Tables:
    """Combine two named results of `sharpmax probe` into the tables of one page."""
    commands = {name: command_of(results["tables"]) or "no command with a page" for name, results in saved}
    if set(commands.values()) != {"probe"}:
        given = " and ".join(f"{name!r} ({command})" for name, command in commands.items())
        raise FileFormatError(f"results: {given} cannot be compared; allowed: two results of sharpmax probe")
    return {RUNS: [{"name": name, **results} for name, results in saved]}


def draw(tables: Tables, folder: str | Path) -> list[Path]:
    """Write every figure of these tables as SVG and PNG."""
    report = report_of(tables)
    with readable():
        drawn = [(figure, figure.chart()) for figure in report.figures]
    return [
        path
        for figure, chart in drawn
        for path in charts.write_files(chart, figure.title, figure.caption, Path(folder), figure.name)
    ]


def write_page(command: str, provenance: Mapping[str, Any], tables: Tables, folder: str | Path) -> Path:
    """Write the page of a run to `folder`/report.html."""
    report = report_of(tables)
    with readable():
        specs = {one.name: charts.spec_of(one.chart()) | {"description": one.title} for one in report.figures}
        # Vega, Vega-Lite and Vega-Embed as one script; compression halves the size of the page.
        library = str(require("vl_convert", "report", _PURPOSE).javascript_bundle())
        packed = {"specs": specs, "dark": charts.DARK, "library": library}
        text = json.dumps(packed, ensure_ascii=False, separators=(",", ":"))
        context = {
            "report": report,
            "tables": tables,
            "setting": tables.get("setting"),
            "origin": origin_of_run(command, provenance, tables),
            "figures": base64.b64encode(gzip.compress(text.encode("utf-8"), mtime=0)).decode("ascii"),
            "charts": charts,
            "script": trusted(asset("report.js")),
        }
        page = rendered("report.html.jinja", context)
    return write_text(Path(folder) / FILE_NAME, page)


def asset(name: str) -> str:
    """The text of a file in `templates`."""
    return (importlib.resources.files("sharpmax.report") / "templates" / name).read_text(encoding="utf-8")


def rendered(template: str, context: Mapping[str, Any]) -> str:
    """Render a template; values are escaped unless they are `trusted`."""
    jinja2 = require("jinja2", "report", _PURPOSE)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sharpmax.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    known = {one.__name__: one for one in (count, joined, plural, span)}
    environment.globals.update(known)
    environment.filters.update(known)
    try:
        return str(environment.get_template(template).render(context))
    except jinja2.UndefinedError as problem:  # a value is missing from the results
        raise LookupError(str(problem)) from problem


def trusted(text: str) -> Any:
    """Mark a text of this package, such as a script, as safe to include unescaped."""
    return require("markupsafe", "report", _PURPOSE).Markup(text)
