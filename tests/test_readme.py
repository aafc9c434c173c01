"""The README's examples run as written, and its numbers are those of committed results."""

from __future__ import annotations

import functools
import re
from statistics import mean
from typing import Any

import pytest

import sharpmax as sm
from sharpmax.policies.polynomial import PAPER
from sharpmax.report import clrs
from sharpmax.report.words import merged
from sharpmax.results import load
from tests.blocks import ROOT, blocks, check_command, commands, run
from tests.smollm2 import load_once

README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXT = " ".join(README.split())
PAGE = blocks(ROOT / "README.md")
BASELINE = "baseline"
"""The name of the baseline in saved results."""


@functools.cache
def evaluated(name: str) -> dict[str, Any]:
    return dict(load(ROOT / "results" / name).tables)


def cells(title: str) -> list[list[str]]:
    """The rows of the table in a section of the README."""
    section = README.split(f"## {title}")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
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


def signed(value: float, unit: str = "") -> str:
    return f"{value:+.1f}{unit}".replace("-", "−")


def test_examples_print_what_the_readme_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(README.splitlines()) <= 150
    load_once(monkeypatch)
    programs = [block for block in PAGE if block.language == "python"]
    assert sum(block.output is not None for block in programs) >= 2
    assert all(block.output or block.reason for block in programs)
    run(programs)
    found = [words for block in PAGE if block.language == "sh" for words in commands(block.text)]
    assert [words[0] for words in found].count("sharpmax") >= 5
    for words in found:
        check_command(words, "the README's commands take minutes")


def test_the_first_screen_is_the_committed_run() -> None:
    tables = evaluated("evaluate-smollm2")
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
    assert policy.to_dict() == tables["setting"]["variants"]["smollm2"]["policy"]
    numbers = sum(len(head["values"]) for layer in policy.to_dict()["policies"] for head in layer)
    assert f"{numbers:,} numbers" in TEXT


RUNS = {
    "smollm2": "evaluate-smollm2", "smollm2-constant": "evaluate-smollm2", "smollm2-rows": "evaluate-smollm2",
    "llama4:1024": "evaluate-smollm2-rules", "log-length:1024": "evaluate-smollm2-rules",
    "yarn:4": "evaluate-smollm2-rules", "paper": "evaluate-smollm2-rules",
    "qwen2.5-coder-0.5b": "evaluate-qwen2.5-coder-0.5b",
}  # fmt: skip
"""Where the numbers of each row of the table of gain and cost come from."""


def rise(name: str, variant: str, text: str = "6144") -> str:
    return signed(evaluated(name)["perplexity"][variant][text]["rise"], "%")


def test_the_table_of_gain_and_cost_is_the_committed_runs() -> None:
    _, *rows = cells("Gain and cost")
    assert [row[0].partition(": ")[0] for row in rows] == list(RUNS)
    novels = {name: f"{run}-controls" for name, run in RUNS.items() if (ROOT / "results" / f"{run}-controls").is_dir()}
    for label, formats, worst, needle, perplexity, folds in rows:
        name = label.partition(": ")[0]
        tables, found = evaluated(RUNS[name]), gains(evaluated(RUNS[name]), "formats", name)
        assert [formats, worst] == [signed(mean(found)), signed(min(found))]
        assert needle == signed(mean(gains(tables, "ruler", name)))
        novel = rise(novels[name], name) if name in novels else "not measured"
        assert perplexity == f"{rise(RUNS[name], name)} / {novel}"
        assert folds == ("no" if name in ("smollm2-rows", "llama4:1024", "log-length:1024", "paper") else "yes")
        assert tables["setting"]["prompts"] == 200


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
    tables = evaluated("evaluate-smollm2")
    pairs = []
    for task in ("formats/directory", "formats/markup"):
        before, after = (mean(means(tables, task, variant)) for variant in (BASELINE, "smollm2"))
        pairs.append(f"{before:.1f}% → {after:.1f}%")
    assert "({}, {})".format(*pairs) in TEXT
    assert "({}, {})".format(*pairs) in card("smollm2")
    ends = [tables["accuracy/formats/csv"]["smollm2"][size]["mean"] for size in ("16", "128")]
    assert "from {:.1f}% at 16 CSV rows to {:.1f}% at 128".format(*ends) in TEXT
    qwen = "qwen2.5-coder-0.5b"
    assert max(means(evaluated(RUNS[qwen]), "formats/mapping", qwen)) <= 1.0  # "nothing on mappings"
    assert mean([one["mean"] for one in evaluated("clrs")["gains"]["clrs-paper"].values()]) < 0.0


