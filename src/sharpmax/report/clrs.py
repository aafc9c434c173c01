"""The page of `sharpmax clrs evaluate` and `compare`: accuracy on algorithms as text, at training sizes and beyond."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from sharpmax.report import charts
from sharpmax.report.tables import NOTHING, Cell, Figure, Metric, Part, Report, Table, Tables, mean_cell, table_of
from sharpmax.report.words import (
    count,
    joined,
    merged,
    origin_of_run,
    percent,
    plural,
    points,
    probability,
    share,
    span,
)

IN, OUT = "in", "out"
"""Training sizes, and all others."""

LEVEL = 0.01
"""A difference is significant when its p value is below this and its interval does not contain zero."""

TOUCHSTONE, LEARNED = "minimum", 90.0
"""The easiest algorithm, and the accuracy at training sizes that counts as learned."""

_SIGNIFICANT = (
    "* significant: the 95% interval does not contain zero and McNemar's exact test over all questions has p < "
    f"{LEVEL:g}, not corrected for multiple comparisons."
)
_MAJORITY = "most frequent answer"


def report(tables: Tables) -> Report:
    """The page's contents."""
    training, sets = tables.get("training") or {}, tables["majority"]
    questions = sorted({cell["n"] for row in sets.values() for cell in row.values()})
    caption = (
        f"{plural(len(sets), 'algorithm')}; {span(questions)} questions per size, the same for all variants. Correct: "
        "exact match of the final answer. Bars: Wilson's 95% intervals. Grey: always giving the most frequent answer. "
        "Dotted: the largest training size."
    )
    figure = Figure("accuracy", "Accuracy by size and algorithm", caption, partial(_accuracy_chart, tables))
    grids = [_main_table(tables), *([_entropy_table(tables)] if "entropy" in tables else []), _algorithms_table(tables)]
    part = Part("results", "CLRS-Text", _metrics(tables), [figure], grids)
    origins = [
        (f"Training of {x}", origin_of_run(one["command"], one["provenance"], {})) for x, one in training.items()
    ]
    variants = []
    for name, one in tables["setting"]["variants"].items():
        steps = plural(one["steps"], "training step") if one["trained"] else "not trained"
        variants.append((name, f"{one['model']}, {one['describe']}; {steps}"))
    return Report("clrs", [part], list(notes(tables)), [("Variants", variants)], origins)


def _groups(tables: Tables) -> dict[str, str]:
    """The groups of sizes that were tested, with their names."""
    larger = all(
        size in one["trained"] or size > max(one["trained"], default=0)
        for one in tables["setting"]["sizes"].values()
        for size in one["examined"]
    )
    names = {IN: "training sizes", OUT: "larger sizes" if larger else "other sizes"}
    return {group: name for group, name in names.items() if group in next(iter(tables["means"].values()))}


def significant(gain: Mapping[str, Any]) -> bool:
    """Whether a gain or a loss is significant."""
    # The test is over questions and the mean over algorithms; both must have the same sign.
    agrees = (gain["mean"] > 0.0) == (gain["gained"] > gain["lost"])
    return bool(agrees and gain["p"] < LEVEL and not gain["low"] <= 0.0 <= gain["high"])


def notes(tables: Tables) -> Iterator[str]:
    """Limits of the conclusions: what was not learned, questions left out, one seed."""
    found = {name: tables["by_algorithm"][name].get(TOUCHSTONE, {}).get(IN) for name in tables["accuracy"]}
    if all(found.values()):
        listed = joined([f"{name} {percent(cell['mean'])}" for name, cell in found.items()])
        missed = joined([name for name, cell in found.items() if cell["mean"] < LEARNED])
        verdict = f"not learned by {missed}, whose numbers say little about sharpness" if missed else "learned by all"
        verdict += f" (threshold {LEARNED:.0f}%)"
        yield f"“{TOUCHSTONE}”, the easiest algorithm, at training sizes: {listed}; {verdict}."
    else:
        yield f"Not known whether “{TOUCHSTONE}”, the easiest algorithm, was learned: it was not tested."
    setting = tables["setting"]
    left = "; ".join(
        f"{name.replace('_', ' ')} of size {joined([count(size) for size in known])}"
        for name, known in setting.get("too_long", {}).items()
    )
    if left:
        longest = setting.get("longest")
        why = "that do not fit into the context" if longest is None else f"of more than {count(longest)} tokens"
        yield f"Questions {why} were left out: {left}."
    yield from (f"{name}: {remark}." for name, remarks in setting["remarks"].items() for remark in merged(remarks))
    yield "The intervals are over questions: they do not include the variance between seeds" + (
        ", which the table shows." if "seeds" in tables else "; each variant is one training run."
    )


