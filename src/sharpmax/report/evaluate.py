"""The page of `sharpmax evaluate`: accuracy, perplexity and cost of a model with and without policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from sharpmax.report import charts
from sharpmax.report.tables import (
    Cell,
    Figure,
    Metric,
    Part,
    Report,
    Table,
    Tables,
    accuracy_table,
    named,
    sizes,
    table_of,
)
from sharpmax.report.words import capital, count, merged, percent, plural, points, share, text_name

LEVEL = 0.01
"""A difference is significant when its p value is below this: there are many sizes and tasks."""


def report(tables: Tables) -> Report:
    """The contents of a page of `sharpmax evaluate`."""
    setting, known = tables["setting"], tables["setting"]["variants"]
    grids = [_summary(tables)]
    for task in named(tables, "accuracy"):
        rows = {name: tables[f"accuracy/{task}"][name] for name in known}
        note = f"{capital(setting['tasks'][task]['summary'])}. McNemar's exact test. Small: 95% interval"
        grids.append(accuracy_table(f"Accuracy (%): {task}", note, rows, tables[f"paired/{task}"], LEVEL))
    grids += [make(tables) for name, make in (("perplexity", _perplexity), ("harness", _harness)) if tables.get(name)]
    caption = (
        f"{setting['model']}; {plural(setting['prompts'], 'prompt')} per size, the same for all variants. Bars: "
        "Wilson's 95% intervals."
    )
    figure = Figure("accuracy", "Accuracy by size", caption, partial(_accuracy_chart, tables))
    part = Part("results", str(setting["model"]), _metrics(tables), [figure], grids)
    notes = [f"{name}: {remark}." for name, about in known.items() for remark in merged(about.get("remarks", ()))]
    tasks = [(name, f"{about['summary']} (version {about['version']})") for name, about in setting["tasks"].items()]
    policies = [(name, str(about["describe"])) for name, about in known.items()]
    return Report("evaluate", [part], notes, [("Tasks", tasks), ("Variants", policies)])


def _base(tables: Tables) -> str:
    """The variant without a policy."""
    return next(str(name) for name, about in tables["setting"]["variants"].items() if about["policy"] is None)


def _mean(tables: Tables, tasks: Sequence[str], variant: str) -> float:
    """Mean accuracy over tasks and sizes."""
    return fmean(cell["mean"] for task in tasks for cell in tables[f"accuracy/{task}"][variant].values())


def _significant(tables: Tables, tasks: Sequence[str], variant: str) -> tuple[int, int]:
    """In how many tasks and sizes a policy is significantly better and worse than the baseline."""
    gains = []
    for task in tasks:
        before, after = (tables[f"accuracy/{task}"][name] for name in (_base(tables), variant))
        tests = tables[f"paired/{task}"].get(variant, {})
        gains += [after[n]["mean"] - before[n]["mean"] for n, test in tests.items() if test["p"] < LEVEL]
    return sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)


def _best(tables: Tables) -> str | None:
    """The policy with the largest mean accuracy over all tasks."""
    tasks = named(tables, "accuracy")
    policies = (name for name in tables["setting"]["variants"] if name != _base(tables))
    return max(policies, key=lambda name: _mean(tables, tasks, name), default=None)


def _rise(tables: Tables, variant: str) -> tuple[str, str] | None:
    """The largest change of perplexity, and its text."""
    cells = tables.get("perplexity", {}).get(variant, {})
    known = {text: float(cell["rise"]) for text, cell in cells.items() if cell["rise"] is not None}
    worst = max(known, key=lambda text: known[text], default=None)
    return None if worst is None else (f"{points(known[worst], 2)}%", text_name(worst))


def _metrics(tables: Tables) -> list[Metric]:
    """Accuracy without and with the best policy, and its cost; without a policy, accuracy by size."""
    tasks, base, variant = named(tables, "accuracy"), _base(tables), _best(tables)
    if variant is None:
        row = tables[f"accuracy/{tasks[0]}"][base]
        ends = list(dict.fromkeys((sizes(row)[0], sizes(row)[-1])))
        label = f"accuracy ({tasks[0]}) at n = {' → '.join(map(count, ends))}"
        return [Metric(" → ".join(percent(row[n]["mean"]) for n in ends), label, "baseline")]
    label = f"mean accuracy over {plural(len(tasks), 'task')} and all sizes"
    better, worse = _significant(tables, tasks, variant)
    means = [percent(_mean(tables, tasks, name)) for name in (base, variant)]
    detail = f"baseline → {variant}: significantly better in {better} tasks and sizes, worse in {worse}"
    found = [Metric(" → ".join(means), label + ("" if better or worse else ", not significant"), detail)]
    if rise := _rise(tables, variant):
        found.append(Metric(rise[0], "largest change of perplexity", rise[1]))
    if cost := tables.get("cost", {}).get(variant):
        prompt = f"{count(tables['setting']['context'])} tokens"
        found.append(Metric(f"{cost['prefill_ratio']:.2f}×, decode {cost['decode_ratio']:.2f}×", "prefill", prompt))
    return found


def _summary(tables: Tables) -> Table:
    """One row per variant: mean accuracy and gain in every task, perplexity, time, memory and heads."""
    setting, costs, base = tables["setting"], tables.get("cost") or {}, _base(tables)
    groups: dict[str, list[str]] = {}
    for task in named(tables, "accuracy"):
        groups.setdefault(task.partition("/")[0], []).append(task)
    titles = [f"{some[0] if len(some) == 1 else f'{group}, {len(some)} tasks'}|%" for group, some in groups.items()]
    titles += ["perplexity|largest change"] if tables.get("perplexity") else []
    titles += ["prefill|ms", "decode|ms", "memory|MiB"] if costs else []
    rows = []
    for name, about in setting["variants"].items():
        row: list[Any] = [Cell(name, strong=name == _best(tables))]
        for some in groups.values():
            (better, worse), mean = _significant(tables, some, name), _mean(tables, some, name)
            gain = f"{points(mean - _mean(tables, some, base))}; {better} better" + (
                f", {worse} worse" if worse else ""
            )
            row.append(Cell(share(mean), gain if name != base else ""))
        if tables.get("perplexity"):
            rise = None if name == base else _rise(tables, name)
            row.append(None if rise is None else Cell(*rise))
        if costs:
            cost, plain = costs[name], costs[base]["peak_mib"]
            memory = None if not plain else Cell(f"{cost['peak_mib'] / plain:.2f}×", count(cost["peak_mib"]))
            prefill, decode = (
                Cell(f"{cost[f'{x}_ratio']:.2f}×", f"{cost[f'{x}_ms']:,.1f}") for x in ("prefill", "decode")
            )
            row += [prefill, decode, memory]
        rows.append([*row, count(about["modified"])])
    note = (
        "Mean accuracy over all sizes; small: its gain in points, and in how many tasks and sizes it is significantly "
        f"better or worse than the baseline (McNemar's exact test, p < {LEVEL:g})."
    )
    if costs:
        note += (
            f" Prefill of {count(setting['context'])} tokens, then decoding one, on {setting['device']} in "
            f"{setting['dtype']}: medians of {plural(setting['rounds'], 'round')} in which variants alternate."
        )
    heads = f"heads|of {count(setting['layers'] * setting['heads'])}"
    return table_of("Variants", note, ["variant", *titles, heads], rows)


def _perplexity(tables: Tables) -> Table:
    """Perplexity of every variant on text and on the model's own answers, and its change."""
    table = tables["perplexity"]
    known = list(dict.fromkeys(column for row in table.values() for column in row))
    note = "Small: change from the baseline with its 95% interval."
    if text := tables["setting"].get("text"):
        note += f" Text: {text['source']} ({count(text['tokens'])} tokens, fingerprint {text['fingerprint']})."

    def cell(value: Mapping[str, Any]) -> Cell:
        change = f"{points(value['rise'], 2)}%" if value.get("rise") else ""
        if change and value["low"] is not None:
            change += f", {points(value['low'], 2)} to {points(value['high'], 2)}"
        return Cell(f"{value['mean']:.2f}", change)

    rows = [[name, *(cell(row[one]) if one in row else None for one in known)] for name, row in table.items()]
    return table_of("Perplexity", note, ["variant", *map(text_name, known)], rows)


def _harness(tables: Tables) -> Table:
    """Results of EleutherAI's lm-evaluation-harness."""
    table = tables["harness"]
    names = [(task, metric) for task, found in table[_base(tables)].items() for metric in found]

    def cell(value: Mapping[str, Any]) -> Cell:
        return Cell(f"{value['mean']:.4g}", "" if value["sem"] is None else f"± {value['sem']:.2g}")

    rows = [[name, *(cell(row[task][metric]) for task, metric in names)] for name, row in table.items()]
    head = ["variant", *(f"{task}|{metric}" for task, metric in names)]
    return table_of("EleutherAI's harness", "With the harness's standard errors.", head, rows)


def _accuracy_chart(tables: Tables) -> Any:
    tasks, styles = named(tables, "accuracy"), charts.styles_of(list(tables["setting"]["variants"]))
    y, height = charts.percent_axis("accuracy (%)"), 270 if len(tasks) < 3 else 160
    panels = [charts.by_size(task, tables[f"accuracy/{task}"], "size n", y, styles, height=height) for task in tasks]
    return charts.figure(*panels, columns=3, minimum=165, around=52, names=list(styles))
