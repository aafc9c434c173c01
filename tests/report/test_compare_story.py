"""The page and figures of `sharpmax compare` say what its tables show, and nothing else."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from sharpmax.errors import FileFormatError
from sharpmax.report.figures import draw, drawable
from sharpmax.report.interactive import interactive_figure
from sharpmax.report.page import write_page
from sharpmax.report.plot import legend
from sharpmax.report.registry import story_of
from sharpmax.report.sections import capacity as capacity_summary
from sharpmax.report.sections import compare as grids
from sharpmax.report.sections import compare as summary
from sharpmax.report.sections.capacity import capacity_map, laws_grid, layers, models_grid
from sharpmax.report.sections.compare import capacity_tiles, league_lines, league_tiles
from sharpmax.report.sections.compare_charts import (
    accuracy,
    apart,
    causes,
    gap,
    highlighted,
    leader,
    level_with,
    loss_of,
    sharpness,
)
from sharpmax.report.theme import PALE
from tests.report.compare_tables import CAPACITY_COMMAND, COMMAND, METHODS, make_capacity, make_tables
from tests.report.reproduce_tables import PROVENANCE
from tests.report.test_page import Page

LAST = "16384"
THREE = ("softmax", "ssmax", "hard")
SMALL = ((32, 64), (1, 2), (1, 2))
CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "one": lambda: make_tables(("softmax",)),
    "one size": lambda: make_tables(("sigmoid",), seeds=1, sizes=(16,)),
    "one seed": lambda: make_tables(("softmax", "hard"), 1),
    "recall": lambda: make_tables(THREE, 2, (16, 64, 256, 1024), "recall"),
    "copy": lambda: make_tables(("softmax", "hard"), 2, (16, 32), "copy"),
    "sort": lambda: make_tables(THREE, 2, (16, 64), "sort"),
    "own": lambda: make_tables(("softmax", "a method of mine with a very long name")),
    "one model": lambda: make_capacity(("softmax", "hard <b>"), 1, ((32,), (1,), (1,))),
    "depth alone": lambda: make_capacity(shapes=((32,), (2,), (1, 2, 4))),
    "beyond": lambda: make_capacity(shapes=SMALL, reach=1e6),
    "below": lambda: make_capacity(shapes=SMALL, reach=1e-6),
    "both": lambda: {**make_tables(THREE), **{k: v for k, v in make_capacity(shapes=SMALL).items() if k != "setting"}},
}


@pytest.fixture
def full() -> dict[str, Any]:
    return make_tables()


@pytest.fixture
def few() -> dict[str, Any]:
    return make_tables(THREE)


@pytest.fixture
def capacity() -> dict[str, Any]:
    return make_capacity()


def everything(tables: Any) -> list[str]:
    found = story_of(tables)
    assert found is not None
    return [sentence for _, sentences in found.summary(tables) for sentence in sentences]


@pytest.mark.parametrize("make", [make_tables, make_capacity])
def test_the_tables_decide_which_story_is_told(make: Any) -> None:
    assert getattr(story_of(make()), "name", None) == "compare"


class TestVerdict:
    def test_it_carries_its_numbers(self, full: Any) -> None:
        leads, softmax, lost = summary.verdict(full)
        means = {name: float(np.mean(full["per_seed"][name][LAST])) for name in METHODS}
        first, second = sorted(means, key=lambda name: -means[name])[:2]
        assert (first, second) == ("sharp", "top-k")
        apart = np.subtract(full["per_seed"][first][LAST], full["per_seed"][second][LAST])
        low, high = stats.t.interval(0.95, 4, loc=apart.mean(), scale=stats.sem(apart))
        assert leads.startswith(f"At 16,384 items “sharp” leads with {means['sharp']:.1f}% (")
        assert (
            f"{apart.mean():.1f} points (+{low:.1f} to +{high:.1f}) more than “top-k” ({means['top-k']:.1f}%)" in leads
        )
        assert "shown to be ahead of every other method" in leads
        assert softmax.startswith(f"“softmax” gets {means['softmax']:.1f}% right there, ")
        assert f"to {full['entropy']['softmax'][LAST]['mean']:.2f} nat" in softmax
        hard = full["hard"]["softmax"][LAST]["mean"]
        assert (
            f"Of the {100 - means['softmax']:.1f} points that “softmax” loses, {hard - means['softmax']:.1f} are"
            in lost
        )
        assert f"{100 - hard:.1f} wrong ranking (both)" in lost
        assert "(all of it wrong ranking)" in lost  # of the leader, which is hard at test

    def test_every_sentence_is_one(self, full: Any, capacity: Any) -> None:
        for sentence in [*everything(full), *everything(capacity)]:
            assert sentence.endswith(".")
            assert "  " not in sentence
            assert sentence[0] in "“0123456789" or sentence[0].isupper()
            assert "None" not in sentence
            assert "nan" not in sentence

    def test_nothing_is_claimed_that_is_not_shown(self, few: Any) -> None:
        few["per_seed"]["hard"][LAST] = [
            value + step for value, step in zip(few["per_seed"]["ssmax"][LAST], (9, -9, 8, -8, 0), strict=True)
        ]
        assert level_with(few) == ["hard"]
        assert "it is not shown to be ahead of “hard”." in summary.verdict(few)[0]
        assert "not shown to be ahead of 1 other" in league_tiles(few)[0].detail
        everybody = copy.deepcopy(few)
        everybody["per_seed"]["softmax"] = few["per_seed"]["hard"]
        assert "ahead of “hard” and “softmax”." in summary.verdict(everybody)[0]
        assert "which may be chance" in accuracy(everybody).title

    @pytest.mark.parametrize(
        ("right", "hard", "says"),
        [
            (20.0, 95.0, "75.0 are dispersion and 5.0 wrong ranking (mostly dispersion)"),
            (20.0, 25.0, "5.0 are dispersion and 75.0 wrong ranking (mostly wrong ranking)"),
            (20.0, 60.0, "40.0 are dispersion and 40.0 wrong ranking (both)"),
            (20.0, 20.0, "0.0 are dispersion and 80.0 wrong ranking (all of it wrong ranking)"),
            (20.0, 12.0, "none is dispersion: hard attention would get 8.0 points less right"),
            (99.5, 99.9, "“softmax” loses next to nothing (0.50 points)"),
        ],
    )
    def test_dispersion_and_wrong_ranking_are_told_apart(self, right: float, hard: float, says: str, few: Any) -> None:
        few["accuracy"]["softmax"][LAST]["mean"], few["hard"]["softmax"][LAST]["mean"] = right, hard
        assert says in summary.verdict(few)[2]
        few["hard"]["softmax"][LAST]["mean"] = few["hard"][leader(few)][LAST]["mean"] = None
        assert loss_of(few, "softmax", LAST) is None
        assert "was not measured" in summary.verdict(few)[2]

    def test_softmax_need_not_be_there(self) -> None:
        tables = make_tables(("hard", "ssmax", "sigmoid"))
        assert summary.verdict(tables)[1].startswith("“sigmoid”, last in the league, gets")
        assert "“sigmoid” loses" in summary.verdict(tables)[2]
        assert "softmax" not in accuracy(tables).title

    def test_what_stands_against_it(self, full: Any) -> None:
        said = " ".join(summary.care(full))
        assert "“linear” diverged for seed 1; its answers count as wrong." in said
        assert "Not learnt even at 16 items, where under 90% are right: “linear”" in said
        assert summary.care(make_tables(THREE)) == []
        full["methods"]["sharp"]["data"] = {"zoom": 0.01}
        assert "With a recipe or training examples of their own: “sharp”." in summary.asked(full)


class TestGap:
    def test_it_is_paired_and_students(self, few: Any) -> None:
        one, other = (np.array(few["per_seed"][name][LAST]) for name in ("ssmax", "hard"))
        found = gap(few, "ssmax", "hard", LAST)
        low, high = stats.t.interval(0.95, 4, loc=(one - other).mean(), scale=stats.sem(one - other))
        assert (found.mean, found.low, found.high) == pytest.approx(((one - other).mean(), low, high))
        assert found.shown == (low > 0)

    def test_one_seed_shows_nothing_and_seeds_that_agree_leave_no_doubt(self) -> None:
        one = gap(make_tables(THREE, seeds=1), "ssmax", "hard", LAST)
        assert (one.low, one.high, one.shown) == (None, None, False)
        same = make_tables(THREE, seeds=2, sizes=(16,))
        for name, value in (("ssmax", 50.0), ("hard", 40.0), ("softmax", 40.0)):
            same["per_seed"][name]["16"] = [value, value]
            same["accuracy"][name]["16"] = {"mean": value, "sem": 0.0, "low": value, "high": value, "n": 2}
        assert gap(same, "ssmax", "hard", "16").shown
        assert not gap(same, "softmax", "hard", "16").shown


class TestFigures:
    def test_accuracy_has_a_line_and_a_name_for_each_method(self, full: Any) -> None:
        plot = accuracy(full)
        (panel,) = plot.panels
        named = {series.label: series for series in panel.series if series.end}
        lines = {series.label: series for series in panel.series if not series.end}
        assert set(named) == set(lines) == set(METHODS)
        for name, line in lines.items():
            assert line.y == [full["accuracy"][name][str(int(n))]["mean"] for n in line.x]
            assert (named[name].x[0], named[name].y[0]) == (line.x[-1], line.y[-1])
            assert (named[name].arm, line.arm) == (name, name)
        assert lines["softmax"].low == [full["accuracy"]["softmax"][str(int(n))]["low"] for n in lines["softmax"].x]
        full["accuracy"]["softmax"]["16"] |= {"low": 88.0, "high": 101.3}
        again = next(series for series in accuracy(full).panels[0].series if series.label == "softmax")
        assert again.high is not None
        assert again.high[0] == 100.0
        assert [entry.label for entry in legend(plot)][:2] == ["softmax", "sharp"]
        heights = sorted(series.y[-1] for series in named.values())
        assert np.diff(heights).min() > 5.0
        assert "52.7 points more than softmax" in plot.title
        assert not panel.together

    def test_a_few_stand_out_and_the_others_are_grey(self, full: Any, few: Any) -> None:
        chosen = highlighted(full)
        assert chosen[:3] == ["softmax", "sharp", "top-k"]
        assert len(chosen) == 5
        for plot in (accuracy(full), sharpness(full)):
            grey = {s.label for panel in plot.panels for s in panel.series if s.look.colour == PALE}
            assert grey == set(METHODS) - set(chosen)
            assert "the others are grey" in plot.caption
        assert set(highlighted(few)) == set(THREE)
        assert "grey" not in accuracy(few).caption

    def test_names_move_apart_as_little_as_it_takes(self) -> None:
        far = {"a": 10.0, "b": 50.0, "c": 90.0}
        assert apart(far, 0.0, 100.0, most=3) == far
        close = apart({str(i): 3.0 for i in range(15)}, 0.0, 100.0, most=15)
        assert min(close.values()) == 0.0
        assert np.diff(sorted(close.values())) == pytest.approx([5.8] * 14)
        many = apart({str(i): float(i) for i in range(40)}, 0.0, 100.0, most=40)
        assert sorted(many, key=lambda name: many[name]) == [str(i) for i in range(40)]
        assert max(many.values()) <= 100.0 + 1e-9

    def test_entropy_stands_against_its_most(self, few: Any) -> None:
        entropy, top = sharpness(few).panels
        even = entropy.series[-1]
        assert even.y == pytest.approx(np.log(even.x))
        assert entropy.y.limits[1] > max(even.y)
        assert {s.label for s in top.series} == set(THREE)

    def test_every_method_has_a_panel_of_what_it_loses(self, full: Any) -> None:
        plot = causes(full)
        assert [panel.title for panel in plot.panels] == list(full["league"])
        softmax = plot.panels[list(full["league"]).index("softmax")]
        for series, table in zip(softmax.series, ("accuracy", "hard", "ranking", "close"), strict=True):
            assert list(series.y) == [full[table]["softmax"][str(int(n))]["mean"] for n in series.x]
        assert len(legend(plot)) == 4

    @pytest.mark.parametrize("name", CASES)
    def test_whatever_was_asked_is_told(self, name: str, tmp_path: Path) -> None:
        tables = CASES[name]()
        write_page(COMMAND, PROVENANCE, tables, tmp_path)
        story = story_of(tables)
        assert story is not None
        for figure in story.figures(tables):
            plot: Any = figure.make()
            json.dumps(interactive_figure(plot), allow_nan=False)
            assert "None" not in plot.caption + plot.alt + plot.title
        assert everything(tables)


def test_a_task_without_near_ties_says_nothing_of_them() -> None:
    tables = make_tables(THREE, 2, (16, 64), "recall")
    assert grids.near_ties_grid(tables) is None
    assert len(legend(causes(tables))) == 3
    assert not any("near-ties" in cell.text for cell in grids.causes_grid(tables).head)
    assert "near-ties it ranks" not in summary.verdict(tables)[2]
    assert "no near-ties" in " ".join(summary.care(tables))
    assert "near-ties" not in league_lines(tables)[0]


class TestGrids:
    def test_the_league(self, full: Any) -> None:
        grid = grids.league_grid(full)
        assert [row[0].text for row in grid.rows] == list(full["league"])
        assert [cell.text for cell in grid.head[3:8]] == ["16", "256", "1,024", "4,096", "16,384"]
        rows = {row[0].text: row for row in grid.rows}
        ranks = [row[1].text for row in grid.rows]
        assert ranks == [
            f"{one['rank']}{'=' if [p['rank'] for p in full['league'].values()].count(one['rank']) > 1 else ''}"
            for one in full["league"].values()
        ]
        assert any("=" in rank for rank in ranks)
        cell = full["accuracy"]["sharp"][LAST]
        assert (rows["sharp"][7].text, rows["sharp"][7].small) == (
            f"{cell['mean']:.1f}",
            f"{cell['low']:.1f}–{cell['high']:.1f}",
        )
        assert rows["sharp"][7].strong
        assert rows["softmax"][8].text == f"{full['hard']['softmax'][LAST]['mean']:.1f}"
        assert rows["softmax"][9].text == f"{full['ranking']['softmax'][LAST]['mean']:.1f}"
        assert rows["linear"][0].small == "diverged: 1 of 5 seeds"
        assert rows["softmax"][0].small == ""
        full["training"]["hard"]["memory"] = None
        assert {row[0].text: row for row in grids.league_grid(full).rows}["hard"][11].text == "–"

    def test_one_seed_has_no_intervals(self) -> None:
        grid = grids.league_grid(make_tables(THREE, seeds=1))
        assert not any(cell.small for row in grid.rows for cell in row)
        assert "One seed" in grid.note

    def test_what_is_lost_adds_up(self, full: Any) -> None:
        for row in grids.causes_grid(full).rows:
            right, _, spread, wrong = (float(cell.text.replace("−", "-")) for cell in row[1:5])
            assert right + spread + wrong == pytest.approx(100.0, abs=0.16)


class TestReadme:
    def test_lines_are_the_league(self, full: Any) -> None:
        head, rule, *rows = league_lines(full)
        assert (
            head
            == "| method | rank | 16 | 256 | 1,024 | 4,096 | 16,384 | if hard | ranked first | near-ties | train s |"
        )
        assert rule.count("|") == head.count("|")
        assert len(rows) == 15
        first = [cell.strip() for cell in rows[0].split("|")[1:-1]]
        assert first[:2] == ["`sharp`", "1"]
        assert first[6] == f"**{full['accuracy']['sharp'][LAST]['mean']:.1f}**"
        assert sum("**" in row for row in rows) == 1


class TestCapacity:
    def test_points_are_models_and_the_law_goes_through_them(self, capacity: Any) -> None:
        plot = capacity_map(capacity, "softmax", "accuracy")
        assert [panel.title for panel in plot.panels] == ["depth 1", "depth 2", "depth 4"]
        cells = {(m["width"], m["heads"], m["depth"]): m for m in capacity["capacity"]["softmax"]}
        law = capacity["laws"]["softmax"]["accuracy"]
        for panel, depth in zip(plot.panels, (1, 2, 4), strict=True):
            one = next(series for series in panel.series if series.label == "2 heads")
            assert list(one.y) == [cells[int(w), 2, depth]["half_accuracy_size"] for w in one.x]
            dotted = [series for series in panel.series if series.label == "fitted law"][1]
            powers = {name: exponent["mean"] for name, exponent in law["exponents"].items()}
            for w, size in zip(dotted.x, dotted.y, strict=True):
                told = law["constant"] * w ** powers["width"] * 2 ** powers["heads"] * depth ** powers["depth"]
                assert size == pytest.approx(told)
            low, high = panel.y.limits
            assert all(low < y < high for series in panel.series for y in series.y)
        assert f"width^{law['exponents']['width']['mean']:.2f}" in plot.title
        assert "heads" not in plot.title  # not shown to matter

    def test_models_that_end_outside_are_hollow(self) -> None:
        tables = make_capacity(reach=1e6)
        plot = capacity_map(tables, "softmax", "accuracy")
        assert "No law could be fitted" in plot.caption
        assert {s.marker for p in plot.panels for s in p.series if len(s.x)} == {"hollow"}
        assert {row[4].text for row in models_grid(tables, "softmax").rows} == {"> 16,384"}
        said = capacity_summary.capacity_verdict(tables)
        assert said[0] == "“softmax”: accuracy halves beyond 16,384, if at all, in 27 of 27 models."
        assert "too few models end among the sizes tested (0 of 27 models)" in said[2]
        below = capacity_summary.capacity_verdict(make_capacity(shapes=SMALL, reach=1e-6))
        assert below[1] == "“softmax”: the top weight falls under ½ before 16 in 8 of 8 models."
        assert "does not halve up to 16,384" in " ".join(capacity_summary.capacity_care(tables))
        assert laws_grid(tables, "softmax").rows[0][-1].text == "27"
        assert capacity_tiles(tables, "softmax")[0].value == "27 models"
        assert "Hollow" not in capacity_map(make_capacity(), "softmax", "accuracy").caption

    def test_layers_are_told_against_the_forecast(self, capacity: Any) -> None:
        found = capacity["layers"]["softmax"]
        label = next(iter(found))
        found[label]["first_forecast"] = 0
        found[label]["first_measured"] = 1
        plot = layers(capacity, "softmax")
        assert len(plot.panels) == len(found) == 18
        assert "as forecast in 17 of 18 models" in plot.title
        assert list(plot.panels[0].series[0].y) == found[label]["measured"]
        assert "names the right layer in 17." in capacity_summary.capacity_verdict(capacity)[-1]
        row = next(
            row for row in models_grid(capacity, "softmax").rows if [c.text for c in row[:3]] == ["32", "1", "2"]
        )
        assert [(cell.text, cell.strong) for cell in row[-3:-1]] == [("2", True), ("1", True)]
        assert capacity_tiles(capacity, "softmax")[-1].value == "17 of 18"
        capacity["layers"]["softmax"] = dict.fromkeys(found)  # sizes on one side alone
        assert drawable(capacity) == ["capacity-softmax-accuracy", "capacity-softmax-top"]
        assert len(models_grid(capacity, "softmax").head) == 9

    def test_exponents_that_may_be_zero_are_named(self, capacity: Any) -> None:
        assert "heads is not shown to matter." in capacity_summary.capacity_verdict(capacity)[2]
        law = capacity["laws"]["softmax"]["accuracy"]
        for one in law["exponents"].values():
            one |= {"low": -1.0, "high": 1.0}
        assert (
            "is not shown to depend on width or heads or depth" in capacity_map(capacity, "softmax", "accuracy").title
        )

    def test_a_map_that_shows_nothing_is_left_out(self) -> None:
        assert drawable(make_capacity(shapes=SMALL, reach=1e6))[0] == "capacity-softmax-accuracy"
        assert "capacity-softmax-top" not in drawable(make_capacity(shapes=SMALL, reach=1e-6))

    def test_a_name_that_no_file_should_have_is_counted(self) -> None:
        tables = make_capacity(("softmax", "../x"), 1, ((32, 64), (1,), (1,)))
        assert drawable(tables)[2:] == ["capacity-2-accuracy", "capacity-2-top"]


def test_the_page_has_everything_in_order(tmp_path: Path) -> None:
    tables = make_tables((*THREE, "top-k", "linear", "sharp"))
    html = write_page(COMMAND, PROVENANCE, tables, tmp_path).read_text(encoding="utf-8")
    text = " ".join(Page(html).text)
    place = 0
    for part in (
        "Who stays right as inputs grow?", "Verdict", "“sharp” leads with", "“softmax” gets", "Of the", "The league",
        "What was asked", "Take care", "At a glance", "League table", "Accuracy (%) of single w128 on max", "Figures",
        "Does attention stay sharp?", "What is lost to dispersion", "Dispersion or wrong ranking, at 16,384 items",
        "Near-ties: right item ranked first", "How it was done", "The methods", "at test: hard",
        "softmax over the 8 largest logits", "Provenance", COMMAND,
    ):  # fmt: skip
        assert part in text[place:], part
        place = text.index(part, place)


def test_the_page_of_capacity_has_everything_in_order(tmp_path: Path) -> None:
    tables = make_capacity(("softmax", "ssmax"), shapes=SMALL)
    html = write_page(CAPACITY_COMMAND, PROVENANCE, tables, tmp_path).read_text(encoding="utf-8")
    text = " ".join(Page(html).text)
    place = 0
    for part in (
        "Does capacity keep attention sharp?", "Verdict", "“softmax”: accuracy halves between", "“ssmax”: accuracy",
        "Capacity: softmax", "Capacity: ssmax", "the size at which accuracy halves", "Which layer of softmax",
        "Laws of softmax", "Models of softmax", "Laws of ssmax", "How it was done", "A model ends where", "Provenance",
    ):  # fmt: skip
        assert part in text[place:], part
        place = text.index(part, place)
    assert "League table" not in text


def test_text_of_a_file_is_escaped(few: Any, tmp_path: Path) -> None:
    evil = "</script><script>alert('x')</script>"
    tables = json.loads(json.dumps(few).replace('"ssmax"', json.dumps(evil)))
    html = write_page(COMMAND, PROVENANCE, tables, tmp_path).read_text(encoding="utf-8")
    assert "alert('x')" not in html
    assert len(list(Page(html).named("script"))) == 4


@pytest.mark.parametrize(
    "table", ["setting", "accuracy", "hard", "league", "training", "per_seed", "methods", "entropy"]
)
def test_damaged_tables(few: Any, table: str, tmp_path: Path) -> None:
    for damage in ({"softmax": 3}, [1.0]):
        with pytest.raises(FileFormatError, match=r"^results: the tables of .* are damaged \(.*\); run their.*again$"):
            write_page(COMMAND, PROVENANCE, {**few, table: damage}, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("table", ["capacity", "laws", "layers", "setting"])
def test_damaged_tables_of_capacity(table: str, tmp_path: Path) -> None:
    capacity = make_capacity(shapes=SMALL)
    with pytest.raises(FileFormatError, match=r"^results: the tables of .* are damaged \(.*\); run their.*again$"):
        write_page(COMMAND, PROVENANCE, {**capacity, table: {"softmax": 3}}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_drawn_files_are_the_same_every_time(few: Any, tmp_path: Path) -> None:
    first, second = draw(few, tmp_path / "a"), draw(copy.deepcopy(few), tmp_path / "b")
    names = [f"{name}.{form}" for name in ("accuracy", "sharpness", "causes") for form in ("svg", "png")]
    assert [path.name for path in first] == names
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
