"""The files of the site that are not pages: committed results, and figures and pages drawn from them."""

from __future__ import annotations

import base64
import gzip
import json
import re
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sharpmax.report import charts, explore
from sharpmax.report.page import report_of, write_page
from sharpmax.report.tables import Report
from sharpmax.results import load

from .links import on_site

__all__ = [
    "DIRECTIVE",
    "INTERACTIVE",
    "explore_page",
    "file_of",
    "fitted",
    "generated",
    "narrow",
    "narrow_figures",
    "report_in",
]

DIRECTIVE = re.compile(r"^<!-- (\w+): (\S[^>]*?) -->$", re.MULTILINE)
"""A directive of a page, which is replaced by results."""


INTERACTIVE = (
    "calibrate-smollm2", "clrs", "compare", "evaluate-qwen2.5-coder-0.5b",
    "evaluate-smollm2", "evaluate-smollm2-controls", "evaluate-smollm2-rules", "probe-smollm2", "reproduce",
)  # fmt: skip
"""Results with a page of their own on the site; each carries the charting library, 300 kB."""


PHONE = 372
"""Width of a figure drawn for a phone, in pixels."""


def file_of(root: Path, name: str) -> Path:
    """The path of the committed results of this name; it may not exist."""
    return root / "results" / name / "results.json"


def generated(root: Path, pages: Sequence[str]) -> dict[str, str | bytes]:
    """Files of the site: committed results, gzipped, and the figures and interactive pages that `pages` ask for."""
    files: dict[str, str | bytes] = {}
    for file in sorted([*root.glob("results/*/*.json"), *root.glob("benchmarks/*.*")]):
        packed = gzip.compress(file.read_bytes(), mtime=0) if file.suffix == ".json" else file.read_bytes()
        files[on_site(file.relative_to(root).as_posix())] = packed
    for name, figure in _asked(root, pages):
        files[f"data/results/{name}/{figure}.svg"] = _svg(file_of(root, name), figure)
    for kind, name in (found for text in pages for found in DIRECTIVE.findall(text)):
        if kind == "report" and name in INTERACTIVE and file_of(root, name).exists():
            files[f"data/results/{name}/report.html"] = _page(file_of(root, name))
    return files


def narrow_figures(root: Path, pages: Sequence[str]) -> dict[str, str]:
    """The figures that `pages` ask for, drawn for the width of a phone."""
    return {
        narrow(f"data/results/{name}/{figure}.svg"): _svg(file_of(root, name), figure, PHONE)
        for name, figure in _asked(root, pages)
    }


def narrow(path: str) -> str:
    """The address of a figure drawn for a phone, given that of the figure."""
    return path.removesuffix(".svg") + "-narrow.svg"


def _asked(root: Path, pages: Sequence[str]) -> list[tuple[str, str]]:
    """The figures that pages show: names of results and figures."""
    found = []
    for kind, what in (found for text in pages for found in DIRECTIVE.findall(text)):
        name, _, figure = what.partition("/")
        if kind not in ("report", "figure") or not file_of(root, name).exists():
            continue
        report = report_in(file_of(root, name))
        firsts = [one.name for part in report.parts for one in part.figures[:1]]
        found += [(name, one) for one in (firsts if kind == "report" else [figure])]
    return list(dict.fromkeys(found))


@cache
def report_in(file: Path) -> Report:
    """What a page shows of the results in a file."""
    return report_of(load(file).tables)


@cache
def _specs(file: Path) -> dict[str, Any]:
    """The charts of a page by name, as they are packed into it."""
    (packed,) = re.findall(r'id="figures">([^<]+)<', _page(file))
    specs: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed)))["specs"]
    return specs


@cache
def _svg(file: Path, name: str, width: int = 760) -> str:
    return _smaller(charts.svg_of(fitted(_specs(file)[name], width)))


def _smaller(svg: str) -> str:
    """The same picture in fewer bytes: coordinates to a hundredth of a pixel, colours in hexadecimal."""
    svg = re.sub(r"(\.\d\d)\d+(?=[^<>]*>)", r"\1", svg)
    return re.sub(
        r"rgb\((\d+), (\d+), (\d+)\)", lambda found: "#" + "".join(f"{int(one):02x}" for one in found.groups()), svg
    )


def fitted(spec: dict[str, Any], width: int) -> dict[str, Any]:
    """A chart with panels that share `width` pixels, as a report's script sets them in a browser."""
    meta, config = spec["usermeta"], spec["config"]
    columns = max(1, min(meta["columns"], width // meta["minimum"])) if width < 760 else meta["columns"]
    panel = width // columns - meta["around"]
    entries = max(1, width // (7 * meta["legend"] + 34))
    # A browser's font may be wider than the one drawn with: columns of the legend need space between them.
    legend = {**config["legend"], "columnPadding": 24, "columns": entries}
    return {
        **spec,
        "columns": columns,
        "concat": [{**one, "width": panel} for one in spec["concat"]],
        "config": {**config, "legend": legend, "title": {**config["title"], "limit": panel + meta["around"] - 30}},
    }


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
