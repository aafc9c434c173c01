"""The page and figures of `sharpmax evaluate` say what its tables show, and nothing else."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from sharpmax.errors import FileFormatError
from sharpmax.report.figures import draw, drawable
from sharpmax.report.interactive import interactive_figure
from sharpmax.report.page import write_page
from sharpmax.report.plot import legend
from sharpmax.report.registry import story_of
from sharpmax.report.sections import evaluate as summary
from sharpmax.report.sections import evaluate_charts as grids
from sharpmax.report.sections.evaluate import tiles
from sharpmax.report.sections.evaluate_charts import right_answers
from sharpmax.report.static import static_figure
from tests.report.evaluate_tables import COMMAND, SIZES, make_tables
from tests.report.reproduce_tables import PROVENANCE
from tests.report.reproduce_tables import make_tables as reproduce_tables
from tests.report.test_page import Page

TABLES = make_tables()
ONE = make_tables(("kv",))


def everything(tables: Any) -> list[str]:
    parts = (summary.measured, summary.lost, summary.gained, summary.elsewhere, summary.cost, summary.remarks)
    return [sentence for part in parts for sentence in part(tables)]


def changed(**tables: Any) -> dict[str, Any]:
    return {**copy.deepcopy(ONE), **tables}


def test_the_tables_decide_which_story_is_told() -> None:
    assert getattr(story_of(TABLES), "name", None) == "evaluate"
    assert getattr(story_of(reproduce_tables()), "name", None) == "reproduce"
    assert story_of({"bench": {}, "setting": {}}) is None


def test_the_whole_summary() -> None:
    said = everything(TABLES)
    for sentence in said:
        assert sentence.endswith(".")
        assert "  " not in sentence
    text = " ".join(said)
    assert "200 prompts of each size of 3 tasks" in text
    assert "acts in 59 of 270 heads" in text
    assert "On kv, the model as it comes loses accuracy as inputs grow: 64.5% right at size 8 and 10.0% at" in text
    assert "The policy smollm2 raises kv from 12.0% to 89.5% at size 128 (p < 0.001), its largest gain" in text
    assert "better at 7 of 7 sizes and worse at none, +64.3 points on average" in text
    assert "smollm2, on formats it was never calibrated on: +16.1 points on houses and +17.0 points on json" in text
    assert "log-length:64, on the other formats" in text
    assert "+0.62% on 2,048 tokens of text (16.08 → 16.18)" in text
    assert "−0.10% on its own answers" in text
    assert "smollm2 takes 1.21× of the time to read 2,048 tokens and 1.04× to say one more" in text
    assert "count outside 2 … 512" in text


def test_nothing_is_claimed_that_is_not_shown() -> None:
    for p, gain, says, never in (
        (0.3, 5.0, "makes no difference on kv that this run can show", "raises"),
        (0.001, -5.0, "costs accuracy on kv: worse at 7 of 7 sizes", "raises"),
    ):
        tables = changed()
        for n in map(str, SIZES):
            plain = tables["accuracy/kv"]["as it comes"][n]["mean"]
            tables["accuracy/kv"]["smollm2"][n]["mean"] = plain + gain
            tables["paired/kv"]["smollm2"][n]["p"] = p
        said = summary.gained(tables)[0]
        assert says in said
        assert never not in said
        assert "smollm2 gains" not in right_answers(tables, "kv").title
    flat = changed()
    for n in map(str, SIZES):
        flat["accuracy/kv"]["as it comes"][n] |= {"mean": 50.0, "low": 43.0, "high": 57.0}
    assert "does not clearly lose" in summary.lost(flat)[0]
    assert "loses track" not in right_answers(flat, "kv").title


def test_accuracy_table_marks_what_the_test_shows() -> None:
    kv = grids.accuracy_grids(TABLES)[0]
    assert [cell.text for cell in kv.head] == ["arm", *(f"n = {n}" for n in SIZES)]
    rows = {row[0].text: row[1:] for row in kv.rows}
    assert rows["as it comes"][0].text == "64.5"
    assert not any(cell.strong for cell in rows["as it comes"])
    assert (rows["smollm2"][3].text, rows["smollm2"][3].small) == ("93.0*", "88.6–95.8")
    assert rows["log-length:64"][0].text == "66.5"  # four prompts more of 200: chance
    assert rows["log-length:64"][6].text == "2.5*"  # worse, and shown to be
    houses = grids.paired_grids(TABLES)[1]
    assert houses.rows[0][1].text == "+65 −3"


def test_perplexity_and_cost_tables() -> None:
    perplexity, cost = grids.perplexity_grid(TABLES), grids.cost_grid(TABLES)
    assert perplexity is not None
    assert cost is not None
    assert [cell.text for cell in perplexity.head] == [
        "arm", "2,048 tokens of text", "6,144 tokens of text", "own answers",
    ]  # fmt: skip
    assert (perplexity.rows[0][1].text, perplexity.rows[0][1].small) == ("16.08", "")
    assert perplexity.rows[1][2].small == "+0.91%, +0.45 to +1.37"
    assert [cell.text for cell in cost.rows[1]] == ["smollm2", "6,195", "63.8", "1,330"]
    assert cost.rows[1][1].small == "1.21×"
    blind = changed()
    for cells in blind["cost"].values():
        cells["peak_mib"] = None
    cost = grids.cost_grid(blind)
    assert cost is not None
    assert len(cost.head) == 3
    assert "emory" not in cost.note
    assert "memory" not in " ".join(summary.cost(blind))


def test_one_window_has_no_interval() -> None:
    tables = changed()
    tables["perplexity"]["smollm2"]["2048"] |= {"low": None, "high": None}
    found = grids.perplexity_grid(tables)
    assert found is not None
    assert found.rows[1][1].small == "+0.62%"


def test_harness_table() -> None:
    cell = {"mean": 0.4213, "sem": 0.0049}
    tables = changed(
        harness={arm: {"hellaswag": {"acc": cell, "acc_norm": {"mean": 0.5, "sem": None}}} for arm in "ab"}
    )
    tables["setting"]["arms"] = {"a": tables["setting"]["arms"]["as it comes"]}
    found = grids.harness_grid(tables)
    assert found is not None
    assert [(c.text, c.small) for c in found.head] == [("arm", ""), ("hellaswag", "acc"), ("hellaswag", "acc_norm")]
    assert [(c.text, c.small) for c in found.rows[0]] == [("a", ""), ("0.4213", "± 0.0049"), ("0.5", "")]
    assert grids.harness_grid(ONE) is None


def test_tiles_speak_of_the_best_policy() -> None:
    found = tiles(TABLES)
    assert [tile.value for tile in found] == ["64.5% → 10.0%", "+77.5 points", "+0.91%", "1.21×"]
    assert "smollm2" in found[1].label


def test_a_figure_has_every_arm_its_intervals_and_gains() -> None:
    plot = right_answers(TABLES, "kv")
    left, right = plot.panels
    assert [series.arm for series in left.series] == ["as it comes", "smollm2", "log-length:64"]
    assert [series.arm for series in right.series] == ["smollm2", "log-length:64"]
    assert left.series[1].low is not None
    assert left.series[1].low[3] == pytest.approx(TABLES["accuracy/kv"]["smollm2"]["64"]["low"])
    assert right.series[0].y[3] == pytest.approx(77.0)
    # An arm looks the same in both panels, and like no other.
    for entry in legend(plot):
        assert {s.look.colour for panel in plot.panels for s in panel.series if s.arm == entry.arm} == {
            entry.look.colour
        }
    assert len({entry.look.marker for entry in legend(plot)}) == 3
    json.dumps(interactive_figure(plot), allow_nan=False)
    static_figure(plot)


def test_a_run_without_policies(tmp_path: Path) -> None:
    tables = make_tables(("kv",), policies=False)
    assert len(right_answers(tables, "kv").panels) == 1
    assert [tile.value for tile in tiles(tables)] == ["64.5% → 10.0%"]
    text = " ".join(Page(write_page(COMMAND, PROVENANCE, tables, tmp_path).read_text(encoding="utf-8")).text)
    assert "What a policy gets back" not in text


def test_the_page_has_everything_in_order(tmp_path: Path) -> None:
    html = write_page(COMMAND, PROVENANCE, TABLES, tmp_path).read_text(encoding="utf-8")
    text = " ".join(Page(html).text)
    place = 0
    for part in (
        "Does the model keep track as inputs grow?", "What was measured", "What is lost as inputs grow",
        "What a policy gets back", "On other formats", "What it costs", "At a glance", "Right answers (%): kv",
        "Perplexity", "Time and memory", "Prompts gained and lost: json", "How it was done", "Provenance", COMMAND,
    ):  # fmt: skip
        assert part in text[place:], part
        place = text.index(part, place)
    assert "Citation" not in text
    assert drawable(TABLES) == ["accuracy-kv", "accuracy-houses", "accuracy-json"]


def test_text_of_a_file_is_escaped(tmp_path: Path) -> None:
    evil = "</script><script>alert('x')</script>"
    tables = make_tables(("kv",))
    tables = json.loads(json.dumps(tables).replace("log-length:64", evil).replace("the number of one name", evil))
    html = write_page(COMMAND, PROVENANCE, tables, tmp_path).read_text(encoding="utf-8")
    assert "alert('x')" not in html
    assert len(list(Page(html).named("script"))) == 4


def test_a_task_cannot_lead_out_of_the_folder() -> None:
    with pytest.raises(FileFormatError, match="name of a task"):
        drawable({"accuracy/../../x": {}, "paired/../../x": {}})


@pytest.mark.parametrize("table", ["setting", "accuracy/kv", "paired/kv", "perplexity", "cost"])
def test_damaged_tables(table: str, tmp_path: Path) -> None:
    for damage in ({"smollm2": 3, "as it comes": 4, "arms": [5]}, [1.0]):
        with pytest.raises(FileFormatError, match=r"^results: the tables of .* are damaged \(.*\); run their.*again$"):
            write_page(COMMAND, PROVENANCE, {**ONE, table: damage}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_drawn_files_are_the_same_every_time(tmp_path: Path) -> None:
    first, second = draw(ONE, tmp_path / "a"), draw(copy.deepcopy(ONE), tmp_path / "b")
    assert [path.name for path in first] == ["accuracy-kv.svg", "accuracy-kv.png"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
