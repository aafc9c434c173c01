"""Pages and figures: one light file that holds everything and trusts nothing, and files that name what is wrong."""

from __future__ import annotations

import copy
import json
import random
import re
import sys
import xml.etree.ElementTree as ET
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from sharpmax.errors import FileFormatError, MissingExtraError
from sharpmax.report import charts
from sharpmax.report.page import FILE_NAME, draw, report_of, write_page
from tests.report.saved import PROVENANCE, SAVED, evaluated, probed, tables

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
