"""The site's files that are not pages: results as they are committed, and what is drawn from them."""

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

__all__ = ["DIRECTIVE", "INTERACTIVE", "explore_page", "file_of", "generated", "report_in"]

DIRECTIVE = re.compile(r"^<!-- (\w+): (\S[^>]*?) -->$", re.MULTILINE)
"""A directive of a page, which is replaced by results."""


INTERACTIVE = (
    "calibrate-smollm2", "clrs", "compare", "evaluate-qwen2.5-coder-0.5b",
    "evaluate-smollm2", "evaluate-smollm2-controls", "evaluate-smollm2-rules", "probe-smollm2", "reproduce",
)  # fmt: skip
"""Results with a page of their own on the site; each carries the charting library, 300 kB."""


def file_of(root: Path, name: str) -> Path:
    """The committed results of this name, whether they are there or not."""
    return root / "results" / name / "results.json"


def generated(root: Path, pages: Sequence[str]) -> dict[str, str | bytes]:
    """Files of the site: committed results, gzipped, and the figures and pages that `pages` ask for."""
    files: dict[str, str | bytes] = {}
    for file in sorted([*root.glob("results/*/*.json"), *root.glob("benchmarks/*.*")]):
        packed = gzip.compress(file.read_bytes(), mtime=0) if file.suffix == ".json" else file.read_bytes()
        files[on_site(file.relative_to(root).as_posix())] = packed
    for kind, what in (found for text in pages for found in DIRECTIVE.findall(text)):
        name, _, figure = what.partition("/")
        if not file_of(root, name).exists() or kind not in ("report", "figure"):
            continue
        report = report_in(file_of(root, name))
        for one in report.figures:
            if one.name == figure or (kind == "report" and any(one in part.figures[:1] for part in report.parts)):
                files[f"data/results/{name}/{one.name}.svg"] = _svg(file_of(root, name), one.name)
        if kind == "report" and name in INTERACTIVE:
            files[f"data/results/{name}/report.html"] = _page(file_of(root, name))
    return files


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
def _svg(file: Path, name: str) -> str:
    spec = _specs(file)[name]
    legend = {**spec["config"]["legend"], "columnPadding": 24}  # a browser's font may be wider than the one drawn with
    return charts.svg_of({**spec, "config": {**spec["config"], "legend": legend}})


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