def text_of(page: str) -> str:
    """A page of the documentation on one line."""
    return " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())


CARDS = text_of("reference/policy-cards.md")


def card(name: str) -> str:
    return CARDS.split(f"## `{name}`")[1].split(" ## ")[0]


@pytest.mark.parametrize("name", [name for name in RUNS if (ROOT / "results" / f"calibrate-{name}").is_dir()])
def test_a_policy_card_is_the_committed_run(name: str) -> None:
    tables, made, found = evaluated(RUNS[name]), evaluated(f"calibrate-{name}"), card(name)
    gained = gains(tables, "formats", name)
    assert f"{signed(mean(gained))} points on test formats" in found
    assert f"| {signed(mean(gained))} points |" in CARDS
    if min(gained) < 0.0:
        assert re.search(rf"worst cell \(?{signed(min(gained))}", found)
    else:
        assert "no format and size is worse" in found
    assert f"{made['setting']['steps']} steps" in found
    assert made["setting"]["budget"] == 0.01
    assert f"{rise(RUNS[name], name)} on" in found
    if (ROOT / "results" / f"{RUNS[name]}-controls").is_dir():
        assert f"{rise(f'{RUNS[name]}-controls', name)} on a novel" in found
    if "Peak GPU memory" in found:
        assert re.search(rf"Peak GPU memory {made['setting']['memory'] / 1e9:.3g} GB", found)
    if "KL " in found:
        kl = made["candidates"]["frequency"]["kl"].values()
        assert f"KL {min(kl):.4f} to {max(kl):.4f} nats per token" in found
    assert sm.load_policy(name).to_dict() == tables["setting"]["variants"][name]["policy"]


def test_the_rows_of_other_rules_are_the_committed_run() -> None:
    page = CARDS.replace("*", "")
    for name, file in RUNS.items():
        if file.startswith("evaluate-smollm2"):
            gained = gains(evaluated(file), "formats", name)
            shown = page.split(f"| `{name}`: ")[1].split(" | ")[2:5]
            assert shown == [signed(mean(gained)), signed(min(gained)), rise(file, name)]


def test_the_table_of_models_is_the_committed_runs() -> None:
    for name, size in (("smollm2", "16"), ("qwen2.5-coder-0.5b", "512")):
        tables = evaluated(RUNS[name])
        gained = gains(tables, "formats", name)
        before, after = (tables["accuracy/ruler/niah_multikey_2"][one][size]["mean"] for one in (BASELINE, name))
        numbers = f"{signed(mean(gained))} | {signed(min(gained))} | {before:.1f}% → {after:.1f}% at {size} |"
        assert numbers in text_of("results/language.md").replace("**", "")
        assert f"{before:.1f}% → {after:.1f}%" in card(name)
    at_1024 = gains(evaluated("evaluate-qwen2.5-coder-0.5b-1024"), "formats", "qwen2.5-coder-0.5b")
    assert f"{signed(mean(at_1024))} at 1,024" in card("qwen2.5-coder-0.5b")
    for name in ("smollm2", "smollm2-constant", "smollm2-rows"):
        assert signed(mean(gains(evaluated("evaluate-smollm2-controls"), "control", name))) in card(name)


def test_the_numbers_of_seal_are_those_of_its_run() -> None:
    seal, ours, constant = (
        signed(mean(gains(evaluated("evaluate-smollm2-seal"), "formats", name)))
        for name in ("seal", "smollm2", "smollm2-constant")
    )
    assert f"gains {seal} points at 32 items, where `smollm2` gains {ours}" in TEXT
    assert f"SEAL {seal} points, one β per frequency {ours}, one β per head {constant}" in CARDS


