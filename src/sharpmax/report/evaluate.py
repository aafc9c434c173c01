"""The page of `sharpmax evaluate`: accuracy, perplexity and cost of a model with and without policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    check_name,
    header,
    interval,
    named,
    size_table,
    sizes,
)
from sharpmax.report.words import (
    baseline,
    capital,
    count,
    merged,
    milliseconds,
    percent,
    plural,
    points,
    probability,
    share,
    text_name,
    texts_in_order,
)

LEVEL = 0.01
"""A difference is significant when its p value is below this: there are many sizes and tasks."""


def matches(tables: Tables) -> bool:
    """Whether these are tables of `sharpmax evaluate`."""
    return any(name.startswith("paired/") for name in tables)


def report(tables: Tables) -> Report:
    """The page's contents."""
    setting, known = tables["setting"], variants(tables)
    tasks = [check_name(task, "task") for task in named(tables, "accuracy")]
    details = [accuracy_table(tables, task) for task in tasks]
    details += [make(tables) for make, name in _DETAILS.items() if tables.get(name)]
    part = Part(
        "results", str(setting["model"]), metrics(tables), list(_figures(tables)), [summary_table(tables)], details
    )
    notes = [f"{name}: {remark}." for name, about in known.items() for remark in merged(about.get("remarks", ()))]
    definitions = [
        (
            "Tasks",
            [(name, f"{about['summary']} (version {about['version']})") for name, about in setting["tasks"].items()],
        ),
        ("Variants", [(baseline(name), str(about["describe"])) for name, about in known.items()]),
    ]
    return Report("evaluate", headline(tables), [part], notes, (), definitions, about={"setting": setting})


def variants(tables: Tables) -> Mapping[str, Any]:
    """What the run says of its variants, the baseline first."""
    found: Mapping[str, Any] = tables["setting"]["arms"]
    return found


def base(tables: Tables) -> str:
    """The variant without a policy."""
    return next(name for name, about in variants(tables).items() if about["policy"] is None)


def gains(tables: Tables, task: str, variant: str) -> dict[str, float]:
    """What a policy changes in a task, in points by size."""
    before, after = (tables[f"accuracy/{task}"][name] for name in (base(tables), variant))
    return {n: after[n]["mean"] - before[n]["mean"] for n in sizes(after)}


def best(tables: Tables) -> str | None:
    """The policy with the largest mean gain over all tasks."""
    tasks = named(tables, "accuracy")

    def mean(variant: str) -> float:
        known = [gains(tables, task, variant) for task in tasks]
        return sum(sum(one.values()) / len(one) for one in known)

    return max((name for name in variants(tables) if name != base(tables)), key=mean, default=None)


def shown(tables: Tables, variant: str) -> tuple[str, str]:
    """The task that a policy was calibrated on, else the first, and the size with the largest change there."""
    tasks, task = named(tables, "accuracy"), variants(tables)[variant].get("calibrated_on")
    task = task if task in tasks else tasks[0]
    change = gains(tables, task, variant)
    return task, max(change, key=lambda n: abs(change[n]))


def headline(tables: Tables) -> list[str]:
    """The answer in numbers: accuracy, perplexity and cost of the best policy, or the baseline's accuracy by size."""
    variant = best(tables)
    if variant is None:
        task = named(tables, "accuracy")[0]
        row = tables[f"accuracy/{task}"][base(tables)]
        ends = [f"{percent(row[n]['mean'])} at n = {count(n)}" for n in dict.fromkeys((sizes(row)[0], sizes(row)[-1]))]
        return [f"Accuracy ({task}): {', '.join(ends)}."]
    tasks = named(tables, "accuracy")
    if len(tasks) > 1:  # of many cells the largest change would say little
        means = [
            [cell["mean"] for task in tasks for cell in tables[f"accuracy/{task}"][name].values()]
            for name in (base(tables), variant)
        ]
        before, after = (percent(sum(cells) / len(cells)) for cells in means)
        parts = [f"Mean accuracy over {len(tasks)} tasks and all sizes: {before} → {after} with {variant}."]
    else:
        task, n = shown(tables, variant)
        before, after = (percent(tables[f"accuracy/{task}"][name][n]["mean"]) for name in (base(tables), variant))
        p = tables[f"paired/{task}"][variant][n]["p"]
        doubt = "" if p < LEVEL else f" ({probability(p)}, not significant)"
        parts = [f"Accuracy at n = {count(n)} ({task}): {before} → {after} with {variant}{doubt}."]
    if rise := _rise(tables, variant):
        parts.append(f"Perplexity {points(rise[1]['rise'], 2)}%.")
    if cost := tables.get("cost", {}).get(variant):
        parts.append(f"Prefill {cost['prefill_ratio']:.2f}×, decode {cost['decode_ratio']:.2f}×.")
    return [" ".join(parts)]


