"""A calibration in plain sentences and a few numbers, each of them computed from its tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharpmax.report.calibrate.facts import chosen, kept, leash, total_heads, worst_rise
from sharpmax.report.tables import Tables, readable, sizes
from sharpmax.report.texts import text_name, texts_in_order
from sharpmax.report.tile import Tile
from sharpmax.report.words import count, joined, percent, points

__all__ = ["cost", "done", "folded", "found", "tiles"]


def done(tables: Tables) -> list[str]:
    """What was learned from what."""
    with readable("the summary", tables):
        setting = tables["setting"]
        known = sorted(setting["sizes"])
        ends = count(known[0]) if len(known) == 1 else f"{count(known[0])} to {count(known[-1])}"
        return [
            f"A rule for the temperature of each attention head of {setting['model']} was learned on the task "
            f"{setting['task']} with sizes of {ends}. No weight of the model was changed.",
            f"Kinds of rules that were tried: {joined([str(kind) for kind in setting['kinds']])}.",
            f"The leash: perplexity may rise by no more than {leash(tables):g}% on any of the texts it is measured on.",
        ]


def found(tables: Tables) -> list[str]:
    """What was chosen, and what it reaches."""
    with readable("the summary", tables):
        about = chosen(tables)
        said = [
            f"Chosen: {tables['chosen']} ({about['kind']}), which touches {count(about['touched'])} of "
            f"{count(total_heads(tables))} heads and is right in {percent(about['validation'])} of the validation "
            "prompts."
        ]
        before = tables.get("before")
        if before is not None and about["nll"] >= before["nll"]:
            said.append(
                "It does not answer better than the model as it comes (by the loss of the answers): do not use it."
            )
        return said + [sentence for sentence in [_change(tables)] if sentence]


def cost(tables: Tables) -> list[str]:
    """What the chosen policy costs, and whether the leash held."""
    with readable("the summary", tables):
        about = chosen(tables)
        columns = texts_in_order(about["rise"])
        listed = joined([f"{points(about['rise'][column], 2)}% on {text_name(column)}" for column in columns])
        held = "The leash holds" if kept(tables, about) else "The leash does not hold"
        return [f"Perplexity changes by {listed}. {held} ({leash(tables):g}%)."]


def folded(tables: Tables) -> list[str]:
    """The best policy that can be written into the weights."""
    with readable("the summary", tables):
        name = tables.get("best_foldable")
        if name is None:
            return ["No candidate can be folded into the weights."]
        if name == tables["chosen"]:
            return ["The chosen policy can be folded into the weights: any engine then runs it at no cost."]
        about = tables["candidates"][name]
        column, rise = worst_rise(about)
        return [
            f"The best policy that can be folded into the weights, and then costs nothing in any engine, is {name}: "
            f"right in {percent(about['validation'])} of the validation prompts, with a rise of at most "
            f"{points(rise, 2)}% (on {text_name(column)})."
        ]


def tiles(tables: Tables) -> list[Tile]:
    """Four numbers: heads, right answers, the rise and what can be folded."""
    about = chosen(tables)
    column, rise = worst_rise(about)
    limit = f"on {text_name(column)}; the leash is {leash(tables):g}%"
    parts = [
        Tile(f"{count(about['touched'])} of {count(total_heads(tables))}", "heads touched", "no weight is changed"),
        Tile(percent(about["validation"]), "right answers in validation", _before(tables)),
        Tile(f"{points(rise, 2)}%", "largest rise of perplexity", limit),
    ]
    if (name := tables.get("best_foldable")) is not None:
        other = tables["candidates"][name]
        detail = f"right answers of {name}, at no cost in any engine"
        parts.append(Tile(percent(other["validation"]), "best policy to fold into the weights", detail))
    return parts


def _ends(tables: Tables) -> tuple[str, Mapping[str, Any], Mapping[str, Any]] | None:
    """The largest size of the validation, and the cells there before and after."""
    table = tables.get("validation") or {}
    arms = list(table)
    if len(arms) < 2 or tables["chosen"] not in table:
        return None
    before, after = table[arms[0]], table[tables["chosen"]]
    shared = [n for n in sizes(before) if n in after]
    return (shared[-1], before[shared[-1]], after[shared[-1]]) if shared else None


def _change(tables: Tables) -> str:
    ends = _ends(tables)
    if ends is None:
        return ""
    n, before, after = ends
    return f"At size {count(n)} right answers go from {percent(before['mean'])} to {percent(after['mean'])}."


def _before(tables: Tables) -> str:
    ends = _ends(tables)
    return "" if ends is None else f"at size {count(ends[0])}: {percent(ends[1]['mean'])} → {percent(ends[2]['mean'])}"
