"""The page and figures of `sharpmax clrs evaluate` say what its tables show, and nothing else."""

from __future__ import annotations

import copy
import json
import statistics
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from sharpmax.errors import FileFormatError
from sharpmax.report.figures import draw, drawable
from sharpmax.report.interactive import interactive_figure
from sharpmax.report.page import write_page
from sharpmax.report.plot import legend
from sharpmax.report.registry import story_of
from sharpmax.report.sections import clrs as summary
from sharpmax.report.sections import clrs_charts as grids
from sharpmax.report.sections.clrs import tiles
from sharpmax.report.sections.clrs_charts import curves, lead, right_answers, shown
from sharpmax.report.static import static_figure
from sharpmax.tasks.clrs_text.sizes import ALGORITHMS
from tests.report.clrs_tables import ARMS, COMMAND, HOPELESS, make_tables
from tests.report.reproduce_tables import PROVENANCE
from tests.report.test_page import Page

FEW = ("minimum", "quicksort", "segments_intersect", "optimal_bst")


@pytest.fixture(scope="module")
def full() -> dict[str, Any]:
    return make_tables()


@pytest.fixture
def few() -> dict[str, Any]:
    return make_tables(FEW)


def everything(tables: Any) -> list[str]:
    parts = (summary.verdict, summary.asked, summary.single, summary.care)
    return [sentence for part in parts for sentence in part(tables)]


def mean_of(tables: Any, arm: str, *, trained: bool) -> float:
    """The mean over algorithms of means over sizes, from the cells alone."""
    rows = []
    for name, cells in tables["accuracy"][arm].items():
        known = tables["setting"]["sizes"][name]["trained"]
        row = [cell["mean"] for size, cell in cells.items() if (int(size) in known) == trained]
        rows += [statistics.fmean(row)] if row else []
    return statistics.fmean(rows)


def test_the_tables_decide_which_story_is_told(few: Any) -> None:
    assert getattr(story_of(few), "name", None) == "clrs"


def test_the_verdict_carries_its_numbers(full: Any) -> None:
    means, gain, touchstone = summary.verdict(full)
    for arm in ARMS[:2]:
        for trained in (True, False):
            assert f"{mean_of(full, arm, trained=trained):.1f}%" in means
    assert "on average over 30 algorithms" in means
    assert "on average over 29 algorithms" in means  # one algorithm has one size
    inside, outside = (mean_of(full, "paper", trained=t) - mean_of(full, "none", trained=t) for t in (True, False))
    assert gain.startswith(f"“paper” is better than “none” at larger sizes: +{outside:.1f} points (")
    assert "McNemar p < 0.001" in gain
    assert f"at sizes trained on it is not shown to differ: +{inside:.1f} points" in gain
    assert touchstone.startswith("“minimum”, the easiest of the algorithms, was learnt by every arm: “none” 95.")
    for sentence in everything(full):
        assert sentence.endswith(".")
        assert "  " not in sentence
    text = " ".join(everything(full))
    assert "“none” on 28 and “paper” on 28 of 30 algorithms; the others have not been shown to be learnt" in text
    assert "There is no room in the models for bfs of size 47" in text
    assert "“paper”: 3.0% of the rows have count outside" in text


def test_nothing_is_claimed_that_is_not_shown() -> None:
    same = make_tables(FEW, gain=0.0)
    assert "“paper” is not shown to differ from “none” at larger sizes" in summary.verdict(same)[1]
    assert "no arm is shown to be better than none" in right_answers(same).title
    assert "not shown to differ" in tiles(same)[2].detail
    worse = make_tables(FEW, gain=-0.2)
    assert "“paper” is worse than “none” at larger sizes: −" in summary.verdict(worse)[1]
    assert "paper loses" in right_answers(worse).title
    assert "better on none and worse on 2" in summary.single(worse)[0]


@pytest.mark.parametrize(
    ("p", "low", "mean", "gained", "says"),
    [(0.001, 1.0, 2.0, 9, 1), (0.02, 1.0, 2.0, 9, 0), (0.001, -0.1, 2.0, 9, 0), (0.001, 1.0, 2.0, 1, 0)],
)
def test_a_gain_needs_interval_and_test_to_agree(p: float, low: float, mean: float, gained: int, says: int) -> None:
    assert shown({"p": p, "low": low, "high": 4.0, "mean": mean, "gained": gained, "lost": 3}) == says
    assert shown({"p": p, "low": -4.0, "high": -low, "mean": -mean, "gained": 3, "lost": gained}) == -says


def test_a_task_that_was_not_learnt_is_said_so(few: Any) -> None:
    few["by_algorithm"]["paper"]["minimum"]["in"]["mean"] = 89.9
    said = summary.verdict(few)[2]
    assert "was not learnt by “paper”: “none” 95.0% and “paper” 89.9%" in said
    assert "says nothing about sharpness" in said
    assert tiles(few)[-1].value == "89.9%"
    assert "not learnt by paper" in tiles(few)[-1].detail
    without = make_tables(("quicksort", "bfs"))
    assert "is not known" in summary.verdict(without)[2]
    assert len(tiles(without)) == 3


