"""What pages say where results are unusual: no policy, one seed, losses, two runs, nothing learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sharpmax.report import clrs
from sharpmax.report.page import report_of, together, write_page
from sharpmax.report.tables import Report
from tests.report.saved import compared, evaluated, exam, probed, reproduced, tables


def row_of(report: Report, title: str, name: str) -> list[str]:
    """A row of the table whose title begins so."""
    table = next(table for part in report.parts for table in part.tables if table.title.startswith(title))
    assert {len(row) for row in table.rows} == {len(table.head)}
    return next([f"{cell.text} {cell.small}".strip() for cell in row] for row in table.rows if row[0].text == name)


def one_task(*only: str) -> dict[str, Any]:
    """An evaluation of one task with these variants."""
    found = evaluated()
    del found["accuracy/ruler/niah_multikey_2"], found["paired/ruler/niah_multikey_2"]
    for name in ("perplexity", "cost", "accuracy/formats/csv", "paired/formats/csv"):
        found[name] = {key: value for key, value in found[name].items() if key in only}
    found["setting"]["variants"] = {name: found["setting"]["variants"][name] for name in only}
    return found


def test_evaluate_has_gain_and_cost_of_a_variant_in_one_row() -> None:
    found = evaluated()
    found["harness"] = {name: {"arc": {"acc": {"mean": 0.25, "sem": 0.01}}} for name in found["setting"]["variants"]}
    remarks = ["3.0% of the rows are flat", "1.5% of the rows are flat"]
    found["setting"]["variants"]["smollm2-constant"]["remarks"] = remarks
    report = report_of(found)
    before, after = (found["accuracy/formats/csv"][name].values() for name in ("baseline", "smollm2-constant"))
    means = [sum(cell["mean"] for cell in row) / len(row) for row in (before, after)]
    row = row_of(report, "Variants", "baseline")
    assert row[1] == f"{means[0]:.1f}"
    assert [cell.split()[0] for cell in row[3:]] == ["–", "1.00×", "1.00×", "1.00×", "0"]
    row, cost = row_of(report, "Variants", "smollm2-constant"), found["cost"]["smollm2-constant"]
    assert row[1] == f"{means[1]:.1f} {means[1] - means[0]:+.1f}; 4 better"
    assert row[3:5] == ["+0.52% 6,144 tokens of text", f"{cost['prefill_ratio']:.2f}× {cost['prefill_ms']:,.1f}"]
    one, plain = (found["accuracy/formats/csv"][name]["16"] for name in ("smollm2-constant", "baseline"))
    small = f"{one['low']:.1f}–{one['high']:.1f}, {one['mean'] - plain['mean']:+.1f}"
    assert f"{one['mean']:.1f} {small}" in row_of(report, "Accuracy (%): formats/csv", "smollm2-constant")
    assert row_of(report, "EleutherAI", "smollm2-constant") == ["smollm2-constant", "0.25 ± 0.01"]
    assert report.notes == ["smollm2-constant: 1.5 to 3.0% of the rows are flat."]


def test_evaluate_without_a_policy_gives_the_baseline_by_size() -> None:
    report = report_of(one_task("baseline"))
    assert report.headline[0].startswith("Accuracy (formats/csv) at n = 16 → 128: 59.0% → ")
    assert len(report.figures[0].chart().concat) == 1


@pytest.mark.parametrize(("p", "doubt"), [(0.001, ""), (0.4, ", not significant")])
def test_evaluate_reports_losses_and_what_is_not_significant(p: float, doubt: str) -> None:
    found = one_task("baseline", "smollm2-constant")
    for n, test in found["paired/formats/csv"]["smollm2-constant"].items():
        found["accuracy/formats/csv"]["smollm2-constant"][n]["mean"] = 1.0
        test["p"] = p
    report = report_of(found)
    headline = f"Mean accuracy over 1 task and all sizes{doubt}: 30.6% → 1.0%. Largest change of perplexity: +0.52%."
    assert report.headline[0].startswith(headline)
    assert report.parts[0].metrics[0].detail.endswith(f"better in 0 tasks and sizes, worse in {0 if doubt else 4}")


def test_calibrate_names_a_broken_budget_and_a_useless_policy() -> None:
    found = tables("calibrate-smollm2")
    chosen = found["candidates"][found["chosen"]]
    chosen["rise"]["docs/2048"], chosen["kl"]["docs/2048"] = 1.5, 0.02
    chosen["nll"] = found["before"]["nll"] + 0.5
    del found["validation"]
    report = report_of(found)
    assert report.headline[0].startswith("Validation accuracy (training,control): 56.0%.")
    assert "Largest change of perplexity: +1.50%, over the budget of 0.01 nats per token." in report.headline[0]
    assert "do not use it" in report.notes[0]
    assert "+0.0200 +1.50%; over budget" in row_of(report, "Policies", found["chosen"])


def test_calibrate_allows_more_on_the_domain_held_out() -> None:
    found = tables("calibrate-smollm2")
    found["setting"] |= {"budget": 0.01, "held_out": "code", "held_out_factor": 3.0}
    for about in found["candidates"].values():
        about |= {"rise": {"docs/512": 0.5, "code/512": 1.5}, "kl": {"docs/512": 0.008, "code/512": 0.02}}
    report = report_of(found)
    assert "Largest change of perplexity: +1.50%." in report.headline[0]
    assert report.parts[0].metrics[1].detail.endswith("within the budget of 0.01 nats per token")
    assert row_of(report, "Policies", found["chosen"])[2:4] == ["+0.0080 +0.50%", "+0.0200 +1.50%"]


def test_clrs_of_one_model_says_what_it_did_not_learn_and_has_no_gains(tmp_path: Path) -> None:
    found = exam()
    for name in ("accuracy", "means", "by_algorithm", "speed"):
        found[name] = {"clrs-none": found[name]["clrs-none"]}
    found |= {"gains": {}, "gains_by_algorithm": {}}
    del found["training"]
    about = {"model": "smollm2", "describe": "no policy", "steps": 7, "trained": True}
    found["setting"] |= {"variants": {"clrs-none": about}, "too_long": {"bfs": [64]}}
    found["by_algorithm"]["clrs-none"]["minimum"]["in"]["mean"] = 40.0
    report, mean = report_of(found), found["means"]["clrs-none"]["out"]
    assert report.headline[0].startswith(f"Accuracy at larger sizes: {mean['mean']:.1f}%. Accuracy at training sizes: ")
    assert row_of(report, "Accuracy of final answers", "clrs-none")[2].endswith(f"{mean['low']:.1f}–{mean['high']:.1f}")
    assert "gain" not in [cell.text for cell in report.parts[0].tables[0].head]
    for words in ("not learned by clrs-none", "bfs of size 64", "do not include the variance between seeds"):
        assert words in " ".join(report.notes)
    assert report.definitions[0][1] == [("clrs-none", "smollm2, no policy; 7 training steps")]
    del found["by_algorithm"]["clrs-none"]["minimum"]["in"]
    assert "1 variant answered" in write_page("", {}, found, tmp_path).read_text(encoding="utf-8")
    assert report_of(found).notes[0].startswith("Not known whether “minimum”")


def test_a_clrs_gain_counts_only_if_questions_and_algorithms_agree() -> None:
    gain = {"mean": 2.0, "low": 1.0, "high": 3.0, "gained": 9, "lost": 2, "p": 0.001}
    assert clrs.significant(gain)
    for other in ({"mean": -2.0, "low": -3.0, "high": -1.0}, {"p": 0.02}, {"low": -1.0}):
        assert not clrs.significant(gain | other)


def test_compare_with_one_seed_has_no_intervals_and_separates_dispersion_from_wrong_ranking() -> None:
    found = compared()
    found["setting"]["seeds"] = [0]
    found["training"]["softmax"]["diverged"] = [0]
    for name in ("accuracy", "hard"):
        for row in found[name].values():
            for cell in row.values():
                cell |= {"low": None, "high": None, "sem": None, "n": 1}
    size = str(found["setting"]["sizes"][-1])
    found["accuracy"]["softmax"][size]["mean"], found["hard"]["softmax"][size]["mean"] = 25.0, 40.0
    found["hard"]["sharp"][size]["mean"] = None
    report = report_of(found)
    assert report.parts[0].metrics[0].detail.startswith("95%: one seed")
    assert report.notes[0].startswith("One seed: there are no intervals")
    assert report.headline[0].endswith("Softmax loses: 15.0 points to dispersion, 60.0 to wrong ranking.")
    row = row_of(report, "Accuracy", "softmax")
    assert (row[0], row[8:10]) == ("softmax 1 diverged", ["15.0", "60.0"])
    assert row_of(report, "Accuracy", "sharp")[8:10] == ["–", "–"]


def test_capacity_without_a_rule() -> None:
    found = tables("compare-capacity")
    for model in found["capacity"]["softmax"]:
        model["half_accuracy_size"] = "beyond"
    found["rules"]["softmax"]["accuracy"] |= {"exponents": None, "constant": None, "r2": None, "used": 0, "beyond": 18}
    report = report_of(found)
    assert report.headline[0].startswith("Items at which accuracy halves (softmax, 0 of 18 models): –.")
    assert "exponents tend to be too small" in " ".join(report.notes)
    assert len(report.figures[0].chart().concat) == 3


def pair(*both: Any) -> Any:
    runs = [{"command": "", "provenance": {}, "tables": found} for found in both]
    return together(list(zip("ab", runs, strict=True)))


def test_probes_of_two_models_are_on_one_page() -> None:
    before, after = probed(layers=1), probed(layers=1, policy="paper")
    for about in after["heads/kv"].values():
        about |= {"slope": -1.0, "slope_low": -1.1, "slope_high": -0.9, "kind": "sharp"}
    after["setting"]["sizes"] = {"kv": [8, 16]}
    report = report_of(pair(before, after))
    assert report.headline[0].startswith("Heads that lose focus on kv: 7 of 9 (77.8%) → 0 of 9 (0.0%).")
    labels = ["A: smollm2 (a)", "B: smollm2 with paper (b)"]
    assert [row[0].text for row in report.parts[0].tables[0].rows] == labels
    assert [panel.title for panel in report.figures[0].chart().concat] == labels
    assert report.notes[0].startswith("Kv: measured differently")
    assert [title for title, _ in report.origins] == labels
    with pytest.raises(ValueError, match="no task is in both of them"):
        report_of(pair(probed(), probed(task="text")))


def test_heads_without_numbers_are_not_counted() -> None:
    found = probed(layers=1)
    first = next(iter(found["heads/kv"].values()))
    first |= {"kind": "unknown", "slope": None, "slope_low": None, "slope_high": None, "curve": {}, "forecast": {}}
    first["horizon"] = {"tokens": None, "low": None, "high": None}
    report = report_of(found)
    assert " of 8 " in report.headline[0]
    for figure in report.figures:
        figure.chart()


def test_reproduce_with_one_seed_and_a_loss() -> None:
    found = reproduced()
    for row in found["comparison"].values():
        for cell in row.values():
            cell |= {"gain": -abs(cell["gain"]) - 1.0, "p": 0.001}
    found["comparison"]["refit"]["64"] |= {"gain": -0.5, "p": None}
    for row in found["accuracy"].values():
        for cell in row.values():
            cell["sem"] = None
    found["setting"]["left_out"]["paper"] = {"refit": "nothing is wrong"}
    report = report_of(found)
    assert "Refitted polynomial at 64 items: −0.5 points (no test)." in report.headline[0]
    assert "±" not in "".join(cell.small for row in report.parts[0].tables[0].rows for cell in row)
    assert f"{found['published']['softmax']['1024']:.1f}" in row_of(report, "Accuracy", "softmax, published")
    assert report.notes == ["Left out of the paper's recipe: refit, because nothing is wrong."]
    assert [figure.name for figure in report.figures] == ["accuracy", "heat", "fit"]
