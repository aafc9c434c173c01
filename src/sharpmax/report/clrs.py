"""The page of `sharpmax clrs evaluate`: accuracy on algorithms as text, at sizes trained on and beyond."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from sharpmax.report import charts
from sharpmax.report.tables import (
    EMPTY,
    NOTHING,
    Cell,
    Figure,
    Metric,
    Part,
    Report,
    Table,
    Tables,
    interval,
    mean_cell,
    present,
    sizes,
)  # fmt: skip
from sharpmax.report.words import (
    Pairs,
    capital,
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
)  # fmt: skip

IN, OUT = "in", "out"
"""Sizes trained on, and all others."""

LEVEL = 0.01
"""A difference is significant when its p value is below this and its interval does not contain zero."""

TOUCHSTONE, LEARNED = "minimum", 90.0
"""The easiest algorithm, and the accuracy at sizes trained on that counts as learned."""

_OF_THE_POLICY = {
    "policy_name", "policy_describe", "policy_rate", "learn", "band", "touched", "trained_weights", "seed", "weights",
}  # fmt: skip
"""Training settings in which variants are meant to differ."""

_SIGNIFICANT = (
    "* significant: the 95% interval does not contain zero and McNemar's exact test over all questions has p < "
    f"{LEVEL:g}, not corrected for multiple comparisons."
)


def matches(tables: Tables) -> bool:
    """Whether these are tables of `sharpmax clrs evaluate`."""
    return "by_algorithm" in tables


def report(tables: Tables) -> Report:
    """The page's contents."""
    main = present(main_table(tables), entropy_table(tables))
    part = Part("results", "CLRS-Text", metrics(tables), list(_figures(tables)), main, [algorithms_table(tables)])
    origins = [
        (f"Training of {name}", origin_of_run(one["command"], one["provenance"], {}))
        for name, one in _training(tables).items()
    ]
    definitions = [("Variants and their training", _variants(tables))]
    return Report("clrs", list(headline(tables)), [part], list(notes(tables)), _method(tables), definitions, origins)


def variants(tables: Tables) -> list[str]:
    """The variants, in the order of the run."""
    return list(tables["accuracy"])


def base(tables: Tables) -> str:
    """The variant that the others are compared with."""
    return str(tables["setting"]["base"])


def others(tables: Tables) -> list[str]:
    """All variants but the base."""
    return [name for name in variants(tables) if name != base(tables)]


def groups(tables: Tables) -> list[str]:
    """Which of the two groups of sizes were tested."""
    return [group for group in (IN, OUT) if group in tables["means"][base(tables)]]


def group_names(tables: Tables) -> dict[str, str]:
    """The groups in words, which depend on the variants and the sizes."""
    setting = tables["setting"]
    trained = any(about["trained"] for about in setting["arms"].values())
    larger = all(
        size in one["trained"] or size > max(one["trained"], default=0)
        for one in setting["sizes"].values()
        for size in one["examined"]
    )
    return {
        IN: "sizes trained on" if trained else "sizes meant for training",
        OUT: "larger sizes" if larger else "other sizes",
    }


def lead(tables: Tables) -> str | None:
    """The variant that gains most over the base in the last group of sizes."""
    last = groups(tables)[-1]
    return max(others(tables), key=lambda name: tables["gains"][name][last]["mean"], default=None)


def significant(gain: Mapping[str, Any]) -> int:
    """1 for a significant gain, −1 for a significant loss, else 0."""
    if gain["p"] >= LEVEL or gain["low"] <= 0.0 <= gain["high"]:
        return 0
    # The test counts questions, the mean algorithms: where they disagree, nothing is shown.
    agrees = (gain["mean"] > 0.0) == (gain["gained"] > gain["lost"])
    return (1 if gain["mean"] > 0.0 else -1) if agrees else 0


def _training(tables: Tables) -> Mapping[str, Any]:
    return tables.get("training") or {}


