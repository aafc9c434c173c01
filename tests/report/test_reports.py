"""Reports of unusual results: no policy, one seed, losses, two runs, nothing learned.

Their text is in tests/golden/reports; SHARPMAX_GOLDEN=update records it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sharpmax.report import clrs
from sharpmax.report.page import report_of, together, write_page
from tests.report.saved import PROVENANCE, compared, evaluated, exam, probed, reproduced, tables
from tests.test_golden import check, text_of


def one_task(*only: str) -> dict[str, Any]:
    """An evaluation of one task with these variants."""
    found = evaluated()
    del found["accuracy/ruler/niah_multikey_2"], found["paired/ruler/niah_multikey_2"]
    for name in ("perplexity", "cost", "accuracy/formats/csv", "paired/formats/csv"):
        found[name] = {key: value for key, value in found[name].items() if key in only}
    found["setting"]["variants"] = {name: found["setting"]["variants"][name] for name in only}
    return found


def evaluate_with_harness_and_remarks() -> dict[str, Any]:
    found = evaluated()
    found["harness"] = {name: {"arc": {"acc": {"mean": 0.25, "sem": 0.01}}} for name in found["setting"]["variants"]}
    remarks = ["3.0% of the rows are flat", "1.5% of the rows are flat"]
    found["setting"]["variants"]["smollm2-constant"]["remarks"] = remarks
    return found


def evaluate_loss(p: float) -> dict[str, Any]:
    found = one_task("baseline", "smollm2-constant")
    for n, test in found["paired/formats/csv"]["smollm2-constant"].items():
        found["accuracy/formats/csv"]["smollm2-constant"][n]["mean"] = 1.0
        test["p"] = p
    return found


def calibrate_over_budget() -> dict[str, Any]:
    """The chosen policy breaks the budget and is worse than none."""
    found = tables("calibrate-smollm2")
    chosen = found["candidates"][found["chosen"]]
    chosen["rise"]["docs/2048"], chosen["kl"]["docs/2048"] = 1.5, 0.02
    chosen["nll"] = found["before"]["nll"] + 0.5
    del found["validation"]
    return found


def calibrate_held_out_domain() -> dict[str, Any]:
    """The domain held out may exceed the budget by its factor."""
    found = tables("calibrate-smollm2")
    found["setting"] |= {"budget": 0.01, "held_out": "code", "held_out_factor": 3.0}
    for about in found["candidates"].values():
        about |= {"rise": {"docs/512": 0.5, "code/512": 1.5}, "kl": {"docs/512": 0.008, "code/512": 0.02}}
    return found


def clrs_one_model(*, tested: bool) -> dict[str, Any]:
    found = exam()
    for name in ("accuracy", "means", "by_algorithm", "speed"):
        found[name] = {"clrs-none": found[name]["clrs-none"]}
    found |= {"gains": {}, "gains_by_algorithm": {}}
    del found["training"]
    about = {"model": "smollm2", "describe": "no policy", "steps": 7, "trained": True}
    found["setting"] |= {"variants": {"clrs-none": about}, "too_long": {"bfs": [64]}}
    found["by_algorithm"]["clrs-none"]["minimum"]["in"]["mean"] = 40.0
    if not tested:
        del found["by_algorithm"]["clrs-none"]["minimum"]["in"]
    return found


def compare_one_seed() -> dict[str, Any]:
    """No intervals; softmax loses to dispersion and to wrong ranking."""
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
    return found


def capacity_without_rule() -> dict[str, Any]:
    found = tables("compare-capacity")
    for model in found["capacity"]["softmax"]:
        model["half_accuracy_size"] = "beyond"
    found["rules"]["softmax"]["accuracy"] |= {"exponents": None, "constant": None, "r2": None, "used": 0, "beyond": 18}
    return found


def pair(*both: Any) -> Any:
    runs = [{"command": "", "provenance": {}, "tables": found} for found in both]
    return together(list(zip("ab", runs, strict=True)))


def probe_pair() -> Any:
    """Two models, with other sizes; no head of the second loses focus."""
    before, after = probed(layers=1), probed(layers=1, policy="paper")
    for about in after["heads/kv"].values():
        about |= {"slope": -1.0, "slope_low": -1.1, "slope_high": -0.9, "kind": "sharp"}
    after["setting"]["sizes"] = {"kv": [8, 16]}
    return pair(before, after)


def probe_head_without_numbers() -> dict[str, Any]:
    found = probed(layers=1)
    first = next(iter(found["heads/kv"].values()))
    first |= {"kind": "unknown", "slope": None, "slope_low": None, "slope_high": None, "curve": {}, "forecast": {}}
    first["horizon"] = {"tokens": None, "low": None, "high": None}
    return found


def reproduce_one_seed_and_loss() -> dict[str, Any]:
    found = reproduced()
    for row in found["comparison"].values():
        for cell in row.values():
            cell |= {"gain": -abs(cell["gain"]) - 1.0, "p": 0.001}
    found["comparison"]["refit"]["64"] |= {"gain": -0.5, "p": None}
    for row in found["accuracy"].values():
        for cell in row.values():
            cell["sem"] = None
    found["setting"]["left_out"]["paper"] = {"refit": "nothing is wrong"}
    return found


UNUSUAL: dict[str, Callable[[], dict[str, Any]]] = {
    "evaluate-harness-remarks": evaluate_with_harness_and_remarks,
    "evaluate-baseline": lambda: one_task("baseline"),
    "evaluate-loss": lambda: evaluate_loss(0.001),
    "evaluate-not-significant": lambda: evaluate_loss(0.4),
    "calibrate-over-budget": calibrate_over_budget,
    "calibrate-held-out-domain": calibrate_held_out_domain,
    "clrs-one-model": lambda: clrs_one_model(tested=True),
    "clrs-not-tested": lambda: clrs_one_model(tested=False),
    "compare-one-seed": compare_one_seed,
    "capacity-without-rule": capacity_without_rule,
    "probe-pair": probe_pair,
    "probe-head-without-numbers": probe_head_without_numbers,
    "reproduce-one-seed-loss": reproduce_one_seed_and_loss,
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_report_of_unusual_results(name: str, tmp_path: Path) -> None:
    found = UNUSUAL[name]()
    page = write_page("", PROVENANCE, found, tmp_path).read_text(encoding="utf-8")
    charts = {figure.name: figure.chart() for figure in report_of(found).figures}
    panels = [f"{one}: {[panel.title for panel in getattr(chart, 'concat', ())]}\n" for one, chart in charts.items()]
    check(f"reports/{name}", text_of(page) + "".join(panels))


def test_a_clrs_gain_counts_only_if_questions_and_algorithms_agree() -> None:
    gain = {"mean": 2.0, "low": 1.0, "high": 3.0, "gained": 9, "lost": 2, "p": 0.001}
    assert clrs.significant(gain)
    for other in ({"mean": -2.0, "low": -3.0, "high": -1.0}, {"p": 0.02}, {"low": -1.0}):
        assert not clrs.significant(gain | other)


def test_probes_without_a_task_in_common_are_rejected() -> None:
    with pytest.raises(ValueError, match="no task is in both of them"):
        report_of(pair(probed(), probed(task="text")))
