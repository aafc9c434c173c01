"""What users see, frozen as text in tests/golden: the public API, every help page, and every committed result.

A change on purpose is recorded with SHARPMAX_GOLDEN=update in the environment; the diff of the files then shows it.
"""

from __future__ import annotations

import html
import inspect
import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import sharpmax as sm
from sharpmax.cli import _COMMANDS, make_app
from sharpmax.report.page import write_page
from sharpmax.report.tables import Report
from sharpmax.results import load

APP = make_app()
GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).parents[1]
COMMANDS = ("", "clrs", *_COMMANDS)
RESULTS = sorted(path.parent.name for path in (ROOT / "results").glob("*/results.json"))
WITHOUT_PAGE = {"horizon-smollm2"}
IN_FULL = {
    "calibrate-smollm2", "clrs", "compare", "compare-capacity", "evaluate-smollm2", "probe-smollm2", "reproduce",
}  # fmt: skip
"""One page for each kind; of the others there is the headline."""


def check(name: str, text: str) -> None:
    """Compare with the golden file of this name, or write it."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("SHARPMAX_GOLDEN") == "update":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text.splitlines() == path.read_text(encoding="utf-8").splitlines()


def test_public_api() -> None:
    lines = []
    for name in sm.__all__:
        value = getattr(sm, name)
        if inspect.ismodule(value):
            lines += [f"sm.{name}.{member}{_signature(getattr(value, member))}" for member in value.__all__]
        else:
            lines.append(f"sm.{name}{_signature(value)}")
    check("api", "\n".join(lines) + "\n")


def _signature(value: object) -> str:
    # The signature of a class differs between versions of Python (Protocols, enums); its name is what is public.
    return str(inspect.signature(value)) if inspect.isfunction(value) else ""


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str) -> None:
    runner = CliRunner(env={"COLUMNS": "80", "TERM": "dumb"})
    shown = runner.invoke(APP, [*command.split(), "--help"], prog_name="sharpmax")
    assert shown.exit_code == 0
    text = "\n".join(line.rstrip() for line in shown.stdout.splitlines()) + "\n"
    check(f"help/{command.replace(' ', '-') or 'sharpmax'}", text)


@pytest.mark.parametrize("name", [name for name in RESULTS if name not in WITHOUT_PAGE])
def test_page_of_committed_results(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Report, "figures", ())  # charts are in no text, and take most of the time
    results = load(ROOT / "results" / name)
    page = write_page(results.command, results.provenance, results.tables, tmp_path)
    text = text_of(page.read_text(encoding="utf-8"))
    if name in IN_FULL:
        check(f"pages/{name}", short(text))
    command, headline = text.splitlines()[:2]
    assert command == f"sharpmax {results.command.split()[1]}"
    assert re.search(r"\d.*\.$", headline)


def short(text: str) -> str:
    """The text with the head and the first two rows of each table."""
    lines = text.splitlines()
    kept = [
        line for at, line in enumerate(lines) if not all(one.startswith("| ") for one in lines[max(0, at - 3) : at + 1])
    ]
    return "\n".join(kept) + "\n"


def text_of(page: str) -> str:
    """The visible text of an HTML page: a line for each block, cells of a table row side by side."""
    page = re.sub(r"<(script|style|svg|template|head)\b.*?</\1>", "", " ".join(page.split()))
    page = re.sub(r"</?(p|div|section|h[1-4]|li|tr|dt|dd|figure|figcaption|summary)\b[^>]*>", "\n", page)
    page = re.sub(r"<t[hd]\b[^>]*>", " | ", page)
    lines = html.unescape(re.sub(r"<[^>]+>", "", page)).splitlines()
    return "\n".join(filter(None, (" ".join(line.split()) for line in lines))) + "\n"