def _seeds(tables: Tables) -> dict[str, list[str]]:
    """Variants named NAME-SEED by their names, where every name has the same two seeds or more; else none."""
    found: dict[str, list[str]] = {}
    for name in variants(tables):
        found.setdefault(re.sub(r"-\d+$", "", name), []).append(name)
    several = min(map(len, found.values())) == max(map(len, found.values())) > 1
    return found if several else {}


def _labels(tables: Tables) -> dict[str, list[str]]:
    """What tables have rows for, each with its runs."""
    return _seeds(tables) or {name: [name] for name in variants(tables)}


def _over_seeds(tables: Tables, names: list[str], group: str) -> tuple[float, list[float]]:
    """The mean over seeds, and that of each."""
    each = [tables["means"][name][group]["mean"] for name in names]
    return sum(each) / len(each), each


def headline(tables: Tables) -> Iterator[str]:
    """The answer in numbers, a sentence for each group of sizes, those beyond training first."""
    names, variant, seeds = group_names(tables), lead(tables), _seeds(tables)
    for group in reversed(groups(tables)):
        if seeds:
            means = {name: _over_seeds(tables, known, group)[0] for name, known in seeds.items()}
            listed = joined([f"{name} {percent(mean)}" for name, mean in means.items()])
            yield f"Accuracy at {names[group]}, mean of {len(next(iter(seeds.values())))} seeds: {listed}."
            continue
        plain = tables["means"][base(tables)][group]
        start = f"Accuracy at {names[group]}: {percent(plain['mean'])}"
        if variant is None:
            yield f"{start} ({interval(plain)})."
        else:
            after, gain = tables["means"][variant][group], tables["gains"][variant][group]
            test = probability(gain["p"]) + ("" if significant(gain) else ", not significant")
            change = f"{points(gain['mean'])} points, {points(gain['low'])} to {points(gain['high'])}"
            yield f"{start} → {percent(after['mean'])} with {variant} ({change}, {test})."


def notes(tables: Tables) -> Iterator[str]:
    """What limits the conclusions: what was not learned, training that differs, questions left out."""
    yield _learned_words(tables)
    for name, values in _differing_settings(tables).items():
        listed = joined([f"{_value(value)} for {variant}" for variant, value in values.items()])
        yield f"The variants were not trained alike: {name.replace('_', ' ')} is {listed}."
    setting = tables["setting"]
    left = "; ".join(
        f"{name.replace('_', ' ')} of size {joined([count(size) for size in known])}"
        for name, known in setting.get("too_long", {}).items()
    )
    if left and "longest" in setting:
        yield f"Questions of more than {count(setting['longest'])} tokens were left out: {left}."
    elif left:
        yield f"Left out, as they do not fit into the context: {left}."
    for name, remarks in setting["remarks"].items():
        for remark in merged(remarks):
            yield f"{name}: {remark}."
    if not _seeds(tables):
        yield "Each variant is one training run: the intervals do not include the variance between seeds."


def _touchstone(tables: Tables) -> dict[str, Any]:
    """The cell of the easiest algorithm at sizes trained on, by variant; empty where one was not tested."""
    found = {name: tables["by_algorithm"][name].get(TOUCHSTONE, {}).get(IN) for name in variants(tables)}
    return found if all(found.values()) else {}


def _learned_words(tables: Tables) -> str:
    found, where = _touchstone(tables), group_names(tables)[IN]
    if not found:
        return f"Not known whether “{TOUCHSTONE}”, the easiest algorithm, was learned: it was not tested at {where}."
    listed = joined([f"{name} {percent(cell['mean'])}" for name, cell in found.items()])
    missed = joined([name for name, cell in found.items() if cell["mean"] < LEARNED])
    verdict = (
        f"not learned by {missed}, whose numbers say little about sharpness" if missed else "learned by every variant"
    )
    return f"“{TOUCHSTONE}”, the easiest algorithm, at {where}: {listed}; {verdict} (threshold {LEARNED:.0f}%)."


