"""What pages say where results are unusual: no policy, one seed, losses, two runs, nothing learned."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest

from sharpmax.report import calibrate, clrs, compare, evaluate, reproduce
from sharpmax.report.page import report_of, together
from sharpmax.report.tables import Report, Table
from tests.report.saved import compared, evaluated, exam, probed, reproduced, tables


def row_of(table: Table | None, name: str) -> list[str]:
    assert table is not None
    assert {len(row) for row in table.rows} == {len(table.head)}
    return next([f"{cell.text} {cell.small}".strip() for cell in row] for row in table.rows if row[0].text == name)


def titles(report: Report) -> list[str]:
    return [table.title for part in report.parts for table in (*part.tables, *part.details)]


def keep(found: dict[str, Any], names: Iterable[str], only: set[str]) -> None:
    for name in names:
        found[name] = {key: value for key, value in found[name].items() if key in only}


def test_evaluate_has_one_row_per_variant() -> None:
    found = evaluated()
    table = evaluate.summary_table(found)
    assert row_of(table, "baseline") == ["baseline", "0", "–", "–", "–", "1.00×", "1.00×"]
    gain = evaluate.gain(found, "houses", "constant")
    row = row_of(table, "constant")
    assert row[2] == f"{gain.mean:+.1f} better {len(gain.better)}, worse {len(gain.worse)} of {len(gain.points)}"
    assert row[4] == "+0.83% 6,144 tokens of text"
    accuracy = found["accuracy/houses"]["constant"]["16"]
    shown = row_of(evaluate.accuracy_table(found, "houses"), "constant")
    assert f"{accuracy['mean']:.1f}* {accuracy['low']:.1f}–{accuracy['high']:.1f}" in shown


def test_evaluate_without_a_policy_gives_the_baseline_by_size() -> None:
    found = evaluated()
    base = {"as it comes"}
    keep(found, ["accuracy/houses", "perplexity", "cost"], base)
    found["setting"]["arms"] = {"as it comes": found["setting"]["arms"]["as it comes"]}
    del found["accuracy/prices"], found["paired/prices"]
    found["paired/houses"] = {}
    report = report_of(found)
    assert report.headline[0].startswith("Accuracy (houses): 16.0% at n = 16 and ")
    assert "Variants" not in titles(report)
    (figure,) = report.figures
    assert len(figure.chart().concat) == 1


def test_evaluate_reports_losses_and_what_is_not_significant() -> None:
    found = evaluated()
    for n, test in found["paired/houses"]["constant"].items():
        found["accuracy/houses"]["constant"][n]["mean"] = 1.0
        test["p"] = 0.001
    keep(found, ["perplexity", "cost", "accuracy/houses", "accuracy/prices"], {"as it comes", "constant"})
    keep(found, ["paired/houses", "paired/prices"], {"constant"})
    keep(found["setting"], ["arms"], {"as it comes", "constant"})
    assert "16.0% → 1.0% with constant. " in evaluate.headline(found)[0]
    for test in found["paired/houses"]["constant"].values():
        test["p"] = 0.4
    assert "with constant (p = 0.40, not significant)." in evaluate.headline(found)[0]


def test_evaluate_shows_the_harness_and_warnings() -> None:
    found = evaluated()
    found["harness"] = {name: {"arc": {"acc": {"mean": 0.25, "sem": 0.01}}} for name in found["setting"]["arms"]}
    found["setting"]["arms"]["constant"]["remarks"] = [
        "3.0% of the rows are flat; said once for this policy",
        "1.5% of the rows are flat",
    ]
    assert row_of(evaluate.harness_table(found), "constant") == ["constant", "0.25 ± 0.01"]
    assert evaluate.notes(found) == ["constant: 1.5 to 3.0% of the rows are flat."]


def test_calibrate_names_a_broken_budget_and_a_useless_policy() -> None:
    found = tables("calibrate-smollm2")
    chosen = found["candidates"][found["chosen"]]
    chosen["rise"]["2048"] = 1.5
    chosen["nll"] = found["before"]["nll"] + 0.5
    found["candidates"]["other"] = {**copy.deepcopy(chosen), "foldable": True}
    found["best_foldable"] = "other"
    assert "Perplexity +1.50% (over the budget of 1%)." in calibrate.headline(found)[0]
    notes = " ".join(calibrate.notes(found))
    assert "do not use it" in notes
    assert "The best policy to fold into the weights, at no cost in any engine: other" in notes
    assert "1.50 over budget" in " ".join(row_of(calibrate.candidates_table(found), "other")).replace("+", "")
    found["best_foldable"] = found["chosen"]
    assert "can be folded into the weights: any engine" in " ".join(calibrate.notes(found))
    del found["validation"]
    assert calibrate.headline(found)[0].startswith("Validation accuracy (kv): 93.8%.")
    found["heads"]["touched"] = []
    assert titles(report_of(found)) == ["Policies"]


def test_clrs_says_what_was_not_learned_and_not_alike() -> None:
    found = exam()
    found["by_algorithm"]["clrs-paper"]["minimum"]["in"]["mean"] = 40.0
    found["training"]["clrs-paper"]["setting"]["steps"] = 7
    found["setting"]["too_long"] = {"bfs": [64]}
    notes = " ".join(clrs.notes(found))
    assert "not learned by clrs-paper" in notes
    assert "The variants were not trained alike: steps is " in notes
    assert "bfs of size 64" in notes
    assert "do not include the variance between seeds" in notes


def test_clrs_of_one_model_has_intervals_and_no_gains() -> None:
    found = exam()
    for name in ("accuracy", "exact", "means", "means_exact", "by_algorithm", "speed", "training"):
        found[name] = {"clrs-none": found[name]["clrs-none"]}
    found |= {"gains": {}, "gains_by_algorithm": {}, "paired": {}}
    found["setting"]["arms"] = {"clrs-none": found["setting"]["arms"]["clrs-none"]}
    report = report_of(found)
    mean = found["means"]["clrs-none"]["out"]
    assert (
        report.headline[0] == f"Accuracy at larger sizes: {mean['mean']:.1f}% ({mean['low']:.1f}–{mean['high']:.1f})."
    )
    assert not any("Gain" in title for title in titles(report))


def test_a_clrs_gain_counts_only_if_questions_and_algorithms_agree() -> None:
    gain = {"mean": 2.0, "low": 1.0, "high": 3.0, "gained": 9, "lost": 2, "p": 0.001}
    assert clrs.significant(gain) == 1
    assert clrs.significant(gain | {"mean": -2.0, "low": -3.0, "high": -1.0}) == 0
    assert clrs.significant(gain | {"p": 0.02}) == clrs.significant(gain | {"low": -1.0}) == 0


def test_compare_with_one_seed_tests_nothing() -> None:
    found = compared()
    found["setting"]["seeds"] = [0]
    for name, table in found.items():
        if name == "per_seed":
            found[name] = {method: {n: values[:1] for n, values in row.items()} for method, row in table.items()}
        elif name in ("accuracy", "hard", "ranking", "close", "top_weight", "entropy", "whole"):
            for row in table.values():
                for cell in row.values():
                    cell |= {"low": None, "high": None, "sem": None, "n": 1}
    report = report_of(found)
    assert "(one seed, no interval)" in report.headline[1]
    assert report.notes[0].startswith("One seed: no difference was tested")
    found["training"]["softmax"]["diverged"] = [0]
    assert "softmax diverged for seed 0" in " ".join(compare.leaderboard_notes(found))


def test_compare_pairs_seeds() -> None:
    found = compared()
    size = str(found["setting"]["sizes"][-1])
    seeds = len(found["setting"]["seeds"])
    found["per_seed"]["sharp"][size] = [50.0 + seed for seed in range(seeds)]
    found["per_seed"]["softmax"][size] = [48.0 + seed for seed in range(seeds)]
    gap = compare.gap(found, "sharp", "softmax", size)
    assert (gap.mean, gap.low, gap.high, gap.significant) == pytest.approx((2.0, 2.0, 2.0, True))


def test_a_leader_may_gain_from_spreading_its_weight() -> None:
    found = compared()
    size = str(found["setting"]["sizes"][-1])
    found["hard"]["sharp"][size]["mean"] = found["accuracy"]["sharp"][size]["mean"] - 3.0
    assert "none to dispersion: argmax would lose 3.0 more" in " ".join(compare.headline(found))


def test_capacity_without_a_rule() -> None:
    found = tables("compare-capacity")
    for model in found["capacity"]["softmax"]:
        model["half_accuracy_size"] = "beyond"
    found["laws"]["softmax"]["accuracy"] |= {"exponents": None, "constant": None, "r2": None, "used": 0, "beyond": 18}
    report = report_of(found)
    assert "not up to 2,048 in 18 of 18 models" in report.headline[0]
    assert "no rule for the size at which accuracy halves" in " ".join(report.headline)
    assert report.parts[0].metrics[0].value == "0 of 18"
    assert "exponents tend to be too small" in " ".join(report.notes)
    assert [figure.name for figure in report.figures] == ["capacity-softmax-top", "capacity-softmax-layers"]


def test_probes_of_two_models_are_compared_head_by_head() -> None:
    before, after = probed(), probed(policy="paper")
    for about in after["heads/kv"].values():
        about |= {"slope": -1.0, "slope_low": -1.1, "slope_high": -0.9, "kind": "sharp"}
    pair = together(
        [
            (name, {"command": "sharpmax probe", "provenance": {}, "tables": found})
            for name, found in (("a", before), ("b", after))
        ]
    )
    report = report_of(pair)
    assert report.headline == [
        "On kv, heads that lose focus: 17 of 27 (63.0%) in A (smollm2 baseline), 0 of 27 (0.0%) in B (smollm2 with "
        "paper). "
        "Slope lower in B in 27, higher in 0 of 27 heads; in the others the 95% intervals overlap."
    ]
    names = {figure.name: figure.chart() for figure in report.figures}
    assert list(names) == ["heads-kv", "curves-kv", "layers-kv", "forecast-kv"]
    assert [panel.title for panel in names["heads-kv"].concat] == [
        "A: smollm2 baseline",
        "B: smollm2 with paper",
        "B − A",
    ]
    assert len(report.origins) == 2


def test_probes_of_different_shapes_and_tasks() -> None:
    def pair(one: Any, other: Any) -> Any:
        return together(
            [(name, {"command": "", "provenance": {}, "tables": found}) for name, found in (("a", one), ("b", other))]
        )

    report = report_of(pair(probed(), probed(layers=2)))
    assert "A (smollm2 (a)), " in report.headline[0]
    assert len(report.figures[0].chart().concat) == 2
    with pytest.raises(ValueError, match="no task is in both of them"):
        report_of(pair(probed(), probed(task="text")))


def test_heads_without_numbers_are_not_counted() -> None:
    found = probed()
    first = next(iter(found["heads/kv"].values()))
    first |= {"kind": "unknown", "slope": None, "slope_low": None, "slope_high": None, "curve": {}, "forecast": {}}
    first["horizon"] = {"tokens": None, "low": None, "high": None}
    report = report_of(found)
    assert " of 26 heads" in report.headline[0]
    for figure in report.figures:
        figure.chart()


def test_reproduce_with_one_seed_has_no_test_and_no_errors() -> None:
    found = reproduced()
    for row in found["comparison"].values():
        for cell in row.values():
            cell["p"] = None
    for name in ("accuracy", "entropy", "top_weight"):
        for row in found[name].values():
            for cell in row.values():
                cell["sem"] = None
    found["setting"]["recipes"]["paper"]["seeds"] = [0]
    report = report_of(found)
    assert "(no test)" in report.headline[0]
    assert "±" not in "".join(
        cell.text
        for row in (reproduce.accuracy_table(found, "paper") or report.parts[0].tables[0]).rows
        for cell in row
    )


def test_reproduce_shows_what_there_is() -> None:
    found = reproduced()
    report = report_of({"fit": found["fit"]})
    assert [figure.name for figure in report.figures] == ["fit"]
    assert titles(report) == ["Coefficients of the polynomials"]
    report = report_of({name: found[name] for name in ("accuracy", "comparison", "published")})
    assert [figure.name for figure in report.figures] == ["accuracy"]
    published = row_of(reproduce.accuracy_table(found, "paper"), "softmax, published")
    assert f"{found['published']['softmax']['1024']:.1f}" in published


def test_reproduce_reports_a_loss_where_only_losses_are_significant() -> None:
    found = reproduced()
    for row in found["comparison"].values():
        for cell in row.values():
            cell |= {"gain": -abs(cell["gain"]) - 1.0, "p": 0.001}
    one = reproduce.best(found, "paper")
    assert one is not None
    assert (one.better, one.gains[one.shown]) == ([], min(one.gains.values()))


def test_the_polynomial_ends_where_entropy_passes_its_range() -> None:
    row = {"16": {"mean": 0.0}, "64": {"mean": 2.0}}
    assert reproduce.crossing(row, 1.0) == pytest.approx(32.0)
    assert reproduce.crossing(row, 3.0) is None
