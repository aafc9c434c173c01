"""The page of `sharpmax calibrate`: which heads a policy modifies, what it gains and what it costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from sharpmax.report import charts
from sharpmax.report.tables import EMPTY, Cell, Figure, Metric, Part, Report, Table, Tables, cells, present, sizes
from sharpmax.report.words import (
    baseline,
    count,
    joined,
    percent,
    points,
    share,
    text_name,
    texts_in_order,
)  # fmt: skip

_SMALLEST_BETA = 1e-3
_MIN_COLOUR = 0.05
"""The least |ln β| that full colour stands for, so that noise does not look like a policy."""

_SHOWN_HEADS = 60


def matches(tables: Tables) -> bool:
    """Whether these are tables of `sharpmax calibrate`."""
    return "candidates" in tables


def report(tables: Tables) -> Report:
    """The page's contents."""
    setting = tables["setting"]
    part = Part(
        "results", str(setting["model"]), metrics(tables), _figures(tables), [candidates_table(tables)],
        present(validation_table(tables), heads_table(tables)),
    )  # fmt: skip
    known = sorted(setting["sizes"])
    ends = " to ".join(dict.fromkeys((count(known[0]), count(known[-1]))))
    method = [
        f"A rule for the inverse temperature β of each attention head of {setting['model']} was trained for "
        f"{count(setting['steps'])} steps on the task {setting['task']} at sizes {ends}; the weights of the model "
        "are frozen.",
        f"Kinds of policies: {joined([str(kind) for kind in setting['kinds']])}. {_rule(tables)}",
    ]
    return Report("calibrate", headline(tables), [part], notes(tables), method)


def _rule(tables: Tables) -> str:
    if not by_kl(tables):
        return (
            f"The policy with the best validation accuracy within the budget is chosen: perplexity may rise by at most "
            f"{budget(tables):g}% on held-out text and on the model's own answers."
        )
    held_out, factor = tables["setting"]["held_out"], tables["setting"]["held_out_factor"]
    return (
        "The policy with the lowest loss on validation prompts within the budget is chosen: the KL divergence from the "
        f"baseline's predictions is at most {budget(tables):g} nats per token on each domain, measured on text that "
        f"was not trained on, and {factor:g} times that on {held_out}, which was not at all."
    )


def by_kl(tables: Tables) -> bool:
    """Whether the budget is a KL divergence; in earlier results it is a rise of perplexity in percent."""
    return "budget" in tables["setting"]


def budget(tables: Tables) -> float:
    """The budget, in nats per token or in percent of perplexity."""
    setting = tables["setting"]
    return float(setting["budget"] if by_kl(tables) else setting["leash"])


def _limit(tables: Tables, column: str | None = None) -> float:
    held_out = column is not None and column.partition("/")[0] == tables["setting"].get("held_out")
    return budget(tables) * (tables["setting"]["held_out_factor"] if held_out else 1.0)


def _shown(tables: Tables, value: float) -> str:
    return f"{value:.4f}" if by_kl(tables) else f"{points(value, 2)}%"


def _budget_shown(tables: Tables) -> str:
    return f"{budget(tables):g} nats per token" if by_kl(tables) else f"{budget(tables):g}%"


def _measure(tables: Tables) -> str:
    return "KL divergence" if by_kl(tables) else "perplexity"


def costs(tables: Tables, candidate: Mapping[str, Any]) -> Mapping[str, float]:
    """What the budget limits, by domain: divergence, or the rise of perplexity."""
    found: Mapping[str, float] = candidate["kl" if by_kl(tables) else "rise"]
    return found


def worst(tables: Tables, candidate: Mapping[str, Any]) -> tuple[str, float]:
    """The domain that uses most of its budget, and its divergence or rise of perplexity."""
    found = costs(tables, candidate)
    column = max(texts_in_order(found), key=lambda name: found[name] / _limit(tables, name))
    return column, float(found[column])


def _task_name(tables: Tables) -> str:
    task = str(tables["setting"]["task"])
    return "many formats" if task == "training,control" else task


def _total(tables: Tables) -> int:
    return int(tables["setting"]["layers"]) * int(tables["setting"]["heads"])


def _ends(tables: Tables) -> tuple[str, Mapping[str, Any], Mapping[str, Any]] | None:
    """The largest size of the validation, with the baseline's and the chosen policy's cells there."""
    table = tables.get("validation") or {}
    if len(table) < 2 or tables["chosen"] not in table:
        return None
    before, after = table[next(iter(table))], table[tables["chosen"]]
    shared = [n for n in sizes(before) if n in after]
    return (shared[-1], before[shared[-1]], after[shared[-1]]) if shared else None