def test_arms_that_were_not_trained_alike_are_named(few: Any) -> None:
    assert "not trained alike" not in " ".join(summary.care(few))
    assert "same examples" in curves(few).caption
    few["training"]["paper"]["setting"]["steps"] = 2000
    few["training"]["paper"]["setting"]["examples"] = {"count": 1}
    said = " ".join(summary.care(few))
    assert "steps is 3,000 for “none” and 2,000 for “paper”" in said
    assert "examples is its own for “none”" in said
    assert "same examples" not in curves(few).caption


def test_every_algorithm_has_a_panel(full: Any) -> None:
    plot = right_answers(full)
    assert plot.small
    assert [panel.title for panel in plot.panels] == [name.replace("_", " ") for name in ALGORITHMS]
    minimum = plot.panels[ALGORITHMS.index("minimum")]
    paper, majority, trained = minimum.series[1:]
    cells = full["accuracy"]["paper"]["minimum"]
    assert paper.y == [cells[str(n)]["mean"] for n in paper.x]
    assert paper.low == [cells[str(n)]["low"] for n in paper.x]
    assert list(majority.y) == [full["majority"]["minimum"][str(n)]["mean"] for n in majority.x]
    assert set(trained.x) == {31}
    assert [entry.label for entry in legend(plot)] == [
        "none",
        "paper",
        "most frequent answer",
        "largest size trained on",
    ]
    assert [entry.arm for entry in legend(plot)] == ["none", "paper", None, None]
    alone = plot.panels[ALGORITHMS.index("segments_intersect")]
    assert [list(series.x) for series in alone.series[:2]] == [[4], [4]]
    assert alone.x.limits[0] < 4 < alone.x.limits[1]
    assert len(alone.series) == 3  # no size was left out of training


@pytest.mark.parametrize(
    ("algorithms", "arms", "rows"),
    [
        (("minimum",), ARMS, 1),
        (("minimum", "segments_intersect"), ARMS[:1], 1),
        (FEW, ARMS, 1),
        (ALGORITHMS, ARMS[:2], 6),
    ],
)
def test_any_number_of_arms_and_algorithms_is_drawn(algorithms: Any, arms: Any, rows: int) -> None:
    tables = make_tables(algorithms, arms)
    plot = right_answers(tables)
    figure = static_figure(plot)
    seen = [axes for axes in figure.axes if axes.get_visible()]
    assert len(seen) == len(algorithms)
    assert len({round(axes.get_position().y0, 3) for axes in seen}) == rows
    assert sum(bool(axes.get_xlabel()) for axes in seen) == (len(seen) if len(seen) < 3 else 1)
    screen = interactive_figure(plot)
    json.dumps(screen, allow_nan=False)
    for layout in ("wide", "narrow"):
        go.Figure(data=screen["data"], layout=screen[layout])
        domains = [(tuple(screen[layout][f"xaxis{i}"]["domain"]), tuple(screen[layout][f"yaxis{i}"]["domain"]))
                   for i in ["", *range(2, len(algorithms) + 1)]]  # fmt: skip
        assert len(set(domains)) == len(algorithms)
        assert all(0.0 <= low < high <= 1.0 for pair in domains for low, high in pair)
    assert len(grids.algorithms_grid(tables).rows) == len(algorithms)
    assert everything(tables)


def test_loss_curves(few: Any) -> None:
    plot = curves(few)
    assert [series.arm for series in plot.panels[0].series] == ["none", "paper"]
    low, high = plot.panels[0].y.limits
    assert all(low < loss < high for series in plot.panels[0].series for loss in series.y)
    assert f"none {few['training']['none']['curve'][-1][1]:.3f}" in plot.note
    few["training"] = {"paper": few["training"]["paper"]}
    # An arm keeps its looks where another has no curve.
    assert curves(few).panels[0].series[0].look.colour == right_answers(few).panels[0].series[1].look.colour
    few["training"] = {}
    assert drawable(few) == ["accuracy"]


def test_tables_of_means_and_gains(full: Any) -> None:
    means, gains = grids.means_grid(full), grids.gains_grid(full)
    assert gains is not None
    assert [cell.text for cell in means.head][1:3] == ["final answer, sizes trained on", "final answer, larger sizes"]
    assert [cell.small for cell in means.head][1:3] == ["30 algorithms", "29 algorithms"]
    assert means.rows[1][2].text == f"{full['means']['paper']['out']['mean']:.1f}"
    assert means.rows[1][4].text == f"{full['means_exact']['paper']['out']['mean']:.1f}"
    (row,) = gains.rows
    assert row[3].text == f"+{full['gains']['paper']['out']['mean']:.1f}*"
    assert row[3].strong
    assert not row[1].strong
    assert row[4].text == f"+{full['gains']['paper']['out']['gained']} −{full['gains']['paper']['out']['lost']}"


