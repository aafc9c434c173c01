"""Results in pages of the site: shown with their numbers, or named as missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sitekit.commands import command_lines
from sitekit.drawn import generated
from sitekit.links import moved
from sitekit.reports import filled
from tests.blocks import ROOT
from tests.report.saved import PROVENANCE, compared


def put(root: Path, name: str, tables: object) -> None:
    body = {"schema": 1, "command": f"sharpmax {name}", "provenance": PROVENANCE, "tables": tables}
    (root / "results" / name).mkdir(parents=True)
    (root / "results" / name / "results.json").write_text(json.dumps(body))


PAGE = "# Leaderboard\n\n<!-- report: compare -->\n"


def test_a_run_that_appears_is_shown(tmp_path: Path) -> None:
    assert "No run is committed as `results/compare` yet" in filled(tmp_path, "results/leaderboard.md", PAGE)
    assert generated(tmp_path, [PAGE]) == {}
    put(tmp_path, "compare", compared())
    shown, files = filled(tmp_path, "results/leaderboard.md", PAGE), generated(tmp_path, [PAGE])
    assert "No run is committed" not in shown
    assert "| method | rank |" in shown
    assert "`sharpmax compare`" in shown
    pictures = {file for file in files if file.endswith(".svg")}
    assert pictures
    site = moved(shown, "results/leaderboard.md")
    assert all(f"](../{file})" in site for file in {*pictures, "data/results/compare/results.json.gz"})
    assert b"<svg" in str(files[sorted(pictures)[0]]).encode()


def test_tables_have_the_numbers_of_the_file() -> None:
    accuracy = json.loads((ROOT / "results" / "reproduce" / "results.json").read_text())["tables"]["accuracy"]
    shown = filled(ROOT, "results/reproduce.md", "<!-- report: reproduce -->")
    for name in ("softmax", "entropy-target"):
        for size in ("16", "1024", "16384"):
            assert f"{accuracy[name][size]['mean']:.1f}" in shown
    bench = json.loads((ROOT / "benchmarks" / "cpu.json").read_text())["tables"]["bench"]
    shown = filled(ROOT, "results/cpu.md", "<!-- bench: cpu -->")
    assert all(f"| {one['median_s']:.3f} | {one['ratio']:.2f} |" in shown for one in bench.values())
    found = json.loads((ROOT / "benchmarks" / "tabpfn.json").read_text())["tables"]["tables"]["synthetic"]["8192"]
    right = [sum(one["accuracy"]) / len(one["accuracy"]) for one in found["policies"].values()]
    shown = filled(ROOT, "how-to/tabpfn.md", "<!-- bench: tabpfn -->")
    assert f"| `synthetic` | 12 | 8,192 | 1.30 | {right[0]:.1%} | {right[1]:.1%} | " in shown


@pytest.mark.parametrize(
    ("link", "page", "target"),
    [
        ("../benchmarks/h200.svg", "gpu.md", "data/benchmarks/h200.svg"),
        ("../../results/reproduce/results.json", "how-to/probe.md", "../data/results/reproduce/results.json.gz"),
        ("../CONTRIBUTING.md", "index.md", "contributing.md"),
        ("docs/quickstart.md", "contributing.md", "quickstart.md"),
        ("../glossary.md", "how-to/probe.md", "../glossary.md"),
        ("https://arxiv.org/abs/1", "index.md", "https://arxiv.org/abs/1"),
    ],
)
def test_links_lead_to_where_things_are_on_the_site(link: str, page: str, target: str) -> None:
    assert moved(f"[x]({link})", page) == f"[x]({target})"


def test_every_command_has_its_help() -> None:
    lines = list(command_lines("all", lambda text: f"## {text}"))
    assert "## `sharpmax clrs train`" in lines
    assert any(line.startswith("| `--budget X` | ") for line in lines)
    assert any("Default: `kv`." in line for line in lines)