def headline(tables: Tables) -> list[str]:
    """The answer in numbers: validation accuracy, perplexity and modified heads."""
    chosen, task = tables["candidates"][tables["chosen"]], _task_name(tables)
    ends = _ends(tables)
    accuracy = f"Validation accuracy ({task}): {percent(chosen['validation'])}."
    if ends is not None:
        n, before, after = ends
        accuracy = f"Accuracy at n = {count(n)} ({task}): {percent(before['mean'])} → {percent(after['mean'])}."
    column, cost = worst(tables, chosen)
    kept = "budget" if cost <= _limit(tables, column) else "over the budget of"
    heads = f"{count(chosen['touched'])} of {count(_total(tables))} heads modified."
    named = "KL divergence up to" if by_kl(tables) else "Perplexity"
    paid = f"{named} {_shown(tables, cost)} ({kept} {_budget_shown(tables)})"
    if by_kl(tables):
        paid += f", perplexity {points(max(chosen['rise'].values()), 2)}% at most"
    return [f"{accuracy} {paid}. {heads}"]


def notes(tables: Tables) -> list[str]:
    """Whether the policy is worth using, and what can be folded into the weights."""
    chosen, before = tables["candidates"][tables["chosen"]], tables.get("before")
    found = []
    if before is not None and chosen.get("nll") is not None and chosen["nll"] >= before["nll"]:
        found.append(
            f"The policy does not improve the loss of the answers ({before['nll']:.3f} → {chosen['nll']:.3f} nats): "
            "do not use it."
        )
    name = tables.get("best_foldable")
    if name is None:
        found.append("No candidate can be folded into the weights.")
    elif name == tables["chosen"]:
        found.append("The chosen policy can be folded into the weights: any engine then runs it at no cost.")
    else:
        other = tables["candidates"][name]
        column, cost = worst(tables, other)
        found.append(
            f"The best policy to fold into the weights, at no cost in any engine: {name}, "
            f"{percent(other['validation'])} validation accuracy, {_measure(tables)} {_shown(tables, cost)} at most "
            f"({text_name(column)})."
        )
    return found


def metrics(tables: Tables) -> list[Metric]:
    """Accuracy, perplexity, heads, and the best policy to fold."""
    chosen = tables["candidates"][tables["chosen"]]
    column, cost = worst(tables, chosen)
    ends = _ends(tables)
    detail = tables["chosen"]
    if ends is not None:
        detail = f"at n = {count(ends[0])}: {percent(ends[1]['mean'])} → {percent(ends[2]['mean'])}"
    found = [
        Metric(percent(chosen["validation"]), "validation accuracy", detail),
        Metric(
            _shown(tables, cost),
            "largest KL divergence" if by_kl(tables) else "largest change of perplexity",
            f"{text_name(column)}; budget {_budget_shown(tables)}",
        ),
        Metric(f"{count(chosen['touched'])} of {count(_total(tables))}", "heads modified", "no weight is changed"),
    ]
    if (name := tables.get("best_foldable")) is not None:
        other = tables["candidates"][name]
        found.append(
            Metric(percent(other["validation"]), "best foldable policy", f"{name}, validation accuracy, no cost")
        )
    return found


def candidates_table(tables: Tables) -> Table:
    """One row per trained policy."""
    table = tables["candidates"]
    known = texts_in_order(column for about in table.values() for column in about["rise"])
    measured = (
        f"KL divergence (nats per token; budget {budget(tables):g}) and change of perplexity on each domain"
        if by_kl(tables)
        else f"change of perplexity on each text (budget {budget(tables):g}%)"
    )
    return Table(
        "Policies",
        f"Accuracy on validation prompts and {measured}. Bold: "
        "the chosen policy. A foldable policy can be written into the weights and then costs nothing.",
        [
            *cells("policy", "kind", "strength", "heads", "accuracy (%)"),
            *(Cell("KL; perplexity" if by_kl(tables) else "perplexity (%)", text_name(one)) for one in known),
            Cell("foldable"),
        ],
        [_candidate(tables, name, known) for name in table],
    )  # fmt: skip


def _candidate(tables: Tables, name: str, known: list[str]) -> list[Cell]:
    about, chosen = tables["candidates"][name], name == tables["chosen"]
    return [
        Cell(name, "chosen" if chosen else "", strong=chosen), Cell(str(about["kind"])),
        Cell(f"{about['strength']:.2f}"),
        Cell(count(about["touched"])), Cell(share(about["validation"]), strong=chosen),
        *(_cost(tables, about, column) for column in known),
        Cell("yes" if about["foldable"] else "no"),
    ]  # fmt: skip


def _cost(tables: Tables, about: Mapping[str, Any], column: str) -> Cell:
    cost = costs(tables, about).get(column)
    if cost is None:
        return EMPTY
    over = ["over budget"] if cost > _limit(tables, column) else []
    if by_kl(tables):
        return Cell(_shown(tables, cost), "; ".join([f"{points(about['rise'][column], 2)}%", *over]))
    return Cell(points(cost, 2), "".join(over))


