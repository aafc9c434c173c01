"""The page of `sharpmax evaluate`: accuracy, perplexity and cost of a model with and without policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from sharpmax.report import charts
from sharpmax.report.tables import (
    EMPTY,
    Cell,
    Figure,
    Metric,
    Part,
    Report,
    Table,
    Tables,
    cells,
    check_name,
    named,
    present,
    sizes,
)  # fmt: skip
from sharpmax.report.words import (
    baseline,
    capital,
    count,
    joined,
    merged,
    milliseconds,
    percent,
    plural,
    points,
    probability,
    share,
    text_name,
    texts_in_order,
)  # fmt: skip

LEVEL = 0.01
"""A difference is significant when its p value is below this: there are many sizes and tasks."""


def matches(tables: Tables) -> bool:
    """Whether these are tables of `sharpmax evaluate`."""
    return any(name.startswith("paired/") for name in tables)


def report(tables: Tables) -> Report:
    """The page's contents."""
    tasks = [check_name(task, "task") for task in named(tables, "accuracy")]
    main = [*present(summary_table(tables)), *(accuracy_table(tables, task) for task in tasks)]
    details = present(perplexity_table(tables), cost_table(tables), harness_table(tables))
    if policies(tables):
        details += [paired_table(tables, task) for task in tasks]
    part = Part("results", str(tables["setting"]["model"]), metrics(tables), _figures(tables, tasks), main, details)
    return Report("evaluate", headline(tables), [part], notes(tables), _method(tables), _definitions(tables))


def variants(tables: Tables) -> Mapping[str, Any]:
    """What the run says of its variants, the baseline first."""
    found: Mapping[str, Any] = tables["setting"]["arms"]
    return found


def base(tables: Tables) -> str:
    """The variant without a policy."""
    return next(name for name, about in variants(tables).items() if about["policy"] is None)


def policies(tables: Tables) -> list[str]:
    """The variants with a policy."""
    return [name for name, about in variants(tables).items() if about["policy"] is not None]


def home(tables: Tables, variant: str) -> str:
    """The task that a policy was calibrated on if it was run, else the first task."""
    tasks = named(tables, "accuracy")
    task = variants(tables)[variant].get("calibrated_on")
    return task if task in tasks else tasks[0]


@dataclass(frozen=True)
class Gain:
    """What a policy changes in one task: points by size, and the sizes at which the change is significant."""

    points: Mapping[str, float]
    better: tuple[str, ...]
    worse: tuple[str, ...]

    @property
    def mean(self) -> float:
        """Mean change over the sizes."""
        return sum(self.points.values()) / len(self.points)

    @property
    def shown(self) -> str:
        """The size to report: the largest gain, or the largest loss where only losses are significant."""
        pick = min if self.worse and not self.better else max
        return pick(self.points, key=self.points.__getitem__)


def gain(tables: Tables, task: str, variant: str) -> Gain:
    """What a policy changes in a task."""
    before, after = (tables[f"accuracy/{task}"][name] for name in (base(tables), variant))
    apart = {n: after[n]["mean"] - before[n]["mean"] for n in sizes(after)}
    significant = [n for n in apart if tables[f"paired/{task}"][variant][n]["p"] < LEVEL]
    return Gain(
        apart, tuple(n for n in significant if apart[n] > 0), tuple(n for n in significant if apart[n] < 0)
    )  # fmt: skip


def best(tables: Tables) -> str | None:
    """The policy with the largest mean gain over all tasks."""
    tasks = named(tables, "accuracy")
    return max(policies(tables), key=lambda one: sum(gain(tables, task, one).mean for task in tasks), default=None)


def headline(tables: Tables) -> list[str]:
    """The answer in numbers: accuracy, perplexity and cost of the best policy, or the baseline's accuracy by size."""
    variant = best(tables)
    if variant is None:
        return [_fall(tables, named(tables, "accuracy")[0])]
    task = home(tables, variant)
    n = gain(tables, task, variant).shown
    before, after = (tables[f"accuracy/{task}"][name][n]["mean"] for name in (base(tables), variant))
    p = tables[f"paired/{task}"][variant][n]["p"]
    doubt = "" if p < LEVEL else f" ({probability(p)}, not significant)"
    parts = [f"Accuracy at n = {count(n)} ({task}): {percent(before)} → {percent(after)} with {variant}{doubt}."]
    if (rise := _worst_rise(tables, variant)) is not None:
        parts.append(f"Perplexity {points(rise[1]['rise'], 2)}%.")
    if cost := tables.get("cost", {}).get(variant):
        parts.append(f"Prefill {cost['prefill_ratio']:.2f}×, decode {cost['decode_ratio']:.2f}×.")
    return [" ".join(parts)]


