"""What pages say where results are unusual: no policy, one seed, losses, two runs, nothing learned."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from sharpmax.errors import OutOfRangeWarning
from sharpmax.policies.polynomial import PAPER
from sharpmax.report import calibrate, clrs, compare, evaluate, reproduce
from sharpmax.report.page import report_of, together
from sharpmax.report.tables import Report, Table
from sharpmax.report.words import merged
from sharpmax.stats.dispatch import row_stats
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


def test_evaluate_has_gain_and_cost_of_a_variant_in_one_row() -> None:
    found = evaluated()
    table = evaluate.summary_table(found)
    before, after = (found["accuracy/houses"][name].values() for name in ("as it comes", "constant"))
    means = [sum(cell["mean"] for cell in row) / len(row) for row in (before, after)]
    assert row_of(table, "baseline")[1] == f"{means[0]:.1f}"
    assert row_of(table, "baseline")[3:] == ["–", "1.00×", "1.00×", "0"]
    row = row_of(table, "constant")
    assert row[1] == f"{means[1]:.1f} {means[1] - means[0]:+.1f}; 2 better"
    assert row[3] == "+0.83% 6,144 tokens of text"
    one, test = (found[f"{kind}/houses"]["constant"]["16"] for kind in ("accuracy", "paired"))
    small = f"{one['low']:.1f}–{one['high']:.1f}; +{test['gained']} −{test['lost']}"
    assert f"{one['mean']:.1f}* {small}" in row_of(evaluate.accuracy_table(found, "houses"), "constant")


def test_evaluate_without_a_policy_gives_the_baseline_by_size() -> None:
    found = evaluated()
    keep(found, ["accuracy/houses", "perplexity", "cost"], {"as it comes"})
    found["setting"]["arms"] = {"as it comes": found["setting"]["arms"]["as it comes"]}
    del found["accuracy/prices"], found["paired/prices"]
    found["paired/houses"] = {}
    report = report_of(found)
    assert report.headline[0].startswith("Accuracy (houses): 16.0% at n = 16, ")
    (figure,) = report.figures
    assert len(figure.chart().concat) == 1


def test_evaluate_reports_losses_and_what_is_not_significant() -> None:
    found = evaluated()
    for n, test in found["paired/houses"]["constant"].items():
        found["accuracy/houses"]["constant"][n]["mean"] = 1.0
        test["p"] = 0.001
    del found["accuracy/prices"], found["paired/prices"]
    keep(found, ["perplexity", "cost", "accuracy/houses"], {"as it comes", "constant"})
    keep(found, ["paired/houses"], {"constant"})
    keep(found["setting"], ["arms"], {"as it comes", "constant"})
    assert "16.0% → 1.0% with constant. " in evaluate.headline(found)[0]
    for test in found["paired/houses"]["constant"].values():
        test["p"] = 0.4
    assert "with constant (p = 0.40, not significant)." in evaluate.headline(found)[0]


def test_evaluate_shows_the_harness_and_warnings() -> None:
    found = evaluated()
    found["harness"] = {name: {"arc": {"acc": {"mean": 0.25, "sem": 0.01}}} for name in found["setting"]["arms"]}
    found["setting"]["arms"]["constant"]["remarks"] = ["3.0% of the rows are flat", "1.5% of the rows are flat"]
    assert row_of(evaluate.harness_table(found), "constant") == ["constant", "0.25 ± 0.01"]
    assert report_of(found).notes == ["constant: 1.5 to 3.0% of the rows are flat."]


def test_a_warning_of_a_policy_ends_with_the_range_it_is_made_for() -> None:
    flat = row_stats(torch.zeros(1, 1, 2, 16), torch.zeros(1, 1, 1000, 16))
    with pytest.warns(OutOfRangeWarning) as caught:
        PAPER.warn_outside(flat)
    (remark,) = merged([str(caught[0].message)])
    assert remark.endswith(f"the range this policy is made for ({PAPER.describe()})")


def test_calibrate_names_a_broken_budget_and_a_useless_policy() -> None:
    found = tables("calibrate-smollm2")
    chosen = found["candidates"][found["chosen"]]
    chosen["rise"]["2048"] = 1.5
    chosen["nll"] = found["before"]["nll"] + 0.5
    found["candidates"]["other"] = {**copy.deepcopy(chosen), "foldable": True}
    found["best_foldable"] = "other"
    assert "Perplexity +1.50% at most, over the budget of 1%." in calibrate.headline(found)[0]
    notes = " ".join(calibrate.notes(found))
    assert "do not use it" in notes
    assert "Best policy to fold into the weights, at no cost in any engine: other" in notes
    assert "+1.50 over budget" in row_of(calibrate.candidates_table(found), "other")
    del found["validation"]
    assert calibrate.headline(found)[0].startswith("Validation accuracy (kv): 93.8%.")
    found["heads"]["touched"] = []
    assert titles(report_of(found)) == ["Policies"]


def test_calibrate_with_a_kl_budget_allows_more_on_the_domain_held_out() -> None:
    found = tables("calibrate-smollm2")
    found["setting"] |= {"budget": 0.01, "held_out": "code", "held_out_factor": 3.0}
    found["curve"] = {"nll": [[1, 2.0]], "kl/docs/512": [[1, 0.0]]}
    for about in found["candidates"].values():
        about |= {"rise": {"docs/512": 0.5, "code/512": 1.5}, "kl": {"docs/512": 0.008, "code/512": 0.02}}
    report = report_of(found)
    assert "Perplexity +1.50% at most, within the budget of 0.01 nats per token." in report.headline[0]
    row = row_of(report.parts[0].tables[0], found["chosen"])
    assert row[2:4] == ["0.0200 +1.50%", "0.0080 +0.50%"]
    assert len(report.figures[1].chart().concat) == 2


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
    shown = f"{mean['mean']:.1f}% ({mean['low']:.1f}–{mean['high']:.1f})"
    assert report.headline[0] == f"Accuracy at larger sizes: {shown}."
    assert not any("Gain" in title for title in titles(report))


def test_a_clrs_gain_counts_only_if_questions_and_algorithms_agree() -> None:
    gain = {"mean": 2.0, "low": 1.0, "high": 3.0, "gained": 9, "lost": 2, "p": 0.001}
    assert clrs.significant(gain) == 1
    assert clrs.significant(gain | {"mean": -2.0, "low": -3.0, "high": -1.0}) == 0
    assert clrs.significant(gain | {"p": 0.02}) == clrs.significant(gain | {"low": -1.0}) == 0


def test_compare_with_one_seed_has_no_intervals() -> None:
    found = compared()
    found["setting"]["seeds"] = [0]
    for name in ("accuracy", "hard", "ranking", "close", "top_weight", "entropy", "whole"):
        for row in found[name].values():
            for cell in row.values():
                cell |= {"low": None, "high": None, "sem": None, "n": 1}
    report = report_of(found)
    assert report.parts[0].metrics[0].detail == "95%: one seed"
    assert report.notes[0].startswith("One seed: there are no intervals")
    found["training"]["softmax"]["diverged"] = [0]
    assert "softmax (seed 0)" in " ".join(compare.notes(found))


def test_compare_separates_dispersion_from_wrong_ranking() -> None:
    found = compared()
    size = str(found["setting"]["sizes"][-1])
    found["accuracy"]["softmax"][size]["mean"] = 25.0
    found["hard"]["softmax"][size]["mean"] = 40.0
    assert compare.headline(found)[1] == "softmax loses 15.0 points to dispersion, 60.0 to wrong ranking."
    assert row_of(compare.leaderboard_table(found), "softmax")[8:10] == ["15.0", "60.0"]


def test_capacity_without_a_rule() -> None:
    found = tables("compare-capacity")
    for model in found["capacity"]["softmax"]:
        model["half_accuracy_size"] = "beyond"
    found["laws"]["softmax"]["accuracy"] |= {"exponents": None, "constant": None, "r2": None, "used": 0, "beyond": 18}
    report = report_of(found)
    assert report.headline == ["Accuracy of softmax halves in 0 of 18 models."]
    assert "exponents tend to be too small" in " ".join(report.notes)
    assert [figure.name for figure in report.figures] == ["capacity-1-top"]


def pair(one: Any, other: Any) -> Any:
    return together(
        [(name, {"command": "", "provenance": {}, "tables": found}) for name, found in (("a", one), ("b", other))]
    )


def test_probes_of_two_models_are_compared_head_by_head() -> None:
    before, after = probed(), probed(policy="paper")
    for about in after["heads/kv"].values():
        about |= {"slope": -1.0, "slope_low": -1.1, "slope_high": -0.9, "kind": "sharp"}
    report = report_of(pair(before, after))
    assert report.headline == [
        "Heads that lose focus on kv: 17 of 27 (63.0%) → 0 of 27 (0.0%), from smollm2 baseline to smollm2 with paper."
    ]
    assert report.notes[0].startswith("Kv: slope lower in B in 27, higher in 0 of 27 heads")
    names = {figure.name: figure.chart() for figure in report.figures}
    assert list(names) == ["heads-kv", "curves-kv", "forecast-kv"]
    maps = [panel.title for panel in names["heads-kv"].concat]
    assert maps == ["A: smollm2 baseline", "B: smollm2 with paper", "B − A"]
    assert len(report.origins) == 2


def test_probes_of_different_shapes_and_tasks() -> None:
    report = report_of(pair(probed(), probed(layers=2)))
    assert "from smollm2 (a) to smollm2 (b)" in report.headline[0]
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
    report = report_of(found)
    assert "(no test)" in report.headline[0]
    assert "±" not in "".join(cell.small for row in report.parts[0].tables[0].rows for cell in row)


def test_reproduce_shows_what_there_is() -> None:
    found = reproduced()
    report = report_of({"fit": found["fit"]})
    assert [figure.name for figure in report.figures] == ["fit"]
    assert titles(report) == ["Coefficients of the polynomials"]
    report = report_of({name: found[name] for name in ("accuracy", "comparison", "published")})
    assert [figure.name for figure in report.figures] == ["accuracy"]
    published = row_of(reproduce.accuracy_table(found, "paper"), "softmax, published")
    assert f"{found['published']['softmax']['1024']:.1f}" in published


def test_reproduce_reports_the_largest_gain_even_if_it_is_a_loss() -> None:
    found = reproduced()
    for row in found["comparison"].values():
        for cell in row.values():
            cell |= {"gain": -abs(cell["gain"]) - 1.0, "p": 0.001}
    found["comparison"]["refit"]["64"]["gain"] = -0.5
    assert "Refitted polynomial: −0.5 points at 64 (p = 0.001)." in reproduce.headline(found)[0]
