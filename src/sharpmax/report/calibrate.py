"""The page of `sharpmax calibrate`: which heads a policy modifies, what it gains and what it costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from sharpmax.report import charts
from sharpmax.report.tables import Cell, Figure, Metric, Part, Report, Table, Tables, sizes, table_of
from sharpmax.report.words import count, percent, points, share, text_name

_SMALLEST_BETA = 1e-3
_MIN_COLOUR = 0.05
"""The smallest |ln β| of a full colour, so that noise does not look like a policy."""


def report(tables: Tables) -> Report:
    """The contents of a page of `sharpmax calibrate`."""
    setting, chosen = tables["setting"], tables["candidates"][tables["chosen"]]
    betas = [beta for layer in tables["heads"]["betas"] for beta in layer]
    up, down = sum(beta > 1.0 for beta in betas), sum(beta < 1.0 for beta in betas)
    title = f"Heads: {count(up)} sharpened (β > 1), {count(down)} softened, {count(len(betas) - up - down)} unchanged"
    caption = f"{setting['model']}; policy {tables['chosen']}. Colour: ln β at a row of typical length."
    notes, before = [], tables.get("before")
    if before is not None and chosen.get("nll") is not None and chosen["nll"] >= before["nll"]:
        change = f"{before['nll']:.3f} → {chosen['nll']:.3f} nats"
        notes.append(f"The policy does not improve the loss of the answers ({change}): do not use it.")
    if tables.get("best_foldable") is None:
        notes.append("No candidate can be folded into the weights.")
    figure = Figure("heads", title, caption, partial(_betas_chart, tables))
    part = Part("results", str(setting["model"]), list(_metrics(tables)), [figure], [_candidates(tables)])
    return Report("calibrate", [part], notes)


def _allowed(setting: Mapping[str, Any], domain: str) -> float:
    """Return the KL limit of a domain; that of the held-out domain is larger."""
    held_out = domain.partition("/")[0] == setting["held_out"]
    return float(setting["budget"]) * (float(setting["held_out_factor"]) if held_out else 1.0)


def _metrics(tables: Tables) -> Iterator[Metric]:
    """Validation accuracy, the largest change of perplexity, and modified heads."""
    name, setting = tables["chosen"], tables["setting"]
    chosen, table = tables["candidates"][name], tables.get("validation") or {}
    label = f"validation accuracy ({setting['task']})"
    if name in table and len(table) > 1:
        rows = [next(iter(table.values())), table[name]]
        n = [n for n in sizes(rows[0]) if n in rows[1]][-1]
        after = " → ".join(percent(row[n]["mean"]) for row in rows)
        yield Metric(after, f"{label} at n = {count(n)}", f"baseline → {name}")
    else:
        yield Metric(percent(chosen["validation"]), label, name)
    costs, limit = chosen["kl"], f"the budget of {setting['budget']:g} nats per token"
    worst = max(costs, key=lambda domain: costs[domain] / _allowed(setting, domain))
    rise = f"{points(max(chosen['rise'].values()), 2)}%"
    cost = f"KL divergence {points(costs[worst], 4)} on {text_name(worst)}"
    if costs[worst] <= _allowed(setting, worst):
        yield Metric(rise, "largest change of perplexity", f"{cost}, within {limit}")
    else:
        yield Metric(f"{rise}, over {limit}", "largest change of perplexity", cost)
    total = count(int(setting["layers"]) * int(setting["heads"]))
    yield Metric(f"{count(chosen['modified'])} of {total}", "heads modified", "no weight is changed")


def _candidates(tables: Tables) -> Table:
    """One row per candidate: accuracy, cost on every domain, and whether it can be folded."""
    table, setting = tables["candidates"], tables["setting"]
    rows: list[list[Any]] = []
    for name, about in table.items():
        chosen = name == tables["chosen"]
        rows.append([Cell(name, "chosen" if chosen else "", chosen), Cell(share(about["validation"]), strong=chosen)])
        for column, cost in about["kl"].items():
            over = "; over budget" if cost > _allowed(setting, column) else ""
            rows[-1].append(Cell(points(cost, 4), f"{points(about['rise'][column], 2)}%{over}"))
        foldable = "yes" if about["foldable"] else "no"
        rows[-1] += [foldable, str(about["kind"]), f"{about['strength']:.2f}", count(about["modified"])]
    costs = [f"{text_name(one)}|KL divergence" for one in table[tables["chosen"]]["kl"]]
    return table_of(
        "Policies",
        f"Accuracy on validation prompts; change of KL divergence on each text (budget {setting['budget']:g} nats per "
        "token). A foldable policy can be written into the weights, at no cost at run time.",
        ["policy", "accuracy|%", *costs, "foldable", "kind", "strength", "heads"],
        rows,
    )


def _betas_chart(tables: Tables) -> Any:
    rows = [
        {"x": head, "y": layer, "value": math.log(max(beta, _SMALLEST_BETA)), "beta": beta}
        for layer, values in enumerate(tables["heads"]["betas"])
        for head, beta in enumerate(values)
    ]
    edge = max([_MIN_COLOUR, *(abs(row["value"]) for row in rows)])
    tips = charts.tooltip(y="layer", x="head", beta="β|.3f")
    panel = charts.heat_panel("", rows, "head", "layer", "ln β", domain=(-edge, edge), tips=tips, diverging=True)
    return charts.figure(panel, columns=1)
