"""Pages and figures: one light file that trusts nothing, reports of unusual results, and what is wrong with a file.

The text of unusual reports is in tests/golden/reports; SHARPMAX_GOLDEN=update records it.
"""

from __future__ import annotations

import copy
import json
import random
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from sharpmax.errors import FileFormatError, MissingExtraError
from sharpmax.report import charts, clrs
from sharpmax.report.page import FILE_NAME, draw, report_of, together, write_page
from tests.report.saved import PROVENANCE, SAVED, compared, evaluated, exam, probed, reproduced, tables
from tests.test_golden import check, text_of

COMMAND = "sharpmax evaluate smollm2 --policy rows"
MOST = 750_000


def tags(html: str, name: str) -> list[str]:
    """The opening tags of this name outside of scripts and styles."""
    return re.findall(rf"<{name}\b[^>]*>", re.sub(r"(?s)(<(script|style)[^>]*>).*?</\2>", r"\1", html))


def written(folder: Path, of: dict[str, Any], command: str = COMMAND) -> str:
    path = write_page(command, PROVENANCE, of, folder)
    assert path == folder / FILE_NAME
    assert [file.name for file in folder.iterdir()] == [FILE_NAME]
    assert path.stat().st_size < MOST
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("page"), evaluated())


def test_the_answer_comes_first_and_provenance_last(html: str) -> None:
    text = unescape(html.partition("<body>")[2])
    in_order = (
        "Mean accuracy over 2 tasks and all sizes: 23.9% → 65.7%. Largest change of perplexity: +0.74%.",
        "baseline → smollm2", "Accuracy by size", "Variants", "Accuracy (%): formats/csv", "Method", "Provenance",
        "torch 2.13.0",
    )  # fmt: skip
    places = [text.index(words) for words in in_order]
    assert places == sorted(places)


