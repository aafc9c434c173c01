"""The page of `sharpmax calibrate`: which heads a policy modifies, what it gains and what it costs."""

from __future__ import annotations

import math
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
    cells,
    header,
    interval,
    size_table,
    sizes,
)
from sharpmax.report.words import baseline, count, percent, points, share, text_name, texts_in_order

_SMALLEST_BETA = 1e-3
_MIN_COLOUR = 0.05
"""The least |ln β| that full colour stands for, so that noise does not look like a policy."""

_SHOWN_HEADS = 20


def matches(tables: Tables) -> bool:
    """Whether these are tables of `sharpmax calibrate`."""
    return "candidates" in tables


def report(tables: Tables) -> Report:
    """The page's contents."""
    setting = tables["setting"]
    figures, details = list(_figures(tables)), list(_details(tables))
    part = Part("results", str(setting["model"]), _metrics(tables), figures, [candidates_table(tables)], details)
    about = {"setting": setting, "by_kl": by_kl(tables)}
    return Report("calibrate", headline(tables), [part], list(notes(tables)), about=about)


def by_kl(tables: Tables) -> bool:
    """Whether the budget is a KL divergence; in earlier results it is a rise of perplexity in percent."""
    return "budget" in tables["setting"]


def budget(tables: Tables, column: str | None = None) -> float:
    """The budget of a domain, in nats per token or in percent of perplexity."""
    setting = tables["setting"]
    if not by_kl(tables):
        return float(setting["leash"])
    held_out = column is not None and column.partition("/")[0] == setting.get("held_out")
    return float(setting["budget"]) * (float(setting["held_out_factor"]) if held_out else 1.0)


def _costs(tables: Tables, candidate: Mapping[str, Any]) -> Mapping[str, float]:
    """What the budget limits, by domain: divergence, or the rise of perplexity."""
    found: Mapping[str, float] = candidate["kl" if by_kl(tables) else "rise"]
    return found


def worst(tables: Tables, candidate: Mapping[str, Any]) -> tuple[str, float]:
    """The domain that uses most of its budget, and its divergence or rise of perplexity."""
    found = _costs(tables, candidate)
    column = max(texts_in_order(found), key=lambda name: found[name] / budget(tables, name))
    return column, float(found[column])


def _cost_words(tables: Tables, value: float) -> str:
    return f"{value:.4f} nats" if by_kl(tables) else f"{points(value, 2)}%"


def _budget_words(tables: Tables) -> str:
    return f"{budget(tables):g} nats per token" if by_kl(tables) else f"{budget(tables):g}%"


def _measure(tables: Tables) -> str:
    return "KL divergence" if by_kl(tables) else "perplexity"


def _total(tables: Tables) -> str:
    return count(int(tables["setting"]["layers"]) * int(tables["setting"]["heads"]))


def headline(tables: Tables) -> list[str]:
    """The answer in numbers: validation accuracy, perplexity and modified heads."""
    chosen, task = tables["candidates"][tables["chosen"]], str(tables["setting"]["task"])
    task = "many formats" if task == "training,control" else task
    accuracy = f"Validation accuracy ({task}): {percent(chosen['validation'])}."
    table = tables.get("validation") or {}
    if tables["chosen"] in table and len(table) > 1:
        before, after = table[next(iter(table))], table[tables["chosen"]]
        n = [n for n in sizes(before) if n in after][-1]
        accuracy = f"Accuracy at n = {count(n)} ({task}): {percent(before[n]['mean'])} → {percent(after[n]['mean'])}."
    rise = points(max(chosen["rise"].values()), 2)
    column, cost = worst(tables, chosen)
    kept = "within" if cost <= budget(tables, column) else "over"
    heads = f"{count(chosen['touched'])} of {_total(tables)} heads modified."
    return [f"{accuracy} Perplexity {rise}% at most, {kept} the budget of {_budget_words(tables)}. {heads}"]


def notes(tables: Tables) -> Iterator[str]:
    """Whether the policy is worth using, and what can be folded into the weights."""
    chosen, before = tables["candidates"][tables["chosen"]], tables.get("before")
    if before is not None and chosen.get("nll") is not None and chosen["nll"] >= before["nll"]:
        yield (
            f"The policy does not improve the loss of the answers ({before['nll']:.3f} → {chosen['nll']:.3f} nats): do "
            "not use it."
        )
    name = tables.get("best_foldable")
    if name is None:
        yield "No candidate can be folded into the weights."
    else:
        accuracy = percent(tables["candidates"][name]["validation"])
        yield f"Best policy to fold into the weights, at no cost in any engine: {name}, validation accuracy {accuracy}."


def _metrics(tables: Tables) -> list[Metric]:
    chosen, name = tables["candidates"][tables["chosen"]], tables.get("best_foldable")
    column, cost = worst(tables, chosen)
    detail = f"{text_name(column)}; budget {_budget_words(tables)}"
    found = [
        Metric(percent(chosen["validation"]), "validation accuracy", f"policy {tables['chosen']}"),
        Metric(_cost_words(tables, cost), f"largest change: {_measure(tables)}", detail),
        Metric(f"{count(chosen['touched'])} of {_total(tables)}", "heads modified", "no weight is changed"),
    ]
    if name is not None:
        accuracy = percent(tables["candidates"][name]["validation"])
        found.append(Metric(accuracy, "best foldable policy", f"{name}, validation accuracy, no cost"))
    return found