def _fall(tables: Tables, task: str) -> str:
    found = tables[f"accuracy/{task}"][base(tables)]
    ends = [
        f"{percent(found[n]['mean'])} at n = {count(n)}" for n in dict.fromkeys((sizes(found)[0], sizes(found)[-1]))
    ]
    return f"Accuracy ({task}): {joined(ends)}."


def _worst_rise(tables: Tables, variant: str) -> tuple[str, Mapping[str, Any]] | None:
    rises = {
        column: cell
        for column, cell in tables.get("perplexity", {}).get(variant, {}).items()
        if cell["rise"] is not None
    }
    column = max(rises, key=lambda one: rises[one]["rise"], default=None)
    return None if column is None else (column, rises[column])


def metrics(tables: Tables) -> list[Metric]:
    """The baseline's loss with size, and the gain and the costs of the best policy."""
    variant = best(tables)
    task = named(tables, "accuracy")[0] if variant is None else home(tables, variant)
    plain = tables[f"accuracy/{task}"][base(tables)]
    small, large = sizes(plain)[0], sizes(plain)[-1]
    found = []
    if small != large:
        ends = f"{percent(plain[small]['mean'])} → {percent(plain[large]['mean'])}"
        found.append(Metric(ends, f"baseline accuracy, {task}", f"n = {count(small)} → {count(large)}"))
    if variant is None:
        return found
    n = gain(tables, task, variant).shown
    test = tables[f"paired/{task}"][variant][n]
    low, high = (tables[f"accuracy/{task}"][variant][n][end] for end in ("low", "high"))
    detail = f"{variant}: {share(low)}–{share(high)}% (95%), {probability(test['p'])}"
    found.append(Metric(f"{points(gain(tables, task, variant).points[n])} points", f"{task} at n = {count(n)}", detail))
    if (rise := _worst_rise(tables, variant)) is not None:
        column, cell = rise
        between = "" if cell["low"] is None else f" ({points(cell['low'], 2)} to {points(cell['high'], 2)})"
        found.append(Metric(f"{points(cell['rise'], 2)}%", "largest change of perplexity", text_name(column) + between))
    if cost := tables.get("cost", {}).get(variant):
        context = count(tables["setting"]["context"])
        found.append(
            Metric(
                f"{cost['prefill_ratio']:.2f}×", f"prefill of {context} tokens", f"decode {cost['decode_ratio']:.2f}×"
            )
        )
    return found


def notes(tables: Tables) -> list[str]:
    """What policies met that they were not made for."""
    return [
        f"{name}: {remark}." for name, about in variants(tables).items() for remark in merged(about.get("remarks", ()))
    ]


def summary_table(tables: Tables) -> Table | None:
    """One row per variant: heads, mean gain in every task, perplexity and cost."""
    if not policies(tables):
        return None
    tasks, setting = named(tables, "accuracy"), tables["setting"]
    has_perplexity, has_cost = bool(tables.get("perplexity")), bool(tables.get("cost"))
    return Table(
        "Variants",
        "Mean change of accuracy over all sizes, with the number of sizes at which the change is significant "
        f"(McNemar's exact test, p < {LEVEL:g}). All variants answer the same prompts; no policy changes a weight.",
        [
            Cell("variant"), Cell("heads", f"of {count(setting['layers'] * setting['heads'])}"),
            *(Cell(task, "points") for task in tasks),
            *([Cell("perplexity", "largest change")] if has_perplexity else []),
            *([Cell("prefill"), Cell("decode")] if has_cost else []),
        ],
        [_summary_row(tables, name, tasks) for name in variants(tables)],
    )  # fmt: skip


def _summary_row(tables: Tables, name: str, tasks: list[str]) -> list[Cell]:
    row = [Cell(baseline(name), strong=name == best(tables)), Cell(count(variants(tables)[name]["touched"]))]
    for task in tasks:
        if name == base(tables):
            row.append(EMPTY)
            continue
        found = gain(tables, task, name)
        row.append(
            Cell(points(found.mean), f"better {len(found.better)}, worse {len(found.worse)} of {len(found.points)}")
        )
    if tables.get("perplexity"):
        rise = _worst_rise(tables, name)
        row.append(
            EMPTY
            if rise is None or name == base(tables)
            else Cell(f"{points(rise[1]['rise'], 2)}%", text_name(rise[0]))
        )
    if tables.get("cost"):
        row += [Cell(f"{tables['cost'][name][f'{kind}_ratio']:.2f}×") for kind in ("prefill", "decode")]
    return row