def _differing_settings(tables: Tables) -> dict[str, dict[str, Any]]:
    known = {name: one["setting"] for name, one in _training(tables).items()}
    keys = dict.fromkeys(key for setting in known.values() for key in setting if key not in _OF_THE_POLICY)
    values = {key: {name: setting.get(key) for name, setting in known.items()} for key in keys}
    return {key: of for key, of in values.items() if len({repr(value) for value in of.values()}) > 1}


def _value(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value) if isinstance(value, str | float) else "its own"


def majority(tables: Tables, algorithm: str, group: str) -> float | None:
    """Accuracy in a group of sizes of always giving the most frequent answer."""
    trained = tables["setting"]["sizes"][algorithm]["trained"]
    values = [
        cell["mean"] for size, cell in tables["majority"][algorithm].items() if (int(size) in trained) == (group == IN)
    ]
    return sum(values) / len(values) if values else None


def metrics(tables: Tables) -> list[Metric]:
    """Mean accuracies, and the gain of the leading variant."""
    names, variant, found = group_names(tables), lead(tables), []
    shown = present(base(tables), variant)
    for group in groups(tables):
        known = [tables["means"][one][group] for one in shown]
        value = " → ".join(percent(cell["mean"]) for cell in known)
        detail = f"{' → '.join(shown)}; mean of {plural(known[0]['algorithms'], 'algorithm')}"
        found.append(Metric(value, f"accuracy at {names[group]}", detail))
    if variant is not None:
        group = groups(tables)[-1]
        gain = tables["gains"][variant][group]
        detail = f"{points(gain['low'])} to {points(gain['high'])} (95%), {probability(gain['p'])}"
        found.append(Metric(f"{points(gain['mean'])} points", f"{variant} at {names[group]}", detail))
    return found


def main_table(tables: Tables) -> Table:
    """Mean accuracy of every variant, and its gain over the first on the same questions."""
    labels, names, known = _labels(tables), group_names(tables), groups(tables)
    first, several = next(iter(labels.values())), bool(_seeds(tables))
    rows = []
    for label, trained in labels.items():
        row = [Cell(label)]
        for group in known:
            mean, each = _over_seeds(tables, trained, group)
            row.append(Cell(share(mean), " · ".join(map(share, each))) if several else
                       mean_cell(tables["means"][label][group]))  # fmt: skip
        for group in known if len(labels) > 1 else ():
            if trained == first:
                row.append(EMPTY)
            elif several:
                each = [_over_seeds(tables, [a], group)[0] - _over_seeds(tables, [b], group)[0]
                        for a, b in zip(trained, first, strict=True)]  # fmt: skip
                row.append(Cell(points(sum(each) / len(each)), " · ".join(map(points, each))))
            else:
                row.append(_gain_cell(tables["gains"][label][group]))
        rows.append(row)
    counted = {group: plural(tables["means"][base(tables)][group]["algorithms"], "algorithm") for group in known}
    head = [Cell("variant"), *(Cell(names[group], counted[group]) for group in known)]
    if len(labels) > 1:
        head += [Cell("gain", f"points, {names[group]}") for group in known]
    interval_words = "Below each number, every seed." if several else f"95% bootstrap intervals. {_SIGNIFICANT}"
    note = f"Every algorithm has the same weight, and every size of it. {interval_words}"
    return Table("Accuracy of final answers (%): means over algorithms", note, head, rows)