def test_one_file_without_network_and_readable_for_screen_readers(html: str) -> None:
    assert "default-src 'none'" in html
    assert tags(html, "link") == tags(html, "img") == []
    assert not any("src=" in tag for tag in tags(html, "script"))
    assert all('href="#' in tag for tag in tags(html, "a"))
    assert tags(html, "html") == ['<html lang="en">']
    assert all("scope=" in tag for tag in tags(html, "th"))
    ids = re.findall(r' id="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    plots = [tag for tag in tags(html, "div") if 'class="plot"' in tag]
    assert plots
    assert all(re.search(r'aria-label="[^"]', tag) for tag in plots)


@pytest.mark.parametrize("name", SAVED)
def test_figures_are_valid_and_have_the_numbers_in_five_digits(name: str) -> None:
    for figure in report_of(SAVED[name]()).figures:
        chart = figure.chart()
        chart.to_dict()  # checked against the schema of Vega-Lite
        spec = charts.spec_of(chart)
        assert spec == charts.spec_of(figure.chart())
        texts = [text for text in spec["datasets"].values() if isinstance(text, str)]
        assert texts
        assert not re.search(r"\d\.\d{9}", "".join(texts))


def test_a_large_model_stays_light(tmp_path: Path) -> None:
    found = probed(layers=1)
    heads = list(found["heads/kv"].values())
    found["heads/kv"] = {f"{layer}.{head}": heads[head % len(heads)] for layer in range(64) for head in range(40)}
    assert "the heads that change most" in written(tmp_path, found)


def test_figures_are_drawn_as_svg_and_png(tmp_path: Path) -> None:
    heat_map, _ = draw(tables("calibrate-smollm2"), tmp_path)
    assert "linearGradient" in heat_map.read_text(encoding="utf-8"), "the legend is a bar of all colours"
    paths = draw(evaluated(), tmp_path)
    assert [path.name for path in paths] == ["accuracy.svg", "accuracy.png"]
    root = ET.parse(paths[0]).getroot()
    texts = {"".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"Accuracy by size", "baseline", "smollm2", "accuracy (%)", "32"} <= texts
    assert paths[1].read_bytes().startswith(b"\x89PNG")


def test_text_of_a_file_is_escaped(tmp_path: Path) -> None:
    evil = "</script><script>alert('x')</script><img src=x onerror=alert(1)>"
    found = evaluated()
    found["setting"]["model"] = evil
    found = json.loads(json.dumps(found).replace("smollm2-rows", evil.replace('"', "")))
    html = written(tmp_path, found, command=evil)
    assert "alert('x')" not in html
    assert len(tags(html, "script")) == 2
    assert tags(html, "img") == []
    assert str(escape(evil)).replace("&#x27;", "&#39;") in html


def damaged(value: Any, rng: random.Random) -> Any:
    """A copy with another value, or nothing, at one random place."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.3:
        return rng.choice([3, "x", None, [], {}, [1.0], {"softmax": 3}, float("nan")])
    harmed = copy.copy(value)
    at: Any = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    harmed[at] = damaged(value[at], rng)
    if rng.random() < 0.1:
        del harmed[at]
    return harmed


@pytest.mark.parametrize("name", SAVED)
def test_damage_anywhere_gives_a_report_or_one_line(name: str) -> None:
    found, rng = SAVED[name](), random.Random(2)
    messages = []
    for _ in range(30):
        table = rng.choice(list(found))
        try:
            report_of(found | {table: damaged(found[table], rng)})
        except FileFormatError as problem:
            messages.append(str(problem))
    assert len(messages) > 2
    assert not any("\n" in message for message in messages)


def test_damage_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    found = evaluated()
    del found["accuracy/formats/csv"]["smollm2-rows"]
    words = r"^results: the tables are damaged or of another version \(KeyError: 'smollm2-rows', in .*\); run their "
    for write in (lambda: write_page(COMMAND, PROVENANCE, found, tmp_path), lambda: draw(found, tmp_path)):
        with pytest.raises(FileFormatError, match=words):
            write()
    found = tables("calibrate-smollm2")
    found["heads"]["betas"][0] = ["a figure alone meets this"]
    with pytest.raises(FileFormatError, match=r"TypeError: .*, in calibrate.py line \d+"):
        write_page(COMMAND, PROVENANCE, found, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_drawn_is_refused() -> None:
    found = json.loads(json.dumps(probed()).replace('/kv"', '/../escape"').replace('"kv"', '"../escape"'))
    with pytest.raises(FileFormatError, match="cannot be the name of a file"):
        report_of(found)
    for found in ({}, tables("horizon-smollm2")):
        with pytest.raises(FileFormatError, match="nothing to report in tables"):
            report_of(found)


@pytest.mark.parametrize("module", ["jinja2", "vl_convert"])
def test_a_missing_package_is_named(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=f"needs the package '{module}', which is not installed; install it"):
        write_page(COMMAND, PROVENANCE, tables("evaluate-qwen2.5-coder-0.5b-1024"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def one_task(*only: str) -> dict[str, Any]:
    """An evaluation of one task with these variants."""
    found = evaluated()
    del found["accuracy/ruler/niah_multikey_2"], found["paired/ruler/niah_multikey_2"]
    for name in ("perplexity", "cost", "accuracy/formats/csv", "paired/formats/csv"):
        found[name] = {key: value for key, value in found[name].items() if key in only}
    found["setting"]["variants"] = {name: found["setting"]["variants"][name] for name in only}
    return found


def evaluate_with_harness_and_remarks() -> dict[str, Any]:
    found = evaluated()
    found["harness"] = {name: {"arc": {"acc": {"mean": 0.25, "sem": 0.01}}} for name in found["setting"]["variants"]}
    remarks = ["3.0% of the rows are flat", "1.5% of the rows are flat"]
    found["setting"]["variants"]["smollm2-constant"]["remarks"] = remarks
    return found


def evaluate_loss(p: float) -> dict[str, Any]:
    found = one_task("baseline", "smollm2-constant")
    for n, test in found["paired/formats/csv"]["smollm2-constant"].items():
        found["accuracy/formats/csv"]["smollm2-constant"][n]["mean"] = 1.0
        test["p"] = p
    return found


def calibrate_over_budget() -> dict[str, Any]:
    """The chosen policy breaks the budget and is worse than none."""
    found = tables("calibrate-smollm2")
    chosen = found["candidates"][found["chosen"]]
    chosen["rise"]["docs/2048"], chosen["kl"]["docs/2048"] = 1.5, 0.02
    chosen["nll"] = found["before"]["nll"] + 0.5
    del found["validation"]
    return found


def calibrate_held_out_domain() -> dict[str, Any]:
    """The domain held out may exceed the budget by its factor."""
    found = tables("calibrate-smollm2")
    found["setting"] |= {"budget": 0.01, "held_out": "code", "held_out_factor": 3.0}
    for about in found["candidates"].values():
        about |= {"rise": {"docs/512": 0.5, "code/512": 1.5}, "kl": {"docs/512": 0.008, "code/512": 0.02}}
    return found


def clrs_one_model(*, tested: bool) -> dict[str, Any]:
    found = exam()
    for name in ("accuracy", "means", "by_algorithm", "speed"):
        found[name] = {"clrs-none": found[name]["clrs-none"]}
    found |= {"gains": {}, "gains_by_algorithm": {}}
    del found["training"]
    about = {"model": "smollm2", "describe": "no policy", "steps": 7, "trained": True}
    found["setting"] |= {"variants": {"clrs-none": about}, "too_long": {"bfs": [64]}}
    found["by_algorithm"]["clrs-none"]["minimum"]["in"]["mean"] = 40.0
    if not tested:
        del found["by_algorithm"]["clrs-none"]["minimum"]["in"]
    return found


def compare_one_seed() -> dict[str, Any]:
    """No intervals; softmax loses to dispersion and to wrong ranking."""
    found = compared()
    found["setting"]["seeds"] = [0]
    found["training"]["softmax"]["diverged"] = [0]
    for name in ("accuracy", "hard"):
        for row in found[name].values():
            for cell in row.values():
                cell |= {"low": None, "high": None, "sem": None, "n": 1}
    size = str(found["setting"]["sizes"][-1])
    found["accuracy"]["softmax"][size]["mean"], found["hard"]["softmax"][size]["mean"] = 25.0, 40.0
    found["hard"]["sharp"][size]["mean"] = None
    return found


def capacity_without_rule() -> dict[str, Any]:
    found = tables("compare-capacity")
    for model in found["capacity"]["softmax"]:
        model["half_accuracy_size"] = "beyond"
    found["rules"]["softmax"]["accuracy"] |= {"exponents": None, "constant": None, "r2": None, "used": 0, "beyond": 18}
    return found


def pair(*both: Any) -> Any:
    runs = [{"command": "", "provenance": {}, "tables": found} for found in both]
    return together(list(zip("ab", runs, strict=True)))


def probe_pair() -> Any:
    """Two models, with other sizes; no head of the second loses focus."""
    before, after = probed(layers=1), probed(layers=1, policy="paper")
    for about in after["heads/kv"].values():
        about |= {"slope": -1.0, "slope_low": -1.1, "slope_high": -0.9, "kind": "sharp"}
    after["setting"]["sizes"] = {"kv": [8, 16]}
    return pair(before, after)


def probe_head_without_numbers() -> dict[str, Any]:
    found = probed(layers=1)
    first = next(iter(found["heads/kv"].values()))
    first |= {"kind": "unknown", "slope": None, "slope_low": None, "slope_high": None, "curve": {}, "forecast": {}}
    first["horizon"] = {"tokens": None, "low": None, "high": None}
    return found


def reproduce_one_seed_and_loss() -> dict[str, Any]:
    found = reproduced()
    for row in found["comparison"].values():
        for cell in row.values():
            cell |= {"gain": -abs(cell["gain"]) - 1.0, "p": 0.001}
    found["comparison"]["refit"]["64"] |= {"gain": -0.5, "p": None}
    for row in found["accuracy"].values():
        for cell in row.values():
            cell["sem"] = None
    found["setting"]["left_out"]["paper"] = {"refit": "nothing is wrong"}
    return found


UNUSUAL: dict[str, Callable[[], dict[str, Any]]] = {
    "evaluate-harness-remarks": evaluate_with_harness_and_remarks,
    "evaluate-baseline": lambda: one_task("baseline"),
    "evaluate-loss": lambda: evaluate_loss(0.001),
    "evaluate-not-significant": lambda: evaluate_loss(0.4),
    "calibrate-over-budget": calibrate_over_budget,
    "calibrate-held-out-domain": calibrate_held_out_domain,
    "clrs-one-model": lambda: clrs_one_model(tested=True),
    "clrs-not-tested": lambda: clrs_one_model(tested=False),
    "compare-one-seed": compare_one_seed,
    "capacity-without-rule": capacity_without_rule,
    "probe-pair": probe_pair,
    "probe-head-without-numbers": probe_head_without_numbers,
    "reproduce-one-seed-loss": reproduce_one_seed_and_loss,
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_report_of_unusual_results(name: str, tmp_path: Path) -> None:
    found = UNUSUAL[name]()
    page = write_page("", PROVENANCE, found, tmp_path).read_text(encoding="utf-8")
    charts = {figure.name: figure.chart() for figure in report_of(found).figures}
    panels = [f"{one}: {[panel.title for panel in getattr(chart, 'concat', ())]}\n" for one, chart in charts.items()]
    check(f"reports/{name}", text_of(page) + "".join(panels))


def test_a_clrs_gain_counts_only_if_questions_and_algorithms_agree() -> None:
    gain = {"mean": 2.0, "low": 1.0, "high": 3.0, "gained": 9, "lost": 2, "p": 0.001}
    assert clrs.significant(gain)
    for other in ({"mean": -2.0, "low": -3.0, "high": -1.0}, {"p": 0.02}, {"low": -1.0}):
        assert not clrs.significant(gain | other)


def test_probes_without_a_task_in_common_are_rejected() -> None:
    with pytest.raises(ValueError, match="no task is in both of them"):
        report_of(pair(probed(), probed(task="text")))