def accuracy_table(tables: Tables, task: str) -> Table:
    """Accuracy of every variant at every size of a task."""
    known, about, tests = (
        sizes(tables[f"accuracy/{task}"][base(tables)]),
        tables["setting"]["tasks"][task],
        tables[f"paired/{task}"],
    )
    return Table(
        f"Accuracy (%): {task}",
        f"{capital(about['summary'])}. {plural(tables['setting']['prompts'], 'prompt')} per size; Wilson's 95% "
        f"intervals. * differs from the baseline (McNemar's exact test, p < {LEVEL:g}, not corrected for multiple "
        "comparisons).",
        [Cell("variant"), *(Cell(f"n = {count(n)}") for n in known)],
        [
            [Cell(baseline(name)), *(_accuracy(row[n], tests.get(name, {}).get(n)) for n in known)]
            for name, row in ((name, tables[f"accuracy/{task}"][name]) for name in variants(tables))
        ],
    )


def _accuracy(cell: Mapping[str, Any], test: Mapping[str, Any] | None) -> Cell:
    significant = test is not None and test["p"] < LEVEL
    between = f"{share(cell['low'])}–{share(cell['high'])}"
    return Cell(share(cell["mean"]) + ("*" if significant else ""), between, strong=significant)


def paired_table(tables: Tables, task: str) -> Table:
    """Prompts that a policy gained and lost, with the test."""
    table = tables[f"paired/{task}"]
    known = sizes(*table.values())
    return Table(
        f"Prompts gained and lost: {task}",
        f"Of {plural(tables['setting']['prompts'], 'prompt')} per size: correct with the policy only (+) and with "
        "the baseline only (−), with McNemar's exact test.",
        [Cell("variant"), *(Cell(f"n = {count(n)}") for n in known)],
        [[Cell(name), *(_discordant(row.get(n)) for n in known)] for name, row in table.items()],
    )


def _discordant(cell: Mapping[str, Any] | None) -> Cell:
    if cell is None:
        return EMPTY
    return Cell(f"+{cell['gained']} −{cell['lost']}", probability(cell["p"]), strong=cell["p"] < LEVEL)


def perplexity_table(tables: Tables) -> Table | None:
    """Perplexity of every variant on text and on the model's own answers, and its change."""
    table, setting = tables.get("perplexity"), tables["setting"]
    if not table:
        return None
    known = texts_in_order(column for row in table.values() for column in row)
    texts = []
    if text := setting.get("text"):
        windows = plural(setting["windows"], "window")
        texts.append(
            f"Text: {text['source']} ({count(text['tokens'])} tokens, fingerprint {text['fingerprint']}), up to "
            f"{windows} per length."
        )
    if setting.get("questions"):
        texts.append(f"Own answers: those of the baseline to {plural(setting['questions'], 'question')}.")
    return Table(
        "Perplexity",
        " ".join(
            ["Lower is better; below, the change from the baseline with its 95% interval over the same texts.", *texts]
        ),
        [Cell("variant"), *(Cell(text_name(column)) for column in known)],
        [
            [Cell(baseline(name)), *(_perplexity(table[name].get(column), name == base(tables)) for column in known)]
            for name in variants(tables)
        ],
    )


def _perplexity(cell: Mapping[str, Any] | None, plain: bool) -> Cell:
    if cell is None:
        return EMPTY
    if plain or cell["rise"] is None:
        return Cell(f"{cell['mean']:.2f}")
    between = "" if cell["low"] is None else f", {points(cell['low'], 2)} to {points(cell['high'], 2)}"
    return Cell(f"{cell['mean']:.2f}", f"{points(cell['rise'], 2)}%{between}")


def cost_table(tables: Tables) -> Table | None:
    """Time and memory of every variant."""
    table, setting = tables.get("cost"), tables["setting"]
    if not table:
        return None
    memory = any(row["peak_mib"] is not None for row in table.values())
    whose = "tensors" if setting["device"] == "cuda" else "the whole process"
    return Table(
        "Time and memory",
        f"Prefill of {count(setting['context'])} tokens, then decoding one token with a filled cache, on "
        f"{setting['device']} in {setting['dtype']}; medians of {plural(setting['rounds'], 'round')} in which "
        "variants "
        "alternate. Ratios are to the baseline." + (f" Memory: peak of {whose}." if memory else ""),
        [*cells("variant", "prefill (ms)", "decode (ms)"), *([Cell("memory (MiB)")] if memory else [])],
        [
            [
                Cell(baseline(name)),
                *(
                    Cell(milliseconds(row[f"{kind}_ms"]), f"{row[f'{kind}_ratio']:.2f}×")
                    for kind in ("prefill", "decode")
                ),
                *([_memory(row["peak_mib"], table[base(tables)]["peak_mib"])] if memory else []),
            ]
            for name, row in table.items()
        ],
    )


