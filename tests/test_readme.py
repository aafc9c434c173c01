"""The README's examples run as written, and its numbers are those of committed results."""

from __future__ import annotations

import json
from typing import Any

import pytest

import sharpmax as sm
from sharpmax.policies.polynomial import PAPER
from sharpmax.report.words import merged
from tests.blocks import ROOT, blocks, check_command, commands, run
from tests.smollm2 import load_once

README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXT = " ".join(README.split())
PAGE = blocks(ROOT / "README.md")
BASELINE = "as it comes"
"""The name of the baseline in saved results."""


def evaluated(name: str) -> dict[str, Any]:
    tables = json.loads((ROOT / "results" / name / "results.json").read_text(encoding="utf-8"))["tables"]
    assert isinstance(tables, dict)
    return tables


def section(title: str) -> str:
    return README.split(f"## {title}")[1].split("\n## ")[0]


def cells(title: str) -> list[list[str]]:
    """The rows of the table in a section of the README."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    rows = [[cell.replace("`", "").replace("*", "").strip() for cell in line.split("|")[1:-1]] for line in lines]
    return [row for row in rows if not row[0].startswith("---")]


def means(tables: dict[str, Any], task: str, variant: str) -> list[float]:
    return [cell["mean"] for cell in tables[f"accuracy/{task}"][variant].values()]


def gains(tables: dict[str, Any], group: str, variant: str) -> list[float]:
    """The gain over the baseline of every format and size of a group."""
    tasks = [task for task in tables["setting"]["tasks"] if task.startswith(f"{group}/")]
    return [
        after - before
        for task in tasks
        for after, before in zip(means(tables, task, variant), means(tables, task, BASELINE), strict=True)
    ]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def signed(value: float, unit: str = "") -> str:
    return f"{value:+.1f}{unit}".replace("-", "−")


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_examples_print_what_the_readme_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    load_once(monkeypatch)
    programs = [block for block in PAGE if block.language == "python"]
    assert sum(block.output is not None for block in programs) >= 2
    assert all(block.output or block.reason for block in programs)
    run(programs)


def test_the_commands_exist() -> None:
    found = [words for block in PAGE if block.language == "sh" for words in commands(block.text)]
    assert [words[0] for words in found].count("sharpmax") >= 5
    for words in found:
        check_command(words, "the README's commands take minutes")


def test_the_first_screen_is_the_committed_run() -> None:
    tables = evaluated("evaluate-smollm2-frequency")
    for words, task, size in (
        ("CSV lookup among 64 rows:", "formats/csv", "64"),
        ("Log lines:", "formats/log", "64"),
        ("RULER's multi-key needle, 16 needles:", "ruler/niah_multikey_2", "16"),
    ):
        before, after = (tables[f"accuracy/{task}"][variant][size]["mean"] for variant in (BASELINE, "smollm2"))
        assert f"{words} {before:.1f}% → {after:.1f}%" in TEXT
    found = gains(tables, "formats", "smollm2")
    assert len(found) == 6 * 4
    assert min(found) >= 0.0  # "no format and size got worse"
    assert f"**{signed(mean(found))} points** on average over six test formats and four sizes" in TEXT
    policy = sm.load_policy("smollm2")
    assert policy.to_dict() == tables["setting"]["arms"]["smollm2"]["policy"]
    numbers = sum(len(head["values"]) for layer in policy.to_dict()["policies"] for head in layer)
    assert f"{numbers:,} numbers" in TEXT


def test_the_table_of_gain_and_cost_is_the_committed_runs() -> None:
    frequency, rules = evaluated("evaluate-smollm2-frequency"), evaluated("evaluate-smollm2-rules")
    documentation, novel = (evaluated(f"evaluate-smollm2{kind}")["perplexity"] for kind in ("", "-prose"))
    # Earlier runs know two of the policies by other names.
    texts = {
        "smollm2": (evaluated("evaluate-smollm2-text")["perplexity"]["smollm2"], None),
        "smollm2-constant": (documentation["constant"], novel["smollm2-constant"]),
        "smollm2-rows": (documentation["rows-half"], novel["smollm2"]),
        "paper": (documentation["paper"], None),
    }
    _, *rows = cells("Gain and cost")
    assert [row[0].partition(": ")[0] for row in rows] == [
        "smollm2", "smollm2-constant", "smollm2-rows", "llama4:1024", "yarn:4", "paper",
    ]  # fmt: skip
    for label, formats, controls, perplexity, prefill, decode, folded in rows:
        name = label.partition(": ")[0]
        tables = frequency if name == "smollm2" else rules
        assert formats == signed(mean(gains(tables, "formats", name)))
        assert controls == ("not measured" if tables is frequency else signed(mean(gains(tables, "control", name))))
        rises = [signed(text["2048"]["rise"], "%") if text else "not measured" for text in texts.get(name, ())]
        assert perplexity == (" / ".join(rises) or "not measured")
        cost = tables["cost"][name]
        assert [prefill, decode] == [f"{cost[key]:.2f}×" for key in ("prefill_ratio", "decode_ratio")]
        assert folded == ("free" if name in ("smollm2", "smollm2-constant", "yarn:4") else "no")


def test_the_reproduced_table_is_the_committed_run() -> None:
    found = evaluated("reproduce")
    (_, *sizes), *rows = cells("The paper, reproduced")
    assert len(rows) >= 4
    for label, *shown in rows:
        name, _, source = label.partition(", ")
        for size, cell in zip([size.replace(",", "") for size in sizes], shown, strict=True):
            value = found["published"][name][size] if source else found["accuracy"][name][size]["mean"]
            assert f"{value:.1f}" == cell, (label, size)


def test_the_limits_are_the_committed_runs() -> None:
    tables = evaluated("evaluate-smollm2-frequency")
    pairs = []
    for task in ("formats/directory", "formats/markup"):
        before, after = (mean(means(tables, task, variant)) for variant in (BASELINE, "smollm2"))
        pairs.append(f"{before:.1f}% → {after:.1f}%")
    assert f"{pairs[0]} and {pairs[1]}" in TEXT
    assert mean([one["mean"] for one in evaluated("clrs")["gains"]["clrs-paper"].values()]) < 0.0


def test_the_policy_cards_are_the_committed_runs() -> None:
    page = (ROOT / "docs" / "reference" / "policy-cards.md").read_text(encoding="utf-8")
    rules = evaluated("evaluate-smollm2-rules")
    for name in ("smollm2-constant", "smollm2-rows"):
        both = [signed(mean(gains(rules, group, name))) for group in ("formats", "control")]
        assert "{} points on test formats, {} on controls".format(*both) in page
    assert f"worst cell {signed(min(gains(rules, 'formats', 'smollm2-constant')))} points" in page
    early = evaluated("evaluate-smollm2")
    assert f"{early['accuracy/kv']['rows-half']['64']['mean']:.1f}% on key–value lists of 64 names" in page
    assert f"modifies {early['setting']['arms']['rows-half']['touched']} of 270 heads" in page


def test_the_index_of_results_has_the_numbers_of_the_files() -> None:
    index, reproduce = (
        (ROOT / "docs" / "results" / name).read_text(encoding="utf-8") for name in ("index.md", "reproduce.md")
    )
    paper = {name: row["1024"]["mean"] for name, row in evaluated("reproduce")["accuracy"].items()}
    words = "softmax {softmax:.1f}%, the paper's polynomial {paper:.1f}%, entropy target {target:.1f}%"
    assert words.format(**paper, target=paper["entropy-target"]) in index
    gained = [paper[name] - paper["softmax"] for name in ("paper", "entropy-target")]
    assert "gains {:.1f} points at 1,024 items, an entropy target {:.1f}".format(*gained) in reproduce
    methods = {name: row["16384"]["mean"] for name, row in evaluated("compare")["accuracy"].items()}
    assert "softmax {softmax:.1f}%, ssmax {ssmax:.1f}%, `sharp` {sharp:.1f}%".format(**methods) in index
    assert evaluated("probe-smollm2")["verdict"][0].startswith("113 (42%) of smollm2's 270 attention heads lose focus")


CLRS_PAGE = " ".join((ROOT / "docs" / "results" / "clrs.md").read_text(encoding="utf-8").split())


def test_what_the_docs_say_of_losses_is_what_the_run_shows() -> None:
    plain, sharp = ([loss for _, loss in one["curve"]] for one in evaluated("clrs")["training"].values())
    # A point of the curve stands for 14 steps, so that seven are about a hundred.
    for first in range(0, len(plain), 7):
        assert sum(sharp[first : first + 7]) > sum(plain[first : first + 7])
    assert 2.0 <= sharp[-1] / plain[-1] < 2.5
    assert "the mean loss of every hundred steps is higher, at the end twice as high" in CLRS_PAGE


def test_what_the_docs_say_of_rows_out_of_reach_is_what_the_run_shows() -> None:
    (remark,) = merged(evaluated("clrs")["setting"]["remarks"]["clrs-paper"])
    assert f"{remark.partition(' of the rows')[0]} have more" in CLRS_PAGE
    assert PAPER.acts_on is not None
    assert f"up to an entropy of {PAPER.acts_on[1]:.2f} nats only" in CLRS_PAGE


def test_what_the_docs_say_of_sorting_is_what_the_run_shows() -> None:
    tables = evaluated("clrs")
    sorts, arms = ("bubble_sort", "heapsort", "quicksort"), ("clrs-none", "clrs-paper")

    def right(size: str) -> list[str]:
        means = [[tables["accuracy"][arm][name][size]["mean"] for name in sorts] for arm in arms]
        return [f"{sum(values) / len(values):.1f}%" for values in means]

    trained = {name: one["trained"] for name, one in tables["setting"]["sizes"].items()}
    assert all(max(trained[name]) == 10 for name in sorts)
    assert 15 in trained["insertion_sort"]
    assert not any(13 in sizes for sizes in trained.values())
    assert "right in {} of the answers (no policy) and {} (`paper`)".format(*right("15")) in CLRS_PAGE
    assert "nobody had taught, in {} and {}; and of 20, in {} and {}".format(*right("13"), *right("20")) in CLRS_PAGE


def test_what_the_docs_say_of_speed_is_what_the_run_shows() -> None:
    plain, sharp = (one["speed"]["tokens_per_second"] for one in evaluated("clrs")["training"].values())
    assert f"{plain:,.0f} tokens/s without a policy and {sharp:,.0f} under `paper`" in CLRS_PAGE


def test_the_ablation_in_the_docs_is_the_committed_run() -> None:
    found = evaluated("compare-ablation")
    page = (ROOT / "docs" / "results" / "leaderboard.md").read_text(encoding="utf-8")
    anywhere = [found["accuracy"]["sharp-anywhere"][size]["mean"] for size in ("1024", "4096", "16384")]
    assert "still reaches {:.1f} / {:.1f} / {:.1f}% at 1,024 / 4,096 / 16,384 items".format(*anywhere) in page