def _rise(tables: Tables, variant: str) -> tuple[str, Mapping[str, Any]] | None:
    """The text with the largest change of perplexity, and its cell."""
    cells = tables.get("perplexity", {}).get(variant, {}).items()
    return max(
        (one for one in cells if one[1]["rise"] is not None), key=lambda one: float(one[1]["rise"]), default=None
    )


def metrics(tables: Tables) -> list[Metric]:
    """The baseline's loss with size, and the gain and the costs of the best policy."""
    variant = best(tables)
    task, n = (named(tables, "accuracy")[0], "") if variant is None else shown(tables, variant)
    plain = tables[f"accuracy/{task}"][base(tables)]
    ends = list(dict.fromkeys((sizes(plain)[0], sizes(plain)[-1])))
    value, where = (" → ".join(texts) for texts in ([percent(plain[n]["mean"]) for n in ends], map(count, ends)))
    found = [Metric(value, f"baseline accuracy, {task}", f"n = {where}")]
    if variant is None:
        return found
    after, test = tables[f"accuracy/{task}"][variant][n], tables[f"paired/{task}"][variant][n]
    detail = f"{variant}: {interval(after)}% (95%), {probability(test['p'])}"
    change = f"{points(gains(tables, task, variant)[n])} points"
    found.append(Metric(change, f"{task} at n = {count(n)}", detail))
    if rise := _rise(tables, variant):
        value = f"{points(rise[1]['rise'], 2)}%"
        found.append(Metric(value, "largest change of perplexity", text_name(rise[0])))
    if cost := tables.get("cost", {}).get(variant):
        what, value = f"prefill of {count(tables['setting']['context'])} tokens", f"{cost['prefill_ratio']:.2f}×"
        found.append(Metric(value, what, f"decode {cost['decode_ratio']:.2f}×"))
    return found


def summary_table(tables: Tables) -> Table:
    """One row per variant: heads, mean accuracy and gain in every task, perplexity and cost."""
    tasks, setting, costs = named(tables, "accuracy"), tables["setting"], tables.get("cost") or {}
    titles = ["variant", *(f"{task}|%" for task in tasks)]
    titles += ["perplexity|largest change"] if tables.get("perplexity") else []
    titles += [*(["prefill", "decode"] if costs else []), f"heads|of {count(setting['layers'] * setting['heads'])}"]
    rows = []
    for name, about in variants(tables).items():
        row = [Cell(baseline(name), strong=name == best(tables))]
        for task in tasks:
            accuracy, change = tables[f"accuracy/{task}"][name], gains(tables, task, name)
            mean, gain = (
                sum(values) / len(change) for values in ((accuracy[n]["mean"] for n in change), change.values())
            )
            tests = tables[f"paired/{task}"].get(name, {})
            sure = [n for n in change if n in tests and tests[n]["p"] < LEVEL]
            better, worse = sum(change[n] > 0 for n in sure), sum(change[n] < 0 for n in sure)
            tested = f"{points(gain)}; {better} better" + (f", {worse} worse" if worse else "")
            row.append(Cell(share(mean), tested if tests else ""))
        if tables.get("perplexity"):
            rise = None if name == base(tables) else _rise(tables, name)
            row.append(Cell(f"{points(rise[1]['rise'], 2)}%", text_name(rise[0])) if rise else EMPTY)
        row += [Cell(f"{costs[name][f'{kind}_ratio']:.2f}×") for kind in ("prefill", "decode") if costs]
        rows.append([*row, Cell(count(about["touched"]))])
    return Table(
        "Variants",
        "Mean accuracy over all sizes; small: its gain in points, and at how many sizes it is significantly better or "
        f"worse than the baseline (McNemar's exact test, p < {LEVEL:g}).",
        header(*titles),
        rows,
    )


def accuracy_table(tables: Tables, task: str) -> Table:
    """Accuracy of every variant at every size of a task, with the prompts gained and lost."""
    tests = tables[f"paired/{task}"]
    rows = {
        baseline(name): {n: (cell, tests.get(name, {}).get(n)) for n, cell in tables[f"accuracy/{task}"][name].items()}
        for name in variants(tables)
    }

    def cell(value: Any) -> Cell:
        accuracy, test = value
        sure = test is not None and test["p"] < LEVEL
        lost = "" if test is None else f"; +{test['gained']} −{test['lost']}"
        return Cell(share(accuracy["mean"]) + ("*" if sure else ""), interval(accuracy) + lost, strong=sure)

    prompts = plural(tables["setting"]["prompts"], "prompt")
    note = (
        f"{capital(tables['setting']['tasks'][task]['summary'])}. Small: 95% interval; of {prompts}, how many only the "
        f"variant (+) or only the baseline (−) answers correctly. * p < {LEVEL:g}."
    )
    return size_table(f"Accuracy (%): {task}", note, rows, cell)


