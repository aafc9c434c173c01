"""The page and figures of `sharpmax probe` say what its tables show, for one run and for two."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from sharpmax.errors import FileFormatError
from sharpmax.report.figures import draw, drawable
from sharpmax.report.interactive import interactive_figure
from sharpmax.report.page import write_page
from sharpmax.report.plot import STEPS, BoardMap, Plot, Series, Spot, step_of
from sharpmax.report.registry import together
from sharpmax.report.sections import probe as grids
from sharpmax.report.sections.probe import summary, tiles
from sharpmax.report.sections.probe_charts import (
    board,
    chosen,
    curves,
    forecasts,
    frame,
    heads_data,
    layers,
    runs,
    tasks,
)
from sharpmax.report.static import static_figure
from sharpmax.report.theme import DIVERGING_DARK, DIVERGING_SCALE, contrast, shades
from tests.report import calibrate_tables, probe_tables
from tests.report.probe_tables import COMMAND, HEADS, LAYERS, RULE, VERDICT, keys, make_tables, tiny_tables
from tests.report.reproduce_tables import PROVENANCE
from tests.report.test_page import Page

TABLES = make_tables()
TINY = tiny_tables()
CALM = make_tables(policy="paper", calm=0.7)
SMALL = make_tables(4, 3)
"""Tables of quick pages."""

OTHER = make_tables(12, 16, model="gpt2", tasks=("text",))


def saved(tables: dict[str, Any], command: str = COMMAND) -> dict[str, Any]:
    return {"schema": 1, "command": command, "provenance": PROVENANCE, "tables": tables}


def pair(one: dict[str, Any], other: dict[str, Any]) -> Any:
    return together([("before", saved(one)), ("after", saved(other, "sharpmax probe again"))])


PAIR, MODELS = pair(TABLES, CALM), pair(TABLES, OTHER)


def spots(one: BoardMap) -> dict[str, Spot]:
    return {spot.name: spot for _, line in one.rows for spot in line if spot}


def losing(tables: dict[str, Any]) -> int:
    return sum(about["kind"] in ("dispersing", "uniform") for about in tables["heads/kv"].values())


def line(plot: Plot, panel: int, label: str) -> Series:
    return next(series for series in plot.panels[panel].series if series.label == label)


@pytest.mark.parametrize("task", ["kv", "text"])
def test_the_board_has_a_cell_for_each_head(task: str) -> None:
    (one,) = board(TABLES, task).maps
    assert [heading for heading, _ in one.rows] == [str(layer) for layer in range(LAYERS)]
    assert {len(line) for _, line in one.rows} == {HEADS} == {len(one.columns)}
    letters = {"sharp": "S", "dispersing": "D", "uniform": "U", "sink": "K", "local": "L"}
    for name, about in TABLES[f"heads/{task}"].items():
        spot = one.rows[int(name.partition(".")[0])][1][int(name.partition(".")[2])]
        assert spot is not None
        assert (spot.name, spot.value, spot.letter) == (name, about["slope"], letters[about["kind"]])
        assert about["kind"] in spot.words
    many = {kind.name: int(kind.many) for kind in board(TABLES, task).kinds}
    assert sum(many.values()) == LAYERS * HEADS
    assert many["dispersing"] == sum(about["kind"] == "dispersing" for about in TABLES[f"heads/{task}"].values())


def test_every_letter_can_be_read_on_its_colour() -> None:
    for scale in (DIVERGING_SCALE, DIVERGING_DARK):
        found = shades(scale, STEPS)
        assert [found[0].fill, found[STEPS // 2].fill, found[-1].fill] == [scale[0], scale[2], scale[-1]]
        assert min(contrast(shade.fill, shade.ink) for shade in found) >= 4.5
        assert len({shade.fill for shade in found}) == STEPS
    assert [step_of(value) for value in (-9.0, -1.0, -0.04, 0.04, 0.1, 9.0)] == [0, 0, 10, 10, 11, 20]


def test_paper_shows_the_colours_of_the_screen() -> None:
    from matplotlib.colors import to_hex

    (axes,) = (axes for axes in static_figure(board(TABLES, "kv")).axes if axes.images)
    image = axes.images[0]
    for name, spot in spots(board(TABLES, "kv").maps[0]).items():
        layer, head = map(int, name.split("."))
        assert spot.value is not None
        drawn = to_hex(image.get_cmap()(image.norm(image.get_array()[layer][head])))
        assert drawn == shades(DIVERGING_SCALE, STEPS)[step_of(spot.value)].fill
    assert sorted(text.get_text() for text in axes.texts) == sorted(
        spot.letter for spot in spots(board(TABLES, "kv").maps[0]).values()
    )


@pytest.mark.parametrize("name", ["0.0", "12.3", "29.8"])
def test_curves_show_measurement_forecast_and_bounds(name: str) -> None:
    plot, about = curves(frame(TABLES, "kv"), name), TABLES["heads/kv"][name]
    for panel, statistic in enumerate(("entropy", "top")):
        measured, forecast = line(plot, panel, "measured"), line(plot, panel, "forecast")
        assert list(measured.x) == [keys("kv", int(size)) for size in about["curve"]]
        assert list(measured.y) == [cell[statistic] for cell in about["curve"].values()]
        # The forecast starts where the fit ends, and goes through what was foretold alone.
        assert (forecast.x[0], forecast.y[0]) == (keys("kv", 64), about["curve"]["64"][statistic])
        assert list(forecast.x[1:]) == [keys("kv", size) for size in (128, 256, 512)]
        assert list(forecast.y[1:]) == [cell[statistic] for cell in about["forecast"].values()]
        assert (measured.stroke, forecast.stroke) == ("solid", "dash")
        assert plot.panels[panel].x.log
        assert [mark.at for mark in plot.panels[panel].marks if mark.axis == "x"] == [keys("kv", 64)]
    above, below = (series for series in plot.panels[0].series if series.label == "bounds")
    assert list(above.y) == pytest.approx([math.log(n) for n in above.x])
    assert set(below.y) == {0.0}
    low, high = plot.panels[0].y.limits
    assert all(low < value < high for series in plot.panels[0].series for value in series.y)
    json.dumps(interactive_figure(plot), allow_nan=False)


def test_the_horizon_lies_where_the_top_weight_is_one_half() -> None:
    known = {name: about["horizon"] for name, about in TABLES["heads/kv"].items() if about["horizon"]["tokens"]}
    name = next(iter(known))
    mark = line(curves(frame(TABLES, "kv"), name), 1, "horizon")
    assert list(mark.x) == [known[name][end] for end in ("low", "tokens", "high")]
    assert list(mark.y) == [0.5] * 3
    unknown = next(name for name in TABLES["heads/kv"] if name not in known)
    assert list(line(curves(frame(TABLES, "kv"), unknown), 1, "horizon").x) == []


def test_a_horizon_outside_the_sizes_says_on_which_side() -> None:
    heads = TABLES["heads/kv"]
    outside = {name: about for name, about in heads.items() if about["horizon"]["tokens"] is None}
    said = {name: dict(heads_data(TABLES, "kv")[name]["facts"])["horizon"] for name in outside}
    assert set(said.values()) == {"before the smallest size", "beyond the largest size"}
    for name, words in said.items():
        tops = [cell["top"] for cell in outside[name]["curve"].values()]
        assert (words == "beyond the largest size") == (tops[-1] >= 0.5)


def test_the_first_head_disperses_most() -> None:
    kinds, slopes = ({n: a[key] for n, a in TABLES["heads/kv"].items()} for key in ("kind", "slope"))
    assert chosen(TABLES, "kv") == max((n for n in kinds if kinds[n] == "dispersing"), key=slopes.__getitem__)


def test_no_layer_disperses() -> None:
    tables = copy.deepcopy(TINY)
    for cells in tables["layers/kv"].values():
        cells["slope"] = -0.1
    assert layers(tables, "kv").title == "No layer disperses on average"
    assert [tile.label for tile in tiles(tables, "kv")] == ["heads lose focus as inputs grow"]


def test_pressing_a_head_gives_its_curves() -> None:
    """The page exchanges points in place, so every head must have the lines of the figure in their order."""
    for tables, task in ((TABLES, "text"), (PAIR, "kv"), (MODELS, "text"), (TINY, "kv")):
        data = heads_data(tables, task)
        assert set(data) == {name for run in runs(tables) for name in run.heads(task)}
        shown = interactive_figure(curves(frame(tables, task), chosen(tables, task)))
        assert len({len(about["lines"]) for about in data.values()} | {len(shown["data"])}) == 1
        for name in (chosen(tables, task), next(iter(data))):
            traces = interactive_figure(curves(frame(tables, task), name))
            for (x, y), trace in zip(data[name]["lines"], traces["data"], strict=True):
                assert x == pytest.approx(trace["x"], rel=1e-3)
                assert y == pytest.approx(trace["y"], rel=1e-3)
            # Whatever head is shown, axes and looks are the same.
            assert traces["wide"] == shown["wide"]
            assert [trace["line"] for trace in traces["data"]] == [trace["line"] for trace in shown["data"]]
        json.dumps(data, allow_nan=False)


def test_what_is_said_of_a_head() -> None:
    about = TABLES["heads/kv"]["12.3"]
    facts = dict(heads_data(TABLES, "kv")["12.3"]["facts"])
    assert facts["kind"] == about["kind"]
    assert facts["slope of entropy against ln n"].startswith(f"{about['slope']:+.2f}".replace("-", "−"))
    assert facts["keys at the largest size, n"] == "4,130"
    assert facts["top weight (%)"] == f"{100 * about['curve']['512']['top']:.1f}"
    off = about["forecast"]["512"]["entropy"] - about["curve"]["512"]["entropy"]
    assert facts["forecast for 512 items is off by (nats)"] == f"{off:+.2f}".replace("-", "−")
    nothing = dict(heads_data(TINY, "kv")["1.2"]["facts"])
    assert nothing["slope of entropy against ln n"] == "not known"
    assert nothing["horizon"] == "not known"
    assert nothing["top weight (%)"] == "–"


def test_tiles_carry_the_verdict() -> None:
    found = {tile.label: tile for tile in tiles(TABLES, "kv")}
    heads = TABLES["heads/kv"].values()
    assert found["heads lose focus as inputs grow"].value == f"{losing(TABLES)} of 270"
    first = next(layer for layer, cells in TABLES["layers/kv"].items() if cells["rank"] == 1)
    assert found["disperses first"].value == f"layer {first}"
    known = [about["horizon"]["tokens"] for about in heads if about["horizon"]["tokens"]]
    assert found["median measured horizon"].value == f"{math.floor(median(known))} tokens"
    assert f"in the {len(known)} of 270 heads where" in found["median measured horizon"].detail
    error = TABLES["forecast/kv"]["tested"]["512"]["entropy"]["median"]
    assert found["median error of the forecast"].value == f"{error:.2f} nats"
    assert "from up to 64 to 512 items" in found["median error of the forecast"].detail
    assert [tile.label for tile in tiles(TINY, "kv")] == ["heads lose focus as inputs grow", "disperses first"]
    assert tiles(TINY, "kv")[0].value == f"{losing(TINY)} of 7"


def test_horizons_of_two_runs_are_compared_on_the_same_heads() -> None:
    known = [{n: a["horizon"]["tokens"] for n, a in t["heads/kv"].items()} for t in (TABLES, CALM)]
    both = [name for name in known[0] if known[0][name] and known[1][name]]
    tile = next(tile for tile in tiles(PAIR, "kv") if "horizon" in tile.label)
    assert tile.value == " → ".join(f"{math.floor(median(of[name] for name in both)):,}" for of in known)
    assert f"in the {len(both)} heads where that was seen in both" in tile.detail
    assert not any("horizon" in tile.label for tile in tiles(pair(TABLES, TINY), "kv"))


def test_tables_rank_layers_and_name_errors() -> None:
    found = {grid.title: grid for grid in grids.grids(TABLES, "kv")}
    ranked = found["Layers, those that disperse first on top"]
    assert [row[1].text for row in ranked.rows] == [str(rank) for rank in range(1, LAYERS + 1)]
    slopes = [TABLES["layers/kv"][row[0].text]["slope"] for row in ranked.rows]
    assert slopes == sorted(slopes, reverse=True)
    assert all(sum(int(cell.text) for cell in row[3:8]) == HEADS for row in ranked.rows)
    errors = found["Error of the forecast"]
    assert [row[0].text for row in errors.rows] == ["128", "256", "512"]
    tested = TABLES["forecast/kv"]["tested"]["512"]
    assert errors.rows[-1][1].text == f"{tested['entropy']['median']:.2f}"
    assert errors.rows[-1][4].text == f"{100 * tested['top']['median']:.1f}"
    assert "fitted on 8, 16, 32, 64 items" in errors.note
    assert found["From one layer to the next"].rows[0][1].text == "+0.41"
    assert found["From one layer to the next"].rows[0][1].small == "+0.05 to +0.68"
    ways = found["Ways to forecast"]
    assert [[cell.text for cell in row] for row in ways.rows] == [
        ["the largest size again", "0.31", "–"], ["line", "0.07", errors.rows[-1][1].text],
    ]  # fmt: skip
    assert [row[0].small for row in ways.rows] == ["", "used"]
    most = found["Heads that lose focus most"]
    steepness = {name: about["slope"] for name, about in TABLES["heads/kv"].items()}
    assert most.rows[0][0].text == max(steepness, key=steepness.__getitem__)
    assert len(most.rows) == 20
    for grid in [*found.values(), *grids.grids(PAIR, "text"), *grids.grids(TINY, "kv")]:
        assert {len(row) for row in grid.rows} == {len(grid.head)}, grid.title
    assert not any("forecast" in grid.title for grid in grids.grids(TINY, "kv"))


def test_layers_and_forecasts_are_drawn_from_every_head() -> None:
    dots, means = layers(TABLES, "text").panels[0].series
    assert len(dots.x) == LAYERS * HEADS
    assert list(means.y) == [cells["slope"] for cells in TABLES["layers/text"].values()]
    assert layers(TABLES, "text").title.startswith("Layer ")
    for panel, statistic in zip(forecasts(TABLES, "kv").panels, ("entropy", "top"), strict=True):
        _, dots = panel.series
        heads = TABLES["heads/kv"].values()
        assert list(dots.x) == [about["forecast"]["512"][statistic] for about in heads]
        assert list(dots.y) == [about["curve"]["512"][statistic] for about in heads]
    assert len(layers(TINY, "kv").panels[0].series[0].x) == 7


def test_the_page_has_everything_in_order(tmp_path: Path) -> None:
    html = write_page(COMMAND, PROVENANCE, SMALL, tmp_path).read_text(encoding="utf-8")
    text = " ".join(Page(html).text)
    place = 0
    for part in (
        "Which heads lose focus as inputs grow?", "Verdict", *VERDICT, "At a glance", "heads lose focus as inputs grow",
        "Heads that lose focus as kv prompts grow", "What one head does", "Kinds of heads", "Error of the forecast",
        "From one layer to the next", "Heads that lose focus as text prompts grow", "How it was done",
        "The rule of kinds", "Provenance", COMMAND,
    ):  # fmt: skip
        assert part in text[place:], part
        place = text.index(part, place)
    for rule in RULE.values():
        assert rule[1:] in text
    assert drawable(SMALL) == [
        f"{kind}-{task}" for task in ("kv", "text") for kind in ("heads", "curves", "layers", "forecast")
    ]


def test_two_runs_of_one_shape(tmp_path: Path) -> None:
    before, after = runs(PAIR)
    assert (before.label, after.label) == ("A: smollm2 as it comes", "B: smollm2 with paper")
    maps = board(PAIR, "kv").maps
    assert [one.title for one in maps] == [before.label, after.label, "B − A"]
    one, other = TABLES["heads/kv"], CALM["heads/kv"]
    for name, spot in spots(maps[2]).items():
        assert spot.value == pytest.approx(other[name]["slope"] - one[name]["slope"])
        assert (spot.letter == "≠") == (other[name]["kind"] != one[name]["kind"])
    (title, said), *verdicts = summary(PAIR)
    assert title == "The difference"
    assert [label for label, _ in verdicts] == [before.label, after.label]
    many = [losing(tables) for tables in (TABLES, CALM)]
    assert said[0].startswith(
        "On kv, a smaller share of heads loses focus in B (smollm2 with paper) than in A (smollm2 as"
    )
    assert "not measured alike" not in said[0]
    assert f"{many[1]} of 270 heads" in said[0]
    assert f"against {many[0]} of 270 heads" in said[0]
    lower = sum(other[name]["slope_high"] < one[name]["slope_low"] for name in one)
    assert f"the slope is lower in B in {lower} and higher in 0 of 270" in said[0]
    plot = curves(frame(PAIR, "kv"), "4.4")
    for label, heads in ((before.label, one), (after.label, other)):
        assert list(line(plot, 0, label).y) == [cell["entropy"] for cell in heads["4.4"]["curve"].values()]
    small = pair(SMALL, make_tables(4, 3, policy="paper"))
    text = " ".join(Page(write_page("sharpmax report a b", {}, small, tmp_path).read_text(encoding="utf-8")).text)
    for words in ("sharpmax report a b", COMMAND, "sharpmax probe again", "A is smollm2 as it comes"):
        assert words in text


def test_two_models_of_other_shapes(tmp_path: Path) -> None:
    assert tasks(MODELS) == ["text"]
    maps = board(MODELS, "text").maps
    assert [(len(one.rows), len(one.columns)) for one in maps] == [(LAYERS, HEADS), (12, 16)]
    assert chosen(MODELS, "text") in OTHER["heads/text"]
    _, said = summary(MODELS)[0]
    assert "Head by head" not in said[0]
    plot = curves(frame(MODELS, "text"), "29.0")
    assert len(line(plot, 0, "A: smollm2").x) == 7
    assert len(line(plot, 0, "B: gpt2").x) == 0
    facts = heads_data(MODELS, "text")["29.0"]["facts"]
    assert facts[0][2] == "–"
    small = pair(make_tables(4, 3, tasks=("text",)), make_tables(2, 4, model="gpt2", tasks=("text",)))
    assert all(path.stat().st_size for path in draw(small, tmp_path))


def test_runs_that_nothing_tells_apart_are_called_by_their_folders() -> None:
    assert [run.label for run in runs(pair(TABLES, TABLES))] == ["A: smollm2 (before)", "B: smollm2 (after)"]
    assert summary(pair(TABLES, TABLES))[0][1][0].startswith("On kv, about the same share of heads loses focus in B")


def test_runs_that_were_not_measured_alike_are_called_so() -> None:
    fewer = copy.deepcopy(CALM)
    fewer["setting"]["sizes"]["kv"] = [8, 16]
    _, said = summary(pair(TABLES, fewer))[0]
    assert said[0].endswith("A on 8 prompts of each size, 8 to 512 items, B on 8 prompts of each size, 8 to 16 items.")
    assert "not measured alike" not in said[1]


def test_what_cannot_be_compared() -> None:
    with pytest.raises(FileFormatError, match=r"'a' \(probe\) and 'b' \(calibrate\) cannot be compared"):
        together([("a", saved(TABLES)), ("b", saved(calibrate_tables.make_tables()))])
    with pytest.raises(FileFormatError, match="cannot be compared; allowed: two results of sharpmax probe"):
        together([(name, saved(calibrate_tables.make_tables())) for name in "ab"])
    with pytest.raises(FileFormatError, match="nothing to compare"):
        together([("a", saved({"else": {}})), ("b", saved(TABLES))])
    with pytest.raises(FileFormatError, match=r"no task is in both of them \(kv and text\)"):
        tasks(pair(TINY, OTHER))


def test_numbers_that_are_not_known_are_drawn_as_such(tmp_path: Path) -> None:
    (one,) = board(TINY, "kv").maps
    assert (spots(one)["1.2"].value, spots(one)["1.2"].letter) == (None, "?")
    page = Page(write_page(COMMAND, PROVENANCE, TINY, tmp_path).read_text(encoding="utf-8"))
    cells = [button for button in page.named("button") if "data-spot" in button]
    assert [button["data-spot"] for button in cells if "none" in (button["class"] or "").split()] == ["1.2"]
    assert len(cells) == 8
    assert not any("data-show" in button for button in page.named("button"))
    assert drawable(TINY) == ["heads-kv", "curves-kv", "layers-kv"]
    draw(TINY, tmp_path)


def test_heads_that_are_not_there_leave_a_gap() -> None:
    tables = copy.deepcopy(TINY)
    del tables["heads/kv"]["0.1"]
    (one,) = board(tables, "kv").maps
    assert one.rows[0][1][1] is None
    static_figure(board(tables, "kv"))


def test_one_size_alone_can_be_drawn(tmp_path: Path) -> None:
    """A model that reads images of one size has a point for each head, and no slope."""
    tables = copy.deepcopy(TINY)
    tables["setting"]["sizes"]["kv"] = [8]
    for about in tables["heads/kv"].values():
        about["curve"] = {"8": about["curve"]["8"]}
        about["slope"] = about["slope_low"] = about["slope_high"] = None
    for cells in tables["layers/kv"].values():
        cells["slope"] = cells["rank"] = None
    write_page(COMMAND, PROVENANCE, tables, tmp_path)
    draw(tables, tmp_path)


def test_nothing_in_the_tables_is_trusted(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    tables = copy.deepcopy(TINY)
    tables["setting"]["model"] = evil
    tables["heads/kv"]["0.0"]["kind"] = evil
    html = write_page(COMMAND, PROVENANCE, tables, tmp_path).read_text(encoding="utf-8")
    assert evil not in html
    with pytest.raises(FileFormatError, match="cannot be the name of a task"):
        write_page(COMMAND, PROVENANCE, {**TINY, "heads/a b": TINY["heads/kv"]}, tmp_path)


@pytest.mark.parametrize("table", ["setting", "verdict", "heads/kv", "layers/kv", "chain/kv"])
def test_damaged_tables(table: str, tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"^results: the tables of .* are damaged \(.*\); run their.*again$"):
        write_page(COMMAND, PROVENANCE, {**TINY, table: 3}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_made_up_tables_are_those_of_the_contract() -> None:
    assert set(TABLES) == {"setting", "verdict"} | {
        f"{table}/{task}" for table in ("heads", "layers", "forecast", "chain") for task in probe_tables.SIZES
    }
    json.dumps(TABLES, allow_nan=False)