def _gain_words(gain: Mapping[str, Any]) -> str:
    return f"{points(gain['low'])} to {points(gain['high'])}, {probability(gain['p'])}"


def _metrics(tables: Tables) -> list[Metric]:
    """Mean accuracies of the first variant and of the one that gains most, larger sizes first."""
    base, *others = tables["accuracy"]
    found = []
    for group, name in reversed(_groups(tables).items()):
        best = max(others, key=lambda one: tables["gains"][one][group]["mean"], default=None)
        means = [tables["means"][one][group] for one in (base, best) if one is not None]
        label, detail = f"accuracy at {name}", f"{base}; mean of {plural(means[0]['algorithms'], 'algorithm')}"
        if best is not None:
            gain = tables["gains"][best][group]
            label += f" ({base} → {best})" + ("" if significant(gain) else ", not significant")
            detail = f"{points(gain['mean'])} points ({_gain_words(gain)})"
        found.append(Metric(" → ".join(percent(cell["mean"]) for cell in means), label, detail))
    return found


def _main_table(tables: Tables) -> Table:
    """Mean accuracy of every variant, and its gain over the first on the same questions."""
    known, (base, *others), seeds = _groups(tables), tables["accuracy"], tables.get("seeds", {})
    rows = []
    for name, means in tables["means"].items():
        row: list[Any] = [name, *(mean_cell(means[group]) for group in known)]
        for group in known if others else ():
            gain = tables["gains"].get(name, {}).get(group)
            sure = gain is not None and significant(gain)
            row.append(gain and Cell(points(gain["mean"]) + ("*" if sure else ""), _gain_words(gain), strong=sure))
        rows.append([*row, *(" · ".join(map(share, seeds[name][group])) for group in known if seeds)])
    head = ["variant"]
    head += [
        f"{name}|{plural(tables['means'][base][group]['algorithms'], 'algorithm')}" for group, name in known.items()
    ]
    head += [f"gain|points, {name}" for name in known.values() if others]
    head += [f"each seed|{name}" for name in known.values() if seeds]
    note = f"Every algorithm has the same weight, and every size of it. 95% bootstrap intervals. {_SIGNIFICANT}"
    return table_of("Accuracy of final answers (%): means over algorithms", note, head, rows)


def _entropy_table(tables: Tables) -> Table:
    """Entropy of attention at the first token of answers, by size."""
    known = list(next(iter(tables["entropy"].values())))
    rows = [[name, *(f"{of[size]:.3f}" for size in known)] for name, of in tables["entropy"].items()]
    note = "H / ln n of the row that gives the first token of an answer, mean over heads, layers and questions."
    return table_of("Entropy of attention by size", note, ["variant", *known], rows)


def _algorithms_table(tables: Tables) -> Table:
    known, rows = list(_groups(tables)), []
    for algorithm in tables["majority"]:
        found = [tables["by_algorithm"][name][algorithm] for name in tables["accuracy"]]
        means = [[NOTHING if group not in one else share(one[group]["mean"]) for group in known] for one in found]
        rows.append([algorithm.replace("_", " "), *(Cell(mean[-1], " ".join(mean[:-1])) for mean in means)])
    note = "Large: {}; small: {}.".format(*reversed(_groups(tables).values())) if len(known) > 1 else ""
    return table_of("Accuracy (%) by algorithm", note, ["algorithm", *tables["accuracy"]], rows)


def _accuracy_chart(tables: Tables) -> Any:
    variants = list(tables["accuracy"])
    styles = charts.styles_of(variants) | {_MAJORITY: charts.Style(charts.PALE, charts.LINE)}
    panels = []
    for name, cells in tables["majority"].items():
        table = {variant: tables["accuracy"][variant][name] for variant in variants} | {_MAJORITY: cells}
        trained, known = max(tables["setting"]["sizes"][name]["trained"], default=0), [int(n) for n in cells]
        under = [charts.rule("x", trained)] if min(known) <= trained < max(known) else []
        title, y, look = name.replace("_", " "), charts.percent_axis(""), {"under": under, "size": 18.0, "height": 120}
        panels.append(charts.by_size(title, table, "n", y, styles, **look))
    return charts.figure(*panels, columns=5, minimum=165, around=46, names=list(styles))