def test_algorithms_are_sorted_by_the_difference_beyond_training() -> None:
    tables = make_tables(FEW, ARMS)
    tables["gains"]["learned"]["out"]["mean"] = 99.0
    assert lead(tables) == "learned"
    found = grids.algorithms_grid(tables)
    assert [(c.text, c.small) for c in found.head][1:4] == [(arm, "sizes trained on") for arm in ARMS]
    gain = {name: one["out"]["mean"] for name, one in tables["gains_by_algorithm"]["learned"].items() if "out" in one}
    names = [row[0].text for row in found.rows]
    assert names == [*(n.replace("_", " ") for n in sorted(gain, key=lambda n: -gain[n])), "segments intersect"]
    last = found.rows[-1]
    assert [cell.text for cell in last[4:]] == ["–"] * 6
    assert grids.algorithms_grid(make_tables(FEW, ARMS[:1])).note.startswith("Sorted by right answers at larger sizes")


def test_models_as_they_come_and_sizes_in_between(few: Any) -> None:
    for about in few["setting"]["arms"].values():
        about |= {"trained": False, "steps": None}
    few["training"] = {}
    few["setting"]["sizes"]["minimum"]["trained"].remove(12)
    text = " ".join(everything(few))
    assert "sizes meant for training" in text
    assert "at other sizes" in text
    assert "larger" not in text
    assert "as it comes, not trained" in text


def test_sizes_of_one_kind_alone(few: Any, tmp_path: Path) -> None:
    for table in ("means", "means_exact", "gains"):
        for one in few[table].values():
            del one["out"]
    for table in ("by_algorithm", "gains_by_algorithm"):
        for one in few[table].values():
            for cells in one.values():
                cells.pop("out", None)
    assert right_answers(few).title == "Right answers by size"
    assert "distribution) “none”" in summary.verdict(few)[0]
    assert len(grids.means_grid(few).head) == 3
    write_page(COMMAND, PROVENANCE, few, tmp_path)


def test_the_page_has_everything_in_order(few: Any, tmp_path: Path) -> None:
    html = write_page(COMMAND, PROVENANCE, few, tmp_path).read_text(encoding="utf-8")
    text = " ".join(Page(html).text)
    place = 0
    for part in (
        "Does sharper attention carry algorithms to larger sizes?", "Verdict", "“paper” is better", "What was asked",
        "Algorithm by algorithm", "Take care", "At a glance", "How the arms learned",
        "Right answers (%): means over algorithms", "Gain over none (points)", "Right final answers (%) by algorithm",
        "How it was done", "The arms and their training", "3,000 steps of 65,536 tokens",
        "212,346 tokens a second (41% of the GPU",
        "Provenance", COMMAND, "Training of none", "sharpmax clrs train smollm2 --policy none", "Training of paper",
    ):  # fmt: skip
        assert part in text[place:], part
        place = text.index(part, place)
    assert drawable(few) == ["accuracy", "curve"]


def test_questions_are_called_unseen_only_where_that_is_known(few: Any, tmp_path: Path) -> None:
    said = "none of them can occur in training"
    assert said in write_page(COMMAND, PROVENANCE, few, tmp_path).read_text(encoding="utf-8")
    few["training"]["none"]["setting"]["data"]["dataset"] = "mine.jsonl"
    assert said not in write_page(COMMAND, PROVENANCE, few, tmp_path).read_text(encoding="utf-8")
    few["training"] = {}
    assert said not in write_page(COMMAND, PROVENANCE, few, tmp_path).read_text(encoding="utf-8")


def test_hopeless_algorithms_are_at_chance(full: Any) -> None:
    """The made-up tables hold what the page has to say of algorithms that nobody has learnt."""
    for name in HOPELESS:
        assert full["by_algorithm"]["none"][name]["in"]["mean"] < 40


def test_text_of_a_file_is_escaped(few: Any, tmp_path: Path) -> None:
    evil = "</script><script>alert('x')</script>"
    tables = json.loads(json.dumps(few).replace('"paper"', json.dumps(evil)).replace("quicksort", evil))
    html = write_page(COMMAND, PROVENANCE, tables, tmp_path).read_text(encoding="utf-8")
    assert "alert('x')" not in html
    assert len(list(Page(html).named("script"))) == 4


@pytest.mark.parametrize("table", ["setting", "accuracy", "majority", "means", "gains", "by_algorithm", "training"])
def test_damaged_tables(few: Any, table: str, tmp_path: Path) -> None:
    for damage in ({"paper": 3, "none": 4, "base": "none", "minimum": []}, [1.0]):
        with pytest.raises(FileFormatError, match=r"^results: the tables of .* are damaged \(.*\); run their.*again$"):
            write_page(COMMAND, PROVENANCE, {**few, table: damage}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_drawn_files_are_the_same_every_time(few: Any, tmp_path: Path) -> None:
    first, second = draw(few, tmp_path / "a"), draw(copy.deepcopy(few), tmp_path / "b")
    assert [path.name for path in first] == ["accuracy.svg", "accuracy.png", "curve.svg", "curve.png"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