def perplexity_table(tables: Tables) -> Table:
    """Perplexity of every variant on text and on the model's own answers, and its change."""
    table, setting = tables["perplexity"], tables["setting"]
    known = texts_in_order(column for row in table.values() for column in row)
    note = "Small: change from the baseline with its 95% interval."
    if text := setting.get("text"):
        note += f" Text: {text['source']} ({count(text['tokens'])} tokens, fingerprint {text['fingerprint']})."

    def cell(value: Mapping[str, Any] | None) -> Cell:
        if value is None or value.get("rise") is None or value["rise"] == 0.0:
            return Cell(f"{value['mean']:.2f}") if value else EMPTY
        between = "" if value["low"] is None else f", {points(value['low'], 2)} to {points(value['high'], 2)}"
        return Cell(f"{value['mean']:.2f}", f"{points(value['rise'], 2)}%{between}")

    rows = [[Cell(baseline(name)), *(cell(table[name].get(one)) for one in known)] for name in variants(tables)]
    return Table("Perplexity", note, header("variant", *map(text_name, known)), rows)


def cost_table(tables: Tables) -> Table:
    """Time and memory of every variant."""
    table, setting = tables["cost"], tables["setting"]
    plain = table[base(tables)]["peak_mib"]
    rows = []
    for name, row in table.items():
        times = [
            Cell(milliseconds(row[f"{kind}_ms"]), f"{row[f'{kind}_ratio']:.2f}×") for kind in ("prefill", "decode")
        ]
        peak = row["peak_mib"]
        memory = EMPTY if peak is None else Cell(count(peak), f"{peak / plain:.2f}×" if plain else "")
        rows.append([Cell(baseline(name)), *times, memory])
    whose = "tensors" if setting["device"] == "cuda" else "the whole process"
    return Table(
        "Time and memory",
        f"Prefill of {count(setting['context'])} tokens, then decoding one token with a filled cache, on "
        f"{setting['device']} in {setting['dtype']}; medians of {plural(setting['rounds'], 'round')} in which variants "
        f"alternate. Ratios are to the baseline. Memory: peak of {whose}.",
        header("variant", "prefill|ms", "decode|ms", "memory|MiB"),
        rows,
    )


def harness_table(tables: Tables) -> Table:
    """What EleutherAI's lm-evaluation-harness measured."""
    table = tables["harness"]
    names = [(task, metric) for task, found in table[base(tables)].items() for metric in found]
    rows = []
    for name, row in table.items():
        known = [row[task][metric] for task, metric in names]
        errors = ["" if one["sem"] is None else f"± {one['sem']:.2g}" for one in known]
        values = [Cell(f"{one['mean']:.4g}", error) for one, error in zip(known, errors, strict=True)]
        rows.append([Cell(baseline(name)), *values])
    head = header("variant", *(f"{task}|{metric}" for task, metric in names))
    return Table("EleutherAI's harness", "With the harness's standard errors.", head, rows)


_DETAILS = {perplexity_table: "perplexity", cost_table: "cost", harness_table: "harness"}
"""Tables of the page, and the results that each needs."""


def _figures(tables: Tables) -> Iterator[Figure]:
    prompts = f"{tables['setting']['model']}; {plural(tables['setting']['prompts'], 'prompt')} per size"
    for name, title, caption in (
        ("accuracy", "Accuracy by size", ", the same for all variants. Bars: Wilson's 95% intervals."),
        ("gain", "Gain over the baseline by size", ". Percentage points, with McNemar's exact test."),
    ):
        if name == "accuracy" or best(tables) is not None:
            alt = f"{title}, a panel for each task."
            yield Figure(name, title, prompts + caption, alt, partial(_chart, tables, name))


def _chart(tables: Tables, name: str) -> Any:
    panels, styles = [], charts.styles_of([baseline(one) for one in variants(tables)])
    for task in named(tables, "accuracy"):
        table, tests = tables[f"accuracy/{task}"], tables[f"paired/{task}"]
        x = charts.size_axis([int(n) for n in sizes(*table.values())], "size n")
        y, under = charts.percent_axis("accuracy (%)"), []
        rows = charts.size_rows({baseline(one): table[one] for one in variants(tables)})
        if name == "gain":
            y, under = charts.axis("y", "points"), charts.rule("y", 0.0)
            rows = [
                {"variant": one, "x": int(n), "y": value, "test": probability(tests[one][n]["p"])}
                for one in tests
                for n, value in gains(tables, task, one).items()
            ]
        height = 270 if len(named(tables, "accuracy")) < 3 else 160
        panels.append(charts.lines_panel(task, rows, x, y, styles, under=under, height=height))
    return charts.figure(*panels, columns=3, minimum=165, around=52, names=list(styles))
