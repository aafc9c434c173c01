"""The page and figures of `sharpmax calibrate` say what its tables show, and nothing else."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from sharpmax.errors import FileFormatError
from sharpmax.report.figures import drawable
from sharpmax.report.interactive import interactive_figure
from sharpmax.report.page import write_page
from sharpmax.report.sections import calibrate as grids
from sharpmax.report.sections import calibrate as summary
from sharpmax.report.sections.calibrate import curve, heads
from sharpmax.report.static import static_figure
from tests.report.calibrate_tables import COMMAND, HEADS, LAYERS, make_tables
from tests.report.reproduce_tables import PROVENANCE
from tests.report.test_page import Page

TABLES = make_tables()


def changed(**tables: Any) -> dict[str, Any]:
    return {**copy.deepcopy(TABLES), **tables}


def test_the_heat_map_has_a_cell_for_each_head() -> None:
    heat = heads(TABLES)
    (panel,) = heat.arms["beta"]
    assert (len(panel.values), len(panel.values[0])) == (HEADS, LAYERS)
    for layer, head, _, beta in TABLES["heads"]["touched"]:
        assert panel.values[head][layer] == pytest.approx(math.log(beta))
    assert sum(value != 0.0 for row in panel.values for value in row) == TABLES["setting"]["touched"]
    # Nothing is in the middle of the colours, and the strongest head at an end.
    assert heat.limits[0] == -heat.limits[1]
    assert heat.limits[1] == pytest.approx(max(abs(math.log(beta)) for *_, beta in TABLES["heads"]["touched"]))
    assert heat.diverging


def test_paper_and_screen_show_the_same_colours() -> None:
    heat = heads(TABLES)
    screen = interactive_figure(heat)
    json.dumps(screen, allow_nan=False)
    image = next(axes.images[0] for axes in static_figure(heat).axes if axes.images)
    assert image.get_clim() == (screen["wide"]["coloraxis"]["cmin"], screen["wide"]["coloraxis"]["cmax"])
    from matplotlib.colors import to_hex

    for place, colour in screen["wide"]["coloraxis"]["colorscale"]:
        assert to_hex(image.get_cmap()(place)) == colour
    assert list(image.get_extent()) == [-0.5, LAYERS - 0.5, HEADS - 0.5, -0.5]
    (trace,) = screen["data"]
    assert (trace["x0"], trace["y0"]) == (0, 0)


def test_a_policy_that_does_nothing_is_pale_and_zero_beta_is_drawn() -> None:
    still = changed(heads={"betas": [[1.0, 1.0], [1.0, 1.0]], "touched": []})
    assert heads(still).limits == (-0.05, 0.05)
    assert grids.heads_grid(still) is None
    off = changed(heads={"betas": [[0.0, 1.0]], "touched": [[0, 0, "β = 0", 0.0]]})
    static_figure(heads(off))


def test_the_curve_has_loss_rises_and_leash() -> None:
    loss, rise = curve(TABLES).panels
    assert [series.label for series in rise.series] == [
        "rise on 2,048 tokens of text", "rise on 6,144 tokens of text", "rise on own answers",
    ]  # fmt: skip
    assert list(loss.series[0].y) == [value for _, value in TABLES["curve"]["nll"]]
    assert any(mark.at == 1.0 and "leash 1%" in mark.text for mark in rise.marks)
    low, high = rise.y.limits
    assert all(low < value < high for series in rise.series for value in series.y)
    alone = changed(curve={"nll": TABLES["curve"]["nll"]})
    assert len(curve(alone).panels) == 1
    json.dumps(interactive_figure(curve(TABLES)), allow_nan=False)


def test_the_whole_summary() -> None:
    parts = (summary.done, summary.found, summary.cost, summary.folded)
    said = [sentence for part in parts for sentence in part(TABLES)]
    for sentence in said:
        assert sentence[0].isupper()
        assert sentence.endswith(".")
    text = " ".join(said)
    assert "learned on the task kv with sizes of 8 to 64" in text
    assert "no more than 1%" in text
    assert "Chosen: entropy (entropy), which touches 41 of 270 heads and is right in 93.5%" in text
    assert "At size 64 right answers go from 16.0% to 90.0%." in text
    assert "+0.98% on 6,144 tokens of text and −0.10% on own answers. The leash holds (1%)." in text
    assert "is constant: right in 88.5% of the validation prompts, with a rise of at most +0.97%" in text


def test_what_can_be_folded_and_a_leash_that_does_not_hold() -> None:
    assert "No candidate" in summary.folded(changed(best_foldable=None))[0]
    assert "can be folded" in summary.folded(changed(chosen="constant"))[0]
    assert "does not hold" in summary.cost(changed(chosen="constant, full strength"))[0]
    assert len(summary.tiles(changed(best_foldable=None))) == 3


def test_tables_name_the_chosen_and_what_is_beyond_the_leash() -> None:
    found = grids.candidates_grid(TABLES)
    rows = {row[0].text: row for row in found.rows}
    assert rows["entropy"][0].small == "chosen"
    assert [cell.text for cell in rows["entropy"]][1:5] == ["entropy", "0.92", "41", "93.5"]
    assert [cell.small for cell in rows["constant, full strength"][5:8]] == [
        "beyond the leash", "beyond the leash", "",
    ]  # fmt: skip
    assert rows["constant"][-1].text == "yes"
    assert {len(row) for row in found.rows} == {len(found.head)}
    touched = grids.heads_grid(TABLES)
    assert touched is not None
    assert len(touched.rows) == 41
    layer, head, rule, beta = TABLES["heads"]["touched"][0]
    assert [cell.text for cell in touched.rows[0]] == [str(layer), str(head), f"{beta:.2f}", rule]
    many = changed()
    many["heads"]["touched"] *= 3
    touched = grids.heads_grid(many)
    assert touched is not None
    assert len(touched.rows) == 60
    assert "of 123" in touched.note


def test_the_page_has_everything_in_order(tmp_path: Path) -> None:
    text = " ".join(Page(write_page(COMMAND, PROVENANCE, TABLES, tmp_path).read_text(encoding="utf-8")).text)
    place = 0
    for part in (
        "Which heads need to be sharper, and how much?", "What was learned", "What came out", "What it costs",
        "At a glance", "41 of 270 attention heads are touched", "How the policy was learned",
        "Right answers on validation prompts (%)", "Candidates", "Touched heads", "How it was done", "Provenance",
        COMMAND,
    ):  # fmt: skip
        assert part in text[place:], part
        place = text.index(part, place)
    assert drawable(TABLES) == ["heads", "curve"]


@pytest.mark.parametrize("table", ["setting", "candidates", "chosen", "heads", "curve", "validation"])
def test_damaged_tables(table: str, tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"^results: the tables of .* are damaged \(.*\); run their.*again$"):
        write_page(COMMAND, PROVENANCE, {**TABLES, table: [1.0]}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_policy_that_gains_nothing_is_called_so():
    tables = make_tables()
    tables["candidates"][tables["chosen"]]["nll"] = 0.7
    assert not any("do not use it" in line for line in summary.found({**tables, "before": {"nll": 0.8, "right": 0.2}}))
    assert any("do not use it" in line for line in summary.found({**tables, "before": {"nll": 0.7, "right": 0.2}}))