def candidates_table(tables: Tables) -> Table:
    """One row per trained policy: accuracy, cost on every domain, and whether it can be folded."""
    table = tables["candidates"]
    known = texts_in_order(column for about in table.values() for column in about["rise"])
    rows = []
    for name, about in table.items():
        chosen, costs = name == tables["chosen"], []
        for column in known:
            cost = _costs(tables, about).get(column)
            over = ["over budget"] if cost is not None and cost > budget(tables, column) else []
            small = [f"{points(about['rise'][column], 2)}%"] if cost is not None and by_kl(tables) else []
            text = "" if cost is None else f"{cost:.4f}" if by_kl(tables) else points(cost, 2)
            costs.append(Cell(text, "; ".join([*small, *over])) if text else EMPTY)
        first = Cell(name, "chosen" if chosen else "", strong=chosen)
        heads = cells(str(about["kind"]), f"{about['strength']:.2f}", count(about["touched"]))
        foldable = Cell("yes" if about["foldable"] else "no")
        rows.append([first, Cell(share(about["validation"]), strong=chosen), *costs, foldable, *heads])
    columns = [f"{'KL; perplexity' if by_kl(tables) else 'perplexity (%)'}|{text_name(one)}" for one in known]
    return Table(
        "Policies",
        f"Accuracy on validation prompts; change of {_measure(tables)} on each text (budget {_budget_words(tables)}). "
        "A foldable policy can be written into the weights and then costs nothing.",
        header("policy", "accuracy|%", *columns, "foldable", "kind", "strength", "heads"),
        rows,
    )


def _details(tables: Tables) -> Iterator[Table]:
    if table := tables.get("validation"):

        def cell(value: Mapping[str, Any]) -> Cell:
            return Cell(share(value["mean"]), interval({"low": None} | dict(value)))

        note = f"Task {tables['setting']['task']}; prompts that were not used in training."
        rows = {baseline(name): row for name, row in table.items()}
        yield size_table("Validation accuracy (%) by size", note, rows, cell)
    if modified := tables["heads"]["touched"]:
        shown = modified[:_SHOWN_HEADS]
        note = f"{len(shown)} of {count(len(modified))}, the largest changes first. β at a row of typical length."
        lines = [cells(f"{layer}.{head}", f"{beta:.2f}", str(rule)) for layer, head, rule, beta in shown]
        yield Table("Modified heads", note, cells("layer.head", "β", "rule"), lines)


def _figures(tables: Tables) -> Iterator[Figure]:
    model, betas = tables["setting"]["model"], [beta for layer in tables["heads"]["betas"] for beta in layer]
    up, down = sum(beta > 1.0 for beta in betas), sum(beta < 1.0 for beta in betas)
    title = f"Heads: {count(up)} sharpened (β > 1), {count(down)} softened, {count(len(betas) - up - down)} unchanged"
    caption = f"{model}; policy {tables['chosen']}. Colour: ln β at a row of typical length."
    yield Figure("heads", title, caption, f"{title}, layers down and heads across.", partial(_heads, tables))
    caption = (
        f"{model}. Loss of the correct answers on training prompts; change of {_measure(tables)}; dashed: the budget."
    )
    yield Figure("curve", "Training", caption, "Loss and cost against the training step.", partial(_curve, tables))


def _heads(tables: Tables) -> Any:
    rows = [
        {"x": head, "y": layer, "value": math.log(max(beta, _SMALLEST_BETA)), "beta": beta}
        for layer, values in enumerate(tables["heads"]["betas"])
        for head, beta in enumerate(values)
    ]
    edge = max([_MIN_COLOUR, *(abs(row["value"]) for row in rows)])
    tips = charts.tooltip(y="layer", x="head", beta="β|.3f")
    panel = charts.heat_panel("", rows, "head", "layer", "ln β", domain=(-edge, edge), tips=tips, diverging=True)
    return charts.figure(panel, columns=1)


def _curve(tables: Tables) -> Any:
    lines, prefix = tables["curve"], "kl/" if by_kl(tables) else "rise/"
    known = texts_in_order(name.removeprefix(prefix) for name in lines if name.startswith(prefix))
    names = ["loss", *map(text_name, known)]
    styles = {name: charts.Style(charts.style_at(place).colour, charts.LINE) for place, name in enumerate(names)}
    x = charts.axis("x", "step", grid=False)

    def panel(title: str, y: str, columns: Mapping[str, str], under: Any) -> Any:
        rows = [
            {"variant": name, "x": step, "y": value}
            for name, column in columns.items()
            for step, value in lines[column]
        ]
        return charts.lines_panel(title, rows, x, charts.axis("y", y), styles, under=under)

    panels = [panel("Loss on the task", "loss (nats)", {"loss": "nll"}, [])]
    if known:
        marks = [*charts.rule("y", 0.0), *charts.rule("y", budget(tables), f"budget {_budget_words(tables)}")]
        unit = "nats per token" if by_kl(tables) else "%"
        columns = {text_name(column): prefix + column for column in known}
        panels.append(panel(f"Change of {_measure(tables)}", f"{_measure(tables)} ({unit})", columns, marks))
    return charts.figure(*panels, names=names)