def algorithms_table(tables: Tables) -> Table:
    """Every algorithm, sorted by the accuracy of the first variant in the last group of sizes."""
    labels, names, known = _labels(tables), group_names(tables), groups(tables)
    last, rows = known[-1], []
    for algorithm in tables["majority"]:
        row = [Cell(algorithm.replace("_", " "))]
        for label, trained in labels.items():
            cells = [[tables["by_algorithm"][one][algorithm].get(group) for one in trained] for group in known]
            means = [NOTHING if None in of else share(sum(one["mean"] for one in of) / len(of)) for of in cells]
            gain = tables["gains_by_algorithm"].get(label, {}).get(algorithm, {}).get(last)
            sure = gain is not None and bool(significant(gain))
            row.append(Cell(means[-1] + ("*" if sure else ""), means[0] if len(means) > 1 else "", strong=sure))
        frequent = majority(tables, algorithm, last)
        rows.append([*row, Cell(NOTHING if frequent is None else share(frequent), faint=True)])
    rows.sort(key=lambda row: -float(row[1].text) if row[1].text != NOTHING else 1.0)
    note = f"Large: {names[last]}; small: {names[known[0]]}. Most frequent: always giving the most frequent answer."
    note += "" if _seeds(tables) or len(labels) == 1 else f" {_SIGNIFICANT}"
    return Table(
        "Accuracy (%) by algorithm", note, [Cell("algorithm"), *map(Cell, labels), Cell("most frequent")], rows
    )


def entropy_table(tables: Tables) -> Table | None:
    """Entropy of attention where answers begin, by size."""
    if "entropy" not in tables:
        return None
    known = list(next(iter(tables["entropy"].values())))
    rows = []
    for label, trained in _labels(tables).items():
        means = [sum(tables["entropy"][one][size] for one in trained) / len(trained) for size in known]
        rows.append([Cell(label), *(Cell(f"{mean:.3f}") for mean in means)])
    note = "H / ln n of the row that gives the first token of an answer, mean over heads, layers and questions."
    return Table("Entropy of attention by size", note, [Cell("variant"), *map(Cell, known)], rows)


def _gain_cell(cell: Mapping[str, Any]) -> Cell:
    sure, span_words = bool(significant(cell)), f"{points(cell['low'])} to {points(cell['high'])}"
    return Cell(points(cell["mean"]) + ("*" if sure else ""), f"{span_words}, {probability(cell['p'])}", strong=sure)


def _figures(tables: Tables) -> Iterator[Figure]:
    names = group_names(tables)
    means = []
    for name in variants(tables):
        values = [f"{percent(tables['means'][name][group]['mean'])} at {names[group]}" for group in groups(tables)]
        means.append(f"{name} {joined(values)}")
    questions = sorted({cell["n"] for row in tables["majority"].values() for cell in row.values()})
    yield Figure(
        "accuracy",
        "Accuracy by size and algorithm",
        f"{plural(len(tables['majority']), 'algorithm')}; {span(questions)} questions per size, the same for all "
        "variants. Correct: the final answer, letter by letter. Bars: Wilson's 95% intervals. Grey: always the most "
        "frequent answer. Dotted: the largest size trained on.",
        "Accuracy of final answers in percent against problem size, a panel for each algorithm; means: "
        f"{'; '.join(means)}.",
        partial(_accuracy_chart, tables),
    )
    if curves := {name: one["curve"] for name, one in _training(tables).items() if one["curve"]}:
        ends = joined([f"{name} {curve[-1][1]:.3f}" for name, curve in curves.items()])
        same = "" if _differing_settings(tables) else " All variants see the same examples in the same order."
        yield Figure(
            "curve",
            f"Training loss at the end: {ends} nats per answer token",
            f"Cross-entropy of the answers; each point is the mean of a few steps.{same}",
            f"Training loss against the step, a line for each variant; at the end {ends}.",
            partial(_curve_chart, tables, curves),
        )


_MAJORITY = "most frequent answer"


