"""The README's examples run as written and print what it says they print."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest

from sharpmax.policies.base import policy_from_dict
from sharpmax.policies.polynomial import PAPER
from sharpmax.policies.registry import load_policy
from sharpmax.report.compare import markdown_lines
from sharpmax.report.words import merged
from tests.blocks import ROOT, blocks, check_command, commands, run
from tests.smollm2 import load_once

README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXT = " ".join(README.split())


PAGE = blocks(ROOT / "README.md")


def stored(variant: str) -> str:
    """The name of a variant in saved results."""
    return "as it comes" if variant == "baseline" else variant


def test_examples_print_what_the_readme_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    load_once(monkeypatch)
    programs = [block for block in PAGE if block.language == "python"]
    assert len(programs) >= 2
    assert all(block.output for block in programs)
    run(programs)


def test_the_commands_exist() -> None:
    found = [words for block in PAGE if block.language == "sh" for words in commands(block.text)]
    assert [words[0] for words in found].count("sharpmax") >= 5
    for words in found:
        check_command(words, "the README's commands take minutes")


def test_the_measured_table_is_the_committed_benchmark() -> None:
    bench = json.loads((ROOT / "benchmarks" / "cpu.json").read_text(encoding="utf-8"))["tables"]["bench"]
    rows = re.findall(r"^\| `([\w/-]+)` \| ([\d.]+) \| ([\d.]+)× \|", README, flags=re.MULTILINE)
    assert len(rows) >= 3
    for case, seconds, ratio in rows:
        assert f"{bench[case]['median_s']:.3f}" == seconds
        assert f"{bench[case]['ratio']:.2f}" == ratio


RESULTS = json.loads((ROOT / "results" / "reproduce" / "results.json").read_text(encoding="utf-8"))["tables"]


def test_the_reproduced_table_is_the_committed_run() -> None:
    lines = README.split("## The paper, reproduced")[1].split("\n## ")[0].splitlines()
    sizes, *rows = [
        [cell.replace("`", "").strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")
    ]
    rows = [row for row in rows if not row[0].startswith("---")]
    assert len(rows) >= 10
    for label, *cells in rows:
        name, _, source = label.partition(", ")
        recipe = "/sharp" if "sharp" in source else ""
        for size, cell in zip(sizes[1:], cells, strict=True):
            n = size.replace(",", "")
            value = (
                RESULTS["published"][name][n]
                if source == "published"
                else RESULTS["accuracy" + recipe][name][n]["mean"]
            )
            assert f"{value:.1f}" == cell, (label, size)


def test_the_readme_says_what_the_committed_run_shows() -> None:
    accuracy, published = RESULTS["accuracy"]["softmax"], RESULTS["published"]["softmax"]
    apart = max(abs(accuracy[n]["mean"] - published[n]) for n in published)
    assert f"within {apart:.1f} points of the published one" in TEXT
    assert all(cell["of_ceiling"] >= 99.0 for cell in RESULTS["comparison"]["entropy-target"].values())
    sharp = RESULTS["accuracy/sharp"]
    assert f"keeps {sharp['softmax']['16384']['mean']:.1f}% at 16,384 items" in TEXT
    assert f"and {sharp['refit']['16384']['mean']:.1f}% with the refitted polynomial" in TEXT
    assert f"argmax gives there ({sharp['hard']['16384']['mean']:.1f}%)" in TEXT
    training = max(weights["trained"]["seconds"] for weights in RESULTS["weights"].values())
    evaluation = RESULTS["setting"]["seconds"]["evaluate"]
    assert f"({training:.0f} s of training per recipe, {evaluation:.0f} s of evaluation)" in TEXT
    confidence = RESULTS["detection"]["confidence"]
    assert (
        f"AUROC of {confidence['16']['auroc']:.2f} at 16 items and {confidence['16384']['auroc']:.2f} at 16,384" in TEXT
    )


def cells(start: str, end: str) -> list[list[str]]:
    """The rows of the table between two texts of the README."""
    lines = README.split(start)[1].split(end)[0].splitlines()
    rows = [[cell.replace("`", "").strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    return [row for row in rows if not row[0].startswith("---")]


def evaluated(name: str) -> dict[str, Any]:
    tables = json.loads((ROOT / "results" / name / "results.json").read_text(encoding="utf-8"))["tables"]
    assert isinstance(tables, dict)
    return tables


def test_the_language_models_table_is_the_committed_run() -> None:
    tables = evaluated("evaluate-smollm2")
    (_, *sizes, _, _), *rows = cells("with one of 3.5%:", "- **One constant")
    assert len(rows) == len(tables["setting"]["arms"])
    for variant, *shown in rows:
        arm = stored(variant)
        accuracy, perplexity = tables["accuracy/kv"][arm], tables["perplexity"][arm]
        expected = [f"{accuracy[size]['mean']:.1f}" for size in sizes]
        assert shown == expected + [f"{perplexity[length]['mean']:.2f}" for length in ("2048", "6144")]


def test_the_table_of_other_formats_is_the_committed_run() -> None:
    tables = evaluated("evaluate-smollm2-formats")
    (_, _, *sizes), *rows = cells("are never right.", "- **Not reached yet**")
    assert {task for task, *_ in rows} == set(tables["setting"]["tasks"])
    for task, variant, *shown in rows:
        arm = stored(variant)
        assert shown == [f"{tables[f'accuracy/{task}'][arm][size]['mean']:.1f}" for size in sizes]


def test_what_is_said_of_the_language_model_is_what_the_run_shows() -> None:
    tables = evaluated("evaluate-smollm2")
    arms, right = tables["setting"]["arms"], tables["accuracy/kv"]
    learned = [arm for arm in arms if arm not in ("as it comes", "paper", "log-length:64")]
    tight = [arm for arm in learned if not arm.endswith("-3.5")]
    assert all(tables["perplexity"][arm][n]["rise"] <= 1.0 for arm in tight for n in ("2048", "6144", "chat"))
    longer = [right[arm]["512"]["mean"] for arm in learned if arm not in tight]
    assert f"A larger budget does not help much: {max(longer):.1f}%" in TEXT
    assert f"`constant` answers {right['constant']['512']['mean']:.1f}% at 512 names" in TEXT
    assert f"answers {right['rows-half']['64']['mean']:.1f}% at 64 names" in TEXT
    assert f"touches {arms['rows-half']['touched']} of 270 heads" in TEXT
    assert all(right[arm]["512"]["mean"] < 85.0 for arm in learned if arm != "pairs256")  # "not reached yet"
    for name, arm in (("smollm2-rows", "rows-half"), ("smollm2-constant", "constant")):
        assert load_policy(name) == policy_from_dict(arms[arm]["policy"])


def test_what_is_said_of_other_formats_is_what_the_run_shows() -> None:
    tables = evaluated("evaluate-smollm2-formats")

    def gains(arm: str, sizes: Sequence[str]) -> list[float]:
        tasks = [tables[f"accuracy/{task}"] for task in tables["setting"]["tasks"]]
        return [task[arm][size]["mean"] - task["as it comes"][size]["mean"] for task in tasks for size in sizes]

    assert min(min(gains(arm, ("16", "32", "64", "128"))) for arm in tables["setting"]["arms"]) >= -2.0
    found = gains("rows-half", ("16", "64"))
    assert f"`rows-half` gains {sum(found) / len(found):.1f} points on average" in TEXT
    assert max(cell["mean"] for arm in tables["accuracy/multi-kv"].values() for cell in arm.values()) == 0.0


def test_gain_and_cost_on_three_kinds_of_text_are_the_committed_runs() -> None:
    documentation, novel, speeches = (evaluated(f"evaluate-smollm2{kind}") for kind in ("", "-prose", "-speeches"))
    assert novel["setting"]["text"]["source"] == "moby-dick.txt"
    assert speeches["setting"]["text"]["source"] == "speeches.txt"
    assert novel["accuracy/kv"] == speeches["accuracy/kv"]
    texts = ((documentation, ("2048", "6144")), (novel, ("2048", "8000")), (speeches, ("2048", "8000")))
    _, plain, *rows = cells("Constants folded into the weights cost no time:", "The budget of 1% was kept")
    means = [" / ".join(f"{run['perplexity']['as it comes'][n]['mean']:.2f}" for n in ns) for run, ns in texts]
    assert plain == ["baseline", f"{novel['accuracy/kv']['as it comes']['64']['mean']:.1f}%", *means, "1.00×", "1.00×"]
    # The two policies of the package have names of their own in the run that learned them.
    for row, (name, first) in zip(rows, (("smollm2-constant", "constant"), ("smollm2", "rows-half")), strict=True):
        runs = [(documentation, first), (novel, name), (speeches, name)]
        rises = [
            " / ".join(f"{run['perplexity'][arm][n]['rise']:+.2f}%" for n in lengths).replace("-", "−")
            for (run, arm), (_, lengths) in zip(runs, texts, strict=True)
        ]
        times = [
            f"{min(ratios):.2f}–{max(ratios):.2f}×"
            for key in ("prefill_ratio", "decode_ratio")
            if (ratios := [run["cost"][arm][key] for run, arm in runs])
        ]
        assert row == [name, f"{novel['accuracy/kv'][name]['64']['mean']:.1f}%", *rises, *times]
    assert novel["perplexity"]["smollm2-constant"]["2048"]["rise"] > 1.0  # "on other text it is exceeded"


def test_what_is_said_of_time_on_a_cpu_is_what_the_run_shows() -> None:
    for name, words in (
        ("smollm2", "prefill of 2,048 tokens takes {:.2f}× as long with `smollm2` and decoding {:.2f}×"),
        ("smollm2-constant", "with `smollm2-constant` it is {:.2f}× and {:.2f}×"),
    ):
        cost = evaluated("evaluate-smollm2-cpu")["cost"][name]
        assert words.format(cost["prefill_ratio"], cost["decode_ratio"]) in TEXT


def test_what_is_said_of_the_probe_is_what_the_run_shows() -> None:
    tables, horizon = evaluated("probe-smollm2"), evaluated("horizon-smollm2")
    for sentence in tables["verdict"]:
        assert sentence in TEXT
    steep = sum(head["slope"] > 0.5 for head in tables["heads/kv"].values())
    assert f"{steep} of 270 heads have a slope above 0.5" in TEXT
    tested = tables["forecast/kv"]["tested"]
    assert f"at 512 is forecast to within {tested['512']['entropy']['median']:.2f} nats" in TEXT
    text_tested = tables["forecast/text"]["tested"]
    assert f"from at most 512, to within {text_tested['8192']['entropy']['median']:.2f}" in TEXT
    assert horizon["certified"]["informative"] == 0
    assert (
        f"median spread {horizon['certified']['median']:,.0f} nats against {horizon['measured']['spread']:.0f}" in TEXT
    )


def test_what_is_said_of_the_monitor_is_the_committed_benchmark() -> None:
    found = json.loads((ROOT / "benchmarks" / "monitor.json").read_text(encoding="utf-8"))["tables"]
    shown = {row[0]: row[1:] for row in cells("benchmarks/monitor.json)):", "The monitor is about")}
    for name, words in (("monitor", "the monitor"), ("entropy", "entropy of the next token")):
        expected = [f"{found[f'auroc/{task}'][name]['pooled']['auroc']:.2f}" for task in ("kv", "max", "needle", "all")]
        assert shown[words] == expected
    assert f"are {found['false_alarms']['pooled']['mean']:.2f}% where" in README
    assert f"a generated token {found['overhead']['overhead_percent']:.1f}%\nslower" in README
    cost = json.loads((ROOT / "benchmarks" / "probe.json").read_text(encoding="utf-8"))["tables"]["bench"][
        "capture/last"
    ]
    assert f"{cost['ratio']:.2f}× of the time of a forward pass and {cost['peak_ratio']:.2f}×" in README


def test_what_is_said_of_algorithms_as_text_is_what_the_run_shows() -> None:
    tables = evaluated("clrs")
    known, *rows = cells("right answers in %:", "**No gain here**")
    assert known[0] == "variant"
    assert [row[0] for row in rows] == list(tables["means"])
    for variant, *shown in rows:
        arm = stored(variant)
        groups = [*tables["means"][arm].values(), *tables["by_algorithm"][arm]["minimum"].values()]
        assert shown == [f"{cell['mean']:.1f}" for cell in groups]
    assert f"asked {tables['setting']['questions']['count']:,} questions" in TEXT
    ends = [f"{one['curve'][-1][1]:.3f}" for one in tables["training"].values()]
    assert f"(loss {ends[1]} against {ends[0]} at the end)" in TEXT
    inside, outside = tables["gains"]["clrs-paper"].values()
    assert f"{-inside['mean']:.1f} points behind at sizes trained on and {-outside['mean']:.1f} at larger" in TEXT
    spans = [f"{-one['high']:.1f} to {-one['low']:.1f}" for one in (inside, outside)]
    assert f"(95% intervals {spans[0]} and {spans[1]})" in TEXT
    speeds = [one["speed"] for one in tables["training"].values()]
    minutes = max(speed["tokens"] / speed["tokens_per_second"] / 60 for speed in speeds)
    assert f"(the steps of both variants, at the same time, took an H200 {minutes:.0f} minutes)" in TEXT
    for one in tables["training"].values():
        assert (
            f"({one['setting']['steps']:,} steps of {one['setting']['batch_tokens']:,} tokens in each variant)" in TEXT
        )
        assert one["setting"]["data"]["largest"] == 15


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


def test_the_league_is_the_committed_run() -> None:
    found = evaluated("compare")
    assert "\n".join(markdown_lines(found)) in README
    assert f"**`sharp` holds {found['accuracy']['sharp']['16384']['mean']:.1f}% at 16,384 items**" in README


def test_the_ablation_in_the_docs_is_the_committed_run() -> None:
    found = evaluated("compare-ablation")
    page = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
    assert "\n".join(markdown_lines(found)) in page
    anywhere = [found["accuracy"]["sharp-anywhere"][size]["mean"] for size in ("1024", "4096", "16384")]
    assert "still holds {:.1f} / {:.1f} / {:.1f}% at 1,024 / 4,096 / 16,384 items".format(*anywhere) in page
    assert f"still hold {anywhere[-1]:.1f}%" in README