def _memory(peak: float | None, plain: float | None) -> Cell:
    return EMPTY if peak is None else Cell(count(peak), f"{peak / plain:.2f}×" if plain else "")


def harness_table(tables: Tables) -> Table | None:
    """What EleutherAI's lm-evaluation-harness measured."""
    table = tables.get("harness")
    if not table:
        return None
    names = [(task, metric) for task, found in table[base(tables)].items() for metric in found]
    return Table(
        "EleutherAI's harness",
        "With the harness's standard errors.",
        [Cell("variant"), *(Cell(task, metric) for task, metric in names)],
        [
            [Cell(baseline(name)), *(_harness(row[task][metric]) for task, metric in names)]
            for name, row in table.items()
        ],
    )


def _harness(cell: Mapping[str, Any]) -> Cell:
    return Cell(f"{cell['mean']:.4g}", "" if cell["sem"] is None else f"± {cell['sem']:.2g}")


def _figures(tables: Tables, tasks: list[str]) -> list[Figure]:
    setting, found = tables["setting"], []
    for task in tasks:
        about = setting["tasks"][task]
        ends = []
        for name in variants(tables):
            row = tables[f"accuracy/{task}"][name]
            first, last = sizes(row)[0], sizes(row)[-1]
            ends.append(f"{baseline(name)} from {percent(row[first]['mean'])} to {percent(row[last]['mean'])}")
        caption = (
            f"{setting['model']}; {about['summary']} ({task}, version {about['version']}); "
            f"{plural(setting['prompts'], 'prompt')} per size, the same for all variants. Bars: Wilson's 95% "
            "intervals. Variants are compared on the same prompts, so overlapping bars can still differ."
        )
        alt = f"Accuracy in percent against size in the task {task}, a line for each variant: {', '.join(ends)}."
        found.append(
            Figure(f"accuracy-{task}", f"{task}: accuracy by size", caption, alt, partial(_chart, tables, task))
        )
    return found


def _chart(tables: Tables, task: str) -> Any:
    table = tables[f"accuracy/{task}"]
    names = {name: baseline(name) for name in variants(tables)}
    styles = charts.styles_of(list(names.values()))
    x = charts.size_axis([int(n) for n in sizes(*table.values())], "size n")
    rows = [
        {"variant": label, "x": int(n), "y": cell["mean"], "low": cell["low"], "high": cell["high"]}
        for name, label in names.items()
        for n, cell in table[name].items()
    ]
    tips = charts.tooltip(variant="variant", x="n|,", y="accuracy (%)|.1f", low="95% from|.1f", high="to|.1f")
    panels = [charts.panel("Accuracy", *charts.Plot(x, charts.percent_axis("accuracy (%)"), styles, tips).all(rows))]
    rows = [
        {"variant": names[name], "x": int(n), "y": value, "p": probability(tables[f"paired/{task}"][name][n]["p"])}
        for name in policies(tables)
        for n, value in gain(tables, task, name).points.items()
    ]
    if rows:
        tips = charts.tooltip(variant="variant", x="n|,", y="points|+.1f", p="test")
        plot = charts.Plot(x, charts.axis("y", "percentage points"), styles, tips)
        panels.append(charts.panel("Gain over the baseline", *charts.rule("y", 0.0), *plot.all(rows)))
    return charts.figure(*panels, names=list(styles))


def _method(tables: Tables) -> list[str]:
    setting = tables["setting"]
    return [
        f"{setting['model']}: {plural(setting['layers'], 'layer')} of {plural(setting['heads'], 'attention head')}. "
        f"Every variant answers the same {plural(setting['prompts'], 'prompt')} per size (n = "
        f"{joined([count(n) for n in setting['sizes']])}). An answer is correct if greedy decoding produces exactly "
        "the expected tokens.",
        "Attention weights are softmax(β·s) of logits s. The baseline has β = 1; a policy is a rule for β, per "
        "head. Perplexity is measured on windows without overlap.",
    ]


def _definitions(tables: Tables) -> list[tuple[str, list[tuple[str, str]]]]:
    setting = tables["setting"]
    tasks = [(name, f"{about['summary']} (version {about['version']})") for name, about in setting["tasks"].items()]
    total = count(setting["layers"] * setting["heads"])
    rules = [
        (baseline(name), f"{about['describe']}; modifies {count(about['touched'])} of {total} heads")
        for name, about in variants(tables).items()
    ]
    return [("Tasks", tasks), ("Variants", rules)]
