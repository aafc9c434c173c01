"""The summary says what the tables show, and nothing else."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

import sharpmax
from sharpmax.errors import FileFormatError
from sharpmax.report.sections.reproduce import detected, fixed, meant, measured, tiles
from sharpmax.report.sections.reproduce_tables import change, headline, look, verdict
from sharpmax.report.sections.reproduce_tables import grids as grids_of
from sharpmax.results import load
from tests.report.reproduce_tables import SIZES, make_tables, one_seed

BOTH = make_tables()
PAPER = make_tables(("paper",))


def with_gains(gain: float, p: float | None, arms: tuple[str, ...] = ("entropy-target", "paper")) -> dict[str, Any]:
    """Tables in which these arms gain the same at every size."""
    tables = copy.deepcopy(PAPER)
    cell = {"gain": gain, "p": p, "of_ceiling": 97.0}
    tables["comparison"] = {arm: {str(n): dict(cell) for n in SIZES} for arm in arms}
    return tables


def everything(tables: Any) -> list[str]:
    return [*measured(tables), *meant(tables), *fixed(tables), *detected(tables)]


def test_the_whole_summary() -> None:
    said = everything(BOTH)
    for sentence in said:
        assert sentence[0].isupper()
        assert sentence.endswith(".")
        assert "  " not in sentence
    text = " ".join(said)
    assert "sets of 5 to 16 items" in text
    assert "means over 10 seeds" in text
    assert "falls from 98.9% at 16 items to 13.5% at 16,384" in text
    assert "at 1,024 items from 49.9% to 65.2% (+15.3 points, p < 0.001)" in text
    assert "better than plain softmax at 10 of 11 sizes and worse at none" in text
    assert "exceeds on average at about 854 items" in text
    assert "within 3.9 points" in text
    assert "80.2% of the sets with the sharp recipe and in 33.8% with the paper's" in text


def test_one_recipe_is_not_named_again_and_again() -> None:
    assert "recipe" not in " ".join(everything(PAPER))
    assert "recipe" not in " ".join(everything(make_tables(("sharp",))))
    assert "published" not in " ".join(everything(make_tables(("sharp",))))


def test_a_single_seed_has_no_p_values() -> None:
    text = " ".join(everything(one_seed(PAPER)))
    assert "p <" not in text
    assert "p =" not in text
    assert "t-test" not in text
    assert "a single seed" in text
    assert "One seed cannot tell such a gain from chance." in text
    worse = with_gains(-1.0, None)
    assert "nowhere right more often than plain softmax" in fixed(worse)[0]


def test_no_gain_is_no_gain() -> None:
    nothing = fixed(with_gains(0.3, 0.4))
    assert "makes no difference that this run can show" in nothing[0]
    assert "none shown with the paper's polynomial" in " ".join(nothing)
    same = fixed(with_gains(0.0, None))
    assert "exactly as often as plain softmax" in same[0]


def test_a_loss_is_a_loss() -> None:
    said = fixed(with_gains(-2.0, 0.001))
    assert said[0].startswith("The entropy target costs accuracy: it is better than plain softmax at none of 11 sizes")
    assert "−2.0 points" in said[0]
    assert not any("raises" in sentence for sentence in said)
    assert tiles(with_gains(-2.0, 0.001), "paper")[1].label == "largest loss of the entropy target"


def test_gains_and_losses_together() -> None:
    tables = with_gains(2.0, 0.001)
    tables["comparison"]["entropy-target"]["16"] |= {"gain": -3.0, "p": 0.002}
    said = " ".join(fixed(tables))
    assert "at 10 of 11 sizes and worse at 1, most at 16 items (−3.0 points)" in said


def test_without_the_entropy_target_the_best_arm_speaks() -> None:
    tables = copy.deepcopy(PAPER)
    del tables["comparison"]["entropy-target"]
    found = headline(tables, "paper")
    assert found is not None
    assert found.arm == "log-length"
    assert fixed(tables)[0].startswith("The log-length law raises accuracy")
    tables["comparison"] = {"hard": tables["comparison"]["hard"]}
    assert headline(tables, "paper") is None


def test_the_share_of_hard_argmax() -> None:
    assert any("at least 97.0% of what the same model reaches" in said for said in fixed(with_gains(1.0, 0.01)))
    assert any("as much as the same model reaches" in said for said in fixed(PAPER))


def test_hard_argmax_is_called_no_ceiling() -> None:
    """The refitted polynomial passes it in the committed results, so no text may call it a limit."""
    root = Path(sharpmax.__file__).parents[2]
    tables = load(root / "results" / "reproduce" / "results.json").tables
    accuracy = tables["accuracy/sharp"]
    assert accuracy["refit"]["16384"]["mean"] > accuracy["hard"]["16384"]["mean"]
    grids = [f"{grid.title} {grid.note}" for recipe in ("paper", "sharp") for grid in grids_of(tables, recipe)]
    arms = [look(arm).about for arm in accuracy]
    pages = [root / "README.md", *(root / "docs").rglob("*.md"), root / "examples" / "reproduce.ipynb"]
    for text in [*everything(tables), *grids, *arms, *(page.read_text(encoding="utf-8") for page in pages)]:
        claims = r"(?<!entropy_)ceiling|no temperature (can|mends)|sharpening (alone can|cannot)"
        assert not re.search(claims, text, re.IGNORECASE), text[:200]


def test_missing_tables_are_passed_over() -> None:
    for name in list(PAPER):
        rest = {key: table for key, table in PAPER.items() if key != name}
        assert everything(rest)
    assert everything({}) == []
    assert tiles({}, "paper") == []
    only = {"accuracy": PAPER["accuracy"]}
    assert everything(only) == ["The accuracy of plain softmax falls from 98.9% at 16 items to 13.5% at 16,384."]


def test_one_size_alone_shows_no_change() -> None:
    tables = copy.deepcopy(PAPER)
    for name in ("accuracy", "top_weight", "entropy"):
        tables[name] = {arm: {"64": cells["64"]} for arm, cells in tables[name].items()}
    assert change(tables["accuracy"]["softmax"]) is None
    assert not any("falls" in sentence for sentence in everything(tables))


def test_focus_that_is_kept() -> None:
    tables = copy.deepcopy(PAPER)
    for cells in (tables["top_weight"]["softmax"], tables["accuracy"]["softmax"]):
        for cell in cells.values():
            cell |= {"mean": 97.0, "sem": 0.4}
    text = " ".join(meant(tables))
    assert "does not lose focus at these sizes" in text
    assert "hardly changes" in text


def test_the_polynomial_may_act_everywhere() -> None:
    tables = copy.deepcopy(PAPER)
    for cell in tables["entropy"]["softmax"].values():
        cell["mean"] = 2.0
    assert any("does not exceed on average at any size" in sentence for sentence in fixed(tables))
    assert tiles(tables, "paper")[3].value == "AUROC 0.92"
    for cell in tables["entropy"]["softmax"].values():
        cell["mean"] = 8.0
    assert any("exceeds on average from 16 items on" in sentence for sentence in fixed(tables))


def test_training_that_makes_no_difference() -> None:
    tables = copy.deepcopy(BOTH)
    tables["accuracy/sharp"] = tables["accuracy"]
    assert any("makes no clear difference" in sentence for sentence in meant(tables))


def test_detection() -> None:
    said = detected(PAPER)
    assert "0.90 by the classifier's confidence, 0.84 by the entropy of attention and 0.92 by both together" in said[0]
    assert said[1].startswith("Within one size confidence says less the larger the sets are")
    assert said[2].startswith("Entropy adds to confidence")
    overlapping = copy.deepcopy(PAPER)
    overlapping["detection"]["both"]["pooled"]["low"] = 0.88
    assert "does not show that entropy adds" in detected(overlapping)[2]
    chance = copy.deepcopy(PAPER)
    chance["detection"]["entropy"]["pooled"] |= {"auroc": 0.51, "low": 0.46}
    assert detected(chance)[2] == "The entropy of attention: not shown to be better than chance."
    never = copy.deepcopy(PAPER)
    for cells in never["detection"].values():
        cells["pooled"] |= {"auroc": None, "low": None, "high": None}
    assert detected(never) == ["Plain softmax gave no wrong answer that could be told from right ones."]


def test_tiles() -> None:
    found = tiles(PAPER, "paper")
    assert [tile.value for tile in found] == ["98.9% → 13.5%", "+15.3 points", "2,981 items", "≈ 854 items"]
    assert found[1].detail == "at 1,024 items (p < 0.001)"
    assert tiles(one_seed(PAPER), "paper")[1].detail == "at 1,024 items (a single seed, no test)"
    assert "not shown to differ from zero" in tiles(with_gains(0.3, 0.4), "paper")[1].detail


def test_a_horizon_far_away_is_no_limit() -> None:
    tables = copy.deepcopy(PAPER)
    tables["bounds"] |= {
        "spread": {"mean": 232.6, "sem": 2.0, "n": 10},
        "horizon_log10": {"mean": 100.98, "sem": 1.0, "n": 10},
        "limit_weight": {"16384": 2.34},
    }
    text = " ".join(meant(tables))
    assert "Theory's worst case is not reached: the logits of a row differ by up to 233 nats" in text
    assert "among up to 10¹⁰⁰ items" in text
    assert "theory expects the heaviest of 16,384 to hold 2.3% of the weight; measured: 0.016%." in text
    assert tiles(tables, "paper")[2].label == "weight of the heaviest item, plain softmax"


def test_verdicts() -> None:
    assert verdict(PAPER, "paper", "nobody") is None
    found = verdict(PAPER, "paper", "entropy-target")
    assert found is not None
    assert (found.best, found.worst) == ("1024", "16")
    assert found.tested


@pytest.mark.parametrize("table", ["setting", "accuracy", "comparison", "bounds", "detection"])
def test_damaged_tables(table: str) -> None:
    for damage in ({"recipes": {"paper": 3}, "softmax": 7, "sizes": ["x"], "train_sizes": [1]}, ["nothing"]):
        with pytest.raises(FileFormatError, match=r"^results: the tables of the summary are damaged \(.*again$"):
            everything({**PAPER, table: damage})