def test_the_index_of_results_has_the_numbers_of_the_files() -> None:
    index, reproduce, faq = (text_of(page) for page in ("results/index.md", "results/reproduce.md", "faq.md"))
    paper = {name: row["1024"]["mean"] for name, row in evaluated("reproduce")["accuracy"].items()}
    words = "softmax {softmax:.1f}%, the paper's polynomial {paper:.1f}%, entropy target {target:.1f}%"
    assert words.format(**paper, target=paper["entropy-target"]) in index
    gained = [paper[name] - paper["softmax"] for name in ("paper", "entropy-target")]
    assert "gains {:.1f} points at 1,024 items, an entropy target {:.1f}".format(*gained) in reproduce
    found = [signed(mean(gains(evaluated(RUNS[name]), "formats", name))) for name in RUNS]
    assert f"six test formats: {found[0]} points; Qwen2.5-Coder-0.5B {found[-1]}" in index
    assert f"it hurts: {found[6]} points" in faq
    assert f"{found[5]} and {found[3]} points on the test formats here" in faq
    methods = {name: row["16384"]["mean"] for name, row in evaluated("compare")["accuracy"].items()}
    assert "softmax {softmax:.1f}%, ssmax {ssmax:.1f}%, `sharp` {sharp:.1f}%".format(**methods) in index
    assert evaluated("probe-smollm2")["verdict"][0].startswith("113 (42%) of smollm2's 270 attention heads lose focus")


def test_the_page_of_clrs_is_the_committed_runs() -> None:
    page = text_of("results/clrs.md")
    tables = evaluated("clrs")
    plain, sharp = ([loss for _, loss in one["curve"]] for one in tables["training"].values())
    # A point of the curve stands for 14 steps: seven are about a hundred.
    assert all(sum(sharp[first : first + 7]) > sum(plain[first : first + 7]) for first in range(0, len(plain), 7))
    assert 2.0 <= sharp[-1] / plain[-1] < 2.5
    assert "the mean loss of every hundred steps is higher, at the end twice as high" in page
    speeds = [one["speed"]["tokens_per_second"] for one in tables["training"].values()]
    assert "{:,.0f} tokens/s without a policy and {:,.0f} under `paper`".format(*speeds) in page
    (remark,) = merged(tables["setting"]["remarks"]["clrs-paper"])
    assert f"{remark.partition(' of the rows')[0]} have more" in page
    assert PAPER.acts_on is not None
    assert f"up to an entropy of {PAPER.acts_on[1]:.2f} nats only" in page

    sorts = ("bubble_sort", "heapsort", "quicksort")
    trained = {name: one["trained"] for name, one in tables["setting"]["sizes"].items()}
    assert all(max(trained[name]) == 10 for name in sorts)
    assert 15 in trained["insertion_sort"]
    assert not any(13 in sizes for sizes in trained.values())
    n15, n13, n20 = (
        [f"{mean(by_name[name][size]['mean'] for name in sorts):.1f}%" for by_name in tables["accuracy"].values()]
        for size in ("15", "13", "20")
    )
    assert "right in {} of the answers (no policy) and {} (`paper`)".format(*n15) in page
    assert "no algorithm was trained on, {} and {}; at 20, {} and {}".format(*n13, *n20) in page

    scratch = evaluated("clrs-scratch")
    for group, words in (("in", "{:.1f}% at training sizes"), ("out", "and {:.1f}% at larger ones")):
        frequent = mean(most_frequent(scratch, name, trained=group == "in") for name in scratch["majority"])
        assert words.format(frequent) in page
        assert all(found[group]["mean"] < frequent for found in scratch["means"].values())
    minimum = evaluated("clrs-minimum")
    before, after, scaled = (found["out"]["mean"] for found in minimum["means"].values())
    steps = [one["setting"]["steps"] for one in minimum["training"].values()]
    assert f"{after:.1f}% against {before:.1f}% at larger sizes" in page
    assert f"after {steps[1]:,} steps against {steps[0]:,}" in page
    assert f"loses {before - scaled:.0f} points at larger sizes" in page
    assert not clrs.significant(minimum["gains"]["paper"]["out"])


def most_frequent(tables: Any, name: str, *, trained: bool) -> float:
    """The accuracy of always giving an algorithm's most frequent answer, at its trained or other sizes."""
    sizes = tables["setting"]["sizes"][name]["trained"]
    known = [cell["mean"] for n, cell in tables["majority"][name].items() if (int(n) in sizes) == trained]
    return mean(known) if known else 0.0


def test_the_ablation_in_the_docs_is_the_committed_run() -> None:
    found = evaluated("compare-ablation")
    anywhere = [found["accuracy"]["sharp-anywhere"][size]["mean"] for size in ("1024", "4096", "16384")]
    words = "still reaches {:.1f} / {:.1f} / {:.1f}% at 1,024 / 4,096 / 16,384 items"
    assert words.format(*anywhere) in text_of("results/leaderboard.md")
