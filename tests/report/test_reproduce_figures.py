"""The figures of `sharpmax reproduce`: one per recipe, the same values for paper and screen."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex

from sharpmax.errors import FileFormatError
from sharpmax.report.figures import draw, drawable, drawing, svg_text
from sharpmax.report.interactive import interactive_figure
from sharpmax.report.plot import Heat, Plot, legend, thinned
from sharpmax.report.sections import reproduce_tables as looks
from sharpmax.report.sections.reproduce_charts import build, file_name, plottable
from sharpmax.report.static import static_figure
from tests.report.reproduce_tables import ARMS, HEAT_SIZES, SIZES, make_tables, one_seed

NAMES = ["heat", "accuracy", "focus", "fit", "detection"]
TABLES = make_tables()


def plot_of(name: str, tables: dict[str, Any] = TABLES, recipe: str = "paper") -> Plot:
    plot = build(tables, name, recipe)
    assert isinstance(plot, Plot)
    return plot


def heat_of(tables: dict[str, Any] = TABLES) -> Heat:
    plot = build(tables, "heat", "paper")
    assert isinstance(plot, Heat)
    return plot


def changed(**tables: Any) -> dict[str, Any]:
    return {**copy.deepcopy(TABLES), **tables}


def test_a_figure_for_every_recipe() -> None:
    assert drawable(TABLES) == NAMES + [f"{name}-sharp" for name in NAMES]
    assert drawable(make_tables(("sharp",))) == [f"{name}-sharp" for name in NAMES]
    assert drawable({"detection": TABLES["detection"], "accuracy": {}}) == ["detection"]


def test_a_recipe_cannot_lead_out_of_the_folder() -> None:
    with pytest.raises(FileFormatError, match="name of a recipe"):
        drawable({"fit/../../elsewhere": {}})


def test_files_are_complete_and_the_same_every_time(tmp_path: Path) -> None:
    tables = {name: TABLES[name] for name in ("setting", "heat", "detection/sharp")}
    first, second = draw(tables, tmp_path / "a"), draw(tables, tmp_path / "b")
    assert [path.name for path in first] == ["heat.svg", "heat.png", "detection-sharp.svg", "detection-sharp.png"]
    assert {path.name for path in (tmp_path / "a").iterdir()} == {path.name for path in first}
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("table", ["accuracy", "entropy", "bounds", "fit", "heat", "detection"])
def test_damaged_tables_leave_nothing_behind(table: str, tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"^results: the tables of figure '\w+' are damaged \(.*\); run.*again$"):
        draw(changed(**{table: {"softmax": {"many": {"mean": "much"}}}}), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_accuracy_has_every_arm_its_errors_and_the_published_points() -> None:
    left, right = plot_of("accuracy").panels
    assert left.x.log
    assert [series.arm for series in left.series if series.stroke] == ARMS
    assert [series.arm for series in right.series if series.stroke] == ARMS[1:]
    softmax = left.series[0]
    assert softmax.x == SIZES
    assert softmax.low is not None
    assert softmax.high is not None
    assert (softmax.low[0], softmax.high[0]) == pytest.approx((98.3, 99.5))
    assert softmax.hover[6] == "plain softmax: 49.9 ± 0.6 %"
    published = [series for series in left.series if series.marker == "hollow"]
    assert [series.arm for series in published] == ["softmax", "paper"]
    assert published[1].y[6] == 57.7
    gained = [series for series in right.series if series.marker == "hollow"]
    assert gained[0].y[6] == pytest.approx(57.7 - 53.8)


def test_published_points_say_whose_training_they_are() -> None:
    plot = plot_of("accuracy", recipe="sharp")
    assert "published in the paper (its own training)" in [entry.label for entry in legend(plot)]
    assert not any(series.marker == "hollow" for series in plot.panels[1].series)


def test_published_points_keep_to_the_sizes_of_the_run() -> None:
    few = changed()
    few["accuracy"] = {arm: {n: cells[n] for n in ("16", "512")} for arm, cells in few["accuracy"].items()}
    assert {x for series in plot_of("accuracy", few).panels[0].series for x in series.x} == {16, 512}


def test_a_legend_names_everything_once() -> None:
    entries = legend(plot_of("focus"))
    assert [entry.arm for entry in entries] == [*ARMS[:-1], None]
    assert entries[-1].stroke == "dash"
    assert len({(entry.look.colour, entry.look.marker) for entry in entries}) == len(entries)


def test_arms_differ_in_colour_and_marker() -> None:
    arms = [looks.look(arm) for arm in ARMS]
    assert len({arm.colour for arm in arms}) == len({arm.marker for arm in arms}) == len(ARMS)
    assert all(arm.subject and arm.about for arm in arms)
    mine = looks.look("mine")
    assert (mine.label, mine.subject) == ("mine", "mine")


def test_focus_has_bounds_and_horizon() -> None:
    weight, entropy = plot_of("focus").panels
    assert [len([s for s in panel.series if s.stroke == "dash"]) for panel in (weight, entropy)] == [1, 2]
    assert weight.y.label == "weight (%)"
    assert entropy.y.label == "entropy (nats)"
    assert [mark.text for mark in weight.marks] == ["horizon 2,981"]
    assert not any(series.stroke == "dot" for series in weight.series)
    limits = changed()
    limits["bounds"] |= {"limit_weight": {"4096": 3.0}, "limit_entropy": {"4096": 8.0}}
    assert [panel.series[-1].stroke for panel in plot_of("focus", limits).panels] == ["dot", "dot"]
    beyond = plot_of("focus", recipe="sharp")
    assert list(beyond.panels[0].marks) == []
    assert "beyond the sizes drawn" in beyond.caption


def test_fit_has_points_curves_and_the_end() -> None:
    (panel,) = plot_of("fit").panels
    assert [series.arm for series in panel.series] == [None, "refit", "paper"]
    assert any(mark.axis == "x" and mark.at == 5.94 and "5.94" in mark.text for mark in panel.marks)
    outlier = changed()
    outlier["fit"]["points"]["beta"][0] = 900.0
    plot = plot_of("fit", outlier)
    assert plot.panels[0].y.limits[1] < 20
    assert "Above the frame" in plot.caption
    endless = changed()
    endless["fit"] |= {"paper_acts_on": [0.85, None], "acts_on": None}
    plot = plot_of("fit", endless)
    assert [mark.axis for mark in plot.panels[0].marks] == ["y"]
    assert "never exceeds β = 1" in plot.caption
    assert "stops acting" not in plot.title


def test_detection_has_intervals_chance_and_pooled_values() -> None:
    plot = plot_of("detection")
    (panel,) = plot.panels
    assert len(panel.series) == 6
    assert [mark.at for mark in panel.marks] == [0.5]
    assert panel.x.ticks is not None
    assert panel.x.ticks[-1] == (4.0 * 16384, "all sizes")
    for line, pooled in zip(panel.series[::2], panel.series[1::2], strict=True):
        assert len(line.x) == len(SIZES) - 1  # nobody was wrong at 16 items
        assert len(pooled.x) == 1
        assert line.low is not None
        assert line.low[0] is not None
        assert line.low[0] < line.y[0]
    assert "No value at 16 items" in plot.caption


def test_detection_without_wrong_answers() -> None:
    tables = changed()
    for cells in tables["detection"].values():
        for cell in cells.values():
            cell |= {"auroc": None, "low": None, "high": None, "wrong": 0}
    plot = plot_of("detection", tables)
    assert plot.title.startswith("How well")
    static_figure(plot)


def test_heat_has_a_panel_for_each_size_and_a_row_for_each_arm() -> None:
    heat = heat_of()
    assert list(heat.arms) == ["softmax", "entropy-target"]
    assert [panel.title for panel in heat.arms["softmax"]] == [f"n = {n:,}" for n in HEAT_SIZES]
    figure = static_figure(heat)
    images = [axes for axes in figure.axes if axes.images]
    assert len(images) == 2 * len(HEAT_SIZES)
    assert len(figure.axes) == len(images) + 1
    assert figure.axes[-1].get_ylabel() == "weight (%)"
    ragged = changed()
    ragged["heat"]["arms"]["softmax"]["64"][3] = [1.0]
    with pytest.raises(ValueError, match="equal length"):
        heat_of(ragged)


@pytest.mark.parametrize("name", ["accuracy", "focus", "fit", "detection"])
def test_static_figures_have_titles_labels_units_and_a_legend(name: str) -> None:
    plot = plot_of(name)
    figure = static_figure(plot)
    assert figure.get_suptitle().startswith(plot.title)
    for axes, panel in zip(figure.axes, plot.panels, strict=True):
        assert (axes.get_xlabel(), axes.get_ylabel()) == (panel.x.label, panel.y.label)
        assert axes.get_xscale() == ("log" if panel.x.log else "linear")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [entry.label for entry in legend(plot)]
    assert static_figure(plot, titled=False).get_suptitle() == ""


def test_claims_in_titles_need_numbers() -> None:
    assert "wins some of it back" in plot_of("accuracy").title
    assert "wins" not in plot_of("accuracy", one_seed(TABLES)).title
    flat = changed()
    for arm in ARMS:
        for n in map(str, SIZES):
            flat["accuracy"][arm][n]["mean"] = 99.0
            if arm in flat["top_weight"]:
                flat["top_weight"][arm][n]["mean"] = 99.0
    assert plot_of("accuracy", flat).title == "Accuracy against the number of items"
    assert "spreads" not in plot_of("focus", flat).title


def test_few_arms_one_size_one_seed() -> None:
    tables = one_seed(make_tables(("paper",)))
    for name in ("accuracy", "entropy", "top_weight"):
        tables[name] = {"softmax": {"64": tables[name]["softmax"]["64"]}}
    tables |= {"comparison": {}, "published": {}}
    for name in ("accuracy", "focus"):
        plot = plot_of(name, tables)
        assert all(series.look.label for panel in plot.panels for series in panel.series)
        static_figure(plot)
        interactive_figure(plot)


def test_text_of_a_file_is_only_text() -> None:
    name = "_my <b>$x^{</b> arm"
    tables = changed()
    tables["accuracy"][name] = tables["accuracy"]["softmax"]
    plot = plot_of("accuracy", tables)
    with drawing():
        svg_text(static_figure(plot))
    # Plotly reads a little HTML in names and texts.
    shown = [[trace["name"], *trace["text"]] for trace in interactive_figure(plot)["data"]]
    assert "<b>$x" not in str(shown)
    assert "&lt;b&gt;$x" in str(shown)


@pytest.mark.parametrize("name", NAMES)
def test_interactive_figures_are_valid_plotly(name: str) -> None:
    import plotly.graph_objects as go

    plot = build(TABLES, name, "paper")
    figure = interactive_figure(plot)
    json.dumps(figure, allow_nan=False)
    for layout in ("wide", "narrow"):
        go.Figure(data=figure["data"], layout=figure[layout])
    assert figure["narrow"]["height"] <= 800
    assert figure["one_at_a_time"] == isinstance(plot, Heat)


def test_paper_and_screen_show_the_same() -> None:
    plot = plot_of("accuracy")
    traces = [trace for trace in interactive_figure(plot)["data"] if trace["xaxis"] == "x"]
    axes = static_figure(plot).axes[0]
    for trace in traces:
        # Error bars are lines of two points.
        lines = [line for line in axes.lines if list(line.get_ydata()) == trace["y"]]
        assert trace["line"]["color"] in {to_hex(line.get_color()) for line in lines}


def test_names_and_ticks() -> None:
    assert [file_name(*pair) for pair in plottable(TABLES)] == drawable(TABLES)
    ticks = [(float(n), str(n)) for n in SIZES]
    assert [text for _, text in thinned(ticks, 6)] == ["16", "64", "256", "1024", "4096", "16384"]