def _accuracy_chart(tables: Tables) -> Any:
    styles = charts.styles_of(variants(tables)) | {_MAJORITY: charts.Style(charts.PALE, charts.LINE)}
    tips = charts.tooltip(variant="variant", x="n|,", y="accuracy (%)|.1f", low="95% from|.1f", high="to|.1f")
    panels = []
    for name, cells in tables["majority"].items():
        known = [int(n) for n in sizes(cells)]
        rows = [
            {"variant": variant, "x": int(n), "y": cell["mean"], "low": cell["low"], "high": cell["high"]}
            for variant in variants(tables)
            for n, cell in tables["accuracy"][variant][name].items()
        ]
        rows += [{"variant": _MAJORITY, "x": int(n), "y": cell["mean"]} for n, cell in cells.items()]
        trained = max(tables["setting"]["sizes"][name]["trained"], default=0)
        marks = charts.rule("x", trained) if known[0] <= trained < known[-1] else []
        margin = 0.06 * max(1, known[-1] - known[0])
        x = charts.axis("x", "n", (known[0] - margin, known[-1] + margin), values=known, format=",d", grid=False)
        plot = charts.Plot(x, charts.percent_axis(""), styles, tips)
        panels.append(charts.panel(name.replace("_", " "), *marks, *plot.all(rows, size=18.0), height=120))
    return charts.figure(*panels, columns=5, minimum=165, around=46, names=list(styles))


def _curve_chart(tables: Tables, curves: Mapping[str, Any]) -> Any:
    alt = charts.altair()
    styles = {
        name: charts.Style(style.colour, charts.LINE) for name, style in charts.styles_of(variants(tables)).items()
    }
    rows = [
        {"variant": name, "x": step, "y": max(loss, 1e-6)} for name, curve in curves.items() for step, loss in curve
    ]
    y = alt.Y("y:Q", title="loss (nats), log scale", scale=alt.Scale(type="log"), axis=alt.Axis(tickCount=5))
    tips = charts.tooltip(variant="variant", x="step|,", y="loss|.3f")
    plot = charts.Plot(charts.axis("x", "step", grid=False), y, styles, tips)
    panel = charts.panel("", *plot.lines(rows, width=1.3), plot.hover(rows))
    return charts.figure(panel, columns=1, names=list(styles))


def _method(tables: Tables) -> list[str]:
    setting, data = tables["setting"], tables["setting"]["data"]
    source = f"the file {data['dataset']}"
    if not data["dataset"]:
        trained = [_training(tables).get(name) for name in variants(tables)]
        unseen = all(one is not None and one["setting"]["data"]["dataset"] is None for one in trained)
        source = "CLRS-Text's own generators" + ("; none occurs in training" if unseen else "")
    steps = " The answer lists the steps of the algorithm before the result." if data.get("trace", False) else ""
    names = group_names(tables)
    return [
        f"{plural(len(variants(tables)), 'variant')} answered {plural(setting['questions']['count'], 'question')} "
        f"of {plural(len(tables['majority']), 'algorithm')} as text, from {source}.{steps} Decoding is greedy, in "
        f"{setting['dtype']} on {setting['device']}, under the policy saved with the model. Weights are "
        "softmax(β·s); a policy is a rule for β, in training and in testing.",
        f"{capital(names[IN])} and {names[OUT]} are averaged separately.",
    ]


def _variants(tables: Tables) -> Pairs:
    found = []
    for name in variants(tables):
        about, one = tables["setting"]["arms"][name], _training(tables).get(name)
        words = [f"{about['model']}, {about['describe']}"]
        if one is None:
            words.append(plural(about["steps"], "step") if about["trained"] else "not trained")
        else:
            setting, pace = one["setting"], one["speed"].get("tokens_per_second")
            words.append(
                f"{plural(setting['steps'], 'step')} of {count(setting['batch_tokens'])} tokens, "
                f"{setting['epochs']:.3g} epochs of {count(setting['examples']['count'])} examples, in "
                f"{setting['dtype']}" + (f", at {count(pace)} tokens/s" if pace else "")
            )
        if pace := tables["speed"][name]["tokens_per_second"]:
            words.append(f"answers at {count(pace)} tokens/s")
        found.append((name, "; ".join(words)))
    return found
