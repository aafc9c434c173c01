"""The page is one file that holds everything, says it in order, and trusts nothing it was given."""

from __future__ import annotations

import base64
import copy
import json
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from sharpmax.errors import ArgumentError, FileFormatError, MissingExtraError
from sharpmax.report.page import FILE_NAME, write_page
from sharpmax.report.sections.reproduce_tables import end_grid, grids
from tests.report.reproduce_tables import COMMAND, PROVENANCE, make_tables, one_seed

FULL = make_tables()
PAPER = make_tables(("paper",))
SMALL = {name: PAPER[name] for name in ("setting", "weights", "accuracy", "comparison", "published")}
"""Tables of one quick figure."""


class Page(HTMLParser):
    """The page as a browser would read it: tags with their attributes, ids, and texts outside of scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag

    def handle_data(self, data: str) -> None:
        if self._open not in ("script", "style"):
            self.text.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def named(self, tag: str) -> Iterator[dict[str, str | None]]:
        return (attributes for name, attributes in self.tags if name == tag)


def written(folder: Path, tables: dict[str, Any], command: str = COMMAND) -> str:
    path = write_page(command, PROVENANCE, tables, folder)
    assert path == folder / FILE_NAME
    assert [file.name for file in folder.iterdir()] == [FILE_NAME]
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("page"), FULL)


def test_everything_in_order(html: str) -> None:
    text = " ".join(Page(html).text)
    parts = [
        "Does attention stay sharp as inputs grow?",
        "A single attention head, trained on small sets,",
        "What was measured",
        "What it means",
        "What the fix buys",
        "Can failures be noticed?",
        "At a glance",
        "Plain softmax lets go of the right item",
        "Accuracy falls as sets grow",
        "Plain softmax spreads its weight",
        "Best β of wrongly ranked inputs",
        "Confidence tells wrong answers from right ones among",
        "Gain over plain softmax (percentage points)",
        "Coefficients of the polynomials",
        "Where the paper’s polynomial stops acting",
        "How it was done",
        "Provenance",
        "Models of the sharp recipe",
        "Citation",
        "Softmax is not Enough (for Sharp Size Generalisation)",
    ]
    place = 0
    for part in parts:
        assert part in text[place:]
        place = text.index(part, place)
    for word in (COMMAND, PROVENANCE["commit"], "torch 2.13.0", "Example GPU", "β such that H = 0.41 nats", "53.8"):
        assert word in text


def test_one_file_without_network(html: str) -> None:
    page = Page(html)
    assert html.count("plotly.js v") == 1
    assert "default-src 'none'" in html
    for tag, attributes in page.tags:
        for name in ("src", "data", "srcset", "action"):
            assert (attributes.get(name) or "data:").startswith("data:"), tag
    assert list(page.named("link")) == []
    links = {attributes["href"] for attributes in page.named("a")}
    assert {link for link in links if not (link or "").startswith("#")} == {"https://arxiv.org/abs/2410.01104"}


def test_readable_for_machines_that_read_aloud(html: str) -> None:
    page = Page(html)
    assert next(page.named("html"))["lang"] == "en"
    assert all(attributes["alt"] for attributes in page.named("img"))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    buttons = list(page.named("button"))
    assert len(buttons) > 10
    assert all(button["aria-pressed"] in ("true", "false") and button["type"] == "button" for button in buttons)
    assert all("scope" in cell for cell in page.named("th"))
    for _, attributes in page.tags:
        if attributes.get("class") == "plot":
            assert attributes["aria-label"]


def test_static_figures_are_inside(html: str) -> None:
    images = list(Page(html).named("img"))
    assert len(images) == 10
    for image in images:
        svg = base64.b64decode((image["src"] or "").removeprefix("data:image/svg+xml;base64,"))
        assert svg.rstrip().endswith(b"</svg>")


def test_figures_are_plain_json(html: str) -> None:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', html, re.DOTALL)
    assert found
    data = json.loads(found[1])
    assert len(data["figures"]) == 10
    assert all(value.startswith("#") for pair in data["dark"].items() for value in pair)


def test_the_same_results_give_the_same_page(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert written(tmp_path / "a", SMALL) == written(tmp_path / "b", copy.deepcopy(SMALL))


def test_text_of_a_file_is_escaped(tmp_path: Path) -> None:
    evil = "</script><script>alert('x')</script><img src=x onerror=alert(1)>"
    tables = copy.deepcopy(SMALL)
    tables["setting"]["recipes"]["paper"]["describe"] = evil
    tables["setting"]["policies"]["paper"][evil] = evil
    tables["weights"]["paper"]["trained"]["commit"] = evil
    for name in ("accuracy", "comparison"):
        tables[name][evil] = tables[name]["paper"]
    html = written(tmp_path, tables, command=evil)
    page = Page(html)
    assert "alert('x')" not in html
    assert "<img src=x" not in html
    assert len(list(page.named("script"))) == 4
    assert all("onerror" not in attributes for _, attributes in page.tags)
    assert evil in "".join(page.text)


def test_one_recipe_needs_no_switch(tmp_path: Path) -> None:
    page = Page(written(tmp_path, SMALL))
    assert not any("data-show" in button for button in page.named("button"))
    assert "The sharp recipe" not in " ".join(page.text)


def test_missing_parts_are_left_out(tmp_path: Path) -> None:
    text = " ".join(Page(written(tmp_path, {"fit": FULL["fit"]})).text)
    assert "Best β of wrongly ranked inputs" in text
    assert "Accuracy (%)" not in text
    assert "At a glance" not in text


def test_one_seed_and_untold_training(tmp_path: Path) -> None:
    tables = one_seed(SMALL)
    tables["weights"]["paper"]["trained"] = None
    text = " ".join(Page(written(tmp_path, tables)).text)
    assert "no test" in text
    assert "p <" not in text.replace("bold where p < 0.05", "")
    assert "±" not in text


def test_accuracy_stands_beside_the_published_numbers() -> None:
    table = grids(FULL, "paper")[0]
    assert [cell.text for cell in table.head][:5] == [
        "items n",
        "plain softmax",
        "published",
        "paper's polynomial",
        "published",
    ]
    row = next(row for row in table.rows if row[0].text == "1,024")
    assert [cell.text for cell in row][:5] == ["1,024", "49.9 ± 0.6", "53.8", "59.1 ± 0.6", "57.7"]
    assert not any(cell.text == "published" for cell in grids(FULL, "sharp")[0].head)


def test_tables_of_a_run() -> None:
    found = {table.title: table for table in grids(FULL, "paper")}
    gain = found["Gain over plain softmax (percentage points)"]
    row = next(row for row in gain.rows if row[0].text == "1,024")
    assert (row[4].text, row[4].small, row[4].strong) == ("+15.3", "p < 0.001", True)
    first = gain.rows[0][1]
    assert (first.strong, first.small) == (False, "p = 0.076")
    detection = found["Telling wrong answers from right ones (AUROC)"]
    assert [cell.text for cell in detection.rows[-1]] == ["all sizes", "0.900", "0.840", "0.920", "9,000", "19,000"]
    assert detection.rows[0][1].text == "–"
    coefficients = found["Coefficients of the polynomials"]
    assert [cell.text for cell in coefficients.rows[1]][:6] == [
        "paper's polynomial",
        "−0.037",
        "0.481",
        "−2.3",
        "4.917",
        "−1.791",
    ]
    assert coefficients.rows[0][6].text == "0.62 to ∞"
    for table in found.values():
        assert {len(row) for row in table.rows} == {len(table.head)}


def test_the_end_of_the_polynomial_size_by_size() -> None:
    table = end_grid(FULL, "paper")
    assert table is not None
    acts = {row[0].text: row[2].small for row in table.rows}
    assert acts["16"] == "does nothing"
    assert acts["256"] == "acts"
    assert acts["16,384"] == "does nothing"
    assert end_grid({}, "paper") is None


def test_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="nothing to report"):
        write_page(COMMAND, PROVENANCE, {"weight": {}}, tmp_path)


@pytest.mark.parametrize("table", ["setting", "weights", "accuracy", "comparison", "published"])
def test_damaged_tables(table: str, tmp_path: Path) -> None:
    with pytest.raises(
        FileFormatError, match=r"^results: the tables of .* are damaged \(.*\); run their command again$"
    ):
        write_page(COMMAND, PROVENANCE, {**SMALL, table: {"softmax": 3, "paper": 4, "recipes": [5]}}, tmp_path)
    with pytest.raises(FileFormatError, match="damaged"):
        write_page(COMMAND, PROVENANCE, {**SMALL, table: [1.0]}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="cannot write"):
        write_page(COMMAND, PROVENANCE, {"detection": FULL["detection"]}, tmp_path / "file")


@pytest.mark.parametrize("module", ["matplotlib", "jinja2", "plotly"])
def test_without_an_extra(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing:
        def find_spec(self, name: str, *_: Any) -> None:
            if name.partition(".")[0] == module:
                raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(MissingExtraError, match=r"pip install 'jinja2>=.*' 'matplotlib>=.*' 'plotly>="):
        write_page(COMMAND, PROVENANCE, {"detection": FULL["detection"]}, tmp_path)
    assert list(tmp_path.iterdir()) == []
