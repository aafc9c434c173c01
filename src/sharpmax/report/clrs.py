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
    cell_of,
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
    each = present(means_table(tables), gains_table(tables))
    if _seeds(tables):
        main, folded = [seeds_table(tables), seeds_by_algorithm(tables)], each
    else:
        main, folded = each, [algorithms_table(tables)]
    main += present(entropy_table(tables))
    part = Part("results", "CLRS-Text", metrics(tables), list(_figures(tables)), main, folded)
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


def seeds_by_algorithm(tables: Tables) -> Table:
    """Means over seeds of every algorithm, in the last group of sizes with those trained on below."""
    names, known = group_names(tables), groups(tables)
    rows = []
    for algorithm in tables["majority"]:
        row = [Cell(algorithm.replace("_", " "))]
        for trained in _seeds(tables).values():
            cells = [[tables["by_algorithm"][one][algorithm].get(group) for one in trained] for group in known]
            means = [NOTHING if None in of else share(sum(c["mean"] for c in of) / len(of)) for of in cells]
            row.append(Cell(means[-1], means[0] if len(means) > 1 else ""))
        rows.append(row)
    note = f"Large: {names[known[-1]]}; small: {names[known[0]]}. Means over seeds."
    return Table("Accuracy (%) by algorithm", note, [Cell("algorithm"), *map(Cell, _seeds(tables))], rows)


def seeds_table(tables: Tables) -> Table:
    """Means over seeds of every variant."""
    seeds, names, known = _seeds(tables), group_names(tables), groups(tables)
    first = next(iter(seeds.values()))
    rows = []
    for name, trained in seeds.items():
        row = [Cell(name)]
        for group in known:
            mean, each = _over_seeds(tables, trained, group)
            row.append(Cell(share(mean), " · ".join(map(share, each))))
        gains = [_over_seeds(tables, [one], known[-1])[0] - _over_seeds(tables, [other], known[-1])[0]
                 for one, other in zip(trained, first, strict=True)]  # fmt: skip
        gain = Cell(points(sum(gains) / len(gains)), " · ".join(map(points, gains)))
        rows.append([*row, EMPTY if trained == first else gain])
    head = [Cell("variant"), *(Cell(names[group]) for group in known), Cell("gain (points)", names[known[-1]])]
    note = "Below each mean, every seed. Gains are over the first variant with the same seed."
    return Table("Accuracy (%): means over algorithms and seeds", note, head, rows)


def entropy_table(tables: Tables) -> Table | None:
    """Entropy of attention where answers begin, by size; the mean over seeds where there are several."""
    if "entropy" not in tables:
        return None
    known = list(next(iter(tables["entropy"].values())))
    rows = []
    for name, trained in (_seeds(tables) or {name: [name] for name in variants(tables)}).items():
        means = [sum(tables["entropy"][one][size] for one in trained) / len(trained) for size in known]
        rows.append([Cell(name), *(Cell(f"{mean:.3f}") for mean in means)])
    note = "H / ln n of the row that gives the first token of an answer, mean over heads, layers and questions."
    return Table("Entropy of attention by size", note, [Cell("variant"), *map(Cell, known)], rows)


def means_table(tables: Tables) -> Table:
    """Mean accuracy of every variant, of final answers and of whole texts."""
    names = group_names(tables)
    columns = [("means", "final answer", group) for group in groups(tables)]
    if not tables["setting"].get("scored"):
        columns += [("means_exact", "whole text", group) for group in groups(tables)]
    plain = tables["means"][base(tables)]
    counted = {group: plural(plain[group]["algorithms"], "algorithm") for group in groups(tables)}
    return Table(
        "Accuracy (%): means over algorithms",
        "Every algorithm has the same weight, and every size of it. 95% bootstrap intervals. The final answer is "
        "what follows the steps, where steps are asked for; the whole text includes them.",
        [Cell("variant"), *(Cell(f"{what}, {names[group]}", counted[group]) for _, what, group in columns)],
        [
            [Cell(name), *(mean_cell(tables[table][name][group]) for table, _, group in columns)]
            for name in variants(tables)
        ],
    )


def gains_table(tables: Tables) -> Table | None:
    """What every variant gains over the base on the same questions."""
    if not others(tables):
        return None
    names, known = group_names(tables), groups(tables)
    last = known[-1]
    rows = []
    for name in others(tables):
        row = [Cell(name), *(cell for group in known for cell in _gain(tables["gains"][name][group]))]
        single = [significant(one[last]) for one in tables["gains_by_algorithm"][name].values() if last in one]
        rows.append([*row, Cell(f"{single.count(1)} better, {single.count(-1)} worse", f"of {len(single)}")])
    return Table(
        f"Gain over {base(tables)} (points)",
        f"On the same questions: + correct with the variant only, − with {base(tables)} only. {_SIGNIFICANT}",
        [
            Cell("variant"),
            *(Cell(title) for group in known for title in (names[group], "questions")),
            Cell("algorithms", f"significant, {names[last]}"),
        ],
        rows,
    )


def algorithms_table(tables: Tables) -> Table:
    """Every algorithm, sorted by the gain of the leading variant in the last group of sizes."""
    names, known, variant = group_names(tables), groups(tables), lead(tables)
    last = known[-1]
    table, gains = tables["by_algorithm"], tables["gains_by_algorithm"]

    def rank(name: str) -> tuple[bool, float]:
        cell = (table[base(tables)] if variant is None else gains[variant])[name].get(last)
        return cell is None, 0.0 if cell is None else -cell["mean"]

    rows = []
    for name in sorted(tables["majority"], key=rank):
        accuracy = [_short(table[one][name].get(group)) for group in known for one in variants(tables)]
        tests = [_test(gains[one][name].get(last)) for one in others(tables)]
        frequent = majority(tables, name, last)
        guess = Cell(NOTHING if frequent is None else share(frequent), faint=True)
        rows.append([Cell(name.replace("_", " ")), *accuracy, *tests, guess])
    order = f"the gain of {variant}" if variant else "accuracy"
    return Table(
        "Accuracy of final answers (%) by algorithm",
        f"Sorted by {order} at {names[last]}. {_SIGNIFICANT if variant else ''} Most frequent: accuracy at "
        f"{names[last]} of always giving the most frequent answer.",
        [
            Cell("algorithm"),
            *(Cell(one, names[group]) for group in known for one in variants(tables)),
            *(Cell(f"gain of {one}", names[last]) for one in others(tables)),
            Cell("most frequent", names[last]),
        ],
        rows,
    )


def _short(cell: Mapping[str, Any] | None) -> Cell:
    return cell_of(None if cell is None else cell["mean"], share)


def _starred(cell: Mapping[str, Any], small: str) -> Cell:
    sure = bool(significant(cell))
    return Cell(points(cell["mean"]) + ("*" if sure else ""), small, strong=sure)


def _test(cell: Mapping[str, Any] | None) -> Cell:
    return EMPTY if cell is None else _starred(cell, probability(cell["p"]))


def _gain(cell: Mapping[str, Any]) -> tuple[Cell, Cell]:
    return (
        _starred(cell, f"{points(cell['low'])} to {points(cell['high'])}"),
        Cell(f"+{count(cell['gained'])} −{count(cell['lost'])}", probability(cell["p"])),
    )


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