def validation_table(tables: Tables) -> Table | None:
    """Accuracy on validation prompts, by size."""
    table = tables.get("validation")
    if not table:
        return None
    known = sizes(*table.values())
    return Table(
        "Validation accuracy (%) by size",
        f"Task {tables['setting']['task']}; prompts that were not used in training.",
        [Cell("variant"), *(Cell(f"n = {count(n)}") for n in known)],
        [[Cell(baseline(name)), *(_accuracy(row.get(n)) for n in known)] for name, row in table.items()],
    )


def _accuracy(cell: Mapping[str, Any] | None) -> Cell:
    if cell is None:
        return EMPTY
    return Cell(share(cell["mean"]), "" if cell.get("low") is None else f"{share(cell['low'])}–{share(cell['high'])}")


def heads_table(tables: Tables) -> Table | None:
    """The heads that the policy modifies, those it changes most first."""
    modified = tables["heads"]["touched"]
    if not modified:
        return None
    some = (
        f" The {_SHOWN_HEADS} with the largest change of {count(len(modified))}."
        if len(modified) > _SHOWN_HEADS
        else ""
    )
    return Table(
        "Modified heads",
        f"β at a row of typical length, and its rule; layers and heads count from 0.{some}",
        cells("layer", "head", "β", "rule"),
        [
            [Cell(count(layer)), Cell(count(head)), Cell(f"{beta:.2f}", strong=beta > 1.0), Cell(str(rule))]
            for layer, head, rule, beta in modified[:_SHOWN_HEADS]
        ],
    )


def _figures(tables: Tables) -> list[Figure]:
    betas = [value for layer in _log_betas(tables) for value in layer]
    up, down = sum(value > 0 for value in betas), sum(value < 0 for value in betas)
    counted = f"{count(up)} sharpened (β > 1), {count(down)} softened, {count(len(betas) - up - down)} unchanged"
    model, steps = tables["setting"]["model"], count(tables["setting"]["steps"])
    return [
        Figure(
            "heads", f"Heads: {counted}",
            f"{model}; policy {tables['chosen']}. One cell per attention head; colour is ln β at a "
            "row of typical length.", f"Heat map of ln β, layers across and heads down: {counted}.",
            partial(_heads, tables),
        ),
        Figure(
            "curve", "Training",
            f"{model}; {steps} steps. Loss of the correct answers on training prompts, and {_curve_name(tables)} "
            "against the baseline; dashed: the budget.",
            f"Loss on the task and {_curve_name(tables)} against the training step.",
            partial(_curve, tables),
        ),
    ]  # fmt: skip


def _log_betas(tables: Tables) -> list[list[float]]:
    return [[math.log(max(beta, _SMALLEST_BETA)) for beta in layer] for layer in tables["heads"]["betas"]]


def _heads(tables: Tables) -> Any:
    rows = [
        {"x": layer, "y": head, "value": value, "beta": math.exp(value)}
        for layer, values in enumerate(_log_betas(tables))
        for head, value in enumerate(values)
    ]
    edge = max([_MIN_COLOUR, *(abs(row["value"]) for row in rows)])
    tips = charts.tooltip(x="layer", y="head", beta="β|.3f")
    panel = charts.heat_panel("", rows, "layer", "head", "ln β", domain=(-edge, edge), tips=tips, diverging=True)
    return charts.figure(panel, columns=1)


def _curve_name(tables: Tables) -> str:
    return "KL divergence" if by_kl(tables) else "change of perplexity"


def _curve(tables: Tables) -> Any:
    lines = tables["curve"]
    prefix = "kl/" if by_kl(tables) else "rise/"
    known = texts_in_order(name.removeprefix(prefix) for name in lines if name.startswith(prefix))
    names = ["loss", *(text_name(column) for column in known)]
    styles = {name: charts.Style(charts.style_at(place).colour, charts.LINE) for place, name in enumerate(names)}
    x = charts.axis("x", "step", grid=False)

    def rows(label: str, values: Any) -> list[dict[str, Any]]:
        return [{"variant": label, "x": step, "y": value} for step, value in values]

    tips = charts.tooltip(variant="line", x="step|,", y="value|.3f")
    plot = charts.Plot(x, charts.axis("y", "loss (nats)"), styles, tips)
    panels = [
        charts.panel(
            "Loss on the task", *plot.lines(rows("loss", lines["nll"])), plot.hover(rows("loss", lines["nll"]))
        )
    ]
    if known:
        found = [row for column in known for row in rows(text_name(column), lines[prefix + column])]
        unit = "(nats per token)" if by_kl(tables) else "(%)"
        plot = charts.Plot(x, charts.axis("y", f"{_curve_name(tables)} {unit}"), styles, tips)
        marks = [*charts.rule("y", 0.0), *charts.rule("y", budget(tables), f"budget {_budget_shown(tables)}")]
        title = "KL divergence" if by_kl(tables) else "Perplexity"
        panels.append(charts.panel(title, *marks, *plot.lines(found), plot.hover(found)))
    return charts.figure(*panels, names=names)
